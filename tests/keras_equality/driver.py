"""Runs the named cases on this process, one after the other, and writes what they noted (rank 0)."""

from __future__ import annotations

import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np

import nearlinear as nl
from nearlinear.tensorflow import session

sys.path.insert(0, str(Path(__file__).parent))
from cases import CASES


def main(folder: str, names: list[str]) -> None:
    keras.config.set_floatx("float64")
    failed = []
    for name in names:
        keras.utils.clear_session()
        keras.utils.set_random_seed(1)
        noted: dict[str, Any] = {}

        def note(key: str, value: Any, noted: dict[str, Any] = noted) -> None:
            assert key not in noted, key
            noted[key] = np.array(value)

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
            if not all(other.get(key) == digests[0][key] for other in digests):
                print(f"ranks differ in {key} of {name}", flush=True)
                failed.append(name)
                break
        current._last, current.summed, current.weight = None, False, None  # the cases are runs of their own
        if nl.is_main() and name not in failed:
            np.savez(
                Path(folder) / f"{name}.{nl.world_size()}.npz", **{k.replace("/", "|"): v for k, v in noted.items()}
            )
            print(f"{name}: {time.perf_counter() - began:.2f} s, {len(noted)} values", flush=True)
    sys.exit(f"failed: {', '.join(failed)}" if failed else 0)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:] or list(CASES))
