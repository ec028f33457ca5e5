"""Turning curves into an SVG picture that is legible on a light and on a dark page."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from html import escape

from nearlinear.errors import InputError
from nearlinear.observe.axes import Frame, Point, Series

# No page is known beforehand, so there is no background and every colour lies half-way between white and the
# near-black of dark pages: text has a contrast of at least 4:1 with both, lines 3:1.
INK = "#7a7a7a"
COLOURS = ("#2f7fd9", "#d9661f", "#2f9150", "#b45ad2", "#128f9b", "#dc4c64")
FONT = 12.0


def svg(
    series: Sequence[Series],
    *,
    width: int = 720,
    height: int = 400,
    title: str = "",
    x: str = "",
    y: str = "",
    log_x: bool = False,
    log_y: bool = False,
) -> str:
    """Draw curves as an SVG document.

    Args:
        series: The curves; later ones lie on top.
        width: Pixels of the whole picture, at least 240.
        height: The same downwards, title, legend and axis included.
        title: Stands above it.
        x: What the horizontal axis shows.
        y: What the vertical axis shows.
        log_x: Whether the horizontal axis is logarithmic; points at or below zero are left out.
        log_y: The same for the vertical axis.

    Raises:
        InputError: There is no series, or no room for the curves.
    """
    frame = Frame.around(series, log_x=log_x, log_y=log_y)
    picture = _Picture(frame, width, height, title, x, y)
    if width < 240 or picture.bottom - picture.top < 60:
        least = math.ceil(height + 60 - (picture.bottom - picture.top))
        raise InputError(f"a picture of {width} x {height} pixels has no room for curves; give it 240 x {least}")
    return "\n".join([*picture.parts(), "</svg>", ""])


def _width(text: str, size: float = FONT) -> float:
    """Return a text's width in pixels, on the safe side: no font is at hand to measure it."""
    return len(text) * size * 0.6


class _Picture:
    """Lays the picture out from top to bottom: (1) title, (2) legend, (3) the vertical axis' name, (4) plot, (5) x."""

    def __init__(self, frame: Frame, width: int, height: int, title: str, x: str, y: str) -> None:
        self.frame, self.size, self.title, self.x, self.y = frame, (width, height), title, x, y
        self.title_size = min(15.0, (width - 24) / _width(title or " ", 1.0))
        self.legend_at = 34.0 if title else 10.0  # (1)
        self.entries = self._entries()
        below_legend = self.legend_at + 18 * (1 + self.entries[-1][0])  # (2)
        self.y_at = below_legend + 14
        self.top = below_legend + (28 if y else 10)  # (3)
        self.bottom = height - (46.0 if x else 30.0)  # (5)
        self.y_ticks = frame.y.ticks(max(2, int((self.bottom - self.top) / 40)))
        self.left = 20 + max(_width(label) for _, label in self.y_ticks)
        self.right = width - 20.0
        self.x_ticks = frame.x.ticks(max(2, int((self.right - self.left) / 80)))

    def parts(self) -> Iterator[str]:
        """Return the document's elements."""
        yield from self._texts()
        yield from self._axes()
        for number in range(len(self.frame.series)):
            yield from self._curve(number)
        yield from self._legend()

    def _at(self, point: Point) -> Point:
        return self.left + point[0] * (self.right - self.left), self.bottom - point[1] * (self.bottom - self.top)

    def _texts(self) -> Iterator[str]:
        width, height = self.size
        yield (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
            f'role="img" font-family="system-ui, Helvetica, Arial, sans-serif" font-size="{FONT:g}" fill="{INK}">'
        )
        if self.title:
            yield f"<title>{escape(self.title)}</title>"
            yield f'<text x="12" y="22" font-size="{self.title_size:.1f}" font-weight="600">{escape(self.title)}</text>'
        if self.y:
            yield f'<text x="12" y="{self.y_at:.1f}">{escape(self.y)}</text>'
        middle = (self.left + self.right) / 2
        if self.x:
            yield f'<text x="{middle:.1f}" y="{height - 10}" text-anchor="middle">{escape(self.x)}</text>'
        if self.frame.empty:
            yield (
                f'<text x="{middle:.1f}" y="{(self.top + self.bottom) / 2:.1f}" text-anchor="middle">'
                "no finite point to draw</text>"
            )

    def _axes(self) -> Iterator[str]:
        grid = ""
        for place, label in self.y_ticks:
            _, y = self._at((0, place))
            grid += f"M{self.left:.1f} {y:.1f}H{self.right:.1f}"
            yield f'<text x="{self.left - 8:.1f}" y="{y + 4:.1f}" text-anchor="end">{label}</text>'
        end = 0.0
        for place, label in self.x_ticks:
            x, _ = self._at((place, 0))
            grid += f"M{x:.1f} {self.top:.1f}V{self.bottom:.1f}"
            half = _width(label) / 2
            centre = min(x, self.size[0] - 4 - half)  # not cut off at the right
            if centre - half > end:  # a number that would touch its neighbour gives way
                yield f'<text x="{centre:.1f}" y="{self.bottom + 18:.1f}" text-anchor="middle">{label}</text>'
                end = centre + half + 4
        yield f'<path d="{grid}" stroke="{INK}" stroke-opacity=".3" stroke-width=".75" fill="none"/>'
        yield f'<path d="M{self.left:.1f} {self.bottom:.1f}H{self.right:.1f}" stroke="{INK}" fill="none"/>'

    def _curve(self, number: int) -> Iterator[str]:
        series, runs = self.frame.series[number], self.frame.runs[number]
        path = "".join("M" + "L".join("{:.1f} {:.1f}".format(*self._at(point)) for point in run) for run in runs)
        if path:
            yield f'<path d="{path}" {_stroke(number, series.dashed)}/>'
        marks = "".join(_mark(number, *self._at(point)) for point in self.frame.marks(number))
        if marks:
            yield f'<path d="{marks}" fill="{_colour(number)}"/>'

    def _entries(self) -> list[tuple[int, float, str]]:
        """Return line, x and name of each entry of the legend: side by side while they fit."""
        entries: list[tuple[int, float, str]] = []
        line, x = 0, 12.0
        for name in self.frame.legend():
            needed = 36 + _width(name)
            if entries and x + needed > self.size[0] - 12:
                line, x = line + 1, 12.0
            entries.append((line, x, name))
            x += needed + 18
        return entries

    def _legend(self) -> Iterator[str]:
        for number, (line, x, name) in enumerate(self.entries):
            y, dashed = self.legend_at + 18 * line + 8, self.frame.series[number].dashed
            yield f'<path d="M{x:.1f} {y:.1f}h28" {_stroke(number, dashed)}/>'
            if not dashed:
                yield f'<path d="{_mark(number, x + 14, y)}" fill="{_colour(number)}"/>'
            yield f'<text x="{x + 36:.1f}" y="{y + 4:.1f}">{escape(name)}</text>'


def _colour(number: int) -> str:
    return COLOURS[number % len(COLOURS)]


def _stroke(number: int, dashed: bool) -> str:
    """Return how a curve is drawn; round ends make a point that stands alone a dot."""
    style = 'stroke-dasharray="6 5"' if dashed else 'stroke-linecap="round"'
    return f'stroke="{_colour(number)}" stroke-width="1.75" stroke-linejoin="round" fill="none" {style}'


def _mark(number: int, x: float, y: float) -> str:
    """Return the outline of a series' mark around a point."""
    start, outline = (
        (f"M{x - 4.5:.1f} {y:.1f}", "a4.5 4.5 0 1 0 9 0a4.5 4.5 0 1 0 -9 0z"),  # disc
        (f"M{x - 5:.1f} {y - 3:.1f}", "l2 -2l3 3l3 -3l2 2l-3 3l3 3l-2 2l-3 -3l-3 3l-2 -2l3 -3z"),  # cross
        (f"M{x:.1f} {y - 5.5:.1f}", "l5.5 9.5h-11z"),  # triangle
        (f"M{x - 4:.1f} {y - 4:.1f}", "h8v8h-8z"),  # square
        (f"M{x:.1f} {y - 6:.1f}", "l5 6l-5 6l-5 -6z"),  # diamond
        (f"M{x - 1.5:.1f} {y - 5.5:.1f}", "h3v4h4v3h-4v4h-3v-4h-4v-3h4z"),  # plus
    )[number % 6]
    return start + outline
