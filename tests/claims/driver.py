"""Holds every claim on this process; prints which held, and how the others failed."""

from __future__ import annotations

import random
import sys
import traceback
from pathlib import Path

import numpy as np
import torch
from torch import nn

import nearlinear as nl

sys.path.insert(0, str(Path(__file__).parent))
from cases import CLAIMS


def main(names: list[str]) -> None:
    nl.distribute(nn.Linear(1, 1))
    for name in names or list(CLAIMS):
        torch.manual_seed(1 + nl.rank() if "dropout" in name else 1)
        random.seed(1)
        np.random.seed(1)
        try:
            CLAIMS[name]()
            print(f"{name}: held", flush=True)
        except Exception:  # noqa: BLE001 - all claims are to be seen
            print(f"{name}: failed\n{traceback.format_exc()}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
