"""Breaking one rank at one step of a script, so that a test sees what the others do.

    python -m nearlinear.testing.faults kill:1@3 train.py --lr 0.1

The script knows nothing of it, and neither does the code it calls: a fault is a listener to ``nearlinear.events``.
"""

from __future__ import annotations

import os
import re
import runpy
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nearlinear import events
from nearlinear.errors import InputError
from nearlinear.runtime.environment import world_from

KINDS = ("kill", "stop", "raise", "exit", "drift")
DRIFT = 1e-3
_WRITTEN = re.compile(rf"({'|'.join(KINDS)}):(\d+)@(\d+)(b?)")


class InjectedFault(Exception):
    """What the fault ``raise`` raises."""


@dataclass(frozen=True, slots=True)
class Fault:
    """What goes wrong, on which rank, and when.

    Args:
        kind: ``"kill"``: the process kills itself with SIGKILL; ``"stop"``: with SIGSTOP, so that it is silent but
            there; ``"raise"``: an exception; ``"exit"``: ``sys.exit(3)``; ``"drift"``: the first element of the first
            parameter grows by 0.001, on that rank alone.
        rank: Where.
        step: After which optimizer step (all optimizers of the script counted together), counted from 1.
        in_backward: Not after that step but in its first backward pass.

    Raises:
        InputError: There is no such fault.

    Example:
        >>> print(Fault.parse("kill:1@3b"), Fault.parse("kill:1@3b").in_backward)
        kill:1@3b True
    """

    kind: str
    rank: int
    step: int
    in_backward: bool = False

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise InputError(f"unknown fault {self.kind!r}; choose one of: {', '.join(KINDS)}")
        if self.step < 1:
            raise InputError(f"fault at step {self.step}; steps are counted from 1")
        if self.kind == "drift" and self.in_backward:
            raise InputError("a drift changes parameters, so it comes after a step; leave out the b")

    @classmethod
    def parse(cls, text: str) -> Fault:
        """Return the fault written as ``KIND:RANK@STEP``, with a ``b`` behind it for in the backward pass.

        Raises:
            InputError: ``text`` is not of that form.
        """
        match = _WRITTEN.fullmatch(text)
        if match is None:
            raise InputError(f"{text!r} is not a fault; write it like kill:1@3 (kinds: {', '.join(KINDS)})")
        return cls(match[1], int(match[2]), int(match[3]), bool(match[4]))

    def __str__(self) -> str:
        return f"{self.kind}:{self.rank}@{self.step}{'b' if self.in_backward else ''}"

    def arm(self) -> None:
        """Let it happen in this process, if this is its rank."""
        if world_from().rank != self.rank:
            return
        steps, over = 0, False

        def on_step(event: dict[str, Any]) -> None:
            nonlocal steps, over
            steps += 1
            if steps == self.step and not self.in_backward and not over:
                over = True
                self._happen(event.get("parameters"))

        def on_backward(event: dict[str, Any]) -> None:
            nonlocal over
            if steps == self.step - 1 and self.in_backward and not over:
                over = True
                self._happen(None)

        events.subscribe("step", on_step)
        events.subscribe("backward", on_backward)

    def _happen(self, parameters: Callable[[], Any] | None) -> None:
        sys.stdout.flush()
        if self.kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif self.kind == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif self.kind == "raise":
            raise InjectedFault(f"injected fault {self}")
        elif self.kind == "exit":
            sys.exit(3)
        elif parameters is not None:
            _, tensor = next(iter(parameters()))
            tensor.detach()[(0,) * tensor.dim()].add_(DRIFT)


def run_script(words: Sequence[str]) -> None:
    """Run a script as ``python script.py args`` would, in this process.

    Args:
        words: The script and its arguments.
    """
    sys.argv[:] = words
    if not sys.flags.safe_path:
        sys.path[0] = str(Path(words[0]).resolve().parent)  # where python -m put the current folder
    runpy.run_path(words[0], run_name="__main__")


def main(argv: Sequence[str]) -> None:
    """Arm the fault ``argv[0]`` and run the script that follows."""
    Fault.parse(argv[0]).arm()
    run_script(argv[1:])


if __name__ == "__main__":
    main(sys.argv[1:])
