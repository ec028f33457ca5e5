"""Forecasting published training runs: iteration time and peak memory, beside what was measured.

python benchmarks/forecast/main.py                               the tables
python benchmarks/forecast/main.py --json                        one object: runs, groups, what was fitted
python benchmarks/forecast/main.py --runs FILE --profiles FILE   other runs of the same format
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from runs import RUNTIME, Run, iteration_time, memories, peak_memory, plain_time, read

from nearlinear.errors import InputError
from nearlinear.planning.memory import NO_OVERHEAD, Overhead, StageMemory

WORKLOADS = Path(__file__).parents[2].parent / "shared" / "workloads"
FITTED_ON = "OPT-350"


def main() -> int:
    """Forecast, and print the tables or the JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, default=WORKLOADS / "measured_open.json")
    parser.add_argument("--profiles", type=Path, default=WORKLOADS / "layer_profiles.json")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of tables")
    asked = parser.parse_args()
    try:
        result = score(json.loads(asked.runs.read_text()), json.loads(asked.profiles.read_text()))
    except (OSError, ValueError, InputError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(json.dumps(result, indent=1) if asked.json else tables(result))
    return 0


def score(raw: Mapping[str, Any], profiles: Mapping[str, Any]) -> dict[str, Any]:
    """Return forecast and measurement of every run, and the errors of every group.

    A run whose profile or link curve is missing has None for a forecast and the reason in ``excluded``.
    """
    rows: list[dict[str, Any]] = []
    known: list[tuple[Run, Mapping[str, Any]]] = []
    for each in raw["runs"]:
        try:
            run = read(each, profiles)
        except InputError as error:
            rows.append(
                dict.fromkeys(_COLUMNS, None) | {"id": each["id"], "group": each["model"], "excluded": str(error)}
            )
            continue
        rows.append(_row(run, each))
        known.append((run, each))
    groups = [_group(name, rows) for name in dict.fromkeys(row["group"] for row in rows)]
    return {"runs": rows, "groups": groups, "fit": _fit_of_memory(known), "choice": _choice_of_curve(rows)}


def tables(result: Mapping[str, Any]) -> str:
    """Return what ``score`` found as text."""
    lines = [_HEADER]
    for row in result["runs"]:
        lines.append(
            f"{row['id']:34}{_time(row['predicted_iter_s'])}{_time(row['measured_iter_s'])}"
            f"{_percent(row['error'])}{_percent(row['plain_error'])}"
            f"{_gigabytes(row['predicted_max_mem_bytes'])}{_gigabytes(row['measured_max_mem_bytes'])}"
            f"{_percent(row['memory_error'])}" + (f"   not scored: {row['excluded']}" if row["excluded"] else "")
        )
    lines += ["", "mean absolute error, runs that are not scored left out", _GROUPS]
    for group in result["groups"]:
        columns = (
            "time_error",
            "worst_time_error",
            "plain_error",
            "overlapped_error",
            "all_gpus_error",
            "memory_error",
        )
        numbers = "".join(f"{_percent(group[column], sign=''):>11}" for column in columns)
        lines.append(f"{group['group']:16}{group['runs']:5}{numbers}")
    fit, choice = result["fit"], result["choice"]
    lines += [
        "",
        *_FOOTER,
        f"  over {choice['runs']} pipelines {choice['one_gpu_error']:.1%} against {choice['all_gpus_error']:.1%}; "
        f"leaving out one run changes the choice {choice['changed']} times",
        f"memory: two constants, fitted on runs of {FITTED_ON}: {fit['used']}",
    ]
    if fit["refitted"]:
        lines.append(
            f"fitted again on this file: {fit['refitted']} over {fit['runs']} runs; "
            f"mean error {fit['mean_error']:.2%}, of runs left out of the fit {fit['left_out_error']:.2%}"
        )
    return "\n".join(lines)


_HEADER = (
    f"{'run':34}{'forecast':>11}{'measured':>11}{'error':>8}{'plain':>8}{'memory':>11}{'measured':>11}{'error':>8}"
)
_GROUPS = f"{'group':16}{'runs':>5}" + "".join(
    f"{name:>11}" for name in ("time", "worst", "plain", "overlapped", "all GPUs", "memory")
)
_FOOTER = (
    "plain: (m + stages - 1) x slowest stage + all-reduce + update, with the same profiles and links",
    "overlapped: as time, but messages do not hold up their ends (the runtime's source says that they do)",
    "all GPUs: as time, but messages take the link curve of all GPUs of a node",
    "time: no constant is fitted; profiles and link curves are as published. One choice between two published curves:",
    "  a message between stages takes that of one GPU per node, not that of all",
)
_COLUMNS = (
    "id",
    "group",
    "predicted_iter_s",
    "plain_iter_s",
    "measured_iter_s",
    "predicted_max_mem_bytes",
    "measured_max_mem_bytes",
    "error",
    "plain_error",
    "overlapped_error",
    "all_gpus_error",
    "memory_error",
    "excluded",
)


def _row(run: Run, raw: Mapping[str, Any]) -> dict[str, Any]:
    time, plain, memory = iteration_time(run), plain_time(run), peak_memory(run)
    measured, measured_memory = raw.get("measured_iter_s"), raw.get("measured_max_mem_bytes")
    overlapped, all_gpus = iteration_time(run, blocking=False), iteration_time(run, all_gpus=True)
    errors = (
        *(_error(each, measured) for each in (time, plain, overlapped, all_gpus)),
        _error(memory, measured_memory),
    )
    excluded = raw.get("flag", "flagged") if raw.get("exclude_from_score") else None
    values = (run.name, run.group, time, plain, measured, memory, measured_memory, *errors, excluded)
    return dict(zip(_COLUMNS, values, strict=True))


def _group(name: str, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    scored = [row for row in rows if row["group"] == name and not row["excluded"] and row["measured_iter_s"]]

    def errors(what: str) -> list[float]:
        return [abs(row[what]) for row in scored if row[what] is not None]

    found: dict[str, Any] = {"group": name, "runs": len(scored), "worst_time_error": max(errors("error"), default=None)}
    for error in ("error", "plain_error", "overlapped_error", "all_gpus_error", "memory_error"):
        values = errors(error)
        found["time_error" if error == "error" else error] = sum(values) / len(values) if values else None
    return found


def _choice_of_curve(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return which curve for messages errs less, and the times that leaving out a run changes the choice."""
    pairs = [
        (abs(row["error"]), abs(row["all_gpus_error"]))
        for row in rows
        if not row["excluded"] and row["error"] is not None and row["error"] != row["all_gpus_error"]
    ]
    one, every = (sum(pair[side] for pair in pairs) for side in (0, 1))
    changed = sum((one - a <= every - b) != (one <= every) for a, b in pairs)
    count = max(len(pairs), 1)
    return {"runs": len(pairs), "one_gpu_error": one / count, "all_gpus_error": every / count, "changed": changed}


def _fit_of_memory(known: Sequence[tuple[Run, Mapping[str, Any]]]) -> dict[str, Any]:
    """Return the memory constants fitted on this file and the error of runs left out, where it has runs enough."""
    pairs = [
        (run, float(raw["measured_max_mem_bytes"]))
        for run, raw in known
        if run.group == FITTED_ON and raw.get("measured_max_mem_bytes") and not raw.get("exclude_from_score")
    ]
    found: dict[str, Any] = {"used": _written(RUNTIME), "refitted": None, "runs": len(pairs)}
    if len(pairs) < 4:
        return found
    whole = _fit(pairs)
    left_out = [_error(peak_memory(run, _fit(pairs[:i] + pairs[i + 1 :])), y) for i, (run, y) in enumerate(pairs)]
    return found | {
        "refitted": _written(whole),
        "mean_error": float(np.mean([abs(peak_memory(run, whole) / y - 1) for run, y in pairs])),
        "left_out_error": float(np.mean(np.abs(np.array(left_out, dtype=float)))),
    }


def _fit(pairs: Sequence[tuple[Run, float]]) -> Overhead:
    """Return the two constants of least squared relative error."""

    def fullest(run: Run) -> StageMemory:
        return max(memories(run, NO_OVERHEAD), key=lambda memory: memory.total)

    parts = [(fullest(run), measured) for run, measured in pairs]
    rows = np.array([[memory.activations / y, 1e9 / y] for memory, y in parts])
    rest = np.array([1 - (memory.total + RUNTIME.gradient_copies * memory.gradients) / y for memory, y in parts])
    share, runtime = np.linalg.lstsq(rows, rest, rcond=None)[0]
    return Overhead(float(share), RUNTIME.gradient_copies, float(runtime) * 1e9)


def _written(overhead: Overhead) -> str:
    return f"allocator {overhead.allocator_share:.3f} of the activations, runtime {overhead.runtime_bytes / 1e9:.2f} GB"


def _error(predicted: float, measured: float | None) -> float | None:
    return predicted / measured - 1 if measured else None


def _percent(value: float | None, sign: str = "+") -> str:
    return f"{'-':>8}" if value is None else f"{value:{sign}8.1%}"


def _time(value: float | None) -> str:
    return f"{'-':>11}" if value is None else f"{value:9.3f} s"


def _gigabytes(value: float | None) -> str:
    return f"{'-':>11}" if value is None else f"{value / 1e9:8.2f} GB"


if __name__ == "__main__":
    sys.exit(main())
