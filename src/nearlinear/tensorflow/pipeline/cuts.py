"""Deciding where a Keras model is cut: its graph with measured times in, the stage of each step out."""

from __future__ import annotations

import dataclasses
import time

import numpy as np

from nearlinear.core.graph import Graph
from nearlinear.errors import InputError
from nearlinear.planning.partition import Partition, partition
from nearlinear.runtime.mesh import Mesh

_BYTES = 1 << 22
_ROUNDS = 3


def stages_of(graph: Graph, stages: int, bandwidth: float) -> list[int]:
    """Return the stage of each operator; no stage is without one.

    Args:
        graph: The model with times.
        stages: How many there are to be.
        bandwidth: Between two ranks, bytes per second.

    Raises:
        InputError: The operators that must stay together are fewer groups than stages.
    """
    found = _stages(partition(graph, stages, bandwidth))
    if 1 + max(found) < stages:  # the script asked for so many, whatever the links would advise
        free = tuple(dataclasses.replace(each, bytes=0.0) for each in graph.tensors)
        found = _stages(partition(dataclasses.replace(graph, tensors=free), stages, 1e15))
    while 1 + max(found) < stages:  # where one operator takes as long as all others, more stages make it no shorter
        found = _with_one_more(found, graph)
    return found


def _stages(found: Partition) -> list[int]:
    place = {device: position for position, device in enumerate(found.stages)}
    return [place[device] for device in found.assignment]


def _with_one_more(stage_of: list[int], graph: Graph) -> list[int]:
    """Return the stages with one of them in two: the split that leaves the longer part shortest."""
    best: tuple[float, int, int] | None = None
    times = [each.forward + each.backward for each in graph.operators]
    groups = [each.group for each in graph.operators]
    for stage in range(1 + max(stage_of)):
        own = [number for number, each in enumerate(stage_of) if each == stage]
        for cut in range(1, len(own)):
            before, behind = own[:cut], own[cut:]
            if {groups[each] for each in before} & {groups[each] for each in behind} - {None}:
                continue
            longer = max(sum(times[each] for each in part) for part in (before, behind))
            whole = sum(times[each] for each in own)
            best = min(best or (float("inf"), 0, 0), (longer - whole, stage, own[cut]))
    if best is None:
        raise InputError(
            f"{graph.name} cannot be cut into more than {1 + max(stage_of)} stages: the calls of a layer that keeps a "
            "state stay together; start fewer processes"
        )
    _, stage, first = best
    return [each + (each > stage or (each == stage and number >= first)) for number, each in enumerate(stage_of)]


def bandwidth(mesh: Mesh, name: str) -> float:
    """Return the bytes per second from rank 0 to rank 1 and back; all ranks call it.

    Args:
        mesh: The connections.
        name: Of what it is measured for, among all that the mesh serves.
    """
    tag, what, best = f"{name}:bandwidth", "measuring a link", float("inf")
    if mesh.rank < 2:
        buffer = np.zeros(_BYTES, np.uint8)
        for _ in range(_ROUNDS):
            began = time.perf_counter()
            if mesh.rank == 0:
                mesh.send(1, tag, buffer, what)
            mesh.receive(1 - mesh.rank, tag, what)
            if mesh.rank == 1:
                mesh.send(0, tag, buffer, what)
            best = min(best, time.perf_counter() - began)
    return 2 * _BYTES / best
