"""Turning a published run and its layer profiles into a forecast of its iteration time and peak memory.

What the runs were, from the records and from the source of DeepSpeed's pipeline engine, which they used:

- fp32, Adam, 1F1B; GPUs of a node share the tensors of a stage (tensor parallel), so that a stage's replica is one
  device here. A layer's profile already contains its tensor-parallel messages.
- Activations and gradients pass from stage to stage by blocking messages (planning.simulate, ``blocking=True``).
- Gradients are combined after the backward passes, in one bucket; nothing is overlapped.
- Memory is what nvidia-smi showed: contexts and communicators included.

The links are the published curves: bandwidth in GB/s as a polynomial of log2(megabytes), measured with 1, 2, 4 or 8
GPUs per node at once. An all-reduce takes the curve of all of a node's GPUs, each having a part of the gradients. A
message between stages takes the curve of one GPU: with the curve of all, the forecast of every pipeline is too fast,
the more so the more boundaries it has.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nearlinear.core.cluster import Cluster, Device, Island, Link
from nearlinear.core.schedule import one_f_one_b
from nearlinear.errors import InputError
from nearlinear.planning.memory import Overhead, StageMemory, stage_memory
from nearlinear.planning.simulate import Bucket, Work, simulate

MIXED = "mixed GPUs"
_FAST = Link(0.0, 1e12)
# Fitted on the 15 published runs of OPT-350M on GH200 nodes in measured_open.json (main.py prints the fit, and the
# errors when a run is left out of it); tested on the other groups.
RUNTIME = Overhead(allocator_share=0.114, gradient_copies=1.0, runtime_bytes=4.28e9, source="15 runs of OPT-350M")


@dataclass(frozen=True, slots=True)
class Run:
    """A published run as the forecast sees it.

    Args:
        name: Its id.
        group: The model, or ``MIXED`` where the GPUs differ.
        microbatches: Per replica.
        work: ``work[replica][stage]``.
        memory: Sizes of every stage's first replica, as arguments of ``stage_memory``.
        hosts: The node of every stage, ``hosts[replica][stage]``; replicas in one node share its network.
        messages: The link between a stage and the next, ``messages[replica][stage]``, by the curve of one GPU.
        messages_of_all: The same by the curve of all GPUs of the node.
        curves: The links of a stage's nodes with all their GPUs.
    """

    name: str
    group: str
    microbatches: int
    work: tuple[tuple[Work, ...], ...]
    memory: tuple[dict[str, Any], ...]
    hosts: tuple[tuple[str, ...], ...]
    messages: tuple[tuple[Link, ...], ...]
    messages_of_all: tuple[tuple[Link, ...], ...]
    curves: tuple[tuple[Curve, ...], ...]


@dataclass(frozen=True, slots=True)
class Curve:
    """A published link: GB/s as a polynomial of log2(MB), at most ``peak`` bytes per second."""

    coefficients: tuple[float, ...]
    peak: float

    def rate(self, message_bytes: float) -> float:
        """Return bytes per second for messages of a size."""
        place = math.log2(max(message_bytes, 1.0) / 1e6)
        a, b, _ = self.coefficients
        if a < 0 and place > -b / (2 * a):
            return self.peak  # beyond its top the parabola says nothing
        value = 1e9 * sum(c * place**power for power, c in enumerate(reversed(self.coefficients)))
        return min(max(value, 1e-3 * self.peak), self.peak)


def read(raw: Mapping[str, Any], profiles: Mapping[str, Any]) -> Run:
    """Return a run of a runs file with its profiles.

    Raises:
        InputError: A profile or link curve is missing.
    """
    stages, batch = raw["stages"], raw["micro_batch"]
    replicas = max(len(stage["replicas"]) for stage in stages)
    microbatches = raw["global_batch"] // (batch * replicas)
    kinds = {node["gpu"] for stage in stages for node in stage["replicas"]}
    sizes = profiles["layers"][raw["model"]]
    gpus = sum(node["tp"] for stage in stages for node in stage["replicas"])
    inside = len(kinds) == 1 and gpus <= stages[0]["replicas"][0]["gpus_per_node"]

    def node_of(stage: int, replica: int) -> Mapping[str, Any]:
        nodes: Sequence[Mapping[str, Any]] = stages[stage]["replicas"]
        return nodes[replica * len(nodes) // replicas]

    def work_of(stage: int, replica: int) -> Work:
        node, layers = node_of(stage, replica), stages[stage]["layers"]
        times = _times(raw["model"], node, batch, profiles)
        # A stage with fewer replicas than others serves several pipelines.
        load = replicas / len(stages[stage]["replicas"])
        own = [sizes[str(node["tp"])][str(layer)] for layer in layers]
        return Work(
            forward=load * sum(times[str(layer)][0] for layer in layers),
            backward=load * sum(times[str(layer)][1] for layer in layers),
            update=sum(times[str(layer)][2] for layer in layers),
            output_bytes=batch * own[-1]["act_output_bytes"],
            buckets=(Bucket(node["tp"] * sum(layer["params_bytes"] for layer in own)),) if replicas > 1 else (),
        )

    def host_of(stage: int, replica: int) -> str:
        node, nodes = node_of(stage, replica), stages[stage]["replicas"]
        alike = [each for each in nodes[: replica * len(nodes) // replicas] if each["gpu"] == node["gpu"]]
        return f"stage {stage}, {node['gpu']} {len(alike) // max(node['gpus_per_node'] // node['tp'], 1)}"

    def in_one_node(stage: int) -> bool:
        return len({host_of(stage, replica) for replica in range(replicas)}) == 1

    def link(stage: int, replica: int, all_gpus: bool) -> Link:
        ends = [node_of(stage, replica), node_of(stage + 1, replica)]
        fewest = 2 if inside else 1
        curves = [_curve(profiles, end, inside, end["gpus_per_node"] if all_gpus else fewest) for end in ends]
        return Link(0.0, min(curve.rate(work[replica][stage].output_bytes) for curve in curves))

    def links(all_gpus: bool) -> tuple[tuple[Link, ...], ...]:
        return tuple(tuple(link(s, r, all_gpus) for s in range(len(stages) - 1)) for r in range(replicas))

    work = tuple(tuple(work_of(stage, replica) for stage in range(len(stages))) for replica in range(replicas))
    return Run(
        name=raw["id"],
        group=MIXED if len(kinds) > 1 else raw["model"],
        microbatches=microbatches,
        work=work,
        memory=tuple(_sizes(stage["layers"], sizes[str(stage["replicas"][0]["tp"])], batch) for stage in stages),
        hosts=tuple(tuple(host_of(stage, replica) for stage in range(len(stages))) for replica in range(replicas)),
        messages=links(all_gpus=False),
        messages_of_all=links(all_gpus=True),
        curves=tuple(
            tuple(
                _curve(profiles, node, inside or in_one_node(number), node["gpus_per_node"])
                for node in stage["replicas"]
            )
            for number, stage in enumerate(stages)
        ),
    )


def iteration_time(run: Run, *, blocking: bool = True, all_gpus: bool = False) -> float:
    """Return the seconds of one iteration by simulation.

    Args:
        run: The run.
        blocking: Whether messages between stages hold up both ends.
        all_gpus: Whether those messages take the curve of all GPUs of a node.
    """
    stages = len(run.work[0])
    devices = tuple(Device("GPUs", 1.0, {"float32": 1.0}, 1.0, host) for row in run.hosts for host in row)
    cluster = Cluster(
        devices=devices,
        islands=tuple(Island((place,), _FAST) for place in range(len(devices))),
        between=_FAST,
        pairs=tuple(
            (replica * stages + stage, replica * stages + stage + 1, link)
            for replica, row in enumerate(run.messages_of_all if all_gpus else run.messages)
            for stage, link in enumerate(row)
        ),
    )
    step = simulate(
        one_f_one_b(stages, run.microbatches),
        run.work,
        cluster,
        blocking=blocking,
        all_reduce=lambda size, devices: all_reduce_time(run, devices[0] % stages, size),
    )
    return step.seconds


def plain_time(run: Run) -> float:
    """Return the formula that needs no simulation: (m + stages - 1) x the slowest stage + all-reduce + update."""
    everything = [work for row in run.work for work in row]
    slowest = max(work.forward + work.backward for work in everything)
    reduce = max(
        (all_reduce_time(run, s, w.buckets[0].bytes) for s, w in enumerate(run.work[0]) if w.buckets), default=0
    )
    update = max(work.update for work in everything)
    return (run.microbatches + len(run.work[0]) - 1) * slowest + reduce + update


def all_reduce_time(run: Run, stage: int, size: float) -> float:
    """Return the seconds of a ring over the replicas of a stage, at the rate of the slowest node's GPUs together."""
    members = len(run.work)
    rate = min(curve.rate(size / members) for curve in run.curves[stage])
    return 2 * (members - 1) / members * size / rate


def peak_memory(run: Run, overhead: Overhead = RUNTIME) -> float:
    """Return the bytes of the fullest GPU."""
    return max(memory.total for memory in memories(run, overhead))


def memories(run: Run, overhead: Overhead) -> list[StageMemory]:
    """Return the memory of one GPU of every stage."""
    schedule = one_f_one_b(len(run.memory), run.microbatches)
    return [
        stage_memory(**sizes, in_flight=schedule.in_flight(stage), overhead=overhead)
        for stage, sizes in enumerate(run.memory)
    ]


def _sizes(layers: Sequence[int], sizes: Mapping[str, Any], batch: int) -> dict[str, Any]:
    own = [sizes[str(layer)] for layer in layers]
    return {
        "parameter_bytes": sum(layer["params_bytes"] for layer in own),
        "activation_bytes": batch * sum(layer["act_mem_bytes"] for layer in own),
        "largest_output_bytes": batch * max(layer["act_output_bytes"] for layer in own),
    }


def _times(
    model: str, node: Mapping[str, Any], batch: int, profiles: Mapping[str, Any]
) -> Mapping[str, Sequence[float]]:
    try:
        times: Mapping[str, Sequence[float]] = profiles["profiles"][model][node["gpu"]][str(batch)][str(node["tp"])]
    except KeyError as error:
        raise InputError(
            f"no profile of {model} on {node['gpu']} with microbatches of {batch} and {node['tp']} GPUs"
        ) from error
    return times


def _curve(profiles: Mapping[str, Any], node: Mapping[str, Any], inside: bool, gpus: int) -> Curve:
    network = profiles["network"]["intra" if inside else "inter"].get(node["gpu"], {})
    fitting = [int(count) for count in network if int(count) <= gpus]
    if not fitting:
        raise InputError(f"no link curve for {gpus} GPUs of {node['gpu']}")
    coefficients, peak = network[str(max(fitting))]
    return Curve(tuple(coefficients), peak)
