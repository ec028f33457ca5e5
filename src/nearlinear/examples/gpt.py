"""Turning Python's own documentation into a small GPT that reads and writes bytes: again a plain loop and two lines.

python gpt.py --sample               one process
nearlinear run -n 2 gpt.py           two processes, the same losses
"""

# mypy: disallow-untyped-calls=False
# (torch leaves Tensor.backward without types.)

from __future__ import annotations

import argparse
import json
import math
import time
from itertools import chain, islice, repeat
from pathlib import Path
from pydoc_data.topics import topics

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

import nearlinear as nl  # (1)

CONTEXT, BYTES = 128, 256


class Windows(Dataset[tuple[Tensor, Tensor]]):
    """Stretches of ``CONTEXT`` bytes, end to end, each with the bytes that follow its own."""

    def __init__(self, text: bytes) -> None:
        self.bytes = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()

    def __len__(self) -> int:
        return (len(self.bytes) - 1) // CONTEXT

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        window = self.bytes[index * CONTEXT : (index + 1) * CONTEXT + 1]
        return window[:-1], window[1:]


# Shapes: B batch, L position in the window, H head, D width of a head, M width of the model, V byte value.


def turned(x_BHLD: Tensor) -> Tensor:
    """Turn each pair of features by an angle that grows with the position (rotary embedding, arXiv 2104.09864)."""
    length, width = x_BHLD.shape[-2:]
    speeds = 10_000.0 ** (-torch.arange(0, width, 2) / width)
    angles_LD = torch.outer(torch.arange(length), speeds)
    a, b = x_BHLD.chunk(2, dim=-1)
    cos, sin = angles_LD.cos(), angles_LD.sin()
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1)


class Block(nn.Module):
    """Attention to earlier bytes, then a two-layer network, each added to what came in."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x_BLM: Tensor) -> Tensor:
        qkv = self.qkv(self.norm1(x_BLM)).chunk(3, dim=-1)
        q_BHLD, k_BHLD, v_BHLD = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in qkv)
        seen_BHLD = F.scaled_dot_product_attention(turned(q_BHLD), turned(k_BHLD), v_BHLD, is_causal=True)
        x_BLM = x_BLM + self.out(seen_BHLD.transpose(1, 2).flatten(-2))
        y_BLM: Tensor = x_BLM + self.mlp(self.norm2(x_BLM))
        return y_BLM


def gpt(width: int = 128, layers: int = 4, heads: int = 4) -> nn.Module:
    """Build a decoder over bytes: ``(B, L)`` byte values to ``(B, L, V)`` logits, 0.86 million parameters."""
    return nn.Sequential(
        nn.Embedding(BYTES, width),
        *(Block(width, heads) for _ in range(layers)),
        nn.LayerNorm(width),
        nn.Linear(width, BYTES),
    )


def cosine_with_warm_up(step: int, steps: int) -> float:
    """Return the share of the full learning rate at this step: up in a straight line, down along a cosine."""
    warm_up = max(1, steps // 10)
    if step < warm_up:
        return (step + 1) / warm_up
    way = min(1.0, (step - warm_up) / max(1, steps - warm_up))
    return 0.05 + 0.95 * (1 + math.cos(math.pi * way)) / 2


@torch.no_grad()
def sample(model: nn.Module, start: bytes, length: int, seed: int) -> str:
    """Continue ``start`` by ``length`` bytes. Every process takes part and draws the same."""
    draw = torch.Generator().manual_seed(seed)
    written = list(start)
    for _ in range(length):
        logits_V = model(torch.tensor([written[-CONTEXT:]]))[0, -1] / 0.8
        written.append(int(torch.multinomial(logits_V.softmax(dim=-1), 1, generator=draw)))
    return bytes(written).decode(errors="replace")


def main() -> None:
    """Train for a number of steps, and print the loss now and then."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=320)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--batch-size", type=int, default=8, help="windows per step, over all processes")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--record", type=Path, metavar="FILE", help="write step, loss and time as JSON lines")
    parser.add_argument("--sample", action="store_true", help="let the trained model write 400 bytes")
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    windows = Windows("\n".join(topics.values()).encode())
    loader = DataLoader(windows, batch_size=args.batch_size, shuffle=True, drop_last=True)
    model = gpt()
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.1)

    model, optimizer, loader = nl.distribute(model, optimizer, loader)  # (2)

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: cosine_with_warm_up(step, args.steps))
    rows: list[dict[str, float]] = []
    start = time.perf_counter()
    for step, (x, y) in enumerate(islice(chain.from_iterable(repeat(loader)), args.steps), start=1):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        mean = float(nl.mean(loss.detach()))  # of the whole batch, the same on every process
        seconds = time.perf_counter() - start
        rows.append({"step": step, "loss": mean, "seconds": seconds, "samples": step * args.batch_size})
        if nl.is_main() and (step == 1 or step % 40 == 0 or step == args.steps):
            print(f"step {step}  loss {mean:.4f}  {step * args.batch_size / seconds:.0f} windows/s")
    if args.record and nl.is_main():
        args.record.write_text("".join(json.dumps(row) + "\n" for row in rows))
    if args.sample:
        text = sample(model, b"The ", 400, args.seed)
        if nl.is_main():
            print(text)


if __name__ == "__main__":
    main()
