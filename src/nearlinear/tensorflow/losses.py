"""Turning the loss of a rank's share into its part of the loss of the whole batch.

The gradients of rank r count by its fraction f = m / n of the batch's n samples, and so does its loss in the history.
That is the whole batch's mean if a loss is a mean over samples. Where it divides by something else, the share's loss is
scaled so that the ranks' losses, by their fractions, add up to it:

    "sum"                          L · 1 / f
    a mean over what a mask        L · (v / V) / f       v of the batch's V valid entries are in this share
    leaves, or over weights        L · (w / W) / f       of weights that come to W
    one number that mixes samples  the loss of all ranks' predictions, joined
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import keras
import tensorflow as tf
from keras import tree
from keras.src.losses import loss as keras_loss

from nearlinear.tensorflow.exchange import join_rows, total
from nearlinear.tensorflow.session import Session, Share

_reading = threading.local()


def share_loss(model: keras.Model, session: Session) -> None:
    """Let the losses that ``model`` was compiled with be parts of those of the whole batch."""
    compiled = model._compile_loss
    if compiled is None:
        return
    build = compiled.build

    def build_shared(y_true: Any, y_pred: Any) -> None:
        build(y_true, y_pred)
        compiled._flat_losses = [each._replace(loss=_Part(each.loss, session)) for each in compiled._flat_losses]

    if compiled.built:
        compiled._flat_losses = [each._replace(loss=_Part(each.loss, session)) for each in compiled._flat_losses]
    else:
        compiled.build = build_shared


class _Part:
    """A loss of a share as its part of the loss of the batch."""

    def __init__(self, loss: Callable[..., Any], session: Session) -> None:
        self._loss, self._session = loss, session

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loss, name)

    def __call__(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        with _seen_reductions() as seen:
            value = self._loss(y_true, y_pred, sample_weight)
        if not seen or isinstance(value, keras.KerasTensor):
            return value
        values, counted, mask, reduction = seen[-1]
        share = self._session.share()
        if values.shape.rank == 0 or isinstance(self._loss, keras.losses.Circle):
            return self._of_whole(y_true, y_pred, sample_weight, share)
        if reduction == "sum":
            return value / tf.cast(tf.where(share.fraction > 0, share.fraction, 1.0), value.dtype)
        if mask is None and not (reduction == "mean_with_sample_weight" and counted is not None):
            return value
        if reduction == "mean_with_sample_weight":
            weights = tf.ones_like(tf.cast(mask, tf.float64)) if counted is None else tf.cast(counted, tf.float64)
            divisor = tf.reduce_sum(weights if mask is None else weights * tf.cast(mask, tf.float64))
        else:
            divisor = tf.reduce_sum(tf.cast(mask, tf.float64))
        divisor *= share.counts
        whole = total(self._session, self._session.tag("loss"), divisor, "the entries that a loss counts")
        part = tf.math.divide_no_nan(divisor, whole * share.fraction)
        return value * tf.cast(tf.stop_gradient(part), value.dtype)

    def _of_whole(self, y_true: Any, y_pred: Any, sample_weight: Any, share: Share) -> Any:
        """Return the loss of the whole batch: one number that is no mean of the shares'."""
        self._session.notice(
            f"the loss {getattr(self._loss, 'name', 'of the model')} mixes samples, so all ranks' predictions are "
            "joined for it; one that returns a value per sample needs no such exchange"
        )

        def joined(each: Any) -> Any:
            mask = getattr(each, "_keras_mask", None)
            rows = join_rows(each, share, self._session)
            if mask is not None:
                rows._keras_mask = join_rows(mask, share, self._session)
            return rows

        parts = tree.map_structure(lambda each: None if each is None else joined(each), (y_true, y_pred, sample_weight))
        return self._loss(*parts)


@contextmanager
def _seen_reductions() -> Iterator[list[tuple[Any, Any, Any, str]]]:
    """Yield a list that receives ``(values, sample weights, mask, reduction)`` of what Keras reduces within."""
    _install()
    before = getattr(_reading, "seen", None)
    _reading.seen = seen = list[tuple[Any, Any, Any, str]]()
    try:
        yield seen
    finally:
        _reading.seen = before


def _install() -> None:
    """Let Keras's reduction tell what it was given: a loss can make its mask itself, and tells nobody."""
    reduce = keras_loss.reduce_weighted_values
    if getattr(reduce, "_told", False):
        return

    def telling(
        values: Any,
        sample_weight: Any = None,
        mask: Any = None,
        reduction: str = "sum_over_batch_size",
        dtype: Any = None,
    ) -> Any:
        seen = getattr(_reading, "seen", None)
        if seen is not None:
            seen.append((values, sample_weight, mask, reduction))
        return reduce(values, sample_weight=sample_weight, mask=mask, reduction=reduction, dtype=dtype)

    telling._told = True  # type: ignore[attr-defined]
    keras_loss.reduce_weighted_values = telling
