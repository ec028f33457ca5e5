"""Strategy `auto` where nobody has planned: what fits into memory decides."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from conftest import run

SCRIPT = """
import json, sys
import torch
from torch import nn
import nearlinear as nl
from nearlinear import events
from nearlinear.torch import fitting

kind, free = sys.argv[1], float(sys.argv[2])
if free:
    fitting.free_memory = lambda processes: free / processes
torch.manual_seed(0)
with torch.device("meta" if kind == "meta" else "cpu"):
    model = nn.Sequential(*[nn.Sequential(nn.Linear(256, 256, bias=False), nn.Tanh()) for _ in range(4)])
kinds = {"adam": torch.optim.Adam, "adafactor": torch.optim.Adafactor}
optimizer = kinds.get(kind, torch.optim.SGD)(model.parameters(), lr=0.01)
asked = {}
events.subscribe("distributed", asked.update)
model, optimizer = nl.distribute(model, optimizer)
for _ in range(2):
    optimizer.zero_grad()
    loss = model(torch.ones(8, 256)).square().mean()
    loss.backward()
    optimizer.step()
first = asked["plan"].strategy
if kind != "meta":  # another model, which fits
    second = nn.Linear(256, 256)
    nl.distribute(second, torch.optim.SGD(second.parameters(), lr=0.01))
    assert asked["model"] is second and asked["plan"].strategy == first
print(json.dumps({"strategy": asked["plan"].strategy, "loss": float(loss)}), flush=True)
"""


@pytest.mark.parametrize(
    ("kind", "free", "strategy", "said"),
    [
        ("sgd", 0, "data", None),
        # The parameters are 1.05 MB, so are the gradients, and Adam keeps twice as much; two ranks share what is free.
        ("sgd", 4e6, "data", None),
        ("adam", 8e6, "data", None),
        ("adam", 4e6, "sharded", r"auto: gradients and optimizer state take 3\.15 MB and rank 0 has 2 MB left"),
        ("adafactor", 4e6, "data", None),  # which no rank could step on rows
        ("meta", 0, "pipeline", "auto: the model is on the meta device"),
    ],
)
def test_what_fits_decides(tmp_path: Path, kind: str, free: float, strategy: str, said: str | None) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    result = run(2, script, kind, str(free), OMP_NUM_THREADS="1")
    assert result.returncode == 0, result.stderr
    found: list[dict[str, Any]] = [json.loads(line) for line in re.findall(r"\{.*\}", result.stdout)]
    assert [each["strategy"] for each in found] == [strategy] * 2
    assert found[0]["loss"] == pytest.approx(found[1]["loss"], rel=1e-6)
    notices = [line for line in result.stderr.splitlines() if "auto:" in line]
    assert len(notices) == (said is not None) and re.search(said or "", "".join(notices))


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads /proc, which is Linux's")
def test_a_limit_on_the_address_space_is_what_is_left() -> None:
    code = """
import resource
from pathlib import Path
from nearlinear.measure.hardware import free_memory
used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + 2**28, -1))
print(free_memory(1), free_memory(4))
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert [float(each) for each in found] == [pytest.approx(2**28, rel=0.05)] * 2
