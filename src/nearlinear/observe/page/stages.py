"""The table of stages: what is in each, how busy it is, what it holds and what it hands on."""

from __future__ import annotations

from collections.abc import Sequence

from nearlinear.observe.page.content import Stage
from nearlinear.observe.page.marks import hue
from nearlinear.observe.page.tables import table
from nearlinear.observe.page.text import text
from nearlinear.units import seconds, size


def stage_table(stages: Sequence[Stage]) -> str:
    """Return the section's content; columns in which nothing is known are left out, and all without stages."""
    if not stages:
        return ""
    busiest = max(max(stage.load, stage.measured or 0.0) for stage in stages)
    devices = any(stage.devices for stage in stages)
    memory = any(stage.memory for stage in stages)
    sent = any(stage.sent for stage in stages)
    measured = any(stage.measured is not None for stage in stages)
    head = ["stage", *(["devices"] if devices else []), "predicted" if measured else "busy"]
    head += [*(["measured"] if measured else []), *(["memory"] if memory else []), *(["hands on"] if sent else [])]
    head += ["what is in it"]
    rows = []
    for number, stage in enumerate(stages):
        row = [f'<i class="key area {hue(number)}"></i>{number}', *([text(stage.devices)] if devices else [])]
        row += [_bar(stage.load, busiest, hue(number))]
        row += [_bar(stage.measured, busiest, "c1") if stage.measured is not None else ""] if measured else []
        row += [size(stage.memory) if stage.memory else ""] if memory else []
        row += [size(stage.sent) if stage.sent else ""] if sent else []
        row += [text(stage.label)]
        rows.append(row)
    words = {head.index("what is in it"), *(place for place, name in enumerate(head) if name in _BARS)}
    columns = range(len(head))
    drawn = table("Stages, and how busy each is per microbatch", head, rows, left={0, *words}, raw=columns)
    return f'{drawn}<p class="quiet">Seconds per microbatch; the busiest stage sets the pace.</p>'


_BARS = ("busy", "predicted", "measured")


def _bar(took: float, busiest: float, colour: str) -> str:
    share = 100 * took / busiest if busiest else 0.0
    return (
        f'<span class="load"><svg xmlns="http://www.w3.org/2000/svg" width="72" height="10" aria-hidden="true">'
        f'<rect class="{colour} solid" width="{share:.1f}%" height="10" rx="2"/></svg> {text(seconds(took))}</span>'
    )
