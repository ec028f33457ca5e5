"""Whether a graph fits the devices' memory at all, and how much would do."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np

from nearlinear.planning.partition.machines import Machines, memory_used
from nearlinear.planning.partition.problem import Ints, Problem
from nearlinear.planning.partition.search import Search


def lightest(problem: Problem, machines: Machines, seed: int, late: Callable[[], bool]) -> tuple[Ints, bool]:
    """Return the stages of a plan whose fullest device is least full, and whether none is less full for certain.

    It is the same search with bytes in place of seconds, a device's memory in place of its speed, and links that cost
    nothing. Where a stage's bytes depend on how many others follow it, the average stands for them.
    """
    flights = np.unique(machines.in_flight)
    held = problem.state + flights.mean() * problem.activation
    bytes_alone = dataclasses.replace(
        problem, work=held, state=held * 0, activation=held * 0, moved=np.zeros(len(problem.moved))
    )
    fit = np.where(np.isfinite(machines.memory), machines.memory, max(float(held.sum()), 1.0))
    hosts = Machines(fit, np.full(machines.count, np.inf), machines.per_byte * 0.0, np.ones(machines.count))
    search = Search(bytes_alone, hosts, seed, late)
    search.run()
    return search.stage, search.optimal and (len(flights) == 1 or not problem.activation.any())


def least_memory(problem: Problem, machines: Machines, seed: int, late: Callable[[], bool]) -> tuple[float, bool]:
    """Return bytes that would do if each device had them, and whether no fewer would."""
    one_size = dataclasses.replace(machines, memory=np.full(machines.count, np.inf))
    stage, proven = lightest(problem, one_size, seed, late)
    return float(memory_used(problem, one_size, stage).max()), proven
