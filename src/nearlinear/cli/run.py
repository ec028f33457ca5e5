"""The command `nearlinear run`: starting a script as one process, as N here, or on several machines."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

from nearlinear.core.forecast import Point
from nearlinear.core.plan import STRATEGIES
from nearlinear.errors import InputError
from nearlinear.launch.elastic import run_elastic
from nearlinear.launch.lines import Printer
from nearlinear.launch.listen import Listening
from nearlinear.launch.local import run_local
from nearlinear.launch.outcome import Outcome
from nearlinear.observe import kept
from nearlinear.observe.live import Live
from nearlinear.observe.page import Content
from nearlinear.observe.record import Recorder, comparable
from nearlinear.runtime.local.dialling import require_key
from nearlinear.runtime.local.ticket import Ticket


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the parser."""
    parser = subparsers.add_parser(
        "run",
        help="start a script's processes",
        description="Start a script's processes: here by itself, over several machines by torch's elastic agent.",
        usage="nearlinear run [-n N] [options] script.py [args ...]",
        allow_abbrev=False,
    )
    parser.add_argument("-n", type=positive, metavar="N", help="processes on this machine (default: 1)")
    parser.add_argument("--strategy", type=_strategy, metavar="S", help=f"one of {_STRATEGIES}; wins over the script's")
    add_counts(parser)
    add_machines(parser)
    parser.add_argument("--listen", metavar="HOST:PORT", help="train with machines that join (strategy local)")
    parser.add_argument("--address", metavar="HOST[:PORT]", help="where the others reach --listen, if not there")
    parser.add_argument("--ticket", metavar="TICKET", help="of a run whose listener died: take its place (or @FILE)")
    parser.add_argument(
        "--record",
        metavar="FILE|none",
        help="the run's record for `nearlinear report` (default: kept among the last 50)",
    )
    # One argument for both: argparse would take a -- away from between them.
    parser.add_argument("script", nargs=argparse.REMAINDER, metavar="script.py [args ...]", help="passed on as it is")
    parser.set_defaults(call=run)


def _ticket(text: str) -> Ticket:
    """Return the ticket in an argument, or in the file that ``@FILE`` names.

    Raises:
        InputError: That is no ticket.
    """
    if text.startswith("@"):  # a command line is read by everyone on the machine, a file by whom it is for
        try:
            text = Path(text[1:]).expanduser().read_text().strip()
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"the ticket in {text[1:]!r} cannot be read ({error})") from None
    return Ticket.parse(text)


def add_machines(parser: argparse.ArgumentParser) -> None:
    """Add the options that say where the processes meet."""
    parser.add_argument("--port", type=_port, metavar="P", help="port at which the ranks meet (default: a free one)")
    parser.add_argument("--nnodes", type=positive, metavar="M", help="number of machines; run the command on each")
    parser.add_argument("--rdzv", metavar="HOST:PORT", help="where the machines meet; HOST is one of them")
    parser.add_argument("--node-rank", type=int, metavar="R", help="this machine's number, 0 to M-1; 0 is HOST")


def add_counts(parser: argparse.ArgumentParser) -> None:
    """Add the options that say how a strategy is carried out."""
    parser.add_argument("--stages", type=positive, metavar="S", help="stages of a pipeline (N / S replicas of it)")
    parser.add_argument("--microbatches", type=positive, metavar="M", help="pieces of a batch in a pipeline")
    parser.add_argument("--shards", type=positive, metavar="S", help="ranks that share a copy of sharded parameters")


def asked_for(options: argparse.Namespace) -> dict[str, str]:
    """Return what the command line asks of ``distribute``, as it is told by the environment."""
    asked = {name: getattr(options, name) for name in ("strategy", "stages", "microbatches", "shards")}
    return {f"NEARLINEAR_{name.upper()}": str(value) for name, value in asked.items() if value is not None}


def planned(plan: Content | None, n: int) -> dict[str, str]:
    """Return how ``distribute`` is told what was planned for so many processes."""
    ways = plan.ways if plan is not None and n > 1 else ()
    plans = [asdict(each.plan) for each in ways if each.devices == n and each.fits and each.plan is not None]
    return {"NEARLINEAR_PLANNED": json.dumps(plans)}  # none too: another script's may have started this one


def run(options: argparse.Namespace) -> int:
    """Run the script and return the exit code.

    Raises:
        InputError: The options contradict each other, or there is no such script.
    """
    script: list[str] = options.script[1:] if options.script[:1] == ["--"] else options.script
    options.ticket = None if options.ticket is None else _ticket(options.ticket)
    _check_machines(options)
    _check_script(script)
    _check_record(options)
    env = asked_for(options)
    if options.listen is not None:
        return _listen(script, options, env)
    if options.ticket is not None:
        require_key(options.ticket)
        env |= {"NEARLINEAR_TICKET": str(options.ticket)}
    if options.nnodes is not None:
        run_elastic(script, options.n or 1, options.nnodes, options.rdzv, options.node_rank, env)
    if options.ticket is None and options.n in (None, 1) and options.record in (None, "none"):
        _run_plain(script, env)
    return _run_here(script, options.n or 1, options, env)


def _run_plain(script: list[str], env: dict[str, str]) -> NoReturn:
    """Become `python script.py`: its terminal, its debugger, its signals and its exit code are untouched."""
    sys.stdout.flush()
    os.execve(sys.executable, [sys.executable, *script], {**os.environ, **env})


def _listen(script: list[str], options: argparse.Namespace, env: dict[str, str]) -> int:
    """Train here, and with whoever joins; the run lasts until the last member has left."""
    noted = _Noted()
    with Listening(options.listen, options.address, noted, options.ticket) as run:
        print(f"nearlinear join {run.ticket} {shlex.join(script)}", flush=True)
        options.strategy = "local"
        code = _run_here(script, options.n or 1, options, env | run.environment, noted)
        if code != _INTERRUPTED:
            run.wait_until_all_have_left()
    return code


class _Noted:
    """What the run's centre has to say: on the screen, and in the record while there is one."""

    record: Recorder | None = None

    def __call__(self, line: str) -> None:
        _say(line)
        if self.record is not None:
            self.record.notice(line)


def _run_here(
    script: list[str], n: int, options: argparse.Namespace, env: dict[str, str], noted: _Noted | None = None
) -> int:
    live, printer, distributed = Live(sys.stderr), Printer(), False
    plan = kept.planned(script)
    expected: Point | None = None
    with contextlib.ExitStack() as stack:
        record = None
        if options.record != "none":
            path = None if options.record is None else Path(options.record)
            record = stack.enter_context(Recorder(path, script, n, options.strategy, plan, _say))
        if noted is not None:
            noted.record = record

        def on_line(rank: int, stream: str, line: bytes) -> None:
            live.clear()
            printer(rank, stream, line)
            if record is not None and stream == "stderr" and line.startswith(_NOTICE):
                record.notice(line[len(_NOTICE) :].decode(errors="replace"))

        def on_event(event: dict[str, Any]) -> None:
            nonlocal distributed, expected
            if event.get("kind") == "distributed" and not distributed:
                distributed, strategy = True, event.get("strategy")
                expected = comparable(plan, n, strategy)
                live.clear()
                if expected is not None:
                    way = f"{expected.way}, " if n > 1 else ""
                    _say(f"forecast: {way}{_forecast(expected)}")
            if expected is not None and event.get("kind") == "step":
                event.setdefault("predicted_samples_per_s", expected.rate)
            live.event(event)
            if record is not None:
                record.event(event)

        command = [sys.executable, *script]
        outcome = run_local(
            command, n, env=env | planned(plan, n), port=options.port, on_line=on_line, on_event=on_event
        )
        live.clear()
        summary = live.summary().splitlines()
        for line in summary:
            _say(line)
        if outcome.failure is None and not distributed:
            alone = "the process trained" if n == 1 else f"{n} processes each trained"
            raise InputError(
                f"{Path(script[0]).name} never called nl.distribute, so {alone} alone; "
                "add the two lines: import nearlinear as nl / model, optimizer, loader = "
                "nl.distribute(model, optimizer, loader)"
            )
        if outcome.message is not None and not _explained(outcome, printer):
            _say(f"error: {outcome.message}")
        if (
            outcome.failure is not None
            and options.strategy is None
            and n > 1
            and expected is not None
            and expected.way != "data"
        ):
            _say(f"hint: it trained by {expected.way}, as planned; --strategy data has the whole model on every rank")
        if record is not None:
            record.end(outcome.exit_code, outcome.message)
            if summary and record.path is not None:
                _say(f"hint: nearlinear report {shlex.quote(str(record.path))}")
    return outcome.exit_code


_NOTICE = b"nearlinear: "
_INTERRUPTED = 130


def _say(line: str) -> None:
    print(f"nearlinear: {line}", file=sys.stderr)


def _forecast(point: Point) -> str:
    """Return what is expected of the run, with its band."""
    low, rate, high = (f"{point.samples / each:,.4g}" for each in (point.high, point.seconds, point.low))
    return f"{rate} samples/s ({low} to {high}), {100 * point.exposed / point.seconds:.0f} % of the time communicating"


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
    apart = options.listen is not None or options.ticket is not None
    if options.listen is not None and several:
        raise InputError(
            "--listen is for one machine, on which the run's first member is; leave out --nnodes. Others may be on "
            "several: nearlinear join --nnodes M --rdzv HOST:PORT TICKET script.py"
        )
    if apart and options.strategy not in (None, "local"):
        raise InputError(f"--strategy {options.strategy} needs fast links; with machines that join it is 'local'")
    if options.call is run and options.ticket is not None and options.listen is None:
        raise InputError("--ticket is for --listen, in the place of one that died; to join: nearlinear join TICKET")
    if options.address is not None and options.listen is None:
        raise InputError("--address says where --listen is reached; give --listen HOST:PORT too")
    if options.node_rank is not None and not 0 <= options.node_rank < options.nnodes:
        raise InputError(f"--node-rank is {options.node_rank}; the last of {options.nnodes} is {options.nnodes - 1}")


def _check_record(options: argparse.Namespace) -> None:
    if options.record not in (None, "none") and options.nnodes is not None:
        raise InputError("--record is for one machine; over several, torch's elastic agent starts the processes")


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


def positive(text: str) -> int:
    """Return the number from 1 up in an argument."""
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1 up")
    return number


def _port(text: str) -> int:
    number = positive(text)
    if number > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port; they run from 1 to 65535")
    return number


def _strategy(text: str) -> str:
    if text not in ("auto", *STRATEGIES):
        raise argparse.ArgumentTypeError(f"unknown strategy {text!r}; choose one of: {_STRATEGIES}")
    return text
