"""Holds the claims and losses of ``cases.py`` on this process; prints which held, and how the others failed."""

from __future__ import annotations

import itertools
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
from cases import CLAIMS, LOSSES, MAIN, X, check_loss, model, session


def hold(name: str, check: Callable[[], None]) -> None:
    torch.manual_seed(1)
    try:
        check()
        print(f"{name}: held", flush=True)
    except Exception:  # noqa: BLE001 - all claims are to be seen
        print(f"{name}: failed\n{traceback.format_exc()}", flush=True)
    session.barrier()


def main(names: list[str]) -> None:
    ranks = range(session.size)
    groups = [set(group) for n in (1, session.size) for group in itertools.combinations(ranks, n)]
    for name, compute in LOSSES.items():
        if not names or name in names:
            hold(name, lambda compute=compute: [check_loss(compute, group) for group in groups] and None)
    for name, check in CLAIMS.items():
        if not names or name in names:
            hold(name, check)
    total = model(X).sum()
    if MAIN:
        time.sleep(0.5)  # the others are at the end of their script by now
        print(f"the last line: {'held' if total.item() == X.sum().item() else 'failed'}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
