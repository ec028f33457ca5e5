"""Turning BatchNorm over a rank's share into BatchNorm over the whole batch, where the script asks for it.

``BatchNormalization(synchronized=True)`` normalises by the mean and variance of the batch: the ranks add up their
counts, sums and sums of squares, in the forward pass, and the gradients of these in the backward pass.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from nearlinear.tensorflow.session import Session

_numbers = itertools.count()


def synchronise(model: keras.Model, session: Session) -> None:
    """Hook the layers that ask for it; name those that do not."""
    layers = [each for each in model._flatten_layers() if isinstance(each, keras.layers.BatchNormalization)]
    for layer in layers:
        if layer.synchronized:
            layer._moments = _Moments(layer, session)
    own = [layer.name for layer in layers if not layer.synchronized]
    if own:
        names = ", ".join(own[:2]) + (f" and {len(own) - 2} more" if len(own) > 2 else "")
        session.notice(
            f"BatchNormalization ({names}) normalises over each rank's share of the batch; synchronized=True gives the "
            "numbers of one process"
        )


class _Moments:
    """The mean and variance of a layer's inputs over the whole batch."""

    def __init__(self, layer: keras.layers.BatchNormalization, session: Session) -> None:
        self._layer, self._session, self._tag = layer, session, f"batchnorm:{next(_numbers)}"
        self._own = layer._moments

    def __call__(self, inputs: Any, mask: Any) -> tuple[tf.Tensor, tf.Tensor]:
        if isinstance(inputs, keras.KerasTensor) or not tf.is_tensor(inputs):
            moments: tuple[tf.Tensor, tf.Tensor] = self._own(inputs, mask)
            return moments
        axes = self._layer._reduction_axes
        weights = tf.ones_like(inputs) if mask is None else tf.broadcast_to(mask[..., None], tf.shape(inputs))
        share = self._session.share()
        weights = tf.cast(weights, inputs.dtype) * tf.cast(share.counts, inputs.dtype)
        count = tf.reduce_sum(weights, axes)
        local = tf.stack([count, tf.reduce_sum(inputs * weights, axes)])
        count, added = tf.unstack(self._add(local, "sums", share.fraction))
        average = tf.math.divide_no_nan(added, count)
        # In two rounds, for the sum of squares of what is near zero is exact, and E(x^2) - E(x)^2 is not.
        shape = [1] * inputs.shape.rank
        shape[self._layer.axis] = inputs.shape[self._layer.axis]
        spread = tf.square(inputs - tf.reshape(tf.stop_gradient(average), shape)) * weights
        squares = self._add(tf.reduce_sum(spread, axes)[None], "squares", share.fraction)[0]
        # d/dx of the spread around a mean that is held is that of the variance: sum(x - mean) is zero.
        return average, tf.math.divide_no_nan(squares, count)

    def _add(self, local: tf.Tensor, what: str, fraction: tf.Tensor) -> tf.Tensor:
        mesh, session = self._session.connected, self._session
        tag = f"{self._tag}:{what}"

        def add(direction: str) -> Callable[[Any], Any]:
            def act(mine: Any) -> Any:
                said = mesh.exchange(f"{tag}:{direction}", np.ascontiguousarray(mine), "the statistics of a batch")
                return np.sum([each.view(mine.dtype).reshape(mine.shape) for each in said], axis=0)

            return session.guarded(act)

        @tf.custom_gradient  # type: ignore[untyped-decorator]
        def added(mine: tf.Tensor) -> tuple[tf.Tensor, Callable[[tf.Tensor], tf.Tensor]]:
            whole = tf.numpy_function(add("forward"), [mine], mine.dtype)
            whole.set_shape(mine.shape)

            def gradient(upstream: tf.Tensor) -> tf.Tensor:
                # The loss of the batch is that of the ranks by their fractions, and this rank's gradient will yet be
                # multiplied by its own.
                part = tf.cast(fraction, upstream.dtype)
                back = tf.numpy_function(add("backward"), [upstream * part], upstream.dtype)
                back.set_shape(mine.shape)
                return tf.math.divide_no_nan(back, part)

            return whole, gradient

        return added(local)
