"""Shrinking a problem without losing its best plan: nodes that no better plan would part become one."""

from __future__ import annotations

import numpy as np

from nearlinear.planning.partition.machines import Machines
from nearlinear.planning.partition.problem import Ints, Problem, contract


def coarsen(problem: Problem, machines: Machines, below: float) -> tuple[Problem, Ints] | None:
    """Return a smaller problem that still holds a plan whose maximum load is lower than ``below``, if there is any.

    Nodes are joined where

    1. parting them alone would load a device with ``below`` or more (forced), or
    2. moving one of them to the other's stage makes no device busier, whatever the rest of the plan (free).

    Args:
        problem: The nodes and tensors.
        machines: The devices.
        below: Seconds; only plans with a lower maximum load count.

    Returns:
        The smaller problem and the new node of each old one; ``None`` where some device must be busy for ``below`` or
        longer in every plan.
    """
    whole = np.arange(problem.nodes)
    limit = below * (1 - 1e-12)
    while True:
        need = _Need(problem, machines)
        if need.most() >= limit:
            return None
        label = _forced(problem, need, limit)
        if machines.one_link:
            _free(problem, machines, label)
        roots = [_root(label, node) for node in range(problem.nodes)]
        if all(root == node for node, root in enumerate(roots)):
            return problem, whole
        problem, place = contract(problem, roots)
        whole = place[whole]


class _Need:
    """Seconds that each node costs its device at least: its own work, what it reads, and what it makes.

    Whoever makes what a node reads is either on the same device, which then does that work too, or sends it. What a
    node makes is sent, or all its readers are on the same device.
    """

    def __init__(self, problem: Problem, machines: Machines) -> None:
        work: list[float] = (problem.work / machines.speed.max()).tolist()
        self.moved: list[float] = (problem.moved * machines.second_per_byte).tolist()
        producer = problem.producer.tolist()
        self.work = work
        self.received: list[dict[int, float]] = [{} for _ in work]  # from each maker, if it is elsewhere
        self.reading, self.making = [0.0] * len(work), [0.0] * len(work)
        for node in range(problem.nodes):
            received = self.received[node]
            for tensor in problem.read[node]:
                maker = producer[tensor]
                received[maker] = received.get(maker, 0.0) + self.moved[tensor]
            self.reading[node] = sum(min(seconds, work[maker]) for maker, seconds in received.items())
            for tensor in problem.made[node]:
                kept = sum(work[reader] for reader in problem.consumers[tensor])
                self.making[node] = max(self.making[node], min(self.moved[tensor], kept))

    def most(self) -> float:
        """Return what the most demanding node costs."""
        return max(map(sum, zip(self.work, self.reading, self.making, strict=True)), default=0.0)

    def if_sent(self, maker: int, tensor: int) -> float:
        """Return what ``maker`` costs its device if another reads ``tensor``."""
        return self.work[maker] + self.reading[maker] + self.moved[tensor]

    def if_received(self, reader: int, maker: int) -> float:
        """Return what ``reader`` costs its device if ``maker`` is on another."""
        received = self.received[reader][maker]
        return (
            self.work[reader] + self.making[reader] + self.reading[reader] + received - min(received, self.work[maker])
        )


def _forced(problem: Problem, need: _Need, limit: float) -> list[int]:
    label = list(range(problem.nodes))
    for tensor, maker in enumerate(problem.producer.tolist()):
        sent = need.if_sent(maker, tensor) >= limit
        for each in problem.consumers[tensor]:
            if sent or need.if_received(each, maker) >= limit:
                _join(label, maker, each)
    return label


def _free(problem: Problem, machines: Machines, label: list[int]) -> None:
    slowest = machines.speed.min()
    moved = (problem.moved * machines.second_per_byte).tolist()
    tied = (problem.state > 0) | (problem.activation > 0) if np.isfinite(machines.memory).any() else None
    taken = [False] * problem.nodes  # a pair at a time: joining alters what the rule would say of its neighbours

    for node in range(problem.nodes):
        if taken[node] or (tied is not None and tied[node]):
            continue
        work = float(problem.work[node] / slowest)
        reads, makes = problem.read[node], problem.made[node]
        read, made = sum(moved[t] for t in reads), sum(moved[t] for t in makes)
        after, before = problem.successors[node], problem.predecessors[node]
        if len(after) == 1 and work + read <= made:
            other = after[0]  # its only reader takes it in: less arrives there, and less leaves here
        elif len(before) == 1 and work + made <= read and all(len(problem.consumers[t]) == 1 for t in reads):
            other = before[0]  # the maker of all that it alone reads keeps it
        else:
            continue
        if not taken[other]:
            taken[node] = taken[other] = True
            _join(label, node, other)


def _root(label: list[int], node: int) -> int:
    while label[node] != node:
        label[node] = label[label[node]]
        node = label[node]
    return node


def _join(label: list[int], one: int, other: int) -> None:
    one, other = _root(label, one), _root(label, other)
    label[max(one, other)] = min(one, other)
