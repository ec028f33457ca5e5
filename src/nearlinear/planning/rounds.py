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

BURDEN = 0.05
"""Of the processor's time, what rounds may take: encoding, encrypting and adding up happen beside the steps, and where
the cores are busy they happen in their place."""

SLOWEST = 1 / 8
"""Of the largest part: nobody takes less, or nothing would be known of its speed."""


def interval(exchange_s: float, step_s: float, burden: float = 0.0) -> int:
    """Return the fewest steps of a round behind which the exchange of the round before is hidden and its work small.

        steps     |== round 7 ==|== round 8 ==|== round 9 ==
        exchange                |- 7 -|       |- 8 -|             MARGIN times as many steps as it takes

    Args:
        exchange_s: Seconds from an update to the outer parameters with it, the wait for slower members left out.
        step_s: Seconds of a step.
        burden: Processor time that a round takes, in that of a step.

    Example:
        >>> interval(1.2, 0.3), interval(0.001, 0.3), interval(600.0, 0.3), interval(0.001, 0.3, burden=0.2)
        (8, 1, 500, 4)
    """
    if step_s <= 0:
        return 1
    return min(max(math.ceil(MARGIN * exchange_s / step_s), math.ceil(burden / BURDEN), 1), LONGEST)


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


def adaptive_rate(part: float, signal: float) -> float:
    """Return what to multiply the learning rate of an optimizer like Adam by, where it sees a part of every batch.

    Adam divides by the root of the mean squared gradient, which is signal and noise: ``mu^2 + sigma^2 / samples``. On a
    part of the batch the noise is larger, so its steps are shorter, and the mean over members does not make them longer
    again. This is the root of how much larger the mean squared gradient is on the part than on the whole; decision 0013
    says what it brings.

    Args:
        part: Of the batch, above 0 and at most 1.
        signal: Share of ``mu^2`` in the mean squared gradient of the part, 0 to 1.

    Example:
        >>> round(adaptive_rate(0.5, 0.0), 3), adaptive_rate(0.5, 1.0), adaptive_rate(1.0, 0.3)
        (1.414, 1.0, 1.0)
    """
    return 1 / math.sqrt(signal + (1 - signal) * part)


LOOK_STEPS = 20
"""Steps between two looks at how much of the gradients is signal."""


def noise_left(beta: float, step: float) -> float:
    """Return the variance of a running mean of unit noise after so many steps: the sum of its squared weights.

    Args:
        beta: Of the mean that was before, at every step.
        step: Steps so far, at least 1; the mean is corrected for its beginning at zero.

    Example:
        >>> noise_left(0.9, 1), round(noise_left(0.9, 1000), 4)
        (1.0, 0.0526)
    """
    was = float(beta**step)
    return (1 - beta) * (1 + was) / ((1 + beta) * (1 - was))


def signal_share(ratios: float, count: int, left: float) -> float:
    """Return the sum over values of the share of ``mu^2`` in the mean squared gradient, from two running means.

    Args:
        ratios: Sum of the squared mean over the mean square.
        count: Of values.
        left: What noise alone leaves in the squared mean, as a share of the mean square (``noise_left``).

    Example:
        >>> signal_share(100.0, 100, 0.05), signal_share(5.0, 100, 0.05)
        (100.0, 0.0)
    """
    if left > 0.99:  # of a single step nothing can be told apart
        return ratios
    return (ratios - left * count) / (1 - left)


# ---- by which way updates are exchanged

MOST_DIRECT = 32
"""Members that exchange directly: beyond, connections between all pairs are more than they bring."""

CLEARLY = 0.9
"""A way is left for one that takes no more than so much of its time: what is measured varies by as much."""


def star_s(update_bytes: float, elsewhere: int, round_trip_s: float, centre: float) -> float:
    """Return the seconds of an exchange through the centre, whose link takes in all updates, then gives out all means.

        round trip + 2 elsewhere bytes / centre

    Args:
        update_bytes: Of one, encoded.
        elsewhere: Members that are not on the centre's own machine.
        round_trip_s: Of the longest link.
        centre: Bytes per second of the centre's link, one way.
    """
    return round_trip_s + 2 * elsewhere * update_bytes / centre


def direct_s(update_bytes: float, round_trip_s: float, up: Sequence[float]) -> float:
    """Return the seconds of an exchange in which every member sums a part, and sends it to all.

    A member with the part p sends the others' parts of its update, 1 - p, and its own part of the mean to each of the
    N - 1 others. Sums begin while updates are still on their way, so only bytes count, and five messages one after the
    other: ready, go, the last of the mean, done, commit.

        5/2 round trips + max over members of (1 + (N - 2) p) bytes / up

    Args:
        update_bytes: Of one, encoded.
        round_trip_s: Of the longest link.
        up: Bytes per second that each member sends.
    """
    sent = [1 + (len(up) - 2) * part for part in parts(up)]
    return 2.5 * round_trip_s + max(each * update_bytes / rate for each, rate in zip(sent, up, strict=True))


def parts(up: Sequence[float]) -> list[float]:
    """Return the part of the vector that each member sums, so that all have sent their share at the same time.

    With the part p a member sends (1 + (N - 2) p) vectors; all take as long where that is in proportion to its
    link. One whose link is so slow that its own update alone takes longer sums nothing.

    Args:
        up: Bytes per second that each member sends.

    Returns:
        Parts that sum to 1.

    Example:
        >>> parts([1.0, 1.0, 1.0, 1.0]), parts([2.0, 1.0, 1.0]), parts([10.0, 10.0, 1.0])
        ([0.25, 0.25, 0.25, 0.25], [1.0, 0.0, 0.0], [0.5, 0.5, 0.0])
    """
    count = len(up)
    if count <= 2:  # each sends one vector, however it is parted
        return [1 / count] * count
    able = list(range(count))
    while True:
        time = (count - 2 + len(able)) / sum(up[each] for each in able)  # in vectors: the members of `able` end then
        slow = [each for each in able if time * up[each] < 1]
        if not slow:
            break
        able = [each for each in able if each not in slow]
    found = [(time * up[each] - 1) / (count - 2) if each in able else 0.0 for each in range(count)]
    return [each / sum(found) for each in found]


def direct(
    update_bytes: float, elsewhere: int, round_trip_s: float, centre: float, up: Sequence[float], now: bool
) -> bool:
    """Return whether members that reach each other exchange directly, rather than through the centre.

    Args:
        update_bytes: Of one, encoded.
        elsewhere: Members that are not on the centre's own machine.
        round_trip_s: Of the longest link.
        centre: Bytes per second of the centre's link, one way; 0 before it was measured, which its own way does.
        up: Bytes per second that each member sends; 0 before it was measured: then it is taken to be the fastest link
            that is known, so that it is tried.
        now: They exchange directly at present.

    Example:
        >>> direct(4e6, 3, 0.08, 12.5e6, [0.0] * 4, now=False), direct(64e3, 3, 0.08, 12.5e6, [0.0] * 4, now=False)
        (True, False)
    """
    if not 2 <= len(up) <= MOST_DIRECT or not centre:
        return False
    fastest = max(centre, *up)
    one = direct_s(update_bytes, round_trip_s, [rate or fastest for rate in up])
    other = star_s(update_bytes, elsewhere, round_trip_s, centre)
    return CLEARLY * one <= other if now else one <= CLEARLY * other
