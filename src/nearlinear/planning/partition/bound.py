"""Loads below which no plan can be, proven without looking at all plans."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from nearlinear.planning.partition.coarsen import coarsen
from nearlinear.planning.partition.flow import EVERYTHING, Network
from nearlinear.planning.partition.machines import Machines
from nearlinear.planning.partition.problem import Floats, Ints, Problem

EFFORT = 100_000  # tensors across boundaries that flows are sought through, at all states
LARGE = 2000  # nodes above which flows are sought along one path alone
STATES = 1200  # along a path; more would sharpen the bound little and cost their square
SHARE = 1e-9  # taken off every bound, for the rounding of sums


def bound(problem: Problem, machines: Machines, known: float, late: Callable[[], bool] = lambda: False) -> float:
    """Return seconds that some device is busy in every plan, at least.

    Args:
        problem: The nodes and tensors.
        machines: The devices.
        known: The maximum load of one plan.
        late: Whether to be content with what has been proven.
    """
    low = float(problem.work.sum() / machines.speed.sum())
    low = max(low, _highest(lambda load: coarsen(problem, machines, load) is None, low, known, late))
    reduced = coarsen(problem, machines, known)  # holds all plans below the known one
    problem = problem if reduced is None else reduced[0]
    for number, path in enumerate(_paths(problem)):
        if late() or low >= known * (1 - 1e-6):
            break
        walk = _Walk(problem, machines, path, number == 0 or problem.nodes <= LARGE, late)
        low = _highest(walk.refutes, low, known, late)
    return min(low * (1 - SHARE), known)


def _highest(refuted: Callable[[float], bool], low: float, high: float, late: Callable[[], bool]) -> float:
    """Return the highest load found, between ``low`` and ``high``, for which there is refuted to be a plan below."""
    if refuted(high):
        return high
    if not refuted(low * (1 + 1e-6)):
        return low
    while high - low > 2e-4 * high and not late():
        middle = (low + high) / 2
        low, high = (middle, high) if refuted(middle) else (low, middle)
    return low


def _paths(problem: Problem) -> list[Ints]:
    """Return paths through the graph that meet much of it: by work, by number of nodes."""
    paths: list[Ints] = []
    for weight in (np.ones(problem.nodes), problem.work):
        length, behind = np.zeros(problem.nodes), [-1] * problem.nodes
        for node in range(problem.nodes):
            before = problem.predecessors[node]
            if before:
                behind[node] = max(before, key=lambda each: length[each])
                length[node] = length[behind[node]]
            length[node] += weight[node]
        node, path = int(np.argmax(length)), []
        while node >= 0:
            path.append(node)
            node = behind[node]
        paths.append(np.array(path[::-1], np.int64))
    return paths


class _Walk:
    """A plan seen through one path: how far along the path each boundary is, and how much work lies before it.

    With the first h nodes of the path before a boundary, all that they read from is before it, and all that reads from
    the next one is behind it; the rest may be on either side. Stages are charged what they must compute and what must
    cross, whichever side that rest is on. A graph that narrows often leaves little open.

        state     0        1 ... m + 1                       m + 2
        before    nothing  the first 0 ... m of the path     everything
    """

    def __init__(self, problem: Problem, machines: Machines, path: Ints, flows: bool, late: Callable[[], bool]) -> None:
        self.machines = machines
        if len(path) > STATES:
            path = path[np.linspace(0, len(path) - 1, STATES).astype(int)]
        kept = _few_enough(problem, path) if flows else None
        path = path if kept is None or len(kept) < 2 * machines.count else kept
        states = len(path) + 3
        within, without = _known(problem, path, states)
        self.total = float(problem.work.sum())
        self.least = np.cumsum(np.bincount(within, problem.work, states))
        self.most = self.total - np.cumsum(np.bincount(without, problem.work, states)[::-1])[::-1]
        self.most[0], self.most[-1], self.least[-1] = 0.0, self.total, self.total
        self.cross = self._crossing(problem, within, without, states)
        if kept is path and machines.second_per_byte > 0:
            self.cross = np.maximum(self.cross, _must_cross(problem, within, without, states, late))
        forward = self.cross < np.inf
        self.cross[forward] *= machines.second_per_byte

    def _crossing(self, problem: Problem, within: Ints, without: Ints, states: int) -> Floats:
        """Return the bytes that surely cross the ends of a stage from one state to another, ``(states, states)``."""
        change = np.zeros((states + 1, states + 1))

        def rectangle(begin: int, end: int, low: int, high: int, size: float) -> None:
            if begin <= end and low <= high:
                change[begin, low] += size
                change[begin, high + 1] -= size
                change[end + 1, low] -= size
                change[end + 1, high + 1] += size

        for tensor, maker in enumerate(problem.producer.tolist()):
            size, readers = float(problem.moved[tensor]), problem.consumers[tensor]
            rectangle(0, without[maker], within[maker], max(without[c] for c in readers), size)
            begin = int(within[maker])
            pending = sorted((int(without[c]), int(within[c])) for c in readers)
            for place, (end, _) in enumerate(pending):
                rectangle(begin, end, min(low for _, low in pending[place:]), states - 1, size)
                begin = max(begin, end + 1)
        cross: Floats = np.cumsum(np.cumsum(change, axis=0), axis=1)[:states, :states]
        cross[np.tril_indices(states, -1)] = np.inf
        return cross

    def refutes(self, load: float) -> bool:
        """Return whether no plan has a maximum load below ``load``."""
        spare = load - self.cross
        spare[spare < 0] = -np.inf
        reached = np.full(len(self.least), -np.inf)
        reached[0] = 0.0
        for _ in range(self.machines.count):
            further = np.minimum((reached[:, None] + spare * self.machines.speed.max()).max(axis=0), self.most)
            further[further < self.least * (1 - 1e-12)] = -np.inf
            further = np.maximum(further, reached)
            if np.array_equal(further, reached):
                break
            reached = further
            if reached[-1] >= self.total * (1 - 1e-12):
                return False
        return True


def _few_enough(problem: Problem, path: Ints) -> Ints:
    """Return as many nodes of a path, evenly spread, as there is effort for flows at all of their states."""
    while len(path) > 1:
        states = len(path) + 3
        within, without = _known(problem, path, states)
        effort = sum(max(end - begin, 0) for begin, end in _lives(problem, within, without, states))
        if effort <= EFFORT:
            break
        path = path[:: max(2, effort // (2 * EFFORT))]
    return path


def _known(problem: Problem, path: Ints, states: int) -> tuple[Ints, Ints]:
    """Return the first state at which each node is surely before the boundary, and the last at which surely behind."""
    within, without = [states - 1] * problem.nodes, [0] * problem.nodes
    for place, node in enumerate(path.tolist()):
        within[node], without[node] = place + 2, place + 1
    for node in range(problem.nodes - 1, -1, -1):
        for each in problem.successors[node]:
            within[node] = min(within[node], within[each])
    for node in range(problem.nodes):
        for each in problem.predecessors[node]:
            without[node] = max(without[node], without[each])
    return np.array(within), np.array(without)


def _must_cross(problem: Problem, within: Ints, without: Ints, states: int, late: Callable[[], bool]) -> Floats:
    """Return bytes that cross the ends of a stage from one state to another, whichever side the open nodes are on.

    What is surely before a boundary and what is surely behind it are joined by paths along tensors, and every boundary
    cuts each path. A flow is many paths side by side, each as wide as its narrowest tensor, and the widest flow is as
    wide as the narrowest boundary (Ford and Fulkerson 1956). A path counts for the stage that ends at the boundary if
    all makers along it are surely in that stage, and for the one that begins there if all readers are: what passes
    stages without being made or read in them is not theirs.
    """
    out, into = np.zeros((states, states)), np.zeros((states, states))
    open_at: list[list[int]] = [[] for _ in range(states)]
    low, high = without.tolist(), within.tolist()
    for node in range(problem.nodes):
        if low[node] > 0 and high[node] < states - 1:
            for state in range(low[node] + 1, high[node]):
                open_at[state].append(node)
    across: list[list[int]] = [[] for _ in range(states)]
    for tensor, (begin, end) in enumerate(_lives(problem, within, without, states)):
        for state in range(begin, end):
            across[state].append(tensor)
    least = 1e-9 * float(problem.moved.max()) if len(problem.moved) else 0.0
    for state in range(1, states - 1):
        if late():
            break
        for amount, made, read in _paths_across(problem, state, open_at[state], across[state], low, high, least):
            out[: made + 1, state] += amount
            into[state, read:] += amount
    return out + into


def _lives(problem: Problem, within: Ints, without: Ints, states: int) -> list[tuple[int, int]]:
    """Return the states, from and to, at whose boundaries each tensor may lie on a path.

    Nodes that lead to no node of the path, or that none of them leads to, are open almost everywhere; what they make
    and read is left out while they are. A flow through less of a graph is narrower, never wider.
    """
    low, high = without.tolist(), within.tolist()
    lives = []
    for tensor, maker in enumerate(problem.producer.tolist()):
        readers = [high[each] for each in problem.consumers[tensor] if high[each] < states - 1]
        begin = low[maker] + 1 if low[maker] > 0 and high[maker] < states - 1 else high[maker]
        lives.append((begin, min(max(readers, default=0), states - 1) if problem.moved[tensor] > 0 else 0))
    return lives


def _paths_across(
    problem: Problem, state: int, free: list[int], across: list[int], low: list[int], high: list[int], least: float
) -> Iterator[tuple[float, int, int]]:
    """Yield bytes of each path across a boundary, the last state before its makers, the first behind its readers."""
    number = {node: place + 2 for place, node in enumerate(free)}
    several = [tensor for tensor in across if len(problem.consumers[tensor]) > 1]
    network = Network(2 + len(free) + len(several))
    makers: dict[int, int] = {}
    readers: dict[int, int] = {}
    middle = 2 + len(free)
    producer = problem.producer

    def end(node: int) -> int:
        return number.get(node, Network.SOURCE if state >= high[node] else Network.SINK)

    for tensor in across:
        maker, size = int(producer[tensor]), float(problem.moved[tensor])
        behind = [each for each in problem.consumers[tensor] if each in number or state <= low[each]]
        if not behind or (maker not in number and state < high[maker]):
            middle += len(problem.consumers[tensor]) > 1
            continue
        if len(problem.consumers[tensor]) == 1:
            arc = network.join(end(maker), end(behind[0]), size)
            makers[arc], readers[arc] = low[maker], high[behind[0]]
            continue
        makers[network.join(end(maker), middle, size)] = low[maker]
        outside = [high[each] for each in behind if state <= low[each]]
        if outside:
            readers[network.join(middle, Network.SINK, EVERYTHING)] = min(outside)
        for each in behind:
            if each in number:
                readers[network.join(middle, number[each], EVERYTHING)] = high[each]
        middle += 1
    for node in free:  # no boundary has a node before it and what that reads from behind
        for each in problem.predecessors[node]:
            if each in number:
                network.join(number[node], number[each], EVERYTHING)
    network.fill(least)
    for amount, arcs in network.paths(least):
        yield (
            amount,
            min(makers[arc] for arc in arcs if arc in makers),
            max(readers[arc] for arc in arcs if arc in readers),
        )
