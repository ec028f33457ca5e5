"""Turning 1,500 scanned digits into a classifier: any PyTorch loop, and the two lines marked (1) and (2).

python digits.py                     one process
nearlinear run -n 2 digits.py        two processes, the same losses
"""

# mypy: disallow-untyped-calls=False
# (torch leaves Tensor.backward without types.)

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import nearlinear as nl  # (1)

TRAINING = 1500  # of 1,797 scans; the rest is held out


def scans() -> tuple[TensorDataset, TensorDataset]:
    """Return the training and the held-out scans: images, shape ``(n, 1, 8, 8)``, and labels 0 to 9."""
    digits = load_digits()
    order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(0))
    grey = (digits.images - 4.9) / 6.0  # 0 to 16 before, about zero mean and unit spread after
    images = torch.as_tensor(grey, dtype=torch.get_default_dtype()).unsqueeze(1)[order]
    labels = torch.as_tensor(digits.target)[order]
    return TensorDataset(images[:TRAINING], labels[:TRAINING]), TensorDataset(images[TRAINING:], labels[TRAINING:])


def cnn() -> nn.Module:
    """Build three convolutions and a linear layer, 113 thousand parameters, all of it smooth.

    At a kink (ReLU, max pooling) a rounding in the last bit can turn a gradient, and float32 losses drift apart.
    """
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1), nn.GELU(),
        nn.Conv2d(32, 64, 3, padding=1), nn.GELU(), nn.AvgPool2d(2),
        nn.Conv2d(64, 128, 3, padding=1), nn.GELU(),
        nn.Flatten(), nn.Linear(128 * 4 * 4, 10),
    )  # fmt: skip


@torch.no_grad()
def accuracy(model: nn.Module, loader: DataLoader[tuple[Tensor, ...]]) -> float:
    """Return the share of the scans that the model reads right, counted over all processes, each scan once."""
    model.eval()
    right = read = 0
    for x, y in loader:
        guess, truth = nl.gather(model(x).argmax(dim=1)), nl.gather(y)
        right += int((guess == truth).sum())
        read += len(truth)
    model.train()
    return right / read


def main() -> None:
    """Train, and print loss and accuracy after every epoch."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--batch-size", type=int, default=64, help="scans per step, over all processes")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--float64", action="store_true", help="train in double precision")
    parser.add_argument("--record", type=Path, metavar="FILE", help="write step, loss and time as JSON lines")
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    if args.float64:
        torch.set_default_dtype(torch.float64)
    training, held_out = scans()
    train = DataLoader(training, batch_size=args.batch_size, shuffle=True)
    test = DataLoader(held_out, batch_size=256)
    model = cnn()
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)

    model, optimizer, train, test = nl.distribute(model, optimizer, train, test)  # (2)

    scheduler = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=args.lr, total_steps=args.epochs * len(train), pct_start=0.2
    )
    rows: list[dict[str, float]] = []
    start = time.perf_counter()
    for epoch in range(args.epochs):
        losses = []
        for x, y in train:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            scheduler.step()
            losses.append(float(nl.mean(loss.detach())))  # of the whole batch, the same on every process
            samples = epoch * TRAINING + min(len(losses) * args.batch_size, TRAINING)
            seconds = time.perf_counter() - start
            rows.append({"step": len(rows) + 1, "loss": losses[-1], "seconds": seconds, "samples": samples})
        share = accuracy(model, test)
        if nl.is_main():
            print(f"epoch {epoch + 1}  loss {sum(losses) / len(losses):.4f}  accuracy {share:.1%}".replace("%", " %"))
    if args.record and nl.is_main():
        args.record.write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main()
