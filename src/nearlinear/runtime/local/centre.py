"""Turning the members' updates into one outer state that all of them hold: the middle of a run.

    member 0 ── update ──▶ ┐           ┌ ── mean ──▶ member 0
    member 1 ── update ──▶ ┤  centre   ├ ── mean ──▶ member 1         all apply the same bytes to the same bits
    member 2 ── update ──▶ ┘           └ ── mean ──▶ member 2

The centre trains nothing. It holds the outer parameters, so that a newcomer finds them when every other member is
busy, closes rounds (``rounds.py``), and decides by which way a round's updates are exchanged: through itself, as drawn
(it takes them in, ``admission.py``, and sends the weighted mean, encoded once, to all), or among the members directly
(``exchange.py``), where it counts and commits (``vote.py``). One thread, and connections that never block
(``serving.py``): a slow member costs the others nothing but its patience.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import secrets
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Self

import numpy as np

from nearlinear.errors import InputError
from nearlinear.runtime.local.admission import Rejected
from nearlinear.runtime.local.agreements import Agreements
from nearlinear.runtime.local.chunks import Chunks, bounds
from nearlinear.runtime.local.codecs import CODECS, Undecodable
from nearlinear.runtime.local.connection import Connection, Malformed
from nearlinear.runtime.local.direct import roster
from nearlinear.runtime.local.exchange import CENTRE, Plan
from nearlinear.runtime.local.frames import (
    TEXT,
    Header,
    number,
    numbers,
    pairs,
    places,
    text,
    text_of,
    texts,
    truth,
    whole,
    wholes,
)
from nearlinear.runtime.local.introductions import Introductions
from nearlinear.runtime.local.outer import Outer
from nearlinear.runtime.local.pace import Fractions, Interval, Pace, Speed
from nearlinear.runtime.local.rounds import Member, Rounds
from nearlinear.runtime.local.serving import Caller, Server, listen
from nearlinear.runtime.local.tls import Identity, identity
from nearlinear.runtime.local.update import Sizes, silence
from nearlinear.runtime.local.vote import Ready, Vote
from nearlinear.runtime.local.ways import Parts, Uplink, Way, Ways

VERSION = 2
BEAT_S = 1.0
SILENCE_S = 5.0
PILE = 8  # payloads that may wait for a member before it counts as not reading
TRIES = 3  # of a direct exchange in one round; then it goes through the centre


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
class _Peer(Caller):
    """A connection and who is at its other end."""

    member: Member | None = None
    identity: str = ""
    hello: Header | None = None  # held until the founder is here
    round: int = 0  # how far it had come when it called
    holds: int = -1  # the round whose outer parameters it has; -1: none
    giving: bool = False  # it was asked for the first state
    behind: int = 0  # steps of the run that it was not there for
    rates: list[float] = field(default_factory=list)
    speed: Speed = field(default_factory=Speed)
    link: Uplink = field(default_factory=Uplink)
    turn: int = -1  # the last one that it was told to take part in


@dataclass(frozen=True, slots=True)
class _Said:
    """What is said of an update, by whichever way its values go; as in ``member.Update``, and:

    Args:
        round: Of which it is.
        base: The hash of the outer parameters that it is relative to.
        exchange: Seconds that the exchange before took, the wait for others left out.
    """

    round: int
    base: str
    samples: float
    steps: int
    seconds: float
    exchange: float
    work: float
    step_work: float
    at: int
    behind: int
    place: list[tuple[int, int]]
    rates: list[float]

    @classmethod
    def read(cls, header: Header) -> _Said:
        """Return what a header says.

        Raises:
            Malformed: It does not say it.
        """
        return cls(
            whole(header, "round"),
            text(header, "base"),
            number(header, "samples"),
            whole(header, "steps"),
            number(header, "seconds"),
            number(header, "exchange"),
            number(header, "work"),
            number(header, "step_work"),
            whole(header, "at"),
            whole(header, "behind"),
            places(header, "place"),
            numbers(header, "rates"),
        )


class Centre(Server[_Peer]):
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
        interval: Interval = lambda exchange, step, burden: 10,
        fractions: Fractions = lambda parts, step_s: [1 / len(parts)] * len(parts),
        direct: Way = lambda update_bytes, elsewhere, round_trip_s, centre, up, now: False,
        parts: Parts = lambda up: [1 / len(up)] * len(up),
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
            interval: As of ``Pace``.
            fractions: As of ``Pace``.
            direct: As of ``Ways``.
            parts: As of ``Ways``.
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
        rounds = Rounds(silence_s=silence_s, now=time.monotonic(), patience_s=patience_s, beat_s=beat_s)
        centre = cls(listen(bind, port), own, rounds, say, Pace(interval, fractions), Ways(direct, parts), beat_s)
        centre._silence_s, centre._patience_s, centre._founder = silence_s, patience_s, founder
        centre._gather_until = time.monotonic() + gather_s
        centre.start()
        return centre

    def __init__(
        self,
        listener: socket.socket,
        own: Identity,
        rounds: Rounds,
        say: Callable[[str], None],
        pace: Pace,
        ways: Ways,
        beat_s: float,
    ) -> None:
        super().__init__(listener, own, beat_s)
        self._bind: str = listener.getsockname()[0]
        self._rounds, self._say, self._pace, self._ways = rounds, say, pace, ways
        self._silence_s, self._patience_s, self._gather_until = SILENCE_S, 30.0, 0.0
        self._founder: str | None = None  # None also as soon as it is here
        self._run = secrets.token_hex(8)
        self._settings: Settings | None = None
        self._sizes: Sizes | None = None
        self._layout = ""
        self._outer: Outer | None = None  # None until the first member has given it
        self._identities: dict[int, str] = {}  # by member
        self._counted: dict[str, int] = {}  # by identity, the last round that its update was in
        self._who: list[str] = []  # identities of those whose updates were in the round before
        self._agreements = Agreements()
        self._place: list[tuple[int, int]] = []
        self._at = 0  # steps that the run has made
        self._behind, self._rates = 0, list[float]()  # of the member whose schedule has missed the fewest of them
        self._every = 1
        self._shares: dict[int, tuple[float, float]] = {}
        self._samples = 0.0
        # Of direct exchanges:
        self._known = Introductions()
        self._turns = 0  # tries of rounds
        self._vote: Vote | None = None  # on the round in hand, if it is exchanged directly
        self._went = 0.0  # when the vote was closed
        self._broken: tuple[float, str] | None = (
            None  # a link: since when, and which; whose end has died is not yet known
        )
        self._tries = 0  # in this round
        self._refused: set[int] = set()  # members whose updates were not admitted in this round
        self._starred = False  # the round before went through the centre
        self._norm = 0.0  # that the mean before could have
        self._standing = Standing(0, 0, 0, 0, 0.0)
        self._empty = threading.Event()

    def standing(self) -> Standing:
        """Return how the run stands."""
        return self._standing

    def wait_until_empty(self, timeout_s: float) -> bool:
        """Return whether no member is here any more, after waiting up to ``timeout_s`` for it."""
        return self._empty.wait(timeout_s)

    # ---- what the server asks

    def answer(self, connection: Connection) -> _Peer:
        """Return a stranger."""
        return _Peer(connection)

    def here(self, peer: _Peer) -> None:
        """Note that a member said something."""
        if peer.member is not None:
            self._rounds.heard(peer.member.number, time.monotonic())

    def over(self) -> None:
        """Let go who waits for the end."""
        self._empty.set()

    def go_on(self, now: float) -> None:
        """Call for what is missing, and close the round if it is over."""
        self._ask_for_state()
        if self._vote is not None:
            self._go_on_directly(self._vote, now)
        else:
            called = self._rounds.to_call()
            for peer in self._peers:
                if peer.member is not None and peer.member in called:
                    peer.connection.send("close", round=self._rounds.number)
            if self._rounds.closes(now):
                self._close(now)
        self._stand()

    def look_around(self, now: float) -> None:
        """Beat, and show out who is silent or does not read."""
        for peer in [peer for peer in self._peers if peer.known]:
            if peer.connection.unsent > PILE * self._pile():
                self.lost(peer, "does not take what it is sent")
            elif not peer.connection.unsent:
                peer.connection.send("beat")
        for member in self._rounds.silent(now):
            for peer in [peer for peer in self._peers if peer.member is member]:
                self.lost(peer, f"was silent for {now - member.heard:.0f} s")

    def _pile(self) -> int:
        return (self._sizes.state_bytes if self._sizes else 0) + TEXT

    def lost(self, peer: _Peer, why: str) -> None:
        """Go on without a member."""
        if peer.member is not None:
            self._say(f"{peer.member} {why}; round {self._rounds.number} goes on without it")
        self._forget(peer)

    def _forget(self, peer: _Peer) -> None:
        if not self._hang_up(peer):
            return
        if peer.member is not None and self._rounds.members[peer.member.number] is peer.member:
            self._rounds.gone(peer.member.number)
            self._known.gone(peer.member.number)
            self._introduce()
        if peer.giving:  # the next that waits gives the state in its place
            self._ask_for_state()
        self._share_out()

    def _stand(self) -> None:
        members = [peer for peer in self._peers if peer.member is not None]
        received, sent = self.bytes
        self._standing = Standing(self._rounds.number, len(members), received, sent, self._samples)
        if members:
            self._empty.clear()
        else:
            self._empty.set()

    # ---- what comes in

    def bound(self, peer: _Peer, header: Header) -> int:
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
        if kind == "mean" and self._vote is not None:
            return self._chunks.largest
        if kind in ("beat", "leave", "listening", "reach", "ready", "done", "fault"):
            return 0
        raise Malformed(f"{kind[:20]!r} from a member")

    def _codec(self, header: Header) -> str:
        assert self._settings is not None
        codec = text(header, "codec")
        if codec not in ("fp32", self._settings.codec):
            raise Malformed(f"codec {codec!r} in a run of {self._settings.codec}")
        return codec

    def hear(self, peer: _Peer, header: Header, payload: memoryview) -> None:
        """Deal with a message."""
        match header["kind"]:
            case "hello" if peer.member is None:
                self._hello(peer, header)
            case "state":
                self._first_state(peer, header, payload)
            case "agree":
                self._agree(peer, text(header, "name"), payload, lasts=truth(header, "lasts"))
            case "update":
                self._update(peer, header, payload)
            case "listening":
                self._listening(peer, whole(header, "port", 1, 65535))
            case "reach":
                self._reached(peer, header)
            case "ready" | "mean" | "done" | "fault" as kind:
                self._direct_word(peer, kind, header, payload)
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
                self.lost(old, "came back on another connection")
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
        peer.member, peer.identity, peer.round, peer.known = member, who, whole(header, "round"), True
        peer.link.round_trip_s, peer.speed.near = number(header, "round_trip"), _on_one_machine(peer.connection)
        self._identities[member.number] = who
        if self._outer is not None:
            self._outer.drop(member.number)
        self._share_out()
        assert self._settings is not None
        # Who is on this machine lets itself be reached as far as the centre does; another listens where it called from.
        welcome = {"run": self._run, "codec": self._settings.codec, "bind": self._bind if peer.speed.near else ""}
        peer.connection.send("welcome", number=member.number, **welcome)
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
        if self._gather_until and not farthest.round:
            self._say("no member of the earlier run has called; it begins anew")
        farthest.connection.send("found")

    def _first_state(self, peer: _Peer, header: Header, payload: memoryview) -> None:
        assert self._sizes is not None and self._settings is not None
        if len(payload) != self._sizes.state_bytes:
            raise Malformed(f"a state of {len(payload)} bytes; this run's has {self._sizes.state_bytes}")
        values = np.frombuffer(payload, "<f4").astype(np.float32)
        if not np.isfinite(values).all():
            raise Malformed("a state that is not finite")
        self._rounds.number, self._who = whole(header, "round"), texts(header, "who")
        self._place, self._at = places(header, "place"), whole(header, "at")
        self._behind, self._rates = whole(header, "behind"), numbers(header, "rates")
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
            **self._how(peer),
        }

    def _how(self, peer: _Peer) -> dict[str, object]:
        """Return how the round in hand is exchanged: ``None``, through the centre; ``False``, without this member."""
        if self._vote is None:
            return {"turn": self._turns, "plan": None}
        return {"turn": self._turns, "plan": self._vote.plan.fields() if peer.turn == self._turns else False}

    def _agree(self, peer: _Peer, name: str, payload: memoryview, lasts: bool) -> None:
        assert peer.member is not None
        value, me = text_of(payload), peer.member.number
        agreements = self._agreements
        agreed = agreements.lasting(name, value, len(payload)) if lasts else agreements.recent(name, me, value)
        peer.connection.send("agreed", json.dumps(agreed).encode(), name=name)

    def _update(self, peer: _Peer, header: Header, payload: memoryview) -> None:
        assert self._sizes is not None and peer.member is not None
        now = time.monotonic()
        said, codec = _Said.read(header), self._codec(header)
        samples, steps = said.samples, said.steps
        if samples and len(payload) != self._sizes.update_bytes(codec):
            raise Malformed(f"an update of {len(payload)} bytes, where {self._sizes.update_bytes(codec)} were due")
        if self._outer is None or not said.round == self._rounds.number == peer.holds or self._vote is not None:
            return  # it crossed the round's end on its way; the result has told the member
        try:
            if said.base != self._outer.hash:
                self._send_state(peer)
                raise Rejected("it holds other outer parameters than the run")
            factor = self._outer.take(peer.member.number, payload, codec, samples=samples, steps=steps, now=now)
        except Undecodable as error:
            raise Malformed(str(error)) from None
        except Rejected as error:
            self._reject(peer, str(error))
            return
        self._say_clipped(peer.member, factor)
        self._note(peer, said, now)

    def _reject(self, peer: _Peer, why: str) -> None:
        self._say(f"the update of {peer.member} in round {self._rounds.number} is not admitted: {why}")
        peer.connection.send("rejected", round=self._rounds.number, why=why)

    def _say_clipped(self, member: Member, factor: float) -> None:
        if factor < 1:
            self._say(f"the update of {member} in round {self._rounds.number} is clipped to {factor:.3g} of its size")

    def _note(self, peer: _Peer, said: _Said, now: float) -> None:
        """Note that an update is here or on its way, and what was said of it."""
        assert peer.member is not None
        self._rounds.updated(peer.member.number, now)
        step_s = said.seconds / said.steps if said.samples and said.steps else 0.0
        peer.speed.note(step_s=step_s, exchange_s=said.exchange, work_s=said.work, step_work_s=said.step_work)
        if self._starred and said.exchange:
            self._measure(peer, said.exchange)
        self._place, self._at = max(self._place, said.place), max(self._at, said.at)
        peer.behind, peer.rates = said.behind, said.rates

    # ---- rounds

    def _close(self, now: float) -> None:
        """Close a round whose updates are here."""
        assert self._outer is not None
        closed, counted = self._count(now, None)
        mean = self._outer.close(counted)
        self._samples += mean.samples
        self._starred = True
        self._begin(set(mean.came))
        for peer in self._members():
            if peer.holds != closed:
                self._send_state(peer)
                continue
            assert peer.member is not None
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

    def _count(self, now: float, among: Sequence[int] | None) -> tuple[int, list[int]]:
        """Close the round in hand; return its number, and the members that count in it."""
        for member in self._rounds.late(among):
            self._say(f"{member} is late for round {self._rounds.number}; what it learnt counts in a later one")
        closed, counted = self._rounds.number, self._rounds.close(now, among)
        self._who = [self._identities[member] for member in counted]
        self._counted |= dict.fromkeys(self._who, closed)
        return closed, counted

    def _begin(self, counted: set[int]) -> None:
        """Settle how the next round goes, after one in which these counted."""
        present = [peer for peer in self._members() if peer.member is not None and peer.member.number in counted]
        if present:
            truest = min(present, key=lambda peer: peer.behind)
            self._behind, self._rates = truest.behind, truest.rates
        self._share_out(again=True)
        assert self._settings is not None
        every = self._pace.every([peer.speed for peer in self._members()])
        if every is not None and not self._settings.every:
            self._every = every
        self._tries, self._refused = 0, set()
        self._plan([peer for peer in self._members() if self._ways.open(self._rounds.number)])

    def _members(self) -> list[_Peer]:
        """Return the peers that are members, in the order of their numbers."""
        return sorted(
            (peer for peer in self._peers if peer.member is not None),
            key=lambda peer: peer.member.number,  # type: ignore[union-attr]
        )

    def _share_out(self, *, again: bool = False) -> None:
        """Give every member its part of a batch.

        Args:
            again: A round is over, so the time of a step may be another than before.
        """
        speeds = {peer.member.number: peer.speed for peer in self._members() if peer.member is not None}
        self._shares = self._pace.shares(speeds, again=again)

    # ---- direct exchanges

    @property
    def _chunks(self) -> Chunks:
        assert self._sizes is not None and self._settings is not None
        return Chunks(self._sizes, self._settings.codec)

    def _listening(self, peer: _Peer, port: int) -> None:
        assert peer.member is not None
        self._known.listening(
            peer.member.number, "" if peer.speed.near else peer.connection.sock.getpeername()[0], port
        )
        self._introduce()

    def _introduce(self, only: Sequence[int] | None = None) -> None:
        """Tell members who the others are."""
        for peer in self._members():
            assert peer.member is not None
            entries = self._known.roster(peer.member.number)
            if only is None or peer.member.number in only:
                peer.connection.send("roster", roster(entries))

    def _reached(self, peer: _Peer, header: Header) -> None:
        assert peer.member is not None
        me, failed = peer.member.number, wholes(header, "failed")
        self._introduce(self._known.reached(me, dict(pairs(header, "reach")), failed))
        if self._vote is not None and me in self._vote.plan.members:
            broken = [each for each in failed if each in self._vote.plan.members]
            if broken and self._broken is None:
                self._broken = time.monotonic(), f"{peer.member} has lost its link with member {broken[0]}"

    def _plan(self, peers: list[_Peer]) -> None:
        """Decide how the round in hand is exchanged, and count it as another turn.

        Args:
            peers: Those that may exchange directly: all of them, or else the round goes through the centre.
        """
        assert self._settings is not None and self._sizes is not None
        now, self._vote, self._broken = self._vote is not None, None, None
        self._turns += 1
        members = [peer.member.number for peer in peers if peer.member is not None]
        if len(members) < 2 or not self._known.connected(members) or self._outer is None:
            return
        up = [peer.link.up for peer in peers]
        round_trip_s = max(self._known.round_trip_s(members), *(peer.link.round_trip_s for peer in peers))
        elsewhere, size = sum(not peer.speed.near for peer in peers), self._sizes.update_bytes(self._settings.codec)
        if not self._ways.direct(size, elsewhere, round_trip_s, up, now):
            return
        chunks = self._chunks
        edges = bounds(chunks.count, self._ways.parts(tuple(members), up))
        near = [peer.member.number for peer in peers if peer.speed.near and peer.member is not None]
        plan = Plan(self._turns, tuple(members), tuple(edges), near[0] if near else CENTRE)
        self._vote = Vote(plan, chunks, self._outer.values)
        for peer in peers:
            peer.turn = self._turns

    def _go_on_directly(self, vote: Vote, now: float) -> None:
        here = [peer.member.number for peer in self._members() if peer.member and peer.turn == vote.plan.turn]
        gone = vote.missing(here)
        left = [each for each in vote.plan.members if each not in here]
        if left and self._broken is None:  # it may have said that it is done, and others still lack what it sent them
            self._broken = now, f"member {left[0]} is gone"
        try:
            if vote.weights is None:
                if gone:
                    self._begin_again(f"member {gone[0]} is gone")
                elif self._broken is not None and now - self._broken[0] > self._beat_s:
                    self._begin_again(self._broken[1])
                elif self._rounds.closes(now, vote.plan.members):
                    self._go(vote, now)
            elif vote.samples == 0 or vote.agreed(here):
                self._commit(vote, now)
            elif gone:
                self._begin_again(f"member {gone[0]} is gone")
            elif self._broken is not None and now - self._broken[0] > self._beat_s:
                self._begin_again(self._broken[1])
            elif now - self._went > self._patience_s + 4 * self._longest_s():
                self._ways.shy(self._rounds.number)
                late = [each for each in vote.plan.members if each not in vote.done]
                self._begin_again(f"member {late[0] if late else CENTRE} did not get the whole mean", direct=False)
        except Rejected as error:
            self._ways.shy(self._rounds.number)
            self._begin_again(str(error), direct=False)

    def _longest_s(self) -> float:
        """Return the seconds that exchanges take here."""
        return max((peer.speed.exchange_s for peer in self._members()), default=0.0)

    def _begin_again(self, why: str, *, direct: bool = True) -> None:
        """Have the updates of the round in hand sent once more."""
        assert self._outer is not None and self._vote is not None
        self._rounds.begin_again()
        self._outer.forget()
        self._tries += 1
        # Who came in the midst of this round counts in the next one, as long as it need not go through the centre.
        partners = [peer for peer in self._members() if peer.turn == self._turns]
        self._plan(partners if direct and self._tries < TRIES else [])
        way = "through the centre" if self._vote is None else "directly"
        self._say(f"round {self._rounds.number} is begun again, {way}: {why}; nothing learnt is lost")
        for peer in self._members():
            if peer.holds == self._rounds.number:
                peer.connection.send("plan", round=self._rounds.number, **self._how(peer))

    def _direct_word(self, peer: _Peer, kind: str, header: Header, payload: memoryview) -> None:
        """Deal with what is said of a direct exchange."""
        assert peer.member is not None
        turn, me = whole(header, "turn"), peer.member.number
        vote = self._vote
        if vote is None or turn != vote.plan.turn or me not in vote.plan.members:
            return  # of a turn that is over
        match kind:
            case "ready":
                self._ready(vote, peer, header)
            case "mean":
                try:
                    vote.mean(me, whole(header, "chunk"), payload)
                except Rejected as error:
                    self._ways.shy(self._rounds.number)
                    self._begin_again(f"what {peer.member} sent is not admitted: {error}", direct=False)
            case "done":
                vote.done[me] = text(header, "hash")
                peer.link.note(number(header, "sent"), number(header, "busy"))
            case "fault":
                blamed, why = whole(header, "member"), text(header, "why")
                for each in self._members():
                    if each.member is not None and each.member.number == blamed and blamed in vote.plan.members:
                        self._refused.add(blamed)
                        self._reject(each, why)
                self._begin_again(f"the update of member {blamed} is not admitted")

    def _ready(self, vote: Vote, peer: _Peer, header: Header) -> None:
        assert peer.member is not None and self._outer is not None
        now, said, norms = time.monotonic(), _Said.read(header), tuple(numbers(header, "norms"))
        if len(norms) != len(vote.plan.members):
            raise Malformed(f"{len(norms)} norms, where {len(vote.plan.members)} were due")
        if vote.weights is not None or peer.member.number in self._refused or peer.holds != self._rounds.number:
            return
        if said.base != self._outer.hash:
            self._reject(peer, "it holds other outer parameters than the run")
            self._begin_again(f"{peer.member} holds other outer parameters", direct=False)
            self._send_state(peer)
            return
        vote.ready[peer.member.number] = Ready(said.samples, said.steps, norms, now)
        self._note(peer, said, now)

    def _go(self, vote: Vote, now: float) -> None:
        """Tell all whose updates count."""
        assert self._outer is not None
        counted = [each for each in self._rounds.ready() if each in vote.ready]
        factors = {}
        for each in counted:
            factors[each] = self._outer.gate.factor(vote.ready[each].norm, vote.ready[each].steps)
            self._say_clipped(self._rounds.members[each], factors[each])
        vote.close(counted, factors, self._norm)
        self._went = now
        if not vote.samples:
            return
        for peer in self._members():
            if peer.member is not None and peer.member.number in vote.plan.members:
                weights, norms = vote.told(peer.member.number)
                peer.connection.send("go", turn=vote.plan.turn, weights=weights, norms=norms)

    def _commit(self, vote: Vote, now: float) -> None:
        """Make final what all hold."""
        assert self._outer is not None and vote.weights is not None
        for member, weight in vote.weights.items():
            ready = vote.ready[member]
            factor = weight * vote.samples / ready.samples
            self._outer.gate.remember(ready.norm * factor, ready.steps)
        closed, _ = self._count(now, vote.plan.members)
        before = {peer.member.number: peer.turn for peer in self._members() if peer.member is not None}
        if vote.samples:
            self._outer.adopt(vote.after, vote.hash)
            self._norm = vote.norm
        self._samples += vote.samples
        self._starred = False
        self._begin(set(vote.ready))
        for peer in self._members():
            assert peer.member is not None
            me = peer.member.number
            if peer.holds != closed or before.get(me) != vote.plan.turn:
                self._send_state(peer)
                continue
            peer.holds = self._rounds.number
            counted, hash_ = me in vote.ready, self._outer.hash
            held = self._went - vote.ready[me].came if counted else 0.0
            about = {"hash": hash_, "samples": vote.samples, "counted": counted, "held": held}
            peer.connection.send("commit", committed=vote.plan.turn, **about, **self._next(peer))

    def _measure(self, peer: _Peer, exchange_s: float) -> None:
        """Learn the speed of the centre's link from the seconds of an exchange through it."""
        assert self._sizes is not None and self._settings is not None
        members = self._members()
        elsewhere, size = sum(not each.speed.near for each in members), self._sizes.update_bytes(self._settings.codec)
        if peer.speed.near or len(members) < 2:
            return
        self._ways.measure(size, elsewhere, exchange_s - peer.link.round_trip_s)


def _on_one_machine(connection: Connection) -> bool:
    there: str = connection.sock.getpeername()[0]
    return ipaddress.ip_address(there.partition("%")[0]).is_loopback or there == connection.sock.getsockname()[0]
