"""Trains, with as much address space as its shell allows (``ulimit -v``), a model that is made on the meta device.

Alone it is a plain loop, and the model is given its memory at once; as a rank of several it is a pipeline.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent.parent / "data_parallel"))

import torch
from held import status
from models import loss_of

import nearlinear as nl

from cases import adam_decoder


def main() -> None:
    """Train three steps and print how much address space that took, as a JSON line."""
    options = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    torch.manual_seed(options["seed"])
    with torch.device("meta"):
        model = adam_decoder(options["width"], options["layers"]).model
    task = adam_decoder(options["width"], 1)
    if options["steps"] and "RANK" not in os.environ:
        model = model.to_empty(device="cpu")
        model.apply(lambda each: each.reset_parameters() if hasattr(each, "reset_parameters") else None)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    if "RANK" in os.environ:
        nl.distribute(model, optimizer, strategy="pipeline")
    losses = []
    for _ in range(options["steps"]):
        optimizer.zero_grad()
        loss = loss_of(model(task.x), task.y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    parameters = sum(each.numel() for each in model.parameters())
    rank = int(os.environ.get("RANK", "0"))
    found = {"rank": rank, "peak": status("VmPeak"), "parameters": parameters, "losses": losses}
    print(json.dumps(found | {"threads": sum(1 for _ in Path("/proc/self/task").iterdir())}), flush=True)


if __name__ == "__main__":
    main()
