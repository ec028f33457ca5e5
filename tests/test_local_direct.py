"""Members that exchange directly, die, come back and lose each other: real sockets, numbers instead of a model."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import ssl
import time
import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from local_runs import PATIENCE_S, SIZES, Ledger, Run, die, starting, together, until
from nearlinear.runtime.local.centre import Centre
from nearlinear.runtime.local.frames import pack
from nearlinear.runtime.local.ticket import new_key
from nearlinear.runtime.local.tls import identity

pytest.importorskip("cryptography")
pytestmark = pytest.mark.timeout(60)


class DirectRun(Run):
    """A run in which all that reach each other exchange directly."""

    def __init__(self, **options: Any) -> None:
        super().__init__(direct=lambda *known: True, **options)

    def ledger(self, **options: Any) -> Ledger:
        trainer = Ledger(self.ticket, **options)
        self.trainers.append(trainer)
        return trainer

    def together(self, count: int, **options: Any) -> list[Ledger]:
        """Return members in a round that they exchange directly."""
        trainers = [self.ledger(**options) for _ in range(count)]
        self.until_direct(trainers)
        return trainers

    def until_direct(self, trainers: list[Ledger]) -> None:
        numbers = [each.member.number for each in trainers]
        for _ in range(10):  # rounds whose way was settled before all were connected
            until(lambda: self.centre._known.connected(numbers))
            together(*trainers)
            if self.centre._vote is not None and list(self.centre._vote.plan.members) == sorted(numbers):
                return
        raise AssertionError(self.said)


@pytest.fixture
def started() -> Iterator[Callable[..., DirectRun]]:
    with starting(DirectRun) as start:
        yield start


Start = Callable[..., DirectRun]


def balanced(trainers: list[Ledger]) -> None:
    """All hold the same bits, and everything learnt counted once, or is here still."""
    for one in trainers:
        assert one.news.outer.tobytes() == trainers[0].news.outer.tobytes()
        np.testing.assert_allclose(one.counted + (one.values - one.news.outer), one.learnt, atol=1e-4)


@pytest.mark.parametrize("codec", ["fp32", "bf16", "int8", "int4"])
@pytest.mark.parametrize("members", [2, 3, 4])
def test_members_end_with_the_bits_that_a_star_would_give_them(started: Start, codec: str, members: int) -> None:
    run, star = started(), Run()
    try:
        direct = run.together(members, codec=codec)
        others = [star.join(codec=codec) for _ in range(members)]
        together(*others)
        generator = np.random.default_rng(0)
        for _ in range(3):
            for one, other in zip(direct, others, strict=True):
                step = generator.normal(size=SIZES.total).astype(np.float32)
                one.learn(step)
                other.learn(step)
                samples = float(generator.integers(1, 4))
                one.deliver(samples)
                other.deliver(samples)
            news = [one.hear() for one in direct]
            assert all(each.counted and each.members == members for each in news)
            for other in others:
                assert other.hear().outer.tobytes() == news[0].outer.tobytes()
            assert run.centre._outer is not None and run.centre._vote is not None
            assert run.centre._outer.values.tobytes() == news[0].outer.tobytes()
        assert not run.said or all("begun again" not in line for line in run.said)
    finally:
        for other in star.trainers:
            other.member.leave()
        star.centre.stop()


def test_what_is_learnt_while_a_round_is_on_its_way_belongs_to_the_next(started: Start) -> None:
    a, b = started().together(2, codec="fp32")
    for trainer in (a, b):
        trainer.learn(1.0)
        trainer.deliver()
        trainer.learn(0.25)
    assert a.hear().counted and b.hear().counted
    np.testing.assert_allclose(a.news.outer, 1.0, atol=1e-6)
    np.testing.assert_allclose(a.values, 1.25, atol=1e-6)
    assert together(a, b)[0].outer[0] == pytest.approx(1.25, abs=1e-6)


def test_a_round_in_which_nobody_learnt_anything_changes_nothing(started: Start) -> None:
    a, b = started().together(2)
    before = a.news.outer.tobytes()
    for trainer in (a, b):
        trainer.deliver(samples=0.0)
    assert a.hear().counted and b.hear().counted and a.news.outer.tobytes() == before
    a.learn(1.0)
    a.deliver()
    b.deliver(samples=0.0)
    assert a.hear().counted and b.hear().outer[0] == pytest.approx(1.0, abs=1e-2)


def test_a_newcomer_is_told_the_state_and_counts_from_the_next_round_on(started: Start) -> None:
    run = started()
    a, b = run.together(2, codec="fp32")
    a.learn(1.0)
    a.deliver()
    c = run.ledger()
    c.learn(5.0)
    c.deliver()
    b.deliver()
    assert a.hear().counted and b.hear().counted and not c.hear().counted
    run.until_direct([a, b, c])
    assert together(a, b, c)[0].members == 3
    balanced([a, b, c])
    np.testing.assert_allclose(a.news.outer[0], 0.5 + 5 / 3, atol=1e-6)


def test_a_late_member_sums_its_part_all_the_same(started: Start) -> None:
    run = started(patience_s=0.2)
    a, b, c = run.together(3, codec="fp32")
    for one in (a, b, c):
        one.learn(3.0)
    a.deliver()
    b.deliver()
    assert a.hear().counted and b.hear().counted and not c.hear().counted
    assert any("member 2 on host is late" in line for line in run.said)
    np.testing.assert_allclose(a.news.outer, 3.0, atol=1e-6)
    c.deliver()  # nobody waits for it until it is in time again, so it is first
    until(lambda: run.centre._rounds.members[2].update is not None)
    together(a, b)
    assert c.hear().counted
    balanced([a, b, c])


def test_a_thousandfold_update_is_clipped_and_said(started: Start) -> None:
    run = started()
    a, b = run.together(2, codec="fp32")
    for _ in range(10):
        a.learn(0.01)
        b.learn(0.01)
        together(a, b)
    a.learn(10.0)
    b.learn(0.01)
    before = a.news.outer[0]
    assert together(a, b)[0].outer[0] - before == pytest.approx((0.1 + 0.01) / 2, abs=0.01)
    assert any("member 0 on host in round" in line and "is clipped to 0.01 of its size" in line for line in run.said)


def test_an_update_that_is_not_finite_is_named_and_the_others_go_on(started: Start) -> None:
    run = started(patience_s=0.3)
    a, b, c = run.together(3, codec="fp32")
    for one in (a, b):
        one.learn(1.0)
        one.deliver()
    c.learn(np.where(np.arange(SIZES.total) == 700, np.nan, 1.0).astype(np.float32))
    c.deliver()
    assert a.hear().counted and b.hear().counted and not c.hear().counted
    assert any("the update of member 2 on host in round" in line and "not finite" in line for line in run.said)
    np.testing.assert_allclose(a.news.outer, 1.0, atol=1e-6)


# ---- who dies, is cut off, or cannot be reached


PHASES = ["part", "ready", "mean", "done", "after done"]


def at(trainer: Ledger, phase: str, what: Callable[[Ledger], None]) -> None:
    """Have something happen to a member as it is about to send the first message of a kind."""
    direct = trainer.member._direct
    assert direct is not None
    peers, connection = direct._peers, direct._connection
    to_peers, to_centre, happened = peers.send, connection.send, list[str]()

    def strike() -> None:
        if not happened:
            happened.append(phase)
            what(trainer)
            raise ConnectionResetError("the test broke it")

    def send_to_peers(to: int, kind: str, payload: Any, **fields: object) -> None:
        if kind == phase:
            strike()
        to_peers(to, kind, payload, **fields)

    def send_to_centre(kind: str, payload: Any = b"", **fields: object) -> None:
        if kind == phase:
            strike()
        to_centre(kind, payload, **fields)
        if f"after {kind}" == phase:
            connection.flush()
            strike()

    peers.send = send_to_peers  # type: ignore[method-assign]
    connection.send = send_to_centre  # type: ignore[method-assign]


@pytest.mark.parametrize("phase", PHASES)
def test_whenever_a_member_dies_the_others_keep_what_they_learnt(started: Start, phase: str) -> None:
    run = started(patience_s=60)
    a, b, c, d = run.together(4, codec="fp32")
    for number, one in enumerate((a, b, c, d)):
        one.learn(float(number + 1))
    at(b, phase, die)
    began = time.monotonic()
    for one in (b, a, c, d):
        one.deliver()
    news = [one.hear() for one in (a, c, d)]
    assert time.monotonic() - began < 5 and all(each.counted for each in news)
    balanced([a, c, d])
    # Its update counts if all had summed it before it died, and for all the same.
    assert any(np.allclose(a.news.outer, value, atol=1e-6) for value in ((1 + 3 + 4) / 3, (1 + 2 + 3 + 4) / 4))
    run.until_direct([a, c, d])
    together(a, c, d)
    balanced([a, c, d])


@pytest.mark.parametrize("phase", PHASES)
def test_whenever_a_member_is_cut_off_it_comes_back_with_what_it_learnt(started: Start, phase: str) -> None:
    run = started(patience_s=60)
    a, b, c = run.together(3, codec="fp32")
    for number, one in enumerate((a, b, c)):
        one.learn(float(number + 1))
    at(b, phase, lambda trainer: None)
    for one in (b, a, c):
        one.deliver()
    for one in (a, c):
        assert one.hear().counted
    b.hear()
    while b.news.round < a.news.round:
        b.hear()
    assert b.member.number == 1
    for _ in range(2):
        run.until_direct([a, b, c])
    balanced([a, b, c])
    np.testing.assert_allclose(b.values - b.news.outer, 0, atol=1e-6)


def test_a_stopped_member_is_shown_out_and_the_round_is_begun_again(started: Start) -> None:
    run = started(silence_s=0.6, patience_s=60)
    a, b, c = run.together(3, codec="fp32", silence_s=0.6)
    for one in (a, b, c):
        one.learn(1.0)
    direct = c.member._direct
    assert direct is not None
    go_on = direct.go_on

    def stand_still() -> None:  # its thread does, as under SIGSTOP
        direct.go_on = go_on  # type: ignore[method-assign]
        time.sleep(2.0)

    direct.go_on = stand_still  # type: ignore[method-assign]
    a.deliver()
    b.deliver()
    assert a.hear().counted and b.hear().counted
    assert any("is begun again" in line for line in run.said), run.said
    np.testing.assert_allclose(a.news.outer, 1.0, atol=1e-6)
    balanced([a, b])
    until(lambda: run.centre.standing().members == 3)
    assert not c.hear().counted
    together(a, b, c)
    balanced([a, b, c])


def test_when_two_lose_each_other_the_round_is_begun_again(started: Start) -> None:
    run = started(patience_s=60)
    a, b, c = run.together(3, codec="fp32")
    for one in (a, b, c):
        one.learn(1.0)
    a.deliver()
    b.deliver()
    direct = a.member._direct
    assert direct is not None
    link = direct._peers._links[b.member.number]
    for stream in link.streams:
        with contextlib.suppress(OSError):
            socket.socket.shutdown(stream.connection.sock, socket.SHUT_RDWR)
    until(lambda: any("is begun again" in line and "has lost its link with member" in line for line in run.said))
    c.deliver()
    assert all(one.hear().counted for one in (a, b, c))
    balanced([a, b, c])
    run.until_direct([a, b, c])
    together(a, b, c)
    balanced([a, b, c])


def test_members_that_cannot_reach_each_other_exchange_through_the_centre(started: Start) -> None:
    run = started()
    listening = run.centre._known.listening
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # it does not listen, so calls are refused
        port = nobody.getsockname()[1]
        run.centre._known.listening = lambda number, host, _: listening(number, host, port)  # type: ignore[method-assign]
        a, b = run.ledger(codec="fp32"), run.ledger()
        until(lambda: any(pair.failures >= 2 for pair in run.centre._known._pairs.values()))
        for _ in range(2):
            a.learn(1.0)
            b.learn(3.0)
            assert all(each.counted for each in together(a, b)) and run.centre._vote is None
        np.testing.assert_allclose(a.news.outer, 4.0, atol=1e-6)


def test_the_centre_may_be_started_anew_in_the_midst_of_a_direct_round(started: Start) -> None:
    run = started()
    a, b = run.together(2, codec="fp32")
    a.learn(1.0)
    b.learn(3.0)
    a.deliver()
    port = run.centre.port
    run.centre.stop()
    run.centre = Centre.listen(
        "127.0.0.1", port, run.key, beat_s=0.1, silence_s=2.0, say=run.said.append, direct=lambda *known: True
    )
    assert not a.hear().counted and not b.hear().counted
    run.until_direct([a, b])
    together(a, b)
    balanced([a, b])
    np.testing.assert_allclose(a.news.outer, 2.0, atol=1e-6)


# ---- what must not get in between members


def port_of(trainer: Ledger) -> int:
    assert trainer.member._direct is not None
    return trainer.member._direct._peers.port


def test_with_another_key_nobody_gets_past_a_members_handshake(started: Start) -> None:
    run = started()
    a, b = run.together(2, codec="fp32")
    with socket.create_connection(("127.0.0.1", port_of(a))) as sock:
        wrapped = identity(new_key()).wrap(sock, listening=False)
        wrapped.settimeout(PATIENCE_S)
        with pytest.raises((ssl.SSLError, ConnectionError)):
            wrapped.do_handshake()
            if not wrapped.recv(1):
                raise ConnectionResetError
    a.learn(1.0)
    assert together(a, b)[0].counted


def knock(run: DirectRun, trainer: Ledger, data: bytes) -> bool:
    """Say something to a member, with the run's key; return whether it hung up."""
    with socket.create_connection(("127.0.0.1", port_of(trainer))) as sock:
        wrapped = identity(run.key).wrap(sock, listening=False)
        wrapped.settimeout(PATIENCE_S)
        with contextlib.suppress(ConnectionError, ssl.SSLError):
            wrapped.do_handshake()
            wrapped.sendall(data)
            while wrapped.recv(65536):
                pass
        return True


def hello(run: DirectRun, /, **change: object) -> bytes:
    return pack("peer", **{"run": run.centre._run, "number": 1, "token": "0" * 32, "of": 2, **change})


@pytest.mark.parametrize(
    "what",
    [
        lambda run: b"\x00" * 12,
        lambda run: pack("part", 4, turn=1, chunk=0) + bytes(4),
        lambda run: pack("beat"),
        lambda run: hello(run),
        lambda run: hello(run, number=7),
        lambda run: hello(run, number=-1),
        lambda run: hello(run, **{"run": "another"}),
        lambda run: hello(run, of=10**6),
        lambda run: hello(run, token=7),
    ],
)
def test_who_was_not_introduced_by_the_centre_is_shown_out(started: Start, what: Callable[[DirectRun], bytes]) -> None:
    run = started()
    a, b = run.together(2, codec="fp32")
    assert knock(run, a, what(run))
    a.learn(1.0)
    assert all(each.counted for each in together(a, b)) and run.centre._vote is not None


def token(run: DirectRun, one: Ledger, other: Ledger) -> str:
    entries = run.centre._known.roster(one.member.number)
    return next(each.token for each in entries if each.number == other.member.number)


@pytest.mark.parametrize(
    "message",
    [
        pack("part", 2**40, turn=1, chunk=0),
        pack("part", 4, turn=10**9, chunk=0) + bytes(4),
        pack("mean", 4, turn="x", chunk=0) + bytes(4),
        pack("update", 4) + bytes(4),
        pack("beat", 10**6),
    ],
)
def test_a_member_that_says_what_no_member_says_is_cut_off_and_nothing_changes(started: Start, message: bytes) -> None:
    run = started()
    a, b = run.together(2, codec="fp32")
    word = token(run, a, b)
    with contextlib.suppress(OSError):
        knock_with = hello(run, number=b.member.number, token=word, of=1) + message
        sock = socket.create_connection(("127.0.0.1", port_of(a)))
        wrapped = identity(run.key).wrap(sock, listening=False)
        wrapped.settimeout(PATIENCE_S)
        wrapped.do_handshake()
        wrapped.sendall(knock_with)
    before = a.news.outer.tobytes()
    a.learn(1.0)
    b.learn(1.0)
    assert all(each.counted for each in together(a, b)) and before != a.news.outer.tobytes()
    balanced([a, b])
    run.until_direct([a, b])
    wrapped.close()


@pytest.mark.parametrize("count", [300, pytest.param(20_000, marks=pytest.mark.full)])
def test_mutilated_words_between_members_neither_crash_them_nor_make_them_grow(started: Start, count: int) -> None:
    run = started()
    a, b = run.together(2, codec="fp32")
    generator = random.Random(1)
    good = [
        hello(run),
        hello(run, number=b.member.number, token=token(run, a, b), of=1)
        + pack("part", 40, turn=3, chunk=1)
        + bytes(40),
        pack("mean", 8, turn=2, chunk=0) + os.urandom(8),
    ]
    tracemalloc.start()
    sock = wrapped = None
    for _ in range(count):
        data = bytearray(generator.choice(good))
        for _ in range(generator.randrange(1, 6)):
            data[generator.randrange(len(data))] = generator.randrange(256)
        if wrapped is None:
            sock = socket.create_connection(("127.0.0.1", port_of(a)))
            wrapped = identity(run.key).wrap(sock, listening=False)
            wrapped.settimeout(PATIENCE_S)
            with contextlib.suppress(OSError):
                wrapped.do_handshake()
        try:
            wrapped.sendall(data[: generator.randrange(len(data) + 1)])
        except OSError:
            wrapped.close()
            wrapped = None
    if wrapped is not None:
        wrapped.close()
    assert tracemalloc.get_traced_memory()[0] < 2e7
    tracemalloc.stop()
    a.learn(1.0)
    b.learn(1.0)
    run.until_direct([a, b])
    together(a, b)
    balanced([a, b])
