"""Turning a model on the meta device into one whose own tensors have values, without ever holding the rest."""

from __future__ import annotations

from collections.abc import Callable, Set
from typing import Any

import torch
from torch import nn

from nearlinear.errors import InputError


@torch.no_grad()
def materialise(model: nn.Module, device: torch.device, keep: Set[str]) -> None:
    """Initialise module after module as its author does, and give back at once what is not kept.

    Every rank draws for every module, so that each draws what one process would; one module is held at a time beside
    what is kept. A model that is not on the meta device is left alone.

    Args:
        model: Its modules have ``reset_parameters()``, as those of torch do, or it has ``_init_weights(module)``, as
            those of transformers do.
        device: Where to.
        keep: Names of the parameters and buffers that stay here.

    Raises:
        InputError: A module on the meta device cannot initialise itself; nothing was changed.
    """
    modules = [(path, module) for path, module in model.named_modules() if any(map(_is_meta, _own(module)))]
    by_model: Callable[[nn.Module], Any] | None = getattr(model, "_init_weights", None)
    for path, module in modules:
        if by_model is None and not callable(getattr(module, "reset_parameters", None)):
            raise InputError(
                f"{path or type(model).__name__} ({type(module).__name__}) is on the meta device and has no "
                "reset_parameters() that would initialise it; write one, or create the model on its device"
            )
    kept = {id(tensor) for name, tensor in [*model.named_parameters(), *model.named_buffers()] if name in keep}
    for _, module in modules:
        fresh = [tensor for tensor in _own(module) if _is_meta(tensor)]
        for tensor in fresh:
            _fill(tensor, device)
        if by_model is not None:
            by_model(module)
        else:
            module.reset_parameters()
        for tensor in fresh:
            if id(tensor) not in kept:
                tensor.untyped_storage().resize_(0)


def _own(module: nn.Module) -> list[torch.Tensor]:
    return [each for each in [*module._parameters.values(), *module._buffers.values()] if each is not None]


def _is_meta(tensor: torch.Tensor) -> bool:
    return tensor.is_meta


def _fill(tensor: torch.Tensor, device: torch.device) -> None:
    """Give a tensor on the meta device memory elsewhere; the object stays, since an optimizer may hold it."""
    room = torch.empty_like(tensor, device=device)
    made = nn.Parameter(room, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else room
    torch.utils.swap_tensors(tensor, made)  # type: ignore[no-untyped-call]
