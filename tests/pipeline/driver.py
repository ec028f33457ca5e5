"""Runs the named cases on this process, one after the other, and writes what they noted (rank 0)."""

from __future__ import annotations

import gc
import random
import sys
import time
import traceback
from hashlib import md5
from pathlib import Path
from typing import Any

import numpy as np
import torch

import nearlinear as nl
from nearlinear.torch import session
from nearlinear.torch.pipeline import cuts

sys.path.insert(0, str(Path(__file__).parent))
import cases
from cases import CASES


def families() -> dict[str, Any]:
    from families import FAMILIES  # takes a library that other cases do not need

    return FAMILIES


def main(folder: str, plan: str, steps: int, names: list[str]) -> None:
    torch.set_default_dtype(torch.float64)
    cases.plan, cases.steps_each = nl.Plan.from_json(plan), steps
    cuts._PROFILE_S = 0.1  # where the cuts are does not matter here
    failed = []
    for name in names:
        torch.manual_seed(1)
        random.seed(1)
        np.random.seed(1)
        noted: dict[str, Any] = {}

        def note(key: str, value: Any, noted: dict[str, Any] = noted) -> None:
            assert key not in noted, key
            noted[key] = torch.as_tensor(value).detach().clone().numpy()

        began = time.perf_counter()
        try:
            (CASES.get(name) or families()[name])(note)
        except Exception:  # noqa: BLE001 - all cases are to be seen, also after one that fails
            traceback.print_exc()
            failed.append(name)
        # All ranks are to agree to the last bit, whatever one process says.
        current = session()
        assert current is not None
        digests = current.all_gather_json({key: md5(value.tobytes()).hexdigest() for key, value in noted.items()})
        for key, digest in digests[0].items():
            assert all(other.get(key, digest) == digest for other in digests), f"ranks differ in {key} of {name}"
        # A run settles this once; the cases are runs of their own.
        current._backward = current.summed = None
        current.loaders = 0
        gc.collect()
        if nl.is_main():
            np.savez(Path(folder) / f"{name}.npz", **noted)
            print(f"{name}: {time.perf_counter() - began:.2f} s, {len(noted)} values", flush=True)
    sys.exit(f"failed: {', '.join(failed)}" if failed else 0)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4:] or list(CASES))
