"""Turning an exported program and the stage of each operator into graphs that a pipeline runs, one per stage.

Each stage runs one microbatch at a time. What mixes samples (a mean over the batch, a loss inside the model), and what
follows from it, runs once, on the whole batch, after the last stage: the *tail*. So the gradients are those of one
process for any model.

    segment      0 ── 1 ── ... ── stages - 1 ── tail
    runs on      microbatches ...               the whole batch

What follows from the batch and from buffers alone (masks, positions) is computed wherever it is needed. A change of a
buffer that no sample has a part in (a counter) is made once per call, not once per microbatch.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind
from torch.utils import _pytree as pytree

from nearlinear.errors import InputError
from nearlinear.torch.capture.interpret import mixes_batch, names_of
from nearlinear.torch.pipeline.draws import seeded
from nearlinear.torch.pipeline.nodes import (
    Together,
    is_batch_norm,
    is_check,
    is_random,
    is_view,
    stops_gradients,
    written_by,
)

_NUMBERS = ("Tensor", "Optional[Tensor]", "number", "Scalar", "float", "Optional[number]", "Optional[float]")
_PICKS = ("index", "index_put", "gather", "scatter", "take")


class CannotSplit(InputError):
    """The graph cannot be run in such stages; the message says why."""


@dataclass(frozen=True)
class Crossing:
    """A value that one segment makes and others read.

    Args:
        name: Its node in the program.
        producer: The segment that makes it.
        consumers: The segments that read it, ascending.
        shape: Sizes, numbers or expressions in the number of samples.
        dtype: Of its elements.
        batch_dim: The dimension that grows with the number of samples; ``None``: it is the same for all microbatches.
        parameters: Names of the parameters that it depends on, differentiably as far as the graph shows.
        reaches: Positions of the model's outputs that depend on it.
    """

    name: str
    producer: int
    consumers: tuple[int, ...]
    shape: tuple[Any, ...]
    dtype: torch.dtype
    batch_dim: int | None
    parameters: frozenset[str]
    reaches: frozenset[int]


@dataclass(frozen=True)
class Returned:
    """A leaf of what the model returns.

    Args:
        constant: It, in a tuple, where it is the same for every batch.
        shape: Sizes, where it is a tensor; ``None`` where it is a number.
        dtype: Of its elements.
        parameters: Names of the parameters that it depends on.
        expression: The number, in the number of samples.
    """

    constant: tuple[Any] | None = None
    shape: tuple[Any, ...] | None = None
    dtype: torch.dtype = torch.float32
    parameters: frozenset[str] = frozenset()
    expression: Any = None


@dataclass(frozen=True)
class Segment:
    """What one rank runs: a stage, or the tail.

    Args:
        run: Called with ``parameters`` + ``inputs`` + ``batch`` + ``sizes``; returns a tuple of ``outputs``.
        parameters: Names of the model's parameters, buffers and constants.
        inputs: Names of the crossings it reads.
        batch: Positions of the leaves of the batch that it reads.
        sizes: Expressions in the number of samples that it is told the values of.
        outputs: Names of the crossings it makes, or, for the tail, one for each of the model's outputs.
        once: Called with ``changed`` before the first microbatch; changes buffers. ``None``: nothing to change.
        changed: Names of what ``once`` reads.
    """

    run: Callable[..., tuple[Any, ...]]
    parameters: tuple[str, ...]
    inputs: tuple[str, ...]
    batch: tuple[int, ...]
    sizes: tuple[Any, ...]
    outputs: tuple[str, ...]
    once: Callable[..., Any] | None = None
    changed: tuple[str, ...] = ()


@dataclass(frozen=True)
class Split:
    """A model cut into segments.

    Args:
        segments: One per stage, then the tail.
        crossings: What passes between them, by name.
        holders: The stages that hold each parameter, by its name, ascending; the tail counts as the last stage.
        writers: The stages that change each buffer.
        returned: The leaves of the model's output; those that are no constants the tail makes, in this order.
        spec: How the leaves make up the model's output.
        microbatches: Whether the batch may be split at all.
    """

    segments: tuple[Segment, ...]
    crossings: Mapping[str, Crossing]
    holders: Mapping[str, tuple[int, ...]]
    writers: Mapping[str, tuple[int, ...]]
    returned: tuple[Returned, ...]
    spec: pytree.TreeSpec
    microbatches: bool

    @property
    def stages(self) -> int:
        """How many stages there are."""
        return len(self.segments) - 1


def split(program: ExportedProgram, stage_of: Mapping[str, int], stages: int) -> Split:
    """Return the program cut into ``stages`` stages and a tail.

    Args:
        program: The graph, with the number of samples as its only symbol.
        stage_of: The stage of nodes, by name; those that are not named follow what they read.
        stages: How many there are.

    Raises:
        CannotSplit: The graph has what cannot be run in pieces; the message names it.
    """
    cut = _Cut(program, stage_of, stages)
    if cut.tail_is_heavy():
        cut = _Cut(program, stage_of, stages, microbatches=False)
    return cut.split()


@dataclass
class _Facts:
    """What is known of one node."""

    symbolic: bool = False  # its value is a number that depends on the number of samples alone
    free: bool = False
    batchless: bool = False  # no sample has a part in it
    parameters: frozenset[str] = frozenset()
    reaches: set[int] = field(default_factory=set)


class _Cut:
    def __init__(
        self, program: ExportedProgram, stage_of: Mapping[str, int], stages: int, *, microbatches: bool = True
    ) -> None:
        self.program, self.stages, self.microbatches = program, stages, microbatches
        self.graph = program.graph_module.graph
        self.nodes = [node for node in self.graph.nodes if not is_check(node)]
        self.state: dict[fx.Node, str] = {}
        self.parameters: set[str] = set()
        self.leaves: dict[fx.Node, int] = {}
        self._read_signature()
        self.facts: dict[fx.Node, _Facts] = {}
        self.together = Together(self.nodes)
        self._learn()
        self._learn_reach()
        self.of: dict[fx.Node, int] = {}
        self._place(stage_of)

    # ---- what the program says

    def _read_signature(self) -> None:
        placeholders = [node for node in self.nodes if node.op == "placeholder"]
        leaf = itertools.count()
        for node, spec in zip(placeholders, self.program.graph_signature.input_specs, strict=True):
            if spec.kind == InputKind.USER_INPUT:
                self.leaves[node] = next(leaf)
            else:
                self.state[node] = str(spec.target)
                if spec.kind == InputKind.PARAMETER:
                    self.parameters.add(str(spec.target))
        self.output = next(node for node in self.nodes if node.op == "output")
        kinds = [spec.kind for spec in self.program.graph_signature.output_specs]
        if any(kind != OutputKind.USER_OUTPUT for kind in kinds):
            raise CannotSplit(f"the captured graph returns {next(k for k in kinds if k != OutputKind.USER_OUTPUT)}")
        self.returned: list[Any] = list(self.output.args[0])

    def _learn(self) -> None:
        """Find out what each node depends on."""
        symbols: set[Any] = set()
        written = self.together.writers
        for node in self.nodes:
            facts = self.facts[node] = _Facts()
            value = node.meta.get("val")
            before = [self.facts[each] for each in node.all_input_nodes]
            facts.parameters = frozenset().union(*(each.parameters for each in before))
            if node.op == "placeholder":
                name = self.state.get(node)
                facts.batchless = name is not None
                facts.free = name not in self.parameters and node not in written
                facts.parameters = frozenset({name}) if name is not None and name in self.parameters else frozenset()
                continue
            if node.op == "get_attr":
                facts.free = facts.batchless = True
                continue
            if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
                facts.symbolic = True
                symbols |= set(value.node.expr.free_symbols)
            facts.batchless = all(each.batchless for each in before) and not facts.symbolic
            facts.free = all(each.free for each in before) and not is_random(node) and node.op != "output"
            if stops_gradients(node):
                facts.parameters = frozenset()
        changed = True
        while changed:  # what writes or is written must be computed together
            changed = False
            for node in self.nodes:
                facts = self.facts[node]
                if facts.free and not all(
                    self.facts[each].free for each in itertools.chain(node.all_input_nodes, self.together.group(node))
                ):
                    facts.free, changed = False, True
        if len(symbols) > 1:
            raise CannotSplit(f"sizes depend on more than the number of samples ({', '.join(map(str, symbols))})")

    def _learn_reach(self) -> None:
        for index, each in enumerate(self.returned):
            if isinstance(each, fx.Node):
                self.facts[each].reaches.add(index)
        for node in reversed(self.nodes):
            facts = self.facts[node]
            for user in node.users:
                if user in self.facts and user.op != "output" and not stops_gradients(user):
                    facts.reaches |= self.facts[user].reaches
            for other in self.together.group(node):
                facts.reaches |= self.facts[other].reaches

    # ---- where each node runs

    def _place(self, stage_of: Mapping[str, int]) -> None:
        names = names_of(self.program)
        inner: dict[str, int] = {}  # nodes of a block run with the block
        for name, stage in stage_of.items():
            block = name.partition("/")[0]
            if "/" in name:
                inner[block] = max(inner.get(block, 0), stage)
        place: dict[fx.Node, int] = {}
        for node in self.nodes:
            if self._anywhere(node):
                continue
            first = stage_of.get(names.get(node, ""), 0)
            for block in node.all_input_nodes:
                if block.op == "get_attr":
                    first = max(first, inner.get(str(block.target), 0))
            place[node] = first
        self.planned = dict(place)
        if self.microbatches:
            for node in self.nodes:
                if self._mixes(node):
                    place[node] = self.stages
        changed = True
        while changed:
            changed = False
            for node in self.nodes:
                if node not in place:
                    if self._anywhere(node) and self._whole(node, place):
                        place[node], changed = self.stages, True
                    continue
                beside = itertools.chain(node.all_input_nodes, self.together.group(node))
                least = max((place.get(each, 0) for each in beside), default=0)
                if least > place[node]:
                    place[node], changed = least, True
        self.of = place

    def _anywhere(self, node: fx.Node) -> bool:
        facts = self.facts[node]
        return facts.free or facts.symbolic or node.op in ("placeholder", "get_attr", "output")

    def _whole(self, node: fx.Node, place: Mapping[fx.Node, int]) -> bool:
        """Whether a node that every rank could compute follows from what was computed on the whole batch."""
        if node.op in ("placeholder", "get_attr", "output") or self.facts[node].symbolic:
            return False
        return any(place.get(each) == self.stages for each in (*node.all_input_nodes, *self.together.group(node)))

    def _mixes(self, node: fx.Node) -> bool:
        if node.op != "call_function" or self.facts[node].symbolic or is_batch_norm(node):
            return False
        if any(isinstance(each, fx.GraphModule) for each in self._blocks(node)):
            return any(
                mixes_batch(inner) and not is_batch_norm(inner)
                for block in self._blocks(node)
                for inner in block.graph.nodes
                if inner.op == "call_function"
            )
        return mixes_batch(node) or self._counts_samples(node)

    def _blocks(self, node: fx.Node) -> list[fx.GraphModule]:
        found = [
            getattr(self.program.graph_module, str(each.target))
            for each in node.all_input_nodes
            if each.op == "get_attr"
        ]
        return [each for each in found if isinstance(each, fx.GraphModule)]

    def _counts_samples(self, node: fx.Node) -> bool:
        """Whether the number of samples, or a sample's place in the batch, is part of the node's result."""
        if not isinstance(node.target, torch._ops.OpOverload):
            return False
        sizes = [each for each in node.all_input_nodes if self.facts[each].symbolic]
        if not sizes:
            return False
        name = node.target.overloadpacket.__name__
        if name == "arange":
            return not self._only_picks(node)
        arguments = node.target._schema.arguments
        given = {**dict(zip((each.name for each in arguments), node.args, strict=False)), **node.kwargs}
        return any(
            isinstance(given.get(each.name), fx.Node) and given[each.name] in sizes and str(each.type) in _NUMBERS
            for each in arguments
        )

    def _only_picks(self, node: fx.Node) -> bool:
        for user in node.users:
            name = user.target.overloadpacket.__name__ if isinstance(user.target, torch._ops.OpOverload) else ""
            if not (name.strip("_") in _PICKS or (is_view(user) and self._only_picks(user))):
                return False
        return True

    def tail_is_heavy(self) -> bool:
        """Whether the whole batch would have to run through parameters of earlier stages."""
        tail = [node for node, place in self.of.items() if place == self.stages]
        read = {self.state[each] for node in tail for each in node.all_input_nodes if each in self.state}
        late = {
            self.state[each]
            for node, planned in self.planned.items()
            if planned == self.stages - 1
            for each in node.all_input_nodes
            if each in self.state
        }
        return self.stages > 1 and any(name in self.parameters and name not in late for name in read)

    # ---- building

    def split(self) -> Split:
        crossings = self._crossings()
        holders: dict[str, set[int]] = {}
        segments = []
        for number in range(self.stages + 1):
            segment = _Builder(self, number, crossings).build()
            segments.append(segment)
            for name in (*segment.parameters, *segment.changed):
                holders.setdefault(name, set()).add(min(number, self.stages - 1))
        writers: dict[str, set[int]] = {}
        for root, nodes in self.together.writers.items():
            if root in self.state:
                stages = {min(self.of[node], self.stages - 1) for node in nodes if node in self.of}
                writers.setdefault(self.state[root], set()).update(stages)
        return Split(
            tuple(segments),
            crossings,
            {name: tuple(sorted(each)) for name, each in holders.items() if name in self.parameters},
            {name: tuple(sorted(each)) for name, each in writers.items()},
            tuple(map(self._returned, self.returned)),
            self.program.call_spec.out_spec,
            self.microbatches,
        )

    def _returned(self, each: Any) -> Returned:
        if not isinstance(each, fx.Node):
            return Returned(constant=(each,))
        value = each.meta.get("val")
        if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
            return Returned(expression=value.node.expr)
        if not isinstance(value, torch.Tensor):
            raise CannotSplit(f"the model returns {each.name}, a {type(value).__name__}")
        floating = value.dtype.is_floating_point or value.dtype.is_complex
        parameters = self.facts[each].parameters if floating else frozenset[str]()
        return Returned(None, _shape(value), value.dtype, parameters)

    def _crossings(self) -> dict[str, Crossing]:
        wanted: dict[fx.Node, set[int]] = {}
        for node, place in self.of.items():
            for each in node.all_input_nodes:
                if each in self.of and self.of[each] != place:
                    wanted.setdefault(each, set()).add(place)
        for each in self.returned:
            if isinstance(each, fx.Node) and each in self.of and self.of[each] < self.stages:
                wanted.setdefault(each, set()).add(self.stages)
        return {node.name: self._crossing(node, consumers) for node, consumers in wanted.items()}

    def _crossing(self, node: fx.Node, consumers: Iterable[int]) -> Crossing:
        value = node.meta.get("val")
        if not isinstance(value, torch.Tensor):
            raise CannotSplit(f"{node.name} ({type(value).__name__}) would have to pass from one stage to another")
        shape = _shape(value)
        along = [dim for dim, each in enumerate(shape) if not isinstance(each, int)]
        facts = self.facts[node]
        floating = value.dtype.is_floating_point or value.dtype.is_complex
        return Crossing(
            node.name,
            self.of[node],
            tuple(sorted(consumers)),
            shape,
            value.dtype,
            along[0] if along else None,
            facts.parameters if floating else frozenset(),
            frozenset(facts.reaches),
        )


class _Builder:
    """Builds the graph of one segment."""

    def __init__(self, cut: _Cut, number: int, crossings: Mapping[str, Crossing]) -> None:
        self._cut, self._number, self._crossings = cut, number, crossings
        self._graph = fx.Graph()
        self._made: dict[fx.Node, Any] = {}
        self._inputs: dict[str, dict[Any, fx.Node]] = {"parameters": {}, "inputs": {}, "batch": {}, "sizes": {}}
        self._tail = number == cut.stages

    def build(self) -> Segment:
        cut = self._cut
        mine = [node for node in cut.nodes if cut.of.get(node) == self._number]
        returned = (
            [each for each in cut.returned if isinstance(each, fx.Node)]
            if self._tail
            else [node for node in mine if node.name in self._crossings]
        )
        needed = self._needed([*mine, *returned])
        once = [] if self._tail else self._changed_once(mine)
        alone = set(once)
        for node in cut.nodes:
            if node in needed and node not in alone:
                self._make(node)
        outputs = [self._of(node) for node in returned]
        order = [placeholder for each in self._inputs.values() for placeholder in each.values()]
        graph = _with_placeholders_first(self._graph, order, outputs)
        changed, prologue = self._prologue(once)
        return Segment(
            fx.GraphModule(cut.program.graph_module, graph),
            tuple(self._inputs["parameters"]),
            tuple(self._inputs["inputs"]),
            tuple(self._inputs["batch"]),
            tuple(self._inputs["sizes"]),
            tuple(node.name for node in returned),
            prologue,
            changed,
        )

    def _needed(self, mine: Sequence[fx.Node]) -> set[fx.Node]:
        """Return the nodes to run: one's own, and what every rank computes for itself as far as they read it."""
        cut = self._cut
        needed: set[fx.Node] = set()
        todo = list(mine)
        while todo:
            node = todo.pop()
            if node in needed or (node in cut.of and cut.of[node] != self._number):
                continue
            needed.add(node)
            if node.op in ("placeholder", "get_attr") or cut.facts[node].symbolic:
                continue
            todo += node.all_input_nodes
            if cut.facts[node].free:
                todo += cut.together.group(node)
        return needed

    def _changed_once(self, mine: Sequence[fx.Node]) -> list[fx.Node]:
        """Return the nodes that change buffers by themselves, in which no sample has a part."""
        cut = self._cut
        return [
            node
            for node in mine
            if cut.facts[node].batchless and any(cut.facts[each].batchless for each in written_by(node))
        ]

    def _prologue(self, once: Sequence[fx.Node]) -> tuple[tuple[str, ...], Callable[..., Any] | None]:
        if not once:
            return (), None
        builder = _Builder(self._cut, self._number, self._crossings)
        needed = builder._needed(once)
        for node in self._cut.nodes:
            if node in needed:
                builder._make(node)
        if builder._inputs["inputs"] or builder._inputs["batch"] or builder._inputs["sizes"]:
            raise CannotSplit(f"{once[0].name} changes a buffer by what another stage makes")
        graph = _with_placeholders_first(builder._graph, list(builder._inputs["parameters"].values()), [])
        return tuple(builder._inputs["parameters"]), fx.GraphModule(self._cut.program.graph_module, graph)

    def _make(self, node: fx.Node) -> None:
        cut = self._cut
        if node.op == "placeholder" or cut.facts[node].symbolic or node.op == "output":
            return  # made when somebody reads it
        copy = self._made[node] = self._graph.node_copy(node, self._of)
        if is_random(node) and callable(node.target):
            copy.target = seeded(node.target, node.name)

    def _of(self, node: fx.Node) -> Any:
        """Return what stands for ``node`` in this segment's graph."""
        cut = self._cut
        if node in self._made:
            return self._made[node]
        if node in cut.state:
            return self._input("parameters", cut.state[node], node.name)
        if node in cut.leaves:
            return self._input("batch", cut.leaves[node], node.name)
        if cut.facts[node].symbolic:
            return self._input("sizes", node.meta["val"].node.expr, f"number_{len(self._inputs['sizes'])}_of_samples")
        if cut.of.get(node, self._number) != self._number:
            return self._input("inputs", node.name, node.name)
        base = next((each for each in written_by(node) if each in cut.state), None)
        if base is not None:  # a buffer that was changed before the first microbatch
            return self._of(base)
        raise CannotSplit(f"{node.name} is read before it is made")

    def _input(self, kind: str, key: Any, name: str) -> fx.Node:
        known = self._inputs[kind]
        if key not in known:
            known[key] = self._graph.placeholder(name)
        return known[key]


def _shape(value: torch.Tensor) -> tuple[Any, ...]:
    return tuple(each.node.expr if isinstance(each, torch.SymInt) else int(each) for each in value.shape)


def _with_placeholders_first(graph: fx.Graph, order: Sequence[fx.Node], outputs: Sequence[Any]) -> fx.Graph:
    ordered = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in (*order, *(each for each in graph.nodes if each.op != "placeholder")):
        copies[node] = ordered.node_copy(node, lambda each: copies[each])
    ordered.output(tuple(copies[each] if isinstance(each, fx.Node) else each for each in outputs))
    return ordered
