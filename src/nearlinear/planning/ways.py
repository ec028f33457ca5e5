"""What is trained, the ways in which devices share the work, and what a way brings: the planner's values."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from nearlinear.core.cluster import Device
from nearlinear.core.graph import Graph
from nearlinear.core.plan import Plan
from nearlinear.errors import InputError
from nearlinear.planning.exchange import Network


@dataclass(frozen=True)
class Work:
    """What is trained.

    Args:
        graph: With the times of ``graph.samples`` samples on a device like ``reference``.
        batch: Samples per step, all devices together.
        grows: Whether ``batch`` is each device's share instead, so that more devices mean a larger batch.
        reference: The device that the graph's times were measured on; the cluster's first where it is ``None``.
        dtype: Of the matrix products, to compare devices by.
        launch: Seconds of a forward and backward pass that a smaller batch does not save.
        spread: Relative spread of the measured times, one sigma.
        algorithms: All-reduce algorithms that the runtime chooses among (``planning.collectives``).

    Raises:
        InputError: ``batch`` is below 1, or a time is negative.
    """

    graph: Graph
    batch: int
    grows: bool = False
    reference: Device | None = None
    dtype: str = "float32"
    launch: float = 0.0
    spread: float = 0.05
    algorithms: tuple[str, ...] = ("ring", "halving-doubling")

    def __post_init__(self) -> None:
        if self.batch < 1 or self.launch < 0 or self.spread < 0 or not self.graph.operators:
            raise InputError(
                f"{self.graph.name}: batch {self.batch}, launch {self.launch} s, spread {self.spread} and "
                f"{len(self.graph.operators)} operators are not something to train"
            )

    def samples(self, devices: int) -> int:
        """Return the samples of a step on ``devices`` devices."""
        return self.batch * devices if self.grows else self.batch

    @cached_property
    def forward(self) -> float:
        """Seconds of the forward pass of ``graph.samples`` samples."""
        return sum(each.forward for each in self.graph.operators)

    @cached_property
    def backward(self) -> float:
        """Seconds of their backward pass."""
        return sum(each.backward for each in self.graph.operators)

    @cached_property
    def update(self) -> float:
        """Seconds of the optimizer step."""
        return sum(each.update for each in self.graph.operators)

    @cached_property
    def state_bytes(self) -> float:
        """Bytes held between steps."""
        return sum(max(each.state_bytes, each.parameter_bytes) for each in self.graph.operators)

    @cached_property
    def activation_bytes(self) -> float:
        """Bytes kept for the backward pass of ``graph.samples`` samples."""
        return sum(each.activation_bytes for each in self.graph.operators)

    @cached_property
    def ready(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """When gradients are there, in seconds after the backward pass begins, and their bytes summed up to then."""
        last_first = self.graph.operators[::-1]
        when = np.cumsum([each.backward for each in last_first])
        return when, np.cumsum([each.parameter_bytes for each in last_first])

    def slowdown(self, device: Device) -> float:
        """Return how many times longer ``device`` takes than the one that the times are from."""
        if self.reference is None:
            return 1.0
        known = [dtype for dtype in (self.dtype, *sorted(device.flops)) if dtype in device.flops]
        dtype = next((dtype for dtype in known if dtype in self.reference.flops), None)
        return self.reference.flops[dtype] / device.flops[dtype] if dtype else 1.0

    def multiplying(self, device: Device) -> float:
        """Return the share of the passes that multiplies, 1 where FLOP are not known; the rest moves memory."""
        reference = self.reference or device
        if not self._flop or not self.graph.time or self.dtype not in reference.flops:
            return 1.0
        return min(1.0, self._flop / reference.flops[self.dtype] / self.graph.time)

    @cached_property
    def _flop(self) -> float:
        return (3.0 if self.graph.training else 1.0) * sum(each.flop for each in self.graph.operators)


@dataclass(frozen=True, slots=True)
class Group:
    """One stage of a way that has stages: its operators' sums, for ``Work.graph.samples`` samples.

    Args:
        replicas: Devices per copy of the pipeline.
        compute: Seconds on the device that the graph was measured on.
        leaving: Bytes that go on to the next stage.
        parameter_bytes: Of its parameters.
        state_bytes: Held at all times.
        activation_bytes: Kept per microbatch in flight.
        update: Seconds of the optimizer step.
        label: What is in it.
        operators: Positions of its operators in the graph.
        recomputed: Whether some of them make their activations again.
    """

    replicas: int
    compute: float
    leaving: float
    parameter_bytes: float
    state_bytes: float
    activation_bytes: float
    update: float = 0.0
    label: str = ""
    operators: tuple[int, ...] = ()
    recomputed: bool = False


@dataclass(frozen=True, slots=True)
class Way:
    """How devices share the work.

    Args:
        strategy: ``"data"``, ``"sharded"``, ``"pipeline"`` or ``"local"``.
        devices: The first so many of the cluster.
        groups: The stages, where there are any.
        copies: Copies of the whole pipeline.
        microbatches: Pieces that a device's (or a pipeline's) share of the batch is cut into.
        along: Whether a pipeline's devices are neighbours; otherwise those of a stage are.
        eager: Whether a pipeline runs all forward passes before the first backward pass, as under a plain loop.
        recompute: Whether all of its stages make their activations again, microbatch by microbatch.
    """

    strategy: str
    devices: int
    groups: tuple[Group, ...] = ()
    copies: int = 1
    microbatches: int = 1
    along: bool = True
    eager: bool = False
    recompute: bool = False

    def plan(self) -> Plan | None:
        """Return what ``distribute`` is to be asked for under a plain loop; ``None`` where it does not train this way.

        It does not where several devices share a stage, a part of a stage makes its activations again, or a batch is to
        be cut into pieces that the loop does not cut it into.

        Example:
            >>> Way("sharded", 4).plan().strategy, Way("data", 4, microbatches=2).plan()
            ('sharded', None)
        """
        if self.strategy == "local":
            return None  # its machines are not started together
        if self.strategy != "pipeline":
            return Plan(self.strategy) if self.microbatches == 1 else None
        alone = all(group.replicas == 1 and not group.recomputed for group in self.groups)
        if not (alone and self.eager and (self.along or self.copies == 1)):
            return None
        return Plan("pipeline", stages=len(self.groups), microbatches=self.microbatches, recompute=self.recompute)

    def __str__(self) -> str:
        if self.devices == 1:
            return "alone" + (f", {self.microbatches} microbatches" if self.microbatches > 1 else "")
        pieces = f", {self.microbatches} microbatches" if self.microbatches > 1 else ""
        if self.strategy != "pipeline":
            return self.strategy + pieces
        inside = [group.replicas for group in self.groups]
        stages = f"{len(inside)} stages" if max(inside) == 1 else f"stages of {'+'.join(map(str, inside))}"
        copies = f" x {self.copies}" if self.copies > 1 else ""
        again = ", recomputed" if self.recompute else ""
        layout = "" if self.along or self.copies * max(inside) == 1 else " across"
        return f"pipeline{layout}, {stages}{copies}{pieces}{', all forward first' if self.eager else ''}{again}"


@dataclass(frozen=True, slots=True)
class Candidate:
    """What a way brings.

    Args:
        way: The way.
        samples: Per step.
        seconds: Of a step; the sum of the four parts.
        low: It may be this fast.
        high: It may be this slow.
        memory: Bytes on the fullest device.
        fits: Whether every device has what it needs.
        compute: Seconds of forward and backward passes on the device that the others wait for.
        exposed: Seconds of communication that nothing hides.
        bubble: Seconds of waiting for other stages.
        update: Seconds of the optimizer step.
        every: Steps between two exchanges (local updates).
    """

    way: Way
    samples: int
    seconds: float
    low: float
    high: float
    memory: float
    fits: bool
    compute: float
    exposed: float
    bubble: float
    update: float
    every: int = 1

    @property
    def rate(self) -> float:
        """Samples per second."""
        return self.samples / self.seconds

    @property
    def exact(self) -> bool:
        """Whether it keeps the numbers of one process."""
        return self.way.strategy != "local"


def brought(
    way: Way,
    work: Work,
    network: Network,
    memory: float,
    compute: float,
    exposed: float,
    bubble: float,
    update: float,
    every: int = 1,
) -> Candidate:
    """Return the candidate whose step is the sum of the four parts, without a band."""
    took = compute + exposed + bubble + update
    fits = all(memory <= device.memory for device in network.kinds(network.all))
    samples = work.samples(way.devices)
    return Candidate(way, samples, took, took, took, memory, fits, compute, exposed, bubble, update, every)


def slowest(work: Work, network: Network, devices: tuple[int, ...]) -> float:
    """Return how many times longer the slowest of ``devices`` takes than the one that the times are from."""
    crowd = network.crowd

    def crowded(device: Device) -> float:
        part = work.multiplying(device)
        return part / crowd.compute + (1 - part) / crowd.memory

    return max(work.slowdown(device) * crowded(device) for device in network.kinds(devices))


def sized(graph: Graph, size: float) -> Graph:
    """Return the graph for microbatches ``size`` times as large."""
    operators = tuple(
        dataclasses.replace(
            each,
            forward=each.forward * size,
            backward=each.backward * size,
            activation_bytes=each.activation_bytes * size,
        )
        for each in graph.operators
    )
    tensors = tuple(dataclasses.replace(each, bytes=each.bytes * size) for each in graph.tensors)
    return dataclasses.replace(graph, operators=operators, tensors=tensors)
