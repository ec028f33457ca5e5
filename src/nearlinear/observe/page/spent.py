"""Where the time of a step went: one stacked bar per name, on one scale."""

from __future__ import annotations

from collections.abc import Sequence

from nearlinear.observe.page.content import Bar
from nearlinear.observe.page.marks import legend, picture, tip
from nearlinear.observe.page.text import percent, text
from nearlinear.units import seconds

COLOURS = {"compute": "c0", "network": "c1", "waiting": "idle", "update": "c3"}
_OTHERS = ("c2", "c4", "c5", "c6", "c7")
_MOST = 24  # bars


def where_time_went(bars: Sequence[Bar]) -> str:
    """Return the section's content; empty without bars."""
    shown = [bar for bar in bars if sum(took for _, took in bar.parts) > 0][:_MOST]
    if not shown:
        return ""
    longest = max(sum(took for _, took in bar.parts) for bar in shown)
    colours = dict(COLOURS)
    others = (part for bar in shown for part, _ in bar.parts if part not in COLOURS)
    for part in dict.fromkeys(others):
        colours[part] = _OTHERS[(len(colours) - len(COLOURS)) % len(_OTHERS)]
    used = [part for part in colours if any(part == name and took > 0 for bar in shown for name, took in bar.parts)]
    drawn = "".join(_bar(number, bar, longest, colours) for number, bar in enumerate(shown))
    more = f" {len(bars) - len(shown)} more are not drawn." if len(bars) > len(shown) else ""
    return (
        f'<figure>{legend([(colours[part] + " area solid", part) for part in used])}<div class="bars">{drawn}</div>'
        f"<figcaption>The length of a bar is the time of a step.{more}</figcaption></figure>"
    )


def _bar(number: int, bar: Bar, longest: float, colours: dict[str, str]) -> str:
    whole = sum(took for _, took in bar.parts)
    parts = [(part, took) for part, took in bar.parts if took > 0]
    shares = " · ".join(f"{part} {percent(took / whole)}" for part, took in parts)
    at, pieces = 0.0, []
    for part, took in parts:
        share = 100 * took / longest
        pieces.append(
            f'<rect class="tip {colours[part]} solid" x="{at:.3f}%" y="0" width="{share:.3f}%" height="26">'
            f"{tip(f'{bar.name}: {part}', f'{seconds(took)}, {percent(took / whole)} of {seconds(whole)}')}</rect>"
        )
        at += share
    drawn = picture(
        f"spent-{number}", f"Where the time went, {bar.name}", f"{seconds(whole)}: {shares}", ("100%", 26), pieces
    )
    return (
        f'<div class="bar"><div class="name">{text(bar.name)} <span>{text(seconds(whole))}</span></div>'
        f'{drawn}<div class="parts">{text(shares + (f"; {bar.remark}" if bar.remark else ""))}</div></div>'
    )
