"""Orders in which a graph's nodes can run, drawn so that little crosses where an order is cut."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence

import numpy as np

from nearlinear.planning.partition.problem import Bools, Problem, topological


def first_orders(problem: Problem) -> Iterator[list[int]]:
    """Yield orders of several kinds: as given, depth first, by the longest path, by what crosses, from both ends."""
    count = problem.nodes
    yield list(range(count))
    yield least_crossing(problem, [0.0] * count)
    yield least_crossing(problem, [0.0] * count, backwards=True)
    yield depth_first(problem, list(range(count)))
    yield depth_first(problem, list(range(count)), backwards=True)
    early, late = [0.0] * count, [0.0] * count
    for node in range(count):
        early[node] = float(problem.work[node]) + max((early[each] for each in problem.predecessors[node]), default=0.0)
    for node in reversed(range(count)):
        late[node] = float(problem.work[node]) + max((late[each] for each in problem.successors[node]), default=0.0)
    yield _by_rank(problem, [-each for each in late])
    yield _by_rank(problem, early)
    heavy = np.argsort(np.argsort(-problem.state, kind="stable"), kind="stable").tolist()
    yield depth_first(problem, heavy)
    yield depth_first(problem, heavy, backwards=True)


def _by_rank(problem: Problem, key: list[float]) -> list[int]:
    rank = np.argsort(np.argsort(np.array(key), kind="stable"), kind="stable").tolist()
    return topological(problem.predecessors, problem.successors, rank)


def depth_first(problem: Problem, rank: Sequence[float], backwards: bool = False) -> list[int]:
    """Return an order that goes on with what was made last; among several, with the lowest ``rank``."""
    before, after = problem.predecessors, problem.successors
    if backwards:
        before, after = after, before
    waits = [len(each) for each in before]
    stack = sorted((node for node, count in enumerate(waits) if count == 0), key=lambda node: -rank[node])
    order: list[int] = []
    while stack:
        node = stack.pop()
        order.append(node)
        ready = []
        for each in after[node]:
            waits[each] -= 1
            if waits[each] == 0:
                ready.append(each)
        stack += sorted(ready, key=lambda node: -rank[node])
    return order[::-1] if backwards else order


def least_crossing(
    problem: Problem, noise: Sequence[float], block: Sequence[int] | None = None, backwards: bool = False
) -> list[int]:
    """Return an order that goes on with the node after which the fewest bytes cross.

    Args:
        problem: The nodes and tensors.
        noise: Bytes added to each node's, shape ``(nodes,)``.
        block: Nodes of a lower block come first; it must never fall along a tensor.
        backwards: Build the order from its end.
    """
    before, after = problem.predecessors, problem.successors
    moved: list[float] = problem.moved.tolist()
    makes = [sum(moved[t] for t in tensors) for tensors in problem.made]
    left = [len(each) for each in problem.consumers]
    whole = list(left)
    if backwards:
        before, after = after, before
    sign = -1 if backwards else 1
    waits = [len(each) for each in before]
    place = [0] * problem.nodes if block is None else [sign * each for each in block]

    def growth(node: int) -> float:
        if backwards:
            return sum(moved[t] for t in problem.read[node] if left[t] == whole[t]) - makes[node]
        return makes[node] - sum(moved[t] for t in problem.read[node] if left[t] == 1)

    known = [0.0] * problem.nodes
    heap: list[tuple[int, float, int, int]] = []
    clock = 0

    def push(node: int) -> None:
        nonlocal clock
        clock -= 1
        known[node] = growth(node) + noise[node]
        heapq.heappush(heap, (place[node], known[node], clock, node))

    done = [False] * problem.nodes
    for node, count in enumerate(waits):
        if count == 0:
            push(node)
    order: list[int] = []
    while heap:
        _, key, _, node = heapq.heappop(heap)
        if done[node] or key != known[node]:
            continue
        done[node] = True
        order.append(node)
        changed: list[int] = []
        for tensor in problem.read[node]:
            left[tensor] -= 1
            if (left[tensor] == whole[tensor] - 1) if backwards else (left[tensor] == 1):
                changed += problem.consumers[tensor]
        for each in after[node]:
            waits[each] -= 1
            if waits[each] == 0:
                push(each)
        for each in changed:
            if not done[each] and waits[each] == 0 and growth(each) + noise[each] != known[each]:
                push(each)
    return order[::-1] if backwards else order


def prefixes(order: Sequence[int]) -> Bools:
    """Return the boundaries between the nodes of an order, shape ``(nodes, nodes - 1)``."""
    count = len(order)
    place = np.empty(count, np.int64)
    place[list(order)] = np.arange(count)
    held: Bools = place[:, None] <= np.arange(count - 1)[None, :]
    return held
