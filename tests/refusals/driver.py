"""Runs every refusal on this process; prints the ones that were not refused in the right words."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import torch
from torch import nn

import nearlinear as nl

sys.path.insert(0, str(Path(__file__).parent))


def main(module: str, strategy: str) -> None:
    cases = importlib.import_module(module).CASES
    nl.distribute(nn.Linear(1, 1), strategy=strategy)
    for name, (words, fn) in cases.items():
        torch.manual_seed(0)
        try:
            fn()
            verdict = "was accepted"
        except nl.NearlinearError as error:
            told = str(error)
            verdict = "refused" if words in told and "\n" not in told and error.exit_code == 2 else f"said: {told}"
        except Exception as error:  # noqa: BLE001 - all cases are to be seen
            verdict = f"raised {type(error).__name__}: {error}"
        print(f"{name}: {verdict}", flush=True)


if __name__ == "__main__":
    main(*(sys.argv[1:] or ("cases", "data")))
