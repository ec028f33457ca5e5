"""Turning the model's outputs into loss, gradients and metrics, on the whole batch, where the last stage is."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf
from keras import tree
from keras.src import backend

from nearlinear.tensorflow.capture import Program


@dataclass(frozen=True)
class Batch:
    """What a loss and metrics look at, as the script gave it.

    Args:
        x: Inputs.
        y: Targets.
        sample_weight: What each sample counts for.
        fixed: Whether all batches are known to have as many samples.
    """

    x: Any
    y: Any
    sample_weight: Any
    fixed: bool = False


@dataclass(frozen=True)
class Outputs:
    """What the stages made of a batch.

    Args:
        tensors: The model's outputs, flat, of the whole batch.
        masks: Of each, None where it has none.
        added: What layers of a stage add to the loss, by stage, shape ``(microbatches, losses)``.
        parts: The part of the batch that each microbatch is, shape ``(microbatches,)``.
        penalties: What a rank's regularizers add to the loss, by rank, shape ``(1, variables)``.
    """

    tensors: Sequence[Any]
    masks: Sequence[Any]
    added: dict[int, Any]
    parts: Any
    penalties: dict[int, Any]


class Tail:
    """The loss and the metrics of a compiled model."""

    def __init__(self, program: Program, model: keras.Model) -> None:
        self._program, self._model = program, model
        self.computing = False  # metrics are being asked for from here
        self._functions: dict[Any, Callable[..., Any]] = {}

    def loss_gradients(self, batch: Batch, outputs: Outputs) -> tuple[list[Any], list[Any], list[Any]]:
        """Return the loss's gradients in training: of the outputs, of what layers add, of what regularizers add."""
        found: tuple[list[Any], list[Any], list[Any]] = self._call(self._loss, batch, *_flat(batch, outputs))
        return found

    def loss(self, batch: Batch, outputs: Outputs) -> None:
        """Note the loss without training."""
        self._call(self._value, batch, *_flat(batch, outputs))

    def metrics(self, batch: Batch, outputs: Outputs) -> dict[str, Any]:
        """Return the metrics, the loss among them, once they have seen this batch."""
        found: dict[str, Any] = self._call(self._results, batch, *_flat(batch, outputs)[:5])
        return found

    def _call(self, act: Callable[..., Any], batch: Batch, *arguments: Any) -> Any:
        """Call a function of tensors, compiled where the model is.

        How many samples a batch has is known to it if the data set knows it for all batches, as in one process: some of
        Keras's averages depend on that.
        """
        if self._model.run_eagerly:
            return act(*arguments)
        flat = tree.flatten(arguments)
        tensors = [each for each in flat if each is not None]
        specs = [_spec(each, batch.fixed) for each in tensors]
        key = act.__name__, str(tree.map_structure(lambda each: each is None, arguments)), tuple(specs)
        if key not in self._functions:

            def run(*given: Any) -> Any:
                coming = iter(given)
                return act(*tree.pack_sequence_as(arguments, [None if each is None else next(coming) for each in flat]))

            self._functions[key] = tf.function(run, autograph=False).get_concrete_function(*specs)
        return self._functions[key](*tensors)

    # ---- traced

    def _loss(
        self, x: Any, y: Any, weight: Any, tensors: Any, masks: Any, added: Any, parts: Any, penalties: Any
    ) -> tuple[list[Any], list[Any], list[Any]]:
        watched = [each for each in (*tensors, *added, *penalties) if each.dtype.is_floating]
        with tf.GradientTape() as tape:
            tape.watch(watched)
            loss = self._value(x, y, weight, tensors, masks, added, parts, penalties, training=True)
            loss = self._model.optimizer.scale_loss(loss)
        known = iter(tape.gradient(loss, watched))
        found = [
            [_dense(next(known)) if each.dtype.is_floating else None for each in every]
            for every in (tensors, added, penalties)
        ]
        return found[0], found[1], found[2]

    def _value(
        self,
        x: Any,
        y: Any,
        weight: Any,
        tensors: Any,
        masks: Any,
        added: Any,
        parts: Any,
        penalties: Any,
        training: bool = False,
    ) -> Any:
        extra = [loss for every in added for loss in tf.unstack(tf.linalg.matvec(every, parts, transpose_a=True))]
        extra += [loss for every in penalties for loss in tf.unstack(every[0])]
        with _adding(self._model, extra):
            loss = self._model._compute_loss(
                x=x, y=y, y_pred=self._packed(tensors, masks), sample_weight=weight, training=training
            )
        samples = tf.shape(next(each for each in tree.flatten(x) if each is not None))[0]
        self._model._loss_tracker.update_state(loss, sample_weight=samples)
        return loss

    def _results(self, x: Any, y: Any, weight: Any, tensors: Any, masks: Any) -> Any:
        self.computing = True
        try:
            return self._model.compute_metrics(x, y, self._packed(tensors, masks), sample_weight=weight)
        finally:
            self.computing = False

    def _packed(self, tensors: Any, masks: Any) -> Any:
        for tensor, mask in zip(tensors, masks, strict=True):
            backend.set_keras_mask(tensor, mask)
        return self._program.pack(tensors)


@contextlib.contextmanager
def _adding(model: keras.Model, losses: list[Any]) -> Iterator[None]:
    """Let ``model.losses`` be what the stages' layers and regularizers add."""
    state = vars(model)
    before = state["_losses_override"]
    state["_losses_override"] = losses
    try:
        yield
    finally:
        state["_losses_override"] = before


def _flat(batch: Batch, outputs: Outputs) -> tuple[Any, ...]:
    return (
        batch.x,
        batch.y,
        batch.sample_weight,
        list(outputs.tensors),
        list(outputs.masks),
        list(outputs.added.values()),
        outputs.parts,
        list(outputs.penalties.values()),
    )


def _spec(tensor: Any, fixed: bool) -> tf.TensorSpec:
    shape = tensor.shape if fixed or not tensor.shape.rank else [None, *tensor.shape[1:]]
    return tf.TensorSpec(shape, tensor.dtype)


def _dense(gradient: Any) -> Any:
    return None if gradient is None else tf.convert_to_tensor(gradient)
