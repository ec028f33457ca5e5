"""Each rank of a pipeline holds its stage: a model that is too large for one process trains in four."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from conftest import run

SCRIPT = """
import json, resource, sys
import torch
from torch import nn
import nearlinear as nl

width, layers, room = map(int, sys.argv[1:])
torch.manual_seed(0)
with torch.device("meta"):
    model = nn.Sequential(*[nn.Sequential(nn.Linear(width, width, bias=False), nn.Tanh()) for _ in range(layers)])
if nl.world_size() == 1:
    model.to_empty(device="cpu")
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
model, optimizer = nl.distribute(model, optimizer, strategy="pipeline")
x = torch.ones(8, width)
if room:
    import torch._dynamo  # which the capture imports
    used = int(next(line for line in open("/proc/self/status") if line.startswith("VmSize")).split()[1]) * 1024
    resource.setrlimit(resource.RLIMIT_AS, (used + room * 2**20, -1))
for _ in range(2):
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()
held = [p for p in model.parameters() if not hasattr(p, "fetched")]
state = [value for p in held for value in optimizer.state[p].values()]
memory = sum(each.untyped_storage().nbytes() for each in [*held, *state, *(p.grad for p in held)])
print(json.dumps({"rank": nl.rank(), "held": memory, "parameters": sum(p.nbytes for p in held)}), flush=True)
"""


def held(tmp_path: Path, ranks: int, width: int, layers: int, room: int = 0) -> list[dict[str, int]]:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    result = run(ranks, script, str(width), str(layers), str(room))
    assert result.returncode == 0, result.stderr
    found = [json.loads(line) for line in re.findall(r"\{.*\}", result.stdout)]
    return sorted(found, key=lambda each: each["rank"])


def test_each_rank_holds_its_share_of_the_parameters_and_their_state(tmp_path: Path) -> None:
    whole = 3 * 8 * 256 * 256 * 4  # parameters, gradients and momentum of eight layers
    ranks = held(tmp_path, 2, width=256, layers=8)
    assert sum(each["held"] for each in ranks) == whole
    # The stages are cut by measured times, so one may have a layer more; what it holds is what it was given.
    assert all(each["held"] == 3 * each["parameters"] for each in ranks)
    assert all(each["parameters"] > 0 for each in ranks)


AGAIN = """
import json, sys
from pathlib import Path
import torch
from torch import nn
import nearlinear as nl

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

torch.manual_seed(0)
model = nn.Sequential(*[nn.Sequential(nn.Linear(512, 512), nn.Tanh()) for _ in range(16)])
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
plan = nl.Plan("pipeline", microbatches=8, recompute=sys.argv[1] == "again")
model, optimizer = nl.distribute(model, optimizer, strategy=plan)
x = torch.ones(8192, 512)  # 16.8 MB, as each layer's output
for samples in (64, 8192, 8192):  # the first is to be captured and timed
    before = resident()
    optimizer.zero_grad()
    loss = model(x[:samples]).square().mean()
    kept = resident() - before
    loss.backward()
    optimizer.step()
print(json.dumps({"rank": nl.rank(), "kept": kept, "loss": float(loss)}), flush=True)
"""


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads /proc, which is Linux's")
def test_what_is_made_again_is_not_kept(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(AGAIN)
    found = {}
    for word in ("kept", "again"):
        result = run(2, script, word, OMP_NUM_THREADS="1", MALLOC_MMAP_THRESHOLD_="65536")
        assert result.returncode == 0, result.stderr
        found[word] = [json.loads(line) for line in re.findall(r"\{.*\}", result.stdout)]
    assert {each["loss"] for each in found["kept"]} == {each["loss"] for each in found["again"]}
    most, least = (min(each["kept"] for each in found["kept"]), max(each["kept"] for each in found["again"]))
    assert most > 80e6 and least < most / 2, found  # a stage of eight layers keeps 134 MB, or what enters it


@pytest.mark.full
def test_a_model_too_large_for_one_process_trains_in_four(tmp_path: Path) -> None:
    size = {"width": 4096, "layers": 12, "room": 1500}  # MiB; the model, its gradients and momentum are 2304
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    alone = run(1, script, *map(str, size.values()), OMP_NUM_THREADS="1")
    assert alone.returncode != 0
    assert "allocate memory" in alone.stderr
    ranks = held(tmp_path, 4, **size)
    assert max(each["held"] for each in ranks) <= 1.15 * 3 * max(each["parameters"] for each in ranks)
