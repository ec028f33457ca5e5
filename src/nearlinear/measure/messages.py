"""Turning a wire between two ranks into the times of its messages: one way, the other way, both at once, in streams.

leader                                follower
"sizes, repeats"  ────────────────▶            the plan is told, not timed
                  ◀────────────────   "ready"
S bytes           ────────────────▶
                  ◀────────────────   1 byte   time of the message = time until here - half a round trip of 1 byte
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from nearlinear.core.cluster import Link
from nearlinear.measure.link import fit_alpha_beta
from nearlinear.measure.wire import SocketWire, Wire

SMALLEST, LARGEST = 32768, 64 * 2**20  # bytes of the first message that is tried, and of the largest
LONG_S, LONG_ROUNDS = 0.08, 2.0  # a message this long, in seconds and in round trips, shows the bandwidth
REPEATS, PINGS, PINGS_S = 3, 16, 0.4  # as many round trips of one byte, or so many seconds of them, but at least 4
PARTS = (16, 4, 2, 1)  # of the largest message: the sizes that tell the bandwidth; one byte tells the latency
STREAMS = 4


@dataclass(frozen=True, slots=True)
class Direction:
    """What messages of one rank to another took.

    Args:
        source: Rank that sends.
        target: Rank that receives.
        sizes: Bytes per message.
        times: Seconds per message, the lower quartile of the repeats.
        link: The fit.
    """

    source: int
    target: int
    sizes: tuple[int, ...]
    times: tuple[float, ...]
    link: Link

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON takes it."""
        return asdict(self)

    @classmethod
    def from_dict(cls, raw: dict[str, Any]) -> Direction:
        """Return what ``to_dict`` gave."""
        return cls(raw["source"], raw["target"], tuple(raw["sizes"]), tuple(raw["times"]), Link(**raw["link"]))


@dataclass(frozen=True, slots=True)
class Both:
    """What two ranks measured about the link between them.

    Args:
        there: From the lower rank to the higher.
        back: From the higher to the lower.
        duplex: Bandwidth of a direction while both are used, as a share of that of the slower direction alone.
        streams: Bandwidth of ``STREAMS`` connections together over that of one; None where they were not tried.
    """

    there: Direction
    back: Direction
    duplex: float
    streams: float | None = None

    @property
    def link(self) -> Link:
        """The link as its slower direction is, with the mean of the latencies."""
        slower = min((self.there.link, self.back.link), key=lambda link: link.bandwidth)
        latency = (self.there.link.latency + self.back.link.latency) / 2
        return Link(latency, slower.bandwidth, max(self.there.link.spread, self.back.link.spread))

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON takes it."""
        return asdict(self)

    @classmethod
    def from_dict(cls, raw: dict[str, Any]) -> Both:
        """Return what ``to_dict`` gave."""
        there, back = Direction.from_dict(raw["there"]), Direction.from_dict(raw["back"])
        return cls(there, back, raw["duplex"], raw["streams"])


def time_pair(wire: Wire, me: int, peer: int) -> Both:
    """Time the messages between two ranks; both call it, and both get the result.

    Args:
        wire: Between them; a ``SocketWire`` of several connections is timed as one and as several.
        me: This rank.
        peer: The other.
    """
    one = wire.first() if isinstance(wire, SocketWire) else wire
    low, high = min(me, peer), max(me, peer)
    there = _lead(one, low, high, SMALLEST) if me == low else _follow(one)
    # The way back is seldom another: what was large enough there is tried first.
    back = _lead(one, high, low, there.sizes[-1]) if me == high else _follow(one)
    size = max(there.sizes[-1], back.sizes[-1])
    slower = min(there.link.bandwidth, back.link.bandwidth)
    latency = (there.link.latency + back.link.latency) / 2
    both = _timed_exchange(one, size)
    duplex = size / max(both - latency, 1e-9) / slower
    streams = None
    if wire is not one:
        if me == low:
            several = _timed_send(wire, size, latency)
            wire.tell(several)
        else:
            _receive_all(wire, size)
            several = wire.told()
        streams = several / there.link.bandwidth
    own = [duplex, streams]
    # The clocks of the two ranks differ a little; both are to go away with the same figures.
    if me == low:
        one.tell(own)
    else:
        duplex, streams = one.told()
    return Both(there, back, duplex, streams)


def _lead(wire: Wire, source: int, target: int, size: int) -> Direction:
    """Choose the sizes, time the messages, tell the follower what came of it.

    Args:
        wire: To the follower.
        source: This rank.
        target: The follower.
        size: Bytes of the first message to try as the largest.
    """
    first = _play(wire, [1], 2)[0][-1]
    trip = _quartile(_play(wire, [1], max(4, min(PINGS, round(PINGS_S / first))))[0])
    enough = max(LONG_S, LONG_ROUNDS * trip)
    while True:
        # Twice, since a connection that was idle takes its time to reach full speed.
        took = _play(wire, [size], 2)[0][-1] - trip
        if took > enough or size >= LARGEST:
            break
        size *= 8 if took < enough / 8 else 2
    sizes = [size // part for part in PARTS]
    # The largest first: then the smaller ones find the connection at speed. In rounds, so that a disturbance hits one
    # message of each size.
    trips = [_quartile(each) for each in _play(wire, sizes[::-1], REPEATS)][::-1]
    sizes, trips = [1, *sizes], [min(trip, *trips), *trips]
    whole = fit_alpha_beta(sizes, trips)
    link = Link(whole.latency / 2, whole.bandwidth, whole.spread)
    times = tuple(max(each - link.latency, 0.0) for each in trips)
    found = Direction(source, target, tuple(sizes), times, link)
    wire.tell({"found": found.to_dict()})
    return found


def _quartile(times: Sequence[float]) -> float:
    """Return the time that a quarter of the times are below, at least one of them."""
    return sorted(times)[len(times) // 4]


def _play(wire: Wire, sizes: list[int], repeats: int) -> list[list[float]]:
    """Return the seconds from sending each message until its answer, per size, in rounds over the sizes."""
    wire.tell({"sizes": sizes, "repeats": repeats})
    wire.told()
    times: list[list[float]] = [[] for _ in sizes]
    for _ in range(repeats):
        for place, size in enumerate(sizes):
            began = time.perf_counter()
            wire.send(size)
            wire.receive(1)
            times[place].append(time.perf_counter() - began)
    return times


def _follow(wire: Wire) -> Direction:
    """Answer the leader's messages until it tells what it found."""
    while True:
        plan = wire.told()
        if "found" in plan:
            return Direction.from_dict(plan["found"])
        wire.tell("ready")
        for _ in range(plan["repeats"]):
            for size in plan["sizes"]:
                wire.receive(size)
                wire.send(1)


def _timed_exchange(wire: Wire, size: int) -> float:
    wire.exchange(1)
    times = []
    for _ in range(2):
        began = time.perf_counter()
        wire.exchange(size)
        times.append(time.perf_counter() - began)
    return _quartile(times)


def _timed_send(wire: Wire, size: int, latency: float) -> float:
    """Return the bytes per second of messages of ``size``."""
    times = []
    for _ in range(2):
        began = time.perf_counter()
        wire.send(size)
        wire.receive(1)
        times.append(time.perf_counter() - began - 2 * latency)
    return size / max(_quartile(times), 1e-9)


def _receive_all(wire: Wire, size: int) -> None:
    for _ in range(2):
        wire.receive(size)
        wire.send(1)


def time_many(wire: Wire, me: int, peer: int, size: int, latency: float) -> float:
    """Return the bytes per second from the lower to the higher rank while other pairs do the same.

    Both call it at the same time as the other pairs, and both get the result. Only the time in which all send counts,
    so the first and the last message are left out.

    Args:
        wire: To the peer.
        me: This rank.
        peer: The other.
        size: Bytes per message.
        latency: Seconds that a message without bytes takes alone.
    """
    if me > peer:
        for _ in range(REPEATS + 2):
            wire.receive(size)
            wire.send(1)
        rate: float = wire.told()
        return rate
    times = []
    for _ in range(REPEATS + 2):
        began = time.perf_counter()
        wire.send(size)
        wire.receive(1)
        times.append(time.perf_counter() - began)
    rate = size / max(median(times[1:-1]) - 2 * latency, 1e-9)
    wire.tell(rate)
    return rate
