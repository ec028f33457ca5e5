"""Bettering a plan: drawing boundaries near its own, and taking the best chain of all that were drawn."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from nearlinear.planning.partition.ideals import Chains, Stages, crossing, sums
from nearlinear.planning.partition.orders import depth_first, least_crossing
from nearlinear.planning.partition.problem import Bools, Floats, Ints, Problem

POOL = 3000  # boundaries weighed together; more find little and cost their square
GROWN_BY = 0.3  # of a stage, at most, when single nodes are moved across a boundary
SMALL = 2500  # nodes up to which the closure of each is kept


class Pool:
    """Boundaries worth weighing: those that a plan below the best known may have, each once.

    What a boundary is worth is its margin: the seconds to spare, before and behind it, if all stages there were equally
    busy. A boundary with none cannot be in a better plan.
    """

    def __init__(self, problem: Problem, stages: Stages, below: float) -> None:
        self.problem, self.stages, self.below = problem, stages, below
        self.per_byte = float(min(stages.reading.min(), stages.sending.min()))
        self.member = np.zeros((problem.nodes, 0), bool)
        self.work, self.cross, self.state = np.zeros(0), np.zeros(0), np.zeros(0)
        self.seen: set[bytes] = set()

    def margin(self, work: Floats, cross: Floats, state: Floats) -> Floats:
        stages = self.stages
        total, slow = float(self.problem.work.sum()), float(stages.speed.min())
        room = np.concatenate([[0.0], np.cumsum(stages.speed)])[1:-1, None] * self.below
        whole = float(stages.speed.sum()) * self.below
        spare = np.minimum(room - work, (whole - room) - (total - work)) - slow * cross
        if np.isfinite(stages.memory).all():
            held = np.concatenate([[0.0], np.cumsum(stages.memory)])[:, None] * (1 + 1e-12)
            everything = float(self.problem.state.sum())
            spare[(state > held[1:-1]) | (everything - state > (held[-1] - held[1:-1]))] = -np.inf
        best: Floats = spare.max(axis=0)
        return best

    def add(self, member: Bools) -> None:
        """Take in those boundaries, shape ``(nodes, boundaries)``, that are new and worth it."""
        if member.shape[1]:
            work, state = sums(np.array([self.problem.work, self.problem.state]), member)
            self._add(member, work, crossing(self.problem, member, self.per_byte), state)

    def _add(self, member: Bools, work: Floats, cross: Floats, state: Floats) -> None:
        worth = np.flatnonzero(self.margin(work, cross, state) > 0)
        packed = np.packbits(member[:, worth], axis=0).T.copy()
        fresh = []
        for place, row in enumerate(packed):
            key = row.tobytes()
            if key not in self.seen:
                self.seen.add(key)
                fresh.append(place)
        if fresh:
            kept = worth[fresh]
            self.member = np.concatenate([self.member, member[:, kept]], axis=1)
            self.work = np.concatenate([self.work, work[kept]])
            self.cross = np.concatenate([self.cross, cross[kept]])
            self.state = np.concatenate([self.state, state[kept]])

    def add_order(self, order: list[int]) -> None:
        """Take in the boundaries between the nodes of an order."""
        problem = self.problem
        count = problem.nodes
        if count < 2:
            return
        place = np.empty(count, np.int64)
        place[order] = np.arange(count)
        change = np.zeros(count + 1)
        tensor, consumer = problem.edges
        if len(tensor):
            first = np.flatnonzero(np.r_[True, tensor[1:] != tensor[:-1]])
            last = np.maximum.reduceat(place[consumer], first)
            np.add.at(change, place[problem.producer], problem.moved * self.per_byte)
            np.add.at(change, last, -problem.moved * self.per_byte)
        cross = np.maximum(np.cumsum(change)[: count - 1], 0.0)
        work = np.cumsum(problem.work[order])[: count - 1]
        state = np.cumsum(problem.state[order])[: count - 1]
        margin = self.margin(work, cross, state)
        best = np.sort(self._ranked(work, margin)[: max(POOL // 8, 8 * len(self.stages.speed))])
        best = best[margin[best] > 0]
        self._add(place[:, None] <= best[None, :], work[best], cross[best], state[best])

    def lower(self, below: float) -> None:
        """Forget the boundaries that no plan below ``below`` has."""
        self.below = below
        self._keep(np.flatnonzero(self.margin(self.work, self.cross, self.state) > 0))

    def _keep(self, kept: Ints) -> None:
        if len(kept) < self.member.shape[1]:
            self.member, self.work, self.state = self.member[:, kept], self.work[kept], self.state[kept]
            self.cross = self.cross[kept]

    def ranked(self) -> Ints:
        """Return the boundaries, those with the largest margin for their share of the work first."""
        return self._ranked(self.work, self.margin(self.work, self.cross, self.state))

    def _ranked(self, work: Floats, margin: Floats) -> Ints:
        if len(work) == 0:
            return np.zeros(0, np.int64)
        share = np.floor(work / max(float(self.problem.work.sum()), 1e-300) * 16 * len(self.stages.speed))
        order = np.lexsort((-margin, share))
        begins = np.r_[True, share[order][1:] != share[order][:-1]]
        start = np.maximum.accumulate(np.where(begins, np.arange(len(order)), 0))
        level = np.arange(len(order)) - start  # 0 for the best of its share, 1 for the next
        ranked: Ints = order[np.lexsort((-margin[order], level))]
        return ranked

    def trim(self, limit: int) -> None:
        """Keep the ``limit`` best."""
        if self.member.shape[1] > limit:
            self._keep(np.sort(self.ranked()[:limit]))


class Climb:
    """A search that goes on from the best plan known.

    Args:
        problem: The nodes and tensors.
        stages: What the stages are like.
        load: Maximum load of the best plan known.
        chain: Its boundaries.
        seed: Of the random orders.
    """

    def __init__(self, problem: Problem, stages: Stages, load: float, chain: list[Bools], seed: int) -> None:
        self.problem, self.stages, self.load, self.chain = problem, stages, load, chain
        self.random = np.random.default_rng(seed)
        self.pool = Pool(problem, stages, load)
        self.scale = float(np.median(problem.moved[problem.moved > 0])) if (problem.moved > 0).any() else 0.0
        self._below: tuple[Bools, Bools] | None = None
        self.grown: set[bytes] = set()

    def round(self, orders: int, late: Callable[[], bool]) -> bool:
        """Draw boundaries and weigh them; return whether the plan got better."""
        for number in range(orders):
            if late():
                break
            self.pool.add_order(self._order(number))
        if self.problem.nodes <= SMALL:
            self._grow(late)
        self.pool.trim(POOL)
        load, chain, _ = Chains(self.problem, self.pool.member, self.stages, self.load).best(late)
        if not load < self.load:
            # All that was worth most has been weighed; what was passed over for it gets its turn.
            self.pool = Pool(self.problem, self.stages, self.load)
            self.grown.clear()
            return False
        self.load, self.chain = load, chain
        self.pool.lower(load)
        return True

    def _order(self, number: int) -> list[int]:
        amount = self.scale * self.random.choice([0.1, 0.3, 1.0, 3.0, 10.0])
        noise = (amount * self.random.standard_normal(self.problem.nodes)).tolist()
        block: list[int] | None = None
        if number % 4 and self.chain:
            width = int(self.random.integers(2, 4))
            stage = np.sum([~each for each in self.chain], axis=0) + self.random.integers(width)
            block = (stage // width).tolist()
        backwards = bool(self.random.integers(2))
        if number % 5 == 4 and block is None:
            return depth_first(self.problem, noise, backwards)
        return least_crossing(self.problem, noise, block, backwards)

    def _closures(self) -> tuple[Bools, Bools]:
        if self._below is None:
            count = self.problem.nodes
            before = np.eye(count, dtype=bool)
            for node in range(count):
                for each in self.problem.predecessors[node]:
                    before[:, node] |= before[:, each]
            self._below = before, before.T.copy()
            work = self.problem.work
            # A boundary behind a node has at least the node's work and all that leads to it before itself; a boundary
            # before it, at most all but its work and what follows.
            self.least_before = sums(work[None], before)[0]
            self.most_before = float(work.sum()) - sums(work[None], self._below[1])[0]
        return self._below

    def _grow(self, late: Callable[[], bool]) -> None:
        """Give the best boundaries, one at a time, each node near with all it needs, or take it with all behind."""
        before, behind = self._closures()
        problem, near = self.problem, GROWN_BY * self.load * float(self.stages.speed.max())
        fresh = [each for each in self.chain if each.any() and not each.all()]
        fresh += [self.pool.member[:, index] for index in self.pool.ranked()[: len(self.stages.speed)]]
        for ideal in fresh:
            key = np.packbits(ideal).tobytes()
            if key in self.grown or late():
                continue
            self.grown.add(key)
            work = float(problem.work @ ideal)
            outside = np.flatnonzero(~ideal & (self.least_before <= work + near))
            inside = np.flatnonzero(ideal & (self.most_before >= work - near))
            wider, narrower = ideal[:, None] | before[:, outside], ideal[:, None] & ~behind[:, inside]
            self.pool.add(np.concatenate([wider, narrower], axis=1))
