"""What happens in a run, told to whoever listens: a live line, a recorder, a fault to be injected.

kind          published when                          fields
----------    ------------------------------------    -----------------------------------------------
distributed   ``distribute`` has returned             rank, world_size, front_end, model, optimizer, notes,
                                                      compress
backward      a backward pass of the model begins     model (index of the distribute call)
gradients     ``p.grad`` has become the global one    model, gradients: callable -> [(name, tensor)]
step          an optimizer step is over               model, step, seconds, waited, samples,
                                                      parameters: callable -> [(name, tensor)]
notice        something a person should know, once    message
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any

Handler = Callable[[dict[str, Any]], None]

_LONGEST = 4096  # bytes that a pipe takes at one stroke (PIPE_BUF)
_handlers: dict[str, list[Handler]] = {}


def subscribe(kind: str, handler: Handler) -> Callable[[], None]:
    """Call ``handler(fields)`` at every event of this kind; return what ends it."""
    _handlers.setdefault(kind, []).append(handler)
    return lambda: _handlers[kind].remove(handler)


def publish(kind: str, **fields: Any) -> None:
    """Tell every subscriber, in order of subscription, in this thread."""
    for handler in tuple(_handlers.get(kind, ())):
        handler(fields)


def listened_to(kind: str) -> bool:
    """Return whether anyone subscribed to this kind, so that costly fields need not be made for nobody."""
    return bool(_handlers.get(kind))


def send_to_launcher(kind: str, **fields: Any) -> None:
    """Write the event as a JSON line to the pipe that ``nearlinear run`` opened (``NEARLINEAR_EVENTS``), if any.

    A line is shorter than PIPE_BUF, so lines of several writers do not mix; a reader that has gone is ignored,
    because a run must outlive whoever watches it.
    """
    pipe = os.environ.get("NEARLINEAR_EVENTS")
    if pipe is None:
        return
    line = json.dumps({"kind": kind, **fields}).encode() + b"\n"
    if len(line) > _LONGEST:
        return
    try:
        os.write(int(pipe), line)
    except BlockingIOError:
        pass  # the reader is busy; this line is lost, the next may not be
    except OSError:
        os.environ.pop("NEARLINEAR_EVENTS", None)
