"""Turning a graph of thousands of operators into one small enough to draw: neighbours of a module become one box.

The operators are put into an order in which they can run and in which those of a module follow each other where they
can; a box is a stretch of that order, so the boxes can run in that order too, and nothing waits in a circle.
"""

from __future__ import annotations

import heapq
import re
from collections import Counter, defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

from nearlinear.core.graph import Graph
from nearlinear.observe.page.content import Split

BOXES = 84
_END_OF_PATH = re.compile(r"[\s(]")
_BETWEEN = re.compile(r"[./]")


@dataclass(frozen=True, slots=True)
class Box:
    """Operators drawn as one.

    Args:
        name: The operator's, or the module path that they share, or the first and the last.
        stage: Their stage.
        operators: Their positions in the graph.
        kinds: What they are, the most frequent first.
    """

    name: str
    stage: int
    operators: tuple[int, ...]
    kinds: tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class Drawing:
    """Boxes in an order in which they can run, and the bytes that pass from one to a later one."""

    boxes: tuple[Box, ...]
    passed: dict[tuple[int, int], float]


def merged(split: Split, most: int = BOXES) -> Drawing:
    """Return the graph in about ``most`` boxes; more where stages would not allow fewer."""
    paths = [_path(operator.name) for operator in split.graph.operators]
    if len(paths) <= most:
        return _drawing(split, [(place,) for place in range(len(paths))], paths)
    coarse: list[list[int]] = []
    for depth in range(1, max(map(len, paths)) + 1):
        runs = _runs(split.graph, [(stage, path[:depth]) for stage, path in zip(split.stage, paths, strict=True)])
        if len(runs) > most:
            # Too many; if one level up there are very few, neighbours of this one say more.
            coarse = coarse if len(coarse) > most / 4 else runs
            break
        coarse = runs
    return _drawing(split, _fused(coarse, split.stage, most), paths)


def _path(name: str) -> tuple[str, ...]:
    """Return the module path in an operator's name.

    Example:
        >>> _path("encoder.layers.3.mlp Linear(4, eps=0.1)")
        ('encoder', 'layers', '3', 'mlp')
    """
    return tuple(part for part in _BETWEEN.split(_END_OF_PATH.split(name)[0]) if part) or (name,)


def _runs(graph: Graph, keys: Sequence[tuple[int, Hashable]]) -> list[list[int]]:
    """Return stretches of operators with one key, in an order that stays with a key, then with a stage, if it can."""
    waits, readers = [0] * len(keys), [set[int]() for _ in keys]
    for tensor in graph.tensors:
        readers[tensor.producer].update(tensor.consumers)
    for each in readers:
        for consumer in each:
            waits[consumer] += 1
    ready: dict[Hashable, list[int]] = defaultdict(list)
    done = [False] * len(keys)

    def offer(place: int) -> None:
        for heap in (keys[place], keys[place][0], None):
            heapq.heappush(ready[heap], place)

    def take(heap: Hashable) -> int | None:
        while ready[heap] and done[ready[heap][0]]:
            heapq.heappop(ready[heap])
        return ready[heap][0] if ready[heap] else None

    for place, count in enumerate(waits):
        if count == 0:
            offer(place)
    runs: list[list[int]] = []
    last: tuple[int, Hashable] | None = None
    for _ in keys:
        wanted: list[Hashable] = [None] if last is None else [last, last[0], None]
        place = next(found for heap in wanted if (found := take(heap)) is not None)
        done[place] = True
        if keys[place] == last:
            runs[-1].append(place)
        else:
            runs.append([place])
        last = keys[place]
        for consumer in readers[place]:
            waits[consumer] -= 1
            if waits[consumer] == 0:
                offer(consumer)
    return runs


def _fused(runs: Sequence[Sequence[int]], stage: Sequence[int], most: int) -> list[tuple[int, ...]]:
    """Return the runs with neighbours of a stage put together, a few at a time."""
    every = -(-len(runs) // most)
    found: list[tuple[int, ...]] = []
    in_last = 0
    for run in runs:
        if found and in_last < every and stage[found[-1][0]] == stage[run[0]]:
            found[-1] += tuple(run)
            in_last += 1
        else:
            found.append(tuple(run))
            in_last = 1
    return found


def _drawing(split: Split, groups: Sequence[tuple[int, ...]], paths: Sequence[tuple[str, ...]]) -> Drawing:
    home = {place: number for number, group in enumerate(groups) for place in group}
    passed: dict[tuple[int, int], float] = defaultdict(float)
    for tensor in split.graph.tensors:
        source = home[tensor.producer]
        for target in {home[consumer] for consumer in tensor.consumers} - {source}:
            passed[source, target] += tensor.bytes
    members = Counter(path[:depth] for path in paths for depth in range(1, len(path) + 1))
    boxes = []
    for group in groups:
        operators = [split.graph.operators[place] for place in group]
        kinds = Counter(operator.kind for operator in operators if operator.kind)
        name = operators[0].name if len(group) == 1 else _called([paths[place] for place in group], members)
        boxes.append(Box(name, split.stage[group[0]], group, tuple(kinds.most_common(4))))
    return Drawing(tuple(boxes), dict(passed))


def _called(paths: Sequence[tuple[str, ...]], members: Mapping[tuple[str, ...], int]) -> str:
    """Return the module that just these operators are, or else the first and the last part of it.

    Args:
        paths: Of the operators, two at least.
        members: How many operators of the graph are in a module.
    """
    shared = []
    for parts in zip(*paths, strict=False):
        if len(set(parts)) > 1:
            break
        shared.append(parts[0])
    if shared and members[tuple(shared)] == len(paths):
        return ".".join(shared)
    inside = Counter(path[:depth] for path in paths for depth in range(1, len(path) + 1))
    ends = []
    for path in (paths[0], paths[-1]):
        depths = range(len(shared) + 1, len(path) + 1)
        whole = next((depth for depth in depths if inside[path[:depth]] == members[path[:depth]]), len(path))
        ends.append(".".join(path[:whole]))
    return " … ".join(dict.fromkeys(ends))
