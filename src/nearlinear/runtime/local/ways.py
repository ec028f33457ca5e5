"""Turning measured links into the way that the next exchange goes: through the centre, or among the members."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from nearlinear.runtime.local.pace import SMOOTH

SHY = 10  # rounds without direct exchanges, after one that took too long
EVEN = 1.25  # links whose speeds have this ratio are taken to be equal: parts that stay keep what was left out of them

Way = Callable[[float, int, float, float, Sequence[float], bool], bool]
Parts = Callable[[Sequence[float]], list[float]]


@dataclass(slots=True)
class Uplink:
    """What is known of a member's links.

    Args:
        up: Bytes per second that it sends to other members; 0 while unknown.
        round_trip_s: Between it and the centre.
    """

    up: float = 0.0
    round_trip_s: float = 0.0

    def note(self, sent: float, busy_s: float) -> None:
        """Note how many bytes it has sent to others, in how many seconds of sending."""
        if busy_s > 0 and sent:
            self.up += (1.0 if not self.up else SMOOTH) * (sent / busy_s - self.up)


class Ways:
    """Which way, and who sums how much.

    Args:
        direct: Whether members exchange directly, from the bytes of an update, the members that are not on this
            machine, the longest round trip in seconds, the bytes per second of the centre's link and of each member's
            (0 while unknown), and whether they do so now.
        parts: Each member's part of the sums in a direct exchange, from the bytes per second of its link.
    """

    def __init__(self, direct: Way, parts: Parts) -> None:
        self._direct, self._parts = direct, parts
        self._shy = 0  # no direct exchanges before this round
        self._rate = 0.0  # bytes per second of the centre's link
        self._cut: tuple[tuple[int, ...], list[float], list[float]] = (), [], []  # members, their links, their parts

    def shy(self, round_: int) -> None:
        """Keep to the centre for some rounds after this one, whose direct exchange failed."""
        self._shy = round_ + SHY

    def open(self, round_: int) -> bool:
        """Return whether a direct exchange may be tried in this round."""
        return round_ >= self._shy

    def measure(self, nbytes: int, elsewhere: int, seconds: float) -> None:
        """Learn the speed of the centre's link from an exchange through it.

        Args:
            nbytes: Of an update.
            elsewhere: Members that are on other machines; each has sent one and taken one.
            seconds: That it took, without the round trip.
        """
        rate = 2 * elsewhere * nbytes / max(seconds, 1e-3)
        self._rate += (1.0 if not self._rate else SMOOTH) * (rate - self._rate)

    def direct(self, nbytes: int, elsewhere: int, round_trip_s: float, up: Sequence[float], now: bool) -> bool:
        """Return whether members exchange directly; the arguments are those of the function given."""
        return self._direct(nbytes, elsewhere, round_trip_s, self._rate, up, now)

    def parts(self, members: tuple[int, ...], up: Sequence[float]) -> list[float]:
        """Return each member's part of the sums: as before, unless the links are clearly others."""
        fastest = max(up) or 1.0
        known = [rate or fastest for rate in up]
        before, links, parts = self._cut
        if before != members or any(max(a, b) > EVEN * min(a, b) for a, b in zip(links, known, strict=True)):
            parts = self._parts(known if max(known) > EVEN * min(known) else [1.0] * len(known))
            self._cut = members, known, parts
        return parts
