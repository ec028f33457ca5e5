"""The same training step under each rival, as its own documentation says to write it."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from models import Task, loss_of
from torch import Tensor, nn

import nearlinear as nl

_OURS = "nearlinear"


@dataclass(frozen=True, slots=True)
class Training:
    """A model under training.

    Args:
        name: The rival.
        model: What the step calls.
        optimizer: What the step calls.
        backward: What the step calls with the loss.
    """

    name: str
    model: Any
    optimizer: Any
    backward: Callable[[Tensor], None]

    def step(self, x: Tensor, y: Tensor) -> Tensor:
        """Train on one batch and return its loss."""
        self.optimizer.zero_grad()
        loss = loss_of(self.model(x), y)
        self.backward(loss)
        self.optimizer.step()
        return loss.detach()


def start(name: str, task: Task) -> Training:
    """Let a rival take hold of a copy of the task's model.

    Args:
        name: ``"plain"`` (no exchange at all), or one of ``RIVALS``; a size in bytes may follow after ``@``, as in
            ``"nearlinear@1048576"`` or ``"ddp@1048576"``: that of the buckets, instead of what the rival chooses.
        task: What to train.
    """
    model = copy.deepcopy(task.model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    rival, _, bucket = name.partition("@")
    return _STARTS[rival](name, model, optimizer, int(bucket) if bucket else None)


def _plain(name: str, model: nn.Module, optimizer: torch.optim.Optimizer, bucket: int | None) -> Training:
    return Training(name, model, optimizer, _backward)


def _nearlinear(name: str, model: nn.Module, optimizer: torch.optim.Optimizer, bucket: int | None) -> Training:
    model, optimizer = nl.distribute(model, optimizer, strategy=nl.Plan(bucket_bytes=bucket))
    return Training(name, model, optimizer, _backward)


def _ddp(
    name: str, model: nn.Module, optimizer: torch.optim.Optimizer, bucket: int | None, views: bool = False
) -> Training:
    cap: Any = bucket / 2**20 if bucket else None
    ddp = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=cap, gradient_as_bucket_view=views)
    return Training(name, ddp, optimizer, _backward)


def _accelerate(name: str, model: nn.Module, optimizer: torch.optim.Optimizer, bucket: int | None) -> Training:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    prepared, prepared_optimizer = accelerator.prepare(model, optimizer)
    return Training(name, prepared, prepared_optimizer, accelerator.backward)


def _backward(loss: Tensor) -> None:
    loss.backward()  # type: ignore[no-untyped-call]


_STARTS: dict[str, Callable[..., Training]] = {
    "plain": _plain,
    _OURS: _nearlinear,
    "ddp": _ddp,
    "ddp-views": functools.partial(_ddp, views=True),
    "accelerate": _accelerate,
}
RIVALS = (_OURS, "ddp", "accelerate")


@contextlib.contextmanager
def as_if_alone(name: str) -> Iterator[None]:
    """Give the others torch's own ``p.grad`` back while they run: nearlinear puts a slower one on ``nn.Parameter``."""
    ours = vars(nn.Parameter).get("grad")
    if ours is None or name.startswith(_OURS):
        yield
        return
    del nn.Parameter.grad
    try:
        yield
    finally:
        nn.Parameter.grad = ours
