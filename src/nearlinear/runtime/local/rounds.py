"""Turning joins, updates, beats and departures into whose updates count and when a round closes: no socket, no clock.

    round 7     member 0   ──── steps ────▶ update                  ▶ counted
                member 1   ──── steps ─────────────▶ update         ▶ counted      (1) the last that is waited for
                member 2       joins ─── steps ──▶ "close" ▶ update ▶ counted      (2) entered in the midst: sends what
                member 3   ──── steps ─✗ dies                         zero             it has when another's is there
                member 4   ──── steps ───────────────────────────▶  zero, late     (3) keeps its steps for round 8
                                                              close

A round closes when every member that is here has sent its update, or when the first update has waited for as long again
as it took, and ``PATIENCE_S`` at least. A member that was late, cut off or stopped holds on to what it learnt: it
counts in a later round, and until it has sent an update in time again, nobody waits for it but a moment. Who has gone
keeps its number and may come back under it.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from nearlinear.errors import InputError

PATIENCE_S = 30.0  # the least that a late member is waited for
GRACE = 0.5  # of the time that the first took, and a beat at most: so long one that was late before is waited for
MOST = 1024  # members that ever were: a bound for what is remembered


@dataclass(slots=True)
class Member:
    """A member as the centre sees it.

    Args:
        number: Its place in every sum.
        name: Its machine's name.
        heard: When it was last heard.
        here: It is connected.
        fresh: It entered in the midst of the round in hand.
        called: It was told to send what it has.
        behind: It was late for the round before.
        update: When its update of this round came; None: not yet.
    """

    number: int
    name: str
    heard: float
    here: bool = True
    fresh: bool = True
    called: bool = False
    behind: bool = False
    update: float | None = None

    def __str__(self) -> str:
        return f"member {self.number} on {self.name}"


class Rounds:
    """The members of a run and the round in hand.

    Args:
        silence_s: Seconds of silence after which a member is gone.
        now: The time in seconds, by a clock that only rises.
        patience_s: The least that a late member is waited for.
        beat_s: Seconds between two beats.

    Example:
        >>> rounds = Rounds(silence_s=5, now=0.0)
        >>> a, b = rounds.joined("id of a", "host-a", 0.0), rounds.joined("id of b", "host-b", 0.0)
        >>> rounds.updated(a.number, 10.0); rounds.closes(11.0)
        False
        >>> rounds.gone(b.number); rounds.closes(11.0), rounds.close(11.0)
        (True, [0])
    """

    def __init__(self, *, silence_s: float, now: float, patience_s: float = PATIENCE_S, beat_s: float = 1.0) -> None:
        self.number = 0
        self.members: dict[int, Member] = {}
        self._numbers: dict[str, int] = {}
        self.silence_s, self._patience_s, self._beat_s = silence_s, patience_s, beat_s
        self._opened = self._turn = now

    def here(self) -> list[Member]:
        """Return the members that are connected, in the order of their numbers."""
        return [member for _, member in sorted(self.members.items()) if member.here]

    def joined(self, identity: str, name: str, now: float) -> Member:
        """Note that a member is here: a new one, or one that comes back.

        Raises:
            InputError: There have been too many.
        """
        number = self._numbers.get(identity)
        if number is None:
            if len(self._numbers) >= MOST:
                raise InputError(f"{MOST} members have joined this run, and it takes no more; start a new one")
            number = self._numbers[identity] = len(self._numbers)
        # A round that nobody has been in yet begins with its first member.
        fresh = any(member.here for member in self.members.values())
        # An update it sent before it was cut off is let go: it holds those steps still, and will send them again.
        self.members[number] = Member(number, name, now, fresh=fresh)
        if not fresh:
            self._opened = now
        return self.members[number]

    def heard(self, number: int, now: float) -> None:
        """Note that a member said something."""
        self.members[number].heard = now

    def updated(self, number: int, now: float) -> None:
        """Note that a member's update of the round in hand is here, and admitted."""
        self.members[number].update, self.members[number].behind = now, False

    def gone(self, number: int) -> None:
        """Note that a member left, died or was cut off; if its update is here, it still counts."""
        self.members[number].here = False

    def silent(self, now: float) -> list[Member]:
        """Return the members that have been silent for too long; to be asked at least once a beat.

        When this process itself stood still for long, nobody could be heard, and all are given time anew.
        """
        stood_still = now - self._turn > self._beat_s + self.silence_s / 2
        self._turn = now
        if stood_still:
            for member in self.here():
                member.heard = now
        return [member for member in self.here() if now - member.heard > self.silence_s]

    def to_call(self) -> list[Member]:
        """Return, once each, the members that are to send what they have because another's update is here."""
        if not any(member.update is not None for member in self.members.values()):
            return []
        calling = [each for each in self.here() if each.fresh and not each.called and each.update is None]
        for member in calling:
            member.called = True
        return calling

    def closes(self, now: float, among: Collection[int] | None = None) -> bool:
        """Return whether the round in hand is to be closed.

        Args:
            now: The time.
            among: Numbers of the members that this round is of; others are not waited for. ``None``: of all.
        """
        times = [member.update for member in self.members.values() if member.update is not None]
        if not times:
            return False
        first = min(times)
        if now >= first + max(self._patience_s, first - self._opened):
            return True
        missing = self.late(among)
        if all(member.behind for member in missing):
            # Who was late before is given a moment: one that is a little slower than the rest would never be in time.
            return not missing or now >= first + min(self._beat_s, GRACE * (first - self._opened))
        return False

    def late(self, among: Collection[int] | None = None) -> list[Member]:
        """Return the members that are here and whose update is not."""
        return [each for each in self.here() if each.update is None and (among is None or each.number in among)]

    def ready(self) -> list[int]:
        """Return the numbers of the members whose updates are here."""
        return sorted(number for number, member in self.members.items() if member.update is not None)

    def begin_again(self) -> None:
        """Let go of all updates of the round in hand: they will be sent again."""
        for member in self.members.values():
            member.update = None

    def close(self, now: float, among: Collection[int] | None = None) -> list[int]:
        """Go on to the next round; return the numbers of the members whose updates count, in the order of the sum.

        Args:
            now: The time.
            among: Numbers of the members that this round was of; others could not be late. ``None``: of all.
        """
        counted = self.ready()
        for member in self.members.values():
            member.behind = member.update is None and (among is None or member.number in among)
            member.update, member.fresh, member.called = None, False, False
        self.number, self._opened = self.number + 1, now
        return counted
