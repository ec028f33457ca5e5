"""Graphs of ten thousand operators of several kinds, for what a search and a bound must still manage."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from nearlinear.core.graph import Graph, Operator, Tensor

OPERATORS = 10_000


class _Builder:
    def __init__(self, seed: int) -> None:
        self.random = np.random.default_rng(seed)
        self.operators: list[Operator] = []
        self.readers: list[set[int]] = []
        self.bytes: list[float] = []

    def add(self, forward: float, size: float, *inputs: int) -> int:
        """Add an operator that reads from others and hands ``size`` bytes on; return its number."""
        number = len(self.operators)
        self.operators.append(Operator(f"op{number}", forward=forward, backward=2 * forward, state_bytes=1e6))
        self.readers.append(set())
        self.bytes.append(size)
        for each in inputs:
            self.readers[each].add(number)
        return number

    def spread(self) -> float:
        """Return a factor that varies from operator to operator."""
        return float(self.random.lognormal(0, 0.5))

    def graph(self, name: str) -> Graph:
        """Return what was built."""
        tensors = (
            Tensor(producer, tuple(sorted(readers)), size)
            for producer, (readers, size) in enumerate(zip(self.readers, self.bytes, strict=True))
            if readers
        )
        return Graph(tuple(self.operators), tuple(tensors), name=name)


def transformer(seed: int) -> Graph:
    """Return a deep decoder of 18 operators a layer; some layers also read from one far before them."""
    build, size = _Builder(seed), 8e6
    x = build.add(1e-5, size)
    earlier: list[int] = []
    while len(build.operators) < OPERATORS - 22:
        h = build.add(2e-5, size, x)
        q, k, v = (build.add(1e-5, size, build.add(3e-4, size, h)) for _ in range(3))
        weights = build.add(5e-5, 4 * size, build.add(2e-4, 4 * size, q, k))
        x = build.add(1e-5, size, build.add(3e-4, size, build.add(2e-4, size, weights, v)), x)
        h = build.add(2e-5, size, x)
        up, gate = build.add(8e-4, 4 * size, h), build.add(3e-5, 4 * size, build.add(8e-4, 4 * size, h))
        x = build.add(1e-5, size, build.add(8e-4, size, build.add(2e-5, 4 * size, up, gate)), x)
        if build.random.random() < 0.1:
            earlier.append(x)
        if len(earlier) > 3 and build.random.random() < 0.05:
            x = build.add(1e-5, size, x, earlier[int(build.random.integers(len(earlier)))])
    return build.graph("transformer")


def cells(seed: int) -> Graph:
    """Return cells of five random pairs of short chains, each of which reads the two cells before it."""
    build, size = _Builder(seed), 2e6
    one = build.add(1e-4, size)
    other = build.add(1e-4, size, one)
    while len(build.operators) < OPERATORS - 30:
        sources, sums = [one, other], []
        for _ in range(5):
            ends = [sources[int(build.random.integers(len(sources)))] for _ in range(2)]
            for _ in range(2):
                ends = [build.add(1e-4 * build.spread(), size, each) for each in ends]
            sums.append(build.add(1e-5, size, *ends))
            sources.append(sums[-1])
        one, other = other, build.add(2e-5, 3 * size, *sums)
    return build.graph("cells")


def branches(seed: int) -> Graph:
    """Return sixteen long chains side by side."""
    build, size = _Builder(seed), 2e6
    first = build.add(1e-5, size)
    ends = [first] * 16
    for _ in range(OPERATORS // 16 - 1):
        ends = [build.add(1e-4 * build.spread(), size * build.spread(), each) for each in ends]
    build.add(1e-5, size, *ends)
    return build.graph("16 branches")


def layered(width: int) -> Callable[[int], Graph]:
    """Return what makes random layers: each operator reads one to three of the layer before, some from farther back."""

    def make(seed: int) -> Graph:
        build, size = _Builder(seed), 2e6
        for layer in range(OPERATORS // width):
            for _ in range(width):
                inputs: set[int] = set()
                for _ in range(int(build.random.integers(1, 4)) if layer else 0):
                    back = 1 if build.random.random() < 0.9 else 1 + int(build.random.integers(1, 10))
                    inputs.add(max(0, layer - back) * width + int(build.random.integers(width)))
                build.add(1e-4 * build.spread(), size * build.spread(), *inputs)
        return build.graph(f"layers of {width}")

    return make


LARGE: dict[str, Callable[[int], Graph]] = {
    "transformer": transformer,
    "cells": cells,
    "16 branches": branches,
    "layers of 10": layered(10),
    "layers of 50": layered(50),
}
