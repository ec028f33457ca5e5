"""Reading a captured graph's nodes: what each writes, what its result shares memory with, whether it draws numbers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx


class Together:
    """Which nodes share memory that one of them writes: they cannot be told apart by where they run."""

    def __init__(self, nodes: Sequence[fx.Node]) -> None:
        base: dict[fx.Node, fx.Node] = {}
        for node in nodes:
            source = next(iter(_shares(node)), None)
            base[node] = base.get(source, source) if source is not None else node
        place = {node: position for position, node in enumerate(nodes)}
        self.writers: dict[fx.Node, list[fx.Node]] = {}  # by what lies in the memory first: a buffer, or a result
        for node in nodes:
            for written in written_by(node):
                self.writers.setdefault(base[written], []).append(node)
        self._group: dict[fx.Node, list[fx.Node]] = {}
        for root, writers in self.writers.items():
            # A buffer's place among the inputs is nowhere; what reads and writes it runs where it is assigned.
            sharing = [node for node in nodes if base[node] is root and node.op != "placeholder"]
            last = max(place[node] for node in writers)
            early = [user for node in sharing for user in node.users if place.get(user, last) < last]
            everyone = list(dict.fromkeys([*sharing, *writers, *early]))
            for node in everyone:
                self._group.setdefault(node, []).extend(each for each in everyone if each is not node)
            if root.op == "placeholder":
                self._group.setdefault(root, []).extend(everyone)

    def group(self, node: fx.Node) -> Sequence[fx.Node]:
        """Return the others that run where ``node`` runs."""
        return self._group.get(node, ())


_CHECKS = ("_assert_scalar", "_assert_async", "_assert_tensor_metadata", "sym_constrain_range")
_DETACHES = ("detach", "argmax", "argmin", "argsort", "zeros_like", "ones_like", "wrap_with_set_grad_enabled")


def name_of(node: fx.Node) -> str:
    """Return the name of the operator that a node calls."""
    if isinstance(node.target, torch._ops.OpOverload):
        return str(node.target.overloadpacket.__name__)
    return str(getattr(node.target, "__name__", ""))


def is_check(node: fx.Node) -> bool:
    """Return whether a node only checks what it was traced with."""
    return node.op == "call_function" and any(name_of(node).startswith(each) for each in _CHECKS)


def is_batch_norm(node: fx.Node) -> bool:
    """Return whether a node normalises over the batch; it keeps the shape, and is split all the same."""
    return "batch_norm" in name_of(node)


def stops_gradients(node: fx.Node) -> bool:
    """Return whether no gradient passes a node."""
    if node.op != "call_function":
        return False
    name = name_of(node)
    if name == "wrap_with_set_grad_enabled":
        return node.args[0] is False
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor) and not (value.dtype.is_floating_point or value.dtype.is_complex):
        return True
    return name in _DETACHES


def is_random(node: fx.Node) -> bool:
    """Return whether a node draws random numbers, or may: a block is not looked into."""
    if isinstance(node.target, torch._ops.OpOverload):
        return torch.Tag.nondeterministic_seeded in node.target.tags or name_of(node).endswith("dropout")
    return node.op == "call_function" and name_of(node).startswith("wrap_")


def written_by(node: fx.Node) -> list[fx.Node]:
    """Return the nodes whose memory a node writes."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return []
    written = []
    for position, argument in enumerate(node.target._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = node.args[position] if position < len(node.args) else node.kwargs.get(argument.name)
            written += [
                each for each in (given if isinstance(given, list | tuple) else [given]) if isinstance(each, fx.Node)
            ]
    # torch does not say that batch norm in training changes its statistics.
    if is_batch_norm(node):
        written += [each for each in node.args[3:5] if isinstance(each, fx.Node) and node.args[5] is True]
    return written


def is_view(node: fx.Node) -> bool:
    """Return whether a node's result lies in the memory of what it reads, unchanged."""
    return isinstance(node.target, torch._ops.OpOverload) and bool(_aliased(node)) and not written_by(node)


def _aliased(node: fx.Node) -> list[fx.Node]:
    if not isinstance(node.target, torch._ops.OpOverload):
        return []
    found = []
    for position, argument in enumerate(node.target._schema.arguments):
        if argument.alias_info is not None and position < len(node.args):
            given = node.args[position]
            found += [
                each for each in (given if isinstance(given, list | tuple) else [given]) if isinstance(each, fx.Node)
            ]
    name = name_of(node)
    if not found and name in _MAY_VIEW and node.args and isinstance(node.args[0], fx.Node):
        found.append(node.args[0])
    return found


_MAY_VIEW = (
    "reshape",
    "contiguous",
    "flatten",
    "to",
    "type_as",
    "getitem",
    "unflatten",
    "expand_as",
    "movedim",
    "swapaxes",
)


def _shares(node: fx.Node) -> list[fx.Node]:
    """Return the nodes whose memory a node's result lies in, or may lie in."""
    if node.op != "call_function":
        return []
    if is_batch_norm(node):
        return []
    if getattr(node.target, "__name__", "") == "getitem" and isinstance(node.args[0], fx.Node):
        return [node.args[0]]
    return _aliased(node)
