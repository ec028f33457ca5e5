"""Trains a model half way and saves it, or loads it and trains on; under any strategy, on any number of processes.

save:STRATEGY:FOLDER            three steps, then nl.save
load:STRATEGY:FOLDER:RESULT     nl.load, the other two steps, then nl.save to RESULT
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

import nearlinear as nl

from cases import Block, data


class Tied(nn.Module):
    """Weights tied across the model, a buffer, a single number, and a row that only one rank can hold."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 5)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.last = nn.Linear(5, 6, bias=False)
        self.last.weight = nn.Parameter(self.first.weight.detach().T.clone())
        self.again = nn.Linear(5, 6)
        self.again.weight = self.last.weight
        self.scale, self.row = nn.Parameter(torch.tensor(1.5)), nn.Parameter(torch.ones(1, 6))
        self.register_buffer("seen", torch.zeros(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.seen += x.mean(0)
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return (self.last(x) + self.again(x)) * self.row * self.scale


def act(folder: Path, action: str) -> None:
    """Do what ``action`` says, in ``folder``."""
    kind, strategy, name, *result = action.split(":")
    torch.manual_seed(3)
    model = Tied()
    optimizer: Any = torch.optim.AdamW(
        [
            {"params": model.blocks.parameters()},
            {"params": [p for n, p in model.named_parameters() if "block" not in n]},
        ],
        lr=0.01,
    )
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    loader: Any = DataLoader(data(37), batch_size=8, shuffle=True)
    model, optimizer, loader = nl.distribute(model, optimizer, loader, strategy=strategy)
    if kind == "load":
        if strategy == "sharded":
            assert nl.load(folder / name, model, optimizer, loader, scheduler=scheduler) == {"note": "half way"}
        nl.load(folder / name, model, optimizer, loader, scheduler=scheduler)  # over a state that is there
    for i, (x, y) in enumerate(loader, 1):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        scheduler.step()
        if kind == "save" and i == 3:
            nl.save(folder / name, model, optimizer, loader, scheduler=scheduler, note="half way")
            break
    if kind == "load":
        assert i == 2, f"{i} batches were left of 5 after 3"
        nl.save(folder / result[0], model, optimizer)
