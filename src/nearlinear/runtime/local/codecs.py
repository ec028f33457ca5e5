"""Turning an update (a flat float32 vector) into few bytes, and those bytes into the same floats on every machine.

codec    bytes per value    what is lost
-----    ---------------    ---------------------------------------------------------------------------
fp32     4                  nothing
bf16     2                  16 bits of the mantissa
int8     1 + 1/64           in blocks of 256, what is below 1/254 of the block's largest value
int4     1/2 + 1/64         in blocks of 256, what is below 1/14 of it
topk     6/32               all but the largest thirty-second of the values

A vector of n values has one size in bytes per codec, so a receiver knows the length before it takes the first byte.
Decoding is one float32 multiplication per value, rounded as IEEE 754 says: all machines get the same bits. What a codec
leaves out is not lost when ``Feedback`` adds it to the next update.

Source: error feedback: F. Seide et al., "1-Bit Stochastic Gradient Descent", 2014, doi:10.21437/Interspeech.2014-274;
S. P. Karimireddy et al., "Error Feedback Fixes SignSGD", 2019, arXiv 1901.09847.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nearlinear.errors import InputError

Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]
Data = bytes | bytearray | memoryview | Bytes

BLOCK = 256  # values that share a scale
SPARSE = 32  # topk keeps one value in so many
LONGEST = 2**32  # a place in the vector is told in four bytes

CODECS = ("fp32", "bf16", "int8", "int4", "topk")


class Undecodable(Exception):
    """Bytes that no encoder wrote."""


def nbytes(codec: str, count: int) -> int:
    """Return how many bytes ``count`` values take.

    Raises:
        InputError: There is no such codec, or the vector is longer than a place can tell.

    Example:
        >>> [nbytes(codec, 1024) for codec in CODECS]
        [4096, 2048, 1040, 528, 192]
    """
    if not 0 <= count < LONGEST:
        raise InputError(f"a vector of {count} values; one may have up to {LONGEST - 1}")
    return _of(codec).nbytes(count)


def encode(codec: str, values: Floats) -> Bytes:
    """Return ``values`` as bytes.

    Args:
        codec: One of ``CODECS``.
        values: Finite numbers, shape ``(n,)``.

    Returns:
        Shape ``(nbytes(codec, n),)``.
    """
    out = np.empty(nbytes(codec, len(values)), np.uint8)
    _of(codec).encode(np.ascontiguousarray(values, np.float32), out)
    return out


def decode(codec: str, data: Data, count: int) -> Floats:
    """Return the ``count`` values in ``data``; bytes from elsewhere may hold infinities, which is for others to judge.

    Raises:
        Undecodable: They are not ``nbytes(codec, count)`` bytes, or tell impossible places.
    """
    raw = np.frombuffer(data, np.uint8)
    if len(raw) != nbytes(codec, count):
        raise Undecodable(f"{len(raw)} bytes for {count} values as {codec}, which take {nbytes(codec, count)}")
    return _of(codec).decode(raw, count)


class Feedback:
    """An encoder that adds to every update what its codec left out of the ones before.

    Args:
        codec: One of ``CODECS``.
        count: Values per update.

    Example:
        >>> sender = Feedback("topk", 64)
        >>> update = np.arange(64, dtype=np.float32)
        >>> received = np.zeros(64, np.float32)
        >>> for _ in range(64):
        ...     received += decode("topk", sender.encode(update), 64)
        ...     sender.settle(counted=True)
        >>> bool(np.abs(received / 64 - update).max() < 32)
        True
    """

    def __init__(self, codec: str, count: int) -> None:
        self.codec, self._count = codec, count
        self._left_out: Floats | None = None  # of the updates that counted
        self._next: Floats | None = None  # and with the one under way

    def encode(self, values: Floats) -> Bytes:
        """Return ``values`` and what was left out before as bytes; ``settle`` must follow."""
        if self.codec == "fp32":
            return encode(self.codec, values)
        whole = values if self._left_out is None else values + self._left_out
        data = encode(self.codec, whole)
        self._next = whole - decode(self.codec, data, self._count)
        return data

    def encode_part(self, values: Floats, at: slice) -> tuple[Bytes, Floats]:
        """Return a part of an update as bytes, and the values in them; ``settle`` must follow the last part.

        What is owed to places that no part covers stays owed.

        Args:
            values: Shape ``(at.stop - at.start,)``.
            at: Where in the update they are.
        """
        if self.codec == "fp32":
            return encode(self.codec, values), values
        whole = values if self._left_out is None else values + self._left_out[at]
        data = encode(self.codec, whole)
        decoded = decode(self.codec, data, len(values))
        if self._next is None:
            self._next = np.zeros(self._count, np.float32) if self._left_out is None else self._left_out.copy()
        self._next[at] = whole - decoded
        return data, decoded

    def settle(self, *, counted: bool) -> None:
        """Say whether the update reached the mean; of one that did not, nothing is owed."""
        if counted and self._next is not None:
            self._left_out = self._next
        self._next = None


# ---- the codecs


@dataclass(frozen=True, slots=True)
class _Codec:
    nbytes: Callable[[int], int]
    encode: Callable[[Floats, Bytes], None]  # into bytes of the right length
    decode: Callable[[Bytes, int], Floats]


def _of(codec: str) -> _Codec:
    if codec not in _CODECS:
        raise InputError(f"unknown codec {codec!r}; choose one of: {', '.join(CODECS)}")
    return _CODECS[codec]


def _to_fp32(values: Floats, out: Bytes) -> None:
    out[:] = values.astype("<f4", copy=False).view(np.uint8)


def _from_fp32(raw: Bytes, count: int) -> Floats:
    return raw.view("<f4").astype(np.float32)


def _halved(values: Floats) -> NDArray[np.uint16]:
    """Return the upper half of each float32, rounded to nearest, ties to even: bfloat16."""
    bits = values.view(np.uint32)
    return ((bits + (0x7FFF + (bits >> 16 & 1))) >> 16).astype("<u2")


def _whole(halves: NDArray[Any]) -> Floats:
    return (halves.astype(np.uint32) << 16).view(np.float32)


def _to_bf16(values: Floats, out: Bytes) -> None:
    out[:] = _halved(values).view(np.uint8)


def _from_bf16(raw: Bytes, count: int) -> Floats:
    return _whole(raw.view("<u2"))


def _blocks(count: int) -> int:
    return -(-count // BLOCK)


def _quantised(values: Floats, levels: int) -> tuple[Floats, NDArray[np.int8]]:
    """Return each block's scale, and the values as multiples of it, -levels to levels."""
    count, blocks = len(values), _blocks(len(values))
    if count % BLOCK:
        values = np.concatenate([values, np.zeros(blocks * BLOCK - count, np.float32)])
    rows = values.reshape(blocks, BLOCK)
    scales = np.maximum(rows.max(axis=1), -rows.min(axis=1)) / np.float32(levels)
    multiples = rows / np.where(scales > 0, scales, np.float32(1))[:, None]
    np.rint(multiples, out=multiples)
    np.clip(multiples, -levels, levels, out=multiples)  # of the smallest floats a quotient may be larger
    return scales.astype("<f4", copy=False), multiples.astype(np.int8).reshape(-1)[:count]


def _scaled(scales: Floats, multiples: NDArray[np.int8]) -> Floats:
    count = len(multiples)
    values = multiples.astype(np.float32)
    with np.errstate(invalid="ignore"):  # 0 times an infinity that somebody sent
        whole = count - count % BLOCK
        values[:whole].reshape(-1, BLOCK)[:] *= scales[: whole // BLOCK, None]
        values[whole:] *= scales[whole // BLOCK :].repeat(count - whole)[: count - whole]
    return values


def _to_int8(values: Floats, out: Bytes) -> None:
    scales, multiples = _quantised(values, 127)
    out[: scales.nbytes], out[scales.nbytes :] = scales.view(np.uint8), multiples.view(np.uint8)


def _from_int8(raw: Bytes, count: int) -> Floats:
    head = 4 * _blocks(count)
    return _scaled(raw[:head].view("<f4"), raw[head:].view(np.int8))


def _to_int4(values: Floats, out: Bytes) -> None:
    scales, multiples = _quantised(values, 7)
    nibbles = np.full(len(multiples) + len(multiples) % 2, 8, np.uint8)
    nibbles[: len(multiples)] = multiples + np.int8(8)
    out[: scales.nbytes], out[scales.nbytes :] = scales.view(np.uint8), nibbles[0::2] | nibbles[1::2] << 4


def _from_int4(raw: Bytes, count: int) -> Floats:
    head = 4 * _blocks(count)
    nibbles = np.empty((len(raw) - head, 2), np.uint8)
    nibbles[:, 0], nibbles[:, 1] = raw[head:] & 15, raw[head:] >> 4
    return _scaled(raw[:head].view("<f4"), nibbles.reshape(-1)[:count].view(np.int8) - np.int8(8))


def _kept(count: int) -> int:
    return math.ceil(count / SPARSE)


def _to_topk(values: Floats, out: Bytes) -> None:
    kept = _kept(len(values))
    if not kept:
        return
    places = np.argpartition(np.abs(values), len(values) - kept)[len(values) - kept :]
    places.sort()
    out[: 4 * kept] = places.astype("<u4").view(np.uint8)
    out[4 * kept :] = _halved(values[places]).view(np.uint8)


def _from_topk(raw: Bytes, count: int) -> Floats:
    kept = _kept(count)
    places = raw[: 4 * kept].view("<u4")
    if kept and (places[-1] >= count or (places[1:] <= places[:-1]).any()):
        raise Undecodable(f"places that do not rise, or beyond the last of {count} values")
    values = np.zeros(count, np.float32)
    values[places] = _whole(raw[4 * kept :].view("<u2"))
    return values


_CODECS = {
    "fp32": _Codec(lambda count: 4 * count, _to_fp32, _from_fp32),
    "bf16": _Codec(lambda count: 2 * count, _to_bf16, _from_bf16),
    "int8": _Codec(lambda count: 4 * _blocks(count) + count, _to_int8, _from_int8),
    "int4": _Codec(lambda count: 4 * _blocks(count) + (count + 1) // 2, _to_int4, _from_int4),
    "topk": _Codec(lambda count: 6 * _kept(count), _to_topk, _from_topk),
}
