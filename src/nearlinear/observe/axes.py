"""Turning series of numbers into places on two axes, 0 to 1, with ticks at round numbers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from nearlinear.errors import InputError

MARKS_PER_CURVE = 8
NEAR = 0.01  # of the axes: closer marks would hide each other
HUGE, TINY = 1e300, 1e-290  # beyond them differences overflow or vanish

Point = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Series:
    """A named curve.

    Args:
        name: What the legend calls it.
        xs: Where its points are, in order.
        ys: Their values, as many; NaN or infinity leaves a gap.
        dashed: Whether it is drawn dashed and without marks: an ideal line, a forecast.

    Raises:
        InputError: ``xs`` and ``ys`` differ in length.

    Example:
        >>> Series("loss", (1, 2, 3), (2.5, 1.5, 1.25)).ys
        (2.5, 1.5, 1.25)
    """

    name: str
    xs: tuple[float, ...]
    ys: tuple[float, ...]
    dashed: bool = False

    def __post_init__(self) -> None:
        if len(self.xs) != len(self.ys):
            raise InputError(f"series {self.name!r} has {len(self.xs)} xs and {len(self.ys)} ys; give as many of each")


@dataclass(frozen=True, slots=True)
class Axis:
    """Where on an axis, 0 to 1, a value lies.

    Args:
        low: The value at 0.
        high: The value at 1.
        log: Whether it is logarithmic.
        whole: Whether only whole numbers occur, so that no tick stands at 1.5 processes.
        counts: The values themselves, where they are a few counts (1, 2, 4, 8 processes): the ticks.
    """

    low: float
    high: float
    log: bool = False
    whole: bool = False
    counts: tuple[float, ...] = ()

    @classmethod
    def over(cls, values: Sequence[float], *, log: bool, to_ticks: bool) -> Axis:
        """Return the axis from the least to the greatest value, or on to the next ticks (if it is not logarithmic)."""
        if not values:
            return cls(1.0, 10.0, log) if log else cls(0.0, 1.0)
        whole = all(value == math.floor(value) for value in values)
        low, high = min(values), max(values)
        distinct = tuple(sorted(set(values)))
        counts = distinct if whole and len(distinct) <= 8 and low >= 1 and high <= 1024 and not to_ticks else ()
        if high - low <= max(1e-9 * max(abs(low), abs(high)), TINY):  # a constant, or one point: put it in the middle
            around = abs(low) / 2 if abs(low) > TINY else 0.5
            low, high = (low / 2, high * 2) if log else (low - around, high + around)
        if to_ticks and not log:
            step = _step(high - low, 5, whole)
            low, high = math.floor(low / step + 1e-9) * step, math.ceil(high / step - 1e-9) * step
        return cls(low, high, log, whole, counts)

    def place(self, value: float) -> float:
        """Return where the value lies, 0 to 1."""
        if self.log:
            return (math.log(value) - math.log(self.low)) / (math.log(self.high) - math.log(self.low))
        return (value - self.low) / (self.high - self.low)

    def ticks(self, about: int) -> list[tuple[float, str]]:
        """Return ticks, each with its place and label: at round numbers, about as many as asked for, one at least.

        Example:
            >>> Axis(0.0, 1.0).ticks(3)
            [(0.0, '0.0'), (0.5, '0.5'), (1.0, '1.0')]
        """
        if self.counts or self.log:
            values = list(self.counts) or self._powers(about)
            return [(self.place(value), f"{value:,g}") for value in values]
        values = self._even(about)
        return [(self.place(value), label) for value, label in zip(values, _labels(values), strict=True)]

    def _even(self, about: int) -> list[float]:
        step = _step(self.high - self.low, about, self.whole)
        first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
        return [round(i * step, 12 - math.floor(math.log10(step))) for i in range(first, last + 1)]

    def _powers(self, about: int) -> list[float]:
        """Return 1, 2 and 5 times the powers of ten where there is room, else every first, second, third ... power."""
        powers = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
        choices = [[factor * 10.0**power for power in powers for factor in (1, 2, 5)]]
        choices += [[10.0**power for power in powers if power % every == 0] for every in (1, 2, 3, 5, 10, 20, 50, 100)]
        low, high = self.low * (1 - 1e-9), self.high * (1 + 1e-9)
        within = [[tick for tick in ticks if low <= tick <= high] for ticks in choices]
        return next((ticks for ticks in within if 2 <= len(ticks) <= about), within[0] or [self.low, self.high])


def _step(span: float, about: int, whole: bool) -> float:
    """Return the distance of ticks, 1, 2 or 5 times a power of ten, at which about so many fit into the span."""
    rough = span / about
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * (1 - 1e-9))
    return max(1.0, step) if whole else step


def _labels(values: Sequence[float]) -> list[str]:
    """Return evenly spaced values as text, with as many digits as their distance needs.

    Example:
        >>> _labels((0.0, 0.5, 1.0)), _labels((1e8, 1.5e8, 2e8))
        (['0.0', '0.5', '1.0'], ['1e+08', '1.5e+08', '2e+08'])
    """
    if len(values) < 2:
        return [f"{value:,g}" for value in values]
    last = math.floor(math.log10(min(b - a for a, b in pairwise(values))) + 1e-6)  # power of ten of the last digit
    largest = max(abs(value) for value in values)
    if 1e-4 <= largest < 1e7:
        return [f"{value:,.{max(0, -last)}f}" for value in values]
    return [f"{value:.{max(1, math.floor(math.log10(largest)) - last + 1)}g}" for value in values]


@dataclass(frozen=True, slots=True)
class Frame:
    """The two axes, and which points of each series lie where on them.

    Args:
        series: The curves.
        x: The horizontal axis.
        y: The vertical axis.
        runs: By series, then by stretch without a gap: places of the points, 0 to 1 in both directions.
    """

    series: tuple[Series, ...]
    x: Axis
    y: Axis
    runs: tuple[tuple[tuple[Point, ...], ...], ...]

    @classmethod
    def around(cls, series: Sequence[Series], *, log_x: bool, log_y: bool) -> Frame:
        """Return the frame that holds all points.

        Raises:
            InputError: There is no series.
        """
        if not series:
            raise InputError("there is no series to draw; give at least one")

        def shown(point: Point) -> bool:  # NaN is not below anything
            x, y = point
            return abs(x) < HUGE and abs(y) < HUGE and (x > TINY or not log_x) and (y > TINY or not log_y)

        points = [list(zip(each.xs, each.ys, strict=True)) for each in series]
        kept = [point for each in points for point in each if shown(point)]
        x_axis = Axis.over([x for x, _ in kept], log=log_x, to_ticks=False)
        y_axis = Axis.over([y for _, y in kept], log=log_y, to_ticks=True)

        def stretches(points: Sequence[Point]) -> Iterator[tuple[Point, ...]]:
            gaps = [-1, *(i for i, point in enumerate(points) if not shown(point)), len(points)]
            for before, after in pairwise(gaps):
                if after > before + 1:
                    yield tuple((x_axis.place(x), y_axis.place(y)) for x, y in points[before + 1 : after])

        return cls(tuple(series), x_axis, y_axis, tuple(tuple(stretches(each)) for each in points))

    @property
    def empty(self) -> bool:
        """Whether there is no point to draw."""
        return not any(self.runs)

    def legend(self) -> list[str]:
        """Return the series' names; where points of one are not drawn, with how many."""
        missing = [len(s.xs) - sum(map(len, runs)) for s, runs in zip(self.series, self.runs, strict=True)]
        return [s.name + (f" ({n} not shown)" if n else "") for s, n in zip(self.series, missing, strict=True)]

    def marks(self, number: int) -> Iterator[Point]:
        """Return the points of a series that bear its mark: all if they are few, else some.

        Curves that lie on each other take turns, so that the marks of all of them can be seen.
        """
        if self.series[number].dashed:
            return
        solid = [i for i, each in enumerate(self.series) if not each.dashed]
        points = self._points(number)
        if len(points) > 2 * MARKS_PER_CURVE:
            turn = (solid.index(number) + 0.5) / len(solid)
            yield from (points[int((i + turn) / MARKS_PER_CURVE * len(points))] for i in range(MARKS_PER_CURVE))
            return
        others = {i: self._points(i) for i in solid}
        for i, (x, y) in enumerate(points):
            here = [s for s in solid if any(abs(x - a) + abs(y - b) < NEAR for a, b in others[s])]
            if here[i % len(here)] == number:
                yield x, y

    def _points(self, number: int) -> list[Point]:
        return [point for run in self.runs[number] for point in run]
