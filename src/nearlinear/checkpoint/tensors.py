"""Turning named arrays into the bytes of a safetensors file, and such a file into arrays.

    8 bytes          length of the header, little-endian
    header           JSON: name -> dtype, shape, first and last byte; blanks up to a multiple of 64 bytes
    values           array after array, no gaps, little-endian, C order

The format is written here rather than by its library because arrays then go out one at a time, wherever they live, and
are hashed on the way, and because this floor knows no framework. Any safetensors reader opens the file. The format has
no complex128: such an array is stored as float64 with a last dimension of 2 and listed in the file's metadata.

Source: https://github.com/huggingface/safetensors, "Format".
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from nearlinear.errors import CheckpointError, InputError

Buffer = bytes | bytearray | memoryview

ITEM_BYTES = {
    **dict.fromkeys(("C128",), 16),
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 8),
    **dict.fromkeys(("F32", "I32", "U32"), 4),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 2),
    **dict.fromkeys(("I8", "U8", "BOOL", "F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 1),
}
_ALIGNMENT = 64
_METADATA = "__metadata__"
_COMPLEX128 = "complex128"


@dataclass(frozen=True, slots=True)
class Array:
    """Numbers of one type in a box.

    Args:
        dtype: The format's name of their type, a key of ``ITEM_BYTES``.
        shape: Length of each dimension; ``()`` for one number.
        data: Returns their bytes, little-endian and in C order. It is called when they are needed, so that of many
            arrays on another device only one at a time is held here.
    """

    dtype: str
    shape: tuple[int, ...]
    data: Callable[[], Buffer]

    @property
    def nbytes(self) -> int:
        """Bytes that ``data`` returns."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


def chunks(arrays: Mapping[str, Array], metadata: Mapping[str, str]) -> Iterator[Buffer]:
    """Yield a safetensors file piece by piece: the header, then array after array.

    Args:
        arrays: What to store, by name.
        metadata: Texts for the header that describe the file to whoever opens it.

    Raises:
        InputError: An array has a name that the format keeps for itself.
    """
    if _METADATA in arrays:
        raise InputError(f"no array can be called {_METADATA!r} in a safetensors file; rename it")
    # Wide types first, as the format's library does, so that every array starts at a multiple of its item's size: a
    # processor may refuse to load a complex128 from an odd half of its 16 bytes.
    order = sorted(arrays, key=lambda name: (-ITEM_BYTES[arrays[name].dtype], name))
    pairs = [name for name in order if arrays[name].dtype == "C128"]
    notes = {**metadata, **({_COMPLEX128: json.dumps(pairs)} if pairs else {})}
    header: dict[str, Any] = {_METADATA: notes} if notes else {}
    at = 0
    for name in order:
        array = arrays[name]
        dtype, shape = ("F64", [*array.shape, 2]) if name in pairs else (array.dtype, list(array.shape))
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + array.nbytes]}
        at += array.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % _ALIGNMENT)
    yield len(text).to_bytes(8, "little") + text
    for name in order:
        data = memoryview(arrays[name].data())
        assert data.nbytes == arrays[name].nbytes, f"{name}: {data.nbytes} bytes for {arrays[name]}"
        yield data


def parse(view: memoryview, where: str) -> dict[str, Array]:
    """Return the arrays of a safetensors file; their ``data`` are slices of ``view``, so nothing is copied.

    Args:
        view: The whole file.
        where: What to call the file in a message.

    Raises:
        CheckpointError: The bytes are not such a file, or hold a type of number that this version does not know.
    """
    try:
        length = int.from_bytes(view[:8], "little")
        header = json.loads(bytes(view[8 : 8 + length]))
        values = view[8 + length :]
        pairs = json.loads(header.pop(_METADATA, {}).get(_COMPLEX128, "[]"))
        arrays: dict[str, Array] = {}
        for name, entry in header.items():
            dtype, shape, (start, stop) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
            if name in pairs:
                dtype, shape = "C128", shape[:-1]
            if dtype not in ITEM_BYTES:
                raise CheckpointError(
                    f"{where}: {name!r} has numbers of type {dtype}, unknown here; a newer nearlinear reads it"
                )
            array = Array(dtype, shape, lambda start=start, stop=stop: values[start:stop])  # type: ignore[misc]
            if not 0 <= start <= stop <= values.nbytes or stop - start != array.nbytes:
                raise ValueError(f"{name!r} has bytes {start} to {stop} of {values.nbytes} for shape {shape} {dtype}")
            arrays[name] = array
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(f"{where} is not a safetensors file: {error}; load another checkpoint") from error
    return arrays
