"""Turning one member's update, and what the others send it, into the mean that all of them hold: no socket, no clock.

    chunk of       member 0     member 1     member 2
    member 0's   ┌─ sums ◀────── update ────── update     (1) every member sends each owner the chunks that it sums,
    member 1's   │  update ─────▶ sums ◀────── update         as fast as it encodes them
    member 2's   │  update ────── update ─────▶ sums      (2) "go": the centre says whose updates count, and how much
                 └─ mean ───────▶ mean ──────▶ mean       (3) an owner sums a chunk, encodes the mean once, sends it to
                                                              all, while the next chunks are still coming in

The sum is in float32 and in the order of the members' numbers, as at the centre, and what all apply is the decoded
mean: the same bytes to the same bits. Nothing is final: the outer parameters are made in a copy, and the centre commits
when all have told it the same hash of theirs. Until then it may begin again with another turn, in which what was learnt
is sent anew.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from nearlinear.runtime.local.admission import Rejected, norm_of
from nearlinear.runtime.local.chunks import Chunks
from nearlinear.runtime.local.codecs import Bytes, Feedback, Floats, Undecodable
from nearlinear.runtime.local.frames import Header, Malformed, whole, wholes

CENTRE = -1  # where members' numbers are
ROUNDING = 1e-3  # by which a norm may differ from one machine to the next


@dataclass(frozen=True, slots=True)
class Plan:
    """Who exchanges directly, and who sums what.

    Args:
        turn: Counts all tries of all rounds of a run; what belongs to an earlier one is void.
        members: Their numbers, rising.
        bounds: Member ``members[i]`` owns the chunks from ``bounds[i]`` up to ``bounds[i + 1]``.
        teller: Who sends the whole mean to the centre, being on its machine; -1: every owner its own chunks.
    """

    turn: int
    members: tuple[int, ...]
    bounds: tuple[int, ...]
    teller: int

    def fields(self) -> dict[str, object]:
        """Return it as it travels in a header."""
        return {"members": self.members, "bounds": self.bounds, "teller": self.teller}

    @classmethod
    def read(cls, turn: int, value: object) -> Plan:
        """Return the plan that ``fields`` wrote.

        Raises:
            Malformed: It is none.
        """
        if not isinstance(value, dict):
            raise Malformed("a plan that is no object")
        members, bounds = _rising(value, "members"), _rising(value, "bounds")
        if len(members) < 2 or len(set(members)) < len(members) or len(bounds) != len(members) + 1 or bounds[0]:
            raise Malformed("a plan whose members or bounds make no sense")
        return cls(turn, members, bounds, whole(value, "teller", CENTRE))

    def chunks_of(self, member: int) -> range:
        """Return the chunks that a member of it owns."""
        place = self.members.index(member)
        return range(self.bounds[place], self.bounds[place + 1])

    def owner(self, chunk: int) -> int:
        """Return who owns a chunk."""
        return self.members[int(np.searchsorted(self.bounds, chunk, side="right")) - 1]

    def order(self, member: int) -> list[int]:
        """Return all chunks in the order in which a member sends them: to all owners in turn, its own chunks last.

        Owners are taken from the next one on, so that not all send to the same one at the same time.
        """
        place, count = self.members.index(member), len(self.members)
        owned = [self.chunks_of(self.members[(place + step) % count]) for step in range(1, count + 1)]
        longest = max(map(len, owned))
        return [chunks[offset] for offset in range(longest) for chunks in owned if offset < len(chunks)]


@dataclass(frozen=True, slots=True)
class Sending:
    """A chunk to send.

    Args:
        to: A member's number, or ``CENTRE``.
        kind: ``"part"``, of an update; ``"mean"``, of the mean.
        chunk: Which.
        payload: Its bytes.
    """

    to: int
    kind: str
    chunk: int
    payload: Bytes | memoryview


@dataclass(slots=True)
class Exchange:
    """One member's part in one turn; what is to be computed waits for ``work``, so that the sockets get their turns.

    Args:
        plan: Of the turn.
        me: This member's number.
        chunks: Of the vector.
        outer: Where it starts from, shape ``(sizes.total,)``.
        owed: What was left out of the means that this member encoded.
        sendings: Chunks to send, taken out by whoever sends them.
        norms: Of every owner's part of this member's update; ``None`` until it is all encoded.
        after: The outer parameters with the mean, as far as it is here.
    """

    plan: Plan
    me: int
    chunks: Chunks
    outer: Floats
    owed: Feedback
    sendings: list[Sending] = field(default_factory=list)
    norms: list[float] | None = None
    after: Floats = field(init=False)
    _change: Floats | None = field(init=False, default=None)
    _own: Feedback | None = field(init=False, default=None)
    _encode: deque[int] = field(init=False, default_factory=deque)
    _sum: deque[int] = field(init=False, default_factory=deque)
    _apply: deque[tuple[int, Bytes | memoryview]] = field(init=False, default_factory=deque)
    _squares: dict[int, float] = field(init=False, default_factory=dict)  # of my update, by owner
    _parts: dict[int, dict[int, Bytes | memoryview]] = field(init=False)  # of my chunks, by sender
    _weights: dict[int, float] | None = field(init=False, default=None)  # of members with an update; None before "go"
    _claimed: dict[int, float] = field(init=False, default_factory=dict)  # norms of their parts that I sum
    _seen: dict[int, float] = field(init=False, default_factory=dict)  # their squares, as far as they were summed
    _means: set[int] = field(init=False, default_factory=set)
    _applied: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self.after = np.empty_like(self.outer)
        self._parts = {chunk: {} for chunk in self.plan.chunks_of(self.me)}

    @property
    def whole(self) -> bool:
        """Whether ``after`` is the next round's outer parameters."""
        return self._applied == self.chunks.count

    @property
    def begun(self) -> bool:
        """Whether chunks are on their way."""
        return self._change is not None or bool(self._means) or any(self._parts.values())

    @property
    def busy(self) -> bool:
        """Whether there is something to compute."""
        return bool(self._encode or self._sum or self._apply)

    def begin(self, change: Floats, own: Feedback) -> None:
        """Begin to send an update.

        Args:
            change: Shape ``(sizes.total,)``.
            own: What was left out of this member's updates.
        """
        if self._weights is not None:
            return  # too late for this round
        self._change, self._own = change, own
        self._squares = dict.fromkeys(self.plan.members, 0.0)
        self._encode.extend(self.plan.order(self.me))

    def go(self, weights: Mapping[int, float], norms: Mapping[int, float]) -> None:
        """Learn whose updates count.

        Args:
            weights: What each enters the mean with, by member.
            norms: Of their parts that this member sums, as they said themselves.
        """
        self._weights, self._claimed = dict(sorted(weights.items())), dict(norms)
        self._seen = dict.fromkeys(weights, 0.0)
        if self.me not in weights:
            self._encode.clear()  # too late for this round
        self._sum.extend(chunk for chunk in self._parts if self._complete(chunk))

    def part(self, sender: int, chunk: int, payload: memoryview) -> None:
        """Take in a chunk of another's update.

        Raises:
            Malformed: It cannot come from there.
        """
        if chunk not in self.plan.chunks_of(self.me) or sender not in self.plan.members or sender == self.me:
            raise Malformed(f"chunk {chunk} of an update that does not belong here")
        if self._weights is not None and sender not in self._weights:
            return  # too late for this round
        if sender in self._parts.get(chunk, {sender: payload}):
            raise Malformed(f"chunk {chunk} of an update for a second time")
        self._require_length(chunk, payload)
        self._put(sender, chunk, payload)

    def mean(self, sender: int, chunk: int, payload: memoryview) -> None:
        """Take in a chunk of the mean.

        Raises:
            Malformed: It cannot come from there.
        """
        if not 0 <= chunk < self.chunks.count or self.plan.owner(chunk) != sender or chunk in self._means:
            raise Malformed(f"chunk {chunk} of a mean that does not come from there")
        self._require_length(chunk, payload)
        self._hold(chunk, payload)

    def work(self) -> None:
        """Compute one chunk of what there is to compute: sums first, for others wait for them.

        Raises:
            Refused: A member's update must not enter the mean.
            Malformed: A mean cannot be decoded.
        """
        if self._sum:
            self._sum_up(self._sum.popleft())
        elif self._encode:
            self._encode_one(self._encode.popleft())
        elif self._apply:
            chunk, payload = self._apply.popleft()
            try:
                values = self.chunks.decode(chunk, payload)
            except Undecodable as error:
                raise Malformed(str(error)) from None
            at = self.chunks.span(chunk)
            np.subtract(self.outer[at], values, out=self.after[at])
            self._applied += 1

    def _require_length(self, chunk: int, payload: memoryview) -> None:
        due = self.chunks.nbytes(chunk)
        if len(payload) != due:
            raise Malformed(f"{len(payload)} bytes for chunk {chunk}, where {due} were due")

    def _encode_one(self, chunk: int) -> None:
        assert self._change is not None and self._own is not None
        at, owner = self.chunks.span(chunk), self.plan.owner(chunk)
        data, values = self.chunks.encode(chunk, self._change[at], self._own)
        try:
            self._squares[owner] += norm_of(values) ** 2
        except Rejected as error:
            raise Refused(self.me, str(error)) from None
        if owner == self.me:
            self._put(self.me, chunk, data)
        else:
            self.sendings.append(Sending(owner, "part", chunk, data))
        if not self._encode:
            self.norms = [math.sqrt(self._squares[member]) for member in self.plan.members]

    def _put(self, sender: int, chunk: int, payload: Bytes | memoryview) -> None:
        self._parts[chunk][sender] = payload
        if self._complete(chunk):
            self._sum.append(chunk)

    def _complete(self, chunk: int) -> bool:
        return self._weights is not None and self._weights.keys() <= self._parts[chunk].keys()

    def _sum_up(self, chunk: int) -> None:
        assert self._weights is not None
        at, parts = self.chunks.span(chunk), self._parts.pop(chunk)
        mean = np.zeros(at.stop - at.start, np.float32)
        for member, weight in self._weights.items():
            try:
                values = self.chunks.decode(chunk, parts[member])
                self._seen[member] += norm_of(values) ** 2
            except (Rejected, Undecodable) as error:
                raise Refused(member, str(error)) from None
            if self._seen[member] > (self._claimed[member] * (1 + ROUNDING)) ** 2:
                raise Refused(
                    member,
                    f"a part of it has the norm {self._seen[member] ** 0.5:.3g}, not {self._claimed[member]:.3g}",
                )
            mean += values * np.float32(weight)
        data, _ = self.chunks.encode(chunk, mean, self.owed)
        self.sendings.extend(Sending(each, "mean", chunk, data) for each in self.plan.members if each != self.me)
        self._hold(chunk, data)

    def _hold(self, chunk: int, payload: Bytes | memoryview) -> None:
        self._means.add(chunk)
        self._apply.append((chunk, payload))
        if self.plan.teller == self.me or (self.plan.teller == CENTRE and self.plan.owner(chunk) == self.me):
            self.sendings.append(Sending(CENTRE, "mean", chunk, payload))


class Refused(Exception):
    """An update that must not enter the mean.

    Args:
        member: Whose.
        why: For a person.
    """

    def __init__(self, member: int, why: str) -> None:
        super().__init__(why)
        self.member = member


def _rising(value: Header, name: str) -> tuple[int, ...]:
    found = tuple(wholes(value, name))
    if list(found) != sorted(found):
        raise Malformed(f"{name} that do not rise")
    return found
