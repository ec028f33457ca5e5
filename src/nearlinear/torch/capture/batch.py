"""Finding the batch in what a model is called with, and giving it another number of samples."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from nearlinear.errors import InputError


@dataclass(frozen=True)
class Call:
    """What a model is called with.

    Args:
        args: The positional arguments.
        kwargs: The named ones.
        samples: Samples in the batch.
        dim: The dimension along which most of the batch's tensors hold them.
    """

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    samples: int
    dim: int

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None, dim: int) -> Call:
        """Return the call, its samples counted along ``dim`` of the first tensor that has it.

        Raises:
            InputError: There is no such tensor.
        """
        args, kwargs = _plain((args, dict(kwargs or {})))
        sizes = [leaf.shape[dim] for leaf in pytree.tree_leaves((args, kwargs)) if _has(leaf, dim)]
        if not sizes:
            raise InputError(
                f"the batch holds no tensor with a dimension {dim}, along which its samples could be counted; "
                "batch_dim says which dimension that is"
            )
        return cls(args, kwargs, sizes[0], dim)

    def along(self, leaf: object) -> int | None:
        """Return the dimension along which ``leaf`` holds the samples; None where it is the same for all of them.

        A tensor that is too short for ``dim`` (the labels beside inputs of shape ``(time, batch, features)``) holds
        them along its first one.
        """
        if _has(leaf, self.dim):
            return self.dim if leaf.shape[self.dim] == self.samples else None  # type: ignore[attr-defined]
        return 0 if _has(leaf, 0) and leaf.shape[0] == self.samples else None  # type: ignore[attr-defined]

    def with_samples(self, samples: int) -> Call:
        """Return a call with ``samples`` samples: the first ones, or all of them again and again."""
        if samples == self.samples:
            return self

        def resized(leaf: Any) -> Any:
            dim = self.along(leaf)
            if dim is None:
                return leaf
            rows = torch.arange(samples, device=leaf.device) % self.samples
            return leaf.detach().index_select(dim, rows).requires_grad_(leaf.requires_grad)

        args, kwargs = pytree.tree_map(resized, (self.args, dict(self.kwargs)))
        return Call(args, kwargs, samples, self.dim)

    def rows(self, begin: int, end: int) -> Call:
        """Return a call with the samples from ``begin`` to before ``end``; differentiable."""

        def cut(leaf: Any) -> Any:
            dim = self.along(leaf)
            return leaf if dim is None else leaf.narrow(dim, begin, end - begin)

        args, kwargs = pytree.tree_map(cut, (self.args, dict(self.kwargs)))
        return Call(args, kwargs, end - begin, self.dim)

    def on(self, device: torch.device) -> Call:
        """Return the call with its tensors on ``device``."""
        args, kwargs = pytree.tree_map_only(torch.Tensor, lambda leaf: leaf.to(device), (self.args, dict(self.kwargs)))
        return Call(args, kwargs, self.samples, self.dim)


def _has(leaf: object, dim: int) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.ndim > dim


def _plain(tree: Any) -> Any:
    """Turn mappings that a tracer does not know (transformers' BatchEncoding) into dictionaries."""
    if isinstance(tree, tuple) and type(tree) is tuple:
        return tuple(map(_plain, tree))
    if isinstance(tree, list):
        return [_plain(each) for each in tree]
    if isinstance(tree, Mapping):
        return tree if _known(tree) and type(tree) is not dict else {key: _plain(each) for key, each in tree.items()}
    return tree


def _known(tree: object) -> bool:
    return type(tree) in pytree.SUPPORTED_NODES
