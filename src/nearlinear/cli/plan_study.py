"""The process that `nearlinear plan` runs a script in.

    python -m nearlinear.cli.plan_study OUT SECONDS script.py [args ...]

The script runs as one process until its first steps have shown what is to be planned; what they show goes to OUT.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from nearlinear.errors import InputError
from nearlinear.measure.study import Enough
from nearlinear.runtime.ending import install_excepthook
from nearlinear.testing.faults import run_script
from nearlinear.testing.imports import after_import
from nearlinear.testing.record import FRONT_ENDS


def main(out: str, budget_s: str, script: Sequence[str]) -> None:
    """Run ``script`` for its first steps and write what they show to the file ``out``, as JSON."""
    install_excepthook()
    watches: list[Any] = []
    with contextlib.ExitStack() as watching:

        def watch(front_end: str) -> None:
            watches.append(import_module(f"nearlinear.{front_end}.study").Watch(float(budget_s)))
            watching.enter_context(watches[-1])

        for module, front_end in FRONT_ENDS.items():
            after_import(module, lambda front_end=front_end: watch(front_end))  # type: ignore[misc]
        try:
            run_script(script)
        except Enough:
            pass
        except SystemExit as leaving:  # a script that ends by sys.exit(0) has ended; with another code it failed
            if leaving.code not in (None, 0):
                raise
    seen = next((each for each in watches if each.has_model), None)
    if seen is None:
        raise InputError(
            "the script ended without calling nl.distribute; add the two lines: import nearlinear as nl / "
            "model, optimizer, loader = nl.distribute(model, optimizer, loader)"
        )
    Path(out).write_text(seen.study().to_json())


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
