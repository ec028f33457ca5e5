"""What users of Keras get wrong, and the words that they are told; run on two processes."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers

import nearlinear as nl

CASES: dict[str, tuple[str, Callable[[], None]]] = {}


def refused(words: str) -> Callable[[Callable[[], None]], Callable[[], None]]:
    """Register a case that ends in an error with these words."""

    def register(function: Callable[[], None]) -> Callable[[], None]:
        CASES[function.__name__] = words, function
        return function

    return register


def mlp(width: int = 8, compiled: bool = True, **options: Any) -> Any:
    model = keras.Sequential([keras.Input((10,)), layers.Dense(width, activation="tanh"), layers.Dense(4)])
    if compiled:
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True), **options)
    return model


def points(n: int = 24, seed: int = 0) -> Any:
    draw = np.random.default_rng(seed)
    return draw.normal(size=(n, 10)), draw.integers(0, 4, n)


@refused(r"the model is not compiled and no optimizer was given: call model.compile\(...\) before")
def a_model_that_is_not_compiled() -> None:
    nl.distribute(mlp(compiled=False))


@refused("this model was distributed before; call nl.distribute once, after compile")
def a_model_twice() -> None:
    nl.distribute(nl.distribute(mlp()))


@refused("the model belongs to a tf.distribute strategy; take `with strategy.scope")
def a_strategy_scope() -> None:
    with tf.distribute.OneDeviceStrategy("/cpu:0").scope():
        nl.distribute(mlp())


@refused("a Keras pipeline does not make activations again; leave recompute out of the plan")
def activations_made_again() -> None:
    nl.distribute(mlp(), strategy=nl.Plan("pipeline", recompute=True))


@refused("strategy 'sharded' is for PyTorch; Keras models train by 'data' or 'pipeline'")
def a_strategy_of_pytorch() -> None:
    nl.distribute(mlp(), strategy="sharded")


@refused("unknown strategy 'fast'; choose one of: auto, data")
def an_unknown_strategy() -> None:
    nl.distribute(mlp(), strategy="fast")


@refused("weight is 3; it must be a function of the batch, or 'sum'")
def a_weight_that_is_a_number() -> None:
    nl.distribute(mlp(), weight=3)


@refused("weight='sum' with a compiled loss, which says itself whether it is a sum or a mean; leave weight out")
def a_sum_of_a_compiled_loss() -> None:
    nl.distribute(mlp(), weight="sum")


@refused("the model has sparse inputs, whose gradients come as rows that ranks cannot join")
def sparse_inputs() -> None:
    inputs = keras.Input((10,), sparse=True)
    model = keras.Model(inputs, layers.Dense(4)(inputs))
    model.compile("adam", "mse")
    nl.distribute(model)


@refused("the tensors of a batch differ in their first dimension, so which are its samples cannot be told")
def a_tensor_that_belongs_to_no_sample() -> None:
    x, y = points()
    data = tf.data.Dataset.from_tensor_slices(({"x": x}, y)).batch(8).map(lambda x, y: (x | {"a": tf.eye(3)}, y))
    inputs = {"x": keras.Input((10,)), "a": keras.Input((3,))}
    model = keras.Model(inputs, layers.Dense(4)(inputs["x"]))
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    nl.distribute(model).fit(data, verbose=0)


@refused("a data set that nl.distribute returned is iterated in Python; take the loop out of @tf.function")
def a_loop_within_a_graph() -> None:
    model, data = nl.distribute(mlp(), None, tf.data.Dataset.from_tensor_slices(points()).batch(8))
    tf.function(lambda: [model(x) for x, _ in data], autograph=False)()


@refused("a loader is a ndarray; for a loop of your own hand over a tf.data.Dataset of batches")
def arrays_as_a_loader() -> None:
    nl.distribute(mlp(), None, points()[0])


@refused(r"the model cannot be built from what its data look like \(.*\); build it before nl.distribute")
def a_model_that_its_data_cannot_build() -> None:
    model = keras.Sequential([layers.Dense(3), layers.Reshape((5, 5)), layers.Dense(4)])
    model.compile("sgd", "mse")
    nl.distribute(model).fit(*points(), verbose=0)


@refused("rank 0 has built 6 variables and rank 1 6, or others; let nothing in the model depend on nl.rank")
def a_model_of_another_size_on_one_rank() -> None:
    nl.distribute(mlp(8 + nl.rank())).fit(*points(), verbose=0)


@refused("rank 0 and rank 1 read different batches; the data must come in the same order on every rank")
def other_data_on_one_rank() -> None:
    nl.distribute(mlp()).fit(*points(seed=nl.rank()), verbose=0)


@refused("rank 0 reads a batch of 8 samples and rank 1 one of 9; the data must come in the same order")
def another_batch_size_on_one_rank() -> None:
    nl.distribute(mlp()).fit(*points(), batch_size=8 + nl.rank(), verbose=0)


@refused("rank 0 and rank 1 read different batches; .* a seed for what shuffles")
def a_shuffle_without_a_seed() -> None:
    tf.random.set_seed(nl.rank())
    data = tf.data.Dataset.from_tensor_slices(points()).shuffle(24).batch(8)
    nl.distribute(mlp()).fit(data, verbose=0)


@refused(r"after step 1, sequential\S*/dense\S*/kernel on rank 1 is not what it is on rank 0")
def a_weight_that_one_rank_changes() -> None:
    model = nl.distribute(mlp())

    class Changes(keras.callbacks.Callback):  # type: ignore[misc]
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if nl.rank() == 1:
                model.layers[0].kernel.assign_add(tf.ones_like(model.layers[0].kernel))

    model.fit(*points(), callbacks=[Changes()], verbose=0)


@refused("is of another model: .*kernel is F32 .10, 8. there and F32 .10, 9. here")
def a_checkpoint_of_another_model() -> None:
    folder = Path(tempfile.gettempdir()) / "nearlinear-keras-refusals"
    keras.utils.clear_session()
    nl.save(folder, nl.distribute(mlp()))
    keras.utils.clear_session()
    other = nl.distribute(mlp(9))
    before = [each.copy() for each in other.get_weights()]
    try:
        nl.load(folder, other)
    finally:
        assert all(np.array_equal(a, b) for a, b in zip(before, other.get_weights(), strict=True))


@refused("no checkpoint at .*nearlinear-never-saved: it does not exist")
def a_checkpoint_that_is_not_there() -> None:
    nl.load(Path(tempfile.gettempdir()) / "nearlinear-never-saved", nl.distribute(mlp()))
