"""Grouping gradients into messages: large enough that latency is small, small enough to overlap with backward."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence

SMALLEST = 64 * 1024
LARGEST = 25 * 1024 * 1024

HELD_UP_S = 2e-3
"""Seconds that a message costs the computing beside it where both share a processor's core. An estimate of ours: the
CNN of benchmarks/data_parallel was 4.5 % slower with several messages for its 2.3 MB than with one (gloo)."""


def bucket_bytes(total: int, latency: float, bandwidth: float, *, shared: bool = False) -> int:
    """Return the bytes per message that cost least.

    With messages of ``s`` bytes, ``total / s`` latencies are paid, and the last message, which no computation hides,
    takes ``s / bandwidth``: the sum is least at ``s = sqrt(total * latency * bandwidth)``.

    Args:
        total: Bytes of all gradients.
        latency: Seconds an all-reduce of no bytes takes.
        bandwidth: Bytes per second that a large all-reduce gets through.
        shared: Whether messages are moved by the processor that computes; each then costs at least ``HELD_UP_S``.

    Returns:
        Bytes, between 64 KiB and 25 MiB.

    Example:
        >>> bucket_bytes(100_000_000, 1e-3, 1.25e8)
        3535533
    """
    each = max(latency, HELD_UP_S if shared else 1e-6)
    best = int(math.sqrt(max(total, 1) * each * bandwidth))
    return min(max(best, SMALLEST), LARGEST)


def fill_buckets(order: Sequence[int], sizes: Sequence[int], kinds: Sequence[Hashable], limit: int) -> list[list[int]]:
    """Return the buckets, in the order in which they become full.

    Args:
        order: Parameters in the order in which their gradients become ready.
        sizes: Bytes of each parameter.
        kinds: What must not be mixed in one message (device and dtype).
        limit: Bytes at which a bucket is closed.

    Returns:
        Parameters per bucket.

    Example:
        >>> fill_buckets([2, 1, 0], [10, 10, 10], "aaa", 20)
        [[2, 1], [0]]
    """
    full: list[list[int]] = []
    open_: dict[Hashable, list[int]] = {}
    for parameter in order:
        bucket = open_.setdefault(kinds[parameter], [])
        bucket.append(parameter)
        if sum(sizes[each] for each in bucket) >= limit:
            full.append(open_.pop(kinds[parameter]))
    return full + list(open_.values())
