"""A model in a pipeline has the numbers of one process: every difficulty in ``pipeline/cases.py``, in float64.

How equal, and why not more: a microbatch's part of a gradient is added after the others instead of within one product,
which rounds otherwise: a few units in the last place (1e-16) of the largest entry per addition, some 1e-14 after the
forty steps of a case. 1e-10 leaves room for an ill-conditioned step and none for a wrong weight or a lost sample. It is
relative to the largest entry of all gradients (of all parameters): the gradient of a key's bias in an attention is zero
but for rounding, and equals nothing but itself. Under bfloat16 every microbatch's part is rounded to 8 bits before it
is added. All ranks agree to the last bit, which the driver checks itself.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from nearlinear.core.plan import Plan

from conftest import TESTS, names_in, run

EVERYWHERE = names_in("pipeline/cases.py", "case")
WHOLE = names_in("pipeline/cases.py", "whole")  # where one pipeline sees the whole batch
FAMILIES = names_in("pipeline/families.py", "family")
# A mamba computes its scan in float32 (1e-7) whatever its parameters are in.
LIMITS = {"autocast_to_bfloat16": 3e-2, "mamba": 1e-5}
# What the default run has time for, two steps of each with every optimizer and number of microbatches, instead of five;
# the others are as different as the models of the family they stand beside.
QUICK = (
    "mlp_with_skips",
    "encoder_decoder_with_one_embedding_used_thrice",
    "lstm_with_a_mean_over_tokens_inside",
    "contrastive_loss_inside",
    "batches_of_ten_seven_three_and_one",
    "accumulation_clipping_and_a_scheduler",
    "a_loss_function_whose_calls_are_unlike",
    "what_rank_0_alone_reads",
    "frozen_unused_and_ignored",
    "buffers_that_count",
    "autocast_to_bfloat16",
)

# Of every kind of thing that a pass run again must not do twice: write buffers, draw, cast, add to gradients.
AGAIN = (
    "a_loss_function_whose_calls_are_unlike",
    "accumulation_clipping_and_a_scheduler",
    "frozen_unused_and_ignored",
    "buffers_that_count",
    "batch_norm_with_one_microbatch",
    "autocast_to_bfloat16",
    "dropout",
)

Key = tuple[int, Plan, tuple[str, ...]]  # processes, how they train, and the names of the cases


class Runs:
    """Cases on so many processes in so many stages, started once for all that a test may want of them.

    Args:
        make_folder: Makes a folder for what the cases note.
    """

    def __init__(self, make_folder: Callable[[], Path]) -> None:
        self._make_folder = make_folder
        self._under_way: dict[Key, Future[tuple[Path, str]]] = {}
        self.pool = ThreadPoolExecutor(2)  # one process has a core, and the others the rest

    def begin(self, *keys: Key) -> None:
        """Let them run, at most two at once."""
        for key in keys:
            if key not in self._under_way:
                self._under_way[key] = self.pool.submit(self._run, key, self._make_folder())

    def _run(self, key: Key, folder: Path) -> tuple[Path, str]:
        processes, plan, names = key
        words = [str(folder), plan.to_json(), "2" if names in (QUICK, AGAIN) else "5", *names]
        result: subprocess.CompletedProcess[str] = run(processes, TESTS / "pipeline/driver.py", *words, timeout_s=900)
        return folder, result.stdout + result.stderr

    def noted(self, name: str, key: Key) -> Mapping[str, np.ndarray]:
        """Return what a case has noted."""
        self.begin(key)
        folder, log = self._under_way[key].result()
        mine = folder / f"{name}.npz"
        found = dict(np.load(mine)) if mine.exists() else {}
        assert found, f"the case ended early:\n{log[-6000:]}"
        return found


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    runs = Runs(lambda: tmp_path_factory.mktemp("pipeline"))
    with runs.pool:
        yield runs


def pipeline(stages: int, *, recompute: bool = False) -> Plan:
    return Plan("pipeline", stages=stages, recompute=recompute)


def require_equal(name: str, processes: int, stages: int, names: tuple[str, ...], ran: Runs) -> None:
    one, many = (1, pipeline(1), names), (processes, pipeline(stages), names)
    ran.begin(one, many)
    require_close(ran.noted(name, one), ran.noted(name, many), LIMITS.get(name, 1e-10))


def require_close(one: Mapping[str, np.ndarray], many: Mapping[str, np.ndarray], limit: float) -> None:
    assert set(one) == set(many)
    largest: dict[str, float] = {}  # of all that is noted under one heading
    for key in one:
        heading = key.split("/")[0]
        largest[heading] = max(largest.get(heading, 1e-3), float(np.abs(one[key]).max(initial=0)))
    for key in one:
        assert one[key].shape == many[key].shape, key
        atol = limit * largest[key.split("/")[0]]
        np.testing.assert_allclose(many[key], one[key], rtol=0, atol=atol, err_msg=key)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", QUICK)
def test_two_stages_have_the_numbers_of_one_process(name: str, ran: Runs) -> None:
    require_equal(name, 2, 2, QUICK, ran)


def require_equal_again(name: str, names: tuple[str, ...], ran: Runs) -> None:
    kept, again = ((2, pipeline(2, recompute=each), names) for each in (False, True))
    ran.begin(kept, again)
    require_close(ran.noted(name, kept), ran.noted(name, again), LIMITS.get(name, 1e-10))


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", AGAIN)
def test_activations_made_again_are_the_same(name: str, ran: Runs) -> None:
    require_equal_again(name, AGAIN, ran)


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", [*EVERYWHERE, *WHOLE])
def test_in_any_case_activations_made_again_are_the_same(name: str, ran: Runs) -> None:
    require_equal_again(name, (*EVERYWHERE, *WHOLE), ran)


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("stages", [2, 3, 4])
@pytest.mark.parametrize("name", [*EVERYWHERE, *WHOLE])
def test_any_number_of_stages_has_the_numbers_of_one_process(name: str, stages: int, ran: Runs) -> None:
    require_equal(name, stages, stages, (*EVERYWHERE, *WHOLE), ran)


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", EVERYWHERE)
def test_two_pipelines_of_two_stages_have_the_numbers_of_one_process(name: str, ran: Runs) -> None:
    require_equal(name, 4, 2, tuple(EVERYWHERE), ran)


@pytest.mark.timeout(900)
def test_a_family_of_transformers_has_the_numbers_of_one_process(ran: Runs) -> None:
    pytest.importorskip("transformers")
    require_equal("llama", 2, 2, ("llama",), ran)


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize("name", FAMILIES)
def test_families_of_transformers_have_the_numbers_of_one_process(name: str, stages: int, ran: Runs) -> None:
    pytest.importorskip("transformers")
    require_equal(name, stages, stages, tuple(FAMILIES), ran)


@pytest.mark.full
@pytest.mark.timeout(900)
def test_dropout_draws_the_same_wherever_the_cuts_are(ran: Runs) -> None:
    two, three = (ran.noted("dropout", (stages, pipeline(stages), ("dropout",))) for stages in (2, 3))
    require_close(two, three, 1e-10)
    one = ran.noted("dropout", (1, pipeline(1), ("dropout",)))
    assert one["0 loss"] != two["0 loss"]  # it does draw, and other numbers: this is said at the start
