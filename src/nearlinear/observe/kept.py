"""Where records of runs and plans are kept between commands: the user's folder for state, the last fifty of each.

$XDG_STATE_HOME or ~/.local/state
  nearlinear/runs/20261130-101500-train-3fa2b1.jsonl      what a run did (`observe.record`)
  nearlinear/plans/9c41d7e0a2b3c4d5.json                  what was planned for a script with its arguments
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import secrets
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path

from nearlinear.errors import InputError
from nearlinear.observe.page.content import Content

MOST = 50
_RUN = re.compile(r"\d{8}-\d{6}-.*-[0-9a-f]{6}\.jsonl")
_PLAN = re.compile(r"[0-9a-f]{16}\.json")


def folder(kind: str) -> Path:
    """Return the folder of ``"runs"`` or ``"plans"``; it need not be there.

    Raises:
        InputError: This user has no home.
    """
    named = os.environ.get("XDG_STATE_HOME", "")
    # The specification wants a relative path ignored. (XDG Base Directory Specification 0.8)
    try:
        state = Path(named) if named.startswith("/") else Path.home() / ".local" / "state"
    except RuntimeError as error:
        raise InputError("this user has no home folder; set XDG_STATE_HOME to a folder for records") from error
    return state / "nearlinear" / kind


def new_run(script: str, began: datetime) -> Path:
    """Make room among the records of runs and return the path of a new one, named by date and script.

    Raises:
        InputError: This user has no home.
        OSError: The folder cannot be made.
    """
    runs = folder("runs")
    runs.mkdir(parents=True, exist_ok=True, mode=0o700)
    for path in kept_runs()[MOST - 1 :]:
        path.unlink(missing_ok=True)
    name = re.sub(r"[^A-Za-z0-9_.-]+", "_", Path(script).stem)[:60] or "script"
    return runs / f"{began:%Y%m%d-%H%M%S}-{name}-{secrets.token_hex(3)}.jsonl"


def kept_runs() -> list[Path]:
    """Return the records of runs, the newest first."""
    return _by_age("runs", _RUN)


def last_run() -> Path:
    """Return the newest record.

    Raises:
        InputError: There is none.
    """
    found = kept_runs()
    if not found:
        raise InputError(f"no run is recorded in {folder('runs')}; make one with `nearlinear run -n 2 train.py`")
    return found[0]


def identity(script: Sequence[str]) -> str:
    """Return what two runs of one script share: its path, its arguments and what is written in it.

    Args:
        script: Its path, then its arguments.

    Raises:
        OSError: The script cannot be read.
    """
    path = Path(script[0]).resolve()
    written = hashlib.sha256(path.read_bytes()).hexdigest()
    return hashlib.sha256(json.dumps([str(path), *script[1:], written]).encode()).hexdigest()[:16]


def keep_plan(script: Sequence[str], content: Content, say: Callable[[str], None]) -> None:
    """Keep what was planned for a script on this machine, so that its next run is held against it.

    Args:
        script: Its path, then its arguments.
        content: What the page of the plan shows.
        say: Told in a line if it cannot be kept.
    """
    try:
        plans = folder("plans")
        plans.mkdir(parents=True, exist_ok=True, mode=0o700)
        path = plans / f"{identity(script)}.json"
        for old in [each for each in _by_age("plans", _PLAN) if each != path][MOST - 1 :]:
            old.unlink(missing_ok=True)
        unfinished = path.with_suffix(f".{os.getpid()}.part")  # a run that starts meanwhile reads the old one or this
        unfinished.write_text(content.to_json())
        unfinished.replace(path)
    except (OSError, InputError) as error:
        say(f"this plan is not kept for the script's next run: {error}")


def planned(script: Sequence[str]) -> Content | None:
    """Return what was planned for a script; ``None`` where nothing was since the script was changed."""
    # Written by another version, or damaged: a plan that cannot be read is none, and stops no run.
    with contextlib.suppress(OSError, InputError, ValueError, RecursionError):
        return Content.from_json((folder("plans") / f"{identity(script)}.json").read_text())
    return None


def _by_age(kind: str, name: re.Pattern[str]) -> list[Path]:
    """Return the files with such names, the newest first."""
    try:
        found = [path for path in folder(kind).iterdir() if name.fullmatch(path.name)]
    except OSError:
        return []
    if kind == "runs":  # the name begins with the date
        return sorted(found, key=lambda path: path.name, reverse=True)
    aged = []
    for path in found:
        with contextlib.suppress(OSError):  # another command has removed it
            aged.append((path.stat().st_mtime, path))
    return [path for _, path in sorted(aged, reverse=True)]
