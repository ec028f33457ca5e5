"""Turning whole tensors into this rank's rows of them, and rows back into whole tensors.

Rank ``r`` of ``N`` holds the rows that ``torch.chunk(whole, N)[r]`` has: the first ranks as many as ``ceil(n / N)``,
the last ones fewer or none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import nn

from nearlinear.checkpoint.tensors import Array
from nearlinear.torch.arrays import own_tensor, to_array, to_tensor
from nearlinear.torch.collectives import Group

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor


@dataclass(frozen=True, slots=True)
class Copies:
    """The ranks that hold the same rows, one of each copy of the parameters.

    Args:
        group: Carries tensors from where they are.
        control: Carries what is on the CPU.
    """

    group: Group
    control: Group


# The ranks that share a copy as torch sees them, what carries their rows, and their counterparts in other copies.
meshes: list[tuple[DeviceMesh, Group, Copies | None]] = []


def _group_of(tensor: DTensor) -> Group:
    return next(group for mesh, group, _ in meshes if mesh == tensor.device_mesh)


def is_sharded(tensor: object) -> TypeGuard[DTensor]:
    """Return whether ``tensor`` is this rank's rows of a tensor (without importing what no script may need)."""
    return isinstance(tensor, torch.Tensor) and hasattr(tensor, "placements")


def local(tensor: DTensor) -> torch.Tensor:
    """Return this rank's rows."""
    rows: torch.Tensor = tensor._local_tensor.detach()
    return rows


@torch.no_grad()
def whole(tensor: torch.Tensor, what: str = "gathering a tensor") -> torch.Tensor:
    """Return the whole tensor, on every rank; all ranks call it. Any other tensor is returned as it is."""
    if not is_sharded(tensor):
        return tensor
    if not tensor.placements[0].is_shard(0):  # a norm, say
        complete: torch.Tensor = tensor.full_tensor()
        return complete
    group = _group_of(tensor)
    rows, n = local(tensor), tensor.shape[0]
    ranks = len(group.ranks)
    most = -(-n // ranks)
    padded = rows.new_zeros((most, *tensor.shape[1:]))
    padded[: rows.shape[0]] = rows
    gathered = rows.new_empty((ranks * most, *tensor.shape[1:]))
    # Complex numbers travel as pairs; missing rows are at the end, so that the whole is the beginning.
    out, mine = (torch.view_as_real(t) if t.is_complex() else t for t in (gathered, padded))
    group.wait(group.start_gather(out.view(-1), mine.reshape(-1), what), what)
    return gathered[:n]


@torch.no_grad()
def rows_of(values: torch.Tensor, like: DTensor) -> DTensor:
    """Return this rank's rows of ``values``, in memory of their own, placed like ``like``.

    Args:
        values: The whole tensor, shape as ``like``'s; the same on every rank.
        like: The tensor whose rows this rank holds.
    """
    from torch.distributed.tensor import DTensor

    mesh: Any = like.device_mesh
    most = -(-values.shape[0] // mesh.size())
    first = min(mesh.get_local_rank() * most, values.shape[0])
    rows = values[first : first + most].to(local(like).device, copy=True).contiguous()
    return wrap(rows, like, DTensor)


def wrap(rows: torch.Tensor, like: DTensor, kind: Any) -> DTensor:
    """Return ``rows``, this rank's, as a tensor of the class ``kind`` placed like ``like``."""
    stride = torch.empty(like.shape, device="meta").stride()  # of rows one after the other, as they are divided
    wrapped: DTensor = kind.from_local(
        rows, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=stride
    )
    return wrapped


@torch.no_grad()
def total_norm(tensors: Sequence[torch.Tensor], norm_type: float = 2.0) -> torch.Tensor:
    """Return the norm of all tensors as one vector, a plain number that every rank may read alone.

    Args:
        tensors: Some of them sharded, the others equal on all ranks; all ranks call it.
        norm_type: Order of the norm, ``inf`` too.
    """
    sharded = [tensor for tensor in tensors if is_sharded(tensor)]
    group, device = _group_of(sharded[0]), local(sharded[0]).device
    norms = [_norm(local(tensor), norm_type).to(device) for tensor in sharded]
    first = group.rank == group.ranks[0]
    norms += [_norm(tensor, norm_type).to(device) for tensor in tensors if not is_sharded(tensor) and first]
    parts = group.all_gather(_norm(torch.stack(norms), norm_type), "the norm of the gradients")
    return _norm(torch.stack(parts), norm_type)


@torch.no_grad()
def found_anywhere(tensors: Sequence[torch.Tensor], found: torch.Tensor) -> None:
    """Set ``found`` where some rank has; all ranks call it if ``tensors`` are sharded."""
    sharded = next((tensor for tensor in tensors if is_sharded(tensor)), None)
    if sharded is not None:
        found.copy_(torch.stack(_group_of(sharded).all_gather(found, "the check for overflows")).amax(0))


def _norm(tensor: torch.Tensor, norm_type: float) -> torch.Tensor:
    if tensor.numel() == 0:  # of no rows; the largest of none would be an error
        return tensor.new_zeros((), dtype=torch.zeros((), dtype=tensor.dtype).abs().dtype)
    norm: torch.Tensor = torch.linalg.vector_norm(tensor, norm_type)
    return norm


# ---- in a checkpoint

_reading = False  # a state_dict for a checkpoint, which knows rows


def reading_plain_state() -> bool:
    """Return whether it is ``state_dict`` below that asks."""
    return _reading


def state_dict(module: nn.Module) -> dict[str, Any]:
    """Return the module's ``state_dict()`` for a checkpoint."""
    global _reading
    _reading = True
    try:
        state: dict[str, Any] = module.state_dict()
        return state
    finally:
        _reading = False


class ShardedArray(Array):
    """A sharded tensor as a checkpoint's array: asking for its bytes takes all ranks, at the same time."""


def array_of(tensor: torch.Tensor, label: str) -> Array:
    """Return ``tensor`` as an array, the whole one."""
    if not is_sharded(tensor):
        return to_array(tensor, label)
    dtype = to_array(local(tensor), label).dtype
    return ShardedArray(dtype, tuple(tensor.shape), lambda: to_array(whole(tensor, f"gathering {label}"), label).data())


def array_or_none(value: object, label: str) -> Array | None:
    """Return a tensor as an array, None for what is not a tensor."""
    return array_of(value, label) if isinstance(value, torch.Tensor) else None


def tensor_for(array: Array, like: torch.Tensor) -> torch.Tensor:
    """Return the array for whoever copies it to where ``like`` is: its bytes where they are, or this rank's rows."""
    tensor = to_tensor(array)
    return rows_of(tensor, like) if is_sharded(like) and tensor.shape == like.shape else tensor


def state_of(array: Array, parameter: torch.Tensor) -> torch.Tensor:
    """Return the array as state of ``parameter``, in memory of its own; this rank's rows where it has as many."""
    if is_sharded(parameter) and array.shape == tuple(parameter.shape):
        return rows_of(to_tensor(array), parameter)
    return own_tensor(array)


def memory(tensor: torch.Tensor) -> Any:
    """Return what two tensors have in common exactly if they are one: a tied weight under two names."""
    if tensor.numel() == 0:
        return id(tensor)
    if is_sharded(tensor):  # a rank may have none of its rows; their memory is padded, and so it has some
        return tensor.device, local(tensor).untyped_storage().data_ptr(), tensor.dtype, tensor.shape
    return tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


def copy_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy that ``load_state_dict`` takes: on the CPU, or this rank's rows where they are."""
    if is_sharded(tensor):
        return wrap(local(tensor).clone(), tensor, type(tensor))
    return tensor.to("cpu", copy=True)
