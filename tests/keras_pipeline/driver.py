"""Runs the named cases on this process, one after the other, and writes what they noted (rank 0)."""

from __future__ import annotations

import gc
import os
import sys
import time
import traceback
from hashlib import md5
from pathlib import Path
from typing import Any

os.environ["KERAS_BACKEND"] = "tensorflow"

import keras
import numpy as np
import tensorflow as tf

sys.path.insert(0, str(Path(__file__).parent))
from nearlinear.runtime.environment import world_from

import cases
from cases import CASES


def main(folder: str, microbatches: int, names: list[str]) -> None:
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})  # takes longer than it saves here
    keras.config.set_floatx("float64")
    cases.microbatches = microbatches
    world, failed = world_from(), []
    if world.size > 1:
        from nearlinear.tensorflow import session
        from nearlinear.tensorflow.pipeline import first_batch

        first_batch._BUDGET_S = 0.1  # where the cuts are does not matter here
    for name in names:
        keras.backend.clear_session()
        keras.utils.set_random_seed(1)
        noted: dict[str, Any] = {}

        def note(key: str, value: Any, noted: dict[str, Any] = noted) -> None:
            assert key not in noted, key
            noted[key] = np.array(value, dtype=np.float64)

        began = time.perf_counter()
        try:
            CASES[name](note)
        except Exception:  # noqa: BLE001 - all cases are to be seen, also after one that fails
            traceback.print_exc()
            failed.append(name)
        # All ranks are to agree to the last bit, whatever one process says.
        if world.size > 1:
            current = session()
            assert current is not None
            digests = current.all_gather_json({key: md5(value.tobytes()).hexdigest() for key, value in noted.items()})
            for key, digest in digests[0].items():
                assert all(other.get(key, digest) == digest for other in digests), f"ranks differ in {key} of {name}"
        gc.collect()
        if world.rank == 0:
            np.savez(Path(folder) / f"{name}.{world.size}.{microbatches}.npz", **noted)
            print(f"{name}: {time.perf_counter() - began:.2f} s, {len(noted)} values", flush=True)
    sys.exit(f"failed: {', '.join(failed)}" if failed else 0)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3:] or list(CASES))
