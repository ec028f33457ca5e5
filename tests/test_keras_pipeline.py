"""A Keras model in a pipeline has the numbers of one process: every difficulty in ``keras_pipeline/cases.py``.

In float64. How equal, and why not more: a microbatch's part of a gradient is added after the others instead of within
one product, which rounds otherwise, some 1e-15 after a case's dozen steps. 1e-10 leaves room for an ill-conditioned
step and none for a wrong weight or a lost sample. All ranks agree to the last bit, which the driver checks itself.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from nearlinear.core.graph import Graph, Operator, Tensor

from conftest import TESTS, names_in, run

pytestmark = pytest.mark.skipif(importlib.util.find_spec("tensorflow") is None, reason="needs TensorFlow")

CASES = names_in("keras_pipeline/cases.py", "case")
ALONE = names_in("keras_pipeline/cases.py", "alone")  # equal where the batch is one microbatch
# What the default run has time for.
QUICK = (
    "mlp_with_skips",
    "two_inputs_two_outputs_a_shared_layer_and_a_nested_model",
    "subclassed_model",
    "embedding_whose_weights_the_last_layer_uses",
    "regularizers_of_weights_and_of_activity",
)

Ran = Callable[[int, int, tuple[str, ...]], tuple[Path, str]]


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """Cases on so many processes in so many microbatches, started once for all that a test may want of them."""
    folder = tmp_path_factory.mktemp("keras_pipeline")
    logs: dict[tuple[int, int, tuple[str, ...]], str] = {}

    def start(processes: int, microbatches: int, names: tuple[str, ...]) -> tuple[Path, str]:
        key = processes, microbatches, names
        if key not in logs:
            result: subprocess.CompletedProcess[str] = run(
                processes, TESTS / "keras_pipeline/driver.py", str(folder), str(microbatches), *names, timeout_s=1700
            )
            logs[key] = result.stdout + result.stderr
        return folder, logs[key]

    return start


def require_equal(name: str, processes: int, microbatches: int, names: tuple[str, ...], ran: Ran) -> None:
    found = []
    for size, pieces in ((1, 1), (processes, microbatches)):
        folder, log = ran(size, pieces, names)
        path = folder / f"{name}.{size}.{pieces}.npz"
        found.append(dict(np.load(path)) if path.exists() else {})
        assert found[-1], f"the case ended early:\n{log[-6000:]}"
    one, many = found
    assert set(one) == set(many)
    for key, value in one.items():
        assert value.shape == many[key].shape, key
        scale = max(float(np.abs(value).max(initial=0.0)), 1e-3)
        np.testing.assert_allclose(many[key], value, rtol=0, atol=1e-10 * scale, err_msg=key)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", QUICK)
def test_two_stages_have_the_numbers_of_one_process(name: str, ran: Ran) -> None:
    require_equal(name, 2, 4, QUICK, ran)


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("microbatches", [1, 4, 5])
@pytest.mark.parametrize("stages", [2, 3])
@pytest.mark.parametrize("name", CASES)
def test_any_number_of_stages_has_the_numbers_of_one_process(
    name: str, stages: int, microbatches: int, ran: Ran
) -> None:
    require_equal(name, stages, microbatches, tuple(CASES), ran)


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("stages", [2, 3])
@pytest.mark.parametrize("name", ALONE)
def test_one_microbatch_is_the_batch_for_layers_that_look_at_all_of_it(name: str, stages: int, ran: Ran) -> None:
    require_equal(name, stages, 1, tuple(ALONE), ran)


@pytest.mark.timeout(600)
def test_a_rank_holds_the_variables_of_its_stage_alone(tmp_path: Path) -> None:
    result = run(2, TESTS / "keras_pipeline/held.py", str(tmp_path))
    assert result.returncode == 0, result.stderr[-3000:]
    told = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1)]
    for each in told:
        assert each["live"] <= 1.15 * each["share"]
        assert each["share"] <= 1.15 * each["all"] / 2  # twelve layers that are alike
    assert (tmp_path / "2.keras").exists()


@pytest.mark.timeout(600)
def test_what_cannot_run_in_stages_is_refused_by_name_on_every_rank() -> None:
    result = run(2, TESTS / "keras_pipeline/refusals.py")
    assert result.returncode == 0, result.stdout + result.stderr[-3000:]
    names = names_in("keras_pipeline/refusals.py", "refusal")
    assert len(names) > 10
    for name in names:
        assert result.stdout.count(f"{name}: refused") == 2, result.stdout


@pytest.mark.timeout(600)
def test_a_killed_rank_is_named_and_ends_the_run() -> None:
    began = time.monotonic()
    result = run(2, TESTS / "keras_pipeline/killed.py", timeout_s=200)
    assert result.returncode != 0
    assert "rank 1" in result.stderr and "missing in" in result.stdout + result.stderr, result.stderr[-3000:]
    assert time.monotonic() - began < 150  # of which TensorFlow's start is most


def test_a_stage_is_made_for_every_rank_however_unequal() -> None:
    cuts = pytest.importorskip("nearlinear.tensorflow.pipeline.cuts")
    operators = tuple(Operator(name, forward=time) for name, time in (("a", 1.0), ("b", 9.0), ("c", 1.0), ("d", 0.5)))
    chain = Graph(operators, tuple(Tensor(place, (place + 1,), 4.0) for place in range(3)))
    assert cuts.stages_of(chain, 2, 1e9) in ([0, 0, 1, 1], [0, 1, 1, 1])
    assert cuts.stages_of(chain, 4, 1e9) == [0, 1, 2, 3]
    for stages in (2, 3, 4):
        found = cuts.stages_of(chain, stages, 1.0)  # links so slow that one stage would be fastest
        assert sorted(set(found)) == list(range(stages)) and found == sorted(found)


def test_a_split_tells_what_crosses_and_who_holds_what() -> None:
    module = pytest.importorskip("nearlinear.tensorflow.pipeline.split")
    # 0 -> a -> 1 -> b -> 2 -> c(2, 1) -> 3, and variable 0 is used by a and c
    steps = [([0], [1]), ([1], [2]), ([2, 1], [3])]
    found = module.split([0, 1, 2], steps, 1, [3, 1], [[0], [1], [0, 2]], {1, 2}, 4)
    assert found.between(0, 1) == [1] and found.between(0, 2) == [1] and found.between(1, 2) == [2]
    assert found.holders == ((0, 2), (1,), (2,), (0,))
    assert found.wanted == {2, 3}  # nothing before value 1 takes gradients
