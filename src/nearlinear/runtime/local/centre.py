"""Turning the members' updates into one outer state that all of them hold: the middle of a star.

    member 0 ── update ──▶ ┐           ┌ ── mean ──▶ member 0
    member 1 ── update ──▶ ┤  centre   ├ ── mean ──▶ member 1         all apply the same bytes to the same bits
    member 2 ── update ──▶ ┘           └ ── mean ──▶ member 2

The centre trains nothing. It holds the outer parameters, so that a newcomer finds them when every other member is
busy, takes in updates (``admission.py``), closes rounds (``rounds.py``), and sends the weighted mean, encoded once, to
all. One thread, and connections that never block: a slow member costs the others nothing but its patience.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import selectors
import socket
import ssl
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np

from nearlinear.errors import InputError
from nearlinear.runtime.local.admission import Rejected
from nearlinear.runtime.local.codecs import CODECS, Undecodable
from nearlinear.runtime.local.connection import Connection, Malformed, tune
from nearlinear.runtime.local.frames import TEXT, Header, number, numbers, places, text, text_of, texts, whole
from nearlinear.runtime.local.outer import Outer
from nearlinear.runtime.local.rounds import Member, Rounds
from nearlinear.runtime.local.tls import Identity, identity
from nearlinear.runtime.local.update import Sizes, silence

VERSION = 1
BEAT_S = 1.0
SILENCE_S = 5.0
HELLO_S = 10.0  # who has not introduced itself by then is shown out
STRANGERS = 64  # connections without a hello that are kept
WARM = 2  # updates of a member in which libraries wake up, whose times say nothing
SMOOTH = 0.3  # of a new measurement in the running one
AGREED = 256  # names that members agree on
AGREED_BYTES = 1 << 26
PILE = 8  # payloads that may wait for a member before it counts as not reading

Interval = Callable[[float, float], int]
Fractions = Callable[[Sequence[float], Sequence[float]], list[float]]


@dataclass(frozen=True, slots=True)
class Settings:
    """How a run is run, as its first member asked for it.

    Args:
        codec: Of updates.
        every: Steps per round; 0: chosen from the measured link.
    """

    codec: str
    every: int = 0


@dataclass(frozen=True, slots=True)
class Standing:
    """How a run stands, for whoever watches.

    Args:
        round: Rounds closed.
        members: How many are here.
        received: Bytes from all members, since the start.
        sent: Bytes to them.
        samples: Samples that counted.
    """

    round: int
    members: int
    received: int
    sent: int
    samples: float


@dataclass(slots=True, eq=False)
class _Peer:
    """A connection and who is at its other end."""

    connection: Connection
    member: Member | None = None
    identity: str = ""
    hello: Header | None = None  # held until the founder is here
    round: int = 0  # how far it had come when it called
    holds: int = -1  # the round whose outer parameters it has; -1: none
    giving: bool = False  # it was asked for the first state
    part: float = 0.0  # of every batch
    updates: int = 0
    behind: int = 0  # steps of the run that it was not there for
    rates: list[float] = field(default_factory=list)
    step_s: float = 0.0  # seconds of its step, smoothed; 0 while unknown
    exchange_s: float = 0.0  # seconds that its last exchange took, the wait for others left out


class Centre:
    """The middle of a run; ``listen`` makes one, and its thread serves until ``stop``.

    Attributes:
        port: Where it listens.

    Example:
        >>> centre = Centre.listen("127.0.0.1", 0, bytes(24))
        >>> centre.standing().members
        0
        >>> centre.stop()
    """

    @classmethod
    def listen(
        cls,
        bind: str,
        port: int,
        key: bytes,
        *,
        say: Callable[[str], None] = lambda line: None,
        interval: Interval = lambda exchange, step: 10,
        fractions: Fractions = lambda parts, step_s: [1 / len(parts)] * len(parts),
        silence_s: float = SILENCE_S,
        patience_s: float = 30.0,
        beat_s: float = BEAT_S,
        founder: str | None = None,
        gather_s: float = 0.0,
    ) -> Self:
        """Return a centre that listens.

        Args:
            bind: Address of the interface to listen on; ``"0.0.0.0"`` for all.
            port: 0 for a free one.
            key: The run's.
            say: Told, in the centre's thread, what a person should know.
            interval: Steps per round, from the seconds of an exchange and of a step.
            fractions: Each member's part of a batch, from the parts before (0: a newcomer) and the seconds of a step (0
                while unknown).
            silence_s: Seconds of silence after which a member is gone.
            patience_s: The least that a late member is waited for.
            beat_s: Seconds between two beats.
            founder: Identity of the member whose parameters and settings the run begins with; the others wait for it.
                ``None``: the first that comes.
            gather_s: Seconds that are given to the members of an earlier centre, whose place this one takes; of those
                that call meanwhile the one that has come farthest gives the state.

        Raises:
            InputError: The address or port cannot be had, or a package is missing.
        """
        own = identity(key)
        family = socket.AF_INET6 if ":" in bind else socket.AF_INET
        try:
            listener = socket.create_server((bind, port), family=family, backlog=STRANGERS)
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or error
            raise InputError(
                f"cannot listen on {bind}:{port} ({reason}); give --listen an address of this machine and a free port"
            ) from None
        rounds = Rounds(silence_s=silence_s, now=time.monotonic(), patience_s=patience_s, beat_s=beat_s)
        return cls(listener, own, rounds, say, interval, fractions, beat_s, silence_s, founder, gather_s)

    def __init__(
        self,
        listener: socket.socket,
        own: Identity,
        rounds: Rounds,
        say: Callable[[str], None],
        interval: Interval,
        fractions: Fractions,
        beat_s: float,
        silence_s: float,
        founder: str | None,
        gather_s: float,
    ) -> None:
        self._gather_until = time.monotonic() + gather_s
        self._founder = founder  # None as soon as it is here
        self.port: int = listener.getsockname()[1]
        self._listener, self._identity, self._rounds, self._say = listener, own, rounds, say
        self._interval, self._fractions, self._beat_s, self._silence_s = interval, fractions, beat_s, silence_s
        self._run = secrets.token_hex(8)
        self._peers: list[_Peer] = []  # known ones and strangers, oldest first
        self._settings: Settings | None = None
        self._sizes: Sizes | None = None
        self._layout = ""
        self._outer: Outer | None = None  # None until the first member has given it
        self._identities: dict[int, str] = {}  # by member
        self._counted: dict[str, int] = {}  # by identity, the last round that its update was in
        self._who: list[str] = []  # identities of those whose updates were in the round before
        self._agreed: dict[str, Any] = {}
        self._agreed_bytes = 0
        self._place: list[tuple[int, int]] = []
        self._at = 0  # steps that the run has made
        self._behind, self._rates = 0, list[float]()  # of the member whose schedule has missed the fewest of them
        self._every = 1
        self._shares: dict[int, tuple[float, float]] = {}
        self._samples = 0.0
        self._gone_bytes = [0, 0]  # of connections that are over
        self._next_beat = time.monotonic()
        self._standing = Standing(0, 0, 0, 0, 0.0)
        self._stop = False
        self._empty = threading.Event()
        self._selector = selectors.DefaultSelector()
        self._bell, self._button = socket.socketpair()
        for end in (self._bell, self._button, listener):
            end.setblocking(False)
        self._selector.register(self._bell, selectors.EVENT_READ)
        self._selector.register(listener, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._serve, name="nearlinear-centre", daemon=True)
        self._thread.start()

    def standing(self) -> Standing:
        """Return how the run stands."""
        return self._standing

    def wait_until_empty(self, timeout_s: float) -> bool:
        """Return whether no member is here any more, after waiting up to ``timeout_s`` for it."""
        return self._empty.wait(timeout_s)

    def stop(self) -> None:
        """Close all connections and end the thread."""
        self._stop = True
        with contextlib.suppress(OSError):
            self._button.send(b".")
        self._thread.join(10.0)

    # ---- the thread

    def _serve(self) -> None:
        try:
            while not self._stop:
                self._turn()
        finally:
            for peer in list(self._peers):
                self._forget(peer)
            for each in (self._listener, self._bell, self._button):
                each.close()
            self._selector.close()
            self._empty.set()

    def _turn(self) -> None:
        """Wait for bytes or the next beat, and deal with them."""
        more = [peer for peer in self._peers if peer.connection.more]
        wait = 0.0 if more else max(0.0, self._next_beat - time.monotonic())
        for key, events in self._selector.select(wait):
            if key.fileobj is self._bell:
                self._bell.recv(4096)
            elif key.fileobj is self._listener:
                self._accept()
            elif not key.data.connection.closed:
                self._attend(key.data, events)
        for peer in more:
            if not peer.connection.closed:
                self._attend(peer, selectors.EVENT_READ)
        now = time.monotonic()
        if now >= self._next_beat:
            self._next_beat = now + self._beat_s
            self._look_around(now)
        self._go_on(now)
        for peer in list(self._peers):
            self._watch(peer)
        self._stand()

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError:  # it hung up already, or there are no descriptors left
            return
        strangers = [peer for peer in self._peers if peer.member is None]
        if len(strangers) >= STRANGERS:
            self._forget(strangers[0])
        try:
            tune(sock)
            wrapped = self._identity.wrap(sock, listening=True)
        except OSError:
            sock.close()
            return
        peer = _Peer(Connection(wrapped, self._identity, lambda header: self._bound(peer, header), time.monotonic()))
        self._peers.append(peer)
        self._selector.register(wrapped, selectors.EVENT_READ, peer)

    def _attend(self, peer: _Peer, events: int) -> None:
        connection = peer.connection
        try:
            if connection.handshake():
                if events & selectors.EVENT_WRITE:
                    connection.flush()
                for header, payload in connection.receive():
                    self._hear(peer, header, payload)
                    if connection.closed:
                        return
        except Malformed as error:
            self._drop(peer, f"sent what is no message ({error})")
        except OSError as error:
            self._drop(peer, _seen(error))
        else:
            if peer.member is not None:
                self._rounds.heard(peer.member.number, time.monotonic())

    def _watch(self, peer: _Peer) -> None:
        """Send what can be sent, and ask to be woken for the rest."""
        if peer.connection.closed:
            return
        try:
            peer.connection.flush()
        except OSError as error:
            self._drop(peer, _seen(error))
            return
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if peer.connection.writing else 0)
        self._selector.modify(peer.connection.sock, wanted, peer)

    def _look_around(self, now: float) -> None:
        """Beat, and show out who is silent or does not read."""
        for peer in list(self._peers):
            if peer.member is None:
                if now - peer.connection.since > HELLO_S:
                    self._forget(peer)
            elif peer.connection.unsent > PILE * self._pile():
                self._drop(peer, "does not take what it is sent")
            elif not peer.connection.unsent:
                peer.connection.send("beat")
        for member in self._rounds.silent(now):
            for peer in [peer for peer in self._peers if peer.member is member]:
                self._drop(peer, f"was silent for {now - member.heard:.0f} s")

    def _pile(self) -> int:
        return (self._sizes.state_bytes if self._sizes else 0) + TEXT

    def _drop(self, peer: _Peer, why: str) -> None:
        if peer.member is not None:
            self._say(f"{peer.member} {why}; round {self._rounds.number} goes on without it")
        self._forget(peer)

    def _forget(self, peer: _Peer) -> None:
        if peer not in self._peers:
            return
        self._peers.remove(peer)
        self._selector.unregister(peer.connection.sock)
        peer.connection.close()
        self._gone_bytes[0] += peer.connection.received
        self._gone_bytes[1] += peer.connection.sent
        if peer.member is not None and self._rounds.members[peer.member.number] is peer.member:
            self._rounds.gone(peer.member.number)
        if peer.giving:  # the next that waits gives the state in its place
            self._ask_for_state()
        self._share_out()

    def _stand(self) -> None:
        members = [peer for peer in self._peers if peer.member is not None]
        received = self._gone_bytes[0] + sum(peer.connection.received for peer in self._peers)
        sent = self._gone_bytes[1] + sum(peer.connection.sent for peer in self._peers)
        self._standing = Standing(self._rounds.number, len(members), received, sent, self._samples)
        if members:
            self._empty.clear()
        else:
            self._empty.set()

    # ---- what comes in

    def _bound(self, peer: _Peer, header: Header) -> int:
        """Return the most bytes that the payload of such a message may have here and now."""
        kind = header["kind"]
        if peer.member is None:
            if kind != "hello" or peer.hello is not None:
                raise Malformed(f"{kind[:20]!r} before it is welcome")
            return 0
        assert self._sizes is not None and self._settings is not None
        if kind == "update":
            return self._sizes.update_bytes(self._codec(header)) if number(header, "samples") else 0
        if kind == "state" and peer.giving:
            return self._sizes.state_bytes
        if kind == "agree":
            return TEXT
        if kind in ("beat", "leave"):
            return 0
        raise Malformed(f"{kind[:20]!r} from a member")

    def _codec(self, header: Header) -> str:
        assert self._settings is not None
        codec = text(header, "codec")
        if codec not in ("fp32", self._settings.codec):
            raise Malformed(f"codec {codec!r} in a run of {self._settings.codec}")
        return codec

    def _hear(self, peer: _Peer, header: Header, payload: memoryview) -> None:
        match header["kind"]:
            case "hello" if peer.member is None:
                self._hello(peer, header)
            case "state":
                self._first_state(peer, header, payload)
            case "agree":
                self._agree(peer, text(header, "name"), payload)
            case "update":
                self._update(peer, header, payload)
            case "leave":
                self._say(f"{peer.member} left after round {self._rounds.number}")
                self._forget(peer)
            case "beat":
                pass
            case kind:
                raise Malformed(f"a second {kind!r}")

    def _hello(self, peer: _Peer, header: Header) -> None:
        now = time.monotonic()
        name, who = text(header, "name"), text(header, "identity")
        if self._founder not in (None, who):
            peer.hello = header
            return
        sizes = Sizes(whole(header, "parameters", 1, 2**32 - 1), whole(header, "buffers", 0, 2**32 - 1))
        layout, codec = text(header, "layout"), text(header, "codec")
        try:
            if whole(header, "version") != VERSION:
                raise InputError(f"it speaks version {header['version']}, this run version {VERSION}; install the same")
            if codec not in CODECS:
                raise InputError(f"unknown codec {codec!r}")
            if self._sizes is not None and (sizes, layout) != (self._sizes, self._layout):
                raise InputError(
                    f"its model has {sizes.parameters} parameters and {sizes.buffers} values in buffers, this run's "
                    f"{self._sizes.parameters} and {self._sizes.buffers}, or of other names; run the same script"
                )
            for old in [old for old in self._peers if old.member is not None and old.identity == who]:
                self._drop(old, "came back on another connection")
            member = self._rounds.joined(who, name, now)
        except InputError as error:
            peer.connection.send("refused", why=str(error))
            with contextlib.suppress(OSError):
                peer.connection.flush()
            self._forget(peer)
            return
        if self._sizes is None:
            self._sizes, self._layout = sizes, layout
            self._settings = Settings(codec, whole(header, "every", 0, 10**6))
            self._every = self._settings.every or 1
            self._rounds.silence_s = silence(self._silence_s, sizes)
        peer.member, peer.identity, peer.round = member, who, whole(header, "round")
        self._identities[member.number] = who
        if self._outer is not None:
            self._outer.drop(member.number)
        self._share_out()
        assert self._settings is not None
        peer.connection.send("welcome", number=member.number, run=self._run, codec=self._settings.codec)
        self._say(f"{member} joined at round {self._rounds.number}, {len(self._rounds.here())} here now")
        if self._outer is None:
            self._ask_for_state()
        else:
            self._send_state(peer)
        if self._founder is not None:
            self._founder = None
            for waiting, held in [(each, each.hello) for each in self._peers if each.hello is not None]:
                assert held is not None
                waiting.hello = None
                try:
                    self._hello(waiting, held)
                except Malformed:
                    self._forget(waiting)

    def _ask_for_state(self) -> None:
        members = [peer for peer in self._peers if peer.member is not None]
        gathering = time.monotonic() < self._gather_until
        if self._outer is not None or gathering or not members or any(peer.giving for peer in members):
            return
        farthest = max(members, key=lambda peer: peer.round)
        farthest.giving = True
        farthest.connection.send("found")

    def _first_state(self, peer: _Peer, header: Header, payload: memoryview) -> None:
        assert self._sizes is not None and self._settings is not None
        if len(payload) != self._sizes.state_bytes:
            raise Malformed(f"a state of {len(payload)} bytes; this run's has {self._sizes.state_bytes}")
        values = np.frombuffer(payload, "<f4").astype(np.float32)
        if not np.isfinite(values).all():
            raise Malformed("a state that is not finite")
        self._rounds.number, self._who = whole(header, "round"), texts(header, "who")
        self._counted = dict.fromkeys(self._who, self._rounds.number - 1)
        peer.giving, self._outer = False, Outer(self._sizes, self._settings.codec, values)
        for each in self._peers:
            if each.member is not None:
                self._send_state(each)

    def _send_state(self, peer: _Peer) -> None:
        """Send the outer parameters to a member that does not hold the round's before."""
        assert self._outer is not None and peer.member is not None
        peer.holds = self._rounds.number
        peer.connection.send(
            "state",
            np.ascontiguousarray(self._outer.values, "<f4").view(np.uint8),
            hash=self._outer.hash,
            counted=self._counted.get(peer.identity, -1),
            **self._next(peer),
        )

    def _next(self, peer: _Peer) -> dict[str, object]:
        """Return what a member is told for the steps to come."""
        assert peer.member is not None
        return {
            "round": self._rounds.number,
            "every": self._every,
            "members": len(self._rounds.here()),
            "share": self._shares.get(peer.member.number, (0.0, 1.0)),
            "place": self._place,
            "at": self._at,
            "behind": self._behind,
            "rates": self._rates,
            "who": self._who,
        }

    def _agree(self, peer: _Peer, name: str, payload: memoryview) -> None:
        value = text_of(payload)
        if name not in self._agreed:
            self._agreed_bytes += len(payload)
            if len(self._agreed) >= AGREED or self._agreed_bytes > AGREED_BYTES:
                raise Malformed(f"more than {AGREED} names or {AGREED_BYTES} bytes to agree on")
        agreed = self._agreed.setdefault(name, value)
        peer.connection.send("agreed", json.dumps(agreed).encode(), name=name)

    def _update(self, peer: _Peer, header: Header, payload: memoryview) -> None:
        assert self._sizes is not None and peer.member is not None
        now = time.monotonic()
        current, base = whole(header, "round"), text(header, "base")
        samples, steps, took = number(header, "samples"), whole(header, "steps"), number(header, "seconds")
        place, codec, exchange = places(header, "place"), self._codec(header), number(header, "exchange")
        if samples and len(payload) != self._sizes.update_bytes(codec):
            raise Malformed(f"an update of {len(payload)} bytes, where {self._sizes.update_bytes(codec)} were due")
        if self._outer is None or current != self._rounds.number or peer.holds != current:
            return  # it crossed the round's end on its way; the result has told the member
        try:
            if base != self._outer.hash:
                self._send_state(peer)
                raise Rejected("it holds other outer parameters than the run")
            factor = self._outer.take(peer.member.number, payload, codec, samples=samples, steps=steps, now=now)
        except Undecodable as error:
            raise Malformed(str(error)) from None
        except Rejected as error:
            self._say(f"the update of {peer.member} in round {current} is not admitted: {error}")
            peer.connection.send("rejected", round=current, why=str(error))
            return
        if factor < 1:
            self._say(f"the update of {peer.member} in round {current} is clipped to {factor:.3g} of its size")
        self._rounds.updated(peer.member.number, now)
        peer.updates += 1
        if samples and took and steps and peer.updates > WARM:
            peer.step_s += (1.0 if not peer.step_s else SMOOTH) * (took / steps - peer.step_s)
            peer.exchange_s += (1.0 if not peer.exchange_s else SMOOTH) * (exchange - peer.exchange_s)
        self._place, self._at = max(self._place, place), max(self._at, whole(header, "at"))
        peer.behind, peer.rates = whole(header, "behind"), numbers(header, "rates")

    # ---- rounds

    def _go_on(self, now: float) -> None:
        """Call for what is missing, and close the round if it is over."""
        self._ask_for_state()
        called = self._rounds.to_call()
        for peer in self._peers:
            if peer.member is not None and peer.member in called:
                peer.connection.send("close", round=self._rounds.number)
        if self._rounds.closes(now):
            self._close(now)

    def _close(self, now: float) -> None:
        assert self._outer is not None
        for member in self._rounds.late():
            self._say(f"{member} is late for round {self._rounds.number}; what it learnt counts in a later one")
        closed, counted = self._rounds.number, self._rounds.close(now)
        mean = self._outer.close(counted)
        self._samples += mean.samples
        self._who = [self._identities[member] for member in counted]
        self._counted |= dict.fromkeys(self._who, closed)
        present = [peer for peer in self._peers if peer.member is not None and peer.member.number in mean.came]
        if present:
            truest = min(present, key=lambda peer: peer.behind)
            self._behind, self._rates = truest.behind, truest.rates
        self._share_out(again=True)
        self._choose_interval()
        for peer in self._peers:
            if peer.member is None:
                continue
            if peer.holds != closed:
                self._send_state(peer)
                continue
            peer.holds = self._rounds.number
            came = mean.came.get(peer.member.number)
            peer.connection.send(
                "result",
                mean.payload,
                hash=self._outer.hash,
                codec=mean.codec,
                counted=came is not None,
                held=0.0 if came is None else now - came,
                samples=mean.samples,
                **self._next(peer),
            )

    def _choose_interval(self) -> None:
        assert self._settings is not None
        if self._settings.every:
            return
        known = [peer for peer in self._peers if peer.member is not None and peer.step_s]
        if known:
            self._every = self._interval(max(p.exchange_s for p in known), max(p.step_s for p in known))

    def _share_out(self, *, again: bool = False) -> None:
        """Give every member its part of a batch.

        Args:
            again: A round is over, so the time of a step may be another than before.
        """
        members = sorted(
            (peer for peer in self._peers if peer.member is not None),
            key=lambda peer: peer.member.number,  # type: ignore[union-attr]
        )
        self._shares = {}
        if not members:
            return
        begin = 0.0
        parts = self._fractions([peer.part for peer in members], [peer.step_s if again else 0.0 for peer in members])
        for peer, part in zip(members, parts, strict=True):
            assert peer.member is not None
            self._shares[peer.member.number] = (begin, begin + part)
            begin += part
            peer.part = part


def _seen(error: OSError) -> str:
    if isinstance(error, ConnectionError | ssl.SSLEOFError):
        return "hung up"
    return f"broke off ({getattr(error, 'reason', None) or error.strerror or error})"
