"""Giving a program a fixed share of one core, so that four hosts on two cores are as fast as one alone."""

from __future__ import annotations

import contextlib
import os
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

PERIOD_US = 20_000  # the shorter, the more even


@contextlib.contextmanager
def quotas(count: int, share: float) -> Iterator[list[Path]]:
    """Make ``count`` groups of processes with ``share`` of a core each (cgroup version 1, needs root).

    Yields:
        The groups' folders, for ``within``.
    """
    with contextlib.ExitStack() as undo:
        top = Path(tempfile.mkdtemp(prefix="nearlinear-cpu-"))
        undo.callback(top.rmdir)
        subprocess.run(["mount", "-t", "cgroup", "-o", "cpu", "cpu", top], check=True, timeout=10)
        undo.callback(subprocess.run, ["umount", "-l", top], check=True, timeout=10)
        groups = []
        for number in range(count):
            group = top / f"nearlinear-{os.getpid()}-{number}"
            group.mkdir()
            undo.callback(_remove, group)
            (group / "cpu.cfs_period_us").write_text(str(PERIOD_US))
            (group / "cpu.cfs_quota_us").write_text(str(round(share * PERIOD_US)))
            groups.append(group)
        yield groups


def within(group: Path, command: Sequence[str]) -> list[str]:
    """Return the command that runs ``command`` in a group."""
    return ["sh", "-c", 'echo $$ > "$0"/cgroup.procs && exec "$@"', str(group), *command]


def _remove(group: Path) -> None:
    for process in (group / "cgroup.procs").read_text().split():
        with contextlib.suppress(OSError):
            (group.parent / "cgroup.procs").write_text(process)
    with contextlib.suppress(OSError):  # a process that is just ending keeps it for a moment
        group.rmdir()
