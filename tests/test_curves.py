"""Claims about drawn curves, in characters and in SVG."""

from __future__ import annotations

import io
import itertools
import math
import re
from collections.abc import Callable
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from rich.console import Console

from nearlinear.errors import InputError
from nearlinear.observe.axes import Axis
from nearlinear.observe.curves import Series, draw, svg
from nearlinear.observe.picture import COLOURS, INK

NAMES: dict[str, Any] = {"title": "Digits", "x": "step", "y": "loss"}
FALLING = Series("one process", tuple(range(1, 101)), tuple(3 / n for n in range(1, 101)))
AGAIN = Series("two processes", FALLING.xs, FALLING.ys)
SVG = "{http://www.w3.org/2000/svg}"


def body(text: str) -> str:
    """Return the plot without its title and legend."""
    return text.split("loss\n", 1)[1]


def strokes(document: str) -> list[str]:
    """Return the curves' paths: not the grid, not the axis, not the legend's."""
    paths = ElementTree.fromstring(document).findall(f"{SVG}path")
    return [p.attrib["d"] for p in paths if p.get("stroke") in COLOURS and "h28" not in p.attrib["d"]]


# ---- what both promise


finite_or_not = st.floats(allow_nan=True, allow_infinity=True)
series = st.lists(
    st.lists(st.tuples(finite_or_not, finite_or_not), max_size=30).map(
        lambda points: Series("s", tuple(x for x, _ in points), tuple(y for _, y in points))
    ),
    min_size=1,
    max_size=7,
)


@given(series, st.booleans(), st.booleans(), st.integers(30, 120), st.integers(20, 40))
def test_any_numbers_are_drawn_within_the_given_columns_and_lines(
    curves: list[Series], log_x: bool, log_y: bool, width: int, height: int
) -> None:
    text = draw(curves, width=width, height=height, log_x=log_x, log_y=log_y, **NAMES)
    lines = text.plain.split("\n")
    assert len(lines) == height
    assert max(map(len, lines)) <= width


@given(series, st.booleans(), st.booleans())
def test_any_numbers_give_an_svg_that_parses_with_every_coordinate_in_the_picture(
    curves: list[Series], log_x: bool, log_y: bool
) -> None:
    document = svg(curves, log_x=log_x, log_y=log_y, **NAMES)
    ElementTree.fromstring(document)
    for path in strokes(document):
        for x, y in re.findall(r"[ML](-?[\d.]+) (-?[\d.]+)", path):
            assert 0 <= float(x) <= 720
            assert 0 <= float(y) <= 400


@pytest.mark.parametrize("make", [draw, svg])
def test_no_series_is_an_error(make: Callable[..., object]) -> None:
    with pytest.raises(InputError, match="no series to draw"):
        make([])


def test_a_series_with_more_xs_than_ys_is_an_error_that_counts_them() -> None:
    with pytest.raises(InputError, match="'loss' has 3 xs and 2 ys"):
        Series("loss", (1, 2, 3), (1.0, 2.0))


def test_a_plot_too_small_to_read_is_an_error_that_names_the_least_size() -> None:
    with pytest.raises(InputError, match="at least 30 columns and 9 lines"):
        draw([FALLING], width=20, height=8, **NAMES)
    with pytest.raises(InputError, match="a picture of 720 x 100 pixels has no room for curves; give it 240 x 186"):
        svg([FALLING], height=100, **NAMES)


# ---- characters


def test_curves_that_lie_on_each_other_show_both_marks_without_colour() -> None:
    plot = body(draw([FALLING, AGAIN], **NAMES).plain)
    assert plot.count("●") == plot.count("×") == 8


def test_few_points_that_lie_on_each_other_show_both_marks_too() -> None:
    few = [Series(name, (1, 2, 3, 4), (1.0, 2.0, 3.0, 4.0)) for name in ("a", "b")]
    plot = body(draw(few, **NAMES).plain)
    assert plot.count("●") == plot.count("×") == 2


def test_the_legend_names_each_series_beside_its_mark() -> None:
    legend = draw([FALLING, AGAIN], **NAMES).plain.split("\n")[1]
    assert legend == "●─● one process   ×─× two processes"


def test_a_falling_curve_begins_top_left_and_ends_bottom_right() -> None:
    few = Series("s", (0, 1, 2), (2.0, 1.0, 0.0))
    lines = body(draw([few], width=40, height=14, **NAMES).plain).split("\n")
    where = [(lines.index(line), line.index("●")) for line in lines if "●" in line]
    assert where == [(0, 3), (4, 21), (7, 38)]


def test_every_axis_bears_round_numbers() -> None:
    plot = body(draw([FALLING], height=20, **NAMES).plain)
    assert re.findall(r"^ *([\d.]+)┤", plot, re.MULTILINE) == ["3.0", "2.5", "2.0", "1.5", "1.0", "0.5", "0.0"]
    assert plot.split("\n")[-2].split() == ["20", "40", "60", "80", "100"]


def test_a_dashed_series_is_a_line_with_gaps_and_without_marks() -> None:
    ideal = Series("ideal", (1, 2, 4, 8), (1, 2, 4, 8), dashed=True)
    solid = Series("ideal", ideal.xs, ideal.ys)
    dots = [sum(0x2800 < ord(c) <= 0x28FF for c in body(draw([s], **NAMES).plain)) for s in (ideal, solid)]
    assert 0 < dots[0] < 0.8 * dots[1]
    assert "●" not in draw([ideal], **NAMES).plain


def test_ascii_alone_suffices_for_a_terminal_that_has_nothing_else() -> None:
    text = draw([FALLING, AGAIN], ascii_only=True, **NAMES).plain
    assert text.isascii()
    assert "o-o one process   x-x two processes" in text


def test_colour_goes_to_a_terminal_and_bare_characters_to_a_file() -> None:
    plot, terminal, file = draw([FALLING], **NAMES), io.StringIO(), io.StringIO()
    Console(file=terminal, force_terminal=True, color_system="standard", width=80, no_color=False).print(plot)
    Console(file=file, width=80).print(plot)
    assert "\x1b[" in terminal.getvalue()
    assert file.getvalue() == plot.plain + "\n"


# ---- degenerate input


def test_values_that_are_not_finite_leave_a_gap_and_are_counted_in_the_legend() -> None:
    broken = Series("loss", (1, 2, 3, 4, 5), (1.0, 2.0, math.nan, 2.0, 1.0))
    assert "loss (1 not shown)" in draw([broken], **NAMES).plain
    (path,) = strokes(svg([broken], **NAMES))
    assert path.count("M") == 2


def test_values_at_or_below_zero_are_left_out_of_a_logarithmic_axis_and_counted() -> None:
    with_zero = Series("loss", (1, 2, 3), (1.0, 0.0, 0.01))
    assert "loss (1 not shown)" in draw([with_zero], log_y=True, **NAMES).plain


def test_a_single_point_stands_in_the_middle_with_its_mark() -> None:
    plot = body(draw([Series("s", (3,), (2.5,))], width=41, height=14, **NAMES).plain)
    (line,) = (line for line in plot.split("\n") if "●" in line)
    assert 18 <= line.index("●") <= 24


def test_a_constant_series_is_a_level_line_beside_its_value() -> None:
    plot = body(draw([Series("s", tuple(range(50)), (0.1,) * 50)], **NAMES).plain)
    (line,) = (line for line in plot.split("\n") if "●" in line)
    assert line.strip().startswith("0.10┤")


def test_a_series_without_a_finite_value_says_so() -> None:
    nothing = Series("s", (1, 2), (math.nan, math.inf))
    assert "no finite point to draw" in draw([nothing], **NAMES).plain
    assert "no finite point to draw" in svg([nothing], **NAMES)


# ---- ticks


@given(st.floats(-1e9, 1e9), st.floats(1e-6, 1e9), st.integers(2, 10))
def test_ticks_lie_on_the_axis_at_equal_distances_of_1_2_or_5(low: float, span: float, about: int) -> None:
    assume(span > 1e-8 * max(abs(low), abs(low + span)))  # closer ones are drawn as a constant
    ticks = Axis(low, low + span).ticks(about)
    places = [place for place, _ in ticks]
    assert all(-1e-6 <= place <= 1 + 1e-6 for place in places)
    assert len(ticks) <= about + 1
    for a, b in itertools.pairwise(places):
        digits = f"{(b - a) * span:.3e}"
        assert digits[0] in "125" or digits.startswith("9.9")
    assert len({label for _, label in ticks}) == len(ticks)


def test_counts_of_processes_are_their_own_ticks() -> None:
    axis = Axis.over([1, 2, 4, 8], log=False, to_ticks=False)
    assert [label for _, label in axis.ticks(5)] == ["1", "2", "4", "8"]


def test_a_logarithmic_axis_over_many_decades_shows_powers_of_ten() -> None:
    axis = Axis.over([1e-12, 1.0], log=True, to_ticks=True)
    assert [label for _, label in axis.ticks(5)] == ["1e-12", "1e-09", "1e-06", "0.001", "1"]


# ---- SVG


def luminance(colour: str) -> float:
    """Return the relative luminance of ``#rrggbb`` (WCAG 2)."""
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return sum(weight * c for weight, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


@pytest.mark.parametrize("page", ["#ffffff", "#0d1117"])
def test_every_colour_stands_out_from_a_light_and_from_a_dark_page(page: str) -> None:
    def contrast(colour: str) -> float:
        dark, light = sorted((luminance(colour), luminance(page)))
        return (light + 0.05) / (dark + 0.05)

    assert contrast(INK) >= 4
    assert min(contrast(colour) for colour in COLOURS) >= 3


@pytest.mark.parametrize(
    "curves",
    [
        [FALLING, AGAIN],
        [Series(f"a rather long name of series {i}", (0, 1000, 250_000), (1e9 * i, 2e9, 7e9)) for i in range(4)],
        [Series("measured", (1, 2, 4, 8, 16, 32, 64, 128), tuple(range(8)))],
        [Series("rounding", (1, 2, 3), (1.1e-16, 3e-16, 2e-16))],
    ],
    ids=["losses", "long names", "counts", "tiny"],
)
@pytest.mark.parametrize(("width", "height"), [(720, 400), (360, 240)])
def test_no_text_of_the_picture_is_cut_off_or_lies_on_another(curves: list[Series], width: int, height: int) -> None:
    document = svg(curves, width=width, height=height, title="A title " * 12, x="samples", y="bytes per second")
    boxes = []
    for text in ElementTree.fromstring(document).findall(f"{SVG}text"):
        size = float(text.get("font-size", "12"))
        length, x, y = len(text.text or "") * size * 0.56, float(text.attrib["x"]), float(text.attrib["y"])
        left = x - {"start": 0.0, "middle": length / 2, "end": length}[text.get("text-anchor", "start")]
        boxes.append((left, y - 0.8 * size, left + length, y + 0.2 * size, text.text))
    for left, top, right, bottom, words in boxes:
        assert left >= 0 and top >= 0 and right <= width and bottom <= height, words
    for one, other in itertools.combinations(boxes, 2):
        apart = one[2] <= other[0] or other[2] <= one[0] or one[3] <= other[1] or other[3] <= one[1]
        assert apart, (one, other)


def test_names_with_angle_brackets_survive_in_the_picture() -> None:
    document = svg([Series("a < b & c", (1, 2), (1, 2))], title="<loss>", x="step", y="loss")
    texts = [text.text for text in ElementTree.fromstring(document).findall(f"{SVG}text")]
    assert "a < b & c" in texts
    assert "<loss>" in texts
