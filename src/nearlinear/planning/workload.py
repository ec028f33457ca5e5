"""Reading a published model graph (``nearlinear-workload/1``) into a ``Graph``."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from nearlinear.core.graph import Graph, Operator, Tensor, in_order
from nearlinear.errors import InputError

_FORMAT = "nearlinear-workload/1"


@dataclass(frozen=True)
class Workload:
    """A graph, and where each node of its file lies in it.

    Args:
        graph: The nodes as operators, in an order in which they can run; a node's ``mem_bytes`` are its
            ``state_bytes``.
        position: Position in ``graph.operators`` of every node of the file, in the file's order.
        bandwidths: Bytes per second of the links that the file names (``"fast"``, ``"slow"``).
    """

    graph: Graph
    position: tuple[int, ...]
    bandwidths: dict[str, float]

    def by_node(self, by_operator: tuple[int, ...]) -> list[int]:
        """Return values given per operator in the order of the file's nodes."""
        return [by_operator[place] for place in self.position]


def read_workload(text: str, name: str = "workload") -> Workload:
    """Return the graph that a file's ``text`` describes.

    A tensor is one pair of source and ``tensor`` number among the edges; its bytes are those of its first edge.

    Args:
        text: The file's contents.
        name: What to call it in an error.

    Raises:
        InputError: ``text`` is not such a file, an edge names a node that does not exist, or the graph has a circle.
    """
    try:
        raw: dict[str, Any] = json.loads(text)
        if not isinstance(raw, dict) or raw.get("format") != _FORMAT:
            raise InputError(f"{name}: not a graph: its format is not {_FORMAT!r}")
        training = raw["mode"] == "training"
        nodes, edges = raw["nodes"], raw["edges"]
        operators = _operators(nodes, training)
        tensors = _tensors(edges, len(nodes), name)
        bandwidths = {str(key): float(value) for key, value in raw.get("bandwidths", {}).items()}
        called = str(raw.get("name", name))
        source = json.dumps(raw.get("source", ""))
    except (ValueError, OverflowError, RecursionError, TypeError, KeyError, AttributeError) as error:
        what = f"has no {error}" if isinstance(error, KeyError) else str(error)
        raise InputError(f"{name}: not a graph in the format {_FORMAT}: {what}") from error
    graph = in_order(operators, tensors, name=called, training=training, source=source)
    place = {operator.name: index for index, operator in enumerate(graph.operators)}
    return Workload(graph, tuple(place[operator.name] for operator in operators), bandwidths)


def _operators(nodes: list[dict[str, Any]], training: bool) -> list[Operator]:
    taken: set[str] = set()
    operators = []
    for index, node in enumerate(nodes):
        label = str(node.get("name", index))
        label = label if label not in taken else f"{label} #{index}"
        while label in taken:
            label += "'"
        taken.add(label)
        operators.append(
            Operator(
                label,
                kind=str(node.get("op", "")),
                forward=float(node["fwd_ms"]) * 1e-3,
                backward=float(node["bwd_ms"]) * 1e-3 if training else 0.0,
                parameter_bytes=float(node.get("param_bytes", 0)),
                state_bytes=float(node["mem_bytes"]),
                group=None if node.get("group") is None else str(node["group"]),
            )
        )
    return operators


def _tensors(edges: list[dict[str, Any]], nodes: int, name: str) -> list[Tensor]:
    found: dict[tuple[int, Any], tuple[float, set[int]]] = {}
    for edge in edges:
        source, target = edge["src"], edge["dst"]
        for end in (source, target):
            if not isinstance(end, int) or not 0 <= end < nodes:
                raise InputError(f"{name}: an edge joins {source!r} and {target!r}; the nodes are 0 to {nodes - 1}")
        if source == target:
            raise InputError(f"{name}: node {source} waits for its own output")
        readers = found.setdefault((source, edge.get("tensor", 0)), (float(edge["bytes"]), set()))[1]
        readers.add(target)
    return [Tensor(source, tuple(sorted(readers)), size) for (source, _), (size, readers) in found.items()]
