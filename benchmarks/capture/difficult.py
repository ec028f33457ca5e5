"""Models with one difficulty each: what tracers are known to stumble over."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

Case = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]


class Two(nn.Module):
    """Two linear layers, for the cases to put something between."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> Any:
        """Return what the second layer makes of what lies between."""
        return self.two(self.between(self.one(x)))

    def between(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``x`` as it is."""
        return x


class Branch(Two):
    """Branches on a value."""

    def between(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 if x.abs().mean() > 0.1 else x / 2


class Item(Two):
    """Slices by a value."""

    def between(self, x: torch.Tensor) -> torch.Tensor:
        longest = int((x[0] > -100).sum().item())
        return F.pad(x[:, :longest], (0, 8 - longest))


class Rows(nn.Module):
    """Sends each row to the expert that its values choose."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(8, 4), nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return each row as its expert has it."""
        best, out = self.router(x).argmax(-1), torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = torch.nonzero(best == number).flatten()
            if rows.numel() > 0:
                out[rows] += expert(x[rows])
        return out


class Numpy(Two):
    """Leaves torch for NumPy and comes back."""

    def between(self, x: torch.Tensor) -> torch.Tensor:
        return x / torch.from_numpy(np.linalg.norm(x.detach().numpy(), axis=-1, keepdims=True))


class Asserts(Two):
    """Asserts something of its values."""

    def between(self, x: torch.Tensor) -> torch.Tensor:
        assert torch.isfinite(x).all(), "not finite"
        return x


class Recomputing(Two):
    """Keeps nothing between, and recomputes it."""

    def between(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(lambda y: torch.tanh(y) * 2, x, use_reentrant=False)


class SideEffect(Two):
    """Leaves a part of its loss in an attribute."""

    def between(self, x: torch.Tensor) -> torch.Tensor:
        self.aux = x.square().mean()
        return x


class Counting(Two):
    """Counts its calls in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def between(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x


@dataclass
class Result:
    """What a model may return."""

    logits: torch.Tensor
    hidden: list[torch.Tensor]


class Returns(Two):
    """Returns a dataclass that torch has not been told of."""

    def forward(self, x: torch.Tensor) -> Result:
        hidden = self.one(x)
        return Result(self.two(hidden), [hidden])


class Takes(Two):
    """Takes a dictionary, with something in it that is no tensor."""

    def forward(self, batch: dict[str, Any]) -> torch.Tensor:
        return super().forward(batch["x"]) * batch["scale"]


class Optional(Two):
    """Has arguments that may be left out, and a loop over its layers."""

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None, times: int = 3) -> torch.Tensor:
        for _ in range(times):
            x = super().forward(x)
        return x if mask is None else x * mask


class Depth(Two):
    """Skips a layer now and then, by Python's random numbers."""

    def between(self, x: torch.Tensor) -> torch.Tensor:
        return x if random.random() < 0.5 else torch.relu(x)


class Own(torch.autograd.Function):
    """A square with a gradient of its own."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return 2 * ctx.saved_tensors[0] * gradient


class Gradient(Two):
    """Uses an autograd function of its own."""

    def between(self, x: torch.Tensor) -> torch.Tensor:
        return Own.apply(x)


class Exit(nn.Module):
    """Stops early when it is sure enough."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.heads = (nn.ModuleList(nn.Linear(8, 8) for _ in range(3)) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the first answer that is sure."""
        for layer, head in zip(self.layers, self.heads, strict=True):
            x = torch.relu(layer(x))
            answer = head(x)
            if answer.softmax(-1).max(-1).values.min() > 0.9:
                break
        return answer


class Mixup(Two):
    """Mixes each sample with another."""

    def between(self, x: torch.Tensor) -> torch.Tensor:
        return 0.7 * x + 0.3 * x.roll(1, 0)


class Fixed(Two):
    """Was written for a batch of four."""

    def between(self, x: torch.Tensor) -> torch.Tensor:
        return x.view(4, 2, 4).flatten(1)


def _x() -> torch.Tensor:
    return torch.randn(4, 8)


DIFFICULT: dict[str, Callable[[], Case]] = {
    "branch on a value": lambda: (Branch(), (_x(),), {}),
    "slice by .item()": lambda: (Item(), (_x(),), {}),
    "MoE by nonzero": lambda: (Rows(), (_x(),), {}),
    "through NumPy": lambda: (Numpy(), (_x(),), {}),
    "assert on values": lambda: (Asserts(), (_x(),), {}),
    "early exit": lambda: (Exit(), (_x(),), {}),
    "activation checkpointing": lambda: (Recomputing(), (_x(),), {}),
    "loss in an attribute": lambda: (SideEffect(), (_x(),), {}),
    "counter in a buffer": lambda: (Counting(), (_x(),), {}),
    "dataclass returned": lambda: (Returns(), (_x(),), {}),
    "dictionary taken": lambda: (Takes(), ({"x": _x(), "scale": 0.5},), {}),
    "optional arguments, loop": lambda: (Optional(), (_x(),), {"mask": torch.ones(4, 1)}),
    "stochastic depth": lambda: (Depth(), (_x(),), {}),
    "own autograd function": lambda: (Gradient(), (_x(),), {}),
    "roll over the batch": lambda: (Mixup(), (_x(),), {}),
    "batch size written in": lambda: (Fixed(), (_x(),), {}),
}
