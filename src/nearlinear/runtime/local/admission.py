"""Turning an update that came into one that may enter the mean, or into the reason why not."""

from __future__ import annotations

import math
import statistics
from collections import deque

import numpy as np

from nearlinear.runtime.local.codecs import Floats

FAR = 10.0  # times the running median: a norm above it is clipped to it
KEPT = 64  # norms that the median is of
ENOUGH = 8  # norms before there is a median to go by


class Rejected(Exception):
    """An update that must not enter the mean; the message says why."""


class Admission:
    """What is remembered of updates to judge the next by.

    Norms are compared per square root of a step: between a random walk (its root) and a straight one (itself) that is
    what a change of the interval leaves standing.

    Example:
        >>> gate = Admission()
        >>> [gate.judge(np.full(4, 0.5, np.float32), steps=1) for _ in range(8)][-1]
        1.0
        >>> gate.judge(np.full(4, 500.0, np.float32), steps=1)
        0.01
    """

    def __init__(self) -> None:
        self._norms: deque[float] = deque(maxlen=KEPT)

    def judge(self, update: Floats, steps: int) -> float:
        """Return the factor at which an update enters: 1, or less where its norm is far above the usual.

        Args:
            update: Parameters and buffers, shape ``(n,)``.
            steps: Steps it was made in.

        Raises:
            Rejected: It is not finite.
        """
        norm = norm_of(update)
        factor = self.factor(norm, steps)
        self.remember(norm * factor, steps)
        return factor

    def factor(self, norm: float, steps: int) -> float:
        """Return the factor at which an update of this norm enters."""
        size = norm / math.sqrt(max(steps, 1))
        usual = statistics.median(self._norms) if len(self._norms) >= ENOUGH else 0.0
        return min(1.0, FAR * usual / size) if usual > 0 and size > 0 else 1.0

    def remember(self, norm: float, steps: int) -> None:
        """Judge later updates by this one too, which entered with this norm; one of nothing tells nothing."""
        if norm > 0:
            self._norms.append(norm / math.sqrt(max(steps, 1)))


def norm_of(values: Floats) -> float:
    """Return the norm of an update, or of a part of one.

    Raises:
        Rejected: It is not finite.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        norm = math.sqrt(float(np.dot(values, values)))
    if not math.isfinite(norm):  # or its square is more than float32 holds
        norm = float(np.linalg.norm(values.astype(np.float64)))
    if not math.isfinite(norm):
        broken = int(len(values) - np.isfinite(values).sum())
        raise Rejected(f"{broken} of its {len(values)} values are not finite")
    return norm
