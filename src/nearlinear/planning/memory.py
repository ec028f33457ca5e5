"""Turning a stage's sizes and its place in the schedule into the peak memory of its device, part by part.

parameters      held all the time
gradients       one per parameter, held from the first backward pass to the optimizer step
optimizer       Adam: two moments per parameter; momentum: one; plain SGD: none
activations     what forward passes keep for their backward passes, times the microbatches in flight
working         what the pass in hand needs besides: the gradient of its largest output
communication   flat copies of the gradients for the all-reduce
allocator       what a caching allocator holds and cannot use: a share of the activations, which come and go
runtime         what libraries take before the first tensor: contexts, communicators, workspaces
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from dataclasses import dataclass

from nearlinear.core.graph import Graph
from nearlinear.errors import InputError
from nearlinear.units import size

OPTIMIZER_COPIES = {"adam": 2.0, "adamw": 2.0, "momentum": 1.0, "sgd": 0.0}


@dataclass(frozen=True, slots=True)
class Overhead:
    """What a training runtime holds beyond the tensors of the model.

    Args:
        allocator_share: Of the activations, held but unusable (fragmentation and rounding).
        gradient_copies: Flat copies of the gradients made for the all-reduce.
        runtime_bytes: Taken before the first tensor.
        source: Where the numbers are from.
    """

    allocator_share: float = 0.0
    gradient_copies: float = 0.0
    runtime_bytes: float = 0.0
    source: str = ""


NO_OVERHEAD = Overhead(source="the model's tensors alone")


@dataclass(frozen=True, slots=True)
class StageMemory:
    """Peak memory of one device in bytes, part by part; the parts are those of this file's first lines."""

    parameters: float
    gradients: float
    optimizer: float
    activations: float
    working: float = 0.0
    communication: float = 0.0
    allocator: float = 0.0
    runtime: float = 0.0

    @property
    def total(self) -> float:
        """Bytes of all parts."""
        return float(sum(dataclasses.astuple(self)))

    def __str__(self) -> str:
        parts = [(name, value) for name, value in dataclasses.asdict(self).items() if value > 0]
        return f"{size(self.total)}: " + ", ".join(f"{name} {size(value)}" for name, value in parts)


def stage_memory(
    parameter_bytes: float,
    activation_bytes: float,
    in_flight: int,
    *,
    input_bytes: float = 0.0,
    largest_output_bytes: float = 0.0,
    largest_activation_bytes: float = 0.0,
    optimizer: str = "adam",
    recompute: bool = False,
    overhead: Overhead = NO_OVERHEAD,
) -> StageMemory:
    """Return the peak memory of a stage.

    Args:
        parameter_bytes: Bytes of the stage's parameters on one device.
        activation_bytes: Bytes that one microbatch's forward pass keeps on one device.
        in_flight: Microbatches whose activations are held at once (``Schedule.in_flight``).
        input_bytes: What enters the stage per microbatch: all that recomputation keeps.
        largest_output_bytes: The largest output of one of its layers per microbatch; its gradient is alive beside
            everything else when the backward pass reaches it.
        largest_activation_bytes: With recomputation, what one layer keeps per microbatch; by default the whole stage,
            which is then recomputed at once.
        optimizer: ``"adam"``, ``"adamw"``, ``"momentum"`` or ``"sgd"``.
        recompute: Whether activations are dropped and computed again in the backward pass.
        overhead: What the runtime holds besides.

    Raises:
        InputError: The optimizer is unknown.

    Example:
        >>> print(stage_memory(1e9, 2e8, 4))
        4.8 GB: parameters 1 GB, gradients 1 GB, optimizer 2 GB, activations 800 MB
    """
    if optimizer not in OPTIMIZER_COPIES:
        raise InputError(f"unknown optimizer {optimizer!r}; choose one of: {', '.join(OPTIMIZER_COPIES)}")
    held = activation_bytes * in_flight
    working = largest_output_bytes
    if recompute and input_bytes < activation_bytes:
        held = input_bytes * in_flight
        working += largest_activation_bytes or activation_bytes
    return StageMemory(
        parameters=parameter_bytes,
        gradients=parameter_bytes,
        optimizer=OPTIMIZER_COPIES[optimizer] * parameter_bytes,
        activations=held,
        working=working,
        communication=overhead.gradient_copies * parameter_bytes,
        allocator=overhead.allocator_share * held,
        runtime=overhead.runtime_bytes,
    )


def memory_of(
    graph: Graph,
    operators: Collection[int],
    in_flight: int,
    *,
    recompute: bool = False,
    overhead: Overhead = NO_OVERHEAD,
) -> StageMemory:
    """Return the peak memory of a stage of a graph.

    Args:
        graph: Its costs are for one microbatch; its state contains the optimizer's.
        operators: Positions of the stage's operators.
        in_flight: Microbatches whose activations are held at once (``Schedule.in_flight``).
        recompute: Whether the stage keeps its inputs alone and computes the rest again.
        overhead: What the runtime holds besides.
    """
    own = set(operators)
    parameters = sum(graph.operators[each].parameter_bytes for each in own)
    state = sum(graph.operators[each].state_bytes for each in own)
    entering = [t.bytes for t in graph.tensors if t.producer not in own and not own.isdisjoint(t.consumers)]
    made = [tensor.bytes for tensor in graph.tensors if tensor.producer in own]
    plain = stage_memory(
        parameters,
        sum(graph.operators[each].activation_bytes for each in own),
        in_flight,
        input_bytes=sum(entering),
        largest_output_bytes=max(made, default=0.0),
        recompute=recompute,
        overhead=overhead,
    )
    return dataclasses.replace(plain, optimizer=max(state - 2 * parameters, 0.0))
