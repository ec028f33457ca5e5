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
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest

from conftest import TESTS, names_in, run

EVERYWHERE = names_in("pipeline/cases.py", "case")
WHOLE = names_in("pipeline/cases.py", "whole")  # where one pipeline sees the whole batch
FAMILIES = names_in("pipeline/families.py", "family")
# A mamba computes its scan in float32 (1e-7) whatever its parameters are in.
LIMITS = {"autocast_to_bfloat16": 3e-2, "mamba": 1e-5}
# What the default run has time for; the others are as different as the models of the family they stand beside.
QUICK = (
    "mlp_with_skips",
    "encoder_decoder_with_one_embedding_used_thrice",
    "lstm_with_a_mean_over_tokens_inside",
    "contrastive_loss_inside",
    "batches_of_ten_seven_three_and_one",
    "accumulation_clipping_and_a_scheduler",
    "what_rank_0_alone_reads",
    "frozen_unused_and_ignored",
    "buffers_that_count",
    "autocast_to_bfloat16",
)

Ran = Callable[[int, int, tuple[str, ...]], tuple[Path, str]]


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """Cases on so many processes in so many stages, started once for all that a test may want of them."""
    folder = tmp_path_factory.mktemp("pipeline")
    logs: dict[tuple[int, int, tuple[str, ...]], str] = {}

    def start(processes: int, stages: int, names: tuple[str, ...]) -> tuple[Path, str]:
        key = processes, stages, names
        if key not in logs:
            result: subprocess.CompletedProcess[str] = run(
                processes, TESTS / "pipeline/driver.py", str(folder), str(stages), *names, timeout_s=900
            )
            logs[key] = result.stdout + result.stderr
        return folder, logs[key]

    return start


def require_equal(name: str, processes: int, stages: int, names: tuple[str, ...], ran: Ran) -> None:
    one, many = noted(name, 1, 1, names, ran), noted(name, processes, stages, names, ran)
    require_close(one, many, LIMITS.get(name, 1e-10))


def noted(name: str, processes: int, stages: int, names: tuple[str, ...], ran: Ran) -> Mapping[str, np.ndarray]:
    folder, log = ran(processes, stages, names)
    mine = folder / f"{name}.{processes}.{stages}.npz"
    found = dict(np.load(mine)) if mine.exists() else {}
    assert found, f"the case ended early:\n{log[-6000:]}"
    return found


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
def test_two_stages_have_the_numbers_of_one_process(name: str, ran: Ran) -> None:
    require_equal(name, 2, 2, QUICK, ran)


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("stages", [2, 3, 4])
@pytest.mark.parametrize("name", [*EVERYWHERE, *WHOLE])
def test_any_number_of_stages_has_the_numbers_of_one_process(name: str, stages: int, ran: Ran) -> None:
    require_equal(name, stages, stages, (*EVERYWHERE, *WHOLE), ran)


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", EVERYWHERE)
def test_two_pipelines_of_two_stages_have_the_numbers_of_one_process(name: str, ran: Ran) -> None:
    require_equal(name, 4, 2, tuple(EVERYWHERE), ran)


@pytest.mark.timeout(900)
def test_a_family_of_transformers_has_the_numbers_of_one_process(ran: Ran) -> None:
    pytest.importorskip("transformers")
    require_equal("llama", 2, 2, ("llama",), ran)


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize("name", FAMILIES)
def test_families_of_transformers_have_the_numbers_of_one_process(name: str, stages: int, ran: Ran) -> None:
    pytest.importorskip("transformers")
    require_equal(name, stages, stages, tuple(FAMILIES), ran)


@pytest.mark.full
@pytest.mark.timeout(900)
def test_dropout_draws_the_same_wherever_the_cuts_are(ran: Ran) -> None:
    two, three = (noted("dropout", stages, stages, ("dropout",), ran) for stages in (2, 3))
    require_close(two, three, 1e-10)
    one = noted("dropout", 1, 1, ("dropout",), ran)
    assert one["0 loss"] != two["0 loss"]  # it does draw, and other numbers: this is said at the start
