"""Turning the links of pairs into islands: devices with links between them that are alike, and faster than the rest.

A pair's distance is the time of a message of 1 MB. The smallest groups whose links to the outside are all at least
``STEP`` times as far as those within are islands. What belongs to none is grouped by machine: devices of one share a
network link, whether or not that is slower than what is between them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median

from nearlinear.core.cluster import Island, Link

MESSAGE = 1e6  # bytes by which links are compared
STEP = 2.0  # ratio of the distances to the outside and within from which a group is an island
STEP_WITHIN = 4.0  # the same where all devices are of one machine: NVLink beside PCIe shows, a busy processor does not
ALIKE = 1.25  # ratio of two distances up to which one link may stand for both

Pair = tuple[int, int]


def islands_of(
    links: Mapping[Pair, Link], hosts: Sequence[str]
) -> tuple[tuple[Island, ...], Link, tuple[tuple[int, int, Link], ...]]:
    """Return the islands, the link between them, and the pairs of islands whose link is another.

    Args:
        links: Between ranks that were measured, lower rank first; one pair may stand for others of the same hosts.
        hosts: Name of each rank's machine.

    Example:
        >>> near, far = Link(1e-5, 1e10), Link(1e-3, 1e8)
        >>> islands, between, others = islands_of({(0, 1): near, (0, 2): far, (1, 2): far}, ["a", "a", "b"])
        >>> [island.devices for island in islands], between == far, others
        ([(0, 1), (2,)], True, ())
    """
    all_links = _of_all_pairs(links, hosts)
    groups = _groups(all_links, hosts)
    place = {rank: number for number, group in enumerate(groups) for rank in group}
    within: dict[int, list[Link]] = {number: [] for number in range(len(groups))}
    across: dict[Pair, list[Link]] = {}
    for (one, other), link in all_links.items():
        a, b = sorted((place[one], place[other]))
        (within[a] if a == b else across.setdefault((a, b), [])).append(link)
    outside = [link for each in across.values() for link in each]
    # What nobody was there to measure (the inside of an island of one) is as the fastest link that was.
    any_inside = [link for each in within.values() for link in each] or outside or [Link(0.0, 1e12)]
    islands = tuple(
        Island(tuple(group), typical(within[number] or [min(any_inside, key=_distance)]))
        for number, group in enumerate(groups)
    )
    between = typical(outside) if outside else islands[0].link
    others = tuple(
        (a, b, typical(each))
        for (a, b), each in sorted(across.items())
        if not 1 / ALIKE <= _distance(typical(each)) / _distance(between) <= ALIKE
    )
    return islands, between, others


def typical(links: Sequence[Link]) -> Link:
    """Return the link in the middle of several that are taken for one; its spread covers how far they lie apart.

    Example:
        >>> print(typical([Link(1e-3, 1e8), Link(3e-3, 3e8), Link(2e-3, 2e8)]))
        2 ms, 1.6 Gbit/s
    """
    bandwidth = median(link.bandwidth for link in links)
    apart = median(abs(link.bandwidth / bandwidth - 1.0) for link in links)
    return Link(median(link.latency for link in links), bandwidth, max(apart, median(link.spread for link in links)))


def _distance(link: Link) -> float:
    return max(link.time(MESSAGE), 1e-12)


def _of_all_pairs(links: Mapping[Pair, Link], hosts: Sequence[str]) -> dict[Pair, Link]:
    """Fill in the pairs that were not measured: with the link of a pair of the same hosts, else of the two's others."""
    by_hosts: dict[frozenset[str], list[Link]] = {}
    for (one, other), link in links.items():
        by_hosts.setdefault(frozenset((hosts[one], hosts[other])), []).append(link)
    filled = dict(links)
    inside = [link for (one, other), link in links.items() if hosts[one] == hosts[other]]
    across = [link for (one, other), link in links.items() if hosts[one] != hosts[other]]
    for one in range(len(hosts)):
        for other in range(one + 1, len(hosts)):
            if (one, other) not in filled:
                same = by_hosts.get(frozenset((hosts[one], hosts[other])))
                rest = inside if hosts[one] == hosts[other] else across
                if same or rest:
                    filled[one, other] = typical(same or rest)
    return filled


def _groups(links: Mapping[Pair, Link], hosts: Sequence[str]) -> list[list[int]]:
    """Return the ranks of each island: join the nearest pairs first, and see what stands apart when it is joined.

    Source: single linkage, Florek et al. 1951.
    """
    group = [{rank} for rank in range(len(hosts))]  # of every rank; ranks of one group share the set
    widest = [0.0] * len(hosts)  # distance within the group of every rank
    found: list[set[int]] = []
    for distance, (one, other) in sorted((_distance(link), pair) for pair, link in links.items()):
        if group[one] is group[other]:
            continue
        for each in (group[one], group[other]):
            step = STEP if len({hosts[rank] for rank in each}) < len(set(hosts)) else STEP_WITHIN
            apart = distance > step * widest[min(each)]
            if len(each) > 1 and apart and not any(island <= each for island in found):
                found.append(set(each))
        joined = group[one] | group[other]
        for rank in joined:
            group[rank], widest[rank] = joined, distance
    placed = set().union(*found)
    rest: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts):
        if rank not in placed:
            rest.setdefault(host, []).append(rank)
    return sorted([*(sorted(island) for island in found), *rest.values()])
