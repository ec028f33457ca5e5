"""Turning one process's updates into rounds with the others, while that process goes on training.

    training thread    ──── steps ────▶ deliver ──── steps, meanwhile ────▶ news ──── steps ────▶
    this thread                            └─ encode ─ send ─ ... ─ receive ─ decode ─┘

The thread keeps the connection to the centre, beats, and applies every round's mean to the outer parameters. Whether
the mean comes from the centre or is made with the other members (``direct.py``) is said with the news of the round
before. When the connection breaks it calls again, under the same identity, until the deadline: the training thread
notices nothing but an update that did not count.
"""

from __future__ import annotations

import contextlib
import functools
import json
import queue
import secrets
import selectors
import socket
import ssl
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from nearlinear.errors import DriftError, InputError, NearlinearError, PeerLostError
from nearlinear.runtime.local.chunks import Chunks
from nearlinear.runtime.local.codecs import Feedback, Floats
from nearlinear.runtime.local.connection import Connection, Malformed
from nearlinear.runtime.local.dialling import dial, is_of_another_key, wrong_key
from nearlinear.runtime.local.direct import Direct
from nearlinear.runtime.local.exchange import Plan
from nearlinear.runtime.local.frames import TEXT, Header, number, numbers, places, text, text_of, texts, truth, whole
from nearlinear.runtime.local.ticket import Ticket
from nearlinear.runtime.local.tls import identity as identity_of
from nearlinear.runtime.local.update import Sizes, hash_of, silence
from nearlinear.units import seconds

VERSION = 2
TELL_S = 2.0  # that nobody answers, before a person is told
AGAIN_S = 0.5  # the longest pause between two calls
GOODBYE_S = 2.0  # the longest that a goodbye is waited for
PAUSE_S = 0.002  # between two looks at the sockets while much comes in
SLOWEST = 1e4  # bytes per second, of a link that one could train over

_READ, _WRITE = selectors.EVENT_READ, selectors.EVENT_WRITE


@dataclass(frozen=True, slots=True)
class News:
    """What a member learns when a round is over, or when it enters.

    Args:
        round: The round in hand from now on.
        outer: The outer parameters and buffers it starts from, shape ``(n,)``; not to be changed.
        counted: The update under way is in them; whatever else was learnt since then is not.
        every: Steps until the next update.
        members: How many are here.
        share: Where this member's part of every batch begins and ends, as fractions.
        place: Pass and batch of every loader, as far as the run has come.
        at: Steps that the run has made.
        behind: How many of them the one whose learning rates follow has missed; nobody's schedule is truer.
        rates: Its learning rates, of every group of the optimizer.
    """

    round: int
    outer: Floats
    counted: bool
    every: int
    members: int
    share: tuple[float, float]
    place: list[tuple[int, int]]
    at: int
    behind: int
    rates: list[float]


@dataclass(frozen=True, slots=True)
class Update:
    """What a member has to tell.

    Args:
        after: The newest news when it was made; if there is newer, it is too late, and that news says so.
        change: The pseudo-gradient: outer parameters less what they have become here, shape ``(n,)``.
        samples: What it counts for in the mean; with 0 it only says that it is ready.
        steps: Steps it was made in.
        seconds: Their time.
        work: Seconds of the processor that rounds took since the last update.
        step_work: And that a step took.
        at: Steps that the run has made, as far as is known here.
        behind: How many of them this member was not there for.
        place: Pass and batch of every loader.
        rates: Learning rates of every group of the optimizer, by this member's own schedule.
    """

    after: News
    change: Floats
    samples: float
    steps: int
    seconds: float
    work: float = 0.0
    step_work: float = 0.0
    at: int = 0
    behind: int = 0
    place: Sequence[tuple[int, int]] = ()
    rates: Sequence[float] = ()


@dataclass(slots=True)
class _Asked:
    name: str
    value: Any
    lasts: bool
    answer: queue.SimpleQueue[Any]


class Member:
    """One process's part in the rounds; ``join`` makes one.

    Attributes:
        number: Which member of the run it is.
        called: The round in which it is to send what it has, being new in it; -1: none.
        worked: Seconds of the processor that its thread has taken so far.
    """

    @classmethod
    def join(
        cls,
        ticket: Ticket,
        name: str,
        sizes: Sizes,
        layout: str,
        initial: Callable[[], Floats],
        *,
        codec: str = "int8",
        every: int = 0,
        say: Callable[[str], None] = lambda line: None,
        deadline_s: float = 300.0,
        silence_s: float = 5.0,
        beat_s: float = 1.0,
        identity: str | None = None,
    ) -> Self:
        """Return a member that has entered; its first ``news`` is there.

        Args:
            ticket: Of the run.
            name: This machine's name, for messages.
            sizes: How much it trains.
            layout: A digest of the names and shapes, which must be the same on all members.
            initial: Gives the parameters to begin with, if this is the first member of the run.
            codec: Of updates, if this is the first member.
            every: Steps per round, if this is the first member; 0: chosen from the measured link.
            say: Told, in the member's thread, what a person should know.
            deadline_s: Seconds to keep trying, now and whenever the connection breaks.
            silence_s: Seconds of silence after which the centre is called anew.
            beat_s: Seconds between two beats.
            identity: What it is known by when it comes back; ``None``: one of its own.

        Raises:
            InputError: The run does not know the ticket's key, or refuses this member.
            PeerLostError: Nobody answered within ``deadline_s``.
        """
        hello = {"version": VERSION, "identity": identity or secrets.token_hex(16), "name": name, "layout": layout}
        hello |= {"parameters": sizes.parameters, "buffers": sizes.buffers, "codec": codec, "every": every}
        member = cls(ticket, sizes, hello, initial, say, deadline_s, silence(silence_s, sizes), beat_s)
        try:
            member._wait_until_entered(deadline_s + sizes.state_bytes / SLOWEST)
        except BaseException:
            member.leave()
            raise
        return member

    def __init__(
        self,
        ticket: Ticket,
        sizes: Sizes,
        hello: dict[str, Any],
        initial: Callable[[], Floats],
        say: Callable[[str], None],
        deadline_s: float,
        silence_s: float,
        beat_s: float,
    ) -> None:
        self.number = self.called = -1
        self.received = self.sent = 0  # bytes, of connections that are over
        self.worked = 0.0
        self._where = f"{ticket.host}:{ticket.port}"
        self._ticket, self._sizes, self._hello, self._initial, self._say = ticket, sizes, hello, initial, say
        self._deadline_s, self._silence_s, self._beat_s = deadline_s, silence_s, beat_s
        self._identity = identity_of(ticket.key)
        self._last: News | None = None
        self._hash = ""  # of its outer parameters
        self._who: list[str] = []  # identities of those whose updates were in the round before
        self._run = ""
        self._codec = "fp32"
        self._feedback = Feedback("fp32", sizes.parameters)
        self._owed = Feedback("fp32", sizes.parameters)  # of the means that are encoded here
        self._alone = False
        self._turn = -1
        self._plan: Plan | None = None  # of a direct exchange of this round's updates
        self._waits = False  # the others are in the midst of one
        self._direct: Direct | None = None  # on this connection
        self._round_trip_s = 0.0  # to the centre
        self._under_way: Update | None = None
        self._delivered = 0.0  # when
        self._exchange_s = 0.0
        self._asked: dict[str, _Asked] = {}
        self._agreed: dict[str, Any] = {}  # what was agreed on for the whole run
        self._news: queue.SimpleQueue[News] = queue.SimpleQueue()
        self._orders: queue.SimpleQueue[Update | _Asked] = queue.SimpleQueue()
        self._error: NearlinearError | None = None
        self._leave = False
        self._entered = False  # on this connection
        self._in, self._over = threading.Event(), threading.Event()
        self._connection: Connection | None = None
        self._bell, self._button = socket.socketpair()
        self._bell.setblocking(False)
        self._button.setblocking(False)
        self._thread = threading.Thread(target=self._serve, name="nearlinear-member", daemon=True)
        self._thread.start()

    def deliver(self, update: Update) -> None:
        """Begin to send an update; the next ``news`` says whether it counted."""
        self._orders.put(update)
        self._ring()

    def news(self, timeout_s: float = 0.0) -> News:
        """Return the oldest news that was not returned yet, after waiting up to ``timeout_s`` for it.

        Raises:
            queue.Empty: There is none.
            NearlinearError: The run is lost to this member; the message says why.
        """
        until = time.monotonic() + timeout_s
        while True:
            try:
                return self._news.get(timeout=max(0.0, min(0.5, until - time.monotonic())))
            except queue.Empty:
                if self._error is not None:
                    raise self._error from None
                if time.monotonic() >= until:
                    raise

    def agree(self, name: str, value: Any, lasts: bool = True) -> Any:
        """Return what the first that asked under ``name`` gave as its value.

        Args:
            name: The same on all members.
            value: JSON.
            lasts: Whether it is known for the whole run; else the member with the lowest number of those that asked
                so far is the first, and the answer is forgotten after a while.

        Raises:
            NearlinearError: The run is lost to this member.
            PeerLostError: The centre did not answer in time.
        """
        if len(json.dumps(value)) > TEXT:
            raise InputError(f"{name} takes more than {TEXT} bytes; it is too much to agree on")
        asked = _Asked(name, value, lasts, queue.SimpleQueue())
        self._orders.put(asked)
        self._ring()
        until = time.monotonic() + self._deadline_s
        while True:
            with contextlib.suppress(queue.Empty):
                return asked.answer.get(timeout=0.5)
            if self._error is not None:
                raise self._error
            if time.monotonic() > until:
                raise PeerLostError(f"{self._where} did not answer within {seconds(self._deadline_s)} about {name}")

    @property
    def traffic(self) -> tuple[int, int]:
        """Bytes received and sent so far, over all connections."""
        connection, direct = self._connection, self._direct
        found = [(self.received, self.sent), (0, 0) if direct is None else direct.bytes]
        if connection is not None and not connection.closed:
            found.append((connection.received, connection.sent))
        return sum(received for received, _ in found), sum(sent for _, sent in found)

    def leave(self) -> None:
        """Say goodbye, and end the thread."""
        self._leave = True
        self._ring()
        self._thread.join(5.0 + self._beat_s)

    def _wait_until_entered(self, limit_s: float) -> None:
        until = time.monotonic() + limit_s
        while not self._in.wait(0.2):
            if self._error is not None:
                raise self._error
            if time.monotonic() > until:
                raise PeerLostError(f"{self._where} did not send the run's state within {seconds(limit_s)}")

    def _ring(self) -> None:
        with contextlib.suppress(OSError):  # it is rung already, or the thread has ended
            self._button.send(b".")

    # ---- the thread

    def _serve(self) -> None:
        try:
            while not self._leave:
                self._call()
                self._talk()
        except NearlinearError as error:
            self._error = error
        finally:
            if self._error is None and not self._leave:  # a fault of ours, whose trace is on the screen
                self._error = NearlinearError(f"this member's thread ended, so it is cut off from {self._where}")
            self._over.set()
            if self._connection is not None:
                self._hang_up(self._connection)
            self._bell.close()
            self._button.close()

    def _call(self) -> None:
        """Call the centre until it answers.

        Raises:
            InputError: It does not take the key.
            PeerLostError: The deadline is over.
        """
        began, told = time.monotonic(), bool(self._run)
        until, pause = began + self._deadline_s, 0.02
        while not self._leave:
            try:
                self._connection = self._dial(min(10.0, self._deadline_s))
                return
            except OSError as error:
                if is_of_another_key(error):
                    raise wrong_key(self._ticket) from error
                if time.monotonic() + pause >= until:
                    raise PeerLostError(
                        f"{self._where} did not answer within {seconds(self._deadline_s)} ({error}); check that "
                        "`nearlinear run --listen` runs there and that its port can be reached from here"
                    ) from error
                if not told and time.monotonic() - began > TELL_S:
                    told = True
                    why = error.strerror or error
                    self._say(
                        f"nobody answers at {self._where} ({why}); calling for {seconds(self._deadline_s)} in all"
                    )
            pause = min(2 * pause, AGAIN_S)
            self._over.wait(pause)

    def _dial(self, limit_s: float) -> Connection:
        sock, self._round_trip_s = dial(self._ticket, self._identity, limit_s)
        connection = Connection(sock, self._identity, self._bound, time.monotonic())
        connection.shaken = True
        there = 0 if self._last is None else self._last.round
        connection.send("hello", round=there, round_trip=self._round_trip_s, **self._hello)
        return connection

    def _talk(self) -> None:
        """Serve one connection until it breaks, or this member leaves."""
        connection = self._connection
        if connection is None:
            return
        heard, next_beat, turn = time.monotonic(), 0.0, time.monotonic()
        selector = selectors.DefaultSelector()
        selector.register(self._bell, selectors.EVENT_READ)
        selector.register(connection.sock, selectors.EVENT_READ)
        self._selector = selector
        try:
            while True:
                if self._direct is not None:
                    self._direct.go_on()
                connection.flush()
                if self._leave:
                    self._say_goodbye(connection)
                    return
                now = time.monotonic()
                busy = connection.more or (self._direct is not None and self._direct.busy)
                wait = 0.0 if busy else max(0.0, next_beat - now)
                selector.modify(connection.sock, _READ | (_WRITE if connection.writing else 0))
                if wait and self._direct is not None and self._direct.active:
                    time.sleep(PAUSE_S)  # packets come every few microseconds: many at once cost as much as one
                events = selector.select(wait)
                ready = {key.fileobj for key, _ in events}
                now, before = time.monotonic(), turn
                turn, stood_still = now, now - before > self._beat_s + self._silence_s / 2
                if stood_still:
                    heard = now  # this process did: nobody could be heard
                if self._bell in ready:
                    self._bell.recv(4096)
                if connection.sock in ready or connection.more:
                    heard = now
                    for header, payload in connection.receive():
                        self._hear(connection, header, payload)
                for key, happened in events:
                    if key.data is not None and self._direct is not None:
                        self._direct.attend(key.data, happened)
                self.worked = time.thread_time()
                self._take_orders(connection)
                if now - heard > self._silence_s:
                    raise TimeoutError(f"silent for {now - heard:.0f} s")
                if now >= next_beat or stood_still:
                    next_beat = now + self._beat_s
                    if not connection.unsent:
                        connection.send("beat")
                    if self._direct is not None:
                        self._direct.look_around(now, stood_still=stood_still)
        except OSError as error:
            if not self._run and isinstance(error, ssl.SSLError):
                # Under TLS 1.3 the side that calls learns only now that its certificate was not taken.
                raise wrong_key(self._ticket) from error
            if self._run and not self._leave:
                self._say(
                    f"the connection to {self._where} broke ({error}); training goes on, and it is called again "
                    f"for {seconds(self._deadline_s)}; at the end of the round in hand it is waited for. In "
                    "the place of a listener that died: nearlinear run --listen HOST:PORT --ticket TICKET"
                )
        except Malformed as error:
            raise NearlinearError(f"{self._where} sent what is no message of a run ({error})") from None
        finally:
            self._hang_up(connection)
            selector.close()

    def _hang_up(self, connection: Connection) -> None:
        if self._direct is not None:
            received, sent = self._direct.bytes
            self.received += received
            self.sent += sent
            self._direct.close()
            self._direct = None
        if not connection.closed:
            self.received += connection.received
            self.sent += connection.sent
            connection.close()
        self._connection, self._entered = None, False

    def _say_goodbye(self, connection: Connection) -> None:
        connection.send("leave")
        connection.sock.settimeout(GOODBYE_S)
        connection.flush()
        # Closed with bytes unread, the connection would be reset and the goodbye might be lost: the centre hangs up.
        with contextlib.suppress(OSError):
            while connection.sock.recv(1 << 16):
                pass

    def _bound(self, header: Header) -> int:
        kind = header["kind"]
        if kind == "state":
            return self._sizes.state_bytes
        if kind == "result":
            codec = text(header, "codec")
            if codec not in ("fp32", self._codec):
                raise Malformed(f"codec {codec!r} in a run of {self._codec}")
            return self._sizes.update_bytes(codec) if number(header, "samples") else 0
        return TEXT if kind in ("agreed", "roster") else 0

    # ---- what comes in

    def _hear(self, connection: Connection, header: Header, payload: memoryview) -> None:
        match header["kind"]:
            case "refused":
                raise InputError(f"the run at {self._where} refuses this member: {text(header, 'why', 500)}")
            case "welcome":
                self._welcomed(connection, header)
            case "found":
                self._give_state(connection)
            case "state":
                self._enter(header, payload)
            case "result":
                self._result(header, payload)
            case "plan":
                self._begin_again(connection, header)
            case "go" if self._direct is not None:
                self._direct.go(header)
            case "commit" if self._direct is not None:
                self._committed(header, self._direct.committed(header))
            case "roster":
                if self._direct is not None:
                    self._direct.introduced(payload, time.monotonic())
            case "close":
                self.called = whole(header, "round")
            case "agreed":
                asked = self._asked.pop(text(header, "name"), None)
                if asked is not None:
                    agreed = text_of(payload)
                    if asked.lasts:
                        self._agreed[asked.name] = agreed
                    asked.answer.put(agreed)
            case "rejected":
                self._say(f"the update of round {whole(header, 'round')} was not admitted: {text(header, 'why')}")
            case "beat":
                pass
            case kind:
                raise Malformed(f"{kind[:20]!r} from the centre")

    def _welcomed(self, connection: Connection, header: Header) -> None:
        run, codec = text(header, "run"), text(header, "codec")
        if self._run and run != self._run:
            self._say(f"{self._where} was started anew; the run goes on from the member that has come farthest")
            for name, value in self._agreed.items():
                connection.send("agree", json.dumps(value).encode(), name=name, lasts=True)
        self._run, self.number = run, whole(header, "number")
        if codec != self._codec:
            self._codec, self._feedback = codec, Feedback(codec, self._sizes.parameters)
            self._owed = Feedback(codec, self._sizes.parameters)
        chunks, bind = Chunks(self._sizes, codec), text(header, "bind")
        try:
            self._direct = Direct(
                connection, self._identity, run, self.number, chunks, self._selector, bind, self._silence_s
            )
        except OSError as error:
            self._say(f"no other member can call this one ({error}); updates go through {self._where}")
        # What was asked and not answered is asked again.
        for asked in self._asked.values():
            self._orders.put(asked)

    def _give_state(self, connection: Connection) -> None:
        last = self._last or News(0, self._initial(), False, 1, 1, (0.0, 1.0), [], 0, 0, [])
        came = {"round": last.round, "place": last.place, "at": last.at, "behind": last.behind, "rates": last.rates}
        connection.send("state", np.ascontiguousarray(last.outer, "<f4").view(np.uint8), who=self._who, **came)

    def _enter(self, header: Header, payload: memoryview) -> None:
        if len(payload) != self._sizes.state_bytes:
            raise Malformed(f"a state of {len(payload)} bytes, where {self._sizes.state_bytes} were due")
        outer = np.frombuffer(payload, "<f4").astype(np.float32, copy=False)
        self._require(hash_of(outer) == text(header, "hash"), "the state that it sent")
        update = self._under_way
        # The centre counts an update once; that this member missed the news of it changes nothing.
        counted = update is not None and header.get("counted") == update.after.round
        self._entered = True
        self._tell(header, outer, counted=counted)
        self._in.set()

    def _result(self, header: Header, payload: memoryview) -> None:
        if self._last is None or whole(header, "round") != self._last.round + 1:
            raise Malformed(f"the result of round {whole(header, 'round') - 1}, which is not in hand")
        outer = self._last.outer
        if number(header, "samples"):
            outer = outer - self._sizes.decode(text(header, "codec"), payload)
        self._require(hash_of(outer) == text(header, "hash"), f"round {self._last.round}")
        self._committed(header, outer)

    def _committed(self, header: Header, outer: Floats) -> None:
        counted = truth(header, "counted")
        if counted:
            self._exchange_s = max(0.0, time.monotonic() - self._delivered - number(header, "held"))
        self._tell(header, outer, counted=counted and self._under_way is not None)

    def _begin_again(self, connection: Connection, header: Header) -> None:
        """Send what was sent in vain, as the round's new plan says."""
        if self._last is None or whole(header, "round") != self._last.round:
            return
        self._read_plan(header, self._last.outer)
        self._feedback.settle(counted=False)
        if self._under_way is not None:
            self._send(connection, self._under_way)

    def _read_plan(self, header: Header, outer: Floats) -> None:
        self._turn, plan = whole(header, "turn"), header.get("plan")
        self._waits = plan is False
        self._plan = Plan.read(self._turn, plan) if plan else None
        if self._direct is not None:
            self._direct.begin(self._turn, self._plan, outer, self._owed)

    def _require(self, equal: bool, what: str) -> None:
        if not equal:
            raise DriftError(
                f"this member and {self._where} hold other bits after {what}; one of them computes wrongly"
            )

    def _tell(self, header: Header, outer: Floats, *, counted: bool) -> None:
        share = header.get("share")
        if not isinstance(share, list) or len(share) != 2:
            raise Malformed("without a share of two numbers")
        begin, end = number({"n": share[0]}, "n"), number({"n": share[1]}, "n")
        self._feedback.settle(counted=counted)
        self._who = texts(header, "who")
        self._under_way, self._hash = None, text(header, "hash")
        members = whole(header, "members")
        self._alone = members <= 1
        self._read_plan(header, outer)
        every, place = whole(header, "every", 1), places(header, "place")
        at, behind, rates = whole(header, "at"), whole(header, "behind"), numbers(header, "rates")
        self._last = News(
            whole(header, "round"), outer, counted, every, members, (begin, end), place, at, behind, rates
        )
        self._news.put(self._last)

    # ---- what goes out

    def _take_orders(self, connection: Connection) -> None:
        while self._entered and not self._orders.empty():
            order = self._orders.get()
            if isinstance(order, _Asked):
                self._asked[order.name] = order
                connection.send("agree", json.dumps(order.value).encode(), name=order.name, lasts=order.lasts)
            elif order.after is self._last:  # else it is too late, as the training thread will read in the news
                self._send(connection, order)

    def _send(self, connection: Connection, update: Update) -> None:
        if update is not self._under_way:
            self._under_way, self._delivered = update, time.monotonic()
        if self._waits:
            return  # it came when the plan was made already: what it has counts in the next round
        if self._plan is None:
            # What is sent to nobody but the centre need not be short.
            codec = "fp32" if self._alone else self._codec
            payload = self._sizes.encode(codec, update.change, self._feedback) if update.samples else b""
            connection.send("update", payload, codec=codec, **self._about(update))
        elif update.samples and self._direct is not None:
            ready = functools.partial(self._say_ready, connection, update)
            self._direct.deliver(update.change, self._feedback, ready)
        else:
            self._say_ready(connection, update, [0.0] * len(self._plan.members))

    def _say_ready(self, connection: Connection, update: Update, norms: list[float]) -> None:
        connection.send("ready", turn=self._turn, norms=norms, **self._about(update))

    def _about(self, update: Update) -> dict[str, object]:
        """Return what is said of an update, by whichever way its values go."""
        return {
            "round": update.after.round,
            "base": self._hash,
            "samples": update.samples,
            "steps": update.steps,
            "seconds": update.seconds,
            "exchange": self._exchange_s,
            "work": update.work,
            "step_work": update.step_work,
            "at": update.at,
            "behind": update.behind,
            "place": list(update.place),
            "rates": list(update.rates),
        }
