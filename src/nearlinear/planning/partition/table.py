"""What each stage of a plan holds, computes and exchanges, for people to read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from nearlinear.core.graph import Graph


@dataclass(frozen=True, slots=True)
class Stage:
    """One stage of a plan.

    Args:
        device: Where it runs.
        operators: Positions of its operators, ascending.
        compute: Seconds per microbatch on a device of speed 1.
        received: Bytes of tensors that come in, per microbatch and direction.
        sent: Bytes of tensors that go out, per microbatch and direction.
    """

    device: int
    operators: tuple[int, ...]
    compute: float
    received: float
    sent: float


def stages(graph: Graph, assignment: Sequence[int], devices: Sequence[int]) -> tuple[Stage, ...]:
    """Return the stages of a plan.

    Args:
        graph: What was split.
        assignment: The device of every operator.
        devices: The devices in the order in which a microbatch passes them.
    """
    operators: dict[int, list[int]] = {device: [] for device in devices}
    received, sent = dict.fromkeys(devices, 0.0), dict.fromkeys(devices, 0.0)
    for place, device in enumerate(assignment):
        operators[device].append(place)
    for tensor in graph.tensors:
        home = assignment[tensor.producer]
        others = {assignment[consumer] for consumer in tensor.consumers} - {home}
        sent[home] += tensor.bytes if others else 0.0
        for device in others:
            received[device] += tensor.bytes
    return tuple(
        Stage(
            device,
            tuple(operators[device]),
            sum(graph.operators[each].forward + graph.operators[each].backward for each in operators[device]),
            received[device],
            sent[device],
        )
        for device in devices
    )
