"""N processes have the numbers of one, in float64, over every difficulty in ``equality/cases.py``.

How equal, and why not more: the sums of a batch are added in another order, which costs a few units in the last place
(1e-16) per addition; a few dozen steps carry that to 1e-14 or so. 1e-10 leaves room for an ill-conditioned step and
none for a wrong weight. All ranks agree to the last bit, which the driver checks itself.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from conftest import TESTS, names_in, run

CASES = names_in("equality/cases.py", "case")


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Future[tuple[Path, str]]]:
    """All cases on one process, under way: it has a core, and the others the rest."""
    with ThreadPoolExecutor(1) as pool:
        yield pool.submit(cases_on, 1, tmp_path_factory.mktemp("one"))


@pytest.fixture(scope="module", params=[pytest.param(2, marks=pytest.mark.full), 3])
def ran(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, one: Future[tuple[Path, str]]
) -> tuple[tuple[Path, str], tuple[Path, str]]:
    """All cases on one process and on so many, started once."""
    many = cases_on(request.param, tmp_path_factory.mktemp("many"))
    return one.result(), many


def cases_on(n: int, folder: Path) -> tuple[Path, str]:
    result: subprocess.CompletedProcess[str] = run(n, TESTS / "equality/driver.py", str(folder))
    return folder, result.stdout + result.stderr


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", CASES)
def test_n_processes_have_the_numbers_of_one(name: str, ran: tuple[tuple[Path, str], tuple[Path, str]]) -> None:
    for folder, log in ran:
        assert (folder / f"{name}.npz").exists(), f"the case ended early:\n{log[-6000:]}"
    one, many = (np.load(folder / f"{name}.npz") for folder, _ in ran)
    assert set(one) == set(many)
    for key in one:
        a, b = one[key], many[key]
        assert a.shape == b.shape, key
        scale = max(np.nanmax(np.abs(a), initial=0.0), 1e-3)
        np.testing.assert_allclose(b, a, rtol=0, atol=1e-10 * scale, err_msg=key)
