"""One of several processes of a pipeline: what this rank holds between steps, against its share of the plan.

resident    what the kernel says the process took at most from the third step on, less what it took before the model
"""

from __future__ import annotations

import gc
import json
import sys
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parent.parent / "data_parallel"))

import torch
from models import loss_of
from torch import Tensor, nn

import nearlinear as nl
from nearlinear.core.graph import Graph
from nearlinear.torch.pipeline import train
from nearlinear.torch.pipeline.foreign import Foreign

from cases import adam_decoder

ADAM = 4  # numbers per parameter: itself, its gradient, two moments


def main() -> None:
    """Train a few steps and print what is held, as a JSON line."""
    options = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    torch.manual_seed(options["seed"])
    before = status("VmRSS")
    task = adam_decoder(options["width"], options["layers"])
    model, optimizer = task.model, torch.optim.Adam(task.model.parameters(), lr=1e-4)
    planned: list[tuple[Graph, list[int]]] = []
    planner = train.stages_of
    train.stages_of = lambda graph, *rest: planned.append((graph, planner(graph, *rest))) or planned[-1][1]
    whole = 4 * sum(each.numel() for each in model.parameters())
    nl.distribute(model, optimizer, strategy="pipeline")
    for step in range(4):
        if step == 2:
            Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew
        optimizer.zero_grad()
        loss = loss_of(model(task.x), task.y)
        loss.backward()
        optimizer.step()
    del loss
    resident = status("VmHWM") - before
    gc.collect()
    own = [each for each in model.parameters() if not isinstance(each, Foreign)]
    state = [value for each in own for value in optimizer.state.get(each, {}).values() if isinstance(value, Tensor)]
    held = stored([*own, *(each.grad for each in own if each.grad is not None), *state])
    everything = stored([each for each in gc.get_objects() if isinstance(each, Tensor)] + [p.grad for p in own])
    shares = [0.0] * nl.world_size()
    if planned:
        for operator, stage in zip(planned[0][0].operators, planned[0][1], strict=True):
            shares[stage] += ADAM * operator.parameter_bytes
    ours: dict[str, Any] = {"rank": nl.rank(), "held": held, "everything": everything, "resident": resident}
    print(json.dumps(ours | {"whole": ADAM * whole, "shares": shares}), flush=True)


def stored(tensors: list[Any]) -> int:
    """Return the bytes of memory of some tensors, each piece counted once."""
    found: dict[int, int] = {}
    for each in tensors:
        if isinstance(each, nn.Parameter | Tensor) and type(each) in (Tensor, nn.Parameter) and not each.is_meta:
            storage = each.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
    return sum(found.values())


def status(name: str) -> int:
    """Return a line of what the kernel knows of this process, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(name + ":"))


if __name__ == "__main__":
    main()
