"""Turning timed messages into a link's latency and bandwidth."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from nearlinear.core.cluster import Link
from nearlinear.errors import InputError


def fit_alpha_beta(sizes: Sequence[float], times: Sequence[float]) -> Link:
    """Fit ``time = alpha + size / bandwidth`` by least squares on relative errors.

    Relative errors, because a large message's absolute error would drown the latency, which small messages show.

    Args:
        sizes: Bytes per message, shape ``(messages,)``, at least two different ones.
        times: Seconds per message, shape ``(messages,)``.

    Returns:
        The link; a latency that would be negative is taken as the shortest time seen. Its spread is the root of the
        mean square of the relative residuals.

    Raises:
        InputError: There are fewer than two different sizes.

    Example:
        >>> print(fit_alpha_beta([0, 1e6], [1e-3, 9e-3]))
        1 ms, 1 Gbit/s

    Source: Hockney, "The communication challenge for MPP", Parallel Computing 20, 1994 (the alpha-beta model).
    """
    if len(set(sizes)) < 2:
        raise InputError(f"a link needs messages of two sizes to be fitted, got {sorted(set(sizes))} bytes")
    size, time = np.asarray(sizes, dtype=float), np.maximum(np.asarray(times, dtype=float), 1e-9)
    matrix = np.stack([np.ones_like(size), size], axis=1) / time[:, None]
    (alpha, per_byte), *_ = np.linalg.lstsq(matrix, np.ones_like(time), rcond=None)
    if alpha <= 0:
        alpha = float(time.min())
        # What is left for the bytes, so that the large messages still take the time they took.
        per_byte = float(np.dot(size / time, (time - alpha) / time) / np.dot(size / time, size / time))
    per_byte = max(float(per_byte), 1e-12)
    residuals = (alpha + per_byte * size) / time - 1.0
    return Link(float(alpha), 1.0 / per_byte, float(np.sqrt(np.mean(residuals**2))))
