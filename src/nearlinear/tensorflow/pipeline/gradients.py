"""Adding up gradients: over microbatches, and over the stages that hold the same variable."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from nearlinear.tensorflow.pipeline.transfer import Links
from nearlinear.tensorflow.pipeline.variables import Held


class Sum:
    """The sum of some gradients; of rows of an embedding it stays rows, as in one process."""

    def __init__(self) -> None:
        self._dense: Any = None
        self._rows: list[tf.IndexedSlices] = []

    def add(self, gradient: Any) -> None:
        """Add one; None adds nothing."""
        if isinstance(gradient, tf.IndexedSlices):
            self._rows.append(gradient)
        elif gradient is not None:
            self._dense = gradient if self._dense is None else self._dense + gradient

    @property
    def value(self) -> Any:
        """The sum, None if nothing was added."""
        if not self._rows:
            return self._dense
        first = self._rows[0]
        values = tf.concat([tf.convert_to_tensor(each.values) for each in self._rows], 0)
        indices = tf.concat([tf.cast(each.indices, first.indices.dtype) for each in self._rows], 0)
        rows = tf.IndexedSlices(values, indices, first.dense_shape)
        return rows if self._dense is None else self._dense + tf.convert_to_tensor(rows)


def over_stages(variables: Sequence[keras.Variable], gradients: Sequence[Any], held: Held, links: Links) -> list[Any]:
    """Return the gradients, of variables that several ranks hold the sum of theirs: the same bits on each.

    Args:
        variables: This rank's own, in the model's order.
        gradients: Of each, None where there is none.
        held: Who holds them.
        links: To the other ranks.
    """
    here, what = links.mesh.rank, "the gradients of variables that several stages use"
    shared = [number for number, each in enumerate(variables) if len(held.ranks_of(each)) > 1]
    for number in shared:
        for rank in held.ranks_of(variables[number]):
            if rank != here:
                links.send_once(rank, f"shared:{variables[number].path}", _apart(gradients[number]), what)
    found = list(gradients)
    for number in shared:
        total = Sum()
        for rank in held.ranks_of(variables[number]):
            if rank == here:
                total.add(gradients[number])
            else:
                pieces = links.receive_once(rank, f"shared:{variables[number].path}", what)
                total.add(_whole(pieces, variables[number]))
        found[number] = total.value
    return found


def _apart(gradient: Any) -> list[Any]:
    if isinstance(gradient, tf.IndexedSlices):
        return [tf.convert_to_tensor(gradient.values), tf.convert_to_tensor(gradient.indices)]
    return [] if gradient is None else [tf.convert_to_tensor(gradient)]


def _whole(pieces: Sequence[Any], variable: keras.Variable) -> Any:
    if len(pieces) == 2:
        return tf.IndexedSlices(*pieces, dense_shape=tf.constant(list(variable.shape), tf.int32))
    return pieces[0] if pieces else None
