"""Measuring nearlinear's pipeline: two processes of one thread, against one core, its bound and torch's pipeline.

    python benchmarks/pipeline                      all of it, about ten minutes
    python benchmarks/pipeline --parts speed        of: speed, split, graph, memory, fit
    python benchmarks/pipeline --quick              small batches and one block: a look, not a result
    python benchmarks/pipeline --markdown           the tables as they stand in README.md

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
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from report import markdown
from rich.console import Console
from rich.markdown import Markdown

import nearlinear as nl

HERE = Path(__file__).parent
PARTS = ("speed", "split", "graph", "memory", "fit")
MICROBATCHES = 8
# Freed memory stays with the process; why: see benchmarks/data_parallel.
ALLOCATOR = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**40)}
DEADLINE_S = 900.0
SPEED = ("one", "one/8", "halves/8", "nearlinear/8", "step/8", "gpipe/8", "1f1b/8")
PIECES = ("one", "nearlinear/1", "nearlinear/2", "nearlinear/4", "nearlinear/16")
SPLIT = ("one", "nearlinear/8", "alike/8", "step/8", "gpipe/8", "1f1b/8")
ROOM = 0.5  # of what the whole model's training holds, that each process may have beside what a tiny one takes


def main() -> None:
    """Measure, print the tables, and write them and the measured times."""
    args = _arguments()
    options = {key: getattr(args, key) for key in ("placements", "blocks", "seconds", "positions", "seed", "patience")}
    options |= {"cores": _cores(), "microbatches": MICROBATCHES, "alone_s": 4.0 if args.quick else 20.0}
    args.out.mkdir(parents=True, exist_ok=True)
    kept = args.out / "pipeline.json"
    record: dict[str, Any] = json.loads(kept.read_text()) if args.add and kept.exists() else {}
    record |= {"machine": _machine(), "options": options}
    for part in args.parts:
        _say(f"{part}: {_ABOUT[part]}")
        record[part] = _MEASURE[part](options, args.quick)
        kept.write_text(json.dumps(record, indent=1))
    text = markdown(record)
    (args.out / "pipeline.md").write_text(text)
    if args.markdown:
        print(text)
    else:
        Console(width=None if sys.stdout.isatty() else 200).print(Markdown(text))
    _say(f"tables and times are in {args.out}/pipeline.md and .json")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small batches, one block: a look, not a result")
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=PARTS, metavar="PART")
    parser.add_argument("--placements", type=int, help="times all models are made anew (2; with --quick 1)")
    parser.add_argument("--blocks", type=int, help="rounds of one block each, per placement (3; with --quick 1)")
    parser.add_argument("--seconds", type=float, help="length of a block (1.5; with --quick 0.3)")
    parser.add_argument("--positions", type=int, help="per sample (32; with --quick 2)")
    parser.add_argument("--patience", type=float, help="seconds to wait for other programs (60; with --quick 0)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--add", action="store_true", help="keep what an earlier run in --out has of other parts")
    parser.add_argument("--markdown", action="store_true", help="print Markdown as it is")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder for pipeline.md and .json")
    args = parser.parse_args()
    for name, whole, quick in (
        ("placements", 2, 1), ("blocks", 3, 1), ("seconds", 1.5, 0.3), ("positions", 32, 2), ("patience", 60.0, 0.0)
    ):  # fmt: skip
        if getattr(args, name) is None:
            setattr(args, name, quick if args.quick else whole)
    return args


def _speed(options: dict[str, Any], quick: bool) -> list[Any]:
    return [_ranks("pair.py", 2, {**options, "cases": {"balanced": ways}})[0][0] for ways in (SPEED, PIECES)]


def _split(options: dict[str, Any], quick: bool) -> list[Any]:
    return _ranks("pair.py", 2, {**options, "cases": {"wide first": SPLIT, "heavy head": SPLIT}})[0]


def _graph(options: dict[str, Any], quick: bool) -> list[Any]:
    return _ranks("alone.py", 1, options)[0]


def _memory(options: dict[str, Any], quick: bool) -> list[Any]:
    asked = {**options, "width": 128 if quick else 512, "layers": 4 if quick else 8}
    return [_ranks("held.py", stages, asked, pinned=False) for stages in (2, 4)]


def _fit(options: dict[str, Any], quick: bool) -> dict[str, Any]:
    asked = {**options, "width": 768 if quick else 1024, "layers": 8 if quick else 12, "steps": 3}
    [[about]] = _ranks("fits.py", 1, {**asked, "steps": 0}, pinned=False)
    tiny = [rank[0]["peak"] for rank in _ranks("fits.py", 4, {**asked, "width": 64}, pinned=False)]
    whole = 16 * about["parameters"]  # Adam: four numbers of four bytes
    limit = int(max(tiny) + ROOM * whole)
    found: dict[str, Any] = {"bare": max(tiny), "whole": whole, "limit": limit, "alone": about["peak"]}
    for processes in (1, 4):
        try:
            ranks = _ranks("fits.py", processes, asked, pinned=False, address_space=limit)
            found[str(processes)] = [rank[0] for rank in ranks]
        except _FailedError as failed:
            found[str(processes)] = str(failed)
    return found


_MEASURE = {"speed": _speed, "split": _split, "graph": _graph, "memory": _memory, "fit": _fit}
_ABOUT = {
    "speed": "two stages against one core, and against torch.distributed.pipelining",
    "split": "unbalanced models, the planned split against as many layers on either stage",
    "graph": "one process, the captured graph against the model",
    "memory": "what each rank holds against its share of the plan",
    "fit": "a model that does not fit one process's ulimit -v, in four",
}


class _FailedError(Exception):
    """A process ended with an error; the last line it wrote."""


def _ranks(
    script: str, count: int, options: Mapping[str, Any], *, pinned: bool = True, address_space: int | None = None
) -> list[list[Any]]:
    """Start a script in ``count`` processes and return the JSON lines of each.

    Raises:
        _FailedError: One of them ended with an error.
    """
    port, asked = _free_port(), json.dumps(options)
    with contextlib.ExitStack() as stack:
        outs, errors, processes = [], [], []
        for rank in range(count):
            environment = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE")}
            environment |= {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
            # Or each thread reserves 64 MB of address space to allocate from.
            environment |= ALLOCATOR if pinned else {"MALLOC_ARENA_MAX": "1"}
            if count > 1:
                environment |= {
                    "RANK": str(rank), "WORLD_SIZE": str(count), "LOCAL_RANK": str(rank),
                    "LOCAL_WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
                    "GLOO_SOCKET_IFNAME": "lo",
                }  # fmt: skip
            outs.append(stack.enter_context(tempfile.TemporaryFile("w+")))
            errors.append(stack.enter_context(tempfile.TemporaryFile("w+")))
            command = [sys.executable, str(HERE / script), asked]
            if address_space is not None:
                command = ["sh", "-c", f'ulimit -v {address_space // 1024} && exec "$@"', "sh", *command]
            process = subprocess.Popen(command, env=environment, stdout=outs[-1], stderr=errors[-1])
            stack.callback(_end, process)
            processes.append(process)
        failed = _wait(processes)
        for each in (*outs, *errors):
            each.seek(0)
        if failed is not None:
            said = [line for line in errors[failed].read().splitlines() if line.strip()] or ["no word"]
            if address_space is None:
                raise SystemExit(f"{script}: rank {failed} of {count} ended: " + "\n".join(said[-12:]))
            raise _FailedError(said[-1])
        return [[json.loads(line) for line in out if line.startswith("{")] for out in outs]


def _wait(processes: Sequence[subprocess.Popen[Any]]) -> int | None:
    """Return the first rank that failed, once all have ended or one has failed."""
    end = time.monotonic() + DEADLINE_S
    while any(process.poll() is None for process in processes):
        if any(process.poll() for process in processes):
            break
        if time.monotonic() > end:
            raise SystemExit(f"not done after {DEADLINE_S:.0f} s; ask for fewer --blocks")
        time.sleep(0.1)
    return next((rank for rank, process in enumerate(processes) if process.poll()), None)


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
        _say("there is only one core, so the two processes take turns on it: nothing can be gained here")
    return [ours[0], ours[min(1, len(ours) - 1)]]


def _machine() -> dict[str, Any]:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "processor": models[0] if models else platform.processor() or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "torch": version("torch"),
        "nearlinear": nl.__version__,
        "load": round(os.getloadavg()[0], 1),
        "date": datetime.date.today().isoformat(),
    }


def _say(message: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {message}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
