"""The command `nearlinear probe`: measuring devices and links, and writing them as a cluster file."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console

from nearlinear.cli.probe_rank import measure_as_rank
from nearlinear.cli.probe_tables import show
from nearlinear.cli.status import status
from nearlinear.errors import InputError, NearlinearError
from nearlinear.launch.elastic import run_elastic
from nearlinear.launch.environment import gpus_for, rank_environment, visible_gpus
from nearlinear.launch.lines import Printer
from nearlinear.launch.local import run_local
from nearlinear.measure import cache
from nearlinear.measure.hardware import here
from nearlinear.measure.probe import Measured
from nearlinear.runtime.environment import World, usable_cores, world_from


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the parser."""
    parser = subparsers.add_parser(
        "probe",
        help="measure devices and links",
        description="Measure how fast the devices compute and how fast messages between them travel, and write that "
        "as a cluster file, from which `nearlinear plan --cluster FILE` forecasts. Works here by itself, over several "
        "machines with --nnodes, and under torchrun or srun, where every rank runs it.",
        usage="nearlinear probe [-n N] [--out FILE] [--json] [--fresh] [--nnodes M --rdzv HOST:PORT]",
        allow_abbrev=False,
    )
    parser.add_argument("-n", type=int, metavar="N", help="processes here (default: one per GPU, or 2 without)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="cluster file (default: one in the cache folder)")
    parser.add_argument("--json", action="store_true", help="print the cluster file instead of tables")
    parser.add_argument("--fresh", action="store_true", help="measure even if these machines were measured lately")
    parser.add_argument("--nnodes", type=int, metavar="M", help="number of machines; run the command on each")
    parser.add_argument("--rdzv", metavar="HOST:PORT", help="where the machines meet; HOST is one of them")
    parser.add_argument("--node-rank", type=int, metavar="R", help="this machine's number, 0 to M-1; 0 is HOST")
    parser.set_defaults(call=probe)


def probe(options: argparse.Namespace) -> int:
    """Measure, or find what was measured, print it, write it, and return the exit code.

    Raises:
        InputError: An option cannot be, or a file cannot be written.
        NearlinearError: A rank failed; what it said is on stderr.
    """
    world = world_from()
    if world.size > 1:
        if options.n is not None or options.nnodes is not None:
            raise InputError(f"-n and --nnodes start processes, and {world.size} have been started; leave them out")
        measured, kept = _as_rank(world, options.fresh)
        if world.rank != 0:
            return 0
    elif options.nnodes is not None:
        _check_machines(options)
        words = ["-m", "nearlinear", "probe", *_passed_on(options)]
        run_elastic(
            words, _processes() if options.n is None else options.n, options.nnodes, options.rdzv, options.node_rank, {}
        )
    else:
        measured, kept = measured_here(options.n, fresh=options.fresh)
    path = options.out or cache.path_for(measured.hardware)
    if not kept:
        cache.keep(measured)
    if options.out is not None:
        cache.write(options.out, measured.to_json())
    if options.json:
        print(measured.to_json())
    else:
        show(measured, Console(highlight=False))
    sys.stdout.flush()
    if kept:
        print(f"nearlinear: measured {_ago(measured)}; --fresh measures again", file=sys.stderr)
    print(f"nearlinear: the cluster file is {path}", file=sys.stderr)
    print(f"hint: nearlinear plan --cluster {path} your_script.py", file=sys.stderr)
    return 0


def _processes() -> int:
    return len(visible_gpus(os.environ)) or 2


def _check_machines(options: argparse.Namespace) -> None:
    if options.rdzv is None:
        raise InputError("--nnodes needs --rdzv HOST:PORT, the same on every machine: where they meet")
    if options.node_rank is not None and not 0 <= options.node_rank < options.nnodes:
        raise InputError(f"--node-rank is {options.node_rank}; the last of {options.nnodes} is {options.nnodes - 1}")


def _passed_on(options: argparse.Namespace) -> list[str]:
    """Return the options that every rank needs to know."""
    out = ["--out", str(options.out.absolute())] if options.out is not None else []
    return out + [f"--{name}" for name in ("json", "fresh") if getattr(options, name)]


def _as_rank(world: World, fresh: bool) -> tuple[Measured, bool]:
    return measure_as_rank(world, fresh=fresh, say=lambda what: print(f"nearlinear: measuring {what}", file=sys.stderr))


def measured_here(n: int | None = None, *, fresh: bool = False) -> tuple[Measured, bool]:
    """Return what ``n`` processes of this machine measure, and whether that was done lately instead of now.

    Args:
        n: By default one per GPU, or 2 where there is none.
        fresh: Measure anew.

    Raises:
        InputError: ``n`` is below 1.
        NearlinearError: The probe failed.
    """
    n = _processes() if n is None else n
    if n < 1:
        raise InputError(f"-n is {n}; a probe needs at least 1 process, and 2 to see a link")
    environments = [dict(os.environ)]
    if n > 1:
        gpus = gpus_for(n, os.environ)
        environments = [
            {**os.environ, **rank_environment(rank, n, 0, gpus, usable_cores(), os.environ)} for rank in range(n)
        ]
    if not fresh:
        found = cache.find([here(each) for each in environments])
        if found is not None:
            return found, True
    if n == 1:
        with status(_line) as say:
            return measure_as_rank(World(), fresh=True, say=say)
    with tempfile.TemporaryDirectory(prefix="nearlinear-probe-") as folder, status(_line) as say:
        result = Path(folder) / "cluster.json"
        outcome = run_local(
            [sys.executable, "-m", "nearlinear.cli.probe_rank", str(result)],
            n,
            on_line=(printer := Printer(sys.stderr, sys.stderr)),
            on_event=lambda event: _tell(event, say),
        )
        if outcome.message is not None:
            said = outcome.failure is not None and outcome.failure.rank in printer.reported
            raise NearlinearError(f"the probe failed: {outcome.message}" + (" (see above)" if said else ""))
        return Measured.from_json(result.read_text(encoding="utf-8")), False


def _tell(event: dict[str, Any], say: Callable[[str], None]) -> None:
    if event.get("kind") == "probe":
        say(f"measuring {event.get('what')}")


def _line(what: str) -> None:
    print(f"nearlinear: {what}", file=sys.stderr, flush=True)


def _ago(measured: Measured) -> str:
    minutes = cache.age(measured).total_seconds() / 60
    if minutes < 60:
        return f"{minutes:.0f} min ago"
    return f"{minutes / 60:.0f} h ago" if minutes < 48 * 60 else f"{minutes / 60 / 24:.0f} days ago"
