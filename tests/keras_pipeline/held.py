"""Trains a model in stages and says what each rank holds: a line of JSON per rank."""

from __future__ import annotations

import gc
import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ["KERAS_BACKEND"] = "tensorflow"

import keras
import numpy as np
import tensorflow as tf
from keras import layers

import nearlinear as nl


def size(variables: Any) -> int:
    return sum(int(np.prod(each.shape)) * tf.as_dtype(each.dtype).size for each in variables)


def main(folder: str) -> None:
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((64,)), *[layers.Dense(64, activation="relu") for _ in range(12)]])
    model.compile("adam", "mse", metrics=["mae"])
    model = nl.distribute(model, strategy=nl.Plan("pipeline", microbatches=2))
    x = np.random.default_rng(1).normal(size=(64, 64)).astype("float32")
    model.fit(x, x, epochs=2, validation_data=(x, x), verbose=0)
    model.save(Path(folder) / f"{nl.world_size()}.keras")
    gc.collect()
    live = {id(each): each for each in gc.get_objects() if isinstance(each, tf.Variable)}.values()
    everything = [*model.weights, *model.optimizer.variables]
    mine = [each for each in everything if isinstance(each._value, tf.Variable)]
    told = {"live": size(live), "share": size(mine), "all": size(everything), "parameters": model.count_params()}
    (Path(folder) / f"{nl.rank()}.json").write_text(json.dumps(told))


if __name__ == "__main__":
    main(sys.argv[1])
