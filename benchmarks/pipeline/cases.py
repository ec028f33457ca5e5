"""Models of eight layers each: alike, wide at first, and with a heavy head."""

from __future__ import annotations

from collections.abc import Callable

import torch
from models import BYTES, CONTEXT, Block, Decoder, Task
from torch import Tensor, nn

WIDTH, SAMPLES, LAYERS = 256, 32, 8
POSITIONS = 32  # a microbatch of 2 samples still is a product with 64 rows
VOCABULARY = 4096


def balanced(positions: int = POSITIONS) -> Task:
    """Build eight decoder blocks of width 256, 6.3 million parameters; what passes a stage is 32 KB per sample."""
    return Task(nn.Sequential(*(Block(WIDTH, 4) for _ in range(LAYERS))), *_batch(positions))


def wide_first(positions: int = POSITIONS) -> Task:
    """Build eight two-layer networks, each added to what came in; the first two are four times as wide."""
    hidden = [8192, 8192] + [2048] * (LAYERS - 2)
    return Task(nn.Sequential(*(Residual(WIDTH, each) for each in hidden)), *_batch(positions))


def heavy_head(positions: int = POSITIONS) -> Task:
    """Build seven decoder blocks and a head over 4096 classes: a third more than a block, and a loss to match."""
    head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False))
    x, _ = _batch(positions)
    return Task(
        nn.Sequential(*(Block(WIDTH, 4) for _ in range(LAYERS - 1)), head),
        x,
        torch.randint(VOCABULARY, (SAMPLES, positions)),
    )


def adam_decoder(width: int, layers: int) -> Task:
    """Build a decoder over bytes, to be trained with Adam on short texts: much memory for little computing."""
    data = torch.randint(BYTES, (8, CONTEXT // 8 + 1), device="cpu")
    return Task(Decoder(width, layers, 4), data[:, :-1].contiguous(), data[:, 1:].contiguous())


def _batch(positions: int) -> tuple[Tensor, Tensor]:
    return torch.randn(SAMPLES, positions, WIDTH), torch.randint(WIDTH, (SAMPLES, positions))


class Residual(nn.Module):
    """A two-layer network, added to what came in."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm, self.up, self.act, self.down = (
            nn.LayerNorm(width),
            nn.Linear(width, hidden),
            nn.GELU(),
            nn.Linear(hidden, width),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x``, shape ``(..., width)``, and what the network makes of it."""
        added: Tensor = x + self.down(self.act(self.up(self.norm(x))))
        return added


CASES: dict[str, Callable[[int], Task]] = {"balanced": balanced, "wide first": wide_first, "heavy head": heavy_head}
