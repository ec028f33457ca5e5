"""Turning the tensors and losses of one step on one process and on N into how far apart they are.

Errors are relative to the largest magnitude of the tensor on one process, or to a thousandth of the largest magnitude
among all tensors of that kind in that step, whichever is more. So a gradient that is zero but for rounding (that of a
bias before BatchNorm, say) is not judged against itself. NaN equals NaN.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from nearlinear.testing.record import Arrays, Step

FLOOR = 1e-3


class Gap(NamedTuple):
    """How far apart two tensors are: the relative error, whose it is, and what to say where no number can."""

    error: float
    name: str = ""
    detail: str = ""


def loss_gap(one: Step, many: Step) -> tuple[float | None, float | None, Gap]:
    """Return the loss of one process, of many, and how far apart they are, pass by pass."""
    passes = len(one.losses[0]) if one.losses else 0
    for rank, losses in enumerate(many.losses):
        if len(losses) != passes:
            detail = f"comes from {passes} backward passes on one process and {len(losses)} on rank {rank}"
            return None, None, Gap(math.inf, detail=detail)
    if not passes:
        return None, None, Gap(0.0)
    a, b = loss_by_pass(one), loss_by_pass(many)
    floor = FLOOR * max(map(magnitude, a))
    gap = Gap(max(_relative(distance(x, y), magnitude(x), floor) for x, y in zip(a, b, strict=True)))
    return float(sum(a)), float(sum(b)), gap


def widest_gap(one: Arrays, many: Arrays, ranks: int) -> Gap:
    """Return the gap of the tensor that differs most; ``many`` is of ``ranks`` processes."""
    distances: dict[str, tuple[float, float]] = {}
    for name in [*one, *(name for name in many if name not in one)]:
        if name not in many or name not in one:
            where = "one process" if name in one else f"{ranks} processes"
            return Gap(math.inf, name, f"exists on {where} only")
        a, b = one[name], many[name]
        if a.shape != b.shape:
            return Gap(math.inf, name, f"has shape {a.shape} on one process and {b.shape} on {ranks}")
        distances[name] = distance(a, b), magnitude(a)
    floor = FLOOR * max((size for _, size in distances.values()), default=0.0)
    gaps = [Gap(_relative(*each, floor), name) for name, each in distances.items()]
    return max(gaps, key=lambda gap: gap.error, default=Gap(0.0))


def loss_by_pass(step: Step) -> list[NDArray[Any]]:
    """Return the loss of each backward pass: the sum of the ranks', each times its weight."""
    # A share of weight zero may have any loss, NaN too (a mean over no tokens), and it does not count.
    return [
        np.asarray(sum(scale * loss if scale else 0.0 for loss, scale in ranks))
        for ranks in zip(*step.losses, strict=True)
    ]


def distance(a: NDArray[Any], b: NDArray[Any]) -> float:
    """Return the largest difference between two elements; infinite where one alone is NaN or infinite."""
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    if same.all():
        return 0.0
    wide = np.result_type(a.dtype, np.float64)
    with np.errstate(invalid="ignore"):
        largest = float(np.abs(a.astype(wide) - b.astype(wide))[~same].max())
    return math.inf if math.isnan(largest) else largest


def magnitude(a: NDArray[Any]) -> float:
    """Return the largest absolute value of a finite element."""
    return float(np.abs(a).max(where=np.isfinite(a), initial=0.0))


def _relative(distance: float, magnitude: float, floor: float) -> float:
    scale = max(magnitude, floor)
    return 0.0 if distance == 0.0 else distance / scale if scale else math.inf
