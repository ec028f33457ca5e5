"""One process alone: a plain loop against the same loop after ``nl.distribute``, turn about step by step."""

from __future__ import annotations

import copy
import json
import os
import sys
import time
from typing import Any

import torch
from models import MODELS, Task, loss_of
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import nearlinear as nl

BATCHES = 8  # per pass


def main() -> None:
    """Measure what the first argument, a JSON object, asks for."""
    options = json.loads(sys.argv[1])
    os.sched_setaffinity(0, {options["core"]})
    torch.set_num_threads(1)
    for name in options["models"]:
        torch.manual_seed(options["seed"])
        print(json.dumps({"model": name, **_measure(MODELS[name](), options["blocks"])}), flush=True)


def _measure(task: Task, blocks: int) -> dict[str, Any]:
    loops = [_Loop(task, distributed=False), _Loop(task, distributed=True)]
    times: list[list[float]] = []
    for block in range(blocks + 1):  # the first is a warm-up
        spent = [0.0, 0.0]
        for step in range(BATCHES + 1):  # the last one finds the end of the data
            first = (block + step) % 2
            for which in (first, 1 - first):
                began = time.perf_counter()
                loops[which].step()
                spent[which] += time.perf_counter() - began
        times.append([seconds / BATCHES for seconds in spent])
    return {"batch": loops[0].batch, "plain": [t[0] for t in times[1:]], "distributed": [t[1] for t in times[1:]]}


class _Loop:
    """A training loop that can be taken step by step. Batches are an eighth, so that what is added shows eightfold."""

    def __init__(self, task: Task, *, distributed: bool) -> None:
        self.batch = task.batch // 8
        model: nn.Module = copy.deepcopy(task.model)
        optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
        data = TensorDataset(task.x, task.y)
        loader: DataLoader[Any] = DataLoader(data, self.batch, shuffle=True)
        if distributed:
            model, optimizer, loader = nl.distribute(model, optimizer, loader)
        self._model, self._optimizer, self._loader = model, optimizer, loader
        self._batches = iter(loader)

    def step(self) -> None:
        """Train on the next batch; at the end of the data, begin the next pass instead."""
        batch = next(self._batches, None)
        if batch is None:
            self._batches = iter(self._loader)
            return
        x, y = batch
        self._optimizer.zero_grad()
        loss_of(self._model(x), y).backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()


if __name__ == "__main__":
    main()
