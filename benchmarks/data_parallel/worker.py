"""One of two processes on one link: runs every treatment of every model in turn and prints the times as JSON lines.

A block is a few steps of one treatment; a round is one block of each, and the order turns from round to round:

    round 0    one  half  in step  all-reduce  nearlinear  ddp  accelerate
    round 1    half  in step  all-reduce  nearlinear  ddp  accelerate  one
    ...

    one           rank 0 trains on the whole batch, rank 1 waits                       seconds per step, rank 0's
    half          both train on their halves, nothing is exchanged                     seconds per step, of each
    in step       as half, but whoever is first waits for the other after each step    seconds per step
    all-reduce    nothing but one all-reduce of as many bytes as there are gradients   seconds, the slower rank's
    a rival       both train on their halves, together                                 seconds per step, the slower's
"""

from __future__ import annotations

import functools
import json
import os
import resource
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from cores import QUIET, SETTLING, program_seconds, wait_until_quiet
from models import MODELS, Task
from rivals import Training, as_if_alone, start
from torch import Tensor

WARM_UP = 3  # buckets are laid out, links measured and memory is found in the first steps


def main() -> None:
    """Measure what the first argument, a JSON object, asks for."""
    options = json.loads(sys.argv[1])
    rank = int(os.environ["RANK"])
    os.sched_setaffinity(0, {options["cores"][rank]})
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    clock = _Clock(options["cores"], options["patience"])
    for name in options["models"]:
        torch.manual_seed(options["seed"])
        task = MODELS[name]()
        blocks: dict[str, list[dict[str, Any]]] = {}
        steps: dict[str, int] = {}
        for placement in range(options["placements"]):
            # Where a model lies in memory is worth some percent for as long as it lives, and the first to be made
            # lies best: so all are made anew, in another order.
            names = options["rivals"][placement:] + options["rivals"][:placement]
            rivals = [start(rival, task) for rival in names]
            _require_equal_losses(rivals, *task.half(rank))
            steps = _measure(_treatments(task, rivals, rank), options, clock, blocks)
        if rank == 0:
            about = {"model": name, "batch": task.batch, "parameters": task.parameters}
            print(json.dumps({**about, "steps": steps, "blocks": blocks}), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def _treatments(task: Task, rivals: list[Training], rank: int) -> dict[str, Callable[[], Any]]:
    """Return what takes one step of each treatment."""
    plain, message, token = start("plain", task), torch.zeros(task.parameters), torch.zeros(1)
    x, y = task.half(rank)

    def in_step() -> None:
        plain.step(x, y)
        dist.all_reduce(token)

    treatments: dict[str, Callable[[], Any]] = {
        "one": lambda: plain.step(task.x, task.y) if rank == 0 else None,
        "half": lambda: plain.step(x, y),
        "in step": in_step,
        "all-reduce": lambda: dist.all_reduce(message),
    }
    for rival in rivals:
        treatments[rival.name] = functools.partial(rival.step, x, y)
    return treatments


def _require_equal_losses(rivals: list[Training], x: Tensor, y: Tensor) -> None:
    """Take the first steps, and check that all rivals come to the same losses: that they do the same work."""
    losses = []
    for rival in rivals:
        with as_if_alone(rival.name):
            losses.append([float(rival.step(x, y)) for _ in range(WARM_UP)])
    for rival, theirs in zip(rivals, losses, strict=True):
        for step, (loss, reference) in enumerate(zip(theirs, losses[0], strict=True)):
            if abs(loss - reference) > 1e-4 * abs(reference):
                raise SystemExit(
                    f"after {step} steps the loss is {loss:.6f} under {rival.name} and {reference:.6f} under "
                    f"{rivals[0].name}: they do not do the same work, so their times cannot be compared"
                )


def _measure(
    treatments: dict[str, Callable[[], Any]],
    options: dict[str, Any],
    clock: _Clock,
    blocks: dict[str, list[dict[str, Any]]],
) -> dict[str, int]:
    """Add blocks of every treatment, and return how many steps each of them has."""
    steps, rivals = {}, options["rivals"]
    for name, step in treatments.items():
        with as_if_alone(name):
            step()
            steps[name] = max(2, min(200, round(options["seconds"] / max(clock.block(step, 1)["seconds"]))))
    steps |= dict.fromkeys(rivals, sorted(steps[rival] for rival in rivals)[len(rivals) // 2])
    names = list(treatments)
    for round_ in range(options["blocks"]):
        turn = round_ % len(names)
        for name in names[turn:] + names[:turn]:
            with as_if_alone(name):
                blocks.setdefault(name, []).append(clock.quiet_block(treatments[name], steps[name]))
    return steps


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
            step()  # what the treatment before left in the caches is not this one's to pay for
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
