"""Saying on a terminal what is being done, in one line that changes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from rich.console import Console


@contextlib.contextmanager
def status(elsewhere: Callable[[str], None] = lambda what: None) -> Iterator[Callable[[str], None]]:
    """Give a function that says what is being done, on stderr.

    Args:
        elsewhere: What it does where stderr is no terminal; by default nothing.
    """
    console = Console(stderr=True, highlight=False)
    if not console.is_terminal:
        yield elsewhere
        return
    with console.status("") as line:
        yield lambda what: line.update(what)
