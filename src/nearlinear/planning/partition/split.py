"""The public face: a graph and devices in, a plan with its proven bound out."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from nearlinear.core.graph import Graph
from nearlinear.errors import InputError
from nearlinear.planning.partition.bound import bound
from nearlinear.planning.partition.machines import Machines, fits, loads, machines, memory_used
from nearlinear.planning.partition.memory import least_memory, lightest
from nearlinear.planning.partition.problem import Ints, Problem, build
from nearlinear.planning.partition.search import Search
from nearlinear.units import seconds, size

ORDERS = 24  # of unlike devices that are tried at most


@dataclass(frozen=True)
class Partition:
    """Which device runs which operator.

    Args:
        assignment: The device of every operator of the graph.
        stages: The devices in the order in which a microbatch passes them; those that hold nothing are not among them.
        loads: Seconds per microbatch that each device is busy: computing, sending and receiving.
        memory: Bytes that each device holds.
        objective: The highest of ``loads``: seconds from one microbatch to the next in steady state.
        bound: Seconds below which no plan's objective can be, proven.
        method: How the plan was found.
    """

    assignment: tuple[int, ...]
    stages: tuple[int, ...]
    loads: tuple[float, ...]
    memory: tuple[float, ...]
    objective: float
    bound: float
    method: str

    @property
    def gap(self) -> float:
        """How much of the objective the bound leaves open: 0 is the proven optimum, 0.05 is at most 5 % above it."""
        return self.objective / self.bound - 1 if self.bound > 0 else 0.0 if self.objective == 0 else float("inf")

    def __str__(self) -> str:
        proof = "the least there is" if self.gap < 1e-6 else f"at most {100 * self.gap:.2g} % above the least"
        return f"{len(self.stages)} of {len(self.loads)} devices, {seconds(self.objective)} per microbatch ({proof})"


class InfeasibleError(InputError):
    """No plan fits the devices' memory; ``least_memory`` bytes on each would do, and less would not if ``proven``."""

    exit_code = 3

    def __init__(self, message: str, least_memory: float, proven: bool) -> None:
        super().__init__(message)
        self.least_memory = least_memory
        self.proven = proven


def partition(
    graph: Graph,
    devices: int | Sequence[float],
    bandwidth: float | Sequence[Sequence[float]] | npt.NDArray[np.float64],
    memory: float | Sequence[float] | None = None,
    *,
    in_flight: Sequence[float] | None = None,
    deadline: Callable[[], bool] | None = None,
    seed: int = 0,
    progress: Callable[[float, str], None] | None = None,
) -> Partition:
    """Return the split of a graph into stages, one per device, whose busiest device is least busy.

    Stages are contiguous: tensors go from earlier to later ones alone. A device is busy with what it computes, with
    every tensor that it makes and others read (sent once, on the slowest of those links), and with every tensor that it
    reads and others make (received once); in training each of these also comes back as its gradient. Operators of one
    group stay together. Fewer devices are used where that is better.

    Small graphs are solved exactly: every boundary a plan could have is listed, and the best chain of them taken.
    Larger ones are searched: orders in which little crosses, sliced and combined, then better boundaries near the best
    plan's.
    The same graph, devices and seed give the same plan, unless ``deadline`` cut the search short.

    Args:
        graph: The operators, per microbatch.
        devices: How many, or the speed of each as a multiple of the device that the graph's times are for.
        bandwidth: Bytes per second of every link, or of the link between each two devices, shape
            ``(devices, devices)``.
        memory: Bytes of each device, or one number for all; ``None`` for no limit.
        in_flight: Microbatches whose activations a stage holds that is followed by 0, 1, 2, ... other stages (1, 2, 3,
            ... under 1F1B), as many as there are devices; by default one everywhere.
        deadline: Whether to stop searching and return the best plan so far.
        seed: Of the search's random orders.
        progress: Told the best objective so far (``inf``: none) and what the search is at.

    Raises:
        InfeasibleError: No plan fits the memory, or none was found that does.
        InputError: The graph is empty, or a number is out of its range.

    Example:
        >>> from nearlinear.core.graph import Operator
        >>> chain = Graph(tuple(Operator(f"layer {n}", forward=1.0) for n in range(4)), training=False)
        >>> partition(chain, 2, 1e9).assignment
        (0, 0, 1, 1)
    """
    if not graph.operators:
        raise InputError(f"{graph.name} has no operators to split")
    idle = 0
    if isinstance(devices, int) and in_flight is None and np.ndim(bandwidth) == 0 and np.ndim(memory or 0.0) == 0:
        idle = max(devices - len(graph.operators), 0)  # those could hold nothing
        devices -= idle
    hosts = machines(devices, bandwidth, memory, in_flight)
    problem, of_operator = build(graph)
    late, say = deadline or _never, progress or _silent
    best: tuple[float, Ints, list[int]] | None = None
    low, proven, method = 0.0, hosts.one_link, ""
    orders, complete = _orders(hosts)
    for order in orders:
        ordered = hosts.reordered(order)
        search = Search(problem, ordered, seed, late, say)
        search.begin()
        if not search.found and not search.optimal:
            _fit(search, seed, late)
        if search.found and not search.optimal:
            known = float(loads(problem, ordered, search.stage).max())
            low = low or bound(problem, hosts, known, late)
            search.go_on(low)
        proven &= search.optimal
        if search.found:
            busiest = float(loads(problem, ordered, search.stage).max())
            if best is None or busiest < best[0] * (1 - 1e-12):
                best, method = (busiest, search.stage, order), search.method
    if best is None:
        raise _infeasible(graph, problem, hosts, seed, late)
    objective, stage, order = best
    used = np.unique(stage).tolist()
    if hosts.alike:
        stage, used, order = np.searchsorted(used, stage), list(range(len(used))), list(range(hosts.count))
    held = memory_used(problem, hosts.reordered(order), stage)
    device = np.asarray(order)[stage]
    busy = loads(problem, hosts, device)
    objective = float(busy.max())
    return Partition(
        assignment=tuple(device[of_operator].tolist()),
        stages=tuple(order[each] for each in used),
        loads=(*busy.tolist(), *[0.0] * idle),
        memory=(*held[np.argsort(order)].tolist(), *[0.0] * idle),
        objective=objective,
        bound=objective if proven and complete else min(low or bound(problem, hosts, objective, late), objective),
        method=method,
    )


def _never() -> bool:
    return False


def _silent(load: float, what: str) -> None:
    del load, what


def _orders(hosts: Machines) -> tuple[list[list[int]], bool]:
    """Return orders of the devices in which stages may pass them, and whether that is all that differ."""
    count = hosts.count
    if hosts.alike:
        return [list(range(count))], True
    kind = [(hosts.speed[each], hosts.memory[each]) for each in range(count)]
    if hosts.one_link:
        seen: dict[tuple[tuple[float, float], ...], list[int]] = {}
        for tried, order in enumerate(itertools.permutations(range(count))):
            seen.setdefault(tuple(kind[each] for each in order), list(order))
            if len(seen) > ORDERS or tried > 50_000:
                break
        else:
            return list(seen.values()), True
    by_speed = sorted(range(count), key=lambda each: kind[each])
    orders = [list(range(count)), list(range(count))[::-1], by_speed, by_speed[::-1]]
    orders.append(by_speed[::2] + by_speed[1::2][::-1])  # the fast ones amid the chain
    if not hosts.one_link:
        orders += [_nearest(hosts, first) for first in range(min(count, 4))]
    unlike = {tuple(order): order for order in orders}
    return list(unlike.values()), False


def _nearest(hosts: Machines, first: int) -> list[int]:
    order = [first]
    while len(order) < hosts.count:
        left = [each for each in range(hosts.count) if each not in order]
        order.append(min(left, key=lambda each: (hosts.per_byte[order[-1], each], each)))
    return order


def _fit(search: Search, seed: int, late: Callable[[], bool]) -> None:
    """Start from the plan that fills the fullest device least, if it fits."""
    stage, _ = lightest(search.whole, search.machines, seed, late)
    if fits(search.whole, search.machines, stage):
        search.start_from(float(loads(search.whole, search.machines, stage).max()), stage, "the lightest plan")


def _infeasible(
    graph: Graph, problem: Problem, hosts: Machines, seed: int, late: Callable[[], bool]
) -> InfeasibleError:
    least, proven = least_memory(problem, hosts, seed, late)
    has, needs = size(float(hosts.memory.max())), f"{size(least)} ({math.ceil(least):,} bytes)"
    would = f"at least {needs} each is needed" if proven else f"the best plan found needs {needs} each"
    return InfeasibleError(
        f"{graph.name} does not fit {hosts.count} devices of {has}: {would}; give more memory or more devices",
        least,
        proven,
    )
