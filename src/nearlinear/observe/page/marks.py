"""What all pictures of a page are made of: a labelled SVG, details under the pointer, a legend, two widths."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from nearlinear.observe.page.text import text

WIDE, NARROW = 1040, 340  # pixels; a style sheet shows one or the other
HUES = 8  # classes c0 to c7


def picture(name: str, title: str, describe: str, size: tuple[float | str, float], parts: Iterable[str]) -> str:
    """Return an SVG element.

    Args:
        name: Unique on the page.
        title: What it shows, in a few words.
        describe: What is to be seen on it, in a sentence, for who cannot see it.
        size: Pixels across (or a share, ``"100%"``, of whatever it lies in) and down.
        parts: Its elements.
    """
    across, down = size
    box = "" if isinstance(across, str) else f' viewBox="0 0 {across:g} {down:g}"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{across if isinstance(across, str) else f"{across:g}"}" '
        f'height="{down:g}"{box} role="img" aria-labelledby="{name}-t" aria-describedby="{name}-d">'
        f'<title id="{name}-t">{text(title)}</title><desc id="{name}-d">{text(describe)}</desc>'
        + "".join(parts)
        + "</svg>"
    )


def both(draw: Callable[[str, int], str]) -> str:
    """Return a picture twice: for wide screens and for telephones; ``draw`` takes a suffix for names and the width."""
    return f'<div class="wide">{draw("w", WIDE)}</div><div class="narrow">{draw("n", NARROW)}</div>'


def tip(*lines: str) -> str:
    """Return what appears under the pointer, as the last child of the element that it belongs to."""
    return f"<title>{text(chr(10).join(line for line in lines if line))}</title>"


def hue(number: int) -> str:
    """Return the class that carries the colour of a stage or a curve."""
    return f"c{number % HUES}"


def legend(entries: Sequence[tuple[str, str]]) -> str:
    """Return the key to the colours: for every entry its classes (``"c0 line"``) and what it stands for."""
    if not entries:
        return ""
    items = "".join(f'<li><i class="key {kind}"></i>{text(what)}</li>' for kind, what in entries)
    return f'<ul class="legend">{items}</ul>'
