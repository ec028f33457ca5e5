"""Looking at the first batch: whether all ranks have it, what stages change in training, where the model is cut."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import tree

from nearlinear.errors import InputError
from nearlinear.tensorflow.capture import Program, flat_inputs, graph_of, program_of
from nearlinear.tensorflow.pipeline import cuts
from nearlinear.tensorflow.pipeline.gate import looked_at
from nearlinear.tensorflow.pipeline.tail import Batch
from nearlinear.tensorflow.pipeline.transfer import array_of
from nearlinear.tensorflow.session import Session

_BUDGET_S = 2.0  # for timing steps
_LOOKED_AT = 1024  # elements of a batch's tensor
_MARKS = 2**31 - 1


@dataclass(frozen=True)
class Cut:
    """A model and where it is cut.

    Args:
        program: The model as steps.
        stage_of: The stage of each step.
        variables: The model's variables.
        uses: Those that each step uses, by position.
    """

    program: Program
    stage_of: list[int]
    variables: list[keras.Variable]
    uses: list[list[int]]


def require_one_batch(batch: Batch, session: Session) -> None:
    """Raise on every rank if one of them has another batch than rank 0; all ranks call it."""
    mark = sum(_mark(each) for each in tree.flatten((batch.x, batch.y, batch.sample_weight))) % _MARKS
    everyones = session.all_gather_json(mark, "the first batch of the pipeline")
    odd = next((rank for rank, each in enumerate(everyones) if each != everyones[0]), None)
    if odd is not None:
        raise InputError(
            f"rank {odd} has another batch than rank 0, and all ranks of a pipeline must see the same one; call "
            "keras.utils.set_random_seed, or seed whatever draws the batches alike"
        )


def plan_of(model: keras.Model, batch: Batch, session: Session, microbatches: int, name: str) -> Cut:
    """Return where the model is cut, as rank 0 decides; all ranks call it.

    Args:
        model: The model; where it has no variables yet, it is built.
        batch: The first.
        session: The run.
        microbatches: Into how many a batch will be cut.
        name: Of what it is for, among all that the mesh serves.

    Raises:
        InputError: The batch is too small, the model has fewer layers than there are ranks, one of them cannot run in
            stages, or the ranks have different models.
    """
    samples = next((int(each.shape[0]) for each in tree.flatten(batch.x) if each is not None), 0)
    if samples < 2:
        raise InputError(
            f"the first batch holds {samples} sample, and a pipeline looks at its layers on 2 at least; give batches "
            "of 2 or more"
        )
    program = program_of(model, batch.x)
    if len(program.steps) < session.size:
        raise too_many(session.size, len(program.steps), model)
    variables = list({id(each): each for each in model.variables}.values())
    if microbatches > 1:
        _say_what_differs(program, session)
    speed = cuts.bandwidth(session.connected, name)
    told: list[Any] = [_digest(program), None, None, None]
    if session.rank == 0:
        try:
            inputs = flat_inputs(model, batch.x)
            used = looked_at(program, model, batch.x, inputs, whole=microbatches == 1)
            few = max(1, samples // microbatches)
            part = [None if each is None else each[:few] for each in inputs]
            told[1] = cuts.stages_of(graph_of(program, model, part, _BUDGET_S), session.size, speed)
            place = {id(each.value): number for number, each in enumerate(variables)}
            told[2] = [sorted(place[key] for key in each if key in place) for each in used]
        except InputError as error:
            told[3] = str(error)
    everyones = session.all_gather_json(told, "planning the stages")
    if everyones[0][3] is not None:
        raise InputError(everyones[0][3])
    odd = next((rank for rank, each in enumerate(everyones) if each[0] != everyones[0][0]), None)
    if odd is not None:
        raise InputError(f"rank {odd} builds another model than rank 0; does the script depend on the rank?")
    return Cut(program, everyones[0][1], variables, everyones[0][2])


def too_many(stages: int, layers: int, model: keras.Model) -> InputError:
    """Return the error for a model that has too few layers to be cut."""
    return InputError(f"{stages} stages for model {model.name!r} of {layers} layers; start at most {layers} processes")


def _say_what_differs(program: Program, session: Session) -> None:
    operations = [step.operation for step in program.steps if isinstance(step.operation, keras.Layer)]
    layers = {id(each): each for operation in operations for each in operation._flatten_layers()}.values()
    normalising = [each for each in layers if isinstance(each, keras.layers.BatchNormalization) and each.trainable]
    if normalising:
        session.notice(
            f"{_named(normalising)}: normalised by the mean and variance of each microbatch, not of the batch, so "
            "training differs from one process; Plan('pipeline', microbatches=1) does not differ"
        )
    drawing = [each for each in layers if _draws(each)]
    if drawing:
        session.notice(
            f"{_named(drawing)}: drawn anew for each microbatch, so training differs from one process as it does with "
            "another seed"
        )


def _named(layers: Sequence[keras.Layer]) -> str:
    more = f" and {len(layers) - 3} more" if len(layers) > 3 else ""
    return f"layer{'s' if len(layers) > 1 else ''} {', '.join(repr(each.name) for each in layers[:3])}{more}"


def _draws(layer: keras.Layer) -> bool:
    """Return whether a layer draws random numbers in training."""
    names = ("rate", "stddev", "dropout", "recurrent_dropout")
    rates = [getattr(layer, name) for name in names if hasattr(layer, name)]
    return bool(layer._seed_generators) and (not rates or any(rates))


def _digest(program: Program) -> int:
    text = "/".join(f"{step.name}:{step.kind}:{step.reads}:{step.makes}" for step in program.steps)
    return zlib.crc32(text.encode())


def _mark(tensor: Any) -> int:
    """Return a number that tells batches apart: of a tensor's shape and of some of its elements."""
    if tensor is None or isinstance(tensor, tf.SparseTensor | tf.RaggedTensor) or tensor.dtype == tf.string:
        return 0
    flat = array_of(tensor).reshape(-1)
    some = np.ascontiguousarray(flat[:: max(1, flat.size // _LOOKED_AT)])
    return zlib.crc32(some.tobytes(), zlib.crc32(str((tensor.dtype.name, tuple(tensor.shape))).encode()))
