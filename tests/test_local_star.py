"""Members that join, leave, die and come back through one centre: real sockets and TLS, numbers instead of a model."""

from __future__ import annotations

import contextlib
import queue
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from local_runs import PATIENCE_S, SIZES, Run, Trainer, cut, die, outer_hash, starting, together, until
from nearlinear.errors import InputError, NearlinearError, PeerLostError
from nearlinear.runtime.local.agreements import RECENT
from nearlinear.runtime.local.centre import Centre
from nearlinear.runtime.local.connection import Connection
from nearlinear.runtime.local.dialling import require_key
from nearlinear.runtime.local.frames import Header, pack
from nearlinear.runtime.local.member import Member, Update
from nearlinear.runtime.local.ticket import Ticket, new_key
from nearlinear.runtime.local.tls import identity
from nearlinear.runtime.local.update import Sizes

pytest.importorskip("cryptography")
pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def started() -> Iterator[Callable[..., Run]]:
    with starting(Run) as start:
        yield start


Start = Callable[..., Run]


@pytest.mark.parametrize(("codec", "error"), [("fp32", 1e-6), ("bf16", 1e-2), ("int8", 1e-2), ("int4", 0.2)])
def test_a_round_ends_at_the_weighted_mean_and_all_hold_the_same_bits(started: Start, codec: str, error: float) -> None:
    run = started()
    a, b = run.join(codec=codec, start=1.0), run.join(start=5.0)
    assert (b.values == a.values).all(), "a newcomer takes over the state of the run"
    together(a, b)
    a.learn(1.0)
    b.learn(4.0)
    a.deliver(samples=3)
    b.deliver(samples=1)
    news = [a.hear(), b.hear()]
    assert all(each.counted and each.members == 2 for each in news)
    np.testing.assert_allclose(news[0].outer, 1.0 + (3 * 1.0 + 4.0) / 4, atol=error * 2)
    assert news[0].outer.tobytes() == news[1].outer.tobytes() and (a.values == b.values).all()


def test_buffers_travel_exactly_under_a_coarse_codec(started: Start) -> None:
    run = started()
    a, b = run.join(codec="int4"), run.join()
    together(a, b)
    step = np.linspace(0.1, 1.0, SIZES.total).astype(np.float32)
    a.learn(step)
    b.learn(step)
    news = together(a, b)[0]
    assert np.allclose(news.outer[SIZES.parameters :], step[SIZES.parameters :], atol=1e-7)
    assert not np.allclose(news.outer[: SIZES.parameters], step[: SIZES.parameters], atol=1e-7)


def test_what_is_learnt_while_a_round_is_on_its_way_belongs_to_the_next(started: Start) -> None:
    run = started()
    a, b = run.join(codec="fp32"), run.join()
    together(a, b)
    for trainer in (a, b):
        trainer.learn(1.0)
        trainer.deliver()
        trainer.learn(0.25)  # meanwhile
    assert a.hear().counted and b.hear().counted
    np.testing.assert_allclose(a.news.outer, 1.0, atol=1e-6)
    np.testing.assert_allclose(a.values, 1.25, atol=1e-6)
    assert together(a, b)[0].outer[0] == pytest.approx(1.25, abs=1e-6)


def test_a_newcomer_in_the_midst_of_a_round_is_called_for_what_it_has(started: Start) -> None:
    run = started()
    a = run.join(codec="fp32")
    together(a)
    b = run.join()
    b.learn(2.0)
    assert b.member.called == -1
    a.deliver()
    until(lambda: b.member.called == b.news.round)
    b.deliver()
    assert a.hear().members == 2 and b.hear().outer[0] == pytest.approx(1.0)


@pytest.mark.parametrize("when", ["before its update", "after its update"])
def test_when_a_member_dies_the_others_keep_what_they_learnt(started: Start, when: str) -> None:
    run = started(patience_s=60)
    a, b, c = (run.join(codec="fp32") for _ in range(3))
    together(a, b, c)
    for trainer in (a, b, c):
        trainer.learn(1.0)
    a.deliver()
    b.deliver()
    if when == "after its update":
        c.deliver()
        a.hear()
        b.hear()
    began = time.monotonic()
    die(c)
    if when == "before its update":
        assert a.hear().counted and b.hear().counted
        assert time.monotonic() - began < 5, "a death is noticed at once, whatever the patience"
    until(lambda: run.centre.standing().members == 2)
    assert any(line.startswith("member 2 on host hung up") for line in run.said), run.said
    news = together(a, b)
    np.testing.assert_allclose(news[0].outer, a.learnt, atol=1e-6)
    assert news[0].outer.tobytes() == news[1].outer.tobytes()


def test_a_member_that_is_late_counts_in_a_later_round(started: Start) -> None:
    run = started(patience_s=0.2)
    a, b = run.join(codec="fp32"), run.join()
    together(a, b)
    b.learn(8.0)
    a.deliver()
    assert a.hear().outer[0] == 0
    assert not b.hear().counted, "it had sent nothing"
    np.testing.assert_allclose(b.values, 8.0)
    assert any("member 1 on host is late for round 1" in line for line in run.said)
    b.deliver()  # nobody waits for it until it is in time again, so it is first
    until(lambda: run.centre._rounds.members[1].update is not None)
    assert together(a)[0].outer[0] == pytest.approx(4.0) and b.hear().counted


def test_a_member_whose_connection_breaks_comes_back_with_what_it_learnt(started: Start) -> None:
    run = started(patience_s=60)
    a, b = run.join(codec="fp32"), run.join()
    together(a, b)
    b.learn(8.0)
    b.deliver()
    until(lambda: run.centre._rounds.members[1].update is not None)
    cut(b)
    assert not b.hear().counted, "the round was not over"
    np.testing.assert_allclose(b.values, 8.0)
    assert b.member.number == 1 and any("called again" in line for line in b.said)
    assert together(a, b)[0].outer[0] == pytest.approx(4.0)


def test_a_member_that_missed_the_news_of_its_own_update_does_not_count_it_twice(started: Start) -> None:
    run = started(patience_s=60)
    a, b = run.join(codec="fp32"), run.join()
    together(a, b)
    b.learn(8.0)
    b.deliver()
    until(lambda: run.centre._rounds.members[1].update is not None)
    held, ticket = threading.Event(), b.member._ticket
    b.member._ticket = Ticket("127.0.0.1", 1, run.key)  # nobody is there: it calls in vain for a while
    cut(b)
    until(lambda: run.centre.standing().members == 1)
    a.deliver()
    assert a.hear().outer[0] == pytest.approx(4.0)
    b.member._ticket = ticket
    held.set()
    assert b.hear().counted
    np.testing.assert_allclose(b.values, 4.0)
    assert together(a, b)[0].outer[0] == pytest.approx(4.0)


def test_a_silent_member_is_shown_out_within_its_time(started: Start) -> None:
    run = started(silence_s=0.6, patience_s=60)
    a, b = run.join(codec="fp32", silence_s=30), run.join(silence_s=30)
    together(a, b)
    b.member._beat_s = 1e4  # as if it were stopped
    until(lambda: run.centre.standing().members == 1)
    assert any("member 1 on host was silent" in line for line in run.said)
    a.deliver()
    assert a.hear().counted


def test_everybody_goes_on_when_the_centre_is_started_anew(started: Start) -> None:
    run = started()
    a, b = run.join(codec="fp32"), run.join()
    a.learn(1.0)
    b.learn(3.0)
    together(a, b)
    port = run.centre.port
    run.centre.stop()
    again = Centre.listen("127.0.0.1", port, run.key, beat_s=0.1, silence_s=2.0)
    try:
        a.learn(1.0)
        assert a.hear().round == 1 and b.hear().round == 1
        np.testing.assert_allclose(a.values, 3.0)
        np.testing.assert_allclose(b.values, 2.0)
        assert together(a, b)[0].outer[0] == pytest.approx(2.5)
    finally:
        again.stop()


def test_a_goodbye_is_heard_and_the_run_is_empty_after_the_last(started: Start) -> None:
    run = started()
    a = run.join()
    assert not run.centre.wait_until_empty(0.0)
    a.member.leave()
    assert run.centre.wait_until_empty(PATIENCE_S)
    assert run.said[-1] == "member 0 on host left after round 0"


def test_members_agree_on_what_the_first_said(started: Start) -> None:
    run = started()
    a, b = run.join(), run.join()
    assert a.member.agree("the seed", {"seed": 7}) == {"seed": 7}
    assert b.member.agree("the seed", {"seed": 8}) == {"seed": 7}
    for each in range(RECENT + 1):
        a.member.agree(f"batch {each}", each, lasts=False)
    assert b.member.agree(f"batch {RECENT}", -1, lasts=False) == RECENT
    assert b.member.agree("batch 0", -1, lasts=False) == -1, "it was long ago"
    assert a.member.agree("batch 0", 3, lasts=False) == 3, "the older one is right, whoever asked first"


# ---- what must not get in


def test_without_the_runs_key_there_is_no_way_in(started: Start) -> None:
    run = started()
    run.join()
    with pytest.raises(InputError, match="has another key than this ticket"):
        Trainer(Ticket("127.0.0.1", run.centre.port, new_key()))
    with pytest.raises(InputError, match="has another key than this ticket"):
        require_key(Ticket("127.0.0.1", run.centre.port, new_key()))
    require_key(Ticket("127.0.0.1", run.centre.port, run.key))
    assert run.centre.standing().members == 1


def test_a_run_that_does_not_answer_is_no_reason_to_refuse_its_ticket() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    require_key(Ticket("127.0.0.1", port, new_key()))


def test_the_run_begins_with_its_founders_parameters_whoever_comes_first(started: Start) -> None:
    run = started(founder="f" * 32)
    early: list[Trainer] = []
    thread = threading.Thread(target=lambda: early.append(run.join(start=1.0, codec="int4")))
    thread.start()
    until(lambda: any(peer.hello is not None for peer in run.centre._peers))
    founder = run.join(start=2.0, codec="int8", identity="f" * 32)
    thread.join(PATIENCE_S)
    assert founder.member.number == 0 and early[0].member.number == 1
    assert (early[0].values == 2.0).all() and early[0].member._codec == "int8"


def test_another_model_is_refused_with_the_numbers(started: Start) -> None:
    run = started()
    run.join()
    with pytest.raises(InputError, match="its model has 999 parameters and 8 values in buffers, this run's 1000 and 8"):
        Trainer(run.ticket, sizes=Sizes(999, 8))
    with pytest.raises(InputError, match="or of other names"):
        Trainer(run.ticket, layout="y")


def test_nobody_there_is_named_with_the_deadline() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with pytest.raises(PeerLostError, match=rf"127.0.0.1:{port} did not answer within 300 ms"):
        Trainer(Ticket("127.0.0.1", port, new_key()), deadline_s=0.3)


def test_that_nobody_answers_is_said_long_before_the_deadline() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        ticket, said = Ticket("127.0.0.1", taken.getsockname()[1], new_key()), list[str]()
    with pytest.raises(PeerLostError):
        Member.join(ticket, "host", SIZES, "x", lambda: np.zeros(SIZES.total), say=said.append, deadline_s=3.0)
    assert said == [f"nobody answers at 127.0.0.1:{ticket.port} (Connection refused); calling for 3 s in all"]


def test_a_port_in_use_is_said() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        pytest.raises(InputError, match=r"cannot listen on 127\.0\.0\.1"),
    ):
        Centre.listen("127.0.0.1", taken.getsockname()[1], new_key())


class Intruder:
    """Someone who has the key and says what no member says."""

    def __init__(self, run: Run) -> None:
        sock = socket.create_connection(("127.0.0.1", run.centre.port))
        self.sock = identity(run.key).wrap(sock, listening=False)
        self.sock.settimeout(PATIENCE_S)
        self.sock.do_handshake()

    def __enter__(self) -> Intruder:
        return self

    def __exit__(self, *_: object) -> None:
        self.sock.close()

    def shown_out(self) -> bool:
        with contextlib.suppress(ConnectionError, ssl.SSLError):
            while self.sock.recv(65536):
                pass
        return True


HELLO = {"version": 2, "identity": "z", "name": "intruder", "parameters": 1000, "buffers": 8, "layout": "x"}
HELLO |= {"codec": "int8", "every": 0, "round": 0, "round_trip": 0.0}
UPDATE: Header = {"round": 0, "base": "", "samples": 1.0, "steps": 1, "seconds": 0.1, "exchange": 0.0}
UPDATE |= {"codec": "fp32", "place": [], "rates": [], "at": 0, "behind": 0, "work": 0.0, "step_work": 0.1}


def test_the_intruders_hello_is_good(started: Start) -> None:
    run = started()
    run.join(codec="int8")
    with Intruder(run) as intruder:
        intruder.sock.sendall(pack("hello", **HELLO))
        until(lambda: run.centre.standing().members == 2)  # so what follows it is what the tests below are of


@pytest.mark.parametrize(
    "messages",
    [
        [b"\x00" * 12],
        [b"GET / HTTP/1.0\r\n\r\n"],
        [pack("update", **UPDATE)],
        [pack("state", 4032), bytes(4032)],
        [pack("hello", 10**9, **HELLO)],
        [pack("hello", **{**HELLO, "parameters": -1})],
        [pack("hello", **{**HELLO, "parameters": 10**30})],
        [pack("hello", **{**HELLO, "version": 3})],
        [pack("hello", **HELLO), pack("hello", **HELLO)],
        [pack("hello", **HELLO), pack("state", 4032), bytes(4032)],
        [pack("hello", **HELLO), pack("update", 10**12, **UPDATE)],
        [pack("hello", **HELLO), pack("update", 4, **UPDATE), bytes(4)],
        [pack("hello", **HELLO), pack("update", 4032, **{**UPDATE, "codec": "int4"})],
        [pack("hello", **HELLO), pack("update", 4032, **{**UPDATE, "round": "0"}), bytes(4032)],
        [pack("hello", **HELLO), pack("update", 4032, **{**UPDATE, "place": [[1]]}), bytes(4032)],
        [pack("hello", **HELLO), pack("agree", 1, name="n", lasts=True), b"{"],
        [pack("hello", **HELLO), pack("agree", 2, name="n"), b"{}"],
        [pack("hello", **HELLO), pack("welcome")],
    ],
)
def test_who_says_what_no_member_says_is_shown_out_and_changes_nothing(started: Start, messages: list[bytes]) -> None:
    run = started()
    a = run.join(codec="int8")
    before = outer_hash(run)
    with Intruder(run) as intruder:
        with contextlib.suppress(OSError):
            for message in messages:
                intruder.sock.sendall(message)
        assert intruder.shown_out()
    until(lambda: run.centre.standing().members == 1)
    if messages[0] == pack("hello", **HELLO):
        assert any(line.startswith("member 1 on intruder sent what is no message (") for line in run.said), run.said
    assert outer_hash(run) == before and a.news.outer[0] == 0
    a.learn(1.0)
    assert together(a)[0].counted


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"base": "f" * 32}, "it holds other outer parameters than the run"),
        ({"nan": True}, "1 of its 1008 values are not finite"),
    ],
)
def test_an_update_that_is_not_admitted_is_named_and_changes_nothing(
    started: Start, change: dict[str, Any], why: str
) -> None:
    run = started(patience_s=0.1)
    a = run.join(codec="int8")
    before = outer_hash(run)
    with Intruder(run) as intruder:
        intruder.sock.sendall(pack("hello", **HELLO))
        until(lambda: run.centre.standing().members == 2)
        values = np.ones(SIZES.total, "<f4")
        values[3] = np.nan if change.pop("nan", False) else 1.0
        intruder.sock.sendall(pack("update", 4032, **{**UPDATE, "base": before, **change}) + values.tobytes())
        until(lambda: any(why in line for line in run.said))
        assert outer_hash(run) == before
        a.learn(1.0)
        a.deliver()
        assert a.hear().outer[0] == pytest.approx(1.0, abs=1e-2)


def test_an_update_of_an_earlier_round_is_left_aside(started: Start) -> None:
    run = started()
    a = run.join(codec="fp32")
    a.learn(1.0)
    stale = a.news
    together(a)
    a.member.deliver(Update(stale, np.ones(SIZES.total, np.float32), 1.0, 1, 0.1))
    with pytest.raises(queue.Empty):
        a.member.news(0.3)
    a.learn(1.0)
    assert together(a)[0].outer[0] == pytest.approx(2.0)


def test_a_thousandfold_update_is_clipped_and_said(started: Start) -> None:
    run = started()
    a = run.join(codec="fp32")
    for _ in range(10):
        a.learn(0.01)
        together(a)
    a.learn(10.0)
    assert together(a)[0].outer[0] == pytest.approx(0.2, abs=0.01)
    assert any("member 0 on host in round 10 is clipped to 0.01 of its size" in line for line in run.said)


def test_noise_on_the_port_does_not_disturb_a_run(started: Start) -> None:
    run = started()
    a = run.join()
    generator = np.random.default_rng(0)
    for _ in range(100):
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", run.centre.port)) as sock:
            sock.sendall(generator.bytes(int(generator.integers(1, 400))))
    a.learn(1.0)
    assert together(a)[0].counted and run.centre.standing().members == 1
    assert isinstance(a.member._connection, Connection) and not issubclass(NearlinearError, OSError)
