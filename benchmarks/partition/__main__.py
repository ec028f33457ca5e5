"""Splitting published model graphs, beside the best split known of each and what other tools make of it.

    python benchmarks/partition                        every instance of ../shared/workloads
    python benchmarks/partition gnmt8-layer.json ...   those of these graphs
    python benchmarks/partition --large                10,000 operators on 64 devices instead
    python benchmarks/partition --markdown             the tables as they stand in README.md

README.md says what is measured and how.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import json
import math
import os
import platform
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from large import LARGE
from rich.console import Console
from rich.markdown import Markdown

from nearlinear.planning.partition import partition
from nearlinear.planning.workload import read_workload

HERE = Path(__file__).parent
WORKLOADS = HERE.parent.parent.parent / "shared" / "workloads"
BUDGET = 25.0  # seconds of processor time per instance
RIVALS = {  # as the reference file calls them
    "equal parameters": "accelerate_like",
    "equal work": "balance_time",
    "METIS": "metis_raw",
    "KaHIP": "kahip_raw",
    "one order": "dp_one_order",
}


@dataclass(frozen=True)
class Row:
    """One instance: a graph, a number of devices, a link, a limit.

    Args:
        instance: From the reference file.
        objective: Milliseconds, by ``evaluate.py``.
        bound: Milliseconds.
        seconds: Of processor time.
        method: How the plan was found.
    """

    instance: dict[str, Any]
    objective: float
    bound: float
    seconds: float
    method: str

    @property
    def gap(self) -> float:
        """How much of the objective the bound leaves open."""
        return max(self.objective / self.bound - 1, 0.0)

    @property
    def ratio(self) -> float:
        """The objective over the best known."""
        return float(self.objective / self.instance["best_ms"])


def main() -> None:
    """Split, print the tables, and write them and the numbers."""
    args = _arguments()
    if args.large:
        text = f"{_caption(args)}\n\n{_large_table(args)}"
        name = "large"
    else:
        rows = list(_rows(args))
        if not rows:
            sys.exit("no instance of these graphs is in the reference file")
        text = f"{_caption(args)}\n\n{_summary(rows)}\n\n{_by_graph(rows)}\n\n{_each(rows)}"
        name = "partition"
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / f"{name}.md").write_text(text)
    if args.markdown:
        print(text)
    else:
        Console(width=None if sys.stdout.isatty() else 200).print(Markdown(text))
    print(f"the tables are in {args.out / name}.md", file=sys.stderr)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("graphs", nargs="*", type=Path, help="files, or names of files in the workloads' folder")
    parser.add_argument("--workloads", type=Path, default=WORKLOADS, help="folder with graphs/ and evaluate.py")
    parser.add_argument("--reference", type=Path, help="best known objectives (default: the folder's own)")
    parser.add_argument("--large", action="store_true", help="generated graphs of 10,000 operators on 64 devices")
    parser.add_argument("--budget", type=float, default=BUDGET, help="seconds of processor time per instance")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--markdown", action="store_true", help="print the tables as they stand in README.md")
    parser.add_argument("--out", type=Path, default=Path("out/benchmarks"), help="where the tables are written")
    args = parser.parse_args()
    args.reference = args.reference or args.workloads / "reference_open.json"
    if not args.large and not args.reference.exists():
        sys.exit(f"NOT MEASURED: there is no {args.reference}; name the folder with --workloads")
    return args


def _rows(args: argparse.Namespace) -> Iterator[Row]:
    evaluator = _evaluator(args.workloads / "evaluate.py")
    files = [each if each.exists() else args.workloads / "graphs" / each.name for each in args.graphs]
    names = {json.loads(each.read_text())["name"]: each for each in files}
    for instance in json.loads(args.reference.read_text())["instances"]:
        name = instance["workload"]
        if names and name not in names:
            continue
        path = names.get(name, args.workloads / "graphs" / f"{name}.json")
        row = _split(path, instance, evaluator, args)
        print(
            f"{name} x {instance['k']} {instance['bw']}: {row.ratio:.5f} of the best in {row.seconds:.2f} s",
            file=sys.stderr,
        )
        yield row


def _split(path: Path, instance: dict[str, Any], evaluator: ModuleType, args: argparse.Namespace) -> Row:
    text = path.read_text()
    limit = instance["mem_limit"] or None
    began = time.process_time()
    workload = read_workload(text, path.name)
    plan = partition(
        workload.graph,
        instance["k"],
        instance["bandwidth"],
        limit,
        seed=args.seed,
        deadline=lambda: time.process_time() - began > args.budget,
    )
    took = time.process_time() - began
    report = evaluator.evaluate(
        json.loads(text), workload.by_node(plan.assignment), instance["k"], instance["bandwidth"], limit
    )
    if not report["valid"]:
        sys.exit(f"{path.name}, {instance['k']} devices: not a valid plan: {report['errors']}")
    return Row(instance, report["objective_ms"], plan.bound * 1e3, took, plan.method)


def _evaluator(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("evaluate", path)
    if spec is None or spec.loader is None:
        sys.exit(f"NOT MEASURED: there is no {path}")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _caption(args: argparse.Namespace) -> str:
    load = os.getloadavg()[0]
    return (
        f"{datetime.date.today()}: {platform.processor() or platform.machine()}, one core (load of the machine "
        f"{load:.1f}), Python {platform.python_version()}, NumPy {np.__version__}. Seed {args.seed}, at most "
        f"{args.budget:.0f} s of processor time per instance."
    )


def _table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = [f"| {' | '.join(titles)} |", f"| {' | '.join('---' for _ in titles)} |"]
    return "\n".join([*head, *(f"| {' | '.join(row)} |" for row in rows)])


def _geometric(values: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))


def _summary(rows: list[Row]) -> str:
    ratios = [row.ratio for row in rows]
    proven = sum(row.objective <= row.bound * (1 + 1e-6) for row in rows)
    lines = [
        ["nearlinear", str(len(rows)), f"{_geometric(ratios):.5f}", f"{max(ratios):.4f}", "0"],
    ]
    for title, key in RIVALS.items():
        theirs = [row.instance["baselines"].get(key, {}) for row in rows]
        valid = [each["ratio"] for each in theirs if each.get("valid") and each.get("ratio")]
        if valid:
            mean, worst = f"{_geometric(valid):.4f}", f"{max(valid):.3f}"
            lines.append([title, str(len(valid)), mean, worst, str(sum(each.get("valid") is False for each in theirs))])
    slowest = max(rows, key=lambda row: row.seconds)
    told = (
        f"Proven to be the best there is: {proven} of {len(rows)}. Time: {sum(row.seconds for row in rows):.0f} s in "
        f"all, {sorted(row.seconds for row in rows)[len(rows) // 2]:.2f} s median, {slowest.seconds:.1f} s the longest "
        f"({slowest.instance['workload']}, {slowest.instance['k']} devices)."
    )
    titles = ["", "valid plans", "objective / best, geometric mean", "worst", "not valid (cyclic, over memory)"]
    return f"{told}\n\n{_table(titles, lines)}"


def _by_graph(rows: list[Row]) -> str:
    lines = []
    for name in dict.fromkeys(row.instance["workload"] for row in rows):
        own = [row for row in rows if row.instance["workload"] == name]
        line = [name, f"{_geometric([row.ratio for row in own]):.5f}", f"{max(row.ratio for row in own):.5f}"]
        line += [f"{max(row.gap for row in own):.2%}", f"{max(row.seconds for row in own):.2f}"]
        for key in RIVALS.values():
            theirs = [row.instance["baselines"].get(key, {}) for row in own]
            valid = [each["ratio"] for each in theirs if each.get("valid") and each.get("ratio")]
            line.append(f"{_geometric(valid):.3f}" if valid else "-")
        lines.append(line)
    return _table(["graph", "objective / best", "worst", "worst gap", "longest, s", *RIVALS], lines)


def _each(rows: list[Row]) -> str:
    lines = []
    for row in rows:
        each = row.instance
        line = [
            each["workload"],
            str(each["k"]),
            each["bw"],
            f"{each['mem_limit'] / 1e9:.2f}" if each["mem_limit"] else "",
        ]
        line += [f"{row.objective:.4f}", f"{row.ratio:.5f}", f"{row.gap:.2%}"]
        line += [f"{row.seconds:.2f}", row.method]
        for key in RIVALS.values():
            theirs = each["baselines"].get(key, {})
            line.append(f"{theirs['ratio']:.3f}" if theirs.get("valid") and theirs.get("ratio") else "-")
        lines.append(line)
    titles = ["graph", "devices", "link", "GB each", "objective, ms", "/ best", "gap", "s", "found by", *RIVALS]
    return _table(titles, lines)


def _large_table(args: argparse.Namespace) -> str:
    lines = []
    for name, make in LARGE.items():
        graph = make(args.seed)
        for link in (100e9, 10e9):
            began = time.process_time()
            plan = partition(
                graph, 64, link, seed=args.seed, deadline=lambda began=began: time.process_time() - began > args.budget
            )
            took = time.process_time() - began
            used = f"{len(plan.stages)}"
            lines.append(
                [
                    *(name, f"{len(graph.operators):,}", f"{link / 1e9:.0f} GB/s", f"{plan.objective * 1e3:.3f}"),
                    *(f"{plan.bound * 1e3:.3f}", f"{plan.gap:.2%}", used, f"{took:.1f}", plan.method),
                ]
            )
            print(f"{name}: gap {plan.gap:.2%} in {took:.1f} s", file=sys.stderr)
    titles = ["graph", "operators", "link", "objective, ms", "bound, ms", "gap", "devices used", "s", "found by"]
    return _table(titles, lines)


if __name__ == "__main__":
    main()
