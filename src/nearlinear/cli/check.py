"""The command `nearlinear check`: turning a script into a table of how N processes compare with one."""

from __future__ import annotations

import argparse
import shlex
import sys

from rich import box
from rich.console import Console
from rich.table import Table

from nearlinear.cli.run import add_counts, asked_for, planned
from nearlinear.cli.status import status
from nearlinear.core.plan import EXACT
from nearlinear.errors import InputError
from nearlinear.observe import kept
from nearlinear.testing.equivalence import Comparison, RunError, equivalent
from nearlinear.units import parse_seconds

LINES_SHOWN = 25  # of what a failing script wrote last


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the parser."""
    parser = subparsers.add_parser(
        "check",
        help="compare N processes with one, step by step",
        description="Run a script's first steps on one process and on N, and compare losses, gradients before "
        "clipping, and parameters. Exits with 1 where they part, and says why, probably.",
        usage="nearlinear check [-n N] [options] script.py [args ...]",
        allow_abbrev=False,
    )
    parser.add_argument("-n", type=int, default=2, metavar="N", help="processes to compare with one (default: 2)")
    parser.add_argument("--steps", type=int, default=5, metavar="K", help="optimizer steps (default: 5)")
    parser.add_argument("--strategy", choices=("auto", *EXACT), metavar="S", help="wins over the script's")
    add_counts(parser)
    parser.add_argument("--float64", action="store_true", help="compute in float64, where rounding is no excuse")
    parser.add_argument("--timeout", type=parse_seconds, default=600.0, metavar="T", help="of a run (default: 10 min)")
    # One argument for both: argparse would take a -- away from between them.
    parser.add_argument("script", nargs=argparse.REMAINDER, metavar="script.py [args ...]", help="passed on as it is")
    parser.set_defaults(call=check)


def check(options: argparse.Namespace) -> int:
    """Compare, print the table and the verdict, and return the exit code.

    Raises:
        InputError: There is no such script, or it never calls ``nl.distribute``.
        RunError: The script failed; what it wrote last is on stderr.
    """
    script: list[str] = options.script[1:] if options.script[:1] == ["--"] else options.script
    if not script:
        raise InputError("which script? write it like `nearlinear check -n 2 train.py`")
    try:
        with status() as say:
            comparison = equivalent(
                script[0],
                script[1:],
                n=options.n,
                steps=options.steps,
                float64=options.float64,
                env=asked_for(options) | planned(kept.planned(script), options.n),
                timeout_s=options.timeout,
                say=say,
            )
    except RunError as error:
        for line in error.result.stderr.splitlines()[-LINES_SHOWN:]:
            print(line, file=sys.stderr)
        raise
    Console().print(_table(comparison))
    if len(comparison.rows) < options.steps:
        print(f"the script ended after {len(comparison.rows)} of {options.steps} steps")
    print(comparison)
    sys.stdout.flush()
    print(f"hint: {_next_step(comparison, options, script)}", file=sys.stderr)
    return 0 if comparison.equal else 1


def _table(comparison: Comparison) -> Table:
    table = Table(box=box.SIMPLE_HEAD, caption="errors are relative to the largest magnitude of each tensor")
    for title in ("step", "loss of 1", f"loss of {comparison.ranks}", "loss error", "gradients", "parameters"):
        table.add_column(title, justify="right", no_wrap=True)

    def error(value: float | None) -> str:
        if value is None:
            return "-"
        shown = f"{value:.1e}" if value else "0"
        return f"[bold red]{shown} ![/]" if value > comparison.tolerance else shown

    for row in comparison.rows:
        losses = [f"{loss:.8g}" if loss is not None else "-" for loss in (row.loss_of_one, row.loss_of_many)]
        table.add_row(str(row.step), *losses, error(row.loss), error(row.gradients), error(row.parameters))
    return table


def _next_step(comparison: Comparison, options: argparse.Namespace, script: list[str]) -> str:
    strategy = [] if options.strategy is None else ["--strategy", options.strategy]
    words = ["-n", str(options.n), *strategy]
    if comparison.equal:
        return shlex.join(["nearlinear", "run", *words, *script])
    words += ["--float64"] if options.steps == 5 else ["--steps", str(options.steps), "--float64"]
    again = shlex.join(["nearlinear", "check", *words, *script])
    return f"after the change, {again}" if options.float64 else f"to rule out rounding, {again}"
