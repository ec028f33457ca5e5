"""Exchanges of small tensors, within TensorFlow's graph or not: sums over the ranks, and their rows joined."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from nearlinear.errors import InputError
from nearlinear.tensorflow.session import Session, Share


def total(session: Session, tag: str, value: tf.Tensor, what: str) -> tf.Tensor:
    """Return the sum of a float64 tensor over the ranks; within a graph or not."""

    def add(mine: Any) -> Any:
        said = session.connected.exchange(tag, np.ascontiguousarray(mine), what)
        return np.sum([each.view(np.float64).reshape(mine.shape) for each in said], axis=0)

    summed = tf.numpy_function(session.guarded(add), [value], tf.float64)
    summed.set_shape(value.shape)
    return summed


def join_rows(tensor: Any, share: Share, session: Session) -> tf.Tensor:
    """Return the rows of all ranks.

    Args:
        tensor: One row per sample of this rank's share, shape ``(mine, ...)``.
        share: Of the batch in hand.
        session: This process's part in the run.

    Returns:
        Shape ``(samples, ...)``. The gradient of a row goes back to the rank that has it, from all ranks.
    """
    mesh, tag = session.connected, session.tag("rows")
    tensor = tf.convert_to_tensor(tensor)

    def join(mine: Any, rows: Any) -> Any:
        array = np.ascontiguousarray(rows[: int(mine)])
        shape = np.array(rows.shape[1:], np.int64)
        said = mesh.exchange(tag, shape.tobytes() + array.tobytes(), "gathering rows")
        for rank, each in enumerate(said):
            theirs = each[: shape.nbytes].copy().view(np.int64)
            if not np.array_equal(theirs, shape):
                raise InputError(
                    f"a row of rank {mesh.rank} has the shape {shape.tolist()} and one of rank {rank} "
                    f"{theirs.tolist()}; rows that are joined must be alike: pad them to one length"
                )
        return np.concatenate([each[shape.nbytes :].copy().view(rows.dtype).reshape(-1, *shape) for each in said])

    def back(mine: Any, gradient: Any) -> Any:
        # Every rank's loss is of the whole batch, and counts by its fraction in the end: so the sum, over the ranks,
        # of fraction times gradient; and that over this rank's fraction, by which it will be multiplied.
        whole = np.ascontiguousarray(gradient)
        said = mesh.exchange(f"{tag}:b", whole, "the gradients of gathered rows")
        added = np.sum([each.view(whole.dtype).reshape(whole.shape) for each in said], axis=0)
        counts = [
            int(each.view(np.int64)[0])
            for each in mesh.exchange(f"{tag}:n", np.array([mine], np.int64), "counting rows")
        ]
        first = sum(counts[: mesh.rank])
        return added[first : first + int(mine)] if mine else np.zeros((1, *whole.shape[1:]), whole.dtype)

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def joined(rows: tf.Tensor) -> tuple[tf.Tensor, Callable[[tf.Tensor], tf.Tensor]]:
        whole = tf.numpy_function(session.guarded(join), [share.mine, rows], rows.dtype)
        whole.set_shape([None, *rows.shape[1:]])

        def gradient(upstream: tf.Tensor) -> tf.Tensor:
            fraction = tf.cast(share.fraction, upstream.dtype)
            mine = tf.numpy_function(session.guarded(back), [share.mine, upstream * fraction], upstream.dtype)
            mine.set_shape(rows.shape)
            return tf.math.divide_no_nan(mine, fraction)

        return whole, gradient

    if tensor.dtype.is_floating or tensor.dtype.is_complex:
        return joined(tensor)
    whole = tf.numpy_function(session.guarded(join), [share.mine, tensor], tensor.dtype)
    whole.set_shape([None, *tensor.shape[1:]])
    return whole
