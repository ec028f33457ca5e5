"""Turning a cluster and groups of its devices into the seconds of what they send each other."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from nearlinear.core.cluster import Cluster, Device, Exchange, Link
from nearlinear.planning.collectives import ALL_REDUCE, hierarchical


@dataclass(frozen=True, slots=True)
class Reach:
    """What an exchange among some devices meets.

    Args:
        members: Devices on each island.
        inside: The slowest link within an island; ``None`` where no two devices share one.
        outside: The slowest link between islands; ``None`` on one island.
        measured: The all-reduce among just these devices as it was timed.
    """

    members: tuple[int, ...]
    inside: Link | None
    outside: Link | None
    measured: Exchange | None

    @property
    def count(self) -> int:
        """How many devices."""
        return sum(self.members)


class Network:
    """A cluster, and what was worked out about groups of its devices; asked often, worked out once."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self._reaches: dict[tuple[int, ...], Reach] = {}
        self._islands: dict[tuple[int, ...], frozenset[int]] = {}
        self._kinds: dict[tuple[int, ...], tuple[Device, ...]] = {}
        self.all = tuple(range(len(cluster.devices)))
        self.crowd = cluster.crowd(len(cluster.devices))

    def reach(self, devices: tuple[int, ...]) -> Reach:
        """Return what an exchange among ``devices`` meets."""
        if devices not in self._reaches:
            self._reaches[devices] = self._reach(devices)
        return self._reaches[devices]

    def _reach(self, devices: tuple[int, ...]) -> Reach:
        island_of, islands = self.cluster.island_of, self.cluster.islands
        members = Counter(island_of[each] for each in devices)
        crowded = [islands[island].link for island, count in members.items() if count > 1]
        outside = None
        if len(members) > 1:
            heads = list({island_of[each]: each for each in sorted(devices, key=lambda each: island_of[each])}.values())
            outside = self.cluster.slowest(heads) if self.cluster.pairs else self.cluster.between
        whole = devices == tuple(range(len(devices)))
        measured = self.cluster.exchange("all_reduce", len(devices)) if whole else None
        return Reach(tuple(members.values()), _worst(crowded), outside, measured)

    def kinds(self, devices: tuple[int, ...]) -> tuple[Device, ...]:
        """Return the different devices among ``devices``."""
        if devices not in self._kinds:
            found = {id(each): each for each in map(self.cluster.devices.__getitem__, devices)}
            self._kinds[devices] = tuple(found.values())
        return self._kinds[devices]

    def islands(self, devices: tuple[int, ...]) -> frozenset[int]:
        """Return the islands that ``devices`` lie on."""
        if devices not in self._islands:
            self._islands[devices] = frozenset(map(self.cluster.island_of.__getitem__, devices))
        return self._islands[devices]

    def all_reduce(
        self, devices: tuple[int, ...], message_bytes: float, algorithms: Sequence[str], flows: int = 1
    ) -> float:
        """Return the seconds in which ``devices`` add up ``message_bytes`` each.

        As measured, where the cluster's file says so for just these devices; else by the best of the algorithms, around
        all devices or on islands first (``planning.collectives``).

        Args:
            devices: Positions.
            message_bytes: Bytes on each.
            algorithms: What the runtime chooses among.
            flows: Such exchanges that go on at once and share the islands' links to others.
        """
        if len(devices) < 2 or message_bytes == 0:
            return 0.0
        reach = self.reach(devices)
        if reach.measured is not None and flows == 1:
            return reach.measured.time(message_bytes)
        outside = reach.outside
        if outside is not None and flows > self.cluster.uplinks:
            share = self.cluster.uplinks / flows
            outside = Link(outside.latency, outside.bandwidth * share)
        flat = _worst([link for link in (reach.inside, outside) if link is not None])
        assert flat is not None, "two devices have a link"
        times = []
        for algorithm in algorithms:
            combine = ALL_REDUCE[algorithm]
            times.append(combine(message_bytes, reach.count, flat))
            if reach.inside is not None and outside is not None:
                times.append(hierarchical(message_bytes, reach.members, reach.inside, outside, combine))
        return min(times)

    def move(self, pairs: Sequence[tuple[int, int]], message_bytes: float) -> float:
        """Return the seconds until messages between all ``pairs`` of devices, sent at once, have arrived."""
        island = self.cluster.island_of
        leaving = Counter(island[one] for one, other in pairs if island[one] != island[other])
        worst = 0.0
        known: set[tuple[int, int]] = set()
        for one, other in pairs:
            ends = island[one], island[other]
            if ends in known:
                continue
            known.add(ends)
            link = self.cluster.link(one, other)
            share = min(1.0, self.cluster.uplinks / leaving[ends[0]]) if ends[0] != ends[1] else 1.0
            worst = max(worst, link.latency + message_bytes / (link.bandwidth * share))
        return worst


def _worst(found: Sequence[Link]) -> Link | None:
    """Return the highest latency with the lowest bandwidth."""
    if not found:
        return None
    return Link(max(link.latency for link in found), min(link.bandwidth for link in found))


def links(cluster: Cluster) -> list[Link]:
    """Return the kinds of links that messages take."""
    inside = [island.link for island in cluster.islands if len(island.devices) > 1]
    return inside + ([cluster.between] if len(cluster.islands) > 1 else []) + [link for _, _, link in cluster.pairs]


def scaled(cluster: Cluster, factor: float) -> Cluster:
    """Return ``cluster`` with every link ``factor`` times as fast."""

    def faster(link: Link) -> Link:
        return Link(link.latency / factor, link.bandwidth * factor, link.spread)

    return dataclasses.replace(
        cluster,
        between=faster(cluster.between),
        pairs=tuple((low, high, faster(link)) for low, high, link in cluster.pairs),
        islands=tuple(dataclasses.replace(each, link=faster(each.link)) for each in cluster.islands),
        exchanges=tuple(dataclasses.replace(each, link=faster(each.link)) for each in cluster.exchanges),
    )
