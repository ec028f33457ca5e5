"""Stages x replicas x tensor degree x recomputation: our plans beside those of Piper's own program.

    python benchmarks/partition/piper.py [--workloads ../shared/workloads] [--devices 8,16 --memory "4 GiB"] [--json]

Prints seconds per sample for every memory and number of devices of reference_piper.json, the bound that ours proves,
and how long the search took. With --devices and --memory it plans for others instead.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

from nearlinear.planning.layers import Layers, layers_of_workload
from nearlinear.planning.replicas import Replicas, Staged, least_memory
from nearlinear.units import parse_bytes


def main() -> int:
    """Print the table; exit 1 where a plan of ours is slower than theirs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", type=Path, default=Path(__file__).parents[2].parent / "shared" / "workloads")
    parser.add_argument("--devices", help="numbers of devices, by commas")
    parser.add_argument("--memory", help="of each device, by commas")
    parser.add_argument("--runs", type=int, default=5, help="of the search, to time it")
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    reference = json.loads((asked.workloads / "reference_piper.json").read_text())["rows"]
    model = layers_of_workload(json.loads((asked.workloads / "graphs" / "bert32-a100-layer.json").read_text()))
    bandwidth, microbatches = reference[0]["bw_gib"] * 2**30, reference[0]["N"]
    theirs = {(row["mem_gib"] * 2**30, row["k"]): row for row in reference}
    cells = list(theirs)
    if asked.devices and asked.memory:
        memories = [parse_bytes(each) for each in asked.memory.split(",")]
        cells = [(memory, int(count)) for memory in memories for count in asked.devices.split(",")]
    found, took = plans(model, cells, bandwidth, microbatches, asked.runs)
    rows = []
    for memory, devices in cells:
        row, plan = theirs.get((memory, devices), {}), found[memory, devices]
        rows.append(
            {
                "memory_bytes": memory,
                "devices": devices,
                "ours": plan.seconds if plan else None,
                "bound": plan.bound if plan else None,
                "piper": row.get("piper"),
                "grid": row.get("equi"),
                "plan": brief(plan) if plan else f"needs {least_memory(model, devices, microbatches) / 2**30:.2f} GiB",
            }
        )
    elapsed, processor = ([each[place] for each in took] for place in (0, 1))
    if asked.json:
        print(json.dumps({"rows": rows, "elapsed_s": elapsed, "processor_s": processor}))
    else:
        show(rows)
        gaps = [row["ours"] / row["bound"] - 1 for row in rows if row["ours"]]
        print(f"\nlargest gap to the bound: {100 * max(gaps, default=0.0):.2g} %")
        for name, values in (("elapsed", elapsed), ("processor", processor)):
            spread = f"{min(values):.2f} to {max(values):.2f} in {len(values)} runs"
            print(f"search over all points, {name} time: median {median(values):.2f} s ({spread})")
        print(f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    return int(any(row["piper"] and not (row["ours"] and row["ours"] <= row["piper"] * (1 + 1e-9)) for row in rows))


def plans(
    model: Layers, cells: list[tuple[float, int]], bandwidth: float, microbatches: int, runs: int
) -> tuple[dict[tuple[float, int], Staged | None], list[tuple[float, float]]]:
    """Return a plan per memory and number of devices, and per run the search's elapsed and processor seconds."""
    counts: dict[float, list[int]] = {}
    for memory, devices in cells:
        counts.setdefault(memory, []).append(devices)
    tables: dict[float, Replicas] = {}
    took = []
    for _ in range(runs):
        elapsed, busy = time.perf_counter(), time.process_time()
        for memory, some in counts.items():
            tables[memory] = Replicas(model, max(some), memory, bandwidth, microbatches)
            for devices in some:
                tables[memory].stages(devices)
        took.append((time.perf_counter() - elapsed, time.process_time() - busy))
    return {(memory, devices): tables[memory].plan(devices) for memory, devices in cells}, took


def brief(plan: Staged) -> str:
    """Return a plan in few words."""
    replicas, degrees = ([getattr(each, what) for each in plan.stages] for what in ("replicas", "degree"))
    said = [f"{len(plan.stages)} stage{'s' if len(plan.stages) > 1 else ''}"]
    for name, values in (("replicas", replicas), ("degree", degrees)):
        if max(values) > 1:
            said.append(f"{name} {min(values)}" + (f" to {max(values)}" if max(values) > min(values) else ""))
    again = sum(len(each.recomputed) for each in plan.stages)
    return ", ".join([*said, f"{again} layers recomputed"] if again else said)


def show(rows: list[dict[str, Any]]) -> None:
    """Print the rows as a table in Markdown."""
    print("| memory | devices | ours, ms | bound, ms | Piper, ms | best balanced grid, ms | ours / Piper | plan |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for row in rows:
        ratio = row["ours"] / row["piper"] if row["ours"] and row["piper"] else None
        cells = [row["ours"], row["bound"], row["piper"], row["grid"]]
        numbers = [f"{1e3 * each:.3f}" if each and each > 0 else "-" for each in cells]
        print(
            f"| {row['memory_bytes'] / 2**30:.0f} GiB | {row['devices']} | {' | '.join(numbers)} "
            f"| {f'{ratio:.4f}' if ratio else '-'} | {row['plan']} |"
        )


if __name__ == "__main__":
    sys.exit(main())
