"""A rank that dies, or whose cable is pulled, ends the others within seconds, with its number."""

from __future__ import annotations

import re
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from nearlinear.testing import Result, run_processes
from nearlinear.testing.links import Network, can_emulate

SCRIPT = """
import sys, time
from pathlib import Path
import torch
from torch import nn
import nearlinear as nl

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
model, optimizer = nl.distribute(model, optimizer)
until = time.monotonic() + 60
while time.monotonic() < until:
    optimizer.zero_grad()
    model(torch.ones(4, 8)).square().mean().backward()
    optimizer.step()
    if len(sys.argv) > 1:
        Path(sys.argv[1], f"training-{nl.rank()}").touch()
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


def wait_for(what: Callable[[], bool], deadline_s: float) -> None:
    until = time.monotonic() + deadline_s
    while not what():
        assert time.monotonic() < until, "it did not happen in time"
        time.sleep(0.05)


def ended_last(results: list[Result], but: int) -> float:
    return max(result.seconds for result in results if result.rank != but)


def assert_named(results: list[Result], rank: int) -> None:
    for result in results:
        if result.rank != rank:
            assert re.search(rf"nearlinear: error: rank {rank} on \S+: its process ended", result.stderr), result
            assert ended_last(results, rank) - results[rank].seconds < 10


# test_faults.py kills rank 1.
@pytest.mark.parametrize(("rank", "when"), [(0, "3"), pytest.param(1, "2b", marks=pytest.mark.full)])
def test_a_killed_rank_ends_the_others_with_its_number(script: Path, rank: int, when: str) -> None:
    results = run_processes(script, 3, fault=f"kill:{rank}@{when}", timeout_s=120, grace_s=10)
    assert results[rank].signal == signal.SIGKILL
    assert_named(results, rank)


@pytest.mark.full
@pytest.mark.parametrize("rank", [0, 1, 2])
@pytest.mark.parametrize("when", ["1", "1b", "2", "2b", "7", "7b"])
def test_any_rank_may_be_killed_at_any_step(script: Path, rank: int, when: str) -> None:
    results = run_processes(script, 3, fault=f"kill:{rank}@{when}", timeout_s=120, grace_s=10)
    assert results[rank].signal == signal.SIGKILL
    assert_named(results, rank)


@pytest.mark.netns
@pytest.mark.skipif(can_emulate() is not None, reason=str(can_emulate()))
def test_a_pulled_cable_ends_both_sides_with_the_other_s_number(script: Path, tmp_path: Path) -> None:
    results: list[Result] = []
    with Network(hosts=3) as net:
        runner = threading.Thread(
            target=lambda: results.extend(
                run_processes(script, 3, [str(tmp_path)], network=net, timeout_s=120, grace_s=20)
            )
        )
        runner.start()
        try:
            wait_for(lambda: all((tmp_path / f"training-{rank}").exists() for rank in range(3)), 60)
            net[1].cut()
            began = time.monotonic()
        finally:
            runner.join(timeout=120)
    assert time.monotonic() - began < 15  # three processes end, 10 s after the cut at most, and their run is wound up
    assert len(results) == 3
    for rank in (0, 2):
        assert re.search(r"error: rank 1 on host1: silent for [5-8]\.\d s", results[rank].stderr), results[rank]
    assert re.search(r"error: rank 0 on host0: silent for [5-8]\.\d s", results[1].stderr), results[1]


def test_ranks_that_make_different_calls_end_and_say_which(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.split("until =")[0] + 'nl.save("out", model) if nl.is_main() else nl.mean(1.0)\n')
    results = run_processes(script, 2, env={"NEARLINEAR_DEADLINE": "12 s"}, timeout_s=120, grace_s=10)
    told = "".join(result.stderr for result in results)
    assert re.search(r"rank \d on \S+: .*, while rank \d on \S+: .*each waits for the other", told), told
    assert all(result.exit_code for result in results)
