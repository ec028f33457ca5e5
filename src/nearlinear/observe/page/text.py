"""Turning any string into text that HTML and SVG both take, and guessing how wide it will be."""

from __future__ import annotations

import re
from html import escape

_WIDE = 0.65  # of a letter in a wide font, over its size; an ellipsis is wider

# What XML 1.0 does not allow even escaped; a file name may hold lone surrogates, a layer's name anything.
_FORBIDDEN = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def text(value: object) -> str:
    """Return ``value`` as text for an element or an attribute in quotes.

    Example:
        >>> text('<b>"\\x00')
        '&lt;b&gt;&quot;\ufffd'
    """
    return escape(_FORBIDDEN.sub("\ufffd", str(value)))


def width(value: str, size: float = 12.0) -> float:
    """Return a text's width in pixels, on the safe side: no font is at hand to measure it."""
    return len(value) * size * 0.6


def shortened(value: str, room: float, size: float = 12.0) -> str:
    """Return ``value`` with its middle left out where it is wider than ``room`` pixels; of ``a … b`` that of each.

    Example:
        >>> shortened("encoder.layers.11.attention", 90, 12)
        'encod…ntion'
    """
    most = max(3, int(room / (size * _WIDE)))
    if len(value) <= most:
        return value
    first, between, last = value.partition(" … ")
    if between and most > 8:
        half = (most - 3) // 2  # characters; what the shorter one leaves is the longer one's
        rooms = [max(half, most - 3 - len(other)) * size * _WIDE for other in (last, first)]
        return f"{shortened(first, rooms[0], size)} … {shortened(last, rooms[1], size)}"
    return value[: most // 2] + "…" + value[len(value) - (most - 1) // 2 :]


def count(value: float) -> str:
    """Return a rate or another large number as people read it.

    Example:
        >>> count(1234.6), count(4.5678)
        ('1,235', '4.57')
    """
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def percent(share: float) -> str:
    """Return a share, 0 to 1, in per cent."""
    return f"{100 * share:.0f} %"
