"""What members lose that see a part of every batch: AdamW in one process, which plays all members in turn.

    python benchmarks/internet/adam.py --members 2 --every 30 --late 15 --raised

Prints the loss on held-out text after the last step. `--late`: steps after which a round's mean is applied; `--raised`:
at the rates of `planning.rounds.adaptive_rate`, else at the script's.
"""

from __future__ import annotations

import argparse
import copy
from itertools import chain, islice, repeat
from pydoc_data.topics import topics
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Subset

from nearlinear.examples.gpt import Windows, cosine_with_warm_up, gpt
from nearlinear.planning.rounds import LOOK_STEPS, adaptive_rate
from nearlinear.torch.local import gradient_signal

RATE, DECAY, BATCH = 3e-3, 0.1, 16


class Member:
    """A model, its optimizer, and what it would be without what it learnt and nobody counted."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=DECAY)
        self.base = self.read()
        self.factor = 1.0

    def read(self) -> torch.Tensor:
        """Return the parameters end to end."""
        return nn.utils.parameters_to_vector(self.model.parameters()).detach().clone()

    def step(self, x: torch.Tensor, y: torch.Tensor, rate: float) -> None:
        """Take one step on this member's part of the batch."""
        self.optimizer.zero_grad()
        F.cross_entropy(self.model(x).flatten(0, 1), y.flatten()).backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        group = self.optimizer.param_groups[0]
        group["lr"], group["weight_decay"] = RATE * rate * self.factor, DECAY / self.factor
        self.optimizer.step()

    def move(self, outer: torch.Tensor, captured: torch.Tensor) -> None:
        """Put what was learnt since the capture on top of the new outer parameters."""
        with torch.no_grad():
            nn.utils.vector_to_parameters(outer + self.read() - captured, self.model.parameters())
        self.base = outer


def main() -> None:
    """Train, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--members", type=int, default=1)
    parser.add_argument("--every", type=int, default=30, help="steps per round")
    parser.add_argument("--late", type=int, default=0)
    parser.add_argument("--raised", action="store_true")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(options.seed)
    windows = Windows("\n".join(topics.values()).encode())
    size = len(windows) - len(windows) // 10
    order = torch.Generator().manual_seed(options.seed)
    train = DataLoader(Subset(windows, range(size)), batch_size=BATCH, shuffle=True, drop_last=True, generator=order)
    model = gpt(width=64, layers=2)
    members = [Member(copy.deepcopy(model)) for _ in range(options.members)]
    outer, under_way = members[0].base, None
    for step, (x, y) in enumerate(islice(chain.from_iterable(repeat(train)), options.steps), 1):
        rate = cosine_with_warm_up(step - 1, options.steps)
        for member, part, targets in zip(members, x.chunk(len(members)), y.chunk(len(members)), strict=True):
            member.step(part, targets, rate)
            if options.raised and step % LOOK_STEPS == 0:
                member.factor = adaptive_rate(1 / len(members), gradient_signal(member.optimizer) or 0.0)
        last = step == options.steps
        if under_way is not None and (last or step >= under_way[0]):
            outer, under_way = _apply(members, outer, under_way[1]), None
        if step % options.every == 0 or last:
            captured = [member.read() for member in members]
            under_way = (step + options.late, captured)
            if last or not options.late:
                outer, under_way = _apply(members, outer, captured), None
    test = DataLoader(Subset(windows, range(size, len(windows))), batch_size=64)
    print(f"{vars(options)}: loss {_loss(members[0].model, test):.4f}")


def _apply(members: list[Member], outer: torch.Tensor, captured: list[torch.Tensor]) -> torch.Tensor:
    changes = [member.base - values for member, values in zip(members, captured, strict=True)]
    outer = outer - torch.stack(changes).mean(0)
    for member, values in zip(members, captured, strict=True):
        member.move(outer, values)
    return outer


@torch.no_grad()
def _loss(model: nn.Module, test: Any) -> float:
    sums, count = 0.0, 0
    for x, y in test:
        sums += float(F.cross_entropy(model(x).flatten(0, 1), y.flatten(), reduction="sum"))
        count += y.numel()
    return sums / count


if __name__ == "__main__":
    main()
