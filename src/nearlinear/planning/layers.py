"""Turning a graph of operators into a short row of layers, each with what it costs at every tensor degree."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from nearlinear.core.graph import Graph
from nearlinear.errors import InputError


@dataclass(frozen=True, slots=True)
class Recomputed:
    """A layer that drops its activations after the forward pass and makes them again for the backward pass.

    Args:
        seconds: Forward, forward again and backward, per microbatch.
        activation_bytes: Kept per microbatch in flight: what enters the layer.
        fixed_bytes: Held at all times: state, and the activations of the one microbatch being made again.
    """

    seconds: float
    activation_bytes: float
    fixed_bytes: float


@dataclass(frozen=True, slots=True)
class Variant:
    """What a layer costs on each of the devices that share its tensors.

    Args:
        seconds: Forward and backward pass of one microbatch, exchange among the sharing devices included.
        parameter_bytes: Bytes of parameters on each device.
        activation_bytes: Kept per microbatch in flight.
        fixed_bytes: Held at all times: parameters, gradients, optimizer state.
        recomputed: The same with recomputation; ``None`` where that is not possible.
    """

    seconds: float
    parameter_bytes: float = 0.0
    activation_bytes: float = 0.0
    fixed_bytes: float = 0.0
    recomputed: Recomputed | None = None


@dataclass(frozen=True, slots=True)
class Layer:
    """A layer.

    Args:
        name: What it is.
        variants: Its costs, by tensor degree (devices that share the layer's tensors).
        operators: Positions of the graph's operators that are in it.
    """

    name: str
    variants: Mapping[int, Variant]
    operators: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Crossing:
    """A tensor that may pass from one stage to another.

    Args:
        producer: Position of the layer that makes it.
        consumers: Positions of the layers that read it, ascending.
        bytes: Its size for one microbatch.
        leaving: More bytes where the producing stage has a tensor degree above one, by that degree.
        entering: More bytes where the consuming stage has a tensor degree above one, by that degree.
    """

    producer: int
    consumers: tuple[int, ...]
    bytes: float
    leaving: Mapping[int, float] = field(default_factory=dict)
    entering: Mapping[int, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Layers:
    """Layers in an order in which they can run, and the tensors between them.

    Args:
        layers: The nodes.
        crossings: What passes between them.
        name: What they were made from.
        training: Whether the gradient of every tensor travels back.

    Raises:
        InputError: There is no layer, or a tensor names a layer that does not exist or goes backwards.
    """

    layers: tuple[Layer, ...]
    crossings: tuple[Crossing, ...] = ()
    name: str = "layers"
    training: bool = True

    def __post_init__(self) -> None:
        if not self.layers:
            raise InputError(f"{self.name}: there is no layer")
        for each in self.crossings:
            if not all(0 <= each.producer < consumer < len(self.layers) for consumer in each.consumers):
                raise InputError(
                    f"{self.name}: a tensor goes from layer {each.producer} to {each.consumers}; "
                    f"there are {len(self.layers)} layers, and tensors go forwards"
                )


def layers_of(graph: Graph, at_most: int = 64, slowdown: float = 1.0) -> Layers:
    """Return ``graph`` as a row of at most ``at_most`` blocks of neighbouring operators.

    Blocks take about equal shares of the time and end where little passes; operators of one group share a block.
    A recomputed block keeps only what enters it, and pays its forward pass twice. There is no tensor degree but one:
    the graph says nothing of how an operator would be shared.

    Args:
        graph: In an order in which it can run.
        at_most: Blocks.
        slowdown: What to multiply times by where the devices are not those that the graph was measured on.

    Raises:
        InputError: The graph has no operator.

    Example:
        >>> from nearlinear.core.graph import Operator, Tensor
        >>> mlp = Graph((Operator("up", forward=1.0), Operator("down", forward=2.0)), (Tensor(0, (1,), 4e6),))
        >>> [layer.name for layer in layers_of(mlp).layers]
        ['up', 'down']
    """
    if not graph.operators:
        raise InputError(f"{graph.name}: there is no operator to plan for")
    bounds = [0, *_cuts(graph, at_most), len(graph.operators)]
    block_of = np.repeat(np.arange(len(bounds) - 1), np.diff(bounds))
    crossings = []
    entering = np.zeros(len(bounds) - 1)
    for tensor in graph.tensors:
        home = int(block_of[tensor.producer])
        others = sorted({int(block_of[consumer]) for consumer in tensor.consumers} - {home})
        if others:
            crossings.append(Crossing(home, tuple(others), tensor.bytes))
            entering[others] += tensor.bytes
    layers = []
    for number, (start, stop) in enumerate(pairwise(bounds)):
        inside = graph.operators[start:stop]
        forward, backward = (slowdown * sum(getattr(each, way) for each in inside) for way in ("forward", "backward"))
        state, kept = (sum(getattr(each, what) for each in inside) for what in ("state_bytes", "activation_bytes"))
        recomputed = None
        if graph.training and kept > entering[number]:
            recomputed = Recomputed(2 * forward + backward, entering[number], state + kept - entering[number])
        parameters = sum(each.parameter_bytes for each in inside)
        variant = Variant(forward + backward, parameters, kept, state, recomputed)
        name = inside[0].name if len(inside) == 1 else f"{inside[0].name} ... {inside[-1].name}"
        layers.append(Layer(name, {1: variant}, tuple(range(start, stop))))
    return Layers(tuple(layers), tuple(crossings), graph.name, graph.training)


def layers_of_workload(raw: Mapping[str, Any]) -> Layers:
    """Return the layers of a workload file whose nodes carry costs per tensor degree (its field ``tp``).

    Every edge counts by itself, as in Piper's model, where a tensor with two readers is two edges.

    Args:
        raw: The file's JSON object, of format ``nearlinear-workload/1``.

    Raises:
        InputError: It is not such an object, or a node has no ``tp``.
    """
    try:
        # The keys of sync_in and sync_out are the numbers that the nodes had where the file comes from.
        number = {node["id"]: str(node.get("orig_id", node["id"])) for node in raw["nodes"]}
        position = {node["id"]: index for index, node in enumerate(raw["nodes"])}
        nodes = {node["id"]: node for node in raw["nodes"]}

        def more(node: int, way: str, other: int) -> dict[int, float]:
            degrees = {int(degree): entries[0][way] for degree, entries in nodes[node]["tp"].items()}
            return {degree: float(found[number[other]]) for degree, found in degrees.items() if number[other] in found}

        layers = tuple(
            Layer(f"{node['name']} {node['id']}", {int(degree): _variant(each) for degree, each in node["tp"].items()})
            for node in raw["nodes"]
        )
        crossings = tuple(
            Crossing(
                position[edge["src"]],
                (position[edge["dst"]],),
                float(edge["bytes"]),
                more(edge["src"], "sync_out", edge["dst"]),
                more(edge["dst"], "sync_in", edge["src"]),
            )
            for edge in raw["edges"]
        )
        return Layers(layers, crossings, str(raw["name"]), raw["mode"] == "training")
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"not a workload with costs per tensor degree: {error!r}") from error


def _variant(entries: Sequence[Mapping[str, Any]]) -> Variant:
    plain = next(each for each in entries if not each["recompute"])
    again = next((each for each in entries if each["recompute"]), None)
    return Variant(
        plain["time_ms"] / 1e3,
        plain["param_bytes"],
        plain["mem_act_bytes"],
        plain["mem_fixed_bytes"],
        None if again is None else Recomputed(again["time_ms"] / 1e3, again["mem_act_bytes"], again["mem_fixed_bytes"]),
    )


def _cuts(graph: Graph, at_most: int) -> list[int]:
    """Return where blocks end: in each of ``at_most`` equal shares of the time, where the least passes."""
    if at_most < 2:
        return []
    count = len(graph.operators)
    step = np.zeros(count + 1)
    for tensor in graph.tensors:
        step[tensor.producer + 1] += tensor.bytes
        step[max(tensor.consumers, default=tensor.producer) + 1] -= tensor.bytes
    passing = np.cumsum(step)
    joined = np.zeros(count + 1)
    for first, last in _groups(graph):
        joined[first + 1] += 1
        joined[last + 1] -= 1
    inside_group = np.cumsum(joined) > 0
    free = [position for position in range(1, count) if not inside_group[position]]
    if len(free) < at_most:
        return free
    # A hair per operator, so that graphs without times are cut by count.
    hair = (graph.time or 1.0) * 1e-9 / count
    clock = list(accumulate(each.forward + each.backward + hair for each in graph.operators))
    best: dict[int, int] = {}
    for position in free:
        share = min(int(clock[position - 1] / clock[-1] * (at_most - 1)), at_most - 2)
        if share not in best or passing[position] <= passing[best[share]]:
            best[share] = position
    return sorted(best.values())


def _groups(graph: Graph) -> Iterable[tuple[int, int]]:
    """Return the first and last operator of every group."""
    ends: dict[str, tuple[int, int]] = {}
    for position, operator in enumerate(graph.operators):
        if operator.group is not None:
            ends[operator.group] = (ends.get(operator.group, (position,))[0], position)
    return ends.values()
