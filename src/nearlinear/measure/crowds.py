"""Turning windows in which devices work alone and at once into how fast each is while others work.

    a turn      multiplying:  one per machine alone | the first 2 at once | the first 4 at once      copying: the same

A processor's speed drifts from second to second (its clock, the other guests of its machine), so alone and at once are
measured turn about. In a window all begin before the counting does and go on after it, so that nobody who is counted
has a core to himself at either end.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mean

from nearlinear.core.cluster import Crowd
from nearlinear.measure.hardware import Place
from nearlinear.measure.speed import Computer, Speed, copy_bytes, count_while
from nearlinear.runtime.meeting import Meeting

DTYPE = "float32"
TURNS = 2
WINDOW_S = 0.3
AROUND_S = 0.1  # of work before and after a window: ranks begin as far apart as the slowest link is long
_WHAT = "measuring devices at once"


def doublings(size: int) -> list[int]:
    """Return 2, 4, 8, ... and ``size`` itself."""
    return [*(2**k for k in range(1, size.bit_length()) if 2**k < size), size] if size > 1 else []


def measure_crowds(
    meeting: Meeting, computer: Computer, speeds: Sequence[Speed], places: Sequence[Place]
) -> tuple[Crowd, ...]:
    """Return how fast the slowest of the first 2, 4, ... ranks is while they all work; all ranks call it.

    The slowest, because a step waits for it.

    Args:
        meeting: All ranks.
        computer: This rank's device.
        speeds: Of every rank's device alone.
        places: Where every rank computes.
    """
    mine, counts = speeds[meeting.rank], doublings(meeting.size)
    if not counts:
        return ()
    lead = {place.machine: rank for rank, place in reversed(list(enumerate(places)))}
    leads = [lead[place.machine] for place in places]
    n, size = mine.sizes[DTYPE], copy_bytes(mine.memory_bandwidth)
    actions = [
        (computer.product(DTYPE, n), 2.0 * n**3 / mine.flops[DTYPE]),
        (computer.copy(size), 2.0 * size / mine.memory_bandwidth),
    ]
    shares: dict[tuple[int, int], list[list[float]]] = {}
    for _ in range(TURNS):
        for part, (action, alone_s) in enumerate(actions):
            action()
            before: list[float] = []
            for busy in [1, *counts]:
                works = meeting.rank < busy if busy > 1 else meeting.rank in leads
                meeting.all_gather_json(None, _WHAT)
                speed = alone_s * count_while(action, WINDOW_S, AROUND_S) if works else 0.0
                found = meeting.all_gather_json(speed, _WHAT)
                before = before or [found[each] for each in leads]
                share = [now / alone for now, alone in zip(found[:busy], before, strict=False)]
                shares.setdefault((busy, part), []).append(share)
    crowds = []
    for busy in counts:
        slowest = [min(map(mean, zip(*shares[busy, part], strict=True))) for part in range(2)]
        compute, memory = (round(min(1.0, each), 4) for each in slowest)
        crowds.append(Crowd(busy, compute, memory))
    return within_cores(crowds, places)


def within_cores(crowds: Sequence[Crowd], places: Sequence[Place]) -> tuple[Crowd, ...]:
    """Return ``crowds`` with no more for ranks that share cores than those who filled the cores before had together.

    Where the first 2 ranks have a core each, and the next 2 share these, 4 get no more work done than 2: each has half
    of what one of the 2 had, at most. What windows show beyond that is noise.

    Args:
        crowds: As measured, ascending.
        places: Where every rank computes.
    """
    found: list[Crowd] = []
    for crowd in crowds:
        compute, memory = crowd.compute, crowd.memory
        _, cores = wanted_and_there(places[: crowd.busy])
        for fewer in [Crowd(1, 1.0, 1.0), *found]:
            if wanted_and_there(places[: fewer.busy]) == (cores, cores):
                part = fewer.busy / crowd.busy
                compute, memory = min(compute, fewer.compute * part), min(memory, fewer.memory * part)
        found.append(Crowd(crowd.busy, compute, memory))
    return tuple(found)


def wanted_and_there(places: Sequence[Place]) -> tuple[int, int]:
    """Return how many cores ranks would use, had each its own, and how many they can.

    Example:
        >>> wanted_and_there([Place("vm", (0,), 1), Place("vm", (1,), 1), Place("vm", (0,), 1)])
        (3, 2)
    """
    cores: dict[str, set[int]] = {}
    wanted: dict[str, int] = {}
    for place in places:
        cores.setdefault(place.machine, set()).update(place.cores)
        wanted[place.machine] = wanted.get(place.machine, 0) + min(place.threads, len(place.cores))
    return sum(wanted.values()), sum(min(wanted[each], len(cores[each])) for each in cores)
