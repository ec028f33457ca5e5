"""Turning the bytes of several ranks into lines that say whose they are."""

from __future__ import annotations

import os
import re
import select
import sys
from typing import TextIO

LONGEST = 1 << 20  # bytes held while waiting for a line's end; a longer line is shown in pieces
BAR_EVERY_S = 5.0  # a progress bar redraws itself many times a second; as lines, that would bury the rest

# Moving the cursor or clearing makes no sense behind a prefix; colours (which end in m) stay.
_CURSOR = re.compile(rb"\x1b\[[0-9;?]*[A-HJKSTfhlsu]")
_ERROR = b"nearlinear: error:"


class Lines:
    r"""Cuts one stream into lines.

    Text that a ``\r`` overwrites (a progress bar) is dropped as a terminal would, except that one state of it is a
    line every ``BAR_EVERY_S`` seconds; what is left at the line's end is always one.

    Example:
        >>> lines = Lines()
        >>> lines.feed(b"one\ntw", 0.0), lines.feed(b"o\r\n", 0.1), lines.end()
        ([b'one'], [b'two'], [])
    """

    def __init__(self) -> None:
        self._held = bytearray()
        self._shown_at = float("-inf")

    def feed(self, data: bytes, now: float) -> list[bytes]:
        """Return the lines that ``data`` completes; ``now`` is the time in seconds, by any clock that only rises."""
        self._held += data
        lines: list[bytes] = []
        if b"\n" in data or b"\r" in data:
            *whole, rest = bytes(self._held).split(b"\n")
            lines = [_last_state(line) for line in whole]
            # A \r at the very end may be the first half of \r\n, so the text before it is not overwritten yet.
            overwritten, cut, kept = rest.rstrip(b"\r").rpartition(b"\r")
            self._held = bytearray(kept + b"\r" if rest.endswith(b"\r") else kept)
            state = _last_state(overwritten)
            if cut and state.strip() and now - self._shown_at >= BAR_EVERY_S:
                self._shown_at = now
                lines.append(state)
        if len(self._held) > LONGEST:
            lines.append(bytes(self._held))
            self._held.clear()
        return lines

    def end(self) -> list[bytes]:
        """Return what was written after the last line's end."""
        rest = _last_state(bytes(self._held))
        self._held.clear()
        return [rest] if rest else []


def _last_state(line: bytes) -> bytes:
    return line.rstrip(b"\r").rpartition(b"\r")[2]


class Printer:
    """Writes lines to this process's stdout and stderr, each behind its rank's number.

    A line ``nearlinear: error: ...`` comes from every rank when all were given the same bad input; it is shown once
    and bare. ``reported`` holds the ranks that wrote one.
    """

    def __init__(self, out: TextIO | None = None, err: TextIO | None = None) -> None:
        self._to = {"stdout": out or sys.stdout, "stderr": err or sys.stderr}
        self._coloured = {name: coloured(file) for name, file in self._to.items()}
        self._errors: set[bytes] = set()
        self.reported: set[int] = set()

    def __call__(self, rank: int, stream: str, line: bytes) -> None:
        """Write one line of ``rank``; bytes go through as they are, whatever they are.

        Raises:
            OSError: Nobody reads that stream any more.
        """
        line = _CURSOR.sub(b"", line)
        prefix = b"[%d] " % rank
        if stream == "stderr" and line.startswith(_ERROR):
            self.reported.add(rank)
            if line in self._errors:
                return
            self._errors.add(line)
            prefix = b""
        elif self._coloured[stream]:
            prefix = b"\x1b[0;%dm[%d]\x1b[0m " % (31 + rank % 6, rank)
        self._to[stream].flush()
        _write_all(self._to[stream].fileno(), prefix + line + b"\n")


def coloured(file: TextIO) -> bool:
    """Return whether ``file`` is a terminal that shows colours and can redraw a line."""
    return file.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def _write_all(fd: int, data: bytes) -> None:
    while data:
        try:
            data = data[os.write(fd, data) :]
        except BlockingIOError:  # whoever gave us this stream has made it non-blocking, and it is full
            select.select([], [fd], [])
