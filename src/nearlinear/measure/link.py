"""Turning timed messages into a link's latency and bandwidth."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from nearlinear.errors import InputError
from nearlinear.units import bandwidth, seconds


@dataclass(frozen=True, slots=True)
class Link:
    """A link as messages meet it: ``latency + bytes / bandwidth`` seconds each.

    Args:
        latency: Seconds.
        bandwidth: Bytes per second.
    """

    latency: float
    bandwidth: float

    def __str__(self) -> str:
        return f"{seconds(self.latency)}, {bandwidth(self.bandwidth)}"


def fit_alpha_beta(sizes: Sequence[float], times: Sequence[float]) -> Link:
    """Fit ``time = alpha + size / bandwidth`` by least squares on relative errors.

    Relative errors, because a large message's absolute error would drown the latency, which small messages show.

    Args:
        sizes: Bytes per message, shape ``(messages,)``, at least two different ones.
        times: Seconds per message, shape ``(messages,)``.

    Returns:
        The link; a latency that would be negative is taken as the shortest time seen.

    Raises:
        InputError: There are fewer than two different sizes.

    Example:
        >>> print(fit_alpha_beta([0, 1e6], [1e-3, 9e-3]))
        1 ms, 1 Gbit/s

    Source: Hockney, "The communication challenge for MPP", Parallel Computing 20, 1994 (the alpha-beta model).
    """
    if len(set(sizes)) < 2:
        raise InputError(f"a link needs messages of two sizes to be fitted, got {sorted(set(sizes))} bytes")
    size, time = np.asarray(sizes, dtype=float), np.asarray(times, dtype=float)
    weight = 1.0 / np.maximum(time, 1e-9)
    matrix = np.stack([np.ones_like(size), size], axis=1) * weight[:, None]
    (alpha, per_byte), *_ = np.linalg.lstsq(matrix, time * weight, rcond=None)
    if alpha <= 0:
        alpha = float(time.min())
    return Link(float(alpha), 1.0 / max(float(per_byte), 1e-12))
