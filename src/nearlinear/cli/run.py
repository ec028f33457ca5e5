"""The command `nearlinear run`: starting a script as one process, as N here, or on several machines."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any, NoReturn

from nearlinear.core.plan import STRATEGIES
from nearlinear.errors import InputError
from nearlinear.launch.elastic import run_elastic
from nearlinear.launch.lines import Printer
from nearlinear.launch.local import run_local
from nearlinear.launch.outcome import Outcome
from nearlinear.observe.live import Live


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the parser."""
    parser = subparsers.add_parser(
        "run",
        help="start a script's processes",
        description="Start a script's processes: here by itself, over several machines by torch's elastic agent.",
        usage="nearlinear run [-n N] [options] script.py [args ...]",
        allow_abbrev=False,
    )
    parser.add_argument("-n", type=_positive, metavar="N", help="processes on this machine (default: 1)")
    parser.add_argument("--strategy", type=_strategy, metavar="S", help=f"one of {_STRATEGIES}; wins over the script's")
    parser.add_argument("--port", type=_port, metavar="P", help="port at which the ranks meet (default: a free one)")
    parser.add_argument("--nnodes", type=_positive, metavar="M", help="number of machines; run the command on each")
    parser.add_argument("--rdzv", metavar="HOST:PORT", help="where the machines meet; HOST is one of them")
    parser.add_argument("--node-rank", type=int, metavar="R", help="this machine's number, 0 to M-1; 0 is HOST")
    # One argument for both: argparse would take a -- away from between them.
    parser.add_argument("script", nargs=argparse.REMAINDER, metavar="script.py [args ...]", help="passed on as it is")
    parser.set_defaults(call=run)


def run(options: argparse.Namespace) -> int:
    """Run the script and return the exit code.

    Raises:
        InputError: The options contradict each other, or there is no such script.
    """
    script: list[str] = options.script[1:] if options.script[:1] == ["--"] else options.script
    _check_machines(options)
    _check_script(script)
    env = {} if options.strategy is None else {"NEARLINEAR_STRATEGY": options.strategy}
    if options.nnodes is not None:
        run_elastic(script, options.n or 1, options.nnodes, options.rdzv, options.node_rank, env)
    if options.n in (None, 1):
        _run_plain(script, env)
    return _run_here(script, options.n, options.port, env)


def _run_plain(script: list[str], env: dict[str, str]) -> NoReturn:
    """Become `python script.py`: its terminal, its debugger, its signals and its exit code are untouched."""
    sys.stdout.flush()
    os.execve(sys.executable, [sys.executable, *script], {**os.environ, **env})


def _run_here(script: list[str], n: int, port: int | None, env: dict[str, str]) -> int:
    live, printer, distributed = Live(sys.stderr), Printer(), False

    def on_line(rank: int, stream: str, line: bytes) -> None:
        live.clear()
        printer(rank, stream, line)

    def on_event(event: dict[str, Any]) -> None:
        nonlocal distributed
        distributed = distributed or event.get("kind") == "distributed"
        live.event(event)

    outcome = run_local([sys.executable, *script], n, env=env, port=port, on_line=on_line, on_event=on_event)
    live.clear()
    for line in live.summary().splitlines():
        print(f"nearlinear: {line}", file=sys.stderr)
    if outcome.failure is None and not distributed:
        raise InputError(
            f"{Path(script[0]).name} never called nl.distribute, so {n} processes each trained alone; "
            "add the two lines: import nearlinear as nl / model, optimizer, loader = "
            "nl.distribute(model, optimizer, loader)"
        )
    if outcome.message is not None and not _explained(outcome, printer):
        print(f"nearlinear: error: {outcome.message}", file=sys.stderr)
    return outcome.exit_code


def _explained(outcome: Outcome, printer: Printer) -> bool:
    """Return whether the rank that failed first has said why, in a line that is already on the screen."""
    return outcome.failure is not None and outcome.failure.returncode > 0 and outcome.failure.rank in printer.reported


def _check_machines(options: argparse.Namespace) -> None:
    several = options.nnodes is not None
    if several and options.rdzv is None:
        raise InputError("--nnodes needs --rdzv HOST:PORT, the same on every machine: where they meet")
    if several and options.port is not None:
        raise InputError("--port is for one machine; with --nnodes the port is the one in --rdzv")
    if not several and (options.rdzv is not None or options.node_rank is not None):
        raise InputError("--rdzv and --node-rank are for several machines; add --nnodes M")
    if options.node_rank is not None and not 0 <= options.node_rank < options.nnodes:
        raise InputError(f"--node-rank is {options.node_rank}; the last of {options.nnodes} is {options.nnodes - 1}")


def _check_script(script: list[str]) -> None:
    if not script:
        raise InputError("which script? write it like `nearlinear run -n 2 train.py`")
    path = Path(script[0])
    if not path.exists():
        raise InputError(f"there is no script {script[0]!r} in {Path.cwd()}")
    if path.is_dir():
        raise InputError(f"{script[0]!r} is a directory; name the script in it")
    if not os.access(path, os.R_OK):
        raise InputError(f"{script[0]!r} may not be read; check its permissions")


_STRATEGIES = ", ".join(("auto", *STRATEGIES))


def _positive(text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1 up")
    return number


def _port(text: str) -> int:
    number = _positive(text)
    if number > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port; they run from 1 to 65535")
    return number


def _strategy(text: str) -> str:
    if text not in ("auto", *STRATEGIES):
        raise argparse.ArgumentTypeError(f"unknown strategy {text!r}; choose one of: {_STRATEGIES}")
    return text
