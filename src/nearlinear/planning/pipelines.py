"""Turning work and a cluster into the pipelines that are worth a prediction: stages, copies, microbatches, layouts."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

from nearlinear.core.cluster import Cluster
from nearlinear.planning.exchange import links
from nearlinear.planning.layers import Layers, layers_of
from nearlinear.planning.partition import InfeasibleError, partition
from nearlinear.planning.replicas import Replicas, Stage
from nearlinear.planning.ways import Group, Way, Work, sized

LARGEST = 32
"""Devices of one copy of a pipeline at most; more devices are more copies."""

_BLOCKS = 32
_PIECES = (1, 2, 4, 8)  # microbatches per stage
_MANY = 1 << 20  # microbatches in Piper's formula: what the copies exchange is counted elsewhere


class Pipelines:
    """The pipelines of ``work`` on the first devices of ``cluster``; searches for stages once for all numbers.

    Args:
        work: What is trained.
        cluster: On what.
        variants: Whether a pipeline may have several copies, or make its activations again.
    """

    def __init__(self, work: Work, cluster: Cluster, *, variants: bool = True) -> None:
        self.work, self.cluster, self._variants = work, cluster, variants
        inside = [len(island.devices) for island in cluster.islands]
        # Which devices are neighbours matters where some are nearer to each other than others.
        self._layouts = (True, False) if len(inside) > 1 and (max(inside) > 1 or cluster.pairs) else (True,)
        self._searched: dict[float, tuple[Layers, list[Replicas]]] = {}
        self._found: dict[tuple[float, int], list[tuple[Group, ...]]] = {}

    def ways(self, devices: int) -> list[Way]:
        """Return the pipelines for ``devices`` devices."""
        found = []
        for per_copy in range(2, min(devices, LARGEST) + 1):
            copies = devices // per_copy
            share = self.work.samples(devices) // copies
            if devices % per_copy or not share or (copies > 1 and not self._variants):
                continue
            for groups in self._stages(per_copy, share / per_copy):
                widest = max(group.replicas for group in groups)
                layouts = self._layouts if copies * widest > 1 else (True,)
                for count in sorted({min(len(groups) * widest * factor, share) for factor in _PIECES}):
                    found += [
                        Way("pipeline", devices, groups, copies, count, along, eager, again)
                        for along in layouts
                        for eager, again in ((False, False), (True, False), (True, True))
                        if not again or (self._variants and self._tight(share / per_copy))
                    ]
        return found

    def refined(self, way: Way, deadline: Callable[[], bool]) -> Way | None:
        """Return a pipeline like ``way`` with stages cut by the search over the whole graph, operator by operator.

        Args:
            way: A pipeline with one device per stage and copy.
            deadline: Whether to stop searching.

        Returns:
            The pipeline, or ``None`` where the search does not apply (several devices per stage, unlike devices) or
            finds nothing that fits.
        """
        stages = len(way.groups)
        devices = self.cluster.devices[: way.devices]
        alike = len({(device.memory, self.work.slowdown(device)) for device in devices}) == 1
        if stages < 2 or any(group.replicas > 1 for group in way.groups) or not alike:
            return None
        micro = math.ceil(self.work.samples(way.devices) / way.copies) / way.microbatches
        graph = sized(self.work.graph, micro / self.work.graph.samples)
        flight = [way.microbatches if way.eager else min(after + 1, way.microbatches) for after in range(stages)]
        pace = min((link.bandwidth for link in links(self.cluster)), default=math.inf)
        try:
            found = partition(graph, stages, pace, devices[0].memory, in_flight=flight, deadline=deadline)
        except InfeasibleError:
            return None
        if len(found.stages) < stages:
            return None
        place = {device: number for number, device in enumerate(found.stages)}
        home = [place[device] for device in found.assignment]
        return dataclasses.replace(way, groups=self._cut(home))

    def _cut(self, home: Sequence[int]) -> tuple[Group, ...]:
        """Return the stages in which operator ``i`` lies in stage ``home[i]``."""
        costs = [[0.0] * 6 for _ in range(max(home) + 1)]
        inside: list[list[int]] = [[] for _ in costs]
        for number, (stage, each) in enumerate(zip(home, self.work.graph.operators, strict=True)):
            state = max(each.state_bytes, each.parameter_bytes)
            own = (each.forward + each.backward, 0.0, each.parameter_bytes, state, each.activation_bytes, each.update)
            costs[stage] = [one + other for one, other in zip(costs[stage], own, strict=True)]
            inside[stage].append(number)
        for tensor in self.work.graph.tensors:
            for stage in range(home[tensor.producer], max((home[each] for each in tensor.consumers), default=0)):
                costs[stage][1] += tensor.bytes
        ends = [[self.work.graph.operators[each].name for each in (own[0], own[-1])] for own in inside]
        return tuple(
            Group(1, compute, leaving, parameters, state, kept, update, f"{first} ... {last}", tuple(own))
            for (compute, leaving, parameters, state, kept, update), (first, last), own in zip(
                costs, ends, inside, strict=True
            )
        )

    def _stages(self, per_copy: int, share: float) -> list[tuple[Group, ...]]:
        """Return stages for ``per_copy`` devices that have ``share`` samples each: one device each, and several."""
        largest = max(share, 1.0) / self.work.graph.samples
        memory = min(device.memory for device in self.cluster.devices)
        # Where memory is no matter one search does for all sizes of microbatches; else another is for the smallest.
        found = self._cuts(per_copy, 0.0, math.inf)
        if self._tight(share):
            size = 4.0 ** math.floor(math.log2(largest / _PIECES[-1]) / 2)
            found = sorted({*found, *self._cuts(per_copy, size, memory)}, key=len)
        return found

    def _tight(self, share: float) -> bool:
        """Whether memory may decide how the stages are cut."""
        kept = self.work.activation_bytes * max(share, 1.0) / self.work.graph.samples
        return self.work.state_bytes + kept * LARGEST > min(device.memory for device in self.cluster.devices)

    def _cuts(self, per_copy: int, size: float, memory: float) -> list[tuple[Group, ...]]:
        """Return stages for microbatches ``size`` times the graph's (0: any) on devices with so much memory."""
        if (size, per_copy) not in self._found:
            if size not in self._searched:
                self._searched[size] = self._search(size or 1.0, memory)
            layers, tables = self._searched[size]
            plans = [table.stages(per_copy) for table in tables]
            found = {self._grouped(each, layers, size or 1.0) for each in plans if each is not None and len(each) > 1}
            self._found[size, per_copy] = sorted(
                (groups for groups in found if sum(group.replicas for group in groups) == per_copy), key=len
            )
        return self._found[size, per_copy]

    def _search(self, size: float, memory: float) -> tuple[Layers, list[Replicas]]:
        """Return searches for stages of one device each, and of as many each as Piper's recurrence gives.

        Args:
            size: Of the microbatches, over the graph's.
            memory: Bytes of a device.
        """
        most = min(len(self.cluster.devices), LARGEST)
        layers = layers_of(sized(self.work.graph, size), _BLOCKS)
        pace = min((link.bandwidth for link in links(self.cluster)), default=math.inf)
        # Where transfers hide behind computing, stages of equal computing are best, however slow the links.
        return layers, [
            Replicas(layers, most, memory, speed, _MANY, replicas)
            for speed in (pace, math.inf)
            for replicas in ((1,), None)
        ]

    def _grouped(self, stages: Sequence[Stage], layers: Layers, size: float) -> tuple[Group, ...]:
        """Return the sums of every stage, and the bytes that leave it, those passed through from earlier ones too."""
        home = {layer: number for number, stage in enumerate(stages) for layer in stage.layers}
        leaving = [0.0] * len(stages)
        for each in layers.crossings:
            for number in range(home[each.producer], max(home[consumer] for consumer in each.consumers)):
                leaving[number] += each.bytes / size
        whole = self.work.graph.parameter_bytes
        groups = []
        for number, stage in enumerate(stages):
            compute = state = kept = parameters = 0.0
            for layer in stage.layers:
                plain = layers.layers[layer].variants[1]
                costs = plain.recomputed if layer in stage.recomputed and plain.recomputed is not None else plain
                parameters += plain.parameter_bytes
                compute, state, kept = (
                    compute + costs.seconds / size,
                    state + costs.fixed_bytes,
                    kept + costs.activation_bytes / size,
                )
            update = self.work.update * parameters / whole if whole else 0.0
            first, last = layers.layers[stage.layers[0]].name, layers.layers[stage.layers[-1]].name
            label = first if first == last else f"{first.split(' ... ')[0]} ... {last.split(' ... ')[-1]}"
            inside = tuple(each for layer in stage.layers for each in layers.layers[layer].operators)
            sums = (stage.replicas, compute, leaving[number], parameters, state, kept, update)
            groups.append(Group(*sums, label, inside, bool(stage.recomputed)))
        return tuple(groups)
