"""Turning parameters and buffers, laid end to end, into the bytes of an update or of a state, and back.

    outer parameters     |  parameters, float32  |  buffers  |
    an update            |  as the codec says    |  float32  |     buffers are few, and running variances delicate

``hash_of`` is compared every round: members that hold the same outer parameters hold the same bits.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np

from nearlinear.runtime.local.codecs import Bytes, Data, Feedback, Floats, decode, encode, nbytes

VALUES_PER_S = 2e7  # what any machine encodes, decodes and hashes


@dataclass(frozen=True, slots=True)
class Sizes:
    """What a member trains, as numbers.

    Args:
        parameters: Values in all parameters together.
        buffers: Values in all buffers that are averaged.
    """

    parameters: int
    buffers: int = 0

    @property
    def total(self) -> int:
        """Values in all."""
        return self.parameters + self.buffers

    @property
    def state_bytes(self) -> int:
        """Bytes of a state."""
        return 4 * self.total

    def update_bytes(self, codec: str) -> int:
        """Return the bytes of an update."""
        return nbytes(codec, self.parameters) + 4 * self.buffers

    def encode(self, codec: str, update: Floats, feedback: Feedback | None = None) -> Bytes:
        """Return an update as bytes.

        Args:
            codec: For the parameters.
            update: Shape ``(total,)``.
            feedback: What encodes the parameters instead, if it has that codec.
        """
        own = feedback is not None and feedback.codec == codec
        values = update[: self.parameters]
        head = feedback.encode(values) if own and feedback else encode(codec, values)
        return np.concatenate([head, encode("fp32", update[self.parameters :])])

    def decode(self, codec: str, data: Data) -> Floats:
        """Return the update in ``data``, shape ``(total,)``.

        Raises:
            Undecodable: It holds none.
        """
        head = nbytes(codec, self.parameters)
        raw = np.frombuffer(data, np.uint8)
        return np.concatenate(
            [decode(codec, raw[:head], self.parameters), decode("fp32", raw[head:], self.buffers)], dtype=np.float32
        )


def silence(limit_s: float, sizes: Sizes) -> float:
    """Return after how long a silent peer is gone: it beats between two pieces of work, whose time grows with size."""
    return limit_s + sizes.total / VALUES_PER_S


def hash_of(outer: Floats) -> str:
    """Return what two members compare in place of their outer parameters."""
    # Of those that hashlib has, the fastest on processors with instructions for it, as most have.
    return hashlib.sha256(np.ascontiguousarray(outer, "<f4").view(np.uint8).data).hexdigest()[:32]
