"""Three models, each strong in one thing: gradients to send (MLP), matrix products (GPT), convolutions (CNN)."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

BYTES, CONTEXT = 256, 128


@dataclass(frozen=True, slots=True)
class Task:
    """A model and the one batch it is trained on.

    Args:
        model: The initial model; every rival trains a copy.
        x: Inputs of the whole batch, shape ``(batch, ...)``.
        y: Classes, shape ``(batch,)`` or ``(batch, positions)``.
    """

    model: nn.Module
    x: Tensor
    y: Tensor

    @property
    def batch(self) -> int:
        """Samples of the whole batch."""
        return len(self.x)

    @property
    def parameters(self) -> int:
        """Numbers to train."""
        return sum(parameter.numel() for parameter in self.model.parameters())

    def half(self, rank: int) -> tuple[Tensor, Tensor]:
        """Return what rank 0 or 1 of two takes of the batch."""
        rows = slice(rank * self.batch // 2, (rank + 1) * self.batch // 2)
        return self.x[rows].clone(), self.y[rows].clone()


def loss_of(scores: Tensor, y: Tensor) -> Tensor:
    """Return the mean cross entropy over samples and positions."""
    return F.cross_entropy(scores.flatten(0, -2), y.flatten())


def mlp() -> Task:
    """Build four linear layers on flat images, 5.2 million parameters: much to send for little computing."""
    model = nn.Sequential(
        nn.Linear(784, 1536), nn.ReLU(),
        nn.Linear(1536, 1536), nn.ReLU(),
        nn.Linear(1536, 1024), nn.ReLU(),
        nn.Linear(1024, 10),
    )  # fmt: skip
    return Task(model, torch.randn(512, 784), torch.randint(10, (512,)))


def gpt() -> Task:
    """Build a decoder over bytes, four blocks of width 256, 3.3 million parameters, the head not tied."""
    data = torch.randint(BYTES, (16, CONTEXT + 1))
    return Task(Decoder(width=256, layers=4, heads=4), data[:, :-1].contiguous(), data[:, 1:].contiguous())


def cnn() -> Task:
    """Build six convolutions with BatchNorm on 32 x 32 images, 0.57 million parameters."""
    widths = [3, 32, 64, 64, 128, 128, 256]
    layers: list[nn.Module] = []
    for place, (into, out) in enumerate(itertools.pairwise(widths)):
        layers += [nn.Conv2d(into, out, 3, padding=1, bias=False), nn.BatchNorm2d(out), nn.ReLU()]
        if place in (0, 2, 4):
            layers.append(nn.MaxPool2d(2))
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], 10)]
    return Task(nn.Sequential(*layers), torch.randn(128, 3, 32, 32), torch.randint(10, (128,)))


MODELS: dict[str, Callable[[], Task]] = {"mlp": mlp, "gpt": gpt, "cnn": cnn}


# Shapes: B batch, L position, H head, D width of a head, M width of the model.


class Decoder(nn.Module):
    """Turns ``(B, L)`` byte values into ``(B, L, 256)`` scores of the byte that follows each."""

    def __init__(self, width: int, layers: int, heads: int) -> None:
        super().__init__()
        self.bytes, self.places = nn.Embedding(BYTES, width), nn.Embedding(CONTEXT, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, BYTES, bias=False)

    def forward(self, x_BL: Tensor) -> Tensor:
        h_BLM = self.bytes(x_BL) + self.places.weight[: x_BL.shape[1]]
        scores: Tensor = self.head(self.norm(self.blocks(h_BLM)))
        return scores


class Block(nn.Module):
    """Attention to earlier positions, then a two-layer network, each added to what came in."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x_BLM: Tensor) -> Tensor:
        qkv = self.qkv(self.norm1(x_BLM)).chunk(3, dim=-1)
        q_BHLD, k_BHLD, v_BHLD = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in qkv)
        seen_BHLD = F.scaled_dot_product_attention(q_BHLD, k_BHLD, v_BHLD, is_causal=True)
        x_BLM = x_BLM + self.out(seen_BHLD.transpose(1, 2).flatten(-2))
        h_BLM: Tensor = x_BLM + self.mlp(self.norm2(x_BLM))
        return h_BLM
