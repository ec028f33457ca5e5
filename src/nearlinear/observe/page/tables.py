"""Turning rows of text into a table, with numbers set right."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from nearlinear.observe.page.text import text


def table(
    caption: str,
    head: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    left: Collection[int] = (),
    classes: Sequence[str] = (),
    raw: Collection[int] = (),
) -> str:
    """Return a table that scrolls sideways where the screen is narrower.

    Args:
        caption: What it holds, for who cannot see it.
        head: A name per column.
        rows: As many cells each.
        left: Columns that hold words.
        classes: Of every row; none for none.
        raw: Columns whose cells are markup already.
    """

    def cell(tag: str, column: int, value: str, extra: str = "") -> str:
        kind = ' class="left"' if column in left else ""
        return f"<{tag}{kind}{extra}>{value if column in raw and tag == 'td' else text(value)}</{tag}>"

    heads = "".join(cell("th", column, value, ' scope="col"') for column, value in enumerate(head))
    lines = []
    for number, row in enumerate(rows):
        kind = f' class="{classes[number]}"' if classes and classes[number] else ""
        lines.append(f"<tr{kind}>" + "".join(cell("td", column, value) for column, value in enumerate(row)) + "</tr>")
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{text(caption)}"><table>'
        f'<caption class="unseen">{text(caption)}</caption><thead><tr>{heads}</tr></thead>'
        f"<tbody>{''.join(lines)}</tbody></table></div>"
    )
