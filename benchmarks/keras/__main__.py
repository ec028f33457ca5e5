"""Measuring Keras on two processes of one core each: nearlinear, TensorFlow's multi-worker strategy, and the ceiling.

    python benchmarks/keras                 all of it
    python benchmarks/keras --quick         one short round
    python benchmarks/keras --models cnn    of: mlp, cnn, transformer, deep
    python benchmarks/keras --show FILE ... the table of what earlier runs measured, together

README.md says what is measured and how.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from statistics import median

from models import MODELS
from rich.console import Console
from rich.markdown import Markdown

from nearlinear.launch.environment import free_port, rank_environment

HERE = Path(__file__).parent
DATA = ("one", "share", "nearlinear", "strategy", "strategy_fit")
PIPELINE = ("one", "pipeline")
DEADLINE_S = 300.0
Speeds = dict[str, dict[str, list[float]]]


def main() -> None:
    """Measure in turns, print the table and what meets its target."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--ways", nargs="+", choices=[*DATA, "pipeline"], help="all by default; `one` is among them")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--blocks", type=int, default=3, help="per round")
    parser.add_argument("--seconds", type=float, default=2.0, help="of a block")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--show", type=Path, nargs="+", metavar="FILE", help="of --out: measure nothing, print them")
    parser.add_argument("--out", type=Path, default=Path("out/keras.json"))
    options = parser.parse_args()
    if options.show:
        print(_report(_together([json.loads(path.read_text()) for path in options.show])))
        return
    if options.quick:
        options.rounds, options.blocks, options.seconds = 1, 2, 1.0
    wanted = {
        name: [way for way in _ways(name) if way in ("one", *(options.ways or _ways(name)))] for name in options.models
    }
    speeds: Speeds = {name: {way: [] for way in ways} for name, ways in wanted.items()}
    load = os.getloadavg()[0]
    options.out.parent.mkdir(parents=True, exist_ok=True)
    for number in range(options.rounds):
        for name in options.models:
            ways = wanted[name]
            for way in ways if number % 2 == 0 else reversed(ways):
                print(f"round {number + 1}: {name}, {way}", file=sys.stderr, flush=True)
                speeds[name][way] += _measured(way, name, options.seconds, options.blocks)
                options.out.write_text(json.dumps(speeds, indent=1))
    text = f"{_caption(options, load)}\n\n{_report(speeds)}"
    Console(width=None if sys.stdout.isatty() else 200).print(Markdown(text))


def _ways(model: str) -> Sequence[str]:
    if model == "deep":
        return PIPELINE
    return DATA if find_spec("tf_keras") is not None else DATA[:-1]


def _measured(way: str, model: str, seconds: float, blocks: int) -> list[float]:
    """Return samples per second of the whole batch, by block."""
    ranks = 1 if way == "one" else 2
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        processes = []
        for rank in range(ranks):
            out = Path(folder) / f"{rank}.json"
            # The share is timed by itself: neither process is told of the other.
            alone = way == "share"
            env = rank_environment(rank, ranks, port, [], ranks, {}) | ({"WORLD_SIZE": "1"} if alone else {})
            words = [sys.executable, str(HERE / "worker.py"), way, model, str(seconds), str(blocks), str(out)]
            processes.append(subprocess.Popen(words, env={**os.environ, **env}))
        codes = [process.wait(DEADLINE_S) for process in processes]
        if any(codes):
            sys.exit(f"{way} of {model} ended with {codes}")
        return [float(each) for each in json.loads((Path(folder) / "0.json").read_text())]


def _together(runs: Sequence[Speeds]) -> Speeds:
    """Return the blocks of several runs; models and ways that none of them finished are left out."""
    found: Speeds = {}
    for name in MODELS:
        ways = {way: [each for run in runs for each in run.get(name, {}).get(way, [])] for way in (*DATA, "pipeline")}
        ways = {way: blocks for way, blocks in ways.items() if blocks}
        if len(ways) > 1:
            found[name] = ways
    return found


def _report(speeds: Speeds) -> str:
    return f"{_table(speeds)}\n\n{_targets(speeds)}"


def _table(speeds: Speeds) -> str:
    lines = ["| model | way | samples/s | over one process | of the ceiling |", "| --- | --- | --- | --- | --- |"]
    for name, ways in speeds.items():
        one = median(ways["one"])
        ceiling = median(ways["share"]) if "share" in ways else None
        for way, measured in ways.items():
            middle = median(measured)
            share = f"{middle / ceiling:.3f}" if ceiling and way not in ("one", "share") else ""
            spread = f"{middle:.1f} [{min(measured):.1f} .. {max(measured):.1f}]"
            lines.append(f"| {name} | {way} | {spread} | {middle / one:.2f} | {share} |")
    return "\n".join(lines)


def _targets(speeds: Speeds) -> str:
    lines = []
    for name, ways in speeds.items():
        middle = {way: median(measured) for way, measured in ways.items()}
        if "pipeline" in middle:
            bound = 2 * 8 / 9
            share = middle["pipeline"] / middle["one"] / bound
            lines.append(_verdict(share >= 0.8, f"{name}: pipeline at {share:.3f} of the bubble bound (target 0.8)"))
            continue
        if "nearlinear" not in middle:
            continue
        over = middle["nearlinear"] / middle["one"]
        if name in ("cnn", "transformer"):
            lines.append(_verdict(over >= 1.6, f"{name}: {over:.2f} times one process (target 1.6)"))
        for way in ("strategy", "strategy_fit"):
            if way in middle:
                ratio = middle["nearlinear"] / middle[way]
                lines.append(_verdict(ratio > 1, f"{name}: {ratio:.2f} times {way} (target: faster)"))
    return "\n".join(lines)


def _verdict(met: bool, text: str) -> str:
    return f"- {'met' if met else 'MISSED'}: {text}"


def _caption(options: argparse.Namespace, load: float) -> str:
    return (
        f"{datetime.date.today()}: {len(os.sched_getaffinity(0))} cores (load of others before the start {load:.1f}), "
        f"{platform.system()} {platform.release()}, Python {platform.python_version()}, "
        f"TensorFlow {_tensorflow()}, Keras {version('keras')}, nearlinear {version('nearlinear')}. "
        f"{options.rounds} rounds of {options.blocks} blocks of {options.seconds:g} s, every way started anew in each "
        "round, the order turned; medians, and in brackets the ranges over the blocks."
    )


def _tensorflow() -> str:
    return next(version(name) for name in ("tensorflow_cpu", "tensorflow") if _has(name))


def _has(name: str) -> bool:
    try:
        version(name)
    except PackageNotFoundError:
        return False
    return True


if __name__ == "__main__":
    main()
