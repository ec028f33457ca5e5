"""Looking at a model's steps on a few samples: do parts of a batch give what the batch gives, and what does each use?

What no graph says is seen here by running: a layer that mixes the samples of a batch, a variable that a layer reaches
without having it, a ``call`` that does more than the steps that were recorded of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import tree

from nearlinear.errors import InputError
from nearlinear.tensorflow.capture import (
    Program,
    Step,
    Values,
    adds_a_loss_of_its_own,
    inside,
    regularized_by_sample,
)

_SAMPLES = 4


def looked_at(program: Program, model: keras.Model, x: Any, inputs: Sequence[Any], *, whole: bool) -> list[set[int]]:
    """Return the variables that each step uses, by their ids.

    Args:
        program: The model's program.
        model: The model, with all its variables.
        x: A batch, with its structure.
        inputs: The same, flat.
        whole: Whether batches are not cut into microbatches.

    Raises:
        InputError: A step gives other values for parts of a batch, or the program others than the model.
    """
    few = [None if each is None else each[:_SAMPLES] for each in inputs]
    samples = next(int(each.shape[0]) for each in few if each is not None)
    half = samples // 2
    values: Values = dict(enumerate(few))
    pieces: list[Values] = [
        {value: None if each is None else each[place] for value, each in values.items()}
        for place in (slice(None, half), slice(half, None))
    ]
    uses = []
    for step in program.steps:
        found, used = _run(step, model, values, whole=whole)
        uses.append(used)
        values.update(zip(step.makes, found, strict=False))
        for each in [] if whole else pieces:
            each.update(zip(step.makes, _run(step, model, each, whole=False)[0], strict=False))
        for value in [] if whole else step.makes:
            _require_alike(step, values[value], *(each[value] for each in pieces))
    returned = [values[value] for value in program.outputs]
    for value, tensor in zip(program.outputs, returned, strict=True):
        if not whole and (not tensor.shape.rank or int(tensor.shape[0]) % samples):
            raise InputError(
                f"the model returns {program.maker(value)}, of shape {tuple(tensor.shape)} for {samples} samples, "
                "which parts of a batch do not make up; ask for Plan('pipeline', microbatches=1), or strategy 'data'"
            )
    itself = model(tree.map_structure(lambda each: None if each is None else each[:_SAMPLES], x), training=False)
    for one, other in zip(returned, tree.flatten(itself), strict=True):
        if not _close(one, other):
            raise InputError(
                f"{type(model).__name__} gives other numbers than its layers one after the other, so its call does "
                "more than they do; strategy 'data' trains it as it is"
            )
    return uses


def _run(step: Step, model: keras.Model, values: Values, *, whole: bool) -> tuple[list[Any], set[int]]:
    layers = step.operation._flatten_layers() if isinstance(step.operation, keras.Layer) else []
    for layer in layers:
        layer._losses.clear()
    with tf.GradientTape() as tape, inside(model, training=False):
        found = step.run(values, training=False)
    for layer in layers:
        if layer._losses and not whole and not regularized_by_sample(layer):
            raise InputError(adds_a_loss_of_its_own(layer.name))
        layer._losses.clear()
    return found, {id(each.value) for each in step.variables} | {id(each) for each in tape.watched_variables()}


def _require_alike(step: Step, whole: Any, one: Any, other: Any) -> None:
    if whole.shape.rank:
        alike = one.shape[1:] == other.shape[1:] == whole.shape[1:] and _close(tf.concat([one, other], 0), whole)
        if alike:
            return
    if not (_close(one, whole) and _close(other, whole)):  # the same for all samples: positions, a constant
        raise InputError(
            f"layer {step.name!r} ({step.kind}) gives other values for parts of a batch than for the batch, so it "
            "mixes samples or draws; ask for Plan('pipeline', microbatches=1), or strategy 'data'"
        )


def _close(one: Any, other: Any) -> bool:
    a, b = np.asarray(one), np.asarray(other)
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if not tf.as_dtype(a.dtype).is_floating:
        return bool(np.array_equal(a, b))
    limit = {8: 1e-9, 4: 1e-4}.get(a.dtype.itemsize, 3e-2)  # sums over other shapes round otherwise
    a, b = a.astype(np.float64), b.astype(np.float64)
    scale = float(np.nanmax(np.abs(b), initial=0.0)) or 1.0
    return bool(np.allclose(a, b, rtol=0.0, atol=limit * scale, equal_nan=True))
