"""What the regularizers of a rank's variables add to the loss, and the gradients of that."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf


class Penalties:
    """The penalties of some variables.

    Args:
        variables: With regularizers; no other rank counts them.
    """

    def __init__(self, variables: Sequence[keras.Variable]) -> None:
        self._variables = list(variables)
        self._tape: tf.GradientTape | None = None
        self._values: Any = None

    def __bool__(self) -> bool:
        return bool(self._variables)

    def forward(self, *, differentiate: bool) -> Any:
        """Return them, shape ``(1, variables)``."""
        if not differentiate:
            return self._computed()
        with tf.GradientTape() as self._tape:
            self._values = self._computed()
        return self._values

    def backward(self, gradient: Any) -> list[tuple[keras.Variable, Any]]:
        """Return the gradient of each variable, given those of what ``forward`` returned."""
        if self._tape is None or gradient is None:
            return []
        found = self._tape.gradient(self._values, [each.value for each in self._variables], output_gradients=gradient)
        self._tape = self._values = None
        return [(each, one) for each, one in zip(self._variables, found, strict=True) if one is not None]

    def like(self) -> tuple[str, list[int]]:
        """Return their type and shape."""
        return str(keras.config.floatx()), [1, len(self._variables)]

    def _computed(self) -> Any:
        found = [tf.convert_to_tensor(each.regularizer(each)) for each in self._variables]
        return tf.stack([tf.cast(tf.reduce_sum(each), keras.config.floatx()) for each in found])[None]
