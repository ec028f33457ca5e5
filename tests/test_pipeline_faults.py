"""A stage that dies ends the others within seconds, with its number."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest

from nearlinear.testing import run_processes

SCRIPT = """
import torch
from torch import nn
import nearlinear as nl

torch.manual_seed(0)
model = nn.Sequential(*[nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(6)])
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
model, optimizer = nl.distribute(model, optimizer, strategy=nl.Plan("pipeline", microbatches=2))
for _ in range(2000):
    optimizer.zero_grad()
    model(torch.ones(8, 16)).square().mean().backward()
    optimizer.step()
"""


def killed(tmp_path: Path, ranks: int, rank: int, when: str) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    results = run_processes(script, ranks, fault=f"kill:{rank}@{when}", timeout_s=200, grace_s=10)
    assert results[rank].signal == signal.SIGKILL, results[rank]
    for result in results:
        if result.rank != rank:
            assert re.search(rf"nearlinear: error: rank {rank} on \S+: its process ended", result.stderr), result
            assert result.seconds - results[rank].seconds < 10


@pytest.mark.parametrize(("rank", "when"), [pytest.param(0, "3", marks=pytest.mark.full), (1, "2b")])
def test_a_killed_stage_ends_the_others_with_its_number(tmp_path: Path, rank: int, when: str) -> None:
    killed(tmp_path, 2, rank, when)


@pytest.mark.full
@pytest.mark.parametrize("rank", [0, 1, 2])
@pytest.mark.parametrize("when", ["1", "1b", "2", "7b"])
def test_any_stage_may_be_killed_at_any_step(tmp_path: Path, rank: int, when: str) -> None:
    killed(tmp_path, 3, rank, when)
