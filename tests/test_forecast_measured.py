"""Forecasts against published measurements of real multi-node training runs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
WORKLOADS = ROOT.parent / "shared" / "workloads"
MAIN = ROOT / "benchmarks" / "forecast" / "main.py"

needs_workloads = pytest.mark.skipif(
    not (WORKLOADS / "measured_open.json").exists(), reason=f"the published runs are not in {WORKLOADS}"
)


def scored(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(MAIN), *arguments], capture_output=True, text=True, timeout=120)


@pytest.fixture(scope="module")
def result() -> dict[str, Any]:
    done = scored("--json")
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@needs_workloads
@pytest.mark.parametrize(("group", "limit"), [("OPT-350", 0.085), ("GPT-Neo-2.7", 0.10), ("mixed GPUs", 0.10)])
def test_iteration_times_are_forecast_within(group: str, limit: float, result: dict[str, Any]):
    found = next(each for each in result["groups"] if each["group"] == group)
    assert found["time_error"] <= limit
    assert found["time_error"] < found["plain_error"]


@needs_workloads
def test_peak_memory_of_opt_350m_is_forecast_within_six_percent_of_runs_left_out_of_the_fit(result: dict[str, Any]):
    assert next(each for each in result["groups"] if each["group"] == "OPT-350")["memory_error"] <= 0.06
    assert result["fit"]["left_out_error"] <= 0.06


@needs_workloads
def test_flagged_runs_are_forecast_and_shown_but_not_scored(result: dict[str, Any]):
    flagged = [row for row in result["runs"] if row["excluded"]]
    assert [row["id"] for row in flagged] == ["clariden-GPT-Neo-2.7-N4-N4_D4"]
    assert sum(group["runs"] for group in result["groups"]) == len(result["runs"]) - 1
    assert "not scored" in scored().stdout


@needs_workloads
def test_a_run_without_measurements_is_forecast_too(tmp_path: Path):
    raw = json.loads((WORKLOADS / "measured_open.json").read_text())
    run = {key: value for key, value in raw["runs"][0].items() if not key.startswith("measured")}
    (tmp_path / "runs.json").write_text(json.dumps({"runs": [run]}))
    done = scored("--runs", str(tmp_path / "runs.json"), "--json")
    row = json.loads(done.stdout)["runs"][0]
    assert row["predicted_iter_s"] > 0 and row["predicted_max_mem_bytes"] > 0 and row["error"] is None
    assert scored("--runs", str(tmp_path / "runs.json")).returncode == 0


@needs_workloads
def test_a_run_without_a_profile_is_named_and_the_others_are_scored(tmp_path: Path):
    raw = json.loads((WORKLOADS / "measured_open.json").read_text())
    raw["runs"][0]["stages"][0]["replicas"][0]["gpu"] = "Abacus"
    (tmp_path / "runs.json").write_text(json.dumps(raw))
    done = scored("--runs", str(tmp_path / "runs.json"), "--json")
    row, *others = json.loads(done.stdout)["runs"]
    assert row["predicted_iter_s"] is None and "Abacus" in row["excluded"]
    assert all(other["predicted_iter_s"] > 0 for other in others)


@needs_workloads
def test_a_stage_with_fewer_replicas_than_the_others_serves_several_pipelines(tmp_path: Path):
    raw = json.loads((WORKLOADS / "measured_open.json").read_text())
    run = next(each for each in raw["runs"] if each["id"] == "clariden-OPT-350-N4-N4_D2")
    fewer = json.loads(json.dumps(run))
    fewer["stages"][1]["replicas"].pop()
    (tmp_path / "runs.json").write_text(json.dumps({"runs": [run, fewer]}))
    two, one = json.loads(scored("--runs", str(tmp_path / "runs.json"), "--json").stdout)["runs"]
    assert 1.5 < one["predicted_iter_s"] / two["predicted_iter_s"] < 2.1


def test_a_missing_file_is_an_error_of_one_line(tmp_path: Path):
    done = scored("--runs", str(tmp_path / "absent.json"))
    assert done.returncode == 2 and done.stderr.startswith("error:") and done.stderr.count("\n") == 1
