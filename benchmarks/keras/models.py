"""Three Keras models and the batches that they train on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Bench:
    """A model to be timed.

    Args:
        build: Builds it with the Keras that is given (``keras`` or ``tf_keras``).
        data: Draws so many samples and their labels.
        batch: Samples of a whole batch.
    """

    build: Callable[[Any], Any]
    data: Callable[[int], tuple[Any, Any]]
    batch: int


def _mlp(keras: Any) -> Any:
    layers = keras.layers
    hidden = [layers.Dense(1024, activation="relu") for _ in range(4)]
    return keras.Sequential([layers.Input((784,)), *hidden, layers.Dense(10)])


def _deep(keras: Any) -> Any:
    layers = keras.layers
    return keras.Sequential([layers.Input((784,)), *(layers.Dense(784, activation="relu") for _ in range(8))])


def _images(n: int) -> tuple[Any, Any]:
    draw = np.random.default_rng(0)
    return draw.normal(size=(n, 32, 32, 3)).astype("float32"), draw.integers(0, 10, n)


def _vectors(n: int) -> tuple[Any, Any]:
    draw = np.random.default_rng(0)
    return draw.normal(size=(n, 784)).astype("float32"), draw.integers(0, 10, n)


def _cnn(keras: Any) -> Any:
    layers = keras.layers
    model = [layers.Input((32, 32, 3))]
    for width in (32, 64, 128):
        model += [
            layers.Conv2D(width, 3, padding="same", activation="relu"),
            layers.Conv2D(width, 3, padding="same", activation="relu"),
            layers.MaxPooling2D(),
        ]
    return keras.Sequential([*model, layers.Flatten(), layers.Dense(256, activation="relu"), layers.Dense(10)])


def _transformer(keras: Any) -> Any:
    layers = keras.layers
    tokens = layers.Input((64,), dtype="int32")
    hidden = layers.Embedding(2000, 128)(tokens)
    for _ in range(2):
        seen = layers.LayerNormalization()(hidden)
        hidden = layers.Add()([hidden, layers.MultiHeadAttention(4, 32)(seen, seen)])
        seen = layers.LayerNormalization()(hidden)
        hidden = layers.Add()([hidden, layers.Dense(128)(layers.Dense(512, activation="gelu")(seen))])
    return keras.Model(tokens, layers.Dense(10)(layers.GlobalAveragePooling1D()(hidden)))


def _sentences(n: int) -> tuple[Any, Any]:
    draw = np.random.default_rng(0)
    return draw.integers(0, 2000, (n, 64)), draw.integers(0, 10, n)


MODELS = {
    "mlp": Bench(_mlp, _vectors, 1024),
    "cnn": Bench(_cnn, _images, 128),
    "transformer": Bench(_transformer, _sentences, 64),
    "deep": Bench(_deep, _vectors, 4096),  # eight layers alike, for the pipeline
}
