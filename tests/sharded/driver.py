"""Runs cases on this process, one after the other, and writes what they noted, whole (rank 0).

python driver.py FOLDER [cases | cases:NAME,NAME | refusals | record | checkpoint action] ...
"""

from __future__ import annotations

import random
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

import nearlinear as nl
from nearlinear.testing.record import Recorder
from nearlinear.torch import session
from nearlinear.torch.sharded_tensors import whole

sys.path.insert(0, str(Path(__file__).parent))
from checkpoints import act

from refusals import REFUSALS

from cases import CASES, Net, start


def main(folder: str, parts: list[str]) -> None:
    torch.set_default_dtype(torch.float64)
    for part in parts:
        afresh()
        if part.startswith("cases"):
            run_cases(folder, part[6:].split(",") if ":" in part else list(CASES))
        elif part == "refusals":
            run_refusals()
        elif part == "record":
            record(Path(folder))
        else:
            act(Path(folder), part)


def record(folder: Path) -> None:
    """Leave the record of two steps that ``nearlinear check`` would compare."""
    torch.manual_seed(1)
    with Recorder(folder / f"record-{nl.world_size()}", steps=2):
        model = Net()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        for x, y in start(model, optimizer):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()


def run_refusals() -> None:
    for name, (words, fn) in REFUSALS.items():
        torch.manual_seed(0)
        try:
            fn()
            verdict = "was accepted"
        except nl.NearlinearError as error:
            told = str(error)
            verdict = "refused" if words in told and "\n" not in told and error.exit_code == 2 else f"said: {told}"
        except Exception as error:  # noqa: BLE001 - all are to be seen
            verdict = f"raised {type(error).__name__}: {error}"
        print(f"{name}: {verdict}", flush=True)


def afresh() -> None:
    """Let what comes be like a run of its own: its data come in an order of their own, too."""
    current = session()
    if current is not None:
        current._backward = current.summed = None
        current.loaders = 0


def run_cases(folder: str, names: list[str]) -> None:
    for name in names:
        torch.manual_seed(1)
        random.seed(1)
        np.random.seed(1)
        noted: dict[str, Any] = {}

        def note(key: str, value: Any, noted: dict[str, Any] = noted) -> None:
            assert key not in noted, key
            noted[key] = whole(torch.as_tensor(value)).detach().clone().numpy()

        began = time.perf_counter()
        try:
            CASES[name](note)
        except Exception:  # noqa: BLE001 - all cases are to be seen, also after one that fails
            traceback.print_exc()
        afresh()
        if nl.is_main():
            np.savez(Path(folder) / f"{name}.{nl.world_size()}.npz", **noted)
            print(f"{name}: {time.perf_counter() - began:.2f} s, {len(noted)} values", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
