"""A model as the planner sees it: operators with their costs, and the tensors that pass between them."""

from __future__ import annotations

import dataclasses
import heapq
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from nearlinear.errors import InputError
from nearlinear.units import seconds, size


@dataclass(frozen=True, slots=True)
class Operator:
    """One node of a graph: what it costs on the device it was measured on, for one microbatch.

    Args:
        name: Unique within the graph, the way the model's author would say it (``"layers.3.mlp.up"``).
        kind: What it is (``"linear"``, ``"conv2d"``).
        forward: Seconds of the forward pass.
        backward: Seconds of the backward pass; 0 where the graph only infers.
        update: Seconds of the optimizer step over its parameters.
        flop: Floating-point operations of the forward pass.
        moved_bytes: Bytes that the forward pass reads and writes in the device's memory.
        parameter_bytes: Bytes of its own parameters; parameters shared with others lie with the first of them.
        state_bytes: Bytes held between steps: parameters, their gradients and the optimizer's state.
        activation_bytes: Bytes that the forward pass keeps for the backward pass, per microbatch in flight.
        mixes_batch: Whether a sample's result depends on the other samples (BatchNorm, a mean over the batch).
        group: Operators of one group must lie on one device (``None``: free).
    """

    name: str
    kind: str = ""
    forward: float = 0.0
    backward: float = 0.0
    update: float = 0.0
    flop: float = 0.0
    moved_bytes: float = 0.0
    parameter_bytes: float = 0.0
    state_bytes: float = 0.0
    activation_bytes: float = 0.0
    mixes_batch: bool = False
    group: str | None = None


@dataclass(frozen=True, slots=True)
class Tensor:
    """What one operator hands to others.

    Args:
        producer: Position of the operator that makes it.
        consumers: Positions of the operators that read it, ascending, each once.
        bytes: Its size for one microbatch.
    """

    producer: int
    consumers: tuple[int, ...]
    bytes: float


@dataclass(frozen=True)
class Graph:
    """A directed acyclic graph of operators, in an order in which they can run.

    Args:
        operators: The nodes; every tensor goes from an earlier to a later one.
        tensors: What passes between them.
        name: What it was captured from.
        training: Whether a backward pass follows; the gradient of every tensor then travels back.
        samples: Samples in the microbatch that the costs are for.
        source: How it was captured or where it was published.

    Raises:
        InputError: Two operators share a name, a tensor names an operator that does not exist or goes backwards, or a
            cost is negative or not a number.

    Example:
        >>> up, down = Operator("up", forward=2e-3, backward=4e-3), Operator("down", forward=1e-3, backward=2e-3)
        >>> print(Graph((up, down), (Tensor(0, (1,), 4e6),), name="mlp"))
        mlp: 2 operators, 1 tensor, 9 ms, 0 B of state
    """

    operators: tuple[Operator, ...]
    tensors: tuple[Tensor, ...] = ()
    name: str = "graph"
    training: bool = True
    samples: int = 1
    source: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        seen: set[str] = set()
        for operator in self.operators:
            if operator.name in seen:
                raise InputError(f"{self.name}: two operators are named {operator.name!r}; names must be unique")
            seen.add(operator.name)
            for cost in _COSTS:
                value = getattr(operator, cost)
                if not 0 <= value < float("inf"):
                    raise InputError(f"{self.name}: {cost} of {operator.name!r} is {value}; it must be 0 or more")
        for tensor in self.tensors:
            ends = (tensor.producer, *tensor.consumers)
            if not all(0 <= end < len(self.operators) for end in ends):
                raise InputError(f"{self.name}: a tensor joins operators {ends}; there are {len(self.operators)}")
            if not all(tensor.producer < consumer for consumer in tensor.consumers):
                raise InputError(f"{self.name}: a tensor goes from operator {tensor.producer} to {min(ends[1:])}")
            if not 0 <= tensor.bytes < float("inf"):
                raise InputError(f"{self.name}: a tensor of operator {tensor.producer} has {tensor.bytes} bytes")

    def __str__(self) -> str:
        state = sum(operator.state_bytes for operator in self.operators)
        noun = "tensor" if len(self.tensors) == 1 else "tensors"
        return (
            f"{self.name}: {len(self.operators)} operators, {len(self.tensors)} {noun}, "
            f"{seconds(self.time)}, {size(state)} of state"
        )

    @cached_property
    def time(self) -> float:
        """Seconds of the forward and backward passes of one microbatch, all operators one after the other."""
        return sum(operator.forward + operator.backward for operator in self.operators)

    @cached_property
    def parameter_bytes(self) -> float:
        """Bytes of all parameters."""
        return sum(operator.parameter_bytes for operator in self.operators)

    def to_json(self) -> str:
        """Return the graph as a JSON object."""
        return json.dumps({"format": _FORMAT, **dataclasses.asdict(self)})

    @classmethod
    def from_json(cls, text: str) -> Graph:
        """Return the graph that ``to_json`` wrote.

        Raises:
            InputError: ``text`` is not such an object.
        """
        try:
            raw = json.loads(text)
            if raw.pop("format", None) != _FORMAT:
                raise InputError(f"not a graph: its format is not {_FORMAT!r}")
            raw["operators"] = tuple(Operator(**each) for each in raw["operators"])
            raw["tensors"] = tuple(
                Tensor(each["producer"], tuple(each["consumers"]), each["bytes"]) for each in raw["tensors"]
            )
            return cls(**raw)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise InputError(f"not a graph: {error}") from error


def in_order(operators: Sequence[Operator], tensors: Sequence[Tensor], **about: Any) -> Graph:
    """Return the graph of operators given in any order.

    Among the operators that can run, the one given first runs first.

    Args:
        operators: The nodes, in any order.
        tensors: What passes between them; positions are those of ``operators``.
        **about: The graph's other fields.

    Raises:
        InputError: The operators wait for each other in a circle.
    """
    waits, readers = [0] * len(operators), [set[int]() for _ in operators]
    for tensor in tensors:
        readers[tensor.producer].update(tensor.consumers)
    for each in readers:
        for consumer in each:
            waits[consumer] += 1
    ready = [position for position, count in enumerate(waits) if count == 0]
    order: list[int] = []
    while ready:
        position = heapq.heappop(ready)
        order.append(position)
        for consumer in readers[position]:
            waits[consumer] -= 1
            if waits[consumer] == 0:
                heapq.heappush(ready, consumer)
    if len(order) < len(operators):
        circle = next(operators[position].name for position, count in enumerate(waits) if count > 0)
        raise InputError(f"{about.get('name', 'graph')}: operator {circle!r} waits for its own output")
    place = {position: index for index, position in enumerate(order)}
    moved = (
        Tensor(place[each.producer], tuple(sorted({place[consumer] for consumer in each.consumers})), each.bytes)
        for each in tensors
    )
    return Graph(tuple(operators[position] for position in order), tuple(moved), **about)


_FORMAT = "nearlinear-graph/1"
_COSTS = (
    "forward",
    "backward",
    "update",
    "flop",
    "moved_bytes",
    "parameter_bytes",
    "state_bytes",
    "activation_bytes",
)
