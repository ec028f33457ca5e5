"""The same training step under nearlinear's pipeline, torch's by hand, and on one core."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from models import Task, loss_of
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

import nearlinear as nl
from nearlinear.core.graph import Graph
from nearlinear.planning.partition import Partition
from nearlinear.torch.pipeline import train

TORCH = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}


class Plain:
    """A plain loop over one model.

    Args:
        task: What to train.
        layers: Which of its layers.
        pieces: In how many pieces the batch passes: all forward, then the loss, then all backward, or, of layers
            without a loss behind them, gradients of ones.
        loss: Whether the layers are followed by the loss.
    """

    def __init__(self, task: Task, layers: slice = slice(None), pieces: int = 1, loss: bool = True) -> None:
        self._model, self._pieces, self._with_loss = copy.deepcopy(task.model)[layers], pieces, loss
        self._optimizer = _optimizer(self._model)

    def step(self, x: Tensor, y: Tensor) -> Tensor:
        """Train on one batch and return its loss."""
        self._optimizer.zero_grad()
        out = [self._model(each) for each in x.chunk(self._pieces)]
        leaves = [each.detach().requires_grad_() for each in out]
        total = loss_of(torch.cat(leaves), y) if self._with_loss else torch.cat(leaves).mean()
        total.backward()  # type: ignore[no-untyped-call]
        for each, leaf in zip(out, leaves, strict=True):
            each.backward(leaf.grad)
        self._optimizer.step()
        return total.detach()


class One:
    """A plain loop, as a user writes it."""

    def __init__(self, task: Task) -> None:
        self._model = copy.deepcopy(task.model)
        self._optimizer = _optimizer(self._model)

    def step(self, x: Tensor, y: Tensor) -> Tensor:
        """Train on one batch and return its loss."""
        self._optimizer.zero_grad()
        loss = loss_of(self._model(x), y)
        loss.backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()
        return loss.detach()


class Nearlinear(One):
    """The same loop after ``nl.distribute``.

    Args:
        task: What to train.
        microbatches: Pieces of the batch.
        layers_alike: Put as many layers on one stage as on the other, instead of what the partitioner finds.
    """

    def __init__(self, task: Task, microbatches: int, *, layers_alike: bool = False) -> None:
        super().__init__(task)
        plan = nl.Plan("pipeline", microbatches=microbatches)
        self._model, self._optimizer = nl.distribute(self._model, self._optimizer, strategy=plan)
        self.planned: tuple[Graph, Partition] | None = None  # once rank 0 has planned
        self._alike = layers_alike
        with self._planning():
            self.first_loss = super().step(task.x, task.y)

    @contextmanager
    def _planning(self) -> Iterator[None]:
        planner = train.partition

        def watched(graph: Graph, stages: int, *args: Any) -> Partition:
            found = planner(graph, stages, *args)
            if self._alike:
                found = Partition(equal(graph, stages), tuple(range(stages)), (), (), 0.0, 0.0, "equal layers")
            self.planned = (graph, found)
            return found

        train.partition = watched  # type: ignore[assignment]
        try:
            yield
        finally:
            train.partition = planner


class Torch:
    """torch.distributed.pipelining, the model split by hand: as many layers here as there.

    Args:
        task: What to train.
        rank: Which half is here.
        schedule: ``"gpipe"`` or ``"1f1b"``.
        microbatches: Pieces of the batch.
    """

    def __init__(self, task: Task, rank: int, schedule: str, microbatches: int) -> None:
        layers: Any = task.model
        half = len(layers) // 2
        self._rank, self._part = rank, copy.deepcopy(layers[:half] if rank == 0 else layers[half:])
        self._optimizer = _optimizer(self._part)
        stage = PipelineStage(self._part, rank, 2, torch.device("cpu"))
        self._schedule: Any = TORCH[schedule](stage, microbatches, loss_fn=loss_of)

    def step(self, x: Tensor, y: Tensor) -> Tensor:
        """Train on one batch and return its loss, where it is."""
        self._optimizer.zero_grad()
        losses: list[Tensor] = []
        if self._rank == 0:
            self._schedule.step(x)
        else:
            self._schedule.step(target=y, losses=losses)
        self._optimizer.step()
        return torch.stack(losses).mean().detach() if losses else torch.zeros(())


def equal(graph: Graph, stages: int) -> tuple[int, ...]:
    """Return the stage of every operator where all stages have as many of the model's layers, by their names."""
    layer = [each.name.split(".")[0] for each in graph.operators]
    numbers = [int(each) if each.isdigit() else None for each in layer]
    count = 1 + max(each for each in numbers if each is not None)
    return tuple(stages - 1 if each is None else each * stages // count for each in numbers)


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
