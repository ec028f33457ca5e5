"""Turning what there is to show into one HTML file that loads nothing."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterator, Sequence

from nearlinear.observe.page.behaviour import BEHAVIOUR
from nearlinear.observe.page.content import Comparison, Content, Figure
from nearlinear.observe.page.drawing import graph_by_stage
from nearlinear.observe.page.pace import pace_over_time
from nearlinear.observe.page.scaling import scaling
from nearlinear.observe.page.spent import where_time_went
from nearlinear.observe.page.stages import stage_table
from nearlinear.observe.page.style import style
from nearlinear.observe.page.tables import table
from nearlinear.observe.page.text import text
from nearlinear.observe.page.timeline import timelines


def page(content: Content) -> str:
    """Return the page as the text of an HTML file, to be written as UTF-8.

    It takes no style, font, picture or script from elsewhere and forbids the browser to; only the script written here
    may run, by its hash. Names are text, whatever is in them.

    Example:
        >>> page(Content("digits <on> 2 devices")).count("digits &lt;on&gt; 2 devices")
        2
    """
    digest = base64.b64encode(hashlib.sha256(BEHAVIOUR.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; base-uri 'none'"
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{text(content.title)}</title><style>{style()}</style></head>\n<body>"
        + "\n".join(part for part in _parts(content) if part)
        + f"\n<script>{BEHAVIOUR}</script></body></html>\n"
    )


def _parts(content: Content) -> Iterator[str]:
    yield f"<header><h1>{text(content.title)}</h1>"
    yield f'<p class="about">{text(content.about)}</p>' if content.about else ""
    yield _figures(content.figures)
    yield "</header><main>"
    yield _section("Forecast against measurement", _compared(content.compared))
    yield _section("Samples per second over time", pace_over_time(content.pace, content.expected))
    yield _section("Scaling", scaling(content.forecast, content.measured))
    yield _section("The plan", _sentences(content.reasons) + stage_table(content.stages))
    split = content.split
    by_stage = " by stage" if split is not None and len(set(split.stage)) > 1 else ""
    yield _section(f"The graph{by_stage}", graph_by_stage(split) if split is not None else "")
    yield _section("Timeline of a step", timelines(content.timelines))
    yield _section("Where the time went" if content.pace else "Where the time goes", where_time_went(content.spent))
    yield _section("Notes", _sentences(content.notes))
    yield "</main><footer>Written by nearlinear. This file loads nothing and can be kept or sent as it is.</footer>"


def _section(title: str, inside: str) -> str:
    return f"<section><h2>{title}</h2>{inside}</section>" if inside else ""


def _figures(figures: Sequence[Figure]) -> str:
    if not figures:
        return ""
    tiles = (
        f"<div><dt>{text(each.label)}</dt><dd>{text(each.value)}"
        + (f"<span>{text(each.remark)}</span>" if each.remark else "")
        + "</dd></div>"
        for each in figures
    )
    return f"<dl>{''.join(tiles)}</dl>"


def _compared(rows: Sequence[Comparison]) -> str:
    if not rows:
        return ""
    cells = [(each.what, each.predicted, each.measured, each.remark) for each in rows]
    head = ("", "predicted", "measured", "")
    return f'<div class="few">{table("Forecast against measurement", head, cells, left={0, 3})}</div>'


def _sentences(lines: Sequence[str]) -> str:
    return '<ul class="plain">' + "".join(f"<li>{text(line)}</li>" for line in lines) + "</ul>" if lines else ""
