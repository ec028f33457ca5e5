"""Turning curves with bands and marks into a picture with two axes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from nearlinear.observe.axes import Axis
from nearlinear.observe.page.marks import picture, tip
from nearlinear.observe.page.text import text, width

Point = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Curve:
    """Points that are joined, marked or both.

    Args:
        kind: Classes: a colour, and ``line``, ``dashed`` or none for what joins the points.
        points: Where they are; one that is not finite leaves a gap.
        mark: ``"disc"``, ``"diamond"``, ``"ring"`` or ``""`` for no marks.
        tips: What to say of every point, in lines; none for silence.
    """

    kind: str
    points: tuple[Point, ...]
    mark: str = ""
    tips: tuple[tuple[str, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class Band:
    """An area between two curves.

    Args:
        kind: Its class.
        xs: Where it is known.
        low: Its lower edge there.
        high: Its upper edge there.
    """

    kind: str
    xs: tuple[float, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Plot:
    """A picture of curves.

    Args:
        title: What it shows.
        describe: What is to be seen.
        x: What the horizontal axis shows.
        y: What the vertical axis shows.
        curves: Later ones lie on top.
        bands: Below the curves.
        stop: Where to draw a line down, and what stands beside it.
        log: Whether both axes are logarithmic.
        counts: Whether the horizontal axis bears the points' own numbers, where they do not touch.
        limits: The vertical axis' ends, where they are fixed.
        height: Pixels.
    """

    title: str
    describe: str
    x: str
    y: str
    curves: tuple[Curve, ...]
    bands: tuple[Band, ...] = ()
    stop: tuple[float, str] | None = None
    log: bool = False
    counts: bool = False
    limits: tuple[float, float] | None = None
    height: int = 360

    def drawn(self, name: str, across: int) -> str:
        """Return the picture, ``across`` pixels wide; ``name`` is unique on the page."""
        return picture(name, self.title, self.describe, (across, self.height), _Drawing(self, across).parts())


class _Drawing:
    """(1) name of the vertical axis, (2) grid and numbers, (3) bands, (4) the stop line, (5) curves, (6) name of x."""

    def __init__(self, plot: Plot, across: int) -> None:
        self.plot = plot
        points = [point for curve in plot.curves for point in curve.points if _finite(point)]
        edges = [
            value for band in plot.bands for edge in (band.low, band.high) for value in edge if math.isfinite(value)
        ]
        self.x = Axis.over([x for x, _ in points], log=plot.log, to_ticks=False)
        if plot.counts and len({x for x, _ in points}) > 1:
            self.x = Axis(self.x.low, self.x.high, plot.log, True, tuple(sorted({x for x, _ in points})))
        ys = [y for _, y in points] + edges + ([] if plot.log else [0.0])
        self.y = Axis(*plot.limits) if plot.limits else Axis.over(ys, log=plot.log, to_ticks=True)
        if plot.log:  # the least value not on the axis itself
            self.y = Axis(self.y.low / 1.25, self.y.high * 1.25, True)
        self.top, self.bottom, self.across = 30.0, plot.height - 44.0, float(across)
        self.y_ticks = self.y.ticks(max(2, int((self.bottom - self.top) / 44)))
        self.left = 14 + max(width(label) for _, label in self.y_ticks)
        self.right = across - 16.0
        self.x_ticks = self.x.ticks(max(2, int((self.right - self.left) / 70)))

    def parts(self) -> Iterator[str]:
        yield f'<text x="0" y="14">{text(self.plot.y)}</text>'  # (1)
        yield from self._axes()  # (2)
        for band in self.plot.bands:  # (3)
            outline = [*zip(band.xs, band.high, strict=True), *reversed(list(zip(band.xs, band.low, strict=True)))]
            yield f'<path class="band {band.kind}" d="M{"L".join(map(self._place, outline))}z"/>'
        yield from self._stop()  # (4)
        for curve in self.plot.curves:  # (5)
            yield from self._curve(curve)
        middle, below = (self.left + self.right) / 2, self.plot.height - 6  # (6)
        yield f'<text x="{middle:.0f}" y="{below}" text-anchor="middle">{text(self.plot.x)}</text>'

    def _at(self, point: Point) -> Point:
        x, y = self.x.place(point[0]), min(max(self.y.place(point[1]), 0.0), 1.0)
        return self.left + x * (self.right - self.left), self.bottom - y * (self.bottom - self.top)

    def _place(self, point: Point) -> str:
        return "{:.1f} {:.1f}".format(*self._at(point))

    def _axes(self) -> Iterator[str]:
        grid = ""
        for place, label in self.y_ticks:
            y = self.bottom - place * (self.bottom - self.top)
            grid += f"M{self.left:.1f} {y:.1f}H{self.right:.1f}"
            yield f'<text class="number" x="{self.left - 8:.1f}" y="{y + 4:.1f}" text-anchor="end">{text(label)}</text>'
        end = 0.0
        for place, label in self.x_ticks:
            x, half = self.left + place * (self.right - self.left), width(label) / 2
            grid += f"M{x:.1f} {self.top:.1f}V{self.bottom:.1f}"
            centre = min(x, self.across - half)  # not cut off at the right
            if centre - half > end:  # a number that would touch its neighbour gives way
                yield (
                    f'<text class="number" x="{centre:.1f}" y="{self.bottom + 18:.1f}" text-anchor="middle">'
                    f"{text(label)}</text>"
                )
                end = centre + half + 4
        yield f'<path class="grid" d="{grid}"/>'
        yield f'<path class="axis" d="M{self.left:.1f} {self.bottom:.1f}H{self.right:.1f}"/>'

    def _stop(self) -> Iterator[str]:
        if self.plot.stop is None:
            return
        where, what = self.plot.stop
        x = self.left + self.x.place(where) * (self.right - self.left)
        room = self.right - x
        anchor, at = ("start", x + 6) if room > width(what) + 8 else ("end", x - 6)
        yield f'<path class="stop" d="M{x:.1f} {self.top:.1f}V{self.bottom:.1f}"/>'
        y = self.bottom - 8
        yield f'<text class="strong" x="{at:.1f}" y="{y:.1f}" text-anchor="{anchor}">{text(what)}</text>'

    def _curve(self, curve: Curve) -> Iterator[str]:
        if "line" in curve.kind or "dashed" in curve.kind:
            path, joined = "", False
            for point in curve.points:
                finite = _finite(point)
                path += f"{'L' if joined else 'M'}{self._place(point)}" if finite else ""
                joined = finite
            yield f'<path class="curve {curve.kind}" d="{path}"/>' if path else ""
        colour = curve.kind.split()[0]
        tips = curve.tips or ((),) * len(curve.points)
        for point, lines in zip(curve.points, tips, strict=True):
            if not _finite(point) or not (curve.mark or lines):
                continue
            x, y = self._at(point)
            shown = _mark(curve.mark, colour, x, y)
            # An unseen disc around the mark, so that a finger finds it.
            found = f'<circle class="hit" cx="{x:.1f}" cy="{y:.1f}" r="11"/>' if lines else ""
            yield f'<g class="tip">{shown}{found}{tip(*lines)}</g>' if lines else shown


def _finite(point: Point) -> bool:
    return math.isfinite(point[0]) and math.isfinite(point[1])


def _mark(mark: str, colour: str, x: float, y: float) -> str:
    if mark == "diamond":
        return f'<path class="mark {colour}" d="M{x:.1f} {y - 7:.1f}l7 7l-7 7l-7 -7z"/>'
    if mark:
        return f'<circle class="{mark} {colour}" cx="{x:.1f}" cy="{y:.1f}" r="4.5"/>'
    return ""
