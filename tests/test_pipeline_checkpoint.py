"""A checkpoint of a pipeline is one of the plain model: it goes on under any strategy, on any number of processes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from conftest import run

SCRIPT = """
import sys
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import nearlinear as nl

strategy, folder, first, last = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
x, y = torch.randn(40, 6), torch.randint(3, (40,))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(6, 12)
        self.blocks = nn.Sequential(*[nn.Sequential(nn.Linear(12, 12), nn.Tanh()) for _ in range(4)])
        self.head = nn.Linear(12, 3)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        return self.head(self.blocks(self.embed(x)))


model = Net()
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
loader = DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True)
model, optimizer, loader = nl.distribute(model, optimizer, loader, strategy=strategy)
if first:
    assert nl.load(folder, model, optimizer, loader) == {"done": first}
done = first
while done < last:
    for a, b in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(a), b)
        loss.backward()
        optimizer.step()
        done += 1
        print(f"step {done}: {float(nl.mean(loss))!r}", flush=True)
        if done == last:
            break
if len(sys.argv) > 5:
    nl.save(folder, model, optimizer, loader, done=done)
print(f"calls: {float(model.calls)!r}")
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("checkpoint") / "train.py"
    path.write_text(SCRIPT)
    return path


def losses(script: Path, ranks: int, *arguments: str) -> dict[str, float]:
    result = run(ranks, script, *arguments)
    assert result.returncode == 0, result.stderr
    found: dict[str, float] = {}
    for name, number in re.findall(r"(step \d+|calls): (\S+)", result.stdout):
        assert abs(found.setdefault(name, float(number)) - float(number)) < 1e-10  # on all ranks
    return found


@pytest.fixture(scope="module")
def one(script: Path) -> dict[str, float]:
    return losses(script, 1, "data", "none", "0", "7")


@pytest.mark.parametrize(
    ("saver", "loader"),
    [(("pipeline", 2), ("data", 1)), (("pipeline", 2), ("pipeline", 3)), (("data", 1), ("pipeline", 2))],
)
def test_what_one_strategy_saves_another_goes_on_with(
    script: Path, one: dict[str, float], tmp_path: Path, saver: tuple[str, int], loader: tuple[str, int]
) -> None:
    folder = str(tmp_path / "run")
    begun = losses(script, saver[1], saver[0], folder, "0", "4", "save")
    ended = losses(script, loader[1], loader[0], folder, "4", "7")
    joined = {**begun, **ended}
    assert joined.keys() == one.keys()
    # Sums over microbatches come in another order; Adam's moments carry that on.
    assert all(abs(joined[name] - one[name]) < 1e-10 for name in one), (joined, one)
