"""Trains a small GPT on bytes in one way on this host, and writes what it cost and what it learnt.

    train.py WAY STEPS BATCH MEMBERS FOLDER

WAY is `one`, `ddp` (per-step data parallelism over gloo), `local` (under `nearlinear run --listen` and `join`), or that
of another library (rivals.py). All ways take the same batches in the same order; a member takes its share of each.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import time
from collections.abc import Iterator
from itertools import chain, islice, repeat
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
from rivals import hivemind, torchft
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Subset

import nearlinear as nl
from nearlinear.examples.gpt import Windows, cosine_with_warm_up, gpt

START_S = 120.0
RIVALS = ("torchft", "diloco", "hivemind")


def main(way: str, steps: int, batch: int, members: int, folder: Path) -> None:
    """Train, and write."""
    with contextlib.ExitStack() as exits:
        train(way, steps, batch, members, folder, exits)


def train(way: str, steps: int, batch: int, members: int, folder: Path, exits: contextlib.ExitStack) -> None:
    """Train, and write; what is to be closed goes to ``exits``."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    windows = Windows("\n".join(topics.values()).encode())
    size = len(windows) - len(windows) // 10
    data: Any = DataLoader(Subset(windows, range(size)), batch_size=batch, shuffle=True, drop_last=True)
    test = DataLoader(Subset(windows, range(size, len(windows))), batch_size=64)
    model: nn.Module = gpt(width=64, layers=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1)
    part = slice(None)
    number, every = int(os.environ["NUMBER"]), os.environ.get("EVERY")
    rounds = int(every or 10)  # steps of a round, of other libraries
    stepping: Any = contextlib.nullcontext(optimizer)
    if way in ("ddp", *RIVALS):
        part = slice(number * batch // members, (number + 1) * batch // members)
    if way == "ddp":
        torch.distributed.init_process_group("gloo")
        model = nn.parallel.DistributedDataParallel(model)
    elif way in ("torchft", "diloco"):
        stepping = torchft(model, optimizer, members, number, rounds, outer=way == "diloco")
    elif way == "hivemind":
        stepping = hivemind(optimizer, members, number, rounds, batch, folder)
    elif way == "local":
        plan = nl.Plan("local", every=int(every) if every else None, compress=os.environ.get("CODEC"))
        model, optimizer, data = nl.distribute(model, optimizer, data, strategy=plan)
    stepper = exits.enter_context(stepping)
    meet(folder, members)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: cosine_with_warm_up(step, steps))
    began, rows, before = time.perf_counter(), [], traffic()
    for x, y in islice(batches(data), steps):
        stepper.zero_grad()
        loss = F.cross_entropy(model(x[part]).flatten(0, 1), y[part].flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        stepper.step()
        schedule.step()
        rows.append((time.perf_counter() - began, float(loss.detach())))
    model.eval()
    with torch.no_grad():
        first = next(iter(test))[0][:1]
        model(first)  # of a member: what it learnt last reaches the others
        took = time.perf_counter() - began
        sums = [float(F.cross_entropy(model(x).flatten(0, 1), y.flatten(), reduction="sum")) for x, y in test]
    moved = [now - then for now, then in zip(traffic(), before, strict=True)]
    values = (len(windows) - size) * windows[0][1].numel()
    told = {"rows": rows, "seconds": took, "received": moved[0], "sent": moved[1], "loss": sum(sums) / values}
    (folder / f"{socket.gethostname()}.json").write_text(json.dumps(told))


def traffic() -> list[int]:
    """Return the bytes that this host's cable has carried to it and from it, headers and all."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == "eth0":
            each = numbers.split()
            return [int(each[0]), int(each[8])]
    return [0, 0]


def batches(data: Any) -> Iterator[Any]:
    """Yield batches for ever."""
    return chain.from_iterable(repeat(data))


def meet(folder: Path, members: int) -> None:
    """Return when all members are here."""
    (folder / f"{socket.gethostname()}.here").touch()
    until = time.monotonic() + START_S
    while len(list(folder.glob("*.here"))) < members:
        if time.monotonic() > until:
            sys.exit(f"not all of {members} members came within {START_S:.0f} s")
        time.sleep(0.02)


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:5]), Path(sys.argv[5]))
