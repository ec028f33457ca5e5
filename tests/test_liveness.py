"""Who still answers: the decision as tables with a made-up clock, then sockets, then processes that are killed."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nearlinear.errors import InputError, PeerLostError
from nearlinear.runtime.liveness import Liveness
from nearlinear.runtime.membership import Loss, Membership, Progress

TOKEN = "9f" * 16
SOON = 10.0  # seconds that anything may take on a busy machine; nothing here waits that long when it works
unix = pytest.mark.skipif(not hasattr(os, "fork"), reason="stops and forks processes")

# ---- the decision ----


def watching(*ranks: int, me: int = 0) -> Membership:
    """Return a membership of four at time 0, with a beat of 1 s and a limit of 5 s, that watches ``ranks``."""
    members = Membership(me, f"host-{me}", 4, beat_s=1, silence_s=5, now=0)
    for rank in ranks:
        members.joined(rank, f"host-{rank}", 0)
    return members


def turns(members: Membership, *times: float, heard: tuple[int, ...] = ()) -> Loss | None:
    """Let the watcher run at each of ``times``, hearing ``heard`` each time; return who is lost by then."""
    for now in times:
        members.wake(now)
        for rank in heard:
            members.heard(rank, now)
        members.judge(now)
    return members.loss


@pytest.mark.parametrize(
    ("times", "heard", "expected"),
    [
        pytest.param([1, 2, 3, 4, 5], (1, 2), None, id="both beat"),
        pytest.param([1, 2, 3, 4, 5], (1,), None, id="silent, but not yet longer than the limit"),
        pytest.param([1, 2, 3, 4, 5, 6], (1,), "rank 2 on host-2: silent for 6.0 s", id="one silent"),
        pytest.param([1, 2, 3, 4, 5, 6], (), "rank 1 on host-1: silent for 6.0 s", id="all silent: the lowest rank"),
        pytest.param([1, 60], (), None, id="this process was stopped for a minute"),
        pytest.param([1, 60, 61, 62, 63, 64, 65], (), None, id="stopped: everyone has the whole limit again"),
        pytest.param([1, 60, 61, 62, 63, 64, 65, 66], (), "rank 1 on host-1: silent for 6.0 s", id="silent after it"),
        pytest.param([1, 5.5], (), None, id="stopped for less than the limit, which would still accuse everyone"),
        pytest.param([1, 5, 9, 13, 17, 21], (), "rank 1 on host-1: silent for 6.0 s", id="late at every turn"),
    ],
)
def test_silence_counts_only_while_this_process_is_awake(
    times: list[float], heard: tuple[int, ...], expected: str | None
) -> None:
    loss = turns(watching(1, 2), *times, heard=heard)
    assert (str(loss) if loss else None) == expected


@given(st.lists(st.floats(0.01, 100), max_size=50))
def test_a_rank_heard_at_every_turn_is_never_accused(gaps: list[float]) -> None:
    members, now = watching(1), 0.0
    for gap in gaps:
        now += gap
        members.wake(now)
        members.judge(now - gap)  # as the loop does: of the time before it looked at the sockets
        members.heard(1, now)
    assert members.loss is None


@given(st.lists(st.floats(0.01, 100), max_size=50))
def test_a_silent_rank_is_accused_within_the_limit_and_two_beats_whatever_was_before(gaps: list[float]) -> None:
    members, now = watching(1), 0.0
    for gap in gaps:
        now += gap
        turns(members, now, heard=(1,))
    assert turns(members, *(now + k for k in range(1, 8))) is not None


def test_a_beat_that_waited_unread_is_not_silence() -> None:
    members = watching(1)
    turns(members, 1, 2, 3, 4, heard=(1,))
    members.wake(4.5)  # the wait begins; rank 1's beats come, but this thread gets its turn only at 9.4
    members.wake(9.4)
    members.judge(4.5)
    assert members.loss is None


@pytest.mark.parametrize(
    ("happens", "expected"),
    [
        pytest.param(lambda m: m.ended(2, "its process ended"), "rank 2 on host-2: its process ended", id="hangs up"),
        pytest.param(lambda m: (m.left(2), m.ended(2, "its process ended")), None, id="hangs up after a goodbye"),
        pytest.param(lambda m: (m.left(2), turns(m, *range(9), heard=(1,))), None, id="silent after a goodbye"),
        pytest.param(
            lambda m: (m.ended(2, "its process ended"), m.ended(1, "its process ended")),
            "rank 2 on host-2: its process ended",
            id="what follows from the first loss does not hide it",
        ),
        pytest.param(
            lambda m: m.told(1, Loss(0, "host-0", "silent for 5.1 s", 5.1)),
            "rank 1 on host-1: gave rank 0 up, which was silent for 5.1 s",
            id="another rank gave this one up",
        ),
        pytest.param(lambda m: m.told(1, Loss(2, "x", "its process ended")), None, id="rank 1 does not judge rank 2"),
    ],
)
def test_rank_0_judges(happens: Callable[[Membership], object], expected: str | None) -> None:
    members = watching(1, 2)
    happens(members)
    assert (str(members.loss) if members.loss else None) == expected


@pytest.mark.parametrize(
    ("happens", "expected"),
    [
        pytest.param(
            lambda m: m.told(0, Loss(2, "host-2", "its process ended")),
            "rank 2 on host-2: its process ended",
            id="rank 0 tells of another",
        ),
        pytest.param(
            lambda m: m.told(0, Loss(1, "host-1", "silent for 5.1 s", 5.1)),
            "rank 0 on host-0: gave rank 1 up, which was silent for 5.1 s",
            id="rank 0 tells of this one",
        ),
        pytest.param(
            lambda m: m.ended(0, "its process ended"), "rank 0 on host-0: its process ended", id="rank 0 hangs up"
        ),
        pytest.param(lambda m: turns(m, *range(7)), "rank 0 on host-0: silent for 6.0 s", id="rank 0 is silent"),
        pytest.param(lambda m: (m.left(0), m.ended(0, "its process ended")), None, id="rank 0 leaves"),
        pytest.param(
            lambda m: (m.placed(Progress(2, "host-2"), 0), turns(m, *range(9), heard=(0,))),
            None,
            id="only rank 0 is watched, not who stands in its table",
        ),
    ],
)
def test_the_other_ranks_judge_rank_0_alone(happens: Callable[[Membership], object], expected: str | None) -> None:
    members = watching(0, me=1)
    happens(members)
    assert (str(members.loss) if members.loss else None) == expected


def test_the_table_says_where_everyone_is_and_since_when() -> None:
    members = watching(1, 2)
    members.moved(1, 12, "gradient exchange", 3)
    members.moved(1, 12, "gradient exchange", 4)  # still there
    members.moved(2, 11, "your code", 2)
    members.left(2)
    table = members.table(10)
    assert [str(row) for row in table.values()] == [
        "rank 0 on host-0: started, step 0, for 10 s",
        "rank 1 on host-1: gradient exchange, step 12, for 7 s",
        "rank 2 on host-2: left the run after step 11",
    ]
    other = watching(0, me=3)
    for row in table.values():
        other.placed(row, 100)
    assert other.table(101)[1] == Progress(1, "host-1", 12, "gradient exchange", age_s=8)


def test_a_rank_joins_once_and_only_if_there_is_such_a_rank() -> None:
    members = watching(1)
    with pytest.raises(InputError, match=r"rank 1 is already in the run, on host-1; give every process a RANK"):
        members.joined(1, "host-9", 1)
    with pytest.raises(InputError, match=r"no rank 4 among 4; ranks run from 0 to 3"):
        members.joined(4, "host-9", 1)
    assert members.missing() == [2, 3]


def test_a_limit_without_room_for_a_late_beat_is_refused() -> None:
    with pytest.raises(InputError, match=r"beats every 1 s cannot be called silent after 1.5 s; allow two beats"):
        Liveness.listen(2, TOKEN, host="a", beat_s=1, silence_s=1.5)
    with pytest.raises(InputError, match="allow two beats"):
        Liveness.connect(("127.0.0.1", 1), 1, TOKEN, host="a", beat_s=1, silence_s=1.5)


# ---- sockets ----


@pytest.fixture
def ranks() -> Iterator[Callable[..., Liveness]]:
    """Start ranks in this process, the first of them rank 0, and let all leave at the end."""
    started: list[Liveness] = []

    def start(size: int = 0, rank: int = 0, **how: Any) -> Liveness:
        how = {"beat_s": 0.1, "silence_s": 5.0, "host": f"host-{rank}", **how}
        if rank == 0:
            started.append(Liveness.listen(size, TOKEN, **how))
        else:
            address = ("127.0.0.1", started[0].port)
            started.append(Liveness.connect(address, rank, TOKEN, **{"deadline_s": SOON, **how}))
        return started[-1]

    yield start
    for liveness in reversed(started):
        liveness.leave()


def frame(message: object) -> bytes:
    body = json.dumps(message).encode()
    return len(body).to_bytes(4, "big") + body


def hello(rank: object, **more: object) -> bytes:
    return frame({"kind": "hello", "rank": rank, "host": f"host-{rank}", "token": TOKEN, **more})


def by_hand(port: int, *messages: bytes) -> socket.socket:
    """Return a connection that has said ``messages`` and, if one was a hello, has been answered."""
    sock = socket.create_connection(("127.0.0.1", port), timeout=SOON)
    sock.sendall(b"".join(messages))
    return sock


def test_who_has_not_come_is_named_until_he_comes(ranks: Callable[..., Liveness]) -> None:
    zero = ranks(3)
    assert zero.missing() == [1, 2]
    ranks(rank=2)
    assert zero.missing() == [1]
    ranks(rank=1)
    assert zero.missing(timeout_s=SOON) == []


JUNK = [
    b"",
    b"GET / HTTP/1.1\r\n\r\n",
    b"\x00\x00",
    b"\x00\x00\x10\x01" + b" " * 4097,
    b"\xff\xff\xff\xff" + bytes(100),
    b"\x00\x00\x0f\xff" + b"[" * 4095,
    b"\x00\x00\x00\x02\xff\xfe",
    frame([]),
    frame({"kind": 1}),
    frame({"kind": "beat", "step": 1, "at": ""}),
    frame({"kind": "lost", "rank": 0, "host": "", "why": "", "silent_s": 0}),
    frame({"kind": "leave"}),
    hello(1, token="9e" * 16),
    hello(1, token=None),
    hello(1, token="\ud800"),
    hello(True),
    hello("1"),
    hello(1.0),
    hello(1, host=7),
    hello(-1),
    hello(0),
    hello(3),
    hello(2),
    *(random.Random(seed).randbytes(64) for seed in range(40)),
]


def test_junk_at_the_port_changes_nothing(ranks: Callable[..., Liveness]) -> None:
    zero = ranks(3)
    two = ranks(rank=2)
    for junk in JUNK:
        with by_hand(zero.port, junk) as sock, contextlib.suppress(ConnectionError):
            sock.shutdown(socket.SHUT_WR)
            while answer := sock.recv(4096):
                assert b"refused" in answer
    assert zero.missing() == [1]
    ranks(rank=1)
    assert zero.missing(timeout_s=SOON) == []
    assert sorted(two.progress()) == [0, 1, 2]
    assert zero.lost() is None and two.lost() is None


def test_a_crowd_of_strangers_does_not_keep_a_rank_out(ranks: Callable[..., Liveness]) -> None:
    zero = ranks(2)
    with contextlib.ExitStack() as crowd:
        strangers = [crowd.enter_context(by_hand(zero.port)) for _ in range(100)]
        assert strangers[0].recv(1) == b""  # hung up: it made room
        ranks(rank=1)
    assert zero.missing() == []


def test_who_does_not_introduce_himself_is_shown_out(
    ranks: Callable[..., Liveness], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nearlinear.runtime.liveness.HELLO_S", 0.2)
    zero = ranks(2)
    with by_hand(zero.port, hello(1)[:9]) as stranger:
        assert stranger.recv(1) == b""
    assert zero.missing() == [1]


def test_nonsense_from_a_rank_of_the_run_is_its_loss(ranks: Callable[..., Liveness]) -> None:
    zero = ranks(2)
    with by_hand(zero.port, hello(1), frame({"kind": "dance"})):
        assert str(zero.wait_lost(SOON)) == "rank 1 on host-1: sent what is no message (of kind 'dance')"


def test_the_second_process_with_the_same_rank_is_told_so(ranks: Callable[..., Liveness]) -> None:
    zero = ranks(3)
    ranks(rank=1)
    with pytest.raises(InputError, match="rank 1 is already in the run, on host-1"):
        ranks(rank=1, host="host-9")
    with pytest.raises(InputError, match="no rank 3 among 3"):
        ranks(rank=3)
    assert zero.lost() is None


def test_a_rank_of_another_run_gives_up_at_its_deadline(ranks: Callable[..., Liveness]) -> None:
    zero = ranks(2)
    with pytest.raises(PeerLostError, match=rf"rank 0 at 127.0.0.1:{zero.port} .* within 0.3 s \(it hung up") as lost:
        Liveness.connect(("127.0.0.1", zero.port), 1, "other", host="x", deadline_s=0.3)
    assert lost.value.rank == 0
    assert zero.missing() == [1]


def test_a_rank_0_that_does_not_answer_is_given_up_at_the_deadline() -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:
        port = mute.getsockname()[1]
        begin = time.monotonic()
        with pytest.raises(PeerLostError, match=rf"rank 0 at 127.0.0.1:{port} did not welcome .* 0.3 s \(timed out\)"):
            Liveness.connect(("127.0.0.1", port), 1, TOKEN, host="x", deadline_s=0.3)
        assert 0.2 < time.monotonic() - begin < SOON
    with pytest.raises(PeerLostError, match=r"within 0.1 s \(.*refused"):
        Liveness.connect(("127.0.0.1", port), 1, TOKEN, host="x", deadline_s=0.1)


def test_a_rank_that_waits_learns_where_the_others_are(ranks: Callable[..., Liveness]) -> None:
    zero, one, two = ranks(3), ranks(rank=1), ranks(rank=2)
    zero.where(12, "gradient exchange")
    one.where(12, "gradient exchange")
    two.where(11, "your code \x1b[31m" + "é" * 9999)
    two.progress()  # its beat has gone out
    seen = one.progress()
    assert [(row.host, row.step, row.at[:10]) for row in seen.values()] == [
        ("host-0", 12, "gradient e"),
        ("host-1", 12, "gradient e"),
        ("host-2", 11, "your code "),
    ]
    assert len(seen[2].at) == 200 and "\x1b" not in seen[2].at
    two.leave()
    assert one.progress()[2].left and zero.progress()[2].left
    zero.leave()
    left = one.progress()
    assert left[0].left and left[2].left  # what was known before is still there when rank 0 is not


@pytest.mark.parametrize("leaver", [1, 0])
def test_who_leaves_is_remembered_at_its_last_step(ranks: Callable[..., Liveness], leaver: int) -> None:
    # It beats once, when it starts, and not again for half a minute; its goodbye used to leave that as its last step.
    slow = {"beat_s": 30.0, "silence_s": 90.0}
    pair = [ranks(2, **(slow if leaver == 0 else {})), ranks(rank=1, **(slow if leaver == 1 else {}))]
    if leaver == 1:
        pair[1].progress()  # its first beat has gone out
    pair[leaver].where(12, "gradient exchange")
    pair[leaver].leave()
    other = 1 - leaver
    assert str(pair[other].progress()[leaver]) == f"rank {leaver} on host-{leaver}: left the run after step 12"
    assert pair[leaver].progress()[leaver].step == 12


@pytest.mark.parametrize("failing", [2, 0])
def test_who_hangs_up_has_ended_for_the_others_at_once(ranks: Callable[..., Liveness], failing: int) -> None:
    everyone = [ranks(3, silence_s=60.0), *(ranks(rank=rank, silence_s=60.0) for rank in (1, 2))]
    everyone[failing].hang_up()
    for rank in {0, 1, 2} - {failing}:
        assert str(everyone[rank].wait_lost(SOON)) == f"rank {failing} on host-{failing}: its process ended"
    assert everyone[failing].lost() is None


def test_a_mute_rank_is_named_on_the_others(ranks: Callable[..., Liveness]) -> None:
    zero = ranks(3, silence_s=0.5)
    one = ranks(rank=1)
    with by_hand(zero.port, hello(2)):
        assert zero.missing(timeout_s=SOON) == []
        for liveness in (zero, one):
            loss = liveness.wait_lost(SOON)
            assert loss is not None and str(loss).startswith("rank 2 on host-2: silent for 0.")
            assert 0.5 < loss.silent_s < SOON


def test_who_joins_after_a_loss_is_told_of_it(ranks: Callable[..., Liveness]) -> None:
    zero = ranks(3)
    by_hand(zero.port, hello(2)).close()
    assert str(zero.wait_lost(SOON)) == "rank 2 on host-2: its process ended"
    assert str(ranks(rank=1).wait_lost(SOON)) == "rank 2 on host-2: its process ended"


def test_sixty_four_ranks_see_each_other_and_one_loss(ranks: Callable[..., Liveness]) -> None:
    told: list[Loss] = []
    slow = {"beat_s": 0.5, "silence_s": 20.0, "on_lost": told.append}
    zero = ranks(64, **slow)
    everyone = [zero]
    joining = [
        threading.Thread(target=lambda rank=rank: everyone.append(ranks(rank=rank, **slow))) for rank in range(1, 63)
    ]
    for thread in joining:
        thread.start()
    for thread in joining:
        thread.join(SOON)
    last = by_hand(zero.port, hello(63))
    assert zero.missing(timeout_s=SOON) == []
    assert sorted(everyone[7].progress(SOON)) == list(range(64))
    last.close()
    assert {str(liveness.wait_lost(SOON)) for liveness in everyone} == {"rank 63 on host-63: its process ended"}
    for liveness in reversed(everyone):
        liveness.leave()
    assert len(told) == 63


def test_when_all_leave_nobody_is_lost(ranks: Callable[..., Liveness]) -> None:
    everyone = [ranks(8), *(ranks(rank=rank) for rank in range(1, 8))]
    leaving = [threading.Thread(target=liveness.leave) for liveness in everyone]
    begin = time.monotonic()
    for thread in leaving:
        thread.start()
    for thread in leaving:
        thread.join(SOON)
    assert time.monotonic() - begin < 1.5  # nobody waited for an answer that never came
    assert [liveness.lost() for liveness in everyone] == [None] * 8


# ---- processes ----

SILENCE = 1.0
WORKER = """
import json, os, signal, sys, time
from nearlinear.runtime.liveness import Liveness

def tell(what):
    print(json.dumps(what), flush=True)

rank, size, port, token = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
how = dict(host=f"host-{rank}", beat_s=0.2, silence_s=float(sys.argv[5]),
           on_lost=lambda loss: tell([time.monotonic(), str(loss)]))
if rank == 0:
    live = Liveness.listen(size, token, **how)
    tell(live.port)
    assert live.missing(20) == []
else:
    live = Liveness.connect(("127.0.0.1", port), rank, token, deadline_s=20, **how)
tell("ready")
for command in sys.stdin:
    match command.strip():
        case "leave":
            live.leave()
        case "fork":
            child = os.fork()
            if child == 0:
                signal.alarm(20)
                live.leave()  # as an exit handler of the parent's would: no effect on the parent
                signal.pause()
            tell(child)
        case "progress":
            tell(sorted(live.progress()))
        case "exit":
            break
tell("over")
"""


def _hear(lines: Iterable[str], said: queue.Queue[Any]) -> None:
    for line in lines:
        said.put(json.loads(line))


class Processes:
    """A run of real processes; ``said[rank]`` is what each prints."""

    def __init__(self, size: int) -> None:
        self.processes: list[subprocess.Popen[str]] = []
        self.said: list[queue.Queue[Any]] = []
        port = self._start(0, size, 0)
        for rank in range(1, size):
            self._start(rank, size, port)
        for rank in range(size):
            assert self.hears(rank) == "ready"

    def _start(self, rank: int, size: int, port: int) -> Any:
        words = [sys.executable, "-c", WORKER, *map(str, (rank, size, port, TOKEN, SILENCE))]
        process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        said: queue.Queue[Any] = queue.Queue()
        assert process.stdout is not None
        threading.Thread(target=_hear, args=(process.stdout, said), daemon=True).start()
        self.processes.append(process)
        self.said.append(said)
        return self.hears(rank) if rank == 0 else None

    def hears(self, rank: int) -> Any:
        return self.said[rank].get(timeout=20)

    def tell(self, rank: int, command: str) -> None:
        stdin = self.processes[rank].stdin
        assert stdin is not None
        stdin.write(command + "\n")
        stdin.flush()

    def signal(self, rank: int, number: int) -> None:
        self.processes[rank].send_signal(number)

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()


@pytest.fixture
def run() -> Iterator[Callable[[int], Processes]]:
    with contextlib.ExitStack() as started:

        def start(size: int) -> Processes:
            return started.enter_context(contextlib.closing(Processes(size)))

        yield start


@unix
@pytest.mark.parametrize("victim", [2, 0])
def test_a_killed_rank_is_named_by_all_at_once(run: Callable[[int], Processes], victim: int) -> None:
    ranks = run(4)
    begin = time.monotonic()
    ranks.signal(victim, signal.SIGKILL)
    for rank in {0, 1, 2, 3} - {victim}:
        when, loss = ranks.hears(rank)
        assert loss == f"rank {victim} on host-{victim}: its process ended"
        assert when - begin < SILENCE  # by its hanging up, not by its silence


@unix
def test_a_killed_rank_is_named_at_once_though_its_data_loader_lives_on(run: Callable[[int], Processes]) -> None:
    ranks = run(2)
    ranks.tell(1, "fork")
    child = ranks.hears(1)
    try:
        ranks.tell(1, "progress")
        assert ranks.hears(1) == [0, 1]  # the child has not hung up for its parent
        ranks.signal(1, signal.SIGKILL)
        assert ranks.hears(0)[1] == "rank 1 on host-1: its process ended"
    finally:
        os.kill(child, signal.SIGKILL)


@unix
def test_a_stopped_rank_is_named_within_the_limit_and_learns_of_it_later(run: Callable[[int], Processes]) -> None:
    ranks = run(3)
    begin = time.monotonic()
    ranks.signal(2, signal.SIGSTOP)
    for rank in (0, 1):
        when, loss = ranks.hears(rank)
        assert loss.startswith("rank 2 on host-2: silent for ")
        assert when - begin < SILENCE + 2
    for rank in (0, 1):  # the others do not wait for it
        ranks.tell(rank, "exit")
        assert ranks.processes[rank].wait(20) == 0
    ranks.signal(2, signal.SIGCONT)
    assert ranks.hears(2)[1].startswith("rank 0 on host-0: gave rank 2 up, which was silent for ")


@unix
def test_a_stopped_rank_0_is_named_by_all_and_learns_of_it_later(run: Callable[[int], Processes]) -> None:
    ranks = run(3)
    begin = time.monotonic()
    ranks.signal(0, signal.SIGSTOP)
    for rank in (1, 2):
        when, loss = ranks.hears(rank)
        assert loss.startswith("rank 0 on host-0: silent for ")
        assert when - begin < SILENCE + 2
    ranks.signal(0, signal.SIGCONT)
    assert " gave rank 0 up, which was silent for " in ranks.hears(0)[1]


@unix
def test_a_machine_that_sleeps_and_wakes_accuses_nobody(run: Callable[[int], Processes]) -> None:
    ranks = run(3)
    for rank in (0, 1, 2):
        ranks.signal(rank, signal.SIGSTOP)
    time.sleep(1.5 * SILENCE)  # the closed lid itself; nothing is awaited here
    for rank in (0, 1, 2):
        ranks.signal(rank, signal.SIGCONT)
    for rank in (1, 2, 0):
        ranks.tell(rank, "progress")
        assert ranks.hears(rank) == [0, 1, 2]
    for rank in (1, 2, 0):
        ranks.tell(rank, "leave")
        ranks.tell(rank, "exit")
        assert ranks.hears(rank) == "over"  # and nothing before it


@unix
def test_a_rank_that_ends_without_leaving_is_lost_and_one_that_leaves_is_not(run: Callable[[int], Processes]) -> None:
    ranks = run(3)
    ranks.tell(1, "leave")
    ranks.tell(1, "exit")
    assert ranks.processes[1].wait(20) == 0
    ranks.tell(2, "exit")
    assert ranks.hears(0)[1] == "rank 2 on host-2: its process ended"
