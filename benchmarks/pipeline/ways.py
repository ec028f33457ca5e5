"""The same training step on one core, under nearlinear's pipeline, and under torch's with the model split by hand."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from models import Task, loss_of
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

import nearlinear as nl
from nearlinear.core.graph import Graph
from nearlinear.torch.capture import Captured
from nearlinear.torch.pipeline import train

SCHEDULES = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}


class One:
    """A plain loop, as a user writes it."""

    def __init__(self, task: Task) -> None:
        self._model: nn.Module = copy.deepcopy(task.model)
        self._optimizer = _optimizer(self._model)

    def step(self, x: Tensor, y: Tensor) -> Tensor:
        """Train on one batch and return its loss."""
        self._optimizer.zero_grad()
        loss = loss_of(self._model(x), y)
        loss.backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()
        return loss.detach()


class Pieces:
    """What a pipeline computes, without the pipeline: layers on one piece of the batch after the other, then back.

    Args:
        task: What to train.
        layers: Which of its layers.
        pieces: In how many pieces the batch passes.
    """

    def __init__(self, task: Task, layers: slice, pieces: int) -> None:
        whole: Any = task.model
        self._first, self._last = layers.start in (None, 0), layers.stop in (None, len(whole))
        self._model, self._pieces = copy.deepcopy(whole[layers]), pieces
        self._optimizer = _optimizer(self._model)

    def step(self, x: Tensor, y: Tensor) -> Tensor:
        """Train on one batch; of middle layers the mean stands for the loss."""
        self._optimizer.zero_grad()
        inputs = [each.detach().requires_grad_(not self._first) for each in x.chunk(self._pieces)]
        made = [self._model(each) for each in inputs]
        leaves = [each.detach().requires_grad_() for each in made]
        whole = torch.cat(leaves)
        loss = loss_of(whole, y) if self._last else whole.mean()
        loss.backward()  # type: ignore[no-untyped-call]
        for each, leaf in zip(made, leaves, strict=True):
            each.backward(leaf.grad)
        self._optimizer.step()
        return loss.detach()


class Torch:
    """torch.distributed.pipelining, the model split by hand: as many layers on one rank as on the other.

    Args:
        task: What to train.
        rank: Which half is here.
        schedule: One of ``SCHEDULES``.
        microbatches: Pieces of the batch.
    """

    def __init__(self, task: Task, rank: int, schedule: str, microbatches: int) -> None:
        layers: Any = task.model
        self._rank, self._model = rank, copy.deepcopy(layers[half(task, rank)])
        self._optimizer = _optimizer(self._model)
        stage = PipelineStage(self._model, rank, 2, torch.device("cpu"))
        self._schedule: Any = SCHEDULES[schedule](stage, microbatches, loss_fn=loss_of)

    def step(self, x: Tensor, y: Tensor) -> Tensor:
        """Train on one batch and return its loss, on rank 1."""
        self._optimizer.zero_grad()
        losses: list[Tensor] = []
        if self._rank == 0:
            self._schedule.step(x)
        else:
            self._schedule.step(target=y, losses=losses)
        self._optimizer.step()
        return torch.stack(losses).detach().mean() if losses else torch.zeros(())


@dataclass(frozen=True)
class Planned:
    """What nearlinear's rank 0 planned.

    Args:
        graph: The model with measured times, of the whole batch.
        stages: The stage of every operator.
        bandwidth: Of the link, bytes per second.
    """

    graph: Graph
    stages: tuple[int, ...]
    bandwidth: float


class Nearlinear(One):
    """The plain loop after ``nl.distribute``. Making one takes the first step, in which the model is split.

    Args:
        task: What to train.
        microbatches: Pieces of the batch.
        alike: Put as many layers on one stage as on the other, and not what the partitioner finds.
        interleaved: Hand over the loss as a function (``nl.step``), so that forward and backward passes interleave.
    """

    def __init__(self, task: Task, microbatches: int, alike: bool = False, interleaved: bool = False) -> None:
        super().__init__(task)
        plan = nl.Plan("pipeline", microbatches=microbatches)
        self._model, self._optimizer = nl.distribute(self._model, self._optimizer, strategy=plan)
        self._alike, self._interleaved = alike, interleaved
        self._loss = nl.step(lambda x, y: loss_of(self._model(x), y))
        self.planned: Planned | None = None  # known on rank 0
        with self._watching():
            self.first_loss = self.step(task.x, task.y)

    def step(self, x: Tensor, y: Tensor) -> Tensor:
        """Train on one batch and return its loss."""
        if not self._interleaved:
            return super().step(x, y)
        self._optimizer.zero_grad()
        loss = self._loss(x, y)
        self._optimizer.step()
        return loss

    @contextmanager
    def _watching(self) -> Iterator[None]:
        planner = train.stages_of

        def watched(graph: Graph, model: nn.Module, captured: Captured, stages: int, bandwidth: float) -> list[int]:
            alike = self._alike
            found = list(layers_alike(graph)) if alike else planner(graph, model, captured, stages, bandwidth)
            self.planned = Planned(graph, tuple(found), bandwidth)
            return found

        train.stages_of = watched
        try:
            yield
        finally:
            train.stages_of = planner


def start(name: str, task: Task, rank: int) -> Any:
    """Let one of the ways take hold of a copy of the task's model.

    Args:
        name: ``"one"``, ``"one/8"`` (in eight pieces), ``"halves/8"``, ``"nearlinear/8"``, ``"step/8"`` (with
            ``nl.step``), ``"alike/8"`` (with as many layers on either stage), ``"gpipe/8"``, ``"1f1b/8"``: the number
            is that of the microbatches.
        task: What to train.
        rank: Which of the two processes this is.
    """
    kind, _, number = name.partition("/")
    make = {
        "one": lambda: Pieces(task, slice(None), int(number)) if number else One(task),
        "halves": lambda: Pieces(task, half(task, rank), int(number)),
        "nearlinear": lambda: Nearlinear(task, int(number)),
        "step": lambda: Nearlinear(task, int(number), interleaved=True),
        "alike": lambda: Nearlinear(task, int(number), alike=True),
        **{each: functools.partial(Torch, task, rank, each, int(number or 1)) for each in SCHEDULES},
    }
    return make[kind]()


def half(task: Task, rank: int) -> slice:
    """Return the layers of one rank of two where both have as many."""
    layers: Any = task.model
    return slice(rank * len(layers) // 2, (rank + 1) * len(layers) // 2)


def layers_alike(graph: Graph) -> tuple[int, ...]:
    """Return the stage of every operator where both stages have as many layers: operators are named by their layer."""
    layer = [int(each.name.partition(".")[0]) for each in graph.operators]
    return tuple(2 * each // (max(layer) + 1) for each in layer)


@contextmanager
def as_torch_has_it(name: str) -> Iterator[None]:
    """Give the others torch's own ``p.grad`` back while they run: nearlinear puts a slower one on ``nn.Parameter``."""
    ours = vars(nn.Parameter).get("grad")
    if ours is None or name.startswith(("nearlinear", "step", "alike")):
        yield
        return
    del nn.Parameter.grad
    try:
        yield
    finally:
        nn.Parameter.grad = ours


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
