"""How a process of a run ends: its own errors as one line, and never in a wait for a peer that is gone."""

from __future__ import annotations

import atexit
import os
import sys
import threading
from collections.abc import Callable
from typing import Any

from nearlinear.errors import NearlinearError
from nearlinear.runtime.liveness import Loss
from nearlinear.runtime.waiting import noticed

Reading = Callable[[BaseException], NearlinearError | str | None]

_STUCK_S = 3.0
_hook_before = sys.excepthook
_readings: list[Reading] = []
_failed = False


def failed() -> bool:
    """Return whether an error is ending this process: its peers are to notice, and at once."""
    return _failed


def read_errors_by(reading: Reading) -> None:
    """Let ``reading(error)`` say what stands behind an error of a framework: ours, a hint as text, or None."""
    if reading not in _readings:
        _readings.append(reading)


def install_excepthook(*, again: bool = False) -> None:
    """Show our own errors as the one line they are, and return their exit code.

    Args:
        again: A library has put a hook of its own over ours; leave that one out from now on.
    """
    global _hook_before
    if sys.excepthook is not _excepthook and not again:
        _hook_before = sys.excepthook
    sys.excepthook = _excepthook


def _excepthook(kind: type[BaseException], error: BaseException, trace: Any) -> None:
    global _failed
    _failed = True
    said = [said for reading in _readings if (said := reading(error)) is not None]
    ours = error if isinstance(error, NearlinearError) else next((s for s in said if not isinstance(s, str)), None)
    if ours is None:
        _hook_before(kind, error, trace)
        for hint in said:
            print(f"nearlinear: hint: {hint}", file=sys.stderr, flush=True)
        return
    sys.stdout.flush()
    print(f"nearlinear: error: {ours}", file=sys.stderr, flush=True)
    atexit._run_exitfuncs()
    os._exit(ours.exit_code)


def end_if_stuck(loss: Loss) -> None:
    """End the process when its main thread does not notice a loss by itself within seconds.

    It may be stuck in a wait that is not ours: a collective the script called, a CUDA stream that waits for a peer.
    """

    def end() -> None:
        if not noticed.is_set():
            print(f"nearlinear: error: {loss}", file=sys.stderr, flush=True)
            os._exit(1)

    timer = threading.Timer(_STUCK_S, end)
    timer.daemon = True
    timer.start()
