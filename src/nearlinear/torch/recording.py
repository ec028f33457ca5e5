"""What a recorder of a script's first steps (``testing/record.py``) asks of PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.data import DataLoader

from nearlinear import events
from nearlinear.torch.data import map_leaves
from nearlinear.torch.session import current
from nearlinear.torch.sharded_tensors import whole


class Recorder(Protocol):
    """Who takes the notes."""

    def note_loss(self, value: float, scale: float) -> None:
        """Take the loss of a backward pass, and the factor of this rank's gradients."""

    def note_options(self, options: dict[str, Any]) -> None:
        """Take the numbers of the optimizer that is about to step."""

    def note_type(self, name: str) -> None:
        """Take the name of a type that is computed in."""

    def count_step(self) -> None:
        """Count a step of any optimizer."""


def watch(recorder: Recorder, undo: ExitStack) -> None:
    """Tell ``recorder`` of losses, optimizers' numbers and types until ``undo`` is closed."""
    scale: float | None = None  # of the backward pass in hand, if it reached a distributed model

    def on_backward(event: dict[str, Any]) -> None:
        nonlocal scale
        session = current()
        assert session is not None
        # The reducer has just asked for it too, so that asking again changes nothing and exchanges nothing.
        scale = session.gradient_scale()

    def noting_loss(backward: Callable[..., Any]) -> Callable[..., Any]:
        def noting(loss: torch.Tensor, *args: Any, **options: Any) -> Any:
            nonlocal scale
            scale = None
            result = backward(loss, *args, **options)
            if scale is not None and loss.numel() == 1:
                recorder.note_loss(float(loss.detach()), scale)
            scale = None  # a tensor subclass calls this twice
            return result

        return noting

    def noting_type(enter: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def noting(autocast: Any) -> Any:
            if autocast._enabled:
                recorder.note_type(_name(autocast.fast_dtype))
            return enter(autocast)

        return noting

    def replace(owner: Any, name: str, wrapping: Callable[[Any], Any]) -> None:
        original = getattr(owner, name)
        undo.callback(setattr, owner, name, original)
        setattr(owner, name, wrapping(original))

    undo.callback(events.subscribe("backward", on_backward))
    undo.callback(
        register_optimizer_step_pre_hook(lambda optimizer, *_: recorder.note_options(_options(optimizer))).remove
    )
    # Comes after the optimizer's own hooks, and so after the event, if there is one.
    undo.callback(register_optimizer_step_post_hook(lambda *_: recorder.count_step()).remove)
    replace(torch.Tensor, "backward", noting_loss)
    replace(torch.autocast, "__enter__", noting_type)


def seed(number: int) -> None:
    """Start torch's random streams."""
    torch.manual_seed(number)


def parameters(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Return the model's parameters by name."""
    return list(model.named_parameters())


def arrays(tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, NDArray[Any]]]:
    """Yield copies of whole tensors on rank 0; all ranks take part in gathering those that are sharded, one by one."""
    session = current()
    assert session is not None
    for name, tensor in tensors:
        complete = whole(tensor, f"gathering {name}")
        if session.rank == 0:
            yield name, _array(complete)


def types(tensors: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
    """Return the names of the tensors' types."""
    return {_name(tensor.dtype) for _, tensor in tensors}


def weight() -> str:
    """Return what a share counts for: ``"samples"``, ``"function"`` or ``"sum"``."""
    session = current()
    assert session is not None
    if session.summed:
        return "sum"
    return "function" if session.batch is not None and session.batch.weight is not None else "samples"


def random_and_mixing_layers(models: Sequence[nn.Module]) -> dict[str, list[str]]:
    """Return the layers that make N processes differ from one while they train."""
    layers: dict[str, list[str]] = {"batchnorm": [], "dropout": []}
    for model in models:
        for name, module in model.named_modules():
            if not module.training:
                continue
            if isinstance(module, _BatchNorm) and not isinstance(module, nn.SyncBatchNorm):
                layers["batchnorm"].append(name or "the model")
            elif (isinstance(module, _DropoutNd) and module.p > 0) or (
                isinstance(module, nn.MultiheadAttention | nn.RNNBase) and module.dropout > 0
            ):
                layers["dropout"].append(name or "the model")
    return layers


def streams() -> dict[str, Any]:
    """Return where torch's global random streams stand."""
    states: dict[str, Any] = {"torch": torch.get_rng_state().numpy().tobytes()}
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        states["cuda"] = torch.cuda.get_rng_state().numpy().tobytes()
    return states


def compute_in_float64() -> None:
    """Let a script that was written for float32 compute in float64, from here on.

    New tensors and layers are float64; what a ``DataLoader`` hands out is converted; ``x.float()`` and
    ``module.float()`` give float64. Where a script names ``torch.float32``, or trains on float32 arrays that came
    through no loader, the types will not match, and torch says so.
    """
    torch.set_default_dtype(torch.float64)
    torch.Tensor.float = torch.Tensor.double  # type: ignore[method-assign]
    nn.Module.float = nn.Module.double  # type: ignore[method-assign]
    batches_of = DataLoader.__iter__

    def widen(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return leaf.double() if leaf.dtype == torch.float32 else leaf
        return leaf.astype(np.float64) if leaf.dtype == np.float32 else leaf

    class Widened:
        def __init__(self, batches: Any) -> None:
            self._batches = batches

        def __iter__(self) -> Widened:
            return self

        def __len__(self) -> int:
            return len(self._batches)

        def __next__(self) -> Any:
            return map_leaves(widen, next(self._batches))

    DataLoader.__iter__ = lambda loader: Widened(batches_of(loader))  # type: ignore[method-assign,assignment,return-value]


def _array(tensor: torch.Tensor) -> NDArray[Any]:
    """Return a copy; NumPy does not know all the short types."""
    tensor = tensor.detach()
    if tensor.layout != torch.strided:
        tensor = tensor.to_dense()
    if tensor.is_floating_point() and tensor.dtype.itemsize < 4:
        tensor = tensor.to(torch.float32)
    array: NDArray[Any] = tensor.to("cpu", copy=True).numpy()
    return array


def _name(dtype: torch.dtype) -> str:
    """Return the name of the type that rounds: complex numbers round as their parts do."""
    return {"complex64": "float32", "complex128": "float64"}.get(str(dtype)[6:], str(dtype)[6:])


def _options(optimizer: Any) -> dict[str, Any]:
    return {
        f"{key} of group {number}" if len(optimizer.param_groups) > 1 else key: _plain(value)
        for number, group in enumerate(optimizer.param_groups)
        for key, value in group.items()
        if _plain(value) is not None
    }


def _plain(value: Any) -> Any:
    """Return an option of an optimizer as JSON holds it, None if it is no number."""
    if isinstance(value, bool | int | float):
        return value
    if isinstance(value, list | tuple) and all(isinstance(each, int | float) for each in value):
        return list(value) or None
    if hasattr(value, "numel") and value.numel() == 1:
        return float(value)
    return None
