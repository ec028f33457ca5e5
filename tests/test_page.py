"""The page of a plan: what is on it, whether it is well formed, and what it does in a browser."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Iterator, Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from browser import CHROMIUM, Page, browser
from nearlinear.core.cluster import Cluster, Device, Island, Link
from nearlinear.core.forecast import Forecast, Point
from nearlinear.core.graph import Graph, Operator, Tensor
from nearlinear.core.schedule import one_f_one_b
from nearlinear.errors import InputError
from nearlinear.observe.page import Bar, Comparison, Content, Figure, Measured, Pace, Split, Stage, Timeline, page
from nearlinear.observe.page.drawing import ACROSS, DOWN, _layout
from nearlinear.observe.page.merging import BOXES, merged
from nearlinear.observe.page.style import DARK, LIGHT
from nearlinear.observe.page.text import shortened, text
from nearlinear.observe.page.timeline import joined
from nearlinear.planning.partition import partition
from nearlinear.planning.simulate import Bucket, Span, Work, simulate
from nearlinear.planning.workload import read_workload

WORKLOADS = Path(__file__).parents[2] / "shared" / "workloads" / "graphs"
SVG = "{http://www.w3.org/2000/svg}"
ATTACK = "<img src=x onerror=hacked=1>\"'><script>hacked=1</script></title></style></svg>&\x00\x1b\ud800"
NOT_CLOSED = {"meta", "input", "br", "hr", "img", "link"}


def transformer(blocks: int, stages: int = 4, name: str = "gpt", odd: str = "") -> Split:
    """Return a model of ``12 x blocks + 2`` operators whose names are module paths, cut into stages."""
    operators, tensors = [Operator(f"wte{odd}", "embedding", 1e-4, 1e-4, parameter_bytes=4e6)], []
    parts = ("ln_1", "attn.q", "attn.k", "attn.v", "attn.sdpa", "attn.out", "add_1", "ln_2", "mlp.up", "mlp.gelu")
    for block in range(blocks):
        first, before = len(operators), len(operators) - 1
        for part in (*parts, "mlp.down", "add_2"):
            operators.append(Operator(f"h.{block}.{part}{odd}", part.split(".")[-1], 1e-3, 2e-3, parameter_bytes=1e6))
        ln_1, q, k, v, mix, out, add_1, ln_2, up, gelu, down, add_2 = range(first, first + 12)
        tensors += [Tensor(before, (ln_1, add_1), 1e6), Tensor(ln_1, (q, k, v), 1e6)]
        tensors += [Tensor(each, (mix,), 1e6) for each in (q, k, v)]
        tensors += [Tensor(a, (b,), 1e6) for a, b in ((mix, out), (out, add_1), (ln_2, up), (up, gelu), (gelu, down))]
        tensors += [Tensor(add_1, (ln_2, add_2), 1e6), Tensor(down, (add_2,), 1e6)]
    operators.append(Operator(f"loss{odd}", "cross_entropy", 1e-4, 1e-4))
    tensors.append(Tensor(len(operators) - 2, (len(operators) - 1,), 1e6))
    stage = tuple(stages * place // len(operators) for place in range(len(operators)))
    return Split(Graph(tuple(operators), tuple(tensors), name=name), stage)


def simulated(stages: int, microbatches: int = 6, slower: float = 1.0, name: str = "predicted") -> Timeline:
    device, cable = Device("cpu", 8e9, {"float32": 5e10}, 1e10), Link(1e-4, 1e9)
    islands = tuple(Island((each,), cable) for each in range(2 * stages))
    cluster = Cluster((device,) * (2 * stages), islands, cable)
    work = [Work(0.01 * slower, 0.02 * slower, 0.004, 1e6, (Bucket(4e6, 0.5), Bucket(4e6)))] * stages
    return Timeline.of(simulate(one_f_one_b(stages, microbatches), [work, work], cluster), name)


def forecast(most: int = 8, odd: str = "") -> Forecast:
    points = [Point(1, f"alone{odd}", 64, 1.0, 0.9, 1.1, 4e9, compute=1.0, fits=False)]
    devices = 2
    while devices <= most:
        took = 1 / devices + 0.02 * devices**0.5
        points.append(
            Point(devices, f"data{odd}", 64, took, 0.9 * took, 1.3 * took, 2e9, 1 / devices, took - 1 / devices)
        )
        devices *= 2
    return Forecast(tuple(points), points[len(points) // 2].devices, f"the network{odd}", f"gpt on 8 machines{odd}")


def full(odd: str = "", blocks: int = 12, most: int = 8) -> Content:
    """Return content that has everything; ``odd`` is put into every name."""
    known = forecast(most, odd)
    split = transformer(blocks, name=f"gpt{odd}", odd=odd)
    expected = known.points[-1]
    return Content(
        title=f"gpt on 8 devices{odd}",
        about=f"8 x cpu{odd}",
        figures=(Figure(f"stop at{odd}", f"4 devices{odd}", f"8 add little{odd}"), Figure("step", "270 ms")),
        forecast=known,
        measured=(Measured(1, 60.0, f"a run{odd}"), Measured(2, 110.0)),
        split=split,
        stages=tuple(
            Stage(f"h.{n}{odd}", 0.03 + 0.002 * n, 1e9, 1e6 if n < 3 else 0.0, f"{n}{odd}", 0.032 if n else None)
            for n in range(4)
        ),
        timelines=(simulated(4), simulated(4, slower=1.1, name=f"measured{odd}")),
        pace=tuple(
            Pace(
                5 + 0.2 * n,
                10 * n,
                expected.rate * (0.9 + 0.01 * (n % 7)),
                0.2 + 0.01 * (n % 5),
            )
            for n in range(1, 400)
        ),
        expected=expected,
        spent=(Bar.of(expected), Bar(f"measured{odd}", (("compute", 0.2), (f"other{odd}", 0.1)), f"roughly{odd}")),
        compared=(Comparison(f"samples/s{odd}", f"220{odd}", f"200{odd}", f"9 % slower{odd}"),),
        reasons=(f"data takes 270 ms{odd}",),
        notes=(f"captured by torch.export{odd}",),
    )


CONTENTS = {
    "full": full(),
    "title alone": Content("nothing else"),
    "hostile names": full(ATTACK),
    "two thousand operators": full(blocks=170),
    "thousands of devices": full(most=4096),
    "one device": Content("alone", forecast=Forecast((Point(1, "alone", 8, 1.0, 1.0, 1.0),), 1, "no other")),
    "measured without a forecast": Content("two runs", measured=(Measured(1, 10.0), Measured(2, 18.0))),
    "a graph of one operator": Content("one", split=Split(Graph((Operator("a"),)), (0,))),
    "time to a loss": Content(
        "loss",
        forecast=Forecast(
            tuple(
                Point(n, "data", 64 * n, 1 + 0.05 * n, 1.0, 2.0, to_loss=(1 + 0.05 * n) / n + 0.02 * n)
                for n in (1, 2, 4, 8, 16)
            ),
            8,
            "the noise",
        ),
    ),
    "sixty-four stages": Content("many", split=transformer(20, 64), timelines=(simulated(64, 4),)),
    "times of zero": Content(
        "zero",
        stages=(Stage("a", 0.0),),
        spent=(Bar("predicted", (("compute", 0.0),)),),
        timelines=(Timeline("predicted", 0.0, ()),),
        pace=(Pace(1.0, 1, float("nan")), Pace(2.0, 2, 0.0), Pace(3.0, 3, 0.0)),
    ),
}


class Structure(HTMLParser):
    """Checks that what is opened is closed, and notes tags, attributes and text."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.said: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        names = [name for name, _ in attributes]
        assert len(names) == len(set(names)), (tag, names)
        self.tags.append((tag, dict(attributes)))
        if tag not in NOT_CLOSED:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attributes)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, (tag, self.getpos())

    def handle_data(self, data: str) -> None:
        self.said.append(data)


def structure(html: str) -> Structure:
    found = Structure()
    found.feed(html)
    found.close()
    assert not found.open
    return found


def pictures(html: str) -> list[ElementTree.Element]:
    return [ElementTree.fromstring(each) for each in re.findall(r"<svg.*?</svg>", html, re.DOTALL)]


# ---- the file


@pytest.mark.parametrize("name", CONTENTS)
def test_the_file_is_well_formed_and_so_is_every_picture(name: str) -> None:
    html = page(CONTENTS[name])
    found = structure(html)
    ids = [attributes["id"] for _, attributes in found.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    for attributes in (attributes for _, attributes in found.tags):
        for reference in ("aria-labelledby", "aria-describedby"):
            assert attributes.get(reference) is None or attributes[reference] in ids
    for element in (element for drawn in pictures(html) for element in drawn.iter()):  # raises where it is not XML
        for attribute in ("x", "y", "width", "height", "cx", "cy", "d"):
            assert not re.search("nan|inf", element.get(attribute, "")), element.attrib
    html.encode()  # raises on half a surrogate pair


@pytest.mark.parametrize("name", CONTENTS)
def test_every_picture_has_a_title_and_says_in_words_what_is_on_it(name: str) -> None:
    for drawn in pictures(page(CONTENTS[name])):
        if drawn.get("aria-hidden") == "true":  # a bar beside the number that it shows
            continue
        for tag in ("title", "desc"):
            words = drawn.find(f"{SVG}{tag}")
            assert words is not None and words.text


def test_a_page_names_nothing_outside_itself() -> None:
    html = page(full())
    for tag, attributes in structure(html).tags:
        assert tag not in ("link", "img", "iframe", "object", "embed", "image", "use")
        assert not {"src", "href", "action", "srcset"} & attributes.keys()
    assert not re.search(r"url\(|@import|//(?!www\.w3\.org/2000/svg)\w", html.replace("http://www.w3.org/2000/svg", ""))
    assert "default-src 'none'" in html


def test_no_name_becomes_markup() -> None:
    plain, attacked = structure(page(full())), structure(page(full(ATTACK)))
    assert {tag for tag, _ in attacked.tags} == {tag for tag, _ in plain.tags}
    assert sum(tag == "script" for tag, _ in attacked.tags) == 1
    assert not any(name.startswith("on") for _, attributes in attacked.tags for name in attributes)
    shown = ATTACK.replace("\x00", "\ufffd").replace("\x1b", "\ufffd").replace("\ud800", "\ufffd")
    said = "".join(attacked.said)
    for where in ("gpt on 8 devices", "stop at", "the network", "h.0", "data takes 270 ms", "a run", "samples/s"):
        assert where + shown in said, where


def test_what_is_empty_is_left_out() -> None:
    assert "<h2>" not in page(Content("nothing else"))
    headings = re.findall("<h2>(.*?)</h2>", page(full()))
    assert headings == [
        "Forecast against measurement",
        "Samples per second over time",
        "Scaling",
        "The plan",
        "The graph by stage",
        "Timeline of a step",
        "Where the time went",
        "Notes",
    ]


@pytest.mark.parametrize("name", CONTENTS)
def test_content_survives_json(name: str) -> None:
    content = CONTENTS[name]
    again = Content.from_json(content.to_json())
    if name == "times of zero":  # NaN is not equal to itself
        again = dataclasses.replace(again, pace=again.pace[1:])
        content = dataclasses.replace(content, pace=content.pace[1:])
    assert again == content


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": "nearlinear-page/1"}', '{"format": "nearlinear-page/2"}'])
def test_other_json_is_no_content(text: str) -> None:
    with pytest.raises(InputError, match="not a page's content"):
        Content.from_json(text)


def test_a_split_without_a_stage_for_every_operator_is_an_error() -> None:
    with pytest.raises(InputError, match="2 operators, 1 stages"):
        Split(Graph((Operator("a"), Operator("b"))), (0,))


def test_a_partition_is_drawn_with_its_loads_and_what_crosses() -> None:
    graph = transformer(2).graph
    found = partition(graph, 3, 1e9)
    stages, split = Stage.of_partition(graph, found), Split.of(graph, found)
    assert [stage.load for stage in stages] == [found.loads[device] for device in found.stages]
    assert sorted(set(split.stage)) == list(range(len(stages)))
    assert sum(stage.sent for stage in stages[:-1]) > 0
    assert all(split.stage[t.producer] <= split.stage[c] for t in graph.tensors for c in t.consumers)


# ---- the graph


@st.composite
def graphs(draw: st.DrawFn) -> Split:
    count = draw(st.integers(1, 40))
    depth = draw(st.integers(0, 3))
    names = [".".join([*(str(draw(st.integers(0, 2))) for _ in range(depth)), f"op_{place}"]) for place in range(count)]
    tensors = []
    for producer in range(count - 1):
        some = draw(st.sets(st.integers(producer + 1, count - 1), max_size=3))
        if some:
            tensors.append(Tensor(producer, tuple(sorted(some)), 8.0))
    cuts = sorted(draw(st.lists(st.integers(0, count), max_size=4)))
    stage = tuple(sum(place >= cut for cut in cuts) for place in range(count))
    return Split(Graph(tuple(Operator(name, forward=1.0) for name in names), tuple(tensors)), stage)


@settings(deadline=None, max_examples=40)
@given(graphs(), st.integers(1, 20))
def test_every_operator_is_in_one_box_and_no_box_waits_for_a_later_one(split: Split, most: int) -> None:
    drawing = merged(split, most)
    assert sorted(place for box in drawing.boxes for place in box.operators) == list(range(len(split.stage)))
    assert all(split.stage[place] == box.stage for box in drawing.boxes for place in box.operators)
    assert all(source < target for source, target in drawing.passed)


@settings(deadline=None, max_examples=40)
@given(graphs())
def test_no_box_lies_on_another_and_lines_lead_down_or_to_the_right(split: Split) -> None:
    drawing = merged(split)
    spots, columns = _layout(drawing)
    for one, other in itertools.combinations(spots, 2):
        assert abs(one.x - other.x) >= ACROSS or abs(one.y - other.y) >= DOWN
    for source, target in drawing.passed:
        one, other = spots[source], spots[target]
        assert (one.column, one.row) < (other.column, other.row)
    for spot, box in zip(spots, drawing.boxes, strict=True):
        stage, left, right = columns[spot.column]
        assert stage == box.stage and left < spot.x and spot.x + ACROSS < right


def test_two_thousand_operators_become_boxes_named_by_their_modules() -> None:
    split = transformer(170)
    names = [box.name for box in merged(split).boxes]
    assert len(split.stage) == 2042
    assert BOXES / 2 < len(names) <= BOXES
    assert names[:2] == ["wte … h.1", "h.2 … h.4"]  # a module of a few blocks
    names = [box.name for box in merged(transformer(20)).boxes]
    assert names[:3] == ["wte", "h.0", "h.1"]
    assert "h.15.ln_1" in names and "h.15.attn … h.15.add_2" in names  # a stage ends within the block


def test_a_graph_of_few_operators_is_drawn_operator_by_operator() -> None:
    split = transformer(6)
    assert [box.name for box in merged(split).boxes] == [operator.name for operator in split.graph.operators]


@pytest.mark.parametrize("name", ["gpt2m-op", "nasnetalarge-layer", "inceptionv3-layer"])
def test_published_graphs_are_drawn_in_few_boxes(name: str) -> None:
    path = WORKLOADS / f"{name}.json"
    if not path.exists():
        pytest.skip(f"no {path.name} in ../shared/workloads")
    graph = read_workload(path.read_text(), path.name).graph
    split = Split(graph, tuple(4 * place // len(graph.operators) for place in range(len(graph.operators))))
    drawing = merged(split)
    assert len(drawing.boxes) <= BOXES + 4
    for drawn in pictures(page(Content(name, split=split))):
        assert len(drawn.findall(f".//{SVG}g[@class]")) >= len(drawing.boxes)


# ---- the timeline


def test_bars_of_a_kind_are_joined_until_few_are_left() -> None:
    spans = [Span(device, n / 1000, (n + 0.9) / 1000, f"F{n}", True) for device in range(2) for n in range(1000)]
    close, gap = joined(spans, 1.0, most=100)
    assert len(close) <= 100
    assert 1e-4 <= gap < 0.1
    assert (close[0].start, close[-1].end) == (0.0, 0.9999)
    assert close[0].what.startswith("F0 … F")
    assert joined(spans[:50], 1.0, most=100) == (spans[:50], 0.0)


def test_both_timelines_lie_on_one_scale() -> None:
    quick, slow = simulated(2), simulated(2, slower=2.0, name="measured")
    drawn = [each for each in pictures(page(Content("two", timelines=(quick, slow)))) if each.get("width") == "100%"]
    ends = []
    for each in drawn:
        bars = each.findall(f"{SVG}rect[@class]")
        spans = [bar for bar in bars if "span" in bar.attrib["class"]]
        ends.append(max(float(bar.attrib["x"][:-1]) + float(bar.attrib["width"][:-1]) for bar in spans))
    assert ends[1] == pytest.approx(100, abs=0.1)
    assert ends[0] == pytest.approx(100 * quick.seconds / slow.seconds, abs=0.1)


# ---- text and colours


@given(st.text(max_size=30))
def test_any_text_becomes_an_element_and_an_attribute(value: str) -> None:
    element = ElementTree.fromstring(f'<a b="{text(value)}">{text(value)}</a>')
    assert set(element.text or "") <= set(value) | {"\ufffd", "\n"}


@given(st.text(min_size=1, max_size=60), st.integers(40, 300))
def test_a_shortened_name_fits_its_room(value: str, room: int) -> None:
    assert len(shortened(value, room, 11)) * 11 * 0.6 <= room or len(value) <= 3


def contrast(one: str, other: str) -> float:
    """Return the contrast of two colours (WCAG 2)."""

    def luminance(colour: str) -> float:
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
        return sum(weight * c for weight, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))

    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("colours", [LIGHT, DARK], ids=["light", "dark"])
def test_text_stands_out_4_5_to_1_and_colours_3_to_1(colours: dict[str, str]) -> None:
    for ground in (colours["page"], colours["panel"]):
        assert min(contrast(colours[name], ground) for name in ("ink", "quiet")) >= 4.5
        for name in (*(f"c{n}" for n in range(8)), "idle", "ideal"):
            assert contrast(colours[name], ground) >= 3, name
    for name in ("c0", "c2", "c3", "c6"):  # forward, backward, update, other: with text on them
        assert contrast(colours[name], colours["page"]) >= 4.5, name


# ---- in a browser


needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="no chromium on the path (apt-get install chromium)")


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with browser(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    found = {}
    for number, (name, content) in enumerate(CONTENTS.items()):
        found[name] = folder / f"{number}.html"
        found[name].write_text(page(content), encoding="utf-8")
    return found


@needs_browser
@pytest.mark.parametrize("name", CONTENTS)
@pytest.mark.parametrize(("width", "dark"), [(1200, False), (360, True)])
def test_a_page_opens_without_complaint_loads_nothing_and_fits(
    chromium: Page, files: dict[str, Path], name: str, width: int, dark: bool
) -> None:
    chromium.open(files[name], width, dark=dark)
    assert chromium.complaints() == []
    assert chromium.requested() == [files[name].resolve().as_uri()]
    assert chromium.value("document.documentElement.scrollWidth") <= width
    assert chromium.value("typeof hacked") == "undefined"
    ground = chromium.value("getComputedStyle(document.body).backgroundColor")
    page_colour = (DARK if dark else LIGHT)["page"]
    assert ground == "rgb({}, {}, {})".format(*(int(page_colour[i : i + 2], 16) for i in (1, 3, 5)))


OVERLAPS = """(() => {
  const bad = [];
  for (const svg of document.querySelectorAll("%s")) {
    const frame = svg.getBoundingClientRect();
    if (!frame.width) continue;
    const boxes = [...svg.querySelectorAll("text")].map(t => [t.textContent, t.getBoundingClientRect()])
      .filter(([, b]) => b.width);
    for (const [words, b] of boxes)
      if (b.left < frame.left - 1 || b.right > frame.right + 1 || b.top < frame.top - 1 || b.bottom > frame.bottom + 1)
        bad.push(words + " is cut off");
    boxes.forEach(([one, a], i) => boxes.slice(i + 1).forEach(([other, b]) => {
      if (a.left < b.right - 1 && b.left < a.right - 1 && a.top < b.bottom - 2 && b.top < a.bottom - 2)
        bad.push(one + " lies on " + other);
    }));
  }
  return bad;
})()"""


@needs_browser
@pytest.mark.parametrize("name", ["full", "thousands of devices", "two thousand operators", "sixty-four stages"])
@pytest.mark.parametrize("width", [1200, 700, 360])
def test_no_text_of_a_picture_is_cut_off_or_lies_on_another(
    chromium: Page, files: dict[str, Path], name: str, width: int
) -> None:
    chromium.open(files[name], width)
    assert chromium.value(OVERLAPS % "svg") == []


@needs_browser
def test_a_telephone_gets_pictures_of_its_own_with_text_as_large(chromium: Page, files: dict[str, Path]) -> None:
    for width, shown in ((1200, "wide"), (360, "narrow")):
        chromium.open(files["full"], width)
        visible = chromium.value(
            "[...document.querySelectorAll('.wide > svg, .narrow > svg')].filter(e => e.getBoundingClientRect().width)"
            ".map(e => e.parentNode.className)"
        )
        assert set(visible) == {shown}
        scale = chromium.value(
            f"(() => {{const e = document.querySelector('.{shown} > svg');"
            "return e.getBoundingClientRect().width / e.viewBox.baseVal.width})()"
        )
        assert scale > 0.9  # 12 px text stays 11 px


@needs_browser
@pytest.mark.parametrize(
    ("selector", "said"),
    [
        (".box", ["stage 0", "forward 100 µs, backward 100 µs"]),
        (".timelines .span.c0", ["F0 on device 0", "10 ms, from 0 µs to 10 ms"]),
        (".wide .tip", ["2 devices: data", "samples/s", "of ideal"]),
        (".bars rect.tip", ["predicted: compute"]),
        (".wide .c1.mark", ["1 device, measured", "60 samples/s", "a run"]),
    ],
)
def test_the_pointer_brings_up_details_and_escape_puts_them_away(
    chromium: Page, files: dict[str, Path], selector: str, said: Sequence[str]
) -> None:
    if selector == ".wide .tip":
        chromium.open(_scaling_alone(files["full"].parent))
    else:
        chromium.open(files["full"])
    assert chromium.value("document.getElementById('tip').hidden") is True
    chromium.move_to(selector)
    shown = chromium.value("(e => e.hidden ? '' : e.textContent)(document.getElementById('tip'))")
    for words in said:
        assert words in shown
    inside = chromium.value(
        "(b => b.left >= 0 && b.top >= 0 && b.right <= innerWidth && b.bottom <= innerHeight)"
        "(document.getElementById('tip').getBoundingClientRect())"
    )
    assert inside is True
    chromium.call("Input.dispatchKeyEvent", type="keyDown", key="Escape")
    assert chromium.value("document.getElementById('tip').hidden") is True


def _scaling_alone(folder: Path) -> Path:
    path = folder / "scaling.html"
    path.write_text(page(Content("scaling", forecast=forecast())), encoding="utf-8")
    return path


STATE = """(() => { const views = [...document.querySelectorAll(".view")];
  return {wide: views.map(v => v.querySelector("svg").getBoundingClientRect().width / v.clientWidth),
    left: views.map(v => Math.round(v.scrollLeft)), named: document.querySelectorAll(".in.on").length,
    ticks: document.querySelectorAll(".ticks.on text").length}})()"""


@needs_browser
def test_zooming_widens_all_timelines_together_and_shows_more_names_and_numbers(
    chromium: Page, files: dict[str, Path]
) -> None:
    chromium.open(files["full"], 700)
    whole: dict[str, Any] = chromium.value(STATE)
    assert whole["wide"] == pytest.approx([1, 1], abs=0.02)
    for _ in range(3):
        chromium.value("document.querySelector('button[data-zoom=\"2\"]').click()")
    near: dict[str, Any] = chromium.value(STATE)
    assert near["wide"] == pytest.approx([8, 8], abs=0.1)
    assert near["named"] > whole["named"]
    assert near["ticks"] > whole["ticks"]
    assert near["left"][0] == near["left"][1] > 0
    chromium.value("document.querySelector('.view').scrollLeft = 500")
    chromium.value("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
    assert chromium.value(STATE)["left"] == [500, 500]
    chromium.value("document.querySelector('.view').focus()")
    chromium.call("Input.dispatchKeyEvent", type="keyDown", key="0")
    assert chromium.value(STATE) == whole
    assert chromium.complaints() == []


@needs_browser
def test_without_javascript_everything_is_there_but_the_buttons(chromium: Page, files: dict[str, Path]) -> None:
    chromium.call("Emulation.setScriptExecutionDisabled", value=True)
    try:
        chromium.open(files["full"])
        document = chromium.call("DOM.getDocument")["root"]["nodeId"]

        def all_of(selector: str) -> list[int]:
            found: list[int] = chromium.call("DOM.querySelectorAll", nodeId=document, selector=selector)["nodeIds"]
            return found

        assert len(all_of(".tools[hidden]")) == 1
        assert len(all_of(".tip > title")) == len(all_of(".tip")) > 100  # browsers show these by themselves
        assert len(all_of("#tip")) == 0
    finally:
        chromium.call("Emulation.setScriptExecutionDisabled", value=False)
