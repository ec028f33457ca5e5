"""Trains in stages until rank 1 is killed."""

from __future__ import annotations

import os
import signal
from typing import Any

os.environ["KERAS_BACKEND"] = "tensorflow"

import keras
import numpy as np
from keras import layers

import nearlinear as nl

model = keras.Sequential([keras.Input((4,)), layers.Dense(8), layers.Dense(8), layers.Dense(1)])
model.compile("sgd", "mse")
model = nl.distribute(model, strategy="pipeline")


class Kill(keras.callbacks.Callback):
    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if batch == 3 and nl.rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)


model.fit(np.ones((80, 4)), np.ones((80, 1)), batch_size=8, verbose=0, callbacks=[Kill()])
