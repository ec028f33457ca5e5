"""Letting an optimizer step a stage's own variables, with clipping and checks over those of all stages.

The optimizer is built for all variables, as one process builds it, and lets go of the state of those that lie with
other ranks. What Keras computes over all variables at once is put together here: the global norm, whether all gradients
are finite, moving averages.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import ops
from keras.src import backend
from keras.src.optimizers.schedule_free_adamw import ScheduleFreeAdamW

from nearlinear.errors import InputError
from nearlinear.tensorflow.pipeline.variables import Held
from nearlinear.tensorflow.session import Session

_ALIGNED = ("_model_variables_moving_average", "_accumulated_gradients")
_LISTS = ("_variables", "_trainable_variables")  # of another kind


class Stepping:
    """One rank's part of an optimizer.

    Args:
        optimizer: The model's.
        variables: All that it trains, in the model's order.
        held: Who holds them; told who holds the optimizer's state.
        session: The run.
        name: Of what it serves, among all that the mesh serves.

    Raises:
        InputError: The optimizer is one whose steps cannot be taken apart.
    """

    def __init__(
        self, optimizer: Any, variables: Sequence[keras.Variable], held: Held, session: Session, name: str
    ) -> None:
        self.optimizer = optimizer
        self._inner = getattr(optimizer, "inner_optimizer", optimizer)
        self._session, self._name = session, name
        if type(optimizer).__name__ == "MultiOptimizer":
            raise InputError(
                "a MultiOptimizer steps variables by groups, which no pipeline takes apart; use strategy 'data'"
            )
        self.own = [each for each in variables if held.here(each)]
        # Of what several ranks hold, the first counts in a norm.
        self._first = {id(each) for each in self.own if held.ranks_of(each)[0] == session.rank}
        self._counting: list[bool] = []
        self._places = [number for number, each in enumerate(variables) if held.here(each)]
        if not optimizer.built:
            self._build(variables, held)
        self.state = self._place(held)
        self._instead()
        self._apply = tf.function(self._stepped, autograph=False, reduce_retracing=True)
        self.eager = False

    def step(self, gradients: Sequence[Any]) -> None:
        """Step the rank's own variables; all ranks call it.

        Args:
            gradients: Of ``own``, None where there is none.
        """
        if not self.own and not self._meets:
            self._inner._iterations.assign_add(1)
        elif self.eager:
            self._stepped(list(gradients))
        else:
            self._apply(list(gradients))

    def count(self) -> None:
        """Count a step without taking it."""
        self._inner._iterations.assign_add(1)

    @property
    def _meets(self) -> bool:
        """Whether the ranks exchange something within a step."""
        return bool(self._inner.global_clipnorm) or self._inner is not self.optimizer

    def _stepped(self, gradients: list[Any]) -> None:
        pairs = [
            (gradient, variable) for gradient, variable in zip(gradients, self.own, strict=True) if gradient is not None
        ]
        self._counting = [id(variable) in self._first for _, variable in pairs]
        if pairs:
            self.optimizer.apply([gradient for gradient, _ in pairs], [variable for _, variable in pairs])
        else:
            self._idle()

    def _idle(self) -> None:
        """Take part in a step in which this rank changes nothing."""
        inner = self._inner

        def count() -> None:
            steps = inner.gradient_accumulation_steps
            if inner.global_clipnorm:
                due = True if not steps else ops.equal((inner._iterations + 1) % steps, 0)
                ops.cond(due, lambda: self._squares([]), lambda: tf.zeros((), tf.float64))
            inner._iterations.assign_add(1)

        if inner is self.optimizer:
            count()
            return
        finite = self.optimizer.check_finite([])

        def good() -> None:
            count()
            self.optimizer._stateful_handle_finite_grads([], [])

        ops.cond(finite, good, self.optimizer._stateful_handle_non_finite_grads)

    # ---- building, and letting go

    def _build(self, variables: Sequence[keras.Variable], held: Held) -> None:
        inner, made = self._inner, type(self._inner).add_variable_from_reference

        def briefly(reference_variable: Any, name: str | None = None, initializer: Any = "zeros") -> Any:
            if held.here(reference_variable):
                return made(inner, reference_variable, name=name, initializer=initializer)
            path = f"{reference_variable.path.replace('/', '_')}_{name or 'var'}"
            variable = inner.add_variable(reference_variable.shape, initializer, reference_variable.dtype, name=path)
            held.place(variable, held.ranks_of(reference_variable))
            held.let_go_of(variable)  # at once, so that there is never memory for all
            return variable

        if not isinstance(inner, ScheduleFreeAdamW):  # which writes to what it makes
            vars(inner)["add_variable_from_reference"] = briefly
        try:
            with backend.name_scope(self.optimizer.name, caller=self.optimizer):
                self.optimizer.build(list(variables))
        finally:
            vars(inner).pop("add_variable_from_reference", None)
        self.optimizer.built = True

    def _place(self, held: Held) -> list[keras.Variable]:
        """Place the state that belongs to a variable with it, and return that state."""
        inner, state = self._inner, list[keras.Variable]()
        trained = list(inner._trainable_variables)
        tracked = {id(each) for each in inner._variables}
        for name, value in sorted(vars(inner).items()):
            aligned = isinstance(value, list) and len(value) == len(trained) and name not in _LISTS
            if not aligned or not all(each is None or isinstance(each, keras.Variable) for each in value):
                continue
            for each, reference in zip(value, trained, strict=True):
                if each is None or id(each) not in tracked:
                    continue
                state.append(each)
                if not held.knows(each):
                    held.place(each, held.ranks_of(reference))
        return state

    # ---- what Keras computes over all variables

    def _instead(self) -> None:
        inner = self._inner
        for name in (
            "_update_model_variables_moving_average",
            "_overwrite_model_variables_with_average_value",
            "_backend_reset_gradient_accumulators",
        ):
            vars(inner)[name] = self._on_own(getattr(type(inner), name))
        if inner.global_clipnorm:
            vars(inner)["_clip_gradients"] = self._clip
        if inner is not self.optimizer:
            check = type(self.optimizer).check_finite

            def check_finite(gradients: Sequence[Any]) -> Any:
                mine = check(self.optimizer, gradients) if len(gradients) else tf.constant(True)
                return self._total(tf.cast(tf.logical_not(mine), tf.float64), "whether gradients are finite") == 0.0

            vars(self.optimizer)["check_finite"] = check_finite

    def _on_own(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*variables: Any) -> Any:
            with self._own_lists():
                return method(self._inner, *([self.own] if variables else []))

        return call

    @contextlib.contextmanager
    def _own_lists(self) -> Iterator[None]:
        """Let lists with an entry for every variable have those of the rank's own."""
        state = vars(self._inner)
        before = {name: state[name] for name in _ALIGNED if name in state}
        state.update({name: [each[place] for place in self._places] for name, each in before.items()})
        try:
            yield
        finally:
            state.update(before)

    def _clip(self, gradients: Sequence[Any]) -> list[Any]:
        # As keras.src.optimizers.base_optimizer.clip_by_global_norm, with the squares of all stages.
        limit = self._inner.global_clipnorm
        norm = tf.sqrt(self._squares(gradients))
        scale = limit * tf.minimum(1.0 / norm, 1.0 / limit) + (norm - norm)
        return [each if each is None else each * tf.cast(scale, each.dtype) for each in gradients]

    def _squares(self, gradients: Sequence[Any]) -> Any:
        """Return the sum of the squares of all stages' gradients."""
        own = [each for each, counts in zip(gradients, self._counting, strict=False) if each is not None and counts]
        squares = [tf.cast(ops.sum(ops.square(each)), tf.float64) for each in own]
        mine = tf.add_n(squares) if squares else tf.zeros((), tf.float64)
        return self._total(mine, "the global norm of the gradients")

    def _total(self, value: Any, what: str) -> Any:
        def add(mine: Any) -> Any:
            said = self._session.connected.exchange(f"{self._name}:{what}", np.ascontiguousarray(mine), what)
            return np.sum([each.view(np.float64)[0] for each in said])

        total = tf.numpy_function(self._session.guarded(add), [value], tf.float64)
        total.set_shape(())
        return total
