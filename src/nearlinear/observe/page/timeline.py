"""Turning what devices did in a step into rows of bars: a wide row for computing, a thin one for messages.

    device 0  |F0 |F1 |    |B0 |B1 ||update|
              |   |send F0|        |== all-reduce ==|

Places are in per cent, so a picture made wider shows more: that is all that zooming does.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from nearlinear.observe.axes import Axis
from nearlinear.observe.page.content import Timeline
from nearlinear.observe.page.marks import legend, picture, tip
from nearlinear.observe.page.text import text, width
from nearlinear.units import seconds

if TYPE_CHECKING:
    from nearlinear.planning.simulate import Span

DEVICES = 32  # rows
SPANS = 3000  # bars of a timeline; neighbours of a kind are joined until there are no more
ZOOMS = (1, 4, 16)  # at which more numbers appear on the axis

_KINDS = {
    "forward": "c0",
    "backward": "c2",
    "all-reduce": "c1",
    "transfer": "c4",
    "update": "c3",
    "other": "c6",
}
_ROW, _COMPUTE, _MESSAGE = 34, 18, 7  # pixels
_UNITS = (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6))
_SCREEN = 640.0  # pixels assumed for the labels that are shown before JavaScript has measured


def timelines(drawn: Sequence[Timeline]) -> str:
    """Return the section's content; empty without a span."""
    drawn = [each for each in drawn if each.spans and each.seconds > 0]
    if not drawn:
        return ""
    scale = max(max(each.seconds, max(span.end for span in each.spans)) for each in drawn)
    kinds = {kind(span.what) for each in drawn for span in each.spans}
    key = [(_KINDS[each] + " area solid", each) for each in _KINDS if each in kinds]
    tools = (
        '<div class="tools" hidden><button type="button" data-zoom="2">Zoom in</button>'
        '<button type="button" data-zoom="0.5">Zoom out</button>'
        '<button type="button" data-zoom="0">Whole step</button>'
        "<span>or double-click; Ctrl and wheel; + and - keys</span></div>"
    )
    return (
        f'<figure class="timelines">{legend(key)}{tools}'
        + "".join(_timeline(number, each, scale) for number, each in enumerate(drawn))
        + "<figcaption>A row is a device: wide bars compute, thin ones below them communicate.</figcaption></figure>"
    )


def kind(what: str) -> str:
    """Return the kind of a span by what it does.

    Example:
        >>> [kind(what) for what in ("F0.1", "W3", "send F0", "all-reduce 2")]
        ['forward', 'backward', 'transfer', 'all-reduce']
    """
    if what.startswith(("send", "receive", "transfer")):
        return "transfer"
    if what.startswith(("all-reduce", "update")):
        return what.split()[0]
    if what[:1] == "F" or what == "forward":
        return "forward"
    return "backward" if what[:1] in ("B", "I", "W") or what == "backward" else "other"


def _timeline(number: int, drawn: Timeline, scale: float) -> str:
    devices = sorted({span.device for span in drawn.spans})
    shown = devices[:DEVICES]
    row = {device: place for place, device in enumerate(shown)}
    spans, step = joined([span for span in drawn.spans if span.device in row], scale)
    notes = [f"{len(shown)} of {len(devices)} devices are drawn"] if len(devices) > len(shown) else []
    notes += [f"neighbours less than {seconds(step)} apart are joined"] if step else []
    height = _ROW * len(shown) + 26
    names = "".join(f"<div>{device}</div>" for device in shown)
    busiest = max((_busy(spans, device), -device) for device in shown)
    svg = picture(
        f"timeline-{number}",
        f"Timeline, {drawn.name}",
        f"A step of {seconds(drawn.seconds)} on {len(devices)} devices; device {-busiest[1]} computes most, "
        f"{seconds(busiest[0])}.",
        ("100%", height),
        _parts(spans, row, drawn.seconds, scale, height),
    )
    remark = f" ({'; '.join(notes)})" if notes else ""
    return (
        f"<h3>{text(drawn.name.capitalize())}: {text(seconds(drawn.seconds))} a step{text(remark)}</h3>"
        f'<div class="lanes"><div class="names"><span class="unseen">devices</span>{names}</div>'
        f'<div class="view" tabindex="0" role="region" aria-label="Timeline, {text(drawn.name)}">{svg}</div></div>'
    )


def _busy(spans: Sequence[Span], device: int) -> float:
    return sum(span.end - span.start for span in spans if span.device == device and span.computing)


def _parts(spans: Sequence[Span], row: dict[int, int], end: float, scale: float, height: int) -> Iterator[str]:
    bottom = height - 22
    unit, factor = next((each for each in _UNITS if scale >= each[1]), _UNITS[-1])
    axis = Axis(0.0, scale / factor)
    for zoom in ZOOMS:
        marks = []
        for place, label in axis.ticks(6 * zoom):
            x, anchor = 100 * place, "start" if place < 0.01 else "end" if place > 0.92 else "middle"
            marks.append(f'<line class="grid" x1="{x:.3f}%" x2="{x:.3f}%" y1="0" y2="{bottom}"/>')
            marks.append(
                f'<text class="number" x="{x:.3f}%" y="{height - 6}" text-anchor="{anchor}">{text(label)} {unit}</text>'
            )
        yield f'<g class="ticks{" on" if zoom == 1 else ""}" data-from="{zoom}">{"".join(marks)}</g>'
    for place in row.values():
        y = _ROW * place + 2
        yield f'<rect class="lane" x="0" y="{y}" width="100%" height="{_COMPUTE}"/>'
    x = 100 * end / scale
    yield f'<line class="axis" x1="{x:.3f}%" x2="{x:.3f}%" y1="0" y2="{bottom}"/>'
    for span in spans:
        y = _ROW * row[span.device] + 2 + (0 if span.computing else _COMPUTE + 2)
        share = 100 * (span.end - span.start) / scale
        down = _COMPUTE if span.computing else _MESSAGE
        colour = _KINDS[kind(span.what)]
        said = tip(
            f"{span.what} on device {span.device}",
            f"{seconds(span.end - span.start)}, from {seconds(span.start)} to {seconds(span.end)}",
        )
        x = 100 * span.start / scale
        yield (
            f'<rect class="tip span {colour} solid" x="{x:.3f}%" y="{y}" width="{share:.3f}%" height="{down}">'
            f"{said}</rect>"
        )
        if span.computing:
            on = " on" if share / 100 * _SCREEN > width(span.what, 10) + 4 else ""
            yield f'<text class="in{on}" data-s="{share:.3f}" x="{x:.3f}%" dx="3" y="{y + 13}">{text(span.what)}</text>'


def joined(spans: Sequence[Span], scale: float, most: int = SPANS) -> tuple[list[Span], float]:
    """Return spans, at most so many where gaps can be closed, and the gap in seconds that was closed; 0 for none."""
    found, gap = sorted(spans, key=lambda span: (span.device, span.computing, span.start)), 0.0
    while len(found) > most and gap < scale:
        gap = max(2 * gap, scale / 4096)
        close: list[Span] = []
        for span in found:
            last = close[-1] if close else None
            if (
                last is not None
                and (last.device, last.computing, kind(last.what)) == (span.device, span.computing, kind(span.what))
                and span.start - last.end <= gap
            ):
                first = last.what.split(" … ")[0]
                what = f"{first} … {span.what.split(' … ')[-1]}"
                close[-1] = dataclasses.replace(last, end=max(last.end, span.end), what=what)
            else:
                close.append(span)
        found = close
    return found, gap
