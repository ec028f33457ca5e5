"""Who counts in a round and when it closes: tables of what happened and what follows."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nearlinear.errors import InputError
from nearlinear.planning.rounds import LONGEST, fractions, interval
from nearlinear.runtime.local.admission import ENOUGH, Admission, Rejected
from nearlinear.runtime.local.rounds import MOST, Rounds


def rounds(members: int) -> Rounds:
    made = Rounds(silence_s=5, now=0.0, patience_s=30)
    for number in range(members):
        made.joined(f"identity {number}", f"host-{number}", 0.0)
        made.updated(number, 0.0)
    made.close(0.0)  # so that nobody is new
    return made


def test_a_round_closes_with_the_last_update() -> None:
    made = rounds(2)
    made.updated(1, 9.0)
    assert not made.closes(9.0)
    made.updated(0, 9.5)
    assert made.closes(9.5) and made.close(9.5) == [0, 1] and made.number == 2


def test_a_late_member_is_waited_for_as_long_as_the_first_took_and_30_s_at_least() -> None:
    made = rounds(2)
    made.updated(1, 100.0)
    assert not made.closes(199.0) and [late.number for late in made.late()] == [0]
    assert made.closes(200.0) and made.close(200.0) == [1]
    made.updated(1, 201.0)
    assert not made.closes(201.4), "it is given a moment"
    assert made.closes(201.5) and made.close(202.0) == [1], "it is not waited for a second time"
    made.updated(0, 202.0)
    made.updated(1, 203.0)
    assert made.close(203.0) == [0, 1]
    made.updated(1, 204.0)
    assert not made.closes(205.0), "once it was in time, it is waited for again"


def test_a_dead_member_is_not_waited_for_and_its_update_counts_if_it_was_sent() -> None:
    made = rounds(3)
    made.updated(0, 1.0)
    made.updated(1, 1.0)
    made.gone(2)
    made.gone(1)
    assert made.closes(1.0) and made.close(1.0) == [0, 1]
    assert [member.number for member in made.here()] == [0]


def test_nothing_closes_without_an_update() -> None:
    made = rounds(1)
    assert not made.closes(1e9)
    made.gone(0)
    assert not made.closes(1e9)


def test_a_newcomer_is_called_once_when_another_has_sent_and_then_waited_for() -> None:
    made = rounds(1)
    made.joined("identity 1", "host-1", 1.0)
    assert made.to_call() == []
    made.updated(0, 2.0)
    assert [member.number for member in made.to_call()] == [1] and made.to_call() == []
    assert not made.closes(2.0)
    made.updated(1, 2.1)
    assert made.close(2.1) == [0, 1]
    made.updated(0, 3.0)
    assert made.to_call() == []  # it is new no more


def test_the_first_member_is_not_called() -> None:
    made = Rounds(silence_s=5, now=0.0)
    assert made.joined("identity 0", "host-0", 0.0).fresh is False
    assert made.joined("identity 1", "host-1", 0.0).fresh is True


def test_who_comes_back_has_its_number_and_sends_anew_what_it_had_sent() -> None:
    made = rounds(2)
    made.updated(1, 1.0)
    made.gone(1)
    assert made.joined("identity 1", "host-1", 2.0).number == 1
    made.updated(0, 3.0)
    assert not made.closes(3.0)
    made.updated(1, 3.5)
    assert made.close(3.5) == [0, 1]


def test_silence_is_counted_from_the_last_word() -> None:
    made = rounds(2)
    for now in range(1, 6):
        made.heard(0, float(now))
        assert made.silent(float(now)) == []
    assert [member.number for member in made.silent(6.0)] == [1]


def test_who_stood_still_himself_gives_all_time_anew() -> None:
    made = rounds(2)
    assert made.silent(1.0) == []
    assert made.silent(100.0) == []
    assert [m.number for now in range(101, 107) for m in made.silent(float(now))][:2] == [0, 1]


def test_there_is_an_end_to_what_is_remembered() -> None:
    made = rounds(0)
    for number in range(MOST):
        made.joined(f"identity {number}", "host", 0.0)
        made.gone(number)
    with pytest.raises(InputError, match="1024 members have joined"):
        made.joined("one more", "host", 0.0)
    assert made.joined("identity 7", "host", 0.0).number == 7


events = st.lists(
    st.tuples(st.sampled_from(["join", "update", "gone", "heard", "close"]), st.integers(0, 4)), max_size=60
)


def test_a_round_of_some_members_neither_waits_for_others_nor_calls_them_late() -> None:
    made = rounds(3)
    made.updated(0, 1.0)
    made.updated(1, 1.0)
    assert not made.closes(1.0) and made.closes(1.0, [0, 1]) and made.late([0, 1]) == []
    assert made.close(1.0, [0, 1]) == [0, 1]
    made.updated(0, 2.0)
    made.updated(1, 2.0)
    assert not made.closes(3.0), "the third was not late"


def test_a_round_that_is_begun_again_wants_all_updates_anew() -> None:
    made = rounds(2)
    made.updated(0, 1.0)
    made.updated(1, 1.0)
    made.begin_again()
    assert made.ready() == [] and not made.closes(2.0)
    made.updated(0, 3.0)
    made.updated(1, 3.0)
    assert made.closes(3.0) and made.close(3.0) == [0, 1]


@given(events=events)
def test_whatever_happens_a_round_counts_each_update_once_and_waits_for_the_living(
    events: list[tuple[str, int]],
) -> None:
    made, now, sent = Rounds(silence_s=5, now=0.0), 0.0, set()
    for what, number in events:
        now += 1.0
        here = {member.number for member in made.here()}
        if what == "join":
            member = made.joined(f"identity {number}", "host", now)
            sent.discard(member.number)
        elif number in here and what == "update":
            made.updated(number, now)
            sent.add(number)
        elif number in here and what == "gone":
            made.gone(number)
        elif number in here and what == "heard":
            made.heard(number, now)
        elif what == "close" and made.closes(now):
            before = made.number
            assert made.close(now) == sorted(sent) and sent and made.number == before + 1
            sent = set()
        if sent and {member.number for member in made.here()} <= sent:
            assert made.closes(now)


# ---- what may enter the mean


def test_what_is_not_finite_is_refused_with_the_count() -> None:
    for bad in (np.nan, np.inf, -np.inf):
        with pytest.raises(Rejected, match="2 of its 5 values are not finite"):
            Admission().judge(np.array([1, bad, 2, bad, 3], np.float32), steps=1)


def test_a_norm_a_thousand_times_the_usual_is_clipped_to_ten() -> None:
    gate, usual = Admission(), np.full(100, 0.1, np.float32)
    for _ in range(ENOUGH):
        assert gate.judge(usual, steps=4) == 1.0
    assert gate.judge(usual * 1000, steps=4) == pytest.approx(0.01)
    assert gate.judge(usual * 5, steps=4) == 1.0
    assert gate.judge(usual * 0, steps=4) == 1.0


def test_steps_that_change_nothing_say_nothing_of_the_usual_norm() -> None:
    gate, usual = Admission(), np.full(100, 0.1, np.float32)
    for _ in range(2 * ENOUGH):
        assert gate.judge(usual * 0, steps=1) == 1.0
    assert [gate.judge(usual * (1 + each), steps=1) for each in range(2 * ENOUGH)] == [1.0] * 2 * ENOUGH


def test_a_large_finite_update_has_a_norm() -> None:
    assert Admission().judge(np.full(1000, 3e38, np.float32), steps=1) == 1.0


# ---- how long a round is, and whose part is how large


def test_a_round_hides_its_exchange_and_never_exceeds_the_longest() -> None:
    assert [interval(each, 0.1) for each in (0.0, 0.04, 0.1, 1.0, 1e6)] == [1, 1, 2, 20, LONGEST]
    assert interval(1.0, 0.0) == 1
    assert [interval(0.1, 0.1, each) for each in (0.0, 0.1, 0.11, 1.0, 1e6)] == [2, 2, 3, 20, LONGEST]


@given(pairs=st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1e6)), min_size=1, max_size=20))
def test_parts_sum_to_one_and_nobody_is_left_without(pairs: list[tuple[float, float]]) -> None:
    parts = fractions([part for part, _ in pairs], [each for _, each in pairs])
    assert sum(parts) == pytest.approx(1) and min(parts) > 0


@given(
    own=st.lists(st.floats(0.0, 0.05), min_size=4, max_size=4),
    per_sample=st.lists(st.floats(1.0, 3.0), min_size=4, max_size=4),
)
@settings(deadline=None)
def test_parts_settle_where_all_steps_take_about_as_long(own: list[float], per_sample: list[float]) -> None:
    parts = [0.25] * 4
    for _ in range(120):
        times = [a + b * part for a, b, part in zip(own, per_sample, parts, strict=True)]
        parts = fractions(parts, times)
    assert max(times) <= 1.5 * min(times)
