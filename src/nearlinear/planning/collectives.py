"""Turning bytes, members and a link into the seconds that a collective operation takes.

With N members, S bytes, latency a and bandwidth B in each direction:

    ring                2 (N - 1) (a + S / (N B))            bytes optimal, latency grows with N
    gloo                2 (N - 1) n (a + S / (N n B))        a ring in n segments per part, each of which waits
    halving-doubling    2 log2(N) a + 2 (N - 1)/N S / B      bytes optimal, few latencies; N a power of two
    direct              2 a + 2 (N - 1)/N S / B              two rounds, N (N - 1) flows at once
    star                2 a + N S / B                        all through one member, segment by segment
    hierarchical        reduce-scatter inside, all-reduce between, all-gather inside

Source of the formulae: Thakur, Rabenseifner, Gropp, Optimization of Collective Communication Operations in MPICH,
2005, IJHPCA 19(1); the hierarchy: Cho et al., BlueConnect, 2019, MLSys.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence

from nearlinear.core.cluster import Cluster, Link
from nearlinear.errors import InputError

# The largest piece that gloo's ring sends at once, and the least number of pieces of a member's part
# (kMaxSegmentSize and numSegments in gloo/allreduce.h and .cc).
GLOO_SEGMENT = 2**20
GLOO_SEGMENTS = 2


def point_to_point(message_bytes: float, link: Link) -> float:
    """Return the seconds of one message: ``a + S / B``.

    Args:
        message_bytes: Size of the message.
        link: Between sender and receiver.
    """
    return link.time(message_bytes)


def reduce_scatter(message_bytes: float, members: int, link: Link) -> float:
    """Return the seconds until every member holds its part of the sum: ``(N - 1) (a + S / (N B))`` around a ring.

    Args:
        message_bytes: Bytes that every member brings.
        members: N.
        link: Between neighbours.
    """
    return (members - 1) * link.time(message_bytes / members)


def all_gather(message_bytes: float, members: int, link: Link) -> float:
    """Return the seconds until every member holds all parts: ``(N - 1) (a + S / (N B))`` around a ring.

    Args:
        message_bytes: Bytes of all parts together.
        members: N.
        link: Between neighbours.
    """
    return reduce_scatter(message_bytes, members, link)


def ring(message_bytes: float, members: int, link: Link) -> float:
    """Return the seconds of an all-reduce around a ring: a reduce-scatter and an all-gather.

    Args:
        message_bytes: Bytes that every member brings.
        members: N.
        link: The slowest between neighbours.

    Example:
        >>> ring(1e6, 4, Link(1e-3, 1e8))
        0.021
    """
    return 2 * reduce_scatter(message_bytes, members, link)


def gloo_ring(message_bytes: float, members: int, link: Link) -> float:
    """Return the seconds of gloo's ring: ``2 (N - 1) n (a + s / B)``, with n segments of s bytes per member's part.

    A segment is sent when its receiver has asked for it: a round trip, of which two are under way at once. On emulated
    links this lies within 14 % of what was measured: 1 KiB among 4 at a round trip of 80 ms 480 ms (494), 64 KiB at
    100 ms 0.62 s (0.69), 16 MB at 100 ms and 200 Mbit/s 2.2 s (2.1), 32 MiB at 80 ms and 100 Mbit/s between 2 hosts
    4.0 s (3.9), among 4 5.9 s (6.9).

    Args:
        message_bytes: Bytes that every member brings.
        members: N.
        link: The slowest between neighbours.
    """
    segments = max(GLOO_SEGMENTS, math.ceil(message_bytes / members / GLOO_SEGMENT))
    return 2 * (members - 1) * segments * link.time(message_bytes / members / segments)


def halving_doubling(message_bytes: float, members: int, link: Link) -> float:
    """Return the seconds of an all-reduce by recursive halving and doubling.

    Where N is no power of two, the members beyond the largest one first hand their data to a partner and get the
    result from it: two messages of S more.

    Args:
        message_bytes: Bytes that every member brings.
        members: N.
        link: Between any two.
    """
    if members < 2:
        return 0.0
    core = 1 << (members.bit_length() - 1)
    rounds = 2.0 * math.log2(core) * link.latency + 2.0 * (core - 1) / core * message_bytes / link.bandwidth
    return rounds + (2 * link.time(message_bytes) if core < members else 0.0)


def direct(message_bytes: float, members: int, link: Link) -> float:
    """Return the seconds of two rounds in which everyone sends to everyone.

    Args:
        message_bytes: Bytes that every member brings.
        members: N.
        link: Of one member to the network; its flows share it.
    """
    if members < 2:
        return 0.0
    return 2 * link.latency + 2 * (members - 1) / members * message_bytes / link.bandwidth


def star(message_bytes: float, members: int, link: Link) -> float:
    """Return the seconds through one member: segments of the sum leave while later ones still arrive.

    Args:
        message_bytes: Bytes that every member brings.
        members: N, the centre included.
        link: Of the centre; it carries N - 1 copies in and as many out.
    """
    if members < 2:
        return 0.0
    return 2 * link.latency + members * message_bytes / link.bandwidth


def hierarchical(
    message_bytes: float, islands: Sequence[int], inside: Link, between: Link, all_reduce: AllReduce = ring
) -> float:
    """Return the seconds of reduce-scatter inside islands, all-reduce between them, all-gather inside.

    The members of an island share its link to the outside, so that S bytes leave and enter each island however they
    are split among its members.

    Args:
        message_bytes: Bytes that every member brings.
        islands: Members of every island.
        inside: Between members of an island.
        between: Of an island to the others.
        all_reduce: Used between islands.
    """
    if not islands:
        return 0.0
    largest = max(islands)
    within = reduce_scatter(message_bytes, largest, inside) + all_gather(message_bytes, largest, inside)
    return within + all_reduce(message_bytes, len(islands), between)


AllReduce = Callable[[float, int, Link], float]
ALL_REDUCE: dict[str, AllReduce] = {
    "ring": ring,
    "gloo": gloo_ring,
    "halving-doubling": halving_doubling,
    "direct": direct,
    "star": star,
}


def all_reduce(message_bytes: float, devices: Sequence[int], cluster: Cluster, algorithm: str = "ring") -> float:
    """Return the seconds of an all-reduce among devices of a cluster.

    Devices of one island combine among themselves first where that is faster than one flat operation over all, except
    under gloo, which knows no islands. Devices of one host share its link to other islands: a ring enters and leaves it
    once, the other algorithms once per device.

    Args:
        message_bytes: Bytes that every device brings.
        devices: Positions in the cluster.
        cluster: Where the links are.
        algorithm: ``"ring"``, ``"gloo"``, ``"halving-doubling"``, ``"direct"`` or ``"star"``.

    Raises:
        InputError: The algorithm is unknown.
    """
    if algorithm not in ALL_REDUCE:
        raise InputError(f"unknown all-reduce {algorithm!r}; choose one of: {', '.join(ALL_REDUCE)}")
    one = ALL_REDUCE[algorithm]
    if len(devices) < 2:
        return 0.0
    ordered = sorted(devices, key=lambda device: (cluster.island_of[device], device))
    slowest = cluster.slowest(ordered)
    members = Counter(cluster.island_of[device] for device in ordered)
    if len(members) > 1 and algorithm not in ("ring", "gloo"):
        hosts = Counter(cluster.devices[device].host or str(device) for device in ordered)
        slowest = Link(slowest.latency, slowest.bandwidth / max(hosts.values()))
    flat = one(message_bytes, len(ordered), slowest)
    if len(members) in (1, len(ordered)) or algorithm == "gloo":
        return flat
    inner = [cluster.islands[island].link for island, count in members.items() if count > 1]
    inside = Link(max(link.latency for link in inner), min(link.bandwidth for link in inner))
    heads = [next(device for device in ordered if cluster.island_of[device] == island) for island in members]
    return min(flat, hierarchical(message_bytes, list(members.values()), inside, cluster.slowest(heads), one))
