"""What a recorder of a script's first steps (``testing/record.py``) asks of Keras."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any, Protocol

import keras
import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from nearlinear import events
from nearlinear.runtime.environment import world_from
from nearlinear.tensorflow.session import current
from nearlinear.tensorflow.state import is_seed


class Recorder(Protocol):
    """Who takes the notes."""

    def note_loss(self, value: float, scale: float) -> None:
        """Take a loss that was differentiated, and the factor of this rank's gradients."""

    def note_options(self, options: dict[str, Any]) -> None:
        """Take the numbers of the optimizer that has stepped."""


def watch(recorder: Recorder, undo: ExitStack) -> None:
    """Tell ``recorder`` of losses and optimizers' numbers until ``undo`` is closed."""
    differentiate = tf.GradientTape.gradient

    def noting(tape: tf.GradientTape, target: Any, *arguments: Any, **options: Any) -> Any:
        session = current()
        if session is not None and tf.is_tensor(target) and target.shape.rank == 0:
            share = session.share()
            scale = share.counts if session.summed else share.fraction
            tf.numpy_function(
                lambda value, scale: recorder.note_loss(float(value), float(scale)), [target, scale], [], stateful=True
            )
        return differentiate(tape, target, *arguments, **options)

    tf.GradientTape.gradient = noting
    undo.callback(setattr, tf.GradientTape, "gradient", differentiate)
    undo.callback(events.subscribe("step", lambda event: recorder.note_options(event["options"])))


def seed(number: int) -> None:
    """Start Keras's and TensorFlow's random streams."""
    keras.utils.set_random_seed(number)


def parameters(model: keras.Model) -> list[tuple[str, Any]]:
    """Return the model's trainable variables by path; none before it is built."""
    return [(variable.path, variable) for variable in model.trainable_variables]


def arrays(variables: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, NDArray[Any]]]:
    """Yield copies, on rank 0; NumPy does not know all the short types."""
    if world_from().rank:
        return
    for name, variable in variables:
        array = np.array(variable)
        yield name, array if array.dtype.itemsize >= 4 else array.astype(np.float32)


def types(variables: Iterable[tuple[str, Any]]) -> set[str]:
    """Return the names of the variables' types."""
    return {str(variable.dtype) for _, variable in variables}


def weight() -> str:
    """Return what a share counts for: ``"samples"``, ``"function"`` or ``"sum"``."""
    session = current()
    assert session is not None
    return "sum" if session.summed else "function" if session.weight is not None else "samples"


def random_and_mixing_layers(models: Sequence[keras.Model]) -> dict[str, list[str]]:
    """Return the layers that make N processes differ from one while they train."""
    layers: dict[str, list[str]] = {"batchnorm": [], "dropout": []}
    for model in models:
        for layer in model._flatten_layers():
            if isinstance(layer, keras.layers.BatchNormalization) and not layer.synchronized:
                layers["batchnorm"].append(layer.name)
            elif any(is_seed(variable) for variable in getattr(layer, "non_trainable_variables", [])):
                layers["dropout"].append(layer.name)
    return layers


def streams() -> dict[str, Any]:
    """Return where global random streams stand: TensorFlow's cannot be asked."""
    return {}


def compute_in_float64() -> None:
    """Let layers compute in float64, from here on; Keras converts what they are given."""
    keras.config.set_floatx("float64")
