"""What members compute in a direct exchange: the same as the centre would, whatever comes first. No sockets."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nearlinear.planning.rounds import direct, direct_s, parts, star_s
from nearlinear.runtime.local.chunks import Chunks, bounds
from nearlinear.runtime.local.codecs import Feedback, Floats
from nearlinear.runtime.local.exchange import CENTRE, Exchange, Plan, Refused
from nearlinear.runtime.local.frames import Malformed
from nearlinear.runtime.local.introductions import Introductions
from nearlinear.runtime.local.outer import Outer
from nearlinear.runtime.local.update import Sizes, hash_of
from nearlinear.runtime.local.vote import Ready, Vote

SIZES = Sizes(3000, 40)


class Table:
    """Members around a table, who hand each other chunks in any order."""

    def __init__(self, codec: str, edges: list[int], *, teller: int = CENTRE, seed: int = 0) -> None:
        self.random = random.Random(seed)
        self.chunks, count = Chunks(SIZES, codec), len(edges) - 1
        self.numbers = [3 * each + 1 for each in range(count)]  # members' numbers have gaps
        self.teller = teller if teller == CENTRE else self.numbers[teller]
        self.edges, self.turn = tuple(edges), 0
        self.outer = np.random.default_rng(seed).normal(size=SIZES.total).astype(np.float32)
        self.own = {each: Feedback(codec, SIZES.parameters) for each in self.numbers}
        self.owed = {each: Feedback(codec, SIZES.parameters) for each in self.numbers}

    def round(self, updates: dict[int, Floats], samples: dict[int, float]) -> list[Floats]:
        """Return what the members and the centre hold after a round."""
        self.turn += 1
        plan = Plan(self.turn, tuple(self.numbers), self.edges, self.teller)
        sides = {each: Exchange(plan, each, self.chunks, self.outer, self.owed[each]) for each in self.numbers}
        vote = Vote(plan, self.chunks, self.outer)
        for each, change in updates.items():
            sides[each].begin(change, self.own[each])
        under_way: list[tuple[int, int, str, int, bytes]] = []
        went = False
        while not all(side.whole for side in sides.values()) or under_way:
            for each, side in sides.items():
                if side.busy and self.random.random() < 0.7:
                    side.work()
                under_way += [(each, s.to, s.kind, s.chunk, bytes(s.payload)) for s in side.sendings]
                side.sendings.clear()
            if not went and all(sides[each].norms is not None for each in updates) and self.random.random() < 0.2:
                went = True
                for each in updates:
                    norms = sides[each].norms
                    assert norms is not None
                    vote.ready[each] = Ready(samples[each], 1, tuple(norms), 0.0)
                vote.close(list(updates), dict.fromkeys(updates, 1.0), before=1e3)
                for each, side in sides.items():
                    weights, claimed = vote.told(each)
                    side.go(dict(weights), dict(claimed))
            for _ in range(self.random.randrange(4)):
                if under_way:
                    sender, to, kind, chunk, payload = under_way.pop(self.random.randrange(len(under_way)))
                    if to == CENTRE:
                        vote.mean(sender, chunk, memoryview(payload))
                    elif kind == "part":
                        sides[to].part(sender, chunk, memoryview(payload))
                    else:
                        sides[to].mean(sender, chunk, memoryview(payload))
        for each in self.numbers:
            self.own[each].settle(counted=each in updates)
            self.owed[each].settle(counted=True)
            vote.done[each] = hash_of(sides[each].after)
        assert vote.agreed(self.numbers)
        self.outer = vote.after
        return [vote.after, *(side.after for side in sides.values())]


@pytest.mark.parametrize("codec", ["fp32", "bf16", "int8", "int4"])
@pytest.mark.parametrize(("edges", "teller"), [([0, 6, 13], 0), ([0, 4, 4, 9, 13], CENTRE), ([0, 3, 6, 9, 12, 13], 2)])
def test_members_hold_the_bits_that_the_centre_would_have_sent_them(codec: str, edges: list[int], teller: int) -> None:
    table = Table(codec, edges, teller=teller, seed=len(edges))
    assert table.chunks.count == edges[-1]
    outer = Outer(SIZES, codec, table.outer)
    own = {each: Feedback(codec, SIZES.parameters) for each in table.numbers}
    generator = np.random.default_rng(7)
    for round_ in range(4):
        counted = [each for each in table.numbers if round_ != 2 or each != table.numbers[-1]]
        updates = {each: generator.normal(size=SIZES.total).astype(np.float32) for each in counted}
        samples = {each: float(generator.integers(1, 5)) for each in counted}
        held = table.round(updates, samples)
        for each in counted:
            payload = memoryview(SIZES.encode(codec, updates[each], own[each]).data)
            outer.take(each, payload, codec, samples=samples[each], steps=1, now=0.0)
            own[each].settle(counted=True)
        outer.close(counted)
        assert all(each.tobytes() == outer.values.tobytes() for each in held)


def test_topk_keeps_the_largest_of_every_chunk_so_its_bits_are_others_but_all_hold_the_same() -> None:
    table = Table("topk", [0, 6, 13])
    generator = np.random.default_rng(1)
    total = np.zeros(SIZES.total, np.float32)
    before = table.outer
    for _ in range(60):
        updates = {each: np.abs(generator.normal(size=SIZES.total)).astype(np.float32) for each in table.numbers}
        held = table.round(updates, dict.fromkeys(table.numbers, 1.0))
        total += sum(updates.values()) / np.float32(2)
        assert all(each.tobytes() == held[0].tobytes() for each in held)
    # What is left out comes later: after many rounds most of it is there.
    assert np.abs(before - table.outer - total).mean() < 0.7 * np.abs(total).mean()


@given(count=st.integers(1, 40), seed=st.integers(0, 1000), members=st.integers(2, 6))
@settings(max_examples=30, deadline=None)
def test_whatever_the_parts_and_the_order_all_end_the_same(count: int, seed: int, members: int) -> None:
    generator = random.Random(seed)
    chunks = Chunks(SIZES, "int8").count
    edges = [0, *sorted(generator.randrange(chunks + 1) for _ in range(members - 1)), chunks]
    table = Table("int8", edges, seed=seed, teller=generator.choice([CENTRE, 0, members - 1]))
    values = np.random.default_rng(seed)
    updates = {each: values.normal(size=SIZES.total).astype(np.float32) * count for each in table.numbers}
    held = table.round(updates, {each: generator.random() + 0.1 for each in table.numbers})
    assert all(each.tobytes() == held[0].tobytes() for each in held)


# ---- what must not get in


def pair() -> tuple[Exchange, Plan, Chunks]:
    chunks = Chunks(SIZES, "fp32")
    plan = Plan(1, (0, 1), (0, 6, chunks.count), CENTRE)
    return (
        Exchange(plan, 0, chunks, np.zeros(SIZES.total, np.float32), Feedback("fp32", SIZES.parameters)),
        plan,
        chunks,
    )


def test_a_chunk_from_elsewhere_twice_or_of_another_length_is_refused() -> None:
    side, _, chunks = pair()
    good = memoryview(bytes(chunks.nbytes(0)))
    side.part(1, 0, good)
    for sender, chunk, payload in [(1, 0, good), (2, 1, good), (1, 7, good), (1, 1, good[:-4]), (1, 10**6, good)]:
        with pytest.raises(Malformed):
            side.part(sender, chunk, payload)
    for sender, chunk, payload in [(1, 0, good), (0, 7, good), (1, 7, good[:-4]), (1, 10**6, good)]:
        with pytest.raises(Malformed):
            side.mean(sender, chunk, payload)
    side.mean(1, 7, good)
    with pytest.raises(Malformed):
        side.mean(1, 7, good)


@pytest.mark.parametrize(
    ("value", "claimed", "why"),
    [(np.nan, 1e9, "256 of its 256 values are not finite"), (1.0, 15.9, "a part of it has the norm 16, not 15.9")],
)
def test_an_owner_refuses_a_part_that_is_not_finite_or_larger_than_was_said(
    value: float, claimed: float, why: str
) -> None:
    side, _, chunks = pair()
    side.go({1: 1.0}, {1: claimed})
    side.part(1, 0, memoryview(np.full(chunks.values, value, np.float32).tobytes()))
    with pytest.raises(Refused, match=why) as refused:
        side.work()
    assert refused.value.member == 1


def test_ones_own_update_that_is_not_finite_is_refused_before_it_is_sent() -> None:
    side, _, _ = pair()
    side.begin(np.full(SIZES.total, np.inf, np.float32), Feedback("fp32", SIZES.parameters))
    with pytest.raises(Refused, match="are not finite") as refused:
        side.work()
    assert refused.value.member == 0 and not side.sendings


@pytest.mark.parametrize(
    ("value", "why"), [(np.nan, "256 of its 256 values are not finite"), (1e6, r"a mean has the norm 1\.6e\+07, where")]
)
def test_the_centre_commits_no_mean_that_the_updates_cannot_have(value: float, why: str) -> None:
    _, plan, chunks = pair()
    vote = Vote(plan, chunks, np.zeros(SIZES.total, np.float32))
    vote.ready = {0: Ready(1.0, 1, (3.0, 4.0), 0.0), 1: Ready(1.0, 1, (3.0, 4.0), 0.0)}
    vote.close([0, 1], {0: 1.0, 1: 1.0}, before=0.0)
    assert vote.norm == pytest.approx(5.0)
    with pytest.raises(Exception, match=why):
        vote.mean(0, 0, memoryview(np.full(chunks.values, value, np.float32).tobytes()))


@pytest.mark.parametrize(
    "value",
    [
        None,
        [],
        {},
        {"members": [0], "bounds": [0, 1], "teller": -1},
        {"members": [1, 0], "bounds": [0, 1, 2], "teller": -1},
        {"members": [0, 0], "bounds": [0, 1, 2], "teller": -1},
        {"members": [0, 1], "bounds": [0, 2, 1], "teller": -1},
        {"members": [0, 1], "bounds": [1, 2, 3], "teller": -1},
        {"members": [0, 1], "bounds": [0, 1], "teller": -1},
        {"members": [0, 1], "bounds": [0, 1, 2], "teller": "0"},
        {"members": [0, True], "bounds": [0, 1, 2], "teller": -1},
    ],
)
def test_a_plan_that_makes_no_sense_is_refused(value: object) -> None:
    with pytest.raises(Malformed):
        Plan.read(1, value)


# ---- who sums what, and by which way


@given(count=st.integers(0, 10_000), weights=st.lists(st.floats(0.01, 100), min_size=1, max_size=20))
def test_bounds_cover_all_chunks_and_rise(count: int, weights: list[float]) -> None:
    edges = bounds(count, [each / sum(weights) for each in weights])
    assert edges[0] == 0 and edges[-1] == count and edges == sorted(edges) and len(edges) == len(weights) + 1


@given(up=st.lists(st.floats(0.01, 100), min_size=3, max_size=20))
def test_parts_let_all_end_together_unless_one_is_too_slow_to_sum_anything(up: list[float]) -> None:
    found = parts(up)
    assert sum(found) == pytest.approx(1) and min(found) >= 0
    times = [(1 + (len(up) - 2) * part) / rate for part, rate in zip(found, up, strict=True)]
    summing = [time for time, part in zip(times, found, strict=True) if part > 0]
    assert max(summing) <= 1.0001 * min(summing)
    assert all(time >= 0.9999 * max(summing) for time, part in zip(times, found, strict=True) if part == 0)


MBIT_100 = 12.5e6


def test_four_members_at_100_mbit_and_80_ms_take_as_long_as_their_bytes_and_round_trips() -> None:
    assert star_s(16e6, 3, 0.08, MBIT_100) == pytest.approx(0.08 + 7.68)
    assert direct_s(16e6, 0.08, [MBIT_100] * 4) == pytest.approx(0.2 + 1.92)


@pytest.mark.parametrize(
    ("update_bytes", "elsewhere", "round_trip_s", "centre", "up", "now", "chosen"),
    [
        (16e6, 3, 0.08, MBIT_100, [0.0] * 4, False, True),  # nobody's link is known yet: it is tried
        (64e3, 3, 0.08, MBIT_100, [0.0] * 4, False, False),  # one round trip is better than two and a half
        (64e3, 3, 0.08, MBIT_100, [MBIT_100] * 4, True, False),
        (16e6, 3, 0.08, 0.0, [0.0] * 4, False, False),  # nothing was measured at all
        (16e6, 0, 0.0, MBIT_100, [MBIT_100] * 4, False, False),  # all on the centre's machine
        (16e6, 3, 0.08, 1e9, [MBIT_100] * 4, False, False),  # the centre's link is that much better
        (16e6, 3, 0.08, MBIT_100, [MBIT_100, MBIT_100, MBIT_100, 1e6], True, False),  # one cannot keep up
        (4e6, 1, 0.08, MBIT_100, [MBIT_100] * 2, False, True),  # two: both directions of both links at once
        (16e6, 1, 0.08, MBIT_100, [MBIT_100], False, False),
        (16e6, 40, 0.08, MBIT_100, [MBIT_100] * 41, False, False),  # too many pairs
    ],
)
def test_the_way_follows_from_bytes_members_and_measured_links(
    update_bytes: float, elsewhere: int, round_trip_s: float, centre: float, up: list[float], now: bool, chosen: bool
) -> None:
    assert direct(update_bytes, elsewhere, round_trip_s, centre, up, now) is chosen


def test_a_way_is_left_only_for_one_that_is_clearly_faster() -> None:
    sizes = np.geomspace(1e4, 1e8, 400)
    for now in (False, True):
        chosen = [direct(each, 3, 0.08, MBIT_100, [MBIT_100] * 4, now) for each in sizes]
        assert chosen == sorted(chosen)
    between = [
        each
        for each in sizes
        if direct(each, 3, 0.08, MBIT_100, [MBIT_100] * 4, True)
        != direct(each, 3, 0.08, MBIT_100, [MBIT_100] * 4, False)
    ]
    assert between and all(direct(each, 3, 0.08, MBIT_100, [MBIT_100] * 4, True) for each in between)


# ---- who calls whom


def test_a_call_that_fails_is_made_by_the_other_side_and_then_rarely_changes() -> None:
    known = Introductions()
    for number in range(3):
        known.listening(number, f"10.0.0.{number}", 4000 + number)
    caller = lambda: next(entry.dial for entry in known.roster(2) if entry.number == 0)  # noqa: E731
    assert caller() and not next(entry.dial for entry in known.roster(0) if entry.number == 2)
    assert known.reached(2, {}, [0]) == [0, 2] and not caller()
    assert known.reached(2, {}, [0]) == [], "it is not its call any more"
    assert known.reached(0, {}, [2]) == [0, 2] and caller()
    assert [known.reached(2, {}, [0]) for _ in range(2)] == [[], [0, 2]]
    assert not known.connected([0, 2]) and known.connected([1])


def test_both_sides_must_say_that_they_reach_each_other() -> None:
    known = Introductions()
    for number in (0, 1):
        known.listening(number, "", 4000)
    known.reached(0, {1: 0.0}, [])
    assert not known.connected([0, 1])
    known.reached(1, {0: 0.08}, [])
    assert known.connected([0, 1]) and known.round_trip_s([0, 1]) == 0.08
    token = known.roster(0)[0].token
    known.listening(1, "", 4001)  # it came back
    assert not known.connected([0, 1]) and known.roster(0)[0].token != token


def test_both_sides_of_a_pair_are_told_the_same_word_and_no_other_pair() -> None:
    known = Introductions()
    for number in range(3):
        known.listening(number, "", 4000)
    words = {(me, entry.number): entry.token for me in range(3) for entry in known.roster(me)}
    assert all(words[a, b] == words[b, a] for a, b in words) and len(set(words.values())) == 3
