"""Splitting a batch of samples among ranks."""

from __future__ import annotations

import math


def shares(samples: int, ranks: int) -> list[int]:
    """Return how many consecutive samples each rank takes; they differ by at most one.

    Args:
        samples: Samples in the batch.
        ranks: Processes that share it.

    Returns:
        Samples per rank, shape ``(ranks,)``; the first ``samples % ranks`` ranks take one more.

    Example:
        >>> shares(64, 3)
        [22, 21, 21]
    """
    each, rest = divmod(samples, ranks)
    return [each + (rank < rest) for rank in range(ranks)]


def share(samples: int, rank: int, ranks: int) -> range:
    """Return the positions in the batch that ``rank`` takes.

    Example:
        >>> share(64, 1, 3)
        range(22, 43)
    """
    each, rest = divmod(samples, ranks)
    start = rank * each + min(rank, rest)
    return range(start, start + each + (rank < rest))


def share_between(samples: int, begin: float, end: float) -> range:
    """Return the positions in the batch of one that takes what lies between two fractions of it.

    Who takes from ``end`` on takes up exactly where this one stops.

    Example:
        >>> share_between(64, 0.0, 0.75), share_between(64, 0.75, 1.0)
        (range(0, 48), range(48, 64))
    """
    return range(math.floor(begin * samples + 0.5), math.floor(end * samples + 0.5))
