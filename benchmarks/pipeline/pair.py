"""One of two processes: runs every way of every case in turn and prints the times as JSON lines.

A block is a few steps of one way; a round is one block of each, and the order turns from round to round.

    one            rank 0 trains on the whole batch, rank 1 waits
    one/m          the same in m pieces: what smaller products cost
    halves/m       either has its half of the layers, m pieces, nothing is exchanged: what two cores here are worth
    nearlinear/m   both train together in m microbatches; so do the rivals
"""

from __future__ import annotations

import functools
import json
import os
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parent.parent / "data_parallel"))

import torch
import torch.distributed as dist
from cores import QUIET, SETTLING, program_seconds, wait_until_quiet
from forecast import forecast
from models import Task
from ways import Nearlinear, as_torch_has_it, start

from cases import CASES

WARM_UP = 2  # memory is found, and torch's pipeline asks for shapes, in the first steps


def main() -> None:
    """Measure what the first argument, a JSON object, asks for."""
    options = json.loads(sys.argv[1])
    rank = int(os.environ["RANK"])
    os.sched_setaffinity(0, {options["cores"][rank]})
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    clock = _Clock(options["cores"], options["patience"])
    for name, ways in options["cases"].items():
        torch.manual_seed(options["seed"])
        task = CASES[name](options["positions"])
        blocks: dict[str, list[dict[str, Any]]] = {}
        plans: list[Any] = []
        steps: dict[str, int] = {}
        for placement in range(options["placements"]):
            # Where a model lies in memory is worth some percent for as long as it lives: all are made anew.
            order = ways[placement:] + ways[:placement]
            begun = {way: start(way, task, rank) for way in order}
            _require_equal_losses(begun, task, rank)
            for way, made in begun.items():
                if isinstance(made, Nearlinear) and made.planned is not None:
                    plans.append({"way": way, **forecast(made.planned, options["microbatches"])})
            steps = _measure({way: _step(way, begun[way], task, rank) for way in begun}, options, clock, blocks, steps)
        if rank == 0:
            about = {"case": name, "samples": task.batch, "parameters": task.parameters}
            print(json.dumps({**about, "steps": steps, "blocks": blocks, "plans": plans}), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def _step(name: str, way: Any, task: Task, rank: int) -> Callable[[], Any]:
    if name.startswith("one"):
        return lambda: way.step(task.x, task.y) if rank == 0 else None
    return functools.partial(way.step, task.x, task.y)


def _require_equal_losses(begun: dict[str, Any], task: Task, rank: int) -> None:
    """Take the first steps, and check on rank 1, where they lie, that all come to the same losses."""
    losses = {}
    for name, way in begun.items():
        with as_torch_has_it(name):
            first = [float(way.first_loss)] if isinstance(way, Nearlinear) else []
            losses[name] = [*first, *(float(way.step(task.x, task.y)) for _ in range(WARM_UP - len(first)))]
    for name, theirs in losses.items():
        off = max(abs(a - b) / abs(b) for a, b in zip(theirs, losses["one"], strict=True))
        if off > 1e-4 and rank == 1 and not name.startswith("halves"):
            raise SystemExit(f"the losses are {theirs} under {name} and {losses['one']} in one process")


def _measure(
    steps: dict[str, Callable[[], Any]],
    options: dict[str, Any],
    clock: _Clock,
    blocks: dict[str, list[dict[str, Any]]],
    known: dict[str, int],
) -> dict[str, int]:
    """Add blocks of every way, and return how many steps each of them has."""
    counts = dict(known)
    for name, step in steps.items():
        if name not in counts:
            with as_torch_has_it(name):
                counts[name] = max(1, min(50, round(options["seconds"] / max(clock.block(step, 1)["seconds"]))))
    names = list(steps)
    for round_ in range(options["blocks"]):
        turn = round_ % len(names)
        for name in names[turn:] + names[:turn]:
            with as_torch_has_it(name):
                blocks.setdefault(name, []).append(clock.quiet_block(steps[name], counts[name]))
    return counts


class _Clock:
    """Times blocks on both ranks.

    Args:
        cores: Rank 0's core and rank 1's.
        patience_s: Seconds to spend in all on waiting for other programs and on blocks they have disturbed.
    """

    def __init__(self, cores: list[int], patience_s: float) -> None:
        self._cores, self._patience_s = cores, patience_s

    def quiet_block(self, step: Callable[[], Any], steps: int) -> dict[str, Any]:
        """Return ``block``; one that others disturbed is measured again, whatever its time was."""
        while True:
            began = time.monotonic()
            if dist.get_rank() == 0 and self._patience_s > 0:
                wait_until_quiet(self._cores, began + self._patience_s)
                self._patience_s -= time.monotonic() - began - SETTLING
            step()  # what the way before left in the caches is not this one's to pay for
            began = time.monotonic()
            block = self.block(step, steps)
            again = torch.tensor([block["others"] > QUIET and self._patience_s > 0])
            dist.broadcast(again, src=0)
            if not again:
                return block
            self._patience_s -= time.monotonic() - began

    def block(self, step: Callable[[], Any], steps: int) -> dict[str, Any]:
        """Return the wall and processor seconds per step, of each rank, and the share of the cores others took."""
        dist.barrier()
        others, before = program_seconds(self._cores), resource.getrusage(resource.RUSAGE_SELF)
        began = time.perf_counter()
        for _ in range(steps):
            step()
        wall, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_SELF)
        user, system = after.ru_utime - before.ru_utime, after.ru_stime - before.ru_stime
        mine = torch.tensor([wall / steps, (user + system) / steps, user], dtype=torch.float64)
        everyones = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(everyones, mine)
        seconds, processor, users = torch.stack(everyones).T.tolist()
        others = program_seconds(self._cores) - others - sum(users)
        return {"seconds": seconds, "processor": processor, "others": max(0.0, others / wall / len(set(self._cores)))}


if __name__ == "__main__":
    main()
