"""Measuring nearlinear against its rivals: two processes of one thread each, three models, three links.

    python benchmarks/data_parallel                all of it, about ten minutes; emulated links need root
    python benchmarks/data_parallel --quick        a minute, for a look
    python benchmarks/data_parallel --markdown     the tables as they stand in README.md

README.md says what is measured and how.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import platform
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from models import MODELS
from rich.console import Console
from rich.markdown import Markdown
from rivals import RIVALS
from table import Cell, markdown

import nearlinear as nl
from nearlinear.testing.links import Network, can_emulate

HERE = Path(__file__).parent
LOOPBACK = "loopback"
LINKS = (LOOPBACK, "1 Gbit/s", "100 Mbit/s")
# Freed memory stays with the process. Otherwise whether glibc hands it back, and each step then waits for the kernel to
# clear thousands of pages, is a matter of luck, worth up to 14 % of a step.
ALLOCATOR = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**40)}
DEADLINE_S = 900.0  # for the two processes of one link, beyond their patience


def main() -> None:
    """Measure, print the tables, and write them and the measured times."""
    args = _arguments()
    links, reason = args.links, can_emulate()
    if reason is not None and set(links) != {LOOPBACK}:
        print(f"NOT MEASURED: {', '.join(set(links) - {LOOPBACK})}: {reason}", file=sys.stderr)
        links = [LOOPBACK]
    wanted = ("models", "rivals", "placements", "blocks", "seconds", "patience", "seed")
    options = {key: getattr(args, key) for key in wanted}
    machine = _machine()
    args.out.mkdir(parents=True, exist_ok=True)
    kept = args.out / "data_parallel.json"
    record: dict[str, Any] = {"cells": [], "overhead": []}
    if args.add and kept.exists():
        record |= json.loads(kept.read_text())
    record |= {"machine": machine, "options": options}
    for link in links:
        _say(f"{link}: {', '.join(args.models)} under {', '.join(args.rivals)}")
        fresh = [{"link": link, **raw} for raw in _two_processes(link, options)]
        again = {(link, raw["model"]) for raw in fresh}
        record["cells"] = [raw for raw in record["cells"] if (raw["link"], raw["model"]) not in again] + fresh
        kept.write_text(json.dumps(record, indent=1))
    if args.overhead:
        _say("one process: what nl.distribute adds")
        record["overhead"] = _one_process({**options, "core": _cores()[0]})
        kept.write_text(json.dumps(record, indent=1))
    left_out = f"\n\n**Not measured**: every link but loopback ({reason})." if links != args.links else ""
    cells = [Cell(raw["link"], raw) for raw in record["cells"]]
    text = f"{_caption(machine, options)}{left_out}\n\n{markdown(cells, record['overhead'])}"
    (args.out / "data_parallel.md").write_text(text)
    if args.markdown:
        print(text)
    else:
        Console(width=None if sys.stdout.isatty() else 200).print(Markdown(text))
    _say(f"tables and times are in {args.out}/data_parallel.md and .json")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="three short blocks: a look, not a result")
    parser.add_argument("--links", nargs="+", default=list(LINKS), metavar="LINK", help=f"of: {', '.join(LINKS)}")
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS), metavar="MODEL")
    parser.add_argument("--rivals", nargs="+", default=list(RIVALS), metavar="RIVAL", help="as rivals.py names them")
    parser.add_argument("--placements", type=int, help="times all models are made anew (2; with --quick 1)")
    parser.add_argument("--blocks", type=int, help="rounds of one block each, per placement (3)")
    parser.add_argument("--seconds", type=float, help="length of a block (0.8; with --quick 0.3)")
    parser.add_argument("--patience", type=float, help="seconds per link to wait for other programs (60; quick: 10)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-overhead", dest="overhead", action="store_false", help="leave out the one-process loop")
    parser.add_argument("--add", action="store_true", help="keep what an earlier run in --out has of other links")
    parser.add_argument("--markdown", action="store_true", help="print Markdown as it is")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder for data_parallel.md and .json")
    args = parser.parse_args()
    args.placements = args.placements or (1 if args.quick else 2)
    args.blocks = args.blocks or 3
    args.seconds = args.seconds or (0.3 if args.quick else 0.8)
    args.patience = (10.0 if args.quick else 60.0) if args.patience is None else args.patience
    return args


def _two_processes(link: str, options: dict[str, Any]) -> list[dict[str, Any]]:
    """Start two processes at the ends of a link, and return what rank 0 measured."""
    cores = _cores()
    with contextlib.ExitStack() as stack:
        network = None if link == LOOPBACK else stack.enter_context(Network(hosts=2, rate=link))
        address = "127.0.0.1" if network is None else network[0].address
        out = stack.enter_context(tempfile.TemporaryFile("w+"))
        port, processes = _free_port(), []
        for rank in range(2):
            environment = os.environ | {
                "RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2",
                "MASTER_ADDR": address, "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1",
                "GLOO_SOCKET_IFNAME": "lo" if network is None else "eth0",
                **ALLOCATOR,
                "TORCH_CPP_LOG_LEVEL": "ERROR",  # or c10d warns that an emulated host has no name server
            }  # fmt: skip
            command = [sys.executable, str(HERE / "worker.py"), json.dumps({**options, "cores": cores})]
            starter = subprocess.Popen if network is None else network[rank].popen
            stdout = out if rank == 0 else subprocess.DEVNULL
            process = starter(command, env=environment, stdout=stdout)
            stack.callback(_end, process)
            processes.append(process)
        _wait(processes, link, DEADLINE_S + options["patience"])
        out.seek(0)
        return [json.loads(line) for line in out]


def _wait(processes: Sequence[subprocess.Popen[Any]], link: str, deadline_s: float) -> None:
    end = time.monotonic() + deadline_s
    while any(process.poll() is None for process in processes):
        failed = [rank for rank, process in enumerate(processes) if process.poll()]
        if failed:
            raise SystemExit(f"{link}: rank {failed[0]} ended with exit code {processes[failed[0]].returncode}")
        if time.monotonic() > end:
            raise SystemExit(f"{link}: not done after {deadline_s:.0f} s; ask for fewer --blocks or --models")
        time.sleep(0.1)


def _one_process(options: dict[str, Any]) -> list[dict[str, Any]]:
    environment = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE")}
    command = [sys.executable, str(HERE / "overhead.py"), json.dumps(options)]
    environment |= {**ALLOCATOR, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, timeout=DEADLINE_S, check=True)
    return [json.loads(line) for line in done.stdout.splitlines()]


def _end(process: subprocess.Popen[Any]) -> None:
    if process.poll() is None:
        process.kill()
    process.wait(30)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def _cores() -> list[int]:
    """Return the core of rank 0 and that of rank 1."""
    ours = sorted(os.sched_getaffinity(0))
    if len(ours) < 2:
        _say("there is only one core, so the two processes take turns on it: nothing can scale here")
    return [ours[0], ours[min(1, len(ours) - 1)]]


def _machine() -> dict[str, Any]:
    models = [line.partition(":")[2].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")]
    return {
        "processor": models[0] if models else platform.processor() or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "torch": version("torch"),
        "accelerate": version("accelerate"),
        "nearlinear": nl.__version__,
        "load": round(os.getloadavg()[0], 1),
        "date": datetime.date.today().isoformat(),
    }


def _lines(path: str) -> list[str]:
    with contextlib.suppress(OSError):
        return Path(path).read_text().splitlines()
    return []


def _caption(machine: dict[str, Any], options: dict[str, Any]) -> str:
    return (
        f"{machine['date']}: {machine['processor']}, {machine['cores']} cores (load of others before the start "
        f"{machine['load']}), {machine['system']}, Python {machine['python']}, torch {machine['torch']}, accelerate "
        f"{machine['accelerate']}, nearlinear {machine['nearlinear']}. Two processes of one thread, each on a core of "
        f"its own. Seed {options['seed']}; {options['placements']} times {options['blocks']} rounds of blocks of "
        f"{options['seconds']:g} s, the models made anew each time; medians, and in brackets the ranges over the "
        "blocks."
    )


def _say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
