"""Turning curves into characters, so that a terminal shows them, with colours and without."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from rich.text import Text

from nearlinear.errors import InputError
from nearlinear.observe.axes import Frame, Point, Series


def draw(
    series: Sequence[Series],
    *,
    width: int = 80,
    height: int = 18,
    title: str = "",
    x: str = "",
    y: str = "",
    log_x: bool = False,
    log_y: bool = False,
    ascii_only: bool = False,
) -> Text:
    """Draw curves with characters.

    Args:
        series: The curves; later ones lie on top.
        width: Columns of the whole plot, at least 30.
        height: Lines of the whole plot, title, legend and axis included.
        title: Stands above it.
        x: What the horizontal axis shows.
        y: What the vertical axis shows.
        log_x: Whether the horizontal axis is logarithmic; points at or below zero are left out.
        log_y: The same for the vertical axis.
        ascii_only: Whether to use no character beyond ASCII, for a terminal that has none.

    Returns:
        Text for a ``rich`` console, coloured where that is a terminal; its ``plain`` is the bare characters.

    Raises:
        InputError: There is no series, or no room for the curves.
    """
    frame = Frame.around(series, log_x=log_x, log_y=log_y)
    glyphs = _ASCII if ascii_only else _UNICODE
    below = ", ".join(filter(None, (x, "no finite point to draw" if frame.empty else "")))
    above = [Text(title, "bold")] if title else []
    above += _legend(frame, glyphs, width)
    above += [Text(y, "dim")] if y else []
    rows = height - len(above) - (3 if below else 2)
    if width < 30 or rows < 3:
        raise InputError(
            f"a plot of {width} columns and {height} lines has no room for curves; "
            f"give it at least 30 columns and {height - rows + 3} lines"
        )
    labels = {_row(place, rows): label for place, label in frame.y.ticks(max(2, rows // 2))}
    margin = max(len(label) for label in labels.values()) + 1
    columns = width - margin - 2
    cells = _cells(frame, columns, rows, glyphs)
    lines = above
    for row in range(rows):
        line = Text(f"{labels.get(row, ''):>{margin}}" + (glyphs.tick_y if row in labels else glyphs.axis_y), "dim")
        for column in range(columns):
            line.append(*cells.get((column, row), (" ", "")))
        line.rstrip()
        lines.append(line)
    lines += _below(frame, margin, columns, below, glyphs)
    for line in lines:
        line.truncate(width, overflow="crop")
    return Text("\n", no_wrap=True, overflow="crop", end="").join(lines)


@dataclass(frozen=True, slots=True)
class _Glyphs:
    marks: str
    line: str
    dash: str
    axis_y: str
    tick_y: str
    corner: str
    axis_x: str
    tick_x: str
    braille: bool


_UNICODE = _Glyphs("●×▲□◆+", "─", "╌", "│", "┤", "└", "─", "┬", True)
_ASCII = _Glyphs("ox^#@+", "-", ".", "|", "+", "+", "-", "+", False)
_STYLES = ("blue", "dark_orange", "green", "magenta", "cyan", "red")

# A braille character is two dots wide and four high; a dot's bit, by (column, row).
_DOTS = {(0, 0): 0x01, (0, 1): 0x02, (0, 2): 0x04, (1, 0): 0x08, (1, 1): 0x10, (1, 2): 0x20, (0, 3): 0x40, (1, 3): 0x80}


def _style(number: int) -> str:
    return _STYLES[number % len(_STYLES)]


def _row(place: float, rows: int) -> int:
    """Return the line of characters that a place on the vertical axis falls into."""
    return round((1 - place) * (rows * 4 - 1)) // 4


def _cells(frame: Frame, columns: int, rows: int, glyphs: _Glyphs) -> dict[tuple[int, int], tuple[str, str]]:
    """Return what stands where: by (column, row) a character and its style."""

    def dot(point: Point) -> tuple[int, int]:
        return round(point[0] * (columns * 2 - 1)), round((1 - point[1]) * (rows * 4 - 1))

    bits: dict[tuple[int, int], int] = {}
    styles: dict[tuple[int, int], str] = {}
    for number, each in enumerate(frame.series):
        for run in frame.runs[number]:
            for i, (column, row) in enumerate(_joined([dot(point) for point in run])):
                if not each.dashed or i % 8 < 4:
                    cell = (column // 2, row // 4)
                    bits[cell] = bits.get(cell, 0) | _DOTS[column % 2, row % 4]
                    styles[cell] = _style(number)
    cells = {cell: (chr(0x2800 + mask) if glyphs.braille else ".", styles[cell]) for cell, mask in bits.items()}
    for number in range(len(frame.series)):
        for point in frame.marks(number):
            column, row = dot(point)
            cells[column // 2, row // 4] = (glyphs.marks[number % len(glyphs.marks)], _style(number))
    return cells


def _joined(dots: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Return the dots and those on the straight lines between them."""
    yield from dots[:1]
    for (x0, y0), (x1, y1) in pairwise(dots):
        steps = max(abs(x1 - x0), abs(y1 - y0))
        for i in range(1, steps + 1):
            yield x0 + round((x1 - x0) * i / steps), y0 + round((y1 - y0) * i / steps)


def _legend(frame: Frame, glyphs: _Glyphs, width: int) -> list[Text]:
    """Return the names with their marks, side by side while they fit."""
    lines: list[Text] = []
    for number, name in enumerate(frame.legend()):
        mark = glyphs.marks[number % len(glyphs.marks)]
        key = glyphs.dash * 3 if frame.series[number].dashed else f"{mark}{glyphs.line}{mark}"
        entry = Text.assemble((key, _style(number)), f" {name}")
        if lines and len(lines[-1]) + 3 + len(entry) <= width:
            lines[-1].append("   ").append_text(entry)
        else:
            lines.append(entry)
    return lines


def _below(frame: Frame, margin: int, columns: int, name: str, glyphs: _Glyphs) -> list[Text]:
    """Return the horizontal axis, its numbers, and what they are."""
    axis, numbers = [glyphs.axis_x] * columns, ""
    for place, label in frame.x.ticks(max(2, columns // 12)):
        at = round(place * (columns * 2 - 1)) // 2
        start = min(margin + 1 + at - (len(label) - 1) // 2, margin + 2 + columns - len(label))
        axis[at] = glyphs.tick_x
        if not numbers or start > len(numbers):  # a number that would touch its neighbour gives way
            numbers = numbers.ljust(start) + label
    lines = [Text(" " * margin + glyphs.corner + "".join(axis), "dim"), Text(numbers, "dim")]
    if name:
        lines.append(Text(" " * (margin + 1) + name.center(columns).rstrip(), "dim"))
    return lines
