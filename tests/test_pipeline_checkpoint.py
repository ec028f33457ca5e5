"""A checkpoint of a pipeline is one of the plain model: it goes on under any strategy, on any number of processes."""

from __future__ import annotations

import re

import pytest

from conftest import run

# One process trains several times, each named by its first argument: to start processes is what takes the time.
SCRIPT = """
import sys
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import nearlinear as nl
from nearlinear.torch import session

torch.set_default_dtype(torch.float64)
x, y = torch.randn(40, 6, generator=torch.Generator().manual_seed(0)), torch.arange(40) % 3


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


def train(name, strategy, first, last, read, written):
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    loader = DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True)
    model, optimizer, loader = nl.distribute(model, optimizer, loader, strategy=strategy)
    if read:
        assert nl.load(read, model, optimizer, loader) == {"done": first}
    done = first
    while done < last:
        for a, b in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(a), b)
            loss.backward()
            optimizer.step()
            done += 1
            print(f"{name} step {done}: {float(nl.mean(loss))!r}", flush=True)
            if done == last:
                break
    if written:
        nl.save(written, model, optimizer, loader, done=done)
    print(f"{name} calls: {float(model.calls)!r}")


for words in sys.argv[1:]:
    name, strategy, first, last, read, written = words.split(",")
    train(name, strategy, int(first), int(last), read, written)
    session().summed = session()._backward = None  # a run settles this once; these are runs of their own
    session().loaders = 0
"""
RESUMED = {
    "data on one, then a pipeline on two": ("data on one", "a pipeline on two after one"),
    "a pipeline on two, then one on three": ("a pipeline on two", "a pipeline on three"),
    "a pipeline on two, then data on one": ("a pipeline on two", "data on one after two"),
}


@pytest.fixture(scope="module")
def losses(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, float]]:
    """Return what each training printed: half of the steps, saved, and the other half, loaded."""
    folder = tmp_path_factory.mktemp("checkpoint")
    script, one, two = folder / "train.py", folder / "one", folder / "two"
    script.write_text(SCRIPT)
    found: dict[str, dict[str, float]] = {}

    def train(ranks: int, *words: str) -> None:
        result = run(ranks, script, *words)
        assert result.returncode == 0, result.stderr
        for name, what, number in re.findall(r"([a-z ]+) (step \d+|calls): (\S+)", result.stdout):
            known = found.setdefault(name.strip(), {}).setdefault(what, float(number))
            assert abs(known - float(number)) < 1e-10  # on all ranks

    train(1, "the whole,data,0,7,,", f"data on one,data,0,4,,{one}")
    train(2, f"a pipeline on two after one,pipeline,4,7,{one},", f"a pipeline on two,pipeline,0,4,,{two}")
    train(3, f"a pipeline on three,pipeline,4,7,{two},")
    train(1, f"data on one after two,data,4,7,{two},")
    return found


@pytest.mark.parametrize("saved_and_loaded", RESUMED)
def test_what_one_strategy_saves_another_goes_on_with(
    saved_and_loaded: str, losses: dict[str, dict[str, float]]
) -> None:
    begun, ended = RESUMED[saved_and_loaded]
    whole, joined = losses["the whole"], {**losses[begun], **losses[ended]}
    assert joined.keys() == whole.keys() and len(whole) == 8
    # Sums over microbatches come in another order; Adam's moments carry that on.
    assert all(abs(joined[name] - whole[name]) < 1e-10 for name in whole), (joined, whole)
