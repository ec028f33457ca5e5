"""Turning stages on devices into the step time of a pipeline, its copies and its replicas."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Sequence

from nearlinear.planning.exchange import Network
from nearlinear.planning.ways import Candidate, Way, Work, brought, slowest


def pipeline(way: Way, work: Work, network: Network) -> Candidate:
    """Return what a pipeline brings: its stages fill, run, drain; then the copies of each add up their gradients.

    With ``t`` the seconds of a stage per microbatch, ``c`` of a move to the next stage, ``r`` the replicas, ``m`` the
    microbatches:

        all forward, then all backward   sum t + 2 sum c + (m - r) (max(f, c) + max(b, c)) / r     t = f + b
        one forward, one backward        sum t + 2 sum c + (m - r) period
        period                           the largest of t / r and c / r of any stage, and, for every stage, of a round
                                         trip to the end (sum t + 2 sum c from there on) over its microbatches in flight

    The first keeps the activations of all microbatches, the second of those in flight, for which it pays each move.
    Where activations are made again, a stage keeps what enters it of each microbatch, and all of one; its backward pass
    takes a forward pass longer.
    """
    where = _places(way)
    micro = math.ceil(work.samples(way.devices) / way.copies) / way.microbatches
    scale = micro / work.graph.samples
    # Stages whose copies lie on several islands share those islands' links when they add up their gradients.
    sharing = Counter(island for each in map(network.islands, where) if len(each) > 1 for island in each)
    row, memory, updates, sums, fits = _Row([], [], [], []), [], [], [], True
    forward = work.forward / (work.forward + work.backward) if work.forward + work.backward else 0.5
    longer = 1 + forward if way.recompute else 1.0
    for number, (group, devices) in enumerate(zip(way.groups, where, strict=True)):
        slow = slowest(work, network, devices)
        later = sum(each.replicas for each in way.groups[number:])
        held = way.microbatches / group.replicas
        flight = math.ceil(held if way.eager else min(later / group.replicas, held))
        last = number == len(way.groups) - 1
        row.compute.append(slow * longer * (work.launch / len(way.groups) + scale * group.compute))
        pairs = [] if last else _pairs(devices, where[number + 1], way.copies)
        row.moves.append(network.move(pairs, group.leaving * scale))
        row.replicas.append(group.replicas)
        row.flight.append(flight * group.replicas)
        kept = group.activation_bytes * flight
        if way.recompute:
            kept = group.activation_bytes + (way.groups[number - 1].leaving * flight if number else 0.0)
        memory.append(group.state_bytes + kept * scale)
        fits = fits and all(memory[-1] <= device.memory for device in network.kinds(devices))
        updates.append(slow * group.update)
        flows = max(sharing[each] for each in network.islands(devices))
        sums.append(network.all_reduce(devices, group.parameter_bytes, work.algorithms, max(flows, 1)))
    whole, alone = (
        each.step(way.microbatches, way.eager, forward / longer)
        for each in (row, dataclasses.replace(row, moves=[0.0] * len(row.moves)))
    )
    own = way.microbatches * max(each / count for each, count in zip(row.compute, row.replicas, strict=True))
    found = brought(
        way, work, network, max(memory), own, whole - alone + max(sums), max(alone - own, 0.0), max(updates)
    )
    return dataclasses.replace(found, fits=fits)


@dataclasses.dataclass(frozen=True)
class _Row:
    """Per stage: seconds of computing and of the move to the next, replicas, microbatches in flight on all of them."""

    compute: list[float]
    moves: list[float]
    replicas: list[int]
    flight: list[int]

    def step(self, microbatches: int, eager: bool, forward: float) -> float:
        """Return the seconds from the first forward pass to the last backward pass."""
        filled = sum(self.compute) + 2 * sum(self.moves)
        stages = list(zip(self.compute, self.moves, self.replicas, strict=True))
        if eager:
            paces = [
                max((max(share * compute, move) / count, microbatches - count) for compute, move, count in stages)
                for share in (forward, 1 - forward)
            ]
            return filled + sum(pace * max(rounds, 0) for pace, rounds in paces)
        pace, count = max((max(compute, move) / count, -count) for compute, move, count in stages)
        for number, flight in enumerate(self.flight):
            trip = sum(self.compute[number:]) + 2 * sum(self.moves[number:])
            pace = max(pace, trip / min(flight, max(microbatches, 1)))
        return filled + pace * max(microbatches + count, 0)


def _places(way: Way) -> list[tuple[int, ...]]:
    """Return the devices of every stage: along the cluster copy by copy, or stage by stage."""
    per_copy = sum(group.replicas for group in way.groups)
    where: list[tuple[int, ...]] = []
    before = 0
    for group in way.groups:
        if way.along:
            starts = [copy * per_copy + before for copy in range(way.copies)]
            where.append(tuple(start + each for start in starts for each in range(group.replicas)))
        else:
            first = before * way.copies
            where.append(tuple(range(first, first + group.replicas * way.copies)))
        before += group.replicas
    return where


def _pairs(ours: Sequence[int], theirs: Sequence[int], copies: int) -> list[tuple[int, int]]:
    """Return who sends to whom from one stage to the next at one time: one device of each in every copy."""
    return [(ours[copy * len(ours) // copies], theirs[copy * len(theirs) // copies]) for copy in range(copies)]
