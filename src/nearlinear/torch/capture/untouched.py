"""Leaving a model, and an optimizer, as they were: what passes and steps assign, count, draw or average is put back."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils import _pytree as pytree

from nearlinear.torch import random_streams

_DEEPEST = 3  # containers within containers within an attribute; deeper ones are not looked into


@dataclass
class Traces:
    """What a forward pass did beside computing its output; known once it has been undone.

    Args:
        assigned: The attributes that it assigned or changed (``"encoder.aux"``).
        drew: Whether it drew from Python's or NumPy's random numbers.
    """

    assigned: list[str] = field(default_factory=list)
    drew: bool = False


@contextlib.contextmanager
def untouched(model: nn.Module) -> Iterator[Traces]:
    """Put back, at the end, the model's attributes, buffers, gradients and training mode, and the random streams.

    Parameters are not written by a forward pass and are not copied.

    Yields:
        What there was to put back, filled in at the end.
    """
    restore_streams = random_streams.remember()
    streams = _outside_torch()
    modules = [(path, module, dict(vars(module))) for path, module in model.named_modules()]
    contents = [
        (path, module, name, _contents(value))
        for path, module, attributes in modules
        for name, value in attributes.items()
    ]
    tensors = [(buffer, buffer.detach().clone()) for buffer in model.buffers() if not buffer.is_meta]
    parameters = [(each, each.grad, each.requires_grad) for each in model.parameters()]
    traces = Traces()
    changed = traces.assigned
    try:
        yield traces
    finally:
        traces.drew = _outside_torch() != streams
        for path, module, attributes in modules:
            now = vars(module)
            names = [name for name in {**attributes, **now} if now.get(name) is not attributes.get(name)]
            changed += [
                _name(path, each) for each in names if _matters(module, each, attributes.get(each), now.get(each))
            ]
            if names:
                now.clear()
                now.update(attributes)
        for path, module, name, holders in contents:
            if _put_back(holders) and not _of_torch(module) and name not in vars(nn.Module()):
                changed.append(_name(path, name))
        with torch.no_grad():
            for buffer, copy in tensors:  # not by version: batch norm writes its statistics without counting it
                if not torch.equal(buffer, copy):
                    buffer.copy_(copy)
        for parameter, gradient, wanted in parameters:
            if parameter.grad is not gradient:
                parameter.grad = gradient
            if parameter.requires_grad is not wanted:
                parameter.requires_grad_(wanted)
        restore_streams()


def _outside_torch() -> Any:
    numpy: Any = np.random.get_state()
    return random.getstate(), numpy[1].tobytes(), numpy[2:]


def _name(path: str, attribute: str) -> str:
    return f"{path}.{attribute}" if path else attribute


def _of_torch(module: nn.Module) -> bool:
    return type(module).__module__.startswith("torch.")


def _matters(module: nn.Module, name: str, before: Any, now: Any) -> bool:
    """Whether the script may look at the new value: a tensor or number that its own module has assigned."""
    if _of_torch(module):
        return False  # nn.LSTM, say, keeps lists of its own weights
    if any(isinstance(leaf, torch.Tensor) for leaf in pytree.tree_leaves(now)):
        return True
    return name[0] != "_" and isinstance(now, bool | int | float | str | tuple | None) and bool(now != before)


Holder = tuple[Any, Any]  # a container and a copy of what it held


def _contents(value: Any, depth: int = 0) -> list[Holder]:
    if depth == _DEEPEST or not isinstance(value, dict | list | set) or (not value and depth > 0):
        return []
    inner = value.values() if isinstance(value, dict) else value
    return [(value, value.copy()), *(each for item in inner for each in _contents(item, depth + 1))]


def _put_back(holders: list[Holder]) -> bool:
    changed = False
    for container, copy in holders:
        if _same(container, copy):
            continue
        changed = True
        container.clear()
        container.extend(copy) if isinstance(container, list) else container.update(copy)
    return changed


def _same(container: Any, copy: Any) -> bool:
    if len(container) != len(copy):
        return False
    if isinstance(container, dict):
        pairs = zip(container.items(), copy.items(), strict=True)
        return all(key is other or key == other for (key, _), (other, _) in pairs) and all(
            value is copy[key] for key, value in container.items()
        )
    if isinstance(container, set):
        return bool(container == copy)
    return all(value is other for value, other in zip(container, copy, strict=True))


def parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return all parameters that the optimizer steps."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


@contextlib.contextmanager
def undone(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> Iterator[None]:
    """Put back, at the end, the model and the optimizer: parameters, gradients and state, bit for bit, and the rest."""
    tensors = {
        id(each): each for each in [*model.parameters(), *([] if optimizer is None else parameters_of(optimizer))]
    }
    kept = [(each, each.grad, each._version, _copy(each)) for each in tensors.values()]
    state = None if optimizer is None else _OptimizerState(optimizer)
    try:
        with untouched(model):
            yield
    finally:
        with torch.no_grad():
            for tensor, gradient, version, copy in kept:
                if tensor._version != version:
                    tensor.copy_(copy)
                tensor.grad = gradient
        if state is not None:
            state.restore()


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", copy=True)  # in main memory: the device's may be short


class _OptimizerState:
    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._attributes = dict(vars(optimizer))
        self._dicts = [
            (each, dict(each)) for each in [optimizer.state, *optimizer.state.values(), *optimizer.param_groups]
        ]
        self._tensors = [
            (value, _copy(value))
            for _, copy in self._dicts
            for value in copy.values()
            if isinstance(value, torch.Tensor)
        ]

    def restore(self) -> None:
        vars(self._optimizer).clear()
        vars(self._optimizer).update(self._attributes)
        for original, held in self._dicts:
            original.clear()
            original.update(held)
        with torch.no_grad():
            for tensor, copy in self._tensors:
                tensor.copy_(copy)
