"""What a pipeline of Keras layers refuses, each on every rank in one line; run on two processes."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from typing import Any

os.environ["KERAS_BACKEND"] = "tensorflow"

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

import nearlinear as nl
from nearlinear.errors import InputError
from nearlinear.tensorflow import session

REFUSALS: dict[str, Callable[[], None]] = {}
X, Y = np.random.default_rng(1).normal(size=(12, 4)), np.arange(12) % 3


def refusal(fn: Callable[[], None]) -> Callable[[], None]:
    REFUSALS[fn.__name__] = fn
    return fn


def stack(*given: Any) -> keras.Model:
    return keras.Sequential([keras.Input((4,)), *given])


def fit(model: keras.Model, x: Any = X, y: Any = Y, plan: nl.Plan | None = None, **options: Any) -> None:
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    model = nl.distribute(model, strategy=plan or nl.Plan("pipeline", microbatches=2))
    model.fit(x, y, verbose=0, **{"batch_size": 6, **options})


@refusal
def a_model_that_is_not_compiled() -> None:
    """no optimizer yet; call model.compile(...) before nl.distribute"""
    nl.distribute(stack(layers.Dense(3), layers.Dense(3)), keras.optimizers.SGD(), strategy="pipeline")


@refusal
def more_stages_than_layers() -> None:
    """2 stages for model 'small' of 1 layers; start at most 1 processes"""
    fit(keras.Sequential([keras.Input((4,)), layers.Dense(3)], name="small"))


@refusal
def fewer_stages_than_processes() -> None:
    """1 stages on 2 processes"""
    fit(stack(layers.Dense(3), layers.Dense(3)), plan=nl.Plan("pipeline", stages=1))


@refusal
def a_batch_of_one_sample() -> None:
    """the first batch holds 1 sample, and a pipeline looks at its layers on 2 at least"""
    fit(stack(layers.Dense(3), layers.Dense(3)), batch_size=1)


@refusal
def a_train_step_of_the_models_own() -> None:
    """Own has a train_step of its own, which a pipeline cannot take apart"""

    class Own(keras.Model):
        def train_step(self, data: Any) -> Any:
            return super().train_step(data)

    inputs = keras.Input((4,))
    fit(Own(inputs, layers.Dense(3)(layers.Dense(3)(inputs))))


@refusal
def a_stateful_layer() -> None:
    """layer 'carries' (LSTM) is stateful"""
    inputs = keras.Input(batch_shape=(6, 4, 1))
    x = layers.LSTM(4, stateful=True, name="carries")(inputs)
    fit(keras.Model(inputs, layers.Dense(3)(x)), X[..., None])


@refusal
def a_layer_that_mixes_samples() -> None:
    """layer 'mixes' (Lambda) gives other values for parts of a batch than for the batch"""
    mixing = layers.Lambda(lambda x: x - ops.mean(x, axis=0, keepdims=True), name="mixes")
    fit(stack(layers.Dense(3), mixing, layers.Dense(3)))


@refusal
def a_layer_that_adds_a_loss() -> None:
    """layer 'adds' adds a loss of its own making to the model's"""

    class Adds(layers.Layer):
        def call(self, x: Any) -> Any:
            self.add_loss(ops.max(x))
            return x

    fit(stack(layers.Dense(3), Adds(name="adds"), layers.Dense(3)))


@refusal
def an_output_that_no_parts_make_up() -> None:
    """the model returns what layer 'whole' makes, of shape () for 4 samples"""
    inputs = keras.Input((4,))
    x = layers.Dense(3)(layers.Dense(3)(inputs))
    counted = layers.Lambda(lambda x: ops.sum(ops.zeros_like(x)), output_shape=(), name="whole")(x)
    fit(keras.Model(inputs, [x, counted]), y=[Y, Y])


@refusal
def a_call_that_uses_tensorflow() -> None:
    """Calls.call cannot be followed at `return self.last(tf.nn.relu(self.first(x)))`"""

    class Calls(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = layers.Dense(3), layers.Dense(3)

        def call(self, x: Any) -> Any:
            return self.last(tf.nn.relu(self.first(x)))

    fit(Calls())


@refusal
def a_call_that_asks_whether_it_is_training() -> None:
    """Asks.call does not call the same layers in training and otherwise (they part at"""

    class Asks(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.drop, self.last = layers.Dense(3), layers.Dropout(0.5), layers.Dense(3)

        def call(self, x: Any, training: bool | None = None) -> Any:
            x = self.first(x)
            return self.last(self.drop(x) if training else x)

    fit(Asks())


@refusal
def a_call_that_does_more_than_its_layers() -> None:
    """Counts gives other numbers than its layers one after the other"""

    class Counts(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.calls, self.first, self.last = 0, layers.Dense(3), layers.Dense(3)

        def call(self, x: Any) -> Any:
            self.calls += 1
            return self.last(self.first(x)) * self.calls

    fit(Counts())


@refusal
def another_batch_on_another_rank() -> None:
    """rank 1 has another batch than rank 0, and all ranks of a pipeline must see the same one"""
    fit(stack(layers.Dense(3), layers.Dense(3)), X + nl.rank())


@refusal
def another_model_on_another_rank() -> None:
    """rank 1 builds another model than rank 0"""
    fit(stack(layers.Dense(3), *[layers.ReLU() for _ in range(nl.rank())], layers.Dense(3)))


@refusal
def reading_what_lies_elsewhere() -> None:
    """lies with rank"""
    model = stack(layers.Dense(3), layers.Dense(3))
    fit(model)
    for each in model.weights:
        each.numpy()


def main() -> None:
    keras.config.set_floatx("float64")
    failed = []
    for name, act in REFUSALS.items():
        keras.backend.clear_session()
        keras.utils.set_random_seed(1)
        try:
            act()
            print(f"{name}: accepted", flush=True)
            failed.append(name)
        except InputError as error:
            wanted = (act.__doc__ or "").strip()
            if wanted in str(error) and "\n" not in str(error):
                print(f"{name}: refused", flush=True)
            else:
                print(f"{name}: {error}\n  instead of: {wanted}", flush=True)
                failed.append(name)
        except Exception:  # noqa: BLE001 - all are to be seen, also after one that fails
            traceback.print_exc()
            failed.append(name)
        current = session()
        if current is not None:
            current.all_gather_json(name)  # the ranks go on together
    sys.exit(f"failed: {', '.join(failed)}" if failed else 0)


if __name__ == "__main__":
    main()
