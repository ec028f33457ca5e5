"""Turning a run of the model itself into recorded operators, grouped by the modules that they ran in.

A node is the smallest module that is called once per step, at the same place in the order for two batches of different
size. What a module does between the calls of its children is a node for every stretch of it:

    Block.forward      norm | attention | x + | norm | mlp | x +
    nodes              leaf   leaf        glue  leaf   leaf  glue

A module that is called several times, or for some batches only, belongs to the module around it.
"""

from __future__ import annotations

import bisect
import dataclasses
import difflib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from nearlinear.torch.capture.batch import Call
from nearlinear.torch.capture.mixing import Carried, mixes
from nearlinear.torch.capture.recorder import Op, Recorded, Recorder, Shape
from nearlinear.torch.capture.steps import Label

Stack = tuple[str, ...]  # the modules that are running, the model ("") first


@dataclass(frozen=True)
class Run:
    """One forward pass.

    Args:
        recorded: What it did; the tag of each operator is the stack of modules it ran in.
        calls: The modules in the order in which they were called.
    """

    recorded: Recorded
    calls: list[str]

    @property
    def ops(self) -> list[Op]:
        return self.recorded.ops


def run_modules(model: nn.Module, call: Call) -> Run:
    """Run the model once on the call's values and return what it did.

    Raises:
        Exception: Whatever the model raises.
    """
    calls: list[str] = []
    stack: list[str] = []
    known = pytree.tree_leaves((call.args, dict(call.kwargs)))
    known += [value for module in model.modules() for value in vars(module).values()]
    recorder = Recorder(model.named_parameters(), model.named_buffers(), outside=known)
    recorder.tag = lambda: tuple(stack)

    def entering(path: str) -> Any:
        def hook(*_: object) -> None:
            calls.append(path)
            stack.append(path)

        return hook

    def leaving(*_: object) -> None:
        stack.pop()

    hooks = []
    for path, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            continue  # it takes no hooks; what it does belongs to the module around it
        hooks.append(module.register_forward_pre_hook(entering(path), prepend=True))
        hooks.append(module.register_forward_hook(leaving))
    try:
        with torch.enable_grad(), recorder:
            output = _flat(model(*call.args, **call.kwargs))
    finally:
        for hook in hooks:
            hook.remove()
    return Run(Recorded(recorder.ops, recorder.written(output)), calls)


def _flat(output: Any) -> list[Any]:
    """Return the leaves of an output, those of a dataclass that torch has not been told of too."""
    if dataclasses.is_dataclass(output) and not isinstance(output, type):
        return [leaf for each in dataclasses.fields(output) for leaf in _flat(getattr(output, each.name, None))]
    return pytree.tree_leaves(output)


def nodes_of(run: Run, other: Run | None) -> tuple[list[int], list[Label]]:
    """Return the group of every op of ``run``, and what each group is.

    Args:
        run: The run whose costs count.
        other: A run on another number of samples; ``None`` where there was none.
    """
    once = _called_once(run.calls, run.calls if other is None else other.calls)
    mixing = set() if other is None else _mixing(run.ops, other.ops)
    paths = [_innermost(op.tag, once) for op in run.ops]
    parents = {path for op in run.ops for path in _known_stack(op.tag, once)[:-1]}
    groups: list[int] = []
    labels: list[Label] = []
    previous: str | None = None
    for number, path in enumerate(paths):
        if path != previous:
            labels.append(Label(path, leaf=path not in parents))
            previous = path
        groups.append(len(labels) - 1)
        if number in mixing:
            label = labels[-1]
            labels[-1] = Label(label.path, label.kind, label.leaf, mixes=True)
    return groups, labels


def _called_once(calls: Sequence[str], others: Sequence[str]) -> set[str]:
    """Return the modules that both runs called once, without those whose place in the order differs."""
    one, two = Counter(calls), Counter(others)
    place = {path: number for number, path in enumerate(others)}
    common = [path for path in calls if one[path] == 1 and two[path] == 1]
    return {common[number] for number in _longest_rise([place[path] for path in common])}


def _longest_rise(values: Sequence[int]) -> list[int]:
    """Return the positions of a longest rising subsequence.

    Example:
        >>> _longest_rise([0, 5, 1, 2])
        [0, 2, 3]
    """
    ends: list[int] = []  # the least value with which a rise of each length can end
    where: list[int] = []
    before: list[int] = []
    for number, value in enumerate(values):
        length = bisect.bisect_left(ends, value)
        before.append(where[length - 1] if length else -1)
        if length == len(ends):
            ends.append(value)
            where.append(number)
        else:
            ends[length], where[length] = value, number
    rise: list[int] = []
    number = where[-1] if where else -1
    while number >= 0:
        rise.append(number)
        number = before[number]
    return rise[::-1]


def _known_stack(stack: Stack, once: set[str]) -> list[str]:
    known = [""]
    for path in stack[1:]:
        if path not in once:
            break
        known.append(path)
    return known


def _innermost(stack: Stack, once: set[str]) -> str:
    return _known_stack(stack, once)[-1]


def _mixing(ops: Sequence[Op], others: Sequence[Op]) -> set[int]:
    """Return the ops whose inputs change their shape with the number of samples and whose outputs tell of mixing."""
    found = set()
    keys, other_keys = [(op.tag, op.name) for op in ops], [(op.tag, op.name) for op in others]
    matcher = difflib.SequenceMatcher(None, keys, other_keys, autojunk=False)
    equal = [(0, 0, len(keys))] if keys == other_keys else matcher.get_matching_blocks()
    for start, other_start, length in equal:
        for number in range(length):
            op, other = ops[start + number], others[other_start + number]
            if op.name and _mixes(op, other):
                found.add(start + number)
    return found


def _mixes(op: Op, other: Op) -> bool:
    def carried(name: str) -> list[Carried]:
        one, two = _shapes(op.arguments.get(name)), _shapes(other.arguments.get(name))
        return [
            tuple(a != b for a, b in zip(x, y, strict=True)) for x, y in zip(one, two, strict=False) if len(x) == len(y)
        ]

    inputs = [each for name in op.arguments if name != "->" for each in carried(name)]
    return mixes(op.name, op.arguments, inputs, carried("->"), numbers=op.floating)


def _shapes(value: Any) -> list[tuple[int, ...]]:
    if isinstance(value, Shape):
        return [value]
    return [each for item in value for each in _shapes(item)] if isinstance(value, list | tuple) else []
