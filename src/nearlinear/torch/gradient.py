"""Standing before ``p.grad``: whoever reads it gets the gradient of one process.

``nn.Parameter.grad`` becomes a property; behind it is the slot of ``torch.Tensor`` itself, which ``get``, ``put`` and
autograd use. docs/decisions/0002 says what else was tried.
"""

from __future__ import annotations

import weakref
from typing import Any, Protocol

import torch
from torch import nn

_slot: Any = torch.Tensor.grad
get, put, _delete = _slot.__get__, _slot.__set__, _slot.__delete__


class Owner(Protocol):
    """What combines a parameter's gradients."""

    @property
    def pending(self) -> bool:
        """Whether ``p.grad`` holds this rank's own gradients."""

    def read(self) -> None:
        """Combine them, because somebody reads them."""


_owners: dict[int, weakref.ref[Owner]] = {}


def own(parameter: torch.Tensor, owner: Owner) -> None:
    """Let ``owner`` combine the gradient of ``parameter`` before it is read."""
    nn.Parameter.grad = property(_read, _write, _drop)  # type: ignore[assignment]
    _owners[id(parameter)] = weakref.ref(owner)
    weakref.finalize(parameter, _owners.pop, id(parameter), None)


def _read(parameter: torch.Tensor) -> torch.Tensor | None:
    reference = _owners.get(id(parameter))
    if reference is not None:
        owner = reference()
        if owner is not None and owner.pending:
            owner.read()
    return get(parameter)  # type: ignore[no-any-return]


def _write(parameter: torch.Tensor, gradient: torch.Tensor | None) -> None:
    put(parameter, gradient)


def _drop(parameter: torch.Tensor) -> None:
    _delete(parameter)
