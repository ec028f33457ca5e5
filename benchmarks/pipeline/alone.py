"""One process: the model itself against its captured graph, turn about step by step, as JSON lines.

Both train the same parameters with the same optimizer, so that they differ in what runs the forward and the backward
pass alone: the model's own code, or the executor of a pipeline with one stage and one microbatch.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parent.parent / "data_parallel"))

import torch
from models import MODELS, loss_of
from torch import Tensor, nn

from nearlinear.torch.capture import capture
from nearlinear.torch.capture.batch import Call
from nearlinear.torch.pipeline.executor import Executor, State
from nearlinear.torch.pipeline.stages import split

SHARE = 4  # of the batches of benchmarks/data_parallel: what is added to a step then shows fourfold


def main() -> None:
    """Measure what the first argument, a JSON object, asks for."""
    options = json.loads(sys.argv[1])
    os.sched_setaffinity(0, {options["cores"][0]})
    torch.set_num_threads(1)
    for name in ("gpt", "cnn", "mlp"):
        torch.manual_seed(options["seed"])
        task = MODELS[name]()
        samples = max(4, task.batch // (SHARE if options["seconds"] > 0.5 else 16))
        x, y = task.x[:samples].clone(), task.y[:samples].clone()
        found: dict[str, Any] = {"of": name, "samples": samples}
        print(json.dumps(found | _measure(task.model, x, y, options["alone_s"])), flush=True)


def _measure(model: nn.Module, x: Tensor, y: Tensor, seconds: float) -> dict[str, Any]:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    passes = {"model": lambda: _by_model(model, x, y), "graph": _by_graph(model, x, y)}
    spent: dict[str, list[tuple[float, float]]] = {name: [] for name in passes}
    until, turn = time.perf_counter() + seconds, 0
    for name in passes:
        passes[name]()
    while time.perf_counter() < until or turn < 6:
        for name in ("model", "graph") if turn % 2 else ("graph", "model"):
            wall, processor = time.perf_counter(), time.process_time()
            optimizer.zero_grad()
            passes[name]()
            optimizer.step()
            spent[name].append((time.perf_counter() - wall, time.process_time() - processor))
        turn += 1
    return {name: {"seconds": [a for a, _ in each], "processor": [b for _, b in each]} for name, each in spent.items()}


def _by_model(model: nn.Module, x: Tensor, y: Tensor) -> None:
    loss_of(model(x), y).backward()  # type: ignore[no-untyped-call]


def _by_graph(model: nn.Module, x: Tensor, y: Tensor) -> Callable[[], None]:
    captured, cpu = capture(model, (x,), {}), torch.device("cpu")
    assert captured.program is not None, captured.notes
    cut = split(captured.program, {name: 0 for names in captured.nodes for name in names}, 1)
    dims = [Call.of((x,), {}, 0).along(x)]
    executor = Executor(cut, [0], 0, State(model, captured.program), dims, cpu)

    def passes() -> None:
        run = executor.begin([x], len(x), 1, training=True)
        out = run.forward()[0].detach().requires_grad_()
        loss_of(out, y).backward()  # type: ignore[no-untyped-call]
        run.backward([out.grad], {0})

    return passes


if __name__ == "__main__":
    main()
