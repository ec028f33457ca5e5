"""Runs the named cases on this process, one after the other, and writes what they noted (rank 0)."""

from __future__ import annotations

import random
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import numpy as np
import torch

import nearlinear as nl
from nearlinear.torch import session

sys.path.insert(0, str(Path(__file__).parent))
from cases import CASES


def main(folder: str, names: list[str]) -> None:
    torch.set_default_dtype(torch.float64)
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
            CASES[name](note)
        except Exception:  # noqa: BLE001 - all cases are to be seen, also after one that fails
            traceback.print_exc()
            failed.append(name)
        # All ranks are to agree to the last bit, whatever one process says.
        current = session()
        assert current is not None
        digests = current.all_gather_json({key: value.tobytes().hex()[:400] for key, value in noted.items()})
        for key in noted:
            assert all(other.get(key) == digests[0][key] for other in digests), f"ranks differ in {key} of {name}"
        current._backward = current.summed = None  # a run settles this once; the cases are runs of their own
        if nl.is_main():
            np.savez(Path(folder) / f"{name}.npz", **noted)
            print(f"{name}: {time.perf_counter() - began:.2f} s, {len(noted)} values", flush=True)
    sys.exit(f"failed: {', '.join(failed)}" if failed else 0)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:] or list(CASES))
