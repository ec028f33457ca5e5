"""What every stage computes in which order: tables, and what holds for all of them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nearlinear.core.schedule import Action, Kind, Schedule, gpipe, interleaved, one_f_one_b, zero_bubble
from nearlinear.errors import InputError

SIZES = st.integers(1, 6)
MICROBATCHES = st.integers(1, 12)


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    stages, microbatches = draw(SIZES), draw(MICROBATCHES)
    which = draw(st.sampled_from(["gpipe", "1F1B", "interleaved", "zero bubble"]))
    if which == "interleaved":
        return interleaved(stages, stages * draw(st.integers(1, 3)), draw(st.integers(1, 3)))
    return {"gpipe": gpipe, "1F1B": one_f_one_b, "zero bubble": zero_bubble}[which](stages, microbatches)


def test_gpipe_runs_all_forward_passes_first():
    assert gpipe(2, 3) == Schedule.written("F0 F1 F2 B0 B1 B2", "F0 F1 F2 B0 B1 B2")


def test_1f1b_alternates_after_as_many_forward_passes_as_there_are_stages_below():
    assert one_f_one_b(2, 3) == Schedule.written("F0 F1 B0 F2 B1 B2", "F0 B0 F1 B1 F2 B2")
    assert one_f_one_b(4, 2).stages[0] == Schedule.written("F0 F1 B0 B1").stages[0]


def test_interleaved_sends_groups_of_as_many_microbatches_as_stages_through_each_chunk():
    assert interleaved(2, 4, 2) == Schedule.written(
        "F0 F1 F0.1 F1.1 F2 B0.1 F3 B1.1 F2.1 B0 F3.1 B1 B2.1 B3.1 B2 B3",
        "F0 F1 F0.1 B0.1 F1.1 B1.1 F2 B0 F3 B1 F2.1 B2.1 F3.1 B3.1 B2 B3",
    )


def test_zero_bubble_computes_weight_gradients_as_late_as_the_stage_is_deep():
    assert zero_bubble(2, 3) == Schedule.written("F0 F1 I0 W0 F2 I1 W1 I2 W2", "F0 I0 F1 I1 W0 F2 I2 W1 W2")


@given(schedules())
def test_every_stage_runs_every_pass_once_and_the_forward_pass_first(made: Schedule):
    passes = "IW" if made.splits_backward else "B"
    for actions in made.stages:
        for microbatch in range(made.microbatches):
            for chunk in range(made.chunks):
                places = [actions.index(Action(Kind(kind), microbatch, chunk)) for kind in "F" + passes]
                assert places == sorted(places)
        assert len(actions) == made.microbatches * made.chunks * (1 + len(passes))


@given(schedules())
def test_no_action_runs_before_what_it_waits_for(made: Schedule):
    column = {
        (stage, action): made.columns[stage][index]
        for stage, actions in enumerate(made.stages)
        for index, action in enumerate(actions)
    }
    for (stage, action), place in column.items():
        needed = made.waits(stage, action)
        assert needed is None or column[needed] < place


@given(SIZES, MICROBATCHES)
def test_activations_in_flight_are_what_the_papers_say(stages: int, microbatches: int):
    for stage in range(stages):
        assert gpipe(stages, microbatches).in_flight(stage) == microbatches
        assert one_f_one_b(stages, microbatches).in_flight(stage) == min(stages - stage, microbatches)
        assert zero_bubble(stages, microbatches).in_flight(stage) == min(stages, microbatches)


@given(SIZES, st.integers(1, 3), st.integers(2, 3))
def test_interleaving_holds_more_chunks(stages: int, groups: int, chunks: int):
    made = interleaved(stages, groups * stages, chunks)
    for stage in range(stages):
        formula = 2 * (stages - stage - 1) + (chunks - 1) * stages + 1
        assert made.in_flight(stage) == min(formula, groups * stages * chunks)


@given(schedules())
def test_a_schedule_survives_json(made: Schedule):
    back = Schedule.from_json(made.to_json())
    assert back == made and back.name == made.name


def test_stages_that_wait_in_a_circle_are_refused():
    with pytest.raises(InputError, match="circle"):
        Schedule.written("F0 B0 F1 B1", "F1 B1 F0 B0")


def test_a_gradient_before_its_forward_pass_is_refused():
    with pytest.raises(InputError, match="stage 0 has B0 without F0 before it"):
        Schedule.written("B0 F0")


def test_a_stage_that_lacks_an_action_is_refused():
    with pytest.raises(InputError, match="stage 1 must have every action once; see B1"):
        Schedule.written("F0 F1 B0 B1", "F0 B0 F1")


def test_a_microbatch_without_its_backward_pass_is_refused():
    with pytest.raises(InputError, match="microbatch 1 needs F and either B or I and W, not F"):
        Schedule.written("F0 F1 B0")
    with pytest.raises(InputError, match="not F, I"):
        Schedule.written("F0 I0")


def test_interleaving_says_which_number_of_microbatches_would_do():
    with pytest.raises(InputError, match=r"multiple of 4 microbatches, not 6; take 8"):
        interleaved(4, 6, 2)


def test_what_is_no_schedule_is_refused():
    with pytest.raises(InputError, match="not an action"):
        Schedule.written("F0 X0")
    with pytest.raises(InputError, match="not a schedule"):
        Schedule.from_json("{}")
    with pytest.raises(InputError, match="at least 1"):
        gpipe(0, 1)
