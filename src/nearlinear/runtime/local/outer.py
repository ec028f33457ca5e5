"""Turning a round's updates into the mean, encoded once for all, and the outer parameters that everybody then holds.

    outer ← outer − decode(encode(mean of the updates, weighted by samples))

The sum is in float32 and in the order of the members' numbers. What all apply is the decoded mean, the same bytes to
the same bits, so all hold the same bits after it; what encoding lost is added to the next mean.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from nearlinear.runtime.local.admission import Admission
from nearlinear.runtime.local.codecs import Bytes, Feedback, Floats
from nearlinear.runtime.local.update import Sizes, hash_of


@dataclass(frozen=True, slots=True)
class Mean:
    """What a round brought.

    Args:
        payload: The mean, encoded; empty where nobody had learnt anything.
        codec: How.
        samples: What it is of.
        came: When each update in it came, by member.
    """

    payload: Bytes
    codec: str
    samples: float
    came: dict[int, float]


@dataclass(frozen=True, slots=True)
class _Update:
    payload: memoryview
    codec: str
    samples: float
    factor: float
    came: float


class Outer:
    """The outer parameters, and the updates of the round in hand.

    Attributes:
        values: The outer parameters.
        hash: Of them.
        gate: What is remembered of updates, to judge others by.

    Args:
        sizes: How much is trained.
        codec: Of means that are not sent exactly.
        values: What the run begins with, shape ``(sizes.total,)``.

    Example:
        >>> outer = Outer(Sizes(2), "fp32", np.array([1, 1], np.float32))
        >>> for member, change in enumerate(([1, 0], [0, 1])):
        ...     payload = memoryview(np.array(change, np.float32).tobytes())
        ...     factor = outer.take(member, payload, "fp32", samples=1.0, steps=1, now=0.0)
        >>> outer.close([0, 1]).samples, outer.values.tolist()
        (2.0, [0.5, 0.5])
    """

    def __init__(self, sizes: Sizes, codec: str, values: Floats) -> None:
        self.values, self.hash = values, hash_of(values)
        self._sizes, self._codec = sizes, codec
        self.gate = Admission()
        self._feedback = Feedback(codec, sizes.parameters)
        self._updates: dict[int, _Update] = {}

    def take(self, member: int, payload: memoryview, codec: str, *, samples: float, steps: int, now: float) -> float:
        """Take in the update of a member, in place of an earlier one of this round; return the factor it enters at.

        Raises:
            Undecodable: Such an update cannot be encoded to these bytes.
            Rejected: It must not enter the mean.
        """
        factor = self.gate.judge(self._sizes.decode(codec, payload), steps) if samples else 1.0
        self._updates[member] = _Update(payload, codec, samples, factor, now)
        return factor

    def adopt(self, values: Floats, hash_: str) -> None:
        """Go on to the next round with outer parameters that were made elsewhere, in direct exchanges."""
        self.values, self.hash = values, hash_
        self._updates.clear()

    def forget(self) -> None:
        """Let go of all updates: they will be sent again."""
        self._updates.clear()

    def drop(self, member: int) -> None:
        """Let go of a member's update."""
        self._updates.pop(member, None)

    def close(self, counted: Sequence[int]) -> Mean:
        """Go on to the next round with the updates of these members."""
        updates = {member: self._updates[member] for member in sorted(counted)}
        self._updates.clear()
        came = {member: update.came for member, update in updates.items()}
        samples = sum(update.samples for update in updates.values())
        if not samples:
            return Mean(np.empty(0, np.uint8), "fp32", 0.0, came)
        mean = np.zeros(self._sizes.total, np.float32)
        for update in updates.values():
            if update.samples:
                part = self._sizes.decode(update.codec, update.payload)
                mean += part * np.float32(update.factor * update.samples / samples)
        # The exact mean of one that sent it exactly loses nothing on the way back either.
        codec = "fp32" if all(update.codec == "fp32" for update in updates.values()) else self._codec
        payload = self._sizes.encode(codec, mean, self._feedback)
        self._feedback.settle(counted=codec == self._codec)
        self.values = self.values - self._sizes.decode(codec, payload)
        self.hash = hash_of(self.values)
        return Mean(payload, codec, samples, came)
