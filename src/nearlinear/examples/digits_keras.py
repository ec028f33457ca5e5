"""Turning 1,500 scanned digits into a classifier with Keras: compile, fit, and the two lines marked (1) and (2).

python digits_keras.py                     one process
nearlinear run -n 2 digits_keras.py        two processes, the same history
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np
from keras import layers
from sklearn.datasets import load_digits

import nearlinear as nl  # (1)

TRAINING = 1500  # of 1,797 scans; the rest is held out


def scans() -> tuple[tuple[Any, Any], tuple[Any, Any]]:
    """Return the training and the held-out scans: images, shape ``(n, 8, 8, 1)``, and labels 0 to 9."""
    digits = load_digits()
    order = np.random.default_rng(0).permutation(len(digits.target))
    images = ((digits.images - 4.9) / 6.0)[order, :, :, None].astype(keras.config.floatx())
    labels = digits.target[order]
    return (images[:TRAINING], labels[:TRAINING]), (images[TRAINING:], labels[TRAINING:])


def cnn() -> keras.Model:
    """Build three convolutions and a dense layer, 113 thousand parameters, all of it smooth.

    At a kink (ReLU, max pooling) a rounding in the last bit can turn a gradient, and float32 losses drift apart.
    """
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Conv2D(32, 3, padding="same", activation="gelu"),
            layers.Conv2D(64, 3, padding="same", activation="gelu"),
            layers.AveragePooling2D(2),
            layers.Conv2D(128, 3, padding="same", activation="gelu"),
            layers.Flatten(),
            layers.Dense(10),
        ]
    )


class Rows(keras.callbacks.Callback):  # type: ignore[misc]
    """Notes the loss of every step alone, and not the epoch's mean so far, which is what Keras logs."""

    def __init__(self, batch_size: int) -> None:
        super().__init__()
        self.rows: list[dict[str, float]] = []
        self._batch_size, self._samples = batch_size, 0
        self._start = time.perf_counter()

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Begin an epoch."""
        self._samples = epoch * TRAINING

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Begin a step."""
        self.model.reset_metrics()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Note a step."""
        in_epoch = min((batch + 1) * self._batch_size, TRAINING)
        seconds = time.perf_counter() - self._start
        row = {"step": len(self.rows) + 1, "loss": float(logs["loss"]), "seconds": seconds}
        self.rows.append(row | {"samples": self._samples + in_epoch})


def main() -> None:
    """Train, and print loss and accuracy after every epoch."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--batch-size", type=int, default=64, help="scans per step, over all processes")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--float64", action="store_true", help="train in double precision")
    parser.add_argument("--record", type=Path, metavar="FILE", help="write step, loss and time as JSON lines")
    args = parser.parse_args()

    keras.utils.set_random_seed(args.seed)
    if args.float64:
        keras.config.set_floatx("float64")
    training, held_out = scans()
    model = cnn()
    steps = args.epochs * -(-TRAINING // args.batch_size)
    schedule = keras.optimizers.schedules.CosineDecay(
        args.lr / 25, steps, warmup_target=args.lr, warmup_steps=steps // 5
    )
    model.compile(
        keras.optimizers.SGD(schedule, momentum=0.9),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )

    model = nl.distribute(model)  # (2)

    rows = Rows(args.batch_size)
    for epoch in range(args.epochs):
        callbacks = [rows] if args.record else []
        fitted = model.fit(
            *training,
            batch_size=args.batch_size,
            initial_epoch=epoch,
            epochs=epoch + 1,
            validation_data=held_out,
            callbacks=callbacks,
            verbose=0,
        )
        if nl.is_main():
            loss, share = fitted.history["loss"][-1], fitted.history["val_accuracy"][-1]
            print(f"epoch {epoch + 1}  loss {loss:.4f}  accuracy {share:.1%}".replace("%", " %"), flush=True)
    if args.record and nl.is_main():
        args.record.write_text("".join(json.dumps(row) + "\n" for row in rows.rows))


if __name__ == "__main__":
    main()
