"""Keras models with one difficulty each, trained by ``fit``; a pipeline must have the numbers of one process.

A case is a function of ``note(name, value)``: it trains and notes what must agree. On one process it is the plain
script.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

import nearlinear as nl

Note = Callable[[str, Any], None]
CASES: dict[str, Callable[[Note], None]] = {}
microbatches = 4


def case(fn: Callable[[Note], None]) -> Callable[[Note], None]:
    CASES[fn.__name__] = fn
    return fn


def alone(fn: Callable[[Note], None]) -> Callable[[Note], None]:
    """A case that has the numbers of one process where the batch is one microbatch."""
    CASES[fn.__name__] = fn
    return fn


def distributed(model: keras.Model, pieces: int | None = None) -> keras.Model:
    return nl.distribute(model, strategy=nl.Plan("pipeline", microbatches=pieces or microbatches))


def numbers(samples: int, *shape: int, seed: int = 3) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).normal(size=(samples, *shape))


def words(samples: int, length: int, seed: int = 3) -> np.ndarray[Any, Any]:
    """Return numbers of words; some sentences end early, in zeros."""
    generator = np.random.default_rng(seed)
    found = generator.integers(1, 12, (samples, length))
    found[np.arange(length) >= generator.integers(2, length + 1, (samples, 1))] = 0
    return found.astype("int32")


def classes(samples: int, *shape: int, seed: int = 4) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).integers(0, 3, (samples, *shape))


def cross_entropy() -> keras.losses.Loss:
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def adam(**options: Any) -> keras.optimizers.Optimizer:
    return keras.optimizers.Adam(0.01, epsilon=1e-3, **options)


def train(note: Note, model: keras.Model, x: Any, y: Any, vx: Any, vy: Any, **options: Any) -> None:
    """Three epochs with validation, then what the script may ask for."""
    model = distributed(model)
    history = model.fit(
        x, y, **{"batch_size": 10, "epochs": 3, "validation_data": (vx, vy), "verbose": 0, **options}
    ).history
    for name, values in history.items():
        note(f"history {name}", values)
    after(note, model, vx, vy)


def after(note: Note, model: keras.Model, vx: Any, vy: Any) -> None:
    note("evaluated", model.evaluate(vx, vy, batch_size=25, verbose=0))
    for number, each in enumerate(keras.tree.flatten(model.predict(vx, batch_size=25, verbose=0))):
        note(f"predicted {number}", each)
    for number, each in enumerate(model.get_weights()):
        note(f"weight {number}", each)
    note("iterations", float(model.optimizer.iterations))


def mlp(depth: int = 4, width: int = 8, **options: Any) -> keras.Model:
    inputs = keras.Input((6,))
    x = layers.Dense(width, activation="tanh")(inputs)
    for _ in range(depth - 1):
        x = layers.Add()([x, layers.Dense(width, activation="tanh", **options)(x)])
    return keras.Model(inputs, layers.Dense(3)(x))


DATA = numbers(37, 6), classes(37), numbers(101, 6, seed=5), classes(101, seed=6)


@case
def mlp_with_skips(note: Note) -> None:
    model = mlp()
    model.compile(adam(), cross_entropy(), metrics=["accuracy"])
    stop = keras.callbacks.EarlyStopping("val_loss", patience=1, restore_best_weights=True, start_from_epoch=1)
    train(note, model, *DATA, callbacks=[stop], epochs=5)


@case
def sequential_that_is_built_by_its_first_batch(note: Note) -> None:
    model = keras.Sequential([layers.Dense(8, activation="relu"), layers.Dense(8, activation="relu"), layers.Dense(3)])
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9, clipnorm=0.5), cross_entropy(), metrics=["accuracy"])
    train(note, model, *DATA)


@alone
def convolutions_with_batch_normalization(note: Note) -> None:
    model = keras.Sequential([keras.Input((6, 6, 2))])
    for filters in (4, 6):
        for each in (layers.Conv2D(filters, 3, use_bias=False), layers.BatchNormalization(), layers.ReLU()):
            model.add(each)
    model.add(layers.Flatten())
    model.add(layers.Dense(3))
    model.compile(adam(), cross_entropy(), metrics=["accuracy"])
    x, vx = numbers(37, 6, 6, 2), numbers(101, 6, 6, 2, seed=5)
    train(note, model, x, classes(37), vx, classes(101, seed=6))


@case
def convolutions(note: Note) -> None:
    model = keras.Sequential([keras.Input((6, 6, 2)), layers.Conv2D(4, 3, activation="relu"), layers.Conv2D(6, 3)])
    model.add(layers.GlobalAveragePooling2D())
    model.add(layers.Dense(3))
    model.compile(adam(), cross_entropy(), metrics=["accuracy"])
    x, vx = numbers(37, 6, 6, 2), numbers(101, 6, 6, 2, seed=5)
    train(note, model, x, classes(37), vx, classes(101, seed=6))


@case
def transformer_with_masks_and_global_clipping(note: Note) -> None:
    inputs = keras.Input((7,), dtype="int32")
    x = layers.Embedding(12, 8, mask_zero=True)(inputs)
    for _ in range(2):
        x = layers.LayerNormalization()(x + layers.MultiHeadAttention(2, 4)(x, x))
        x = layers.LayerNormalization()(x + layers.Dense(8)(layers.Dense(16, activation="gelu")(x)))
    model = keras.Model(inputs, layers.Dense(3)(x))  # of every word: the loss counts those that the mask leaves
    model.compile(adam(global_clipnorm=0.05), cross_entropy(), metrics=["accuracy"])
    train(note, model, words(37, 7), classes(37, 7), words(101, 7, seed=5), classes(101, 7, seed=6))


@case
def lstm_over_words(note: Note) -> None:
    inputs = keras.Input((5,), dtype="int32")
    x = layers.Embedding(12, 6, mask_zero=True)(inputs)
    x = layers.LSTM(6)(layers.LSTM(6, return_sequences=True)(x))
    model = keras.Model(inputs, layers.Dense(3)(x))
    model.compile(keras.optimizers.RMSprop(0.01, epsilon=1e-3), cross_entropy(), metrics=["accuracy"])
    train(note, model, words(37, 5), classes(37), words(101, 5, seed=5), classes(101, seed=6))


@case
def two_inputs_two_outputs_a_shared_layer_and_a_nested_model(note: Note) -> None:
    left, right = keras.Input((6,), name="left"), keras.Input((6,), name="right")
    shared = layers.Dense(6, activation="tanh", name="shared")
    nested = keras.Sequential([keras.Input((6,)), layers.Dense(6, activation="tanh"), layers.Dense(6)], name="nested")
    u, v = shared(left), shared(right)
    w = nested(u) * v
    outputs = {"number": layers.Dense(1)(layers.Concatenate()([u, w])), "kind": layers.Dense(3)(nested(shared(w)))}
    model = keras.Model({"left": left, "right": right}, outputs)
    model.compile(
        adam(), {"number": "mse", "kind": cross_entropy()}, loss_weights={"number": 0.3, "kind": 1.0},
        metrics={"kind": ["accuracy"]}, weighted_metrics={"number": ["mae"]},
    )  # fmt: skip

    def data(samples: int, seed: int) -> tuple[dict[str, Any], dict[str, Any]]:
        x = {"left": numbers(samples, 6, seed=seed), "right": numbers(samples, 6, seed=seed + 1)}
        return x, {"number": numbers(samples, 1, seed=seed + 2), "kind": classes(samples, seed=seed + 3)}

    train(note, model, *data(37, 10), *data(101, 20), sample_weight=np.linspace(0.5, 2.0, 37))


@keras.saving.register_keras_serializable("tests")
class Subclassed(keras.Model):
    """A model whose ``call`` is Python, with layers, operations and a part that is its own layer."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.first, self.second = layers.Dense(8, activation="tanh"), layers.Dense(8)
        self.drop, self.last = layers.Dropout(0.0), layers.Dense(3)

    def call(self, x: Any, training: bool | None = None) -> Any:
        y = self.drop(self.first(x), training=training)
        both = ops.concatenate([y, ops.sin(self.second(y)) * 2.0], axis=-1)
        return self.last(both)


@case
def subclassed_model(note: Note) -> None:
    model = Subclassed()
    model.compile(adam(), cross_entropy(), metrics=["accuracy"])
    train(note, model, *DATA, class_weight={0: 1.0, 1: 3.0, 2: 0.2})


@case
def regularizers_of_weights_and_of_activity(note: Note) -> None:
    model = mlp(kernel_regularizer=keras.regularizers.L2(0.1), activity_regularizer=keras.regularizers.L1(0.05))
    model.compile(adam(global_clipnorm=0.1), cross_entropy())
    train(note, model, *DATA)


class Tied(layers.Layer):
    """Words from vectors, with the weights of an embedding."""

    def __init__(self, embedding: layers.Embedding) -> None:
        super().__init__()
        self.embedding = embedding

    def call(self, x: Any) -> Any:
        return ops.matmul(x, ops.transpose(self.embedding.embeddings))


@case
def embedding_whose_weights_the_last_layer_uses(note: Note) -> None:
    inputs, embedding = keras.Input((5,), dtype="int32"), layers.Embedding(12, 6, embeddings_regularizer="l2")
    x = layers.Dense(6, activation="tanh")(layers.Dense(9, activation="tanh")(embedding(inputs)))
    model = keras.Model(inputs, Tied(embedding)(x))
    model.compile(adam(global_clipnorm=0.1), cross_entropy())
    x, vx = words(37, 5), words(101, 5, seed=5)
    train(note, model, x, x, vx, vx)


@case
def embedding_that_two_stages_look_up(note: Note) -> None:
    first, second = keras.Input((5,), dtype="int32"), keras.Input((5,), dtype="int32")
    embedding = layers.Embedding(12, 6)
    x = layers.Dense(6, activation="tanh")(layers.Dense(9, activation="tanh")(embedding(first)))
    x = layers.Dense(6, activation="tanh")(x + embedding(second))
    model = keras.Model([first, second], layers.Dense(3)(layers.Flatten()(x)))
    model.compile(adam(), cross_entropy())
    x, vx = [words(37, 5), words(37, 5, seed=8)], [words(101, 5, seed=5), words(101, 5, seed=9)]
    train(note, model, x, classes(37), vx, classes(101, seed=6))


@case
def accumulation_moving_averages_and_a_schedule(note: Note) -> None:
    model = mlp()
    rate = keras.optimizers.schedules.ExponentialDecay(0.02, 3, 0.8)
    optimizer = keras.optimizers.AdamW(
        rate, epsilon=1e-3, gradient_accumulation_steps=3, global_clipnorm=0.2, use_ema=True, ema_momentum=0.8,
        ema_overwrite_frequency=2,
    )  # fmt: skip
    model.compile(optimizer, cross_entropy())
    train(note, model, *DATA)


@case
def frozen_layers_and_a_second_compile(note: Note) -> None:
    model = mlp()
    for layer in model.layers[-3:]:
        layer.trainable = False
    model.compile(adam(global_clipnorm=0.1), cross_entropy())
    model = distributed(model)
    x, y, vx, vy = DATA
    note("first loss", model.fit(x, y, batch_size=10, verbose=0).history["loss"])
    for layer in model.layers:
        layer.trainable = True
    model.compile(keras.optimizers.Lion(1e-3), cross_entropy(), metrics=["accuracy"], steps_per_execution=3)
    note("second loss", model.fit(x, y, batch_size=10, epochs=2, verbose=0).history["loss"])
    after(note, model, vx, vy)


@case
def batches_by_hand_and_from_a_generator(note: Note) -> None:
    model = mlp()
    model.compile(keras.optimizers.Adafactor(0.05), cross_entropy(), weighted_metrics=["accuracy"])
    model = distributed(model)
    x, y, vx, vy = DATA
    note("batch", model.train_on_batch(x[:9], y[:9], sample_weight=np.linspace(0.0, 2.0, 9)))
    note("tested", model.test_on_batch(vx[:7], vy[:7]))
    note("guessed", model.predict_on_batch(vx[:5]))

    def batches() -> Any:
        for begin in range(0, 37, 10):
            yield x[begin : begin + 10], y[begin : begin + 10]

    kinds = tf.TensorSpec((None, 6), tf.float64), tf.TensorSpec((None,), tf.int64)
    data = tf.data.Dataset.from_generator(batches, output_signature=kinds)
    note("loss", model.fit(data, epochs=2, verbose=0).history["loss"])
    note("more", model.fit(batches(), verbose=0).history["loss"])
    fixed = tf.data.Dataset.from_tensor_slices((x, y)).batch(12, drop_remainder=True)
    note("fixed", model.fit(fixed, epochs=2, validation_data=(vx, vy), verbose=0).history["val_loss"])
    after(note, model, vx, vy)


@keras.saving.register_keras_serializable("tests")
class OwnLoss(keras.Model):
    """A Functional model that computes its loss and a metric itself."""

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):  # type: ignore[no-untyped-def]
        error = ops.mean(ops.square(ops.logsumexp(y_pred, axis=0)))  # no mean over samples
        return error + ops.sum(self.losses) + ops.mean(ops.square(ops.mean(x, axis=-1) - y_pred[:, 0]))

    def compute_metrics(self, x, y, y_pred, sample_weight=None):  # type: ignore[no-untyped-def]
        return {**super().compute_metrics(x, y, y_pred, sample_weight), "largest": ops.max(y_pred)}


@case
def loss_and_metrics_of_the_models_own(note: Note) -> None:
    inputs = keras.Input((6,))
    x = layers.Dense(8, activation="tanh", kernel_regularizer="l1")(layers.Dense(8, activation="tanh")(inputs))
    model = OwnLoss(inputs, layers.Dense(3)(x))
    model.compile(adam())
    train(note, model, *DATA)


class Adding(layers.Layer):
    def call(self, x: Any) -> Any:
        self.add_loss(0.1 * ops.sqrt(ops.mean(ops.square(x))))
        return x


@alone
def layer_that_adds_a_loss(note: Note) -> None:
    model = keras.Sequential([keras.Input((6,)), layers.Dense(8, activation="tanh"), Adding(), layers.Dense(3)])
    model.compile(adam(), cross_entropy())
    train(note, model, *DATA)


@alone
def dropout(note: Note) -> None:
    model = keras.Sequential([keras.Input((6,)), layers.Dense(8, activation="tanh"), layers.Dropout(0.4, seed=1)])
    for each in (layers.Dense(8, activation="tanh"), layers.GaussianNoise(0.2, seed=2), layers.Dense(3)):
        model.add(each)
    model.compile(adam(), cross_entropy())
    train(note, model, *DATA)


@case
def saved_and_gone_on_with(note: Note) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(agreed(folder))
        model = mlp()
        model.compile(adam(), cross_entropy())
        model = distributed(model)
        x, y, vx, vy = DATA
        best = keras.callbacks.ModelCheckpoint(str(path / "best" / "of.weights.h5"), "val_loss", save_best_only=True,
                                               save_weights_only=True)  # fmt: skip
        model.fit(x, y, batch_size=10, epochs=2, validation_data=(vx, vy), callbacks=[best], verbose=0)
        model.save(path / "model.keras")
        model.fit(x, y, batch_size=10, epochs=1, shuffle=False, verbose=0)
        after(note, model, vx, vy)
        model.summary(print_fn=lambda line: None)
        model.load_weights(path / "best" / "of.weights.h5")
        note("best", model.evaluate(vx, vy, batch_size=25, verbose=0))
        again = keras.saving.load_model(path / "model.keras")  # a plain file: by itself, and distributed again
        note("as saved", again.evaluate(vx, vy, batch_size=25, verbose=0))
        again = distributed(again)
        again.fit(x, y, batch_size=10, epochs=1, shuffle=False, verbose=0)
        for number, each in enumerate(again.get_weights()):
            note(f"weight {number} again", each)
        agreed("read")


def agreed(value: str) -> str:
    """Return rank 0's value, once every rank is here."""
    from nearlinear.tensorflow import session

    current = session()
    return value if current is None else str(current.all_gather_json(value)[0])
