"""Runs what is to be refused on this process, one after the other, and prints on rank 0 what was said."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras

import nearlinear as nl

sys.path.insert(0, str(Path(__file__).parent))
from cases import CASES, mlp, points


def main(folder: str) -> None:
    for name, (_, case) in CASES.items():
        keras.utils.set_random_seed(0)
        said = "nothing"
        try:
            case()
        except nl.NearlinearError as error:
            said = str(error)
        (Path(folder) / f"{name}.{nl.rank()}.json").write_text(json.dumps(said))
    # After all that, this process still trains.
    keras.utils.set_random_seed(0)
    loss = nl.distribute(mlp()).fit(*points(), verbose=0).history["loss"]
    (Path(folder) / f"loss.{nl.rank()}.json").write_text(json.dumps(loss))


if __name__ == "__main__":
    main(sys.argv[1])
