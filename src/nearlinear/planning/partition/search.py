"""The search for the best chain of stages: a few orders first, all boundaries where they are few, then a climb."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from nearlinear.planning.partition.climb import Climb, Pool
from nearlinear.planning.partition.coarsen import coarsen
from nearlinear.planning.partition.ideals import Chains, all_ideals, stages_of
from nearlinear.planning.partition.machines import Machines, fits
from nearlinear.planning.partition.orders import first_orders
from nearlinear.planning.partition.problem import Bools, Ints, Problem
from nearlinear.planning.partition.slicing import slice_order

IDEALS = 400_000  # boundaries up to which all of them are listed,
ROOM = 300e6  # if their nodes, a byte each, take no more than this
PAIRS = 4e8  # stages up to which all of them are weighed
ROUNDS = 10  # of drawing boundaries that find nothing, after which the search ends
ORDERS = 40  # drawn per round


class Search:
    """A search for the best chain of stages on machines in a given order; the last stage is on the last of them.

    Args:
        problem: The nodes and tensors.
        machines: The devices.
        seed: Of the random orders.
        late: Whether to stop.
        say: Told the best load so far and what the search is at.

    Attributes:
        load: Maximum load in seconds of the best chain found.
        stage: The stage of each node in it, shape ``(nodes,)``.
        found: Whether there is one.
        optimal: Whether it has been proven that no chain is better (or that there is none).
        method: How it was found.
    """

    def __init__(
        self,
        problem: Problem,
        machines: Machines,
        seed: int,
        late: Callable[[], bool],
        say: Callable[[float, str], None] = lambda load, what: None,
    ) -> None:
        self.whole, self.machines, self.seed, self.late, self.say = problem, machines, seed, late, say
        self.stages = stages_of(machines)
        slow = max(self.stages.reading.max(), self.stages.sending.max())
        # More than any plan takes: every node on the slowest device, every tensor sent and read by all others.
        self.load = 1.0 + float(
            problem.work.sum() / machines.speed.min() + machines.count * 2 * problem.moved.sum() * slow
        )
        self.unbounded = self.load
        self.stage = np.zeros(problem.nodes, np.int64)
        self.optimal, self.method = False, "none found"

    @property
    def found(self) -> bool:
        return self.load < self.unbounded

    def run(self, least: float = 0.0) -> None:
        """Search to the end; a chain with a load of ``least`` is good enough."""
        self.begin()
        self.go_on(least)

    def begin(self) -> None:
        """Find a first good chain, the best one where all can be weighed."""
        self._alone()
        reduced = coarsen(self.whole, self.machines, self.load)
        if reduced is None or self.machines.count == 1 or reduced[0].nodes == 1:
            self.optimal = True
            return
        self._first(*reduced)
        self.optimal = self._settled()

    def start_from(self, load: float, stage: Ints, method: str) -> None:
        """Take a chain from elsewhere as the first."""
        self.load, self.stage, self.method = load, stage, method

    def go_on(self, least: float) -> None:
        """Better the chain until nothing more is found."""
        while self.found and not self.optimal and self.load > least * (1 + 1e-9) and not self.late():
            known = self.load
            reduced = coarsen(self.whole, self.machines, self.load)
            if reduced is None:
                self.optimal = True
                return
            self._climb(*reduced, least)
            if not self.load < known:
                return
            self.optimal = self._settled()
            if not self.load < known * (1 - 1e-4):
                return

    def _alone(self) -> None:
        """Put everything on one device, the fastest of those that it fits."""
        for each in range(self.machines.count):
            stage, load = np.full(self.whole.nodes, each), float(self.whole.work.sum() / self.machines.speed[each])
            if load < self.load and fits(self.whole, self.machines, stage):
                self.start_from(load, stage, "one device")

    def _settled(self) -> bool:
        if self.late():
            return False
        reduced = coarsen(self.whole, self.machines, self.load)
        return reduced is None or self._exact(*reduced)

    def _take(self, load: float, chain: list[Bools], place: Ints, method: str) -> None:
        boundaries = [np.zeros(self.whole.nodes, bool)] * (self.machines.count - 1 - len(chain))
        boundaries += [each[place] for each in chain]
        self.load, self.method = load, method
        self.stage = np.sum([~each for each in boundaries], axis=0) if boundaries else self.stage * 0
        self.say(load, method)

    def _first(self, problem: Problem, place: Ints) -> None:
        """Slice a few orders, then combine their boundaries."""
        stages = self.stages
        pool = Pool(problem, stages, self.load)
        simple = stages.alike and len(np.unique(stages.memory)) == 1 and not problem.activation.any()
        for order in first_orders(problem):
            if simple:
                load, ends = self._slice(problem, order)
                if load < self.load:
                    at = np.empty(problem.nodes, np.int64)
                    at[order] = np.arange(problem.nodes)
                    self._take(load, [at < end for end in ends[:-1]], place, "one order sliced")
                    pool.lower(load)
            pool.add_order(order)
            if self.late() and self.found:
                return
        pool.trim(2000)
        load, chain, _ = Chains(problem, pool.member, stages, self.load).best(self.late)
        if load < self.load:
            self._take(load, chain, place, "orders combined")

    def _slice(self, problem: Problem, order: list[int]) -> tuple[float, list[int]]:
        # What a slice can hold grows with the load that is allowed, and so does the work: begin with a low one.
        stages = self.stages
        even = float(problem.work.sum() / stages.speed.sum())
        allowed = max(1.3 * even, float(problem.work.max() / stages.speed[0]) * (1 + 1e-9))
        while True:
            allowed = min(allowed, self.load)
            load, ends = slice_order(
                problem, order, len(stages.speed), stages.reading[0], stages.speed[0], stages.memory[0], allowed
            )
            if ends or allowed >= self.load:
                return load, ends
            allowed *= 2

    def _exact(self, problem: Problem, place: Ints) -> bool:
        member = all_ideals(problem, min(IDEALS, int(ROOM / problem.nodes)))
        if member is None:
            return False
        chains = Chains(problem, member, self.stages, self.load)
        if chains.pairs() > PAIRS:
            return False
        self.say(self.load, f"weighing all {member.shape[1]} boundaries")
        load, chain, finished = chains.best(self.late)
        if load < self.load:
            self._take(load, chain, place, "all boundaries")
        return finished

    def _climb(self, problem: Problem, place: Ints, least: float) -> None:
        climb = Climb(problem, self.stages, self.load, self._on(problem, place), self.seed)
        idle = 0
        while idle < ROUNDS and self.load > least * (1 + 1e-9) and not self.late():
            if climb.round(ORDERS, self.late):
                self._take(climb.load, climb.chain, place, "orders climbed")
                idle = 0
            else:
                idle += 1

    def _on(self, problem: Problem, place: Ints) -> list[Bools]:
        """Return the boundaries of the best plan on a smaller problem, each with what it then needs."""
        chain = []
        for end in range(1, self.machines.count):
            outside = np.bincount(place, self.stage >= end, problem.nodes) > 0
            ideal = ~outside
            for node in range(problem.nodes - 1, -1, -1):
                if ideal[node]:
                    ideal[problem.predecessors[node]] = True
            if ideal.any() and not ideal.all():
                chain.append(ideal)
        return chain
