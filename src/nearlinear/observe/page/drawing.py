"""Turning a graph and its stages into a picture: a column per stage, what waits for others below them.

stage 0        stage 1
+------+       +------+       A box is an operator, or a module where there are too many; within a stage it stands
| a    |  +--->| c    |       below all that it waits for. A stage with more rows than fit goes on in the next
+------+  |    +------+       column. What crosses between stages is drawn thicker, in the colour of the sender.
| b    |--+    | d    |
+------+       +------+
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from nearlinear.core.graph import Graph
from nearlinear.observe.page.content import Split
from nearlinear.observe.page.marks import WIDE, hue, legend, picture, tip
from nearlinear.observe.page.merging import Box, Drawing, merged
from nearlinear.observe.page.text import percent, shortened, text
from nearlinear.units import seconds, size

ACROSS, DOWN = 132.0, 32.0  # pixels of a box
GAP_X, GAP_Y, GUTTER = 12.0, 14.0, 44.0  # between boxes, between rows, between columns
TOP = 46.0  # for a stage's name
IN_A_ROW = 3
NAMED = 16  # stages that the legend names


@dataclass(frozen=True, slots=True)
class _Spot:
    """Where a box is: its column, row and left upper corner."""

    column: int
    row: int
    x: float
    y: float


def graph_by_stage(split: Split) -> str:
    """Return the section's content: the legend and the picture; empty for a graph without operators."""
    if not split.graph.operators:
        return ""
    drawing = merged(split)
    stages = sorted(set(split.stage))
    spots, columns = _layout(drawing)
    across = max(right for _, _, right in columns) + 4
    down = max(spot.y for spot in spots) + DOWN + 14
    crossing = sum(
        tensor.bytes
        for tensor in split.graph.tensors
        if any(split.stage[consumer] != split.stage[tensor.producer] for consumer in tensor.consumers)
    )
    boxes, operators = len(drawing.boxes), len(split.graph.operators)
    drawn = picture(
        "graph",
        f"{split.graph.name} by stage",
        f"{operators:,} operators in {boxes:,} boxes and {len(stages)} stages, which the table lists; "
        f"{size(crossing)} cross between stages per microbatch.",
        (across, down),
        _parts(split.graph, drawing, spots, columns),
    )
    entries = [(f"{hue(stage)} area", f"stage {stage}") for stage in stages[:NAMED]] if len(stages) > 1 else []
    more = [("", f"and {len(stages) - NAMED} more, in the same colours")] if len(stages) > NAMED else []
    told = f"{operators:,} operators"
    if boxes < operators:
        told += f", drawn as {boxes:,} boxes: neighbours of a module are one"
    told += ". The bar in a box is its time, beside that of the longest"
    if len(stages) > 1:
        told += f"; thick lines cross between stages, {size(crossing)} per microbatch one way"
    return (
        f'<figure>{legend(entries + more)}<div class="scroll graph" tabindex="0" role="region" '
        f'aria-label="The graph by stage">{drawn}</div><figcaption>{text(told)}.</figcaption></figure>'
    )


def _layout(drawing: Drawing) -> tuple[list[_Spot], list[tuple[int, float, float]]]:
    """Return the place of every box, and the stage and the left and right end of every column."""
    rows = _rows(drawing)
    best: tuple[list[_Spot], list[tuple[int, float, float]]] | None = None
    for deepest in range(8, 25):  # rows of a column: as few as let the whole stand beside each other
        best = _columns(drawing, rows, deepest)
        if best[1][-1][2] <= WIDE:
            break
    assert best is not None
    return best


def _rows(drawing: Drawing) -> dict[int, list[list[int]]]:
    """Return the rows of boxes of every stage: by depth within the stage, a few in each, crossings kept few."""
    depth = [0] * len(drawing.boxes)
    before: dict[int, list[int]] = defaultdict(list)
    for source, target in sorted(drawing.passed):
        before[target].append(source)
        if drawing.boxes[source].stage == drawing.boxes[target].stage:
            depth[target] = max(depth[target], depth[source] + 1)
    layers: dict[int, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for number, box in enumerate(drawing.boxes):
        layers[box.stage][depth[number]].append(number)
    side = [0.0] * len(drawing.boxes)
    rows: dict[int, list[list[int]]] = {}
    for stage in sorted(layers):
        rows[stage] = []
        for level in sorted(layers[stage]):
            boxes = layers[stage][level]
            where = {n: sum(side[b] for b in before[n]) / max(len(before[n]), 1) for n in boxes}
            boxes.sort(key=lambda n: (where[n], n))
            for start in range(0, len(boxes), IN_A_ROW):
                row = boxes[start : start + IN_A_ROW]
                for place, number in enumerate(row):
                    side[number] = place - (len(row) - 1) / 2
                rows[stage].append(row)
    return rows


def _columns(
    drawing: Drawing, rows: dict[int, list[list[int]]], deepest: int
) -> tuple[list[_Spot], list[tuple[int, float, float]]]:
    spots: dict[int, _Spot] = {}
    columns: list[tuple[int, float, float]] = []
    left = 4.0
    for stage, of_stage in rows.items():
        count = math.ceil(len(of_stage) / deepest)
        each = math.ceil(len(of_stage) / count)  # columns of a stage are alike
        for start in range(0, len(of_stage), each):
            some = of_stage[start : start + each]
            widest = max(map(len, some)) * (ACROSS + GAP_X) - GAP_X
            for down, row in enumerate(some):
                x = left + 10 + (widest - (len(row) * (ACROSS + GAP_X) - GAP_X)) / 2
                for place, number in enumerate(row):
                    y = TOP + down * (DOWN + GAP_Y)
                    spots[number] = _Spot(len(columns), down, x + place * (ACROSS + GAP_X), y)
            columns.append((stage, left, left + widest + 20))
            left += widest + 20 + GUTTER
    return [spots[number] for number in range(len(drawing.boxes))], columns


def _parts(
    graph: Graph, drawing: Drawing, spots: Sequence[_Spot], columns: Sequence[tuple[int, float, float]]
) -> Iterator[str]:
    times = [_time(graph, box) for box in drawing.boxes]
    bottom = max(spot.y for spot in spots) + DOWN + 8
    per_stage: dict[int, float] = defaultdict(float)
    for box, time in zip(drawing.boxes, times, strict=True):
        per_stage[box.stage] += time
    seen: set[int] = set()
    for stage, left, right in columns:
        yield (
            f'<rect class="stage {hue(stage)}" x="{left:.1f}" y="4" width="{right - left:.1f}" '
            f'height="{bottom - 4:.1f}" rx="8"/>'
        )
        title = f"stage {stage}" if len(per_stage) > 1 else "on every device"
        title += ", continued" if stage in seen else ""
        yield f'<text class="strong" x="{left + 10:.1f}" y="22">{title}</text>'
        if stage not in seen:
            yield f'<text class="number" x="{left + 10:.1f}" y="37">{seconds(per_stage[stage])} computing</text>'
        seen.add(stage)
    largest = max(drawing.passed.values(), default=0.0)
    for (source, target), passed in sorted(drawing.passed.items()):
        one, other = drawing.boxes[source], drawing.boxes[target]
        path = _line(spots[source], spots[target])
        if one.stage == other.stage:
            yield f'<path class="edge" d="{path}"/>'
            continue
        thick = 1.2 + 2.8 * (passed / largest if largest else 0.0)
        said = tip(f"{one.name} → {other.name}", f"stage {one.stage} → {other.stage}: {size(passed)} per microbatch")
        yield (
            f'<g class="tip"><path class="hit-line" d="{path}"/>'
            f'<path class="edge cut {hue(one.stage)}" style="stroke-width:{thick:.1f}px" d="{path}"/>{said}</g>'
        )
    longest = max(times, default=0.0)
    for box, spot, time in zip(drawing.boxes, spots, times, strict=True):
        bar = (ACROSS - 12) * (time / longest if longest else 0.0)
        yield (
            f'<g class="tip box {hue(box.stage)}"><rect x="{spot.x:.1f}" y="{spot.y:.1f}" width="{ACROSS:g}" '
            f'height="{DOWN:g}" rx="5"/><text x="{spot.x + 6:.1f}" y="{spot.y + 16:.1f}">'
            f"{text(shortened(_label(box), ACROSS - 12, 11))}</text>"
            f'<rect class="share" x="{spot.x + 6:.1f}" y="{spot.y + DOWN - 8:.1f}" width="{bar:.1f}" height="3"/>'
            f"{tip(*_said(graph, drawing, box, time))}</g>"
        )


def _label(box: Box) -> str:
    """Return a box's name, with what it is where a short name does not say so."""
    kind = box.kinds[0][0] if len(box.operators) == 1 and box.kinds else ""
    return f"{box.name} {kind}" if len(box.name) + len(kind) < 16 and kind not in box.name else box.name


def _time(graph: Graph, box: Box) -> float:
    return sum(graph.operators[place].forward + graph.operators[place].backward for place in box.operators)


def _said(graph: Graph, drawing: Drawing, box: Box, time: float) -> tuple[str, ...]:
    operators = [graph.operators[place] for place in box.operators]
    parameters = sum(each.parameter_bytes for each in operators)
    kinds = ", ".join(kind + (f" x {count}" if count > 1 else "") for kind, count in box.kinds)
    several = f"{len(operators)} operators" if len(operators) > 1 else ""
    forward = sum(each.forward for each in operators)
    share = f", {percent(time / graph.time)} of the whole" if graph.time else ""
    return (
        box.name,
        ": ".join(part for part in (several, kinds) if part),
        f"stage {box.stage}",
        f"forward {seconds(forward)}, backward {seconds(time - forward)}{share}",
        f"{size(parameters)} of parameters" if parameters else "",
    )


def _line(one: _Spot, other: _Spot) -> str:
    """Return the path of a line: down within a column, round what lies between, or across to another column."""
    if one.column == other.column and other.row > one.row:
        x0, y0, x1, y1 = one.x + ACROSS / 2, one.y + DOWN, other.x + ACROSS / 2, other.y
        if other.row == one.row + 1:
            bend = (y1 - y0) / 2
            return f"M{x0:.1f} {y0:.1f}C{x0:.1f} {y0 + bend:.1f} {x1:.1f} {y1 - bend:.1f} {x1:.1f} {y1:.1f}"
        x0, y0, x1, y1 = one.x + ACROSS, one.y + DOWN / 2, other.x + ACROSS, other.y + DOWN / 2
        out = max(x0, x1) + min(26.0, 8.0 + 3 * (other.row - one.row))
        return f"M{x0:.1f} {y0:.1f}C{out:.1f} {y0:.1f} {out:.1f} {y1:.1f} {x1:.1f} {y1:.1f}"
    forth = other.column > one.column
    x0, x1 = (one.x + ACROSS, other.x) if forth else (one.x, other.x + ACROSS)
    y0, y1 = one.y + DOWN / 2, other.y + DOWN / 2
    bend = max(GUTTER / 2, abs(x1 - x0) / 3) * (1 if forth else -1)
    return f"M{x0:.1f} {y0:.1f}C{x0 + bend:.1f} {y0:.1f} {x1 - bend:.1f} {y1:.1f} {x1:.1f} {y1:.1f}"
