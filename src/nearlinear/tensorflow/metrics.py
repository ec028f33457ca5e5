"""Turning what a rank has counted and seen of its share into what one process would have of the batch.

mean, total, gather      of a script's own values
MetricStates             of Keras's metrics: their variables are sums, so what a step adds to them is added up
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import tree

from nearlinear.tensorflow.exchange import join_rows
from nearlinear.tensorflow.exchange import total as summed
from nearlinear.tensorflow.session import Session, Share
from nearlinear.tensorflow.state import is_seed


def mean(value: Any, session: Session) -> Any:
    """Return the weighted mean over the ranks by the batch in hand; ``nearlinear.mean`` documents it."""
    if session.mesh is None:
        return value
    share = session.share()
    return tree.map_structure(lambda each: _sum(each, share.fraction, session), value)


def total(value: Any, session: Session) -> Any:
    """Return the sum over the ranks; a filler counts zero."""
    if session.mesh is None:
        return value
    share = session.share()
    return tree.map_structure(lambda each: _sum(each, share.counts, session), value)


def gather(value: Any, session: Session) -> Any:
    """Return all ranks' rows joined in the order of the batch, without fillers; differentiable."""
    if session.mesh is None:
        return value
    share = session.share()
    return tree.map_structure(lambda each: join_rows(each, share, session), value)


def _sum(value: Any, factor: tf.Tensor, session: Session) -> Any:
    tensor = tf.convert_to_tensor(value)
    whole = summed(
        session, session.tag("value"), tf.cast(tensor, tf.float64) * factor, "a mean or a sum over the ranks"
    )
    if not tensor.dtype.is_floating:
        return whole if tf.executing_eagerly() and not tf.is_tensor(value) else tf.cast(whole, tf.float64)
    return tf.cast(whole, tensor.dtype)


class MetricStates:
    """The variables that a step changes beside weights: metrics', and statistics such as BatchNorm's.

    Args:
        model: The compiled model, built.
        session: This process's part in the run.
    """

    def __init__(self, model: keras.Model, session: Session) -> None:
        self._model, self._session = model, session
        self._count_scalars()
        self._note_results()

    def compute(self, compute_metrics: Callable[..., Any], x: Any, y: Any, y_pred: Any, sample_weight: Any) -> Any:
        """Update the metrics that the model was compiled with; over the whole batch where one is no sum."""
        if not self._are_whole or y is None:
            return compute_metrics(x, y, y_pred, sample_weight=sample_weight)
        share = self._session.share()
        whole = tree.map_structure(
            lambda each: None if each is None else join_rows(each, share, self._session), (y, y_pred, sample_weight)
        )
        return compute_metrics(x, whole[0], whole[1], sample_weight=whole[2])

    @property
    def _are_whole(self) -> bool:
        """Whether a metric may be no sum over samples, so that all are computed over the whole batch on every rank."""
        compiled = self._model._compile_metrics
        return compiled is not None and not all(map(_is_sum, compiled.metrics))

    def before(self) -> list[tuple[Any, tf.Tensor, bool]]:
        """Return ``(variable, value, is_metric)`` of all, as they are now; within the step, before it."""
        self._session.returned = []
        metrics = _unique(variable for metric in self._model.metrics for variable in metric.variables)
        known = {id(variable) for variable in metrics}
        if self._are_whole:
            whole = {id(variable) for variable in self._model._compile_metrics.variables}
            metrics = [variable for variable in metrics if id(variable) not in whole]
        statistics = [each for each in self._model.non_trainable_variables if id(each) not in known]
        floats = [(each, True) for each in metrics if not is_seed(each)]
        floats += [(each, False) for each in statistics if tf.as_dtype(each.dtype).is_floating]
        return [(each, tf.identity(each.value), is_metric) for each, is_metric in floats]

    def combine(
        self, before: Sequence[tuple[Any, tf.Tensor, bool]], logs: Any, mark: tf.Tensor, share: Share, compare: Any
    ) -> Any:
        """Make the variables those of the whole batch; return the logs of the whole batch.

        Args:
            before: What ``before`` returned.
            logs: What the step returned, of this rank's share.
            mark: Of the batch.
            share: Of the batch.
            compare: Called with the marks of all ranks, shape ``(ranks, 2)``.
        """
        values = logs if isinstance(logs, dict) else {}
        # What a metric returned in this step is read anew when its variables are the batch's; the rest is the step's.
        read = {name: found for name, value in values.items() if (found := self._source_of(value)) is not None}
        self._session.returned = None
        own = {name: tf.convert_to_tensor(value) for name, value in values.items() if name not in read}
        own = {name: value for name, value in own.items() if value.dtype.is_floating and value.shape.rank == 0}
        pieces = [mark[0:1], mark[2:3]]
        for variable, old, is_metric in before:
            added = tf.cast(variable.value, tf.float64) - tf.cast(old, tf.float64)
            pieces.append(tf.reshape(added * (share.counts if is_metric else share.fraction), [-1]))
        pieces += [tf.reshape(tf.cast(value, tf.float64) * share.fraction, [1]) for value in own.values()]
        vector = tf.concat(pieces, 0)
        mesh = self._session.connected

        def add(mine: Any) -> Any:
            said = np.stack([each.view(np.float64) for each in mesh.exchange("step", mine, "the end of a step")])
            compare(said[:, :2])
            self._session.samples = int(said[0, 0])
            return said.sum(axis=0)

        whole = tf.numpy_function(self._session.guarded(add), [vector], tf.float64)
        whole.set_shape(vector.shape)
        place = 2
        for variable, old, _ in before:
            size = old.shape.num_elements()
            added = tf.reshape(whole[place : place + size], old.shape)
            variable.assign(tf.cast(tf.cast(old, tf.float64) + added, old.dtype))
            place += size
        if not isinstance(logs, dict):
            return logs
        for number, (name, value) in enumerate(own.items()):
            own[name] = tf.cast(whole[place + number], value.dtype)
        for name, (result, key) in read.items():
            own[name] = result() if key is None else result()[key]
        return {name: own.get(name, value) for name, value in values.items()}

    def _source_of(self, value: Any) -> tuple[Callable[[], Any], str | None] | None:
        """Return which metric's result a value is, and under which key of it."""
        return next(((result, key) for seen, result, key in self._session.returned or () if seen is value), None)

    def _note_results(self) -> None:
        for metric in self._model.metrics:
            if not hasattr(metric, "_nearlinear_result"):
                metric._nearlinear_result = metric.result
                metric.result = self._noting(metric)

    def _noting(self, metric: Any) -> Callable[[], Any]:
        own = metric._nearlinear_result

        def result() -> Any:
            value = own()
            if self._session.returned is not None:
                pairs = list(value.items()) if isinstance(value, dict) else [(None, value)]
                self._session.returned += [(each, own, key) for key, each in pairs]
            return value

        return result

    def _count_scalars(self) -> None:
        """Let a mean of a loss, as a step of the script's own keeps it, count each batch once and not once per rank."""
        for metric in self._model.metrics:
            if type(metric) is keras.metrics.Mean and not hasattr(metric, "_nearlinear"):
                metric._nearlinear = True
                metric.update_state = self._counting(metric.update_state)

    def _counting(self, update: Callable[..., Any]) -> Callable[..., Any]:
        def counting(values: Any, sample_weight: Any = None) -> Any:
            scalar = tf.is_tensor(values) and values.shape.rank == 0
            share = self._session.share()
            if scalar and sample_weight is None:
                sample_weight = tf.cast(share.fraction, values.dtype)
            elif scalar and self._session.weight is not None:
                sample_weight = tf.cast(share.fraction * share.samples, values.dtype)
            return update(values, sample_weight=sample_weight)

        return counting


def agree_on(model: keras.Model, session: Session) -> None:
    """Make the statistics that a step has changed (BatchNorm's) those of all ranks: their means by fraction.

    For a loop of the script's own, between two steps; all ranks call it.
    """
    fraction = float(session.share().fraction)
    statistics = [each for each in model.non_trainable_variables if tf.as_dtype(each.dtype).is_floating]
    if not statistics:
        return
    mine = np.concatenate([each.numpy().astype(np.float64).reshape(-1) for each in statistics]) * fraction
    said = session.connected.exchange("statistics", mine, "the statistics of a step")
    whole = np.sum([each.view(np.float64) for each in said], axis=0)
    place = 0
    for each in statistics:
        size = int(np.prod(each.shape))
        each.assign(whole[place : place + size].reshape(each.shape))
        place += size


def _is_sum(metric: Any) -> bool:
    """Return whether a metric's variables are known to be sums over samples: those of Keras are."""
    function = getattr(metric, "_fn", None)
    parts = [type(metric), *([] if function is None else [function])]
    return all(getattr(part, "__module__", "").startswith("keras.") for part in parts)


def _unique(variables: Any) -> list[Any]:
    return list({id(each): each for each in variables}.values())
