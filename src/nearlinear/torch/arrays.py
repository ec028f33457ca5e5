"""Turning tensors into a checkpoint's arrays, without a copy until their bytes are asked for, and back."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from nearlinear.checkpoint.tensors import Array
from nearlinear.errors import InputError

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "C64": torch.complex64,
    "C128": torch.complex128,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
}
_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def array_or_none(value: object, label: str) -> Array | None:
    """Return a tensor as an array, None for what is not a tensor."""
    return to_array(value, label) if isinstance(value, torch.Tensor) else None


def to_array(tensor: torch.Tensor, label: str) -> Array:
    """Return ``tensor`` as an array whose bytes come to the CPU when they are asked for."""
    check_plain(tensor, label)

    def data() -> memoryview:
        values = tensor.fetched() if is_elsewhere(tensor) else tensor  # type: ignore[attr-defined]
        flat = values.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
        view: memoryview = flat.view(torch.uint8).numpy().data
        return view

    return Array(_DTYPE_NAMES[tensor.dtype], tuple(tensor.shape), data)


def is_elsewhere(tensor: object) -> bool:
    """Return whether a tensor's values lie on another rank of a pipeline, which is asked for them."""
    return hasattr(tensor, "fetched")


def check_plain(tensor: torch.Tensor, label: str) -> None:
    """Refuse a tensor that has no values, or other values than its plain bytes."""
    if nn.parameter.is_lazy(tensor):
        raise InputError(f"{label} has no shape yet; run the model on a batch first")
    if tensor.is_meta:
        raise InputError(f"{label} is on the meta device and has no values; call model.to_empty(device=...) first")
    if is_traceable_wrapper_subclass(tensor) and not is_elsewhere(tensor):
        raise InputError(f"{label} is a {type(tensor).__name__}; a checkpoint holds plain tensors, convert it first")
    if tensor.layout != torch.strided:
        raise InputError(f"{label} is sparse ({tensor.layout}); a checkpoint holds dense tensors, see .to_dense()")
    if tensor.dtype not in _DTYPE_NAMES:
        raise InputError(f"{label} has type {tensor.dtype}, which a checkpoint cannot hold; convert it first")


def to_tensor(array: Array) -> torch.Tensor:
    """Return the array's bytes, where they are, as a tensor."""
    dtype = DTYPES[array.dtype]
    if array.nbytes == 0:
        return torch.empty(array.shape, dtype=dtype)
    return torch.frombuffer(array.data(), dtype=dtype).reshape(array.shape)


def own_tensor(array: Array) -> torch.Tensor:
    """Return a tensor with memory of its own, for whoever keeps it."""
    return to_tensor(array).clone()
