"""Training over slow links: one machine, per-step data parallelism, and strategy `local`, on the same tokens.

    python benchmarks/internet                    all of it, some 40 minutes; needs root for network namespaces
    python benchmarks/internet --members 2 --links "100 Mbit/s" --ways one local-int8
    python benchmarks/internet/exchange.py        one exchange alone, against the limit of the links

README.md says what is measured and how.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from quota import quotas, within
from rich.console import Console
from rich.markdown import Markdown

from nearlinear.observe.curves import Series, svg
from nearlinear.testing.links import Network
from nearlinear.units import parse_seconds

HERE = Path(__file__).parent
WINDOW = 128  # bytes
WAYS = ("one", "ddp", "local-fp32", "local-int8", "local-int4")
ELSEWHERE = ("ddp", "local-int8")
RIVALS = ("torchft", "diloco", "hivemind")  # where they are installed: rivals.py
DDP_STEPS = 30  # its step time does not change, and its loss is that of one
DEADLINE_S = 1200.0
PORT = 4242


@dataclass
class Cell:
    """One run.

    Args:
        way: One of ``WAYS``.
        members: Hosts.
        rate: Of each host's cable.
        loss: Packets lost.
        every: Steps per round, as asked for; 0: chosen by the run.
        seconds: Of training, until the state that is evaluated is there.
        samples: Windows per second.
        sent: Bytes from the busiest host, headers and all.
        end: Loss on the held-out text; NaN where the run was cut short.
        rounds: That were closed.
        curve: Seconds and training loss.
    """

    way: str
    members: int
    rate: str
    loss: float
    every: int
    seconds: float
    samples: float
    sent: int
    end: float
    rounds: int
    curve: list[tuple[float, float]]


def main() -> None:
    """Run the cells, print the table, and draw the losses."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--members", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--links", nargs="+", default=["100 Mbit/s", "10 Mbit/s"])
    parser.add_argument("--losses", type=float, nargs="+", default=[0.0, 0.005])
    parser.add_argument("--delay", default="40 ms", help="one way")
    parser.add_argument("--ways", nargs="+", choices=(*WAYS, *RIVALS), default=list(WAYS))
    parser.add_argument("--every", type=int, nargs="+", default=[0], help="steps per round; 0: the run chooses")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch", type=int, default=32, help="windows of a batch, over all hosts")
    parser.add_argument("--share", type=float, default=0.4, help="of a core, for every host")
    parser.add_argument("--out", type=Path, default=Path("out/internet"))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    cells: list[Cell] = []
    for way, members, rate, loss, every in _wanted(options):
        print(f"{way}, {members} hosts, {rate}, loss {loss:g}, every {every or 'auto'}", file=sys.stderr, flush=True)
        cells.append(_run(way, members, rate, loss, every, options))
        (options.out / "cells.json").write_text(json.dumps([asdict(cell) for cell in cells]))
    text = f"{_caption(options)}\n\n{_table(cells)}\n"
    (options.out / "internet.md").write_text(text)
    Console(width=None if sys.stdout.isatty() else 200).print(Markdown(text))
    series = _series([cell for cell in cells if (cell.rate, cell.loss) == (options.links[0], options.losses[0])])
    if series:
        trip = f"{2e3 * parse_seconds(options.delay):.0f} ms"
        title = f"Loss of a byte-level GPT against time, {options.links[0]}, {trip} there and back"
        (options.out / "loss.svg").write_text(svg(series, title=title, x="seconds", y="training loss"))


def _wanted(options: argparse.Namespace) -> list[tuple[str, int, str, float, int]]:
    """Return the cells: all ways over the first link, elsewhere DDP and the default; one machine before each link."""
    found: list[tuple[str, int, str, float, int]] = []
    for rate in options.links:
        if "one" in options.ways:
            found.append(("one", 1, rate, 0.0, 0))
        for loss in options.losses:
            first = (rate, loss) == (options.links[0], options.losses[0])
            for members in options.members:
                for way in options.ways if first or len(options.ways) < len(WAYS) else ELSEWHERE:
                    for every in [0] if way in ("one", "ddp") else options.every:
                        if way != "one":
                            found.append((way, members, rate, loss, every))
    return found


def _run(way: str, members: int, rate: str, loss: float, every: int, options: argparse.Namespace) -> Cell:
    steps = min(options.steps, DDP_STEPS) if way == "ddp" else options.steps
    kind, _, codec = way.partition("-")
    with (
        tempfile.TemporaryDirectory(prefix="nearlinear-internet-") as folder,
        quotas(members, options.share) as groups,
        Network(members, rate=rate, delay=options.delay, loss=loss) as network,
    ):
        script = [str(HERE / "train.py"), kind, str(steps), str(options.batch), str(members), folder]
        env = {**os.environ, "OMP_NUM_THREADS": "1", "CODEC": codec, "EVERY": str(every or "")}
        log = Path(folder, "log")
        processes: list[subprocess.Popen[Any]] = []
        ticket: list[str] = []
        for number in range(members):
            env |= {"NUMBER": str(number), "HERE": network[number].address, "FIRST": network[0].address}
            if kind == "ddp":
                env |= {"RANK": str(number), "WORLD_SIZE": str(members), "MASTER_ADDR": network[0].address}
                env |= {"MASTER_PORT": str(PORT), "GLOO_SOCKET_IFNAME": "eth0"}
            words = [sys.executable]
            if kind == "local":
                nearlinear = ["-m", "nearlinear"]
                listen = ["run", "--listen", f"{network[0].address}:{PORT}", "--record", "none"]
                words += [*nearlinear, *(listen if number == 0 else ["join", "--record", "none", *ticket])]
            with (log.with_suffix(f".{number}")).open("w") as out:
                process = network[number].popen(
                    within(groups[number], [*words, *script]), env=env, stdout=out, stderr=subprocess.STDOUT
                )
            processes.append(process)
            if kind == "local" and number == 0:
                ticket = [_ticket(log.with_suffix(".0"), process)]
        until = time.monotonic() + DEADLINE_S
        for number, process in enumerate(processes):
            if process.wait(timeout=max(1.0, until - time.monotonic())) != 0:
                wrote = log.with_suffix(f".{number}").read_text()
                sys.exit(f"{way}: host {number} ended with {process.returncode}:\n{wrote}")
        told = [json.loads(Path(folder, f"host{number}.json").read_text()) for number in range(members)]
        said = log.with_suffix(".0").read_text()
    seconds = max(each["seconds"] for each in told)
    rounds = re.search(r"(\d+) rounds;", said)
    return Cell(
        way,
        members,
        rate,
        loss,
        every,
        seconds,
        options.batch * steps / seconds,
        max(max(each["sent"], each["received"]) for each in told),
        told[0]["loss"] if steps == options.steps else float("nan"),
        int(rounds[1]) if rounds else 0,
        _curve([each["rows"] for each in told]),
    )


def _ticket(log: Path, process: subprocess.Popen[Any]) -> str:
    until = time.monotonic() + 60
    while time.monotonic() < until and process.poll() is None:
        found = re.search(r"nl1:\S+", log.read_text())
        if found:
            return found[0]
        time.sleep(0.05)
    sys.exit(f"no ticket came:\n{log.read_text()}")


def _curve(rows: Sequence[Sequence[tuple[float, float]]]) -> list[tuple[float, float]]:
    """Return seconds and the loss of the whole batch, the mean over members and over 20 steps."""
    steps = min(len(each) for each in rows)
    points = []
    for end in range(20, steps + 1, 20):
        loss = [each[step][1] for each in rows for step in range(end - 20, end)]
        points.append((max(each[end - 1][0] for each in rows), sum(loss) / len(loss)))
    return points


def _series(cells: Sequence[Cell]) -> list[Series]:
    """Return the losses of one machine, of DDP and of the default: those of DDP are one machine's, at its own pace."""
    found = []
    one = next((cell for cell in cells if cell.way == "one"), None)
    for cell in cells:
        curve, name = cell.curve, f"{cell.members} machines, {cell.way}"
        if cell.way == "one":
            name = "one machine"
        elif cell.way == "ddp" and one is not None:
            curve = [(second * one.samples / cell.samples, loss) for second, loss in one.curve]
        elif cell.way not in ("local-int8", *RIVALS):
            continue
        found.append(Series(name, *zip(*curve, strict=True)))
    return found


def _caption(options: argparse.Namespace) -> str:
    return (
        f"{datetime.date.today().isoformat()}: hosts of {options.share:g} core each, delay {options.delay} one way. A "
        f"GPT of 135 thousand parameters on bytes, {options.steps} steps of {options.batch} windows of {WINDOW} bytes "
        f"over all hosts (ddp: {min(options.steps, DDP_STEPS)} steps, its loss is that of one)."
    )


def _table(cells: Sequence[Cell]) -> str:
    alone = [cell for cell in cells if cell.way == "one"]
    level = max((_end(cell.curve) for cell in cells if cell.way != "ddp"), default=0.0)
    lines = [
        "| hosts | link | loss of packets | way | rounds | seconds | windows/s | over one machine | "
        f"seconds to a training loss of {level:.3f} | bytes per token | final loss | over one's |",
        "| ---: | --- | ---: | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for cell in cells:
        tokens = cell.samples * cell.seconds * WINDOW
        rate = f"{cell.samples / median(one.samples for one in alone):.2f}" if alone else ""
        end = f"{cell.end:.4f}" if cell.end == cell.end else "-"
        more = f"{100 * (cell.end / alone[0].end - 1):+.1f} %" if alone and cell.end == cell.end else ""
        link = "-" if cell.way == "one" else cell.rate
        words = [cell.members, link, f"{100 * cell.loss:g} %", cell.way, cell.rounds or "", f"{cell.seconds:.1f}"]
        words += [f"{cell.samples:.1f}", rate, _until(level, cell, alone), f"{cell.sent / tokens:.2f}", end, more]
        lines.append(f"| {' | '.join(map(str, words))} |")
    return "\n".join(lines)


def _end(curve: Sequence[tuple[float, float]]) -> float:
    return min((loss for _, loss in curve), default=0.0)


def _until(level: float, cell: Cell, alone: Sequence[Cell]) -> str:
    """Return the seconds to a training loss; DDP has one machine's losses at its own pace."""
    curve = cell.curve
    if cell.way == "ddp":
        curve = [(second * alone[0].samples / cell.samples, loss) for second, loss in alone[0].curve] if alone else []
    for (before, higher), (after, lower) in pairwise(curve):
        if higher > level >= lower:
            return f"{before + (after - before) * (higher - level) / (higher - lower):.1f}"
    return ""


if __name__ == "__main__":
    main()
