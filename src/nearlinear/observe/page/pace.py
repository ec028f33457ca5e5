"""Samples per second over the time of a run, beside what was forecast, and the share of communication below it."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from nearlinear.core.forecast import Point
from nearlinear.observe.page.content import Pace
from nearlinear.observe.page.marks import both, legend
from nearlinear.observe.page.plot import Band, Curve, Plot
from nearlinear.observe.page.text import count, percent
from nearlinear.units import seconds

PIECES = {"w": 160, "n": 50}  # stretches of time that are drawn as one point


def pace_over_time(reports: Sequence[Pace], expected: Point | None) -> str:
    """Return the section's content; empty without at least two reports."""
    reports = [each for each in reports if math.isfinite(each.samples_per_s) and math.isfinite(each.at)]
    if len(reports) < 2:
        return ""
    middle = statistics.median(each.samples_per_s for each in reports)
    waiting = statistics.fmean(each.waiting for each in reports)

    def rates(suffix: str, across: int) -> str:
        found = _pieces(reports, PIECES[suffix])
        xs = tuple(each.at for each in found)
        ends = (xs[0], xs[-1])
        curves = [Curve("c0 line", tuple((e.at, e.middle) for e in found), "", tuple(e.said() for e in found))]
        bands = [Band("c0", xs, tuple(e.low for e in found), tuple(e.high for e in found))]
        if expected is not None:
            low, high = expected.samples / expected.high, expected.samples / expected.low
            curves.insert(0, Curve("ideal dashed", tuple((x, expected.rate) for x in ends)))
            bands.insert(0, Band("ideal", ends, (low, low), (high, high)))
        return Plot(
            "Samples per second over time",
            f"Median {count(middle)} samples per second over {seconds(reports[-1].at)}, from "
            f"{count(min(e.low for e in found))} to {count(max(e.high for e in found))}."
            + (f" The forecast was {count(expected.rate)}." if expected else ""),
            "seconds since the start",
            "samples/s",
            tuple(curves),
            tuple(bands),
            height=300,
        ).drawn(f"pace-{suffix}", across)

    def shares(suffix: str, across: int) -> str:
        found = _pieces(reports, PIECES[suffix])
        tips = tuple((*e.said()[:1], f"{percent(e.waiting)} communicating") for e in found)
        return Plot(
            "Share of the time spent communicating",
            f"{percent(waiting)} on average.",
            "seconds since the start",
            "communicating, %",
            (Curve("c1 line", tuple((e.at, 100 * e.waiting) for e in found), "", tips),),
            limits=(0.0, 100.0),
            height=190,
        ).drawn(f"waiting-{suffix}", across)

    key = [("c0 line", "measured, median"), ("c0 area", "least to most")]
    key += [("ideal dashed", "forecast"), ("ideal area", "its band")] if expected else []
    return (
        f"<figure>{legend(key)}{both(rates)}</figure>"
        f"<figure>{legend([('c1 line', 'communicating')])}{both(shares)}"
        "<figcaption>As rank 0 reported it; the first step, which measures and agrees, is left out.</figcaption>"
        "</figure>"
    )


@dataclass(frozen=True, slots=True)
class _Piece:
    at: float
    first: int
    last: int
    low: float
    middle: float
    high: float
    waiting: float

    def said(self) -> tuple[str, ...]:
        steps = f"step {self.first:,}" if self.first == self.last else f"steps {self.first:,} to {self.last:,}"
        around = f" ({count(self.low)} to {count(self.high)})" if self.low < self.high else ""
        return (f"{steps}, {seconds(self.at)} after the start", f"{count(self.middle)} samples/s{around}")


def _pieces(reports: Sequence[Pace], most: int) -> list[_Piece]:
    """Return stretches with as many reports each."""
    found = []
    size = math.ceil(len(reports) / most)
    for start in range(0, len(reports), size):
        some = reports[start : start + size]
        rates = [each.samples_per_s for each in some]
        found.append(
            _Piece(
                statistics.fmean(each.at for each in some),
                some[0].step,
                some[-1].step,
                min(rates),
                statistics.median(rates),
                max(rates),
                statistics.fmean(each.waiting for each in some),
            )
        )
    return found
