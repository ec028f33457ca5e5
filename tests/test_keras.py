"""Keras on N processes has the history, weights and predictions of one, in float64, over ``keras_equality/cases.py``.

How equal, and why not more: as in ``test_equality.py``, sums come out in another order, a few units in the last place
each, and a few dozen steps carry that to 1e-13. 1e-10 leaves none for a wrong weight. All ranks agree to the last bit.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import numpy as np
import pytest

from conftest import TESTS, names_in, run

pytest.importorskip("keras")
CASES = names_in("keras_equality/cases.py", "case")


@pytest.fixture(scope="module", params=[1, 2, pytest.param(3, marks=pytest.mark.full)])
def ran(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[int, Path, str]:
    """All cases on so many processes, started once."""
    folder = tmp_path_factory.getbasetemp() / "keras_equality"
    folder.mkdir(exist_ok=True)
    result: subprocess.CompletedProcess[str] = run(
        request.param, TESTS / "keras_equality/driver.py", str(folder), timeout_s=600
    )
    return request.param, folder, result.stdout + result.stderr


@pytest.mark.timeout(700)
@pytest.mark.parametrize("name", CASES)
def test_n_processes_have_the_history_of_one(name: str, ran: tuple[int, Path, str]) -> None:
    n, folder, log = ran
    mine = folder / f"{name}.{n}.npz"
    assert mine.exists(), f"the case ended early:\n{log[-6000:]}"
    one, many = np.load(folder / f"{name}.1.npz"), np.load(mine)
    assert set(one) == set(many)
    for key in one:
        a, b = one[key], many[key]
        assert a.shape == b.shape, key
        scale = max(np.nanmax(np.abs(a), initial=0.0), 1e-3)
        np.testing.assert_allclose(b, a, rtol=0, atol=1e-10 * scale, err_msg=key)
