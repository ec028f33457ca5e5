"""Watching a forward pass: what every operator reads, makes, costs, and keeps for the backward pass.

It makes no difference whether tensors are real or fake (shapes without values): a recorder sees the operators that
torch dispatches beneath autograd, and knows tensors by the storage they lie in, so that views and writes in place are
followed by themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from nearlinear.torch.capture.flop import flop

View = tuple[int, tuple[int, ...], tuple[int, ...]]  # offset, shape and strides within a storage


@dataclass(slots=True)
class Op:
    """One dispatched operator.

    Args:
        tag: Where it was called, as the recorder's user says.
        name: What it is (``"addmm"``); empty where something is only kept for the backward pass.
        reads: Bytes of every view it reads of a storage that an operator before it wrote; by (that operator, storage).
        parameters: Names of the parameters it reads.
        buffers: Names of the buffers it reads or writes.
        written: Names of the buffers it writes.
        flop: Floating-point operations.
        moved: Bytes read and written.
        kept: Bytes kept for the backward pass that nothing before it has kept.
        whole: Bytes of each storage it writes, by storage.
        random: Whether it draws random numbers.
        floating: Whether its first input holds floating-point numbers.
        arguments: Its arguments by name, tensors as their shapes; what it gives as shapes under ``"->"``.
    """

    tag: Any
    name: str
    reads: dict[tuple[int, int], dict[View, float]] = field(default_factory=dict)
    parameters: set[str] = field(default_factory=set)
    buffers: set[str] = field(default_factory=set)
    written: set[str] = field(default_factory=set)
    flop: float = 0.0
    moved: float = 0.0
    kept: float = 0.0
    whole: dict[int, float] = field(default_factory=dict)
    random: bool = False
    floating: bool = False
    arguments: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Recorded:
    """One forward pass.

    Args:
        ops: What it did, in order.
        outputs: Bytes of each thing it returned, by (the operator that made it, storage).
    """

    ops: list[Op]
    outputs: dict[tuple[int, int], float]


class Shape(tuple[int, ...]):
    """A tensor's shape, told apart from a tuple of numbers."""


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records while it is entered.

    Args:
        parameters: By name; two names of one tensor are one parameter, known by the first.
        buffers: By name.
        outside: Everything else that exists before; a tensor that comes from nowhere (through NumPy, say) is then taken
            for made by the operator before its reader. ``None``: it is taken for a constant.
    """

    def __init__(
        self,
        parameters: Iterable[tuple[str, torch.Tensor]],
        buffers: Iterable[tuple[str, torch.Tensor]],
        outside: Iterable[Any] | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ops: list[Op] = []
        self.tag: Callable[[], Any] = lambda: None
        # The region of a tag whose results are computed again in the backward pass; None: they are kept.
        self.recomputed: Callable[[Any], object | None] = lambda _: None
        self._writer: dict[int, int] = {}
        self._kept: set[int] = set()
        # Several parameters may lie in one storage: (first element, element after the last, name) of each.
        self._parameters = _by_storage(parameters)
        self._buffers = _by_storage(buffers)
        self._outside = None if outside is None else {_storage(tensor) for tensor in _tensors(list(outside))}
        self._stack = ExitStack()

    def __enter__(self) -> Recorder:
        self._stack.enter_context(torch.autograd.graph.saved_tensors_hooks(self._keep, lambda tensor: tensor))
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._stack.close()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        before = _tensors((args, kwargs))
        output = func(*args, **kwargs)
        if isinstance(func, torch._ops.OpOverload):
            self._record(func, args, kwargs, before, output)
        return output

    def _record(
        self, func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], inputs: list[Any], output: Any
    ) -> None:
        read = {_storage(tensor) for tensor in inputs}
        outputs = _tensors(output)
        changed = _changed(func, args, kwargs)
        made = [tensor for tensor in outputs if _storage(tensor) not in read]
        if not made and not changed:
            return  # a view, or no tensor at all
        op = Op(self.tag(), func.overloadpacket.__name__.rstrip("_"))
        number = len(self.ops)
        for tensor in inputs:
            self._read(op, tensor)
        for tensor in changed + made:
            key = _storage(tensor)
            op.whole[key] = float(tensor.untyped_storage().nbytes())
            named = _find(self._buffers, tensor)
            if named is not None:
                op.written.add(named)
            elif key not in self._parameters:
                self._writer[key] = number
        op.moved = sum(map(_bytes, inputs)) + sum(map(_bytes, changed + made))
        op.flop = flop(func, args, kwargs, output)
        op.random = torch.Tag.nondeterministic_seeded in func.tags
        op.floating = bool(inputs) and inputs[0].is_floating_point()
        names = [argument.name for argument in func._schema.arguments]
        op.arguments = _shapes({**dict(zip(names, args, strict=False)), **kwargs, "->": outputs})
        if self.recomputed(op.tag) is not None:  # what the region reads from outside is kept to compute it again
            op.kept = sum(map(self._newly_kept, inputs))
        self.ops.append(op)

    def _read(self, op: Op, tensor: torch.Tensor) -> None:
        key = _storage(tensor)
        parameter, buffer = _find(self._parameters, tensor), _find(self._buffers, tensor)
        if parameter is not None:
            op.parameters.add(parameter)
        elif buffer is not None:
            op.buffers.add(buffer)
        elif key in self._writer or self._from_nowhere(tensor):
            view = (int(tensor.storage_offset()), tuple(map(int, tensor.shape)), tuple(map(int, tensor.stride())))
            op.reads.setdefault((self._writer[key], key), {})[view] = _bytes(tensor)

    def _from_nowhere(self, tensor: torch.Tensor) -> bool:
        key = _storage(tensor)
        if self._outside is None or key in self._outside:
            return False
        before = next((number for number in reversed(range(len(self.ops))) if self.ops[number].name), None)
        if before is None:
            return False
        self._writer[key] = before
        self.ops[before].whole[key] = float(tensor.untyped_storage().nbytes())
        return True

    def written(self, tree: Any) -> dict[tuple[int, int], float]:
        """Return the bytes of what the tensors in ``tree`` hold, by (the operator that wrote it, storage)."""
        tensors = [each for each in _tensors(tree) if _storage(each) in self._writer]
        return {(self._writer[_storage(each)], _storage(each)): _bytes(each) for each in tensors}

    def _keep(self, tensor: torch.Tensor) -> torch.Tensor:
        self.ops.append(Op(self.tag(), "", kept=self._newly_kept(tensor)))
        return tensor

    def _newly_kept(self, tensor: torch.Tensor) -> float:
        """Return the bytes that keeping the tensor adds: none for what is kept anyway or will be computed again."""
        key = _storage(tensor)
        if key in self._kept or key in self._parameters or key in self._buffers:
            return 0.0
        region = self.recomputed(self.tag())
        writer = self._writer.get(key)
        if region is not None and (writer == len(self.ops) or self._made_in(region, writer)):
            return 0.0
        self._kept.add(key)
        return float(tensor.untyped_storage().nbytes())

    def _made_in(self, region: object, writer: int | None) -> bool:
        return writer is not None and self.recomputed(self.ops[writer].tag) == region


Regions = dict[int, list[tuple[int, int, str]]]


def _by_storage(tensors: Iterable[tuple[str, torch.Tensor]]) -> Regions:
    regions: Regions = {}
    for name, tensor in tensors:
        start = int(tensor.storage_offset())
        regions.setdefault(_storage(tensor), []).append((start, start + max(tensor.numel(), 1), name))
    return regions


def _find(regions: Regions, tensor: torch.Tensor) -> str | None:
    lie_here = regions.get(_storage(tensor))
    if lie_here is None:
        return None
    offset = int(tensor.storage_offset())
    return next((name for start, end, name in lie_here if start <= offset < end), lie_here[0][2])


def _tensors(tree: Any) -> list[torch.Tensor]:
    leaves = pytree.tree_leaves(tree)
    return [each for each in leaves if isinstance(each, torch.Tensor) and each.layout == torch.strided]


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _bytes(tensor: torch.Tensor) -> float:
    """Return the bytes of memory that reading the tensor touches: an expanded one is read where it lies."""
    return float(min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes()))


def _changed(func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    changed = []
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            changed += _tensors(args[position] if position < len(args) else kwargs.get(argument.name))
    return changed


def _shapes(tree: Any) -> Any:
    return pytree.tree_map_only(torch.Tensor, lambda leaf: Shape(map(int, leaf.shape)), tree)
