"""Running one stage for one microbatch, forward and backward, as compiled functions of the microbatch's tensors.

A forward pass in training leaves what its backward pass needs on a tape; the function is traced once for all sizes of
microbatch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf
from keras.src import backend

from nearlinear.errors import InputError
from nearlinear.tensorflow.capture import Program, Values, adds_a_loss_of_its_own, inside, regularized_by_sample
from nearlinear.tensorflow.pipeline.split import Part

Given = Mapping[int, tuple[Any, Any]]  # a value's tensor and its mask, None where it has none


@dataclass
class _Marks:
    """What tracing a function has shown.

    Args:
        masked: Which of the values that it makes have masks.
        adds: Whether its layers add to the loss.
        alone: A layer that adds what is not a mean over samples.
    """

    masked: list[bool]
    adds: bool = False
    alone: str | None = None


@dataclass(frozen=True)
class Pass:
    """What a forward pass made, and what its backward pass needs.

    Args:
        made: The tensor and the mask of every value that others read.
        losses: What the stage's layers add to the loss, shape ``(losses,)``; None where they add nothing.
        entering: What gradients may be asked for.
        tape: The operations; None where nothing is differentiated.
    """

    made: dict[int, tuple[Any, Any]]
    losses: Any
    entering: dict[int, Any]
    tape: tf.GradientTape | None


class Stage:
    """The steps of one stage.

    Args:
        program: The whole model's program.
        part: Which part of it.
        model: The model.
        variables: The stage's own that take gradients; each is a TensorFlow variable.
    """

    def __init__(self, program: Program, part: Part, model: keras.Model, variables: Sequence[tf.Variable]) -> None:
        self.program, self.part, self.variables = program, part, list(variables)
        self._model = model
        self._steps = [program.steps[number] for number in part.steps]
        self._layers = {
            id(each): each
            for step in self._steps
            if isinstance(step.operation, keras.Layer)
            for each in step.operation._flatten_layers()
        }
        self._reads = [*part.inputs, *part.entering]
        self._functions: dict[Any, tuple[Callable[..., Any], _Marks]] = {}

    def forward(self, given: Given, *, training: bool, differentiate: Sequence[int] | None, whole: bool) -> Pass:
        """Run the stage.

        Args:
            given: What it reads.
            training: Whether layers are told that they are being trained.
            differentiate: The values among ``given`` whose gradient will be asked for; None: of nothing.
            whole: Whether this is the whole batch.

        Raises:
            InputError: A layer adds a loss that parts of a batch do not add up to.
        """
        tensors = [given[value][0] for value in self._reads if given[value][0] is not None]
        masks = [given[value][1] for value in self._reads if given[value][1] is not None]
        here = [given[value][0] is not None for value in self._reads]
        masked = [given[value][1] is not None for value in self._reads]
        run, marks = self._function(tensors, masks, here, masked, training)
        entering = {value: given[value][0] for value in differentiate or ()}
        tape = None if differentiate is None else tf.GradientTape()
        with contextlib.nullcontext() if tape is None else tape:
            if tape is not None:
                tape.watch(list(entering.values()))
            found = run(*tensors, *masks)
        if marks.alone and not whole:
            raise InputError(adds_a_loss_of_its_own(marks.alone))
        return self._pass(found, marks, entering, tape)

    def backward(self, done: Pass, owed: Mapping[int, Any], losses: Any) -> tuple[dict[int, Any], list[Any]]:
        """Return the gradients of what entered and of the stage's variables, None where there is none.

        Args:
            done: The forward pass.
            owed: The gradients of what it made.
            losses: The gradient of what its layers add to the loss.
        """
        targets = [(done.made[value][0], gradient) for value, gradient in owed.items() if gradient is not None]
        if losses is not None and done.losses is not None:
            targets.append((done.losses, losses))
        if done.tape is None or not targets:
            return dict.fromkeys(done.entering), [None] * len(self.variables)
        found = done.tape.gradient(
            [target for target, _ in targets],
            [*done.entering.values(), *self.variables],
            output_gradients=[gradient for _, gradient in targets],
        )
        entered = [None if each is None else tf.convert_to_tensor(each) for each in found[: len(done.entering)]]
        return dict(zip(done.entering, entered, strict=True)), found[len(done.entering) :]

    def _pass(self, found: Sequence[Any], marks: _Marks, entering: Any, tape: Any) -> Pass:
        coming = iter(found)
        tensors = [next(coming) for _ in self.part.made]
        masks = [next(coming) if each else None for each in marks.masked]
        made = dict(zip(self.part.made, zip(tensors, masks, strict=True), strict=True))
        return Pass(made, next(coming) if marks.adds else None, entering, tape)

    def _function(
        self, tensors: Sequence[Any], masks: Sequence[Any], here: list[bool], masked: list[bool], training: bool
    ) -> tuple[Callable[..., Any], _Marks]:
        """Return the stage as a function of its tensors, and what tracing it has shown."""
        specs = [self._spec(each, value) for each, value in zip(tensors, _where(self._reads, here), strict=True)]
        specs += [tf.TensorSpec([None, *each.shape[1:]], each.dtype) for each in masks]
        key = training, tuple(here), tuple(masked), tuple(specs)
        if key not in self._functions:
            marks = _Marks([])

            def body(*flat: Any) -> list[Any]:
                coming = iter(flat)
                values: Values = {}
                for value, has in zip(self._reads, here, strict=True):
                    values[value] = next(coming) if has else None
                for value, has in zip(self._reads, masked, strict=True):
                    if has:
                        backend.set_keras_mask(values[value], next(coming))
                return self._run(values, training, marks)

            if self._model.run_eagerly:
                return body, marks
            function = tf.function(body, autograph=False).get_concrete_function(*specs)
            self._functions[key] = function, marks
        return self._functions[key]

    def _run(self, values: Values, training: bool, marks: _Marks) -> list[Any]:
        for layer in self._layers.values():
            layer._losses.clear()
        with inside(self._model, training=training):
            for step in self._steps:
                values.update(zip(step.makes, step.run(values, training=training), strict=False))
        adding = [layer for layer in self._layers.values() if layer._losses]
        added = [tf.reduce_sum(tf.cast(loss, keras.config.floatx())) for layer in adding for loss in layer._losses]
        marks.alone = next((layer.name for layer in adding if not regularized_by_sample(layer)), None)
        for layer in adding:
            layer._losses.clear()  # tensors of this function mean nothing outside it
        made = [tf.convert_to_tensor(values[value]) for value in self.part.made]
        masks = [backend.get_keras_mask(values[value]) for value in self.part.made]
        marks.masked, marks.adds = [each is not None for each in masks], bool(added)
        found = [*made, *(each for each in masks if each is not None)]
        return [*found, tf.stack(added)] if added else found

    def _spec(self, tensor: Any, value: int) -> tf.TensorSpec:
        """Return the type and shape of a tensor, with any number of samples where the model takes any."""
        shape, known = list(tensor.shape), self.program.shapes[value]
        if shape and known and known[0] is None:
            shape[0] = None
        return tf.TensorSpec(shape, tensor.dtype)


def _where(values: Sequence[int], here: Sequence[bool]) -> list[int]:
    return [value for value, has in zip(values, here, strict=True) if has]
