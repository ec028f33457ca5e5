"""Turning a Keras script's first steps into a graph with measured times.

After its first step the model's program is captured and timed, step by step, on inputs like those it has seen. Then
the script goes on for some steps: their time says what the loop adds to the model, and their gradients how noisy a
batch is.
"""

from __future__ import annotations

import contextlib
import dataclasses
import statistics
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import tree

from nearlinear import events
from nearlinear.core.graph import Graph
from nearlinear.errors import InputError
from nearlinear.measure.study import LEAST, NOISE_PARAMETERS, Pace, Study, spread, with_loop
from nearlinear.tensorflow.capture import Program, flat_inputs, graph_of, program_of
from nearlinear.tensorflow.session import current


class Watch:
    """What happens at the steps of a Keras model, while it is entered.

    Args:
        budget_s: Seconds that the timing of the parts may take, and that of the script's steps.
    """

    def __init__(self, budget_s: float) -> None:
        self._undo = contextlib.ExitStack()
        self._budget_s = budget_s
        self._model: keras.Model | None = None
        self._optimizer: Any = None
        self._graph: Graph | None = None
        self._batch = 0
        self._pace = Pace(budget_s)
        self._norms: list[float] = []
        self._sum: dict[str, Any] | None = None

    def __enter__(self) -> Watch:
        self._undo.callback(events.subscribe("distributed", self._on_distributed))
        self._undo.callback(events.subscribe("gradients", self._on_gradients))
        self._undo.callback(events.subscribe("step", self._on_step))
        return self

    def __exit__(self, *_: object) -> None:
        self._undo.close()

    @property
    def has_model(self) -> bool:
        """Whether the script has called ``distribute``."""
        return self._model is not None

    def study(self) -> Study:
        """Return what was seen.

        Raises:
            InputError: The script never trained its model.
        """
        assert self._model is not None
        if self._graph is None:
            raise InputError("the script ended without training its model; there is nothing to plan")
        steps = self._pace.steps
        graph = self._graph
        if steps:
            graph = with_loop(graph, statistics.median(steps) - graph.time)
        mean_norm = 0.0
        if self._sum is not None and self._norms:
            mean_norm = sum(float(np.square(each).sum()) for each in self._sum.values()) / len(self._norms) ** 2
        return Study(
            graph=graph,
            rung="the layers of Keras",
            notes=(),
            tied=(),
            batch=self._batch,
            calls=1,
            launch=0.0,
            steps=steps,
            spread=spread(steps) if len(steps) >= LEAST else 0.1,
            dtype=str(self._model.trainable_variables[0].dtype),
            optimizer=type(self._optimizer).__name__,
            norms=tuple(self._norms),
            mean_norm=mean_norm,
            strategies=("data", "pipeline"),
            variants=False,
        )

    # ---- hooks

    def _on_distributed(self, event: dict[str, Any]) -> None:
        if self._model is None and event["front_end"] == "tensorflow":  # of several models the first is planned
            self._model, self._optimizer = event["model"], event["optimizer"]

    def _on_gradients(self, event: dict[str, Any]) -> None:
        with self._pace.aside():
            self._note_gradients(event)

    def _note_gradients(self, event: dict[str, Any]) -> None:
        found = {name: np.asarray(each, np.float64) for name, each in event["gradients"]()}
        if sum(each.size for each in found.values()) > NOISE_PARAMETERS:
            return
        self._norms.append(sum(float(np.square(each).sum()) for each in found.values()))
        self._sum = found if self._sum is None else {name: each + self._sum[name] for name, each in found.items()}

    def _on_step(self, event: dict[str, Any]) -> None:
        if event["model"] != 0:
            return
        if self._graph is None:
            self._batch = event["samples"]
            self._capture()
        else:
            self._pace.mark()

    def _capture(self) -> None:
        model, session = self._model, current()
        assert model is not None and session is not None
        _say("capturing the model")
        x = tree.map_structure(lambda spec: _like(spec, self._batch), session.seen)
        program = program_of(model, x)
        _say("timing its parts")
        inputs = flat_inputs(model, x)
        graph = graph_of(program, model, inputs, self._budget_s)
        self._graph = _with_flop(graph, program, inputs)
        _say("timing the script's own steps")


def _like(spec: Any, samples: int) -> Any:
    """Return a batch that looks so; whole numbers are 0, which every table of an embedding has."""
    shape = [samples, *(length or 1 for length in spec.shape[1:])]
    if spec.dtype.is_floating:
        return tf.random.stateless_normal(shape, [0, 0], dtype=spec.dtype)
    return tf.zeros(shape, spec.dtype)


def _with_flop(graph: Graph, program: Program, inputs: list[Any]) -> Graph:
    """Return the graph with the floating-point operations of each operator's forward pass, by TensorFlow's profiler."""
    operators = []
    values: dict[int, Any] = dict(enumerate(inputs))
    for operator, step in zip(graph.operators, program.steps, strict=True):
        given = {value: values[value] for value in step.reads}
        made = step.run(given, training=False)
        values.update(zip(step.makes, made, strict=False))
        traced = tf.function(lambda step=step, given=given: step.run(given, training=False), autograph=False)
        profiled = tf.compat.v1.profiler.profile(
            traced.get_concrete_function().graph,
            options={
                **tf.compat.v1.profiler.ProfileOptionBuilder.float_operation(),
                "output": "none",
            },
        )
        operators.append(dataclasses.replace(operator, flop=float(profiled.total_float_ops)))
    return dataclasses.replace(graph, operators=tuple(operators))


def _say(what: str) -> None:
    events.send_to_launcher("plan", what=what)
