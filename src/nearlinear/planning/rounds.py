"""Deciding how long members train apart, and which part of every batch each of them takes."""

from __future__ import annotations

import math
from collections.abc import Sequence

MARGIN = 2.0
"""Rounds as long as so many exchanges: one that takes half as long again still hides, and no step is applied later than
half a round after it was made."""

LONGEST = 500
"""Steps of a round at most: the interval of DiLoCo (Douillard et al. 2023, arXiv 2311.08105)."""

UNEVEN = 0.25
"""Times of a step that differ by less are taken to be equal: so much they differ by chance."""

PACE = 0.1
"""A part changes by no more from one round to the next: a machine that was busy for a moment is not a slow one."""

SLOWEST = 1 / 8
"""Of the largest part: nobody takes less, or nothing would be known of its speed."""


def interval(exchange_s: float, step_s: float) -> int:
    """Return the fewest steps of a round behind which the exchange of the round before is hidden.

        steps     |== round 7 ==|== round 8 ==|== round 9 ==
        exchange                |- 7 -|       |- 8 -|             MARGIN times as many steps as it takes

    Args:
        exchange_s: Seconds from an update to the outer parameters with it, the wait for slower members left out.
        step_s: Seconds of a step.

    Example:
        >>> interval(1.2, 0.3), interval(0.001, 0.3), interval(600.0, 0.3)
        (8, 1, 500)
    """
    if step_s <= 0:
        return 1
    return min(max(math.ceil(MARGIN * exchange_s / step_s), 1), LONGEST)


def fractions(parts: Sequence[float], step_s: Sequence[float]) -> list[float]:
    """Return the part of every batch that each member takes next, so that all come to take as long for a step.

    A step has a time of its own beside that of its samples, so speeds in samples per second would grow with the parts
    that they are to set, and run away. Times do not: the part of one whose step is slower than the usual shrinks, round
    after round, until the steps are even.

    Args:
        parts: What each takes now; 0 for a newcomer, which is given an even part.
        step_s: Seconds of each one's step, 0 where that is not known yet.

    Returns:
        Parts that sum to 1.

    Example:
        >>> [round(part, 3) for part in fractions([0.5, 0.5], [0.1, 0.4])]
        [0.524, 0.476]
        >>> fractions([0.7, 0.3], [0.10, 0.11]), fractions([1.0, 0.0], [0.1, 0.0])
        ([0.7, 0.3], [0.5, 0.5])
    """
    even = sum(parts) / max(sum(part > 0 for part in parts), 1) or 1.0
    wanted = [part or even for part in parts]
    known = sorted(each for each in step_s if each > 0)
    if known and known[-1] > (1 + UNEVEN) * known[0]:
        usual = known[len(known) // 2]
        slower = [usual / each if each else 1.0 for each in step_s]
        wanted = [part * min(max(ratio, 1 - PACE), 1 + PACE) for part, ratio in zip(wanted, slower, strict=True)]
    wanted = [max(part, SLOWEST * max(wanted)) for part in wanted]
    return [part / sum(wanted) for part in wanted]
