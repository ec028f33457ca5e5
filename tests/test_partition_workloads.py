"""The published graphs in ../shared/workloads: plans valid by their own evaluator, as good as the best known."""

from __future__ import annotations

import importlib.util
import json
import math
import time
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from nearlinear.planning.partition import Partition, partition
from nearlinear.planning.workload import read_workload

FOLDER = Path(__file__).parent.parent.parent / "shared" / "workloads"
QUICK = (
    "alexnet-layer",
    "bert24-layer-training",
    "bert3-op-training",
    "gnmt8-layer",
    "squeezenet-layer",
    "vgg16-layer",
)
PROVEN = 1e-6  # the reference file's bounds carry nine digits

pytestmark = [
    pytest.mark.skipif(not FOLDER.exists(), reason=f"NOT TESTED: there is no {FOLDER.parent.name}/{FOLDER.name}"),
    pytest.mark.timeout(280),
]


@cache
def evaluator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("evaluate", FOLDER / "evaluate.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def instances(*names: str) -> list[dict[str, Any]]:
    file = FOLDER / "reference_open.json"
    every = json.loads(file.read_text())["instances"] if file.exists() else []
    return [each for each in every if each["workload"] in names or not names]


def ratio(instance: dict[str, Any]) -> float:
    """Split, check the plan, and return its objective over the best known."""
    text = (FOLDER / "graphs" / f"{instance['workload']}.json").read_text()
    workload = read_workload(text)
    limit = instance["mem_limit"] or None
    began = time.process_time()
    plan: Partition = partition(
        workload.graph,
        instance["k"],
        instance["bandwidth"],
        limit,
        deadline=lambda: time.process_time() - began > 25,
    )
    took = time.process_time() - began
    report = evaluator().evaluate(
        json.loads(text), workload.by_node(plan.assignment), instance["k"], instance["bandwidth"], limit
    )
    assert report["valid"], report["errors"]
    assert report["objective_ms"] == pytest.approx(plan.objective * 1e3, rel=1e-9)
    assert plan.bound * 1e3 <= instance["best_ms"] * (1 + PROVEN), "the bound is above a plan that exists"
    assert plan.objective * 1e3 >= instance["bound_ms"] * (1 - PROVEN), "better than a bound that others proved"
    assert took < 30
    return float(report["objective_ms"] / instance["best_ms"])


@pytest.mark.parametrize("name", QUICK)
def test_small_graphs_get_the_best_plan_known(name: str) -> None:
    assert [ratio(each) for each in instances(name)] == pytest.approx([1.0] * 8, abs=PROVEN)


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_all_graphs_are_split_within_two_thousandths_of_the_best_known() -> None:
    ratios = [ratio(each) for each in instances()]
    assert math.exp(sum(map(math.log, ratios)) / len(ratios)) <= 1.002
    assert max(ratios) <= 1.03
