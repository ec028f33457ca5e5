"""Turning an exported program into recorded operators, by running it on shapes without values."""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.utils import _pytree as pytree

from nearlinear.torch.capture.batch import Call
from nearlinear.torch.capture.exported import RECOMPUTED
from nearlinear.torch.capture.mixing import Carried, mixes
from nearlinear.torch.capture.recorder import Op, Recorded, Recorder
from nearlinear.torch.capture.steps import Label


def record_exported(program: ExportedProgram, model: nn.Module, call: Call, *, real: bool) -> Recorded:
    """Return what one forward pass of ``program`` does; the tag of each operator is its node.

    Args:
        program: What to run.
        model: What it was exported from; its names are used.
        call: What to run it on.
        real: Whether to run on values, which a program needs whose shapes depend on them; buffers are then written.

    Raises:
        Exception: Whatever torch raises where a shape depends on values and ``real`` is false.
    """
    with contextlib.nullcontext() if real else FakeTensorMode():
        tensors = _Tensors(real)
        state = {name: tensors.of(tensor) for name, tensor in [*program.state_dict.items(), *program.constants.items()]}
        names = program.call_spec.in_spec.child(1).context  # the named arguments, in the program's order
        given = iter(pytree.tree_leaves((call.args, {name: call.kwargs[name] for name in names})))
        signature = program.graph_signature
        inputs = [
            tensors.of(next(given)) if spec.kind == InputKind.USER_INPUT else state[str(spec.target)]
            for spec in signature.input_specs
        ]
        recorder = Recorder(
            [(name, tensors.of(each)) for name, each in model.named_parameters()],
            [(name, tensors.of(each)) for name, each in model.named_buffers()],
        )
        recorder.recomputed = lambda node: node.meta.get("custom", {}).get(RECOMPUTED)
        with torch.enable_grad(), recorder:  # the planner may be asked from a place where gradients are off
            output = _Walk(program.graph_module, recorder).run(*inputs)
        return Recorded(recorder.ops, recorder.written(output))


_BLOCKS = ("wrap_with_set_grad_enabled", "wrap_with_autocast")  # `with` statements of the forward pass


class _Walk(fx.Interpreter):
    """Runs a graph node by node and tells the recorder which node is running."""

    def __init__(self, module: fx.GraphModule, recorder: Recorder) -> None:
        super().__init__(module, garbage_collect_values=False)
        self._recorder = recorder

    def run_node(self, n: fx.Node) -> Any:
        if n.op == "call_function" and "assert" in _kind(n):
            return None  # a check of the values it was traced with; it costs nothing that counts
        self._recorder.tag = lambda: n
        return super().run_node(n)

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # What a model on the meta device makes for itself, it makes there; its stand-ins are on the processor.
        args, kwargs = pytree.tree_map_only(torch.device, _with_values, (args, kwargs))
        if getattr(target, "__name__", "") in _BLOCKS:
            args = tuple(self._walked(each) if isinstance(each, fx.GraphModule) else each for each in args)
        return super().call_function(target, args, kwargs)

    def _walked(self, block: fx.GraphModule) -> Callable[..., Any]:
        """Return what runs the nodes of a block one by one too."""
        return lambda *args: _Walk(block, self._recorder).run(*args)


def _with_values(device: torch.device) -> torch.device:
    return torch.device("cpu") if device.type == "meta" else device


class _Tensors:
    """Gives every tensor of the model or the batch its stand-in: one for one, however many names it has."""

    def __init__(self, real: bool) -> None:
        self._real = real
        self._made: dict[int, Any] = {}

    def of(self, value: Any) -> Any:
        if self._real or not isinstance(value, torch.Tensor):
            return value
        if id(value) not in self._made:
            device = _with_values(value.device)
            made = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)
            self._made[id(value)] = made.requires_grad_(value.requires_grad)
        return self._made[id(value)]


def groups_of(program: ExportedProgram, model: nn.Module, ops: Sequence[Op]) -> tuple[list[int], list[Label]]:
    """Return the group of every op, and what each group is.

    A node of the program is a group; but where a module without children does nothing that multiplies matrices, or
    does so once, all of it is one (a norm or an activation written out in ten operators).

    Args:
        program: The program.
        model: What it was exported from.
        ops: What its run recorded.
    """
    modules = {path: module for path, module in model.named_modules() if path}
    heavy = {op.tag for op in ops if op.flop > 0}
    group: dict[fx.Node, int] = {}
    labels: list[Label] = []
    for path, together in itertools.groupby(dict.fromkeys(op.tag for op in ops), key=_path):
        nodes = list(together)
        alone = path in modules and not any(modules[path].children()) and sum(node in heavy for node in nodes) <= 1
        kind = type(modules[path]).__name__.lower() if alone and len(nodes) > 1 else ""
        for part in [nodes] if alone else [[node] for node in nodes]:
            group.update(dict.fromkeys(part, len(labels)))
            labels.append(Label(path, kind or _kind(part[0]), mixes=any(map(mixes_batch, part))))
    return [group[op.tag] for op in ops], labels


def names_of(program: ExportedProgram) -> dict[fx.Node, str]:
    """Return the name of every node; those within a block of the program bear its name too (``"submod_1/linear"``)."""
    blocks = [(path, each) for path, each in program.graph_module.named_modules() if isinstance(each, fx.GraphModule)]
    return {node: f"{path}/{node.name}".lstrip("/") for path, block in blocks for node in block.graph.nodes}


def _path(node: fx.Node) -> str:
    stack = node.meta.get("nn_module_stack")
    if not stack:
        return ""
    path = str(next(reversed(stack.values()))[0])
    path = re.sub(r"^L\['self'\]\.?|^L__self__\.?", "", path)
    return re.sub(r"@\d+", "", path)  # a module's second call


def _kind(node: fx.Node) -> str:
    target = node.target
    name = (
        target.overloadpacket.__name__ if isinstance(target, torch._ops.OpOverload) else getattr(target, "__name__", "")
    )
    return name.strip("_")


def mixes_batch(node: fx.Node) -> bool:
    """Return whether what a node makes of one sample depends on the other samples."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    names = [argument.name for argument in node.target._schema.arguments]
    arguments = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    inputs = [each for argument in node.all_input_nodes for each in _tensors(argument.meta.get("val"))]
    outputs = [_carried(each) for each in _tensors(node.meta.get("val"))]
    numbers = bool(inputs) and inputs[0].is_floating_point()
    return mixes(_kind(node), arguments, list(map(_carried, inputs)), outputs, numbers=numbers)


def _tensors(value: Any) -> list[torch.Tensor]:
    return [each for each in pytree.tree_leaves(value) if isinstance(each, torch.Tensor)]


def _carried(tensor: torch.Tensor) -> Carried:
    return tuple(isinstance(size, torch.SymInt) for size in tensor.shape)
