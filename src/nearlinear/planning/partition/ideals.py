"""The best chain of boundaries out of a family of them, by dynamic programming.

A boundary is an ideal: a set of nodes that holds, with every node, all that it reads from. Stages are what lies between
the boundaries of a chain, from nothing to everything. With all ideals of a graph the chain found is the best there is;
with some of them, it is the best that they make.

    nothing ⊂ I1 ⊂ I2 ⊂ ... ⊂ everything         stage s computes what is in I_s and not in I_(s-1)

What crosses the ends of stage J \\ I is, in bytes,

    x(I) + x(J) - sum over tensors t that cross J of  b_t ([I holds t's maker] + [I holds it and all its readers in J])

where x is what crosses one boundary: the first bracket is what passes from I beyond J, and was not sent by this stage;
the second what it did not receive. So one matrix product gives the loads of many stages at a time.

Source for the dynamic programme over ideals: Tarnawski et al., Efficient Algorithms for Device Placement of DNN Graph
Operators, 2020, arXiv 2006.16423.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from nearlinear.planning.partition.machines import Machines
from nearlinear.planning.partition.problem import Bools, Floats, Ints, Problem

BLOCK = 48  # boundaries whose predecessors are weighed in one matrix product
NEVER = 1e30


def all_ideals(problem: Problem, cap: int) -> Bools | None:
    """Return every ideal, shape ``(nodes, ideals)``, or ``None`` where there are more than ``cap``.

    Node by node: the ideals of the first ``v`` nodes, and those of them that hold all that ``v`` reads from, with it.
    """
    room = min(cap, 1024)
    member = np.zeros((problem.nodes, room), bool)
    count = 1
    for node in range(problem.nodes):
        able = np.ones(count, bool)
        for each in problem.predecessors[node]:
            able &= member[each, :count]
        more = np.flatnonzero(able)
        if count + len(more) > cap:
            return None
        if count + len(more) > room:
            room = min(cap, 2 * (count + len(more)))
            wider = np.zeros((problem.nodes, room), bool)
            wider[:, :count] = member[:, :count]
            member = wider
        member[:node, count : count + len(more)] = member[:node, more]
        member[node, count : count + len(more)] = True
        count += len(more)
    return np.ascontiguousarray(member[:, :count])


def sums(values: Floats, member: Bools) -> Floats:
    """Return the sums of each row of ``values`` over the nodes of each boundary, shape ``(rows, boundaries)``."""
    total = np.zeros((len(values), member.shape[1]))
    for low in range(0, member.shape[1], 1024):  # a piece at a time: as numbers, the family takes eight times the room
        total[:, low : low + 1024] = values @ member[:, low : low + 1024]
    return total


class Spans:
    """Where in a family, sorted by work, boundaries differ in a node: before that, none has it; behind it, all do."""

    def __init__(self, member: Bools) -> None:
        count = member.shape[1]
        self.member = member
        self.first: list[int] = [0] * len(member)
        self.end: list[int] = [0] * len(member)
        if count == 0:
            return
        first = np.where(member.any(axis=1), member.argmax(axis=1), count)
        end = np.where(member.all(axis=1), 0, count - np.argmin(member[:, ::-1], axis=1))
        self.first, self.end = first.tolist(), end.tolist()

    def crossed(self, maker: int, readers: tuple[int, ...]) -> tuple[int, Bools]:
        """Return which boundaries a tensor crosses, and the place of the first in question."""
        low, high = self.first[maker], max(self.end[each] for each in readers)
        if low >= high:
            return low, np.zeros(0, bool)
        done = self.member[readers[0], low:high]
        for each in readers[1:]:
            done = done & self.member[each, low:high]
        return low, self.member[maker, low:high] & ~done

    def ready(self, node: int, before: list[int]) -> tuple[int, Bools]:
        """Return which boundaries lack ``node``, but nothing it reads from, and the place of the first in question."""
        low = max((self.first[each] for each in before), default=0)
        high = self.end[node]
        if low >= high:
            return low, np.zeros(0, bool)
        able = ~self.member[node, low:high]
        for each in before:
            able &= self.member[each, low:high]
        return low, able


def crossing(problem: Problem, member: Bools, per_byte: float) -> Floats:
    """Return the seconds that the tensors which cross each boundary take on a link, shape ``(boundaries,)``."""
    total, spans = np.zeros(member.shape[1]), Spans(member)
    for tensor, maker in enumerate(problem.producer.tolist()):
        low, crossed = spans.crossed(maker, problem.consumers[tensor])
        total[low : low + len(crossed)] += crossed * (problem.moved[tensor] * per_byte)
    return total


@dataclass(frozen=True, eq=False)
class Stages:
    """What the stages of a chain are like, first to last.

    Args:
        speed: Of the device, shape ``(stages,)``.
        reading: Seconds per byte of what comes in, shape ``(stages,)``.
        sending: Seconds per byte of what goes out, shape ``(stages,)``.
        memory: Bytes, shape ``(stages,)``.
        in_flight: Microbatches whose activations it holds, shape ``(stages,)``.
    """

    speed: Floats
    reading: Floats
    sending: Floats
    memory: Floats
    in_flight: Floats

    @property
    def alike(self) -> bool:
        """Whether a stage costs the same wherever it is in the chain."""
        return all(len(np.unique(each)) == 1 for each in (self.speed, self.reading, self.sending))


def stages_of(machines: Machines) -> Stages:
    """Return the stages of a chain with one device each, in the machines' order; only the last ones may be needed."""
    k = machines.count
    fast = np.full(k, machines.second_per_byte)
    reading, sending = fast.copy(), fast.copy()
    if not machines.one_link:
        between = machines.per_byte[np.arange(k - 1), np.arange(1, k)]
        reading[1:], sending[:-1] = between, between
    return Stages(machines.speed, reading, sending, machines.memory, machines.in_flight[::-1])


def places(problem: Problem, stages: Stages, below: float, work: Floats, cross: Floats, state: Floats) -> Bools:
    """Return behind which stage each boundary may lie in a plan with a maximum load lower than ``below``.

    The stages before a boundary do all the work there and send what crosses it; those behind it receive that.

    Args:
        problem: The nodes and tensors.
        stages: What the stages are like.
        below: Seconds.
        work: Seconds of the nodes before each boundary, shape ``(boundaries,)``.
        cross: Seconds, on the fastest link, of the tensors that cross each boundary, shape ``(boundaries,)``.
        state: Bytes of the nodes before each boundary, shape ``(boundaries,)``.

    Returns:
        Shape ``(stages + 1, boundaries)``; the first row is before all stages.
    """
    total, slow = float(problem.work.sum()), stages.speed.min()
    room = np.concatenate([[0.0], np.cumsum(stages.speed)]) * below * (1 + 1e-12)
    before, after = work + slow * cross - 1e-12 * total, (1 - 1e-12) * total - work + slow * cross
    possible: Bools = (before <= room[:, None]) & (after <= (room[-1] - room)[:, None])
    if np.isfinite(stages.memory).all():
        memory = np.concatenate([[0.0], np.cumsum(stages.memory)]) * (1 + 1e-12)
        possible &= (state <= memory[:, None]) & (problem.state.sum() - state <= (memory[-1] - memory)[:, None])
    return possible


class Chains:
    """All chains through a family of boundaries.

    Args:
        problem: The nodes and tensors.
        member: The family, each once, shape ``(nodes, boundaries)``; nothing and everything need not be in it.
        stages: What the stages are like.
        below: Only chains with a lower maximum load are looked for.
    """

    def __init__(self, problem: Problem, member: Bools, stages: Stages, below: float) -> None:
        self.problem, self.stages, self.below = problem, stages, below
        # Work in whole units, so that sums are exact and a larger ideal never seems to do less.
        unit = max(float(problem.work.sum()), 1e-300) / 2.0**50
        exact = np.rint(problem.work / unit)
        values = np.array([exact, problem.state, problem.activation, np.ones(problem.nodes)])
        total = sums(values, member)
        total[0] *= unit
        inner = np.flatnonzero((total[3] > 0) & (total[3] < problem.nodes))
        inner = inner[
            places(problem, stages, below, total[0, inner], np.zeros(len(inner)), total[1, inner]).any(axis=0)
        ]
        inner = inner[np.lexsort((total[3, inner], total[0, inner]))]
        member = member[:, inner]
        per_byte = min(stages.reading.min(), stages.sending.min())
        cross = crossing(problem, member, 1.0)
        kept = places(problem, stages, below, total[0, inner], cross * per_byte, total[1, inner]).any(axis=0)
        self.member = np.zeros((problem.nodes, int(kept.sum()) + 2), bool)  # nothing, those kept, everything
        self.member[:, 1:-1] = member[:, kept]
        self.member[:, -1] = True
        whole = sums(values, np.ones((problem.nodes, 1), bool))
        whole[0] *= unit
        total = np.concatenate([whole * 0, total[:, inner[kept]], whole], axis=1)
        self.work, self.state, self.activation = total[0], total[1], total[2]
        self.cross = np.concatenate([[0.0], cross[kept], [0.0]])
        self.place = places(problem, stages, below, self.work, self.cross * per_byte, self.state)
        self.place[:, 0] = self.place[:, -1] = True
        self.limited = bool(np.isfinite(stages.memory).any())
        self.sets: list[list[int]] = []  # feature ``nodes + n``: whether an ideal holds all of ``sets[n]``
        self._features()

    def _features(self) -> None:
        problem, spans = self.problem, Spans(self.member)
        row: list[Ints] = []
        feature: list[Ints] = []
        read: list[Floats] = []
        sent: list[Floats] = []

        def add(rows: Ints, number: int, incoming: float, outgoing: float) -> None:
            row.append(rows)
            feature.append(np.full(len(rows), number))
            read.append(np.full(len(rows), incoming))
            sent.append(np.full(len(rows), outgoing))

        for tensor, maker in enumerate(problem.producer.tolist()):
            size, readers = float(problem.moved[tensor]), problem.consumers[tensor]
            if size == 0:
                continue
            low, crossed = spans.crossed(maker, readers)
            open_ = np.flatnonzero(crossed) + low
            if len(open_) == 0:
                continue
            if len(readers) == 1:
                add(open_, maker, -size, -size)
                continue
            add(open_, maker, 0.0, -size)
            held = self.member[np.array(readers)[:, None], open_]
            _, first, kind = np.unique(np.packbits(held, axis=0), axis=1, return_index=True, return_inverse=True)
            kind = kind.reshape(-1)
            for number, example in enumerate(first):
                own = [node for node, is_held in zip(readers, held[:, example], strict=True) if is_held]
                add(open_[kind == number], problem.nodes + len(self.sets) if own else maker, -size, 0.0)
                if own:
                    self.sets.append(own)
        for node in range(problem.nodes):  # no stage reaches from an ideal to one that lacks some of it
            low, able = spans.ready(node, problem.predecessors[node])
            add(np.flatnonzero(able) + low, node, NEVER, 0.0)
        rows = np.concatenate(row)
        order = np.argsort(rows, kind="stable")
        self.rows = rows[order]
        self.first = np.searchsorted(self.rows, np.arange(self.member.shape[1] + 1))
        self.feature = np.concatenate(feature)[order]
        self.read, self.sent = np.concatenate(read)[order], np.concatenate(sent)[order]

    def _held(self, features: Ints, starts: Ints) -> Floats:
        """Return which features the ideals at ``starts`` have, shape ``(features, starts)``."""
        nodes = int(np.searchsorted(features, self.problem.nodes))
        held = np.empty((len(features), len(starts)))
        held[:nodes] = self.member[np.ix_(features[:nodes], starts)]
        for place in range(nodes, len(features)):
            own = self.sets[int(features[place]) - self.problem.nodes]
            held[place] = (
                self.member[np.array(own)[:, None], starts].all(axis=0) if len(own) > 1 else self.member[own[0], starts]
            )
        return held

    def _loads(self, low: int, high: int, starts: Ints) -> Callable[[int], Floats]:
        """Return, for a stage's number, the loads of stages from ``starts`` to each of ``low ... high - 1``."""
        part = slice(self.first[low], self.first[high])
        ids, local = np.unique(self.feature[part], return_inverse=True)
        held = self._held(ids, starts)
        rows = self.rows[part] - low
        shape = (high - low, len(ids))
        flat = rows * len(ids) + local
        work = self.work[low:high, None] - self.work[starts]

        def product(weights: Floats) -> Floats:
            return np.bincount(flat, weights, shape[0] * shape[1]).reshape(shape) @ held

        stages = self.stages
        if stages.alike:
            per_byte = stages.reading[0]
            both = product(self.read[part] + self.sent[part])
            both += self.cross[low:high, None]
            both += self.cross[starts]
            load = work / stages.speed[0] + per_byte * both if per_byte > 0 else _barred(work / stages.speed[0], both)
            always: Callable[[int], Floats] = lambda stage: load  # noqa: E731
        else:
            reading = product(self.read[part]) + self.cross[starts]
            sending = product(self.sent[part]) + self.cross[low:high, None]

            def always(stage: int) -> Floats:
                found: Floats = work / stages.speed[stage - 1]
                found = found + stages.reading[stage - 1] * reading + stages.sending[stage - 1] * sending
                return _barred(found, reading)

        if not self.limited:
            return always
        state = self.state[low:high, None] - self.state[starts]
        activation = self.activation[low:high, None] - self.activation[starts]
        if stages.alike and len(np.unique(stages.memory)) == 1 and not activation.any():
            load = np.where(state > stages.memory[0] * (1 + 1e-12), np.inf, load)
            return lambda stage: load

        def within(stage: int) -> Floats:
            held = state + stages.in_flight[stage - 1] * activation
            return np.where(held > stages.memory[stage - 1] * (1 + 1e-12), np.inf, always(stage))

        return within

    def pairs(self) -> float:
        """Return how many pairs of boundaries a search weighs at most."""
        reach = self.below * float(self.stages.speed.max())
        earliest = np.searchsorted(self.work, self.work - reach, side="right")
        inner = self.place[2:-1].any(axis=0) if len(self.stages.speed) > 2 else np.zeros(len(self.work), bool)
        return float(np.maximum(np.arange(len(self.work)) - earliest, 0)[inner].sum())

    def best(self, late: Callable[[], bool] = lambda: False) -> tuple[float, list[Bools], bool]:
        """Return the least maximum load, the boundaries, and whether the search was finished.

        Args:
            late: Whether to stop; the search is then unfinished and finds nothing.

        Returns:
            The load (``inf`` where no chain is below), the boundary behind every stage but the last (shape
            ``(nodes,)`` each; two are alike where a stage holds nothing), and ``False`` where ``late`` stopped it.
        """
        count, k = self.member.shape[1], len(self.stages.speed)
        best = np.full((k + 1, count), np.inf)
        best[:, 0] = 0.0
        reach = self.below * float(self.stages.speed.max())
        earliest = np.searchsorted(self.work, self.work - reach, side="right")
        for low in range(1, count, BLOCK):
            if late():
                return np.inf, [], False
            high = min(low + BLOCK, count)
            wanted = np.flatnonzero(self.place[:, low:high].any(axis=1))
            wanted = wanted[wanted > 0]
            if len(wanted) == 0:
                continue
            begin = min(int(earliest[low]), low)
            alive = np.flatnonzero(np.isfinite(best[wanted - 1, begin:low]).any(axis=0)) + begin
            starts = np.concatenate([alive, np.arange(low, high)])
            load = self._loads(low, high, starts)
            for stage in wanted.tolist():
                reached = np.maximum(best[stage - 1, starts], load(stage))
                np.fill_diagonal(reached[:, len(alive) :], np.inf)
                found = reached.min(axis=1)
                found = np.minimum(found, best[stage - 1, low:high])  # or this stage holds nothing at all
                found[~self.place[stage, low:high] | ~(found < self.below)] = np.inf
                best[stage, low:high] = found
        value = float(best[k, count - 1])
        if not value < self.below:
            return np.inf, [], True
        chain: list[Bools] = []
        end, stage = count - 1, k
        while stage > 1:
            if best[stage - 1, end] > best[stage, end]:
                starts = np.arange(min(int(earliest[end]), end), end)
                loads = np.maximum(best[stage - 1, starts], self._loads(end, end + 1, starts)(stage)[0])
                end = int(starts[np.argmin(loads)])
            chain.append(self.member[:, end])
            stage -= 1
        return value, chain[::-1], True


def _barred(load: Floats, marked: Floats) -> Floats:
    return np.where(marked > NEVER / 2, np.inf, load)
