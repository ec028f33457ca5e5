"""Turning where members listen and whom they reach into who calls whom, and whether all can speak to all.

    member 1 listens, member 2 listens      2 calls 1     (the later one calls)
    2 says it failed                        1 calls 2     (1 may be behind a router that lets nothing in)
    1 says it failed                        2 calls 1, and goes on trying, at longer and longer intervals

No socket, no clock.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from nearlinear.runtime.local.peers import Entry

TRIES = 2  # of a pair, each by the other side; then sides change rarely
RARELY = 4  # failures until they change again


@dataclass(slots=True)
class _Pair:
    caller: int
    token: str = field(default_factory=lambda: secrets.token_hex(16))
    failures: int = 0


class Introductions:
    """Who is where, and who reaches whom.

    Example:
        >>> known = Introductions()
        >>> known.listening(0, "10.0.0.1", 4001); known.listening(1, "10.0.0.2", 4002)
        >>> [(entry.number, entry.dial) for entry in known.roster(1)]
        [(0, True)]
        >>> _ = known.reached(1, {0: 0.08}, []); _ = known.reached(0, {1: 0.0}, [])
        >>> known.connected([0, 1]), known.round_trip_s([0, 1])
        (True, 0.08)
    """

    def __init__(self) -> None:
        self._where: dict[int, tuple[str, int]] = {}
        self._pairs: dict[tuple[int, int], _Pair] = {}
        self._reach: dict[int, dict[int, float]] = {}

    def listening(self, number: int, host: str, port: int) -> None:
        """Note where a member listens.

        Args:
            number: Which.
            host: Its address; empty where it is the centre's.
            port: Its port.
        """
        self.gone(number)
        self._where[number] = host, port

    def gone(self, number: int) -> None:
        """Note that a member is not here any more; when it comes back all is new."""
        self._where.pop(number, None)
        self._reach.pop(number, None)
        self._pairs = {pair: each for pair, each in self._pairs.items() if number not in pair}

    def roster(self, number: int) -> list[Entry]:
        """Return what a member is told of the others."""
        if number not in self._where:
            return []
        found = []
        for other, (host, port) in sorted(self._where.items()):
            if other != number:
                pair = self._pair(number, other)
                found.append(Entry(other, host, port, pair.token, pair.caller == number))
        return found

    def reached(self, number: int, reach: Mapping[int, float], failed: Iterable[int]) -> list[int]:
        """Note whom a member reaches.

        Args:
            number: Who says it.
            reach: Seconds of a round trip to each that it has a link with; 0 where it does not know them.
            failed: Whose links broke or did not come about.

        Returns:
            Members whose roster is another now.
        """
        self._reach[number] = dict(reach)
        changed: set[int] = set()
        for other in failed:
            if other == number or other not in self._where or number not in self._where:
                continue
            pair = self._pair(number, other)
            if pair.caller == number and other not in reach:
                pair.failures += 1
                if pair.failures <= TRIES or pair.failures % RARELY == 0:
                    pair.caller = other
                    changed |= {number, other}
        for other in reach:
            if other != number and other in self._where and number in self._where:
                self._pair(number, other).failures = 0
        return sorted(changed)

    def connected(self, members: Sequence[int]) -> bool:
        """Return whether each of these has a link with each other one, as both say."""
        return all(b in self._reach.get(a, {}) for a in members for b in members if a != b)

    def round_trip_s(self, members: Sequence[int]) -> float:
        """Return the seconds of the longest round trip between two of these."""
        return max((self._reach.get(a, {}).get(b, 0.0) for a in members for b in members), default=0.0)

    def _pair(self, one: int, other: int) -> _Pair:
        return self._pairs.setdefault((min(one, other), max(one, other)), _Pair(max(one, other)))
