"""The machines: devices with speed and memory, links with latency and bandwidth, and islands of fast links."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from nearlinear.errors import InputError
from nearlinear.units import bandwidth, seconds, size


@dataclass(frozen=True, slots=True)
class Device:
    """One processor that trains.

    Args:
        name: What it is (``"H100 80GB"``).
        memory: Bytes.
        flops: Floating-point operations per second that a large matrix product reaches, per dtype (``"float32"``).
        memory_bandwidth: Bytes per second between the processor and its memory.
        host: The machine it sits in; devices of one host share its network link.
    """

    name: str
    memory: float
    flops: Mapping[str, float]
    memory_bandwidth: float
    host: str = ""

    def __post_init__(self) -> None:
        speeds = {"memory": self.memory, "memory_bandwidth": self.memory_bandwidth, **self.flops}
        for what, value in speeds.items():
            if not 0 < value < float("inf"):
                raise InputError(f"device {self.name!r}: {what} is {value}; it must be above 0")


@dataclass(frozen=True, slots=True)
class Link:
    """A link as messages meet it: ``latency + bytes / bandwidth`` seconds each.

    Args:
        latency: Seconds.
        bandwidth: Bytes per second in one direction.
        spread: Relative residual of the fit: 0.1 says that timed messages lay within 10 % of it (one sigma).
    """

    latency: float
    bandwidth: float
    spread: float = 0.0

    def __post_init__(self) -> None:
        if not (0 <= self.latency < float("inf") and self.bandwidth > 0 and self.spread >= 0):
            raise InputError(f"not a link: latency {self.latency} s, bandwidth {self.bandwidth} B/s")

    def __str__(self) -> str:
        return f"{seconds(self.latency)}, {bandwidth(self.bandwidth)}"

    def time(self, message_bytes: float) -> float:
        """Return the seconds that one message takes."""
        return self.latency + message_bytes / self.bandwidth


@dataclass(frozen=True, slots=True)
class Island:
    """Devices with links between them that are alike, and faster than those that leave the island.

    Args:
        devices: Positions in the cluster.
        link: Between any two of them.
    """

    devices: tuple[int, ...]
    link: Link


@dataclass(frozen=True, slots=True)
class Crowd:
    """How fast a device is while several work at once, as shares of its speed alone.

    Args:
        busy: How many work, the first of the cluster.
        compute: Share of ``flops`` that each of them has; the slowest's, where they differ.
        memory: Share of ``memory_bandwidth`` that each of them has; the slowest's, where they differ.
    """

    busy: int
    compute: float
    memory: float

    def __post_init__(self) -> None:
        if not (self.busy >= 1 and self.compute > 0 and self.memory > 0):
            raise InputError(f"not a crowd: {self.busy} busy devices at {self.compute} and {self.memory} of a speed")


FEW = 65536.0  # bytes of which the exchange is all waiting, but over the slowest links


@dataclass(frozen=True, slots=True)
class Exchange:
    """A collective operation as it was measured among the first devices of a cluster.

    Args:
        kind: ``"all_reduce"`` or ``"broadcast"``.
        algorithm: Who carried it out, and how (``"gloo ring"``).
        ranks: How many devices took part, the first of the cluster.
        link: The fit: seconds of an operation on no bytes, and bytes of a buffer that get through per second.
        processor: The same for the processor time on each rank, which a CPU does not have for computing.
        points: What was fitted: bytes of a buffer and seconds, ascending.
        beside: The operation while the ranks compute: bytes of a buffer, how many times as long it takes, and the
            share of the computing that goes on meanwhile, ascending. Of a CPU, which does both.
    """

    kind: str
    algorithm: str
    ranks: int
    link: Link
    processor: Link | None = None
    points: tuple[tuple[float, float], ...] = ()
    beside: tuple[tuple[float, float, float], ...] = ()

    def time(self, message_bytes: float) -> float:
        """Return the seconds that the operation takes on a buffer.

        Between measured sizes it is that of a line between them, beyond the largest that of the line through the last:
        TCP's slow start and caches bend the curve, which one fit for all sizes does not show.
        """
        for (low, short), (high, long) in itertools.pairwise(self.points):
            if low <= message_bytes <= high:
                return short + (long - short) * (message_bytes - low) / (high - low)
        if self.points and message_bytes > self.points[-1][0]:
            last, long = self.points[-1]
            return long + (message_bytes - last) * self._per_byte()
        return self.link.time(message_bytes)

    def split(self, message_bytes: float) -> tuple[float, float]:
        """Return the seconds in which ranks wait for each other, and those in which bytes travel.

        Operations at once wait together, and share the link for their bytes. The bandwidth is that between the largest
        sizes measured; the waiting is what an operation takes beyond its bytes, at most what one on ``FEW`` bytes does:
        the rest of a large one is the bytes of a link that falls short of its bandwidth.
        """
        whole, per_byte = self.time(message_bytes), self._per_byte()
        most = max(0.0, self.time(FEW) - FEW * per_byte)
        waiting = min(max(0.0, whole - message_bytes * per_byte), most)
        return waiting, whole - waiting

    def _per_byte(self) -> float:
        """Return the seconds that one more byte of a large buffer takes."""
        if len(self.points) < 2:
            return 1.0 / self.link.bandwidth
        last, long = self.points[-1]
        base, short = next(each for each in self.points[::-1] if each[0] <= last / 4 or each == self.points[0])
        return max(0.0, long - short) / (last - base)

    def processor_time(self, message_bytes: float) -> float:
        """Return the seconds of processor time that the operation takes on each rank."""
        return 0.0 if self.processor is None else self.processor.time(message_bytes)

    def beside_computing(self, message_bytes: float) -> tuple[float, float]:
        """Return how many times as long it takes while the ranks compute, and the share of computing that goes on."""
        if not self.beside:
            return 1.0, 1.0
        sizes, longer, left = zip(*self.beside, strict=True)
        return _between(message_bytes, sizes, longer), _between(message_bytes, sizes, left)


def _between(at: float, places: Sequence[float], values: Sequence[float]) -> float:
    """Return the value at a place, along lines over the logarithm of the place; the first and last value beyond."""
    for (low, one), (high, other) in itertools.pairwise(zip(places, values, strict=True)):
        if low <= at <= high:
            return one + (other - one) * math.log(at / low) / math.log(high / low)
    return values[0] if at < places[0] else values[-1]


def _exchange(raw: Mapping[str, Any]) -> Exchange:
    processor = raw.get("processor")
    points = tuple((size, time) for size, time in raw.get("points", ()))
    beside = tuple((size, longer, left) for size, longer, left in raw.get("beside", ()))
    fit, used = Link(**raw["link"]), Link(**processor) if processor else None
    return Exchange(raw["kind"], raw["algorithm"], raw["ranks"], fit, used, points, beside)


@dataclass(frozen=True)
class Cluster:
    """Devices, the islands they form, and the links between islands.

    Args:
        devices: In rank order.
        islands: Every device belongs to exactly one.
        between: Between devices of different islands.
        pairs: Links between two islands that differ from ``between``; ``(island, island, link)``, lower island first.
        uplinks: Messages that an island can send to others at once, each at the full bandwidth of ``between``: 1 where
            its devices share one network link, 8 where each of eight has its own.
        crowds: What devices that work at once lose to each other, by ``busy``; none: nothing is lost.
        exchanges: Collective operations as measured; none for a cluster that was described.
        source: Where the figures are from.

    Raises:
        InputError: A device belongs to no island or to two, a pair names an island that does not exist, or
            ``uplinks`` is below 1.

    Example:
        >>> laptop = Device("cpu", 8e9, {"float32": 50e9}, 10e9)
        >>> cable = Link(1e-4, 1.25e8)
        >>> print(Cluster((laptop, laptop), (Island((0,), cable), Island((1,), cable)), cable))
        2 x cpu (8 GB), 100 µs, 1 Gbit/s between
    """

    devices: tuple[Device, ...]
    islands: tuple[Island, ...]
    between: Link
    pairs: tuple[tuple[int, int, Link], ...] = ()
    uplinks: float = 1.0
    crowds: tuple[Crowd, ...] = ()
    exchanges: tuple[Exchange, ...] = ()
    source: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        placed = sorted(device for island in self.islands for device in island.devices)
        if not self.devices or placed != list(range(len(self.devices))):
            raise InputError(
                f"a cluster's islands must hold each of its {len(self.devices)} devices once, got {placed}"
            )
        for low, high, _ in self.pairs:
            if not 0 <= low < high < len(self.islands):
                raise InputError(f"a cluster of {len(self.islands)} islands has no pair of islands ({low}, {high})")
        if not 1 <= self.uplinks < float("inf"):
            raise InputError(f"a cluster's islands have {self.uplinks} uplinks each; they need at least 1")

    def __str__(self) -> str:
        kinds: dict[str, int] = {}
        for device in self.devices:
            label = f"{device.name} ({size(device.memory)})"
            kinds[label] = kinds.get(label, 0) + 1
        parts = [" + ".join(f"{count} x {label}" for label, count in kinds.items())]
        inside = {(len(island.devices), island.link) for island in self.islands if len(island.devices) > 1}
        parts += [f"{link} within {count}" for count, link in sorted(inside, key=lambda each: each[0])]
        if len(self.islands) > 1:
            times = f" ({self.uplinks:.2g} at once)" if self.uplinks >= 1.05 else ""
            parts.append(f"{self.between} between{times}")
        return ", ".join(parts)

    @cached_property
    def island_of(self) -> tuple[int, ...]:
        """The island of every device."""
        found = {device: number for number, island in enumerate(self.islands) for device in island.devices}
        return tuple(found[device] for device in range(len(self.devices)))

    @cached_property
    def _pairs(self) -> dict[tuple[int, int], Link]:
        return {(low, high): link for low, high, link in self.pairs}

    def link(self, one: int, other: int) -> Link:
        """Return the link between two devices."""
        a, b = sorted((self.island_of[one], self.island_of[other]))
        return self.islands[a].link if a == b else self._pairs.get((a, b), self.between)

    def crowd(self, busy: int) -> Crowd:
        """Return how fast each of the first ``busy`` devices is while they all work.

        Between two measured numbers what all get done together changes evenly, so that a number between two that fill
        the same cores does no more than they do; beyond the last each device's share stays.
        """
        known = [Crowd(1, 1.0, 1.0), *(each for each in self.crowds if each.busy > 1)]
        below = max((each for each in known if each.busy <= busy), key=lambda each: each.busy, default=known[0])
        above = min((each for each in known if each.busy > busy), key=lambda each: each.busy, default=below)
        if above is below:
            return dataclasses.replace(below, busy=busy)
        part = (busy - below.busy) / (above.busy - below.busy)

        def share(low: float, high: float) -> float:
            return ((1 - part) * below.busy * low + part * above.busy * high) / busy

        return Crowd(busy, share(below.compute, above.compute), share(below.memory, above.memory))

    def exchange(self, kind: str, ranks: int) -> Exchange | None:
        """Return the operation as measured among the first ``ranks`` devices, or ``None`` where it was not."""
        return next((each for each in self.exchanges if each.kind == kind and each.ranks == ranks), None)

    def slowest(self, devices: Sequence[int]) -> Link:
        """Return the link that a ring through ``devices`` waits for: its highest latency and its lowest bandwidth."""
        ring = [self.link(one, other) for one, other in zip(devices, [*devices[1:], devices[0]], strict=True)]
        return Link(max(link.latency for link in ring), min(link.bandwidth for link in ring))

    def first(self, count: int) -> Cluster:
        """Return the cluster of the first ``count`` devices.

        Raises:
            InputError: ``count`` is below 1 or above the number of devices.
        """
        if not 1 <= count <= len(self.devices):
            raise InputError(f"a cluster of {len(self.devices)} devices has no {count} first ones")
        kept = [(n, tuple(d for d in island.devices if d < count)) for n, island in enumerate(self.islands)]
        place = {n: index for index, n in enumerate(n for n, devices in kept if devices)}
        islands = tuple(Island(devices, self.islands[n].link) for n, devices in kept if devices)
        pairs = tuple((place[a], place[b], link) for a, b, link in self.pairs if a in place and b in place)
        crowds = tuple(each for each in self.crowds if each.busy < count)
        return dataclasses.replace(
            self,
            devices=self.devices[:count],
            islands=islands,
            pairs=pairs,
            crowds=(*crowds, self.crowd(count)) if self.crowds and count > 1 else crowds,
            exchanges=tuple(each for each in self.exchanges if each.ranks <= count),
        )

    def to_json(self) -> str:
        """Return the cluster as a JSON object."""
        return json.dumps({"format": _FORMAT, **dataclasses.asdict(self)}, indent=1)

    @classmethod
    def from_json(cls, text: str) -> Cluster:
        """Return the cluster that ``to_json`` wrote.

        Raises:
            InputError: ``text`` is not such an object.
        """
        try:
            raw: dict[str, Any] = json.loads(text)
            if raw.get("format") != _FORMAT:
                raise InputError(f"not a cluster: its format is {raw.get('format')!r}, not {_FORMAT!r}")
            return cls(
                devices=tuple(Device(**each) for each in raw["devices"]),
                islands=tuple(Island(tuple(each["devices"]), Link(**each["link"])) for each in raw["islands"]),
                between=Link(**raw["between"]),
                pairs=tuple((low, high, Link(**link)) for low, high, link in raw["pairs"]),
                uplinks=raw.get("uplinks", 1.0),
                crowds=tuple(Crowd(**each) for each in raw.get("crowds", ())),
                exchanges=tuple(_exchange(each) for each in raw.get("exchanges", ())),
                source=raw["source"],
            )
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise InputError(f"not a cluster: {error}") from error


_FORMAT = "nearlinear-cluster/1"
