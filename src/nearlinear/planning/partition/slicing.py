"""Cutting one order of the nodes into stages: the best of all ways to slice it, by dynamic programming."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from nearlinear.planning.partition.problem import Floats, Ints, Problem


def slice_order(
    problem: Problem,
    order: Sequence[int],
    stages: int,
    per_byte: float,
    speed: float = 1.0,
    memory: float = np.inf,
    below: float = np.inf,
) -> tuple[float, list[int]]:
    """Return the least maximum load of any slicing, and the slices' ends.

    Args:
        problem: The nodes and tensors.
        order: The nodes in an order in which they can run.
        stages: How many slices there may be.
        per_byte: Seconds per byte of every link.
        speed: Of every device.
        memory: Bytes of state that a stage may hold.
        below: Only slicings with a lower maximum load are looked for; slices that compute as long are passed over.

    Returns:
        The load, ``inf`` where no slicing is below, and where each slice ends (``[2, 5]``: the first two, then three).
    """
    count = problem.nodes
    work = np.concatenate([[0.0], np.cumsum(problem.work[list(order)])]) / speed
    state = np.concatenate([[0.0], np.cumsum(problem.state[list(order)])])
    low = np.searchsorted(work, work - below, side="right")
    low = np.minimum(low, np.arange(count + 1))
    if memory < np.inf:
        low = np.maximum(low, np.searchsorted(state, state - memory * (1 + 1e-12), side="left"))
    best = np.full((stages + 1, count + 1), np.inf)
    best[:, 0] = 0.0
    rows: list[tuple[int, Floats]] = [(0, np.zeros(1))]
    for end, start, row in _segments(problem, order, per_byte, low):
        kept = row + (work[end] - work[start:end])
        rows.append((start, kept))
        if start < end:
            np.maximum(best[:-1, start:end], kept).min(axis=1, out=best[1:, end])
    load = float(best[stages, count])
    if not load < below:
        return np.inf, []
    ends, end, stage = [], count, stages
    while end > 0:
        ends.append(end)
        start, kept = rows[end]
        end = start + int(np.argmin(np.maximum(best[stage - 1, start:end], kept)))
        stage -= 1
    return load, ends[::-1]


def _segments(problem: Problem, order: Sequence[int], per_byte: float, low: Ints) -> Iterator[tuple[int, int, Floats]]:
    """Yield for every end the seconds that cross the ends of each slice that stops there.

    Growing a slice by node ``v`` alters what crosses in three ways:

        it reads tensor t made before the slice, which nothing in the slice read so far:   + t   (it comes in)
        it was the last reader of tensor t made in the slice:                              - t   (it stays)
        it makes a tensor that others read:                                                + t   (it goes out)
    """
    count = problem.nodes
    moved = (problem.moved * per_byte).tolist()
    place = [0] * count
    for position, node in enumerate(order):
        place[node] = position
    made_at = [place[node] for node in problem.producer.tolist()]
    left = [len(each) for each in problem.consumers]
    last_read = list(made_at)
    cost = np.zeros(count + 1)
    starts = low.tolist()
    for position, node in enumerate(order):
        end, start = position + 1, starts[position + 1]  # starts never fall, so what lies before is done with
        for t in problem.read[node]:
            seconds = moved[t]
            if seconds:
                # Slices that start at i > last read and > maker get it anew; they hold no reader of it yet.
                cost[max(last_read[t] + 1, start) : end] += seconds
                if left[t] == 1:
                    cost[start : made_at[t] + 1] -= seconds
            left[t] -= 1
            last_read[t] = position
        out = sum(moved[t] for t in problem.made[node])
        if out:
            cost[start:end] += out
        yield end, start, cost[start:end].copy()
