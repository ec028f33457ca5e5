"""The devices that stages go to, and what a plan costs each of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from nearlinear.errors import InputError
from nearlinear.planning.partition.problem import Floats, Ints, Problem


@dataclass(frozen=True, eq=False)
class Machines:
    """Devices and the links between them.

    Args:
        speed: Of each device, as a multiple of the one that the graph's times are for, shape ``(devices,)``.
        memory: Bytes of each device, ``inf`` where there is no limit, shape ``(devices,)``.
        per_byte: Seconds per byte between two devices, shape ``(devices, devices)``.
        in_flight: Microbatches whose activations the stage holds that is followed by 0, 1, 2, ... others, shape
            ``(devices,)``.
    """

    speed: Floats
    memory: Floats
    per_byte: Floats
    in_flight: Floats

    @property
    def count(self) -> int:
        """How many devices there are."""
        return len(self.speed)

    @cached_property
    def one_link(self) -> bool:
        """Whether all links are alike."""
        return self.count < 3 or len(np.unique(self.per_byte[~np.eye(self.count, dtype=bool)])) == 1

    @cached_property
    def alike(self) -> bool:
        """Whether it makes no difference which device a stage is on."""
        return self.one_link and len(np.unique(self.speed)) == 1 and len(np.unique(self.memory)) == 1

    @cached_property
    def second_per_byte(self) -> float:
        """Seconds per byte of the fastest link: 0 for one device."""
        return float(self.per_byte[~np.eye(self.count, dtype=bool)].min()) if self.count > 1 else 0.0

    def reordered(self, order: Sequence[int]) -> Machines:
        """Return the machines with their devices in another order."""
        index = list(order)
        return Machines(self.speed[index], self.memory[index], self.per_byte[np.ix_(index, index)], self.in_flight)


def machines(
    devices: int | Sequence[float],
    bandwidth: float | Sequence[Sequence[float]] | npt.NDArray[np.float64],
    memory: float | Sequence[float] | None,
    in_flight: Sequence[float] | None,
) -> Machines:
    """Return the machines that these numbers describe.

    Raises:
        InputError: A number is not above 0, or a sequence has another length than there are devices.
    """
    speed = np.ones(devices) if isinstance(devices, int) else np.asarray(devices, float)
    count = len(speed)
    if count < 1:
        raise InputError(f"there are {devices} devices; at least one is needed")
    links = np.asarray(bandwidth, float)
    links = np.full((count, count), float(links)) if links.ndim == 0 else links.copy()
    if links.shape != (count, count):
        raise InputError(f"bandwidth has shape {links.shape}; {count} devices need one number or {count} x {count}")
    np.fill_diagonal(links, np.inf)
    limit = np.full(count, np.inf) if memory is None else np.asarray(memory, float)
    limit = np.full(count, float(limit)) if limit.ndim == 0 else limit
    flight = np.ones(count) if in_flight is None else np.asarray(in_flight, float)
    for what, values in (("memory", limit), ("in_flight", flight)):
        if values.shape != (count,):
            raise InputError(f"{what} has {values.size} entries; there are {count} devices")
    for what, values in (("speed", speed), ("bandwidth", links), ("memory", limit)):
        if not (values > 0).all():
            raise InputError(f"{what} is {values[~(values > 0)].flat[0]}; it must be above 0")
    if not (flight >= 0).all():
        raise InputError(f"in_flight is {flight[~(flight >= 0)][0]}; it must be 0 or more")
    with np.errstate(divide="ignore"):
        return Machines(speed, limit, 1.0 / links, flight)


def loads(problem: Problem, machines: Machines, device: Ints) -> Floats:
    """Return the seconds per microbatch that each device is busy, shape ``(devices,)``.

    A device computes its nodes, sends every tensor it makes that another reads, once and at the pace of the slowest of
    those links, and receives every tensor it reads that another made, once.

    Args:
        problem: The nodes and tensors.
        machines: The devices.
        device: The device of each node, shape ``(nodes,)``.
    """
    count = machines.count
    total = np.bincount(device, problem.work, count) / machines.speed
    tensor, consumer = problem.edges
    if len(tensor) == 0:
        return total
    source, target = device[problem.producer[tensor]], device[consumer]
    crossing = np.unique((tensor * count + target)[source != target])
    tensor, target = np.divmod(crossing, count)
    source = device[problem.producer[tensor]]
    cost = problem.moved[tensor] * machines.per_byte[source, target]
    sent = np.zeros(len(problem.producer))
    np.maximum.at(sent, tensor, cost)
    total += np.bincount(target, cost, count)
    total += np.bincount(device[problem.producer], sent, count)
    return total


def memory_used(problem: Problem, machines: Machines, stage: Ints) -> Floats:
    """Return the bytes that each stage's device holds, shape ``(devices,)``.

    Args:
        problem: The nodes and tensors.
        machines: The devices, in the order of their stages.
        stage: The stage of each node, shape ``(nodes,)``; stages that hold nothing do not count as following others.
    """
    used = np.unique(stage)
    following = np.zeros(machines.count, np.int64)
    following[used] = len(used) - 1 - np.arange(len(used))
    activation = np.bincount(stage, problem.activation, machines.count) * machines.in_flight[following]
    return np.bincount(stage, problem.state, machines.count) + activation


def fits(problem: Problem, machines: Machines, stage: Ints) -> bool:
    """Return whether every stage's device, taken in order, has the memory for it."""
    return bool((memory_used(problem, machines, stage) <= machines.memory * (1 + 1e-12)).all())
