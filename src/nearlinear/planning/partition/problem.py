"""What the search works on: a graph as arrays, each group of operators one node, in an order that no name alters."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from nearlinear.core.graph import Graph

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class Problem:
    """Nodes in topological order and the tensors between them.

    Args:
        work: Seconds of each node on a device of speed 1, shape ``(nodes,)``.
        state: Bytes each node holds all the time, shape ``(nodes,)``.
        activation: Bytes each node holds per microbatch in flight, shape ``(nodes,)``.
        producer: The node that makes each tensor, shape ``(tensors,)``.
        moved: Bytes that cross a link for each tensor, there and, in training, back, shape ``(tensors,)``.
        consumers: The nodes that read each tensor, ascending.
    """

    work: Floats
    state: Floats
    activation: Floats
    producer: Ints
    moved: Floats
    consumers: tuple[tuple[int, ...], ...]

    @property
    def nodes(self) -> int:
        """How many nodes there are."""
        return len(self.work)

    @cached_property
    def made(self) -> list[list[int]]:
        """The tensors that each node makes."""
        made: list[list[int]] = [[] for _ in range(self.nodes)]
        for tensor, node in enumerate(self.producer.tolist()):
            made[node].append(tensor)
        return made

    @cached_property
    def read(self) -> list[list[int]]:
        """The tensors that each node reads."""
        read: list[list[int]] = [[] for _ in range(self.nodes)]
        for tensor, readers in enumerate(self.consumers):
            for node in readers:
                read[node].append(tensor)
        return read

    @cached_property
    def successors(self) -> list[list[int]]:
        """The nodes that read from each node, ascending."""
        return [sorted({c for t in tensors for c in self.consumers[t]}) for tensors in self.made]

    @cached_property
    def predecessors(self) -> list[list[int]]:
        """The nodes that each node reads from, ascending."""
        producer = self.producer.tolist()
        return [sorted({producer[t] for t in tensors}) for tensors in self.read]

    @cached_property
    def edges(self) -> tuple[Ints, Ints]:
        """Tensor and consumer of every edge."""
        tensor = [t for t, readers in enumerate(self.consumers) for _ in readers]
        return np.array(tensor, np.int64), np.array([c for readers in self.consumers for c in readers], np.int64)


def build(graph: Graph) -> tuple[Problem, Ints]:
    """Return the problem of a graph, and the node of each operator, shape ``(operators,)``.

    The order of nodes follows from their costs and their place among the others alone, so that neither names nor the
    order in which operators were given alter the plan.
    """
    count = len(graph.operators)
    factor = 2.0 if graph.training else 1.0
    raw = Problem(
        np.array([each.forward + each.backward for each in graph.operators], float),
        np.array([each.state_bytes for each in graph.operators], float),
        np.array([each.activation_bytes for each in graph.operators], float),
        np.array([each.producer for each in graph.tensors], np.int64),
        factor * np.array([each.bytes for each in graph.tensors], float),
        tuple(each.consumers for each in graph.tensors),
    )
    number: dict[str, int] = {}
    label = [
        number.setdefault("=" + each.group, place) if each.group is not None else place
        for place, each in enumerate(graph.operators)
    ]
    together, of_operator = contract(raw, label)
    problem, place = renumber(together, _canonical(together))
    assert len(of_operator) == count
    return problem, place[of_operator]


def contract(problem: Problem, label: Sequence[int]) -> tuple[Problem, Ints]:
    """Return the problem in which nodes of one label are one node, and the new node of each old one.

    Nodes that would then wait for each other in a circle become one as well: between stages there can be none.
    """
    _, dense = np.unique(np.asarray(label), return_inverse=True)
    merged = _circles([sorted({dense[w] for w in each}) for each in problem.successors], dense)
    cluster = merged[dense]
    count = int(cluster.max()) + 1 if len(cluster) else 0
    tensors: dict[tuple[int, tuple[int, ...]], float] = {}
    for tensor, node in enumerate(problem.producer.tolist()):
        source = int(cluster[node])
        readers = tuple(sorted({int(cluster[c]) for c in problem.consumers[tensor]} - {source}))
        if readers and problem.moved[tensor] > 0:  # two tensors with the same ends always cross together
            tensors[source, readers] = tensors.get((source, readers), 0.0) + float(problem.moved[tensor])
        elif readers:
            tensors.setdefault((source, readers), 0.0)
    keys = list(tensors)
    whole = Problem(
        np.bincount(cluster, problem.work, count).astype(float),
        np.bincount(cluster, problem.state, count).astype(float),
        np.bincount(cluster, problem.activation, count).astype(float),
        np.array([source for source, _ in keys], np.int64),
        np.array([tensors[key] for key in keys], float),
        tuple(readers for _, readers in keys),
    )
    first = np.full(count, len(cluster))
    np.minimum.at(first, cluster, np.arange(len(cluster)))
    ordered, place = renumber(whole, topological(whole.predecessors, whole.successors, first.tolist()))
    return ordered, place[cluster]


def renumber(problem: Problem, order: Sequence[int]) -> tuple[Problem, Ints]:
    """Return the problem with its nodes in ``order``, and the new number of each old node."""
    place = np.empty(problem.nodes, np.int64)
    place[list(order)] = np.arange(problem.nodes)
    ends = [
        (int(place[p]), tuple(sorted(int(place[c]) for c in readers)), float(moved))
        for p, readers, moved in zip(problem.producer.tolist(), problem.consumers, problem.moved, strict=True)
    ]
    ends.sort()
    index = list(order)
    return (
        Problem(
            problem.work[index],
            problem.state[index],
            problem.activation[index],
            np.array([p for p, _, _ in ends], np.int64),
            np.array([m for _, _, m in ends], float),
            tuple(readers for _, readers, _ in ends),
        ),
        place,
    )


def topological(before: list[list[int]], after: list[list[int]], rank: Sequence[int]) -> list[int]:
    """Return the nodes in an order in which they can run, the lowest rank first among those that can."""
    waits = [len(each) for each in before]
    heap = [(rank[node], node) for node, count in enumerate(waits) if count == 0]
    heapq.heapify(heap)
    order: list[int] = []
    while heap:
        _, node = heapq.heappop(heap)
        order.append(node)
        for each in after[node]:
            waits[each] -= 1
            if waits[each] == 0:
                heapq.heappush(heap, (rank[each], each))
    return order


def _canonical(problem: Problem) -> list[int]:
    # Weisfeiler and Lehman's refinement: a node is what it costs and what its neighbours are, a few steps around.
    # Nodes that it cannot tell apart look alike from everywhere near, and whichever comes first costs the same.
    # Colours are hashes of numbers, which are the same in every process.
    costs = zip(problem.work.tolist(), problem.state.tolist(), problem.activation.tolist(), strict=True)
    colour = [hash(each) for each in costs]
    producer, moved = problem.producer.tolist(), problem.moved.tolist()
    kinds = len(set(colour))
    for _ in range(min(64, max(8, 200_000 // max(problem.nodes, 1)))):
        of_tensor = [
            hash((colour[producer[t]], moved[t], *sorted([colour[c] for c in readers])))
            for t, readers in enumerate(problem.consumers)
        ]
        colour = [
            hash((own, len(read), *sorted([of_tensor[t] for t in read]), *sorted([of_tensor[t] for t in made])))
            for own, read, made in zip(colour, problem.read, problem.made, strict=True)
        ]
        before, kinds = kinds, len(set(colour))
        if kinds == before:
            break
    return topological(problem.predecessors, problem.successors, colour)


def _circles(after: Iterable[Sequence[int]], label: Ints) -> Ints:
    """Return the strongly connected component of every label (Tarjan 1972, without recursion)."""
    count = int(label.max()) + 1 if len(label) else 0
    edges: list[set[int]] = [set() for _ in range(count)]
    for own, others in zip(label.tolist(), after, strict=True):
        edges[own].update(int(each) for each in others if each != own)
    index, low, component = [-1] * count, [0] * count, [-1] * count
    stack: list[int] = []
    clock = found = 0
    for root in range(count):
        if index[root] >= 0:
            continue
        index[root] = low[root] = clock
        clock += 1
        stack.append(root)
        calls = [(root, iter(sorted(edges[root])))]
        while calls:
            node, rest = calls[-1]
            for each in rest:
                if index[each] < 0:
                    index[each] = low[each] = clock
                    clock += 1
                    stack.append(each)
                    calls.append((each, iter(sorted(edges[each]))))
                    break
                if component[each] < 0:
                    low[node] = min(low[node], index[each])
            else:
                calls.pop()
                if calls:
                    low[calls[-1][0]] = min(low[calls[-1][0]], low[node])
                if low[node] == index[node]:
                    while component[node] < 0:
                        component[stack.pop()] = found
                    found += 1
    return np.array(component, np.int64)
