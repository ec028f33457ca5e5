"""Turning the kernel's counters into how much of our cores other programs take, and waiting until they take little."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from pathlib import Path

QUIET = 0.05  # share of the cores that others may take
SETTLING = 0.2  # seconds of such quiet to wait for


def program_seconds(cores: Iterable[int]) -> float:
    """Return the processor seconds of all programs on these cores since the machine started.

    The kernel's work is left out: that of the links under test is part of it.
    """
    names = {f"cpu{core}" for core in cores}
    lines = [line.split() for line in Path("/proc/stat").read_text().splitlines()]
    ticks = sum(int(line[1]) + int(line[2]) for line in lines if line[0] in names)  # user and nice
    return ticks / os.sysconf("SC_CLK_TCK")


def wait_until_quiet(cores: Iterable[int], until: float) -> None:
    """Return when other programs have left the cores alone for a moment, or at ``until`` (``time.monotonic``).

    The caller's own processes must be waiting, too.
    """
    cores = list(cores)
    while time.monotonic() < until:
        before = program_seconds(cores)
        time.sleep(SETTLING)
        if program_seconds(cores) - before <= QUIET * SETTLING * len(cores):
            return
