"""Keras on N processes has the history, weights and predictions of one, in float64, over ``keras_equality/cases.py``.

How equal, and why not more: as in ``test_equality.py``, sums come out in another order, a few units in the last place
each, and a few dozen steps carry that to 1e-13. 1e-10 leaves none for a wrong weight. All ranks agree to the last bit,
which the driver checks itself.
"""

from __future__ import annotations

import importlib.util
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from conftest import TESTS, names_in, run

pytestmark = pytest.mark.skipif(importlib.util.find_spec("tensorflow") is None, reason="needs TensorFlow")

CASES = tuple(names_in("keras_equality/cases.py", "case"))
# What the default run has time for: of every kind of model, of data and of loop one.
QUICK = (
    "mlp_numpy",
    "a_message_for_every_variable",
    "stops_early",
    "one_file",
    "a_generator",
    "cnn_batchnorm_synchronized",
    "transformer",
    "lstm",
    "two_inputs_two_outputs",
    "accumulated_gradients",
    "fewer_samples_than_ranks",
    "a_step_of_its_own",
    "gan",
    "a_loop_of_its_own",
    "a_contrastive_loss",
)

Ran = Callable[[int, tuple[str, ...]], tuple[Path, str]]


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """Cases on so many processes, started once for all tests."""
    folder = tmp_path_factory.mktemp("keras_equality")
    logs: dict[tuple[int, tuple[str, ...]], str] = {}

    def start(processes: int, names: tuple[str, ...]) -> tuple[Path, str]:
        if (processes, names) not in logs:
            result: subprocess.CompletedProcess[str] = run(
                processes, TESTS / "keras_equality/driver.py", str(folder), *names, timeout_s=600
            )
            logs[processes, names] = result.stdout + result.stderr
        return folder, logs[processes, names]

    return start


def require_equal(name: str, processes: int, names: tuple[str, ...], ran: Ran) -> None:
    found = []
    for size in (1, processes):
        folder, log = ran(size, names)
        path = folder / f"{name}.{size}.npz"
        found.append(dict(np.load(path)) if path.exists() else {})
        assert found[-1], f"the case ended early:\n{log[-6000:]}"
        assert f"of {name}\n" not in log, "the ranks do not agree to the last bit"
    one, many = found
    assert set(one) == set(many)
    for key, value in one.items():
        assert value.shape == many[key].shape, key
        scale = max(float(np.nanmax(np.abs(value), initial=0.0)), 1e-3)
        np.testing.assert_allclose(many[key], value, rtol=0, atol=1e-10 * scale, err_msg=key)


@pytest.mark.timeout(1300)
@pytest.mark.parametrize("name", QUICK)
def test_two_processes_have_the_history_of_one(name: str, ran: Ran) -> None:
    require_equal(name, 2, QUICK, ran)


@pytest.mark.full
@pytest.mark.timeout(1300)
@pytest.mark.parametrize("processes", [2, 3])
@pytest.mark.parametrize("name", CASES)
def test_n_processes_have_the_history_of_one(name: str, processes: int, ran: Ran) -> None:
    require_equal(name, processes, CASES, ran)
