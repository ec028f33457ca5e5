"""The process that `nearlinear plan` runs a script in.

    python -m nearlinear.cli.plan_study OUT SECONDS script.py [args ...]

The script runs as one process until its first steps have shown what is to be planned; what they show goes to OUT.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from nearlinear.testing.faults import run_script


def main(out: str, budget_s: str, script: Sequence[str]) -> None:
    """Run ``script`` for its first steps and write what they show to the file ``out``, as JSON."""
    from nearlinear.torch.session import install_excepthook
    from nearlinear.torch.study import Watch

    install_excepthook()
    with Watch(float(budget_s)) as watch:
        try:
            run_script(script)
        except SystemExit as leaving:  # a script that ends by sys.exit(0) has ended; with another code it failed
            if leaving.code not in (None, 0):
                raise
    Path(out).write_text(watch.study().to_json())


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
