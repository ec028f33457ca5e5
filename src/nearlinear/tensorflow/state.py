"""Making the replicas equal at the start, and checking that they stay so."""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from nearlinear.errors import DriftError, InputError
from nearlinear.tensorflow.session import Session

_APART = 0x9E3779B1  # between the seeds of two ranks' streams


class Replicas:
    """The variables that are the same on all ranks.

    Args:
        model: The model.
        optimizers: What trains it.
        session: This process's part in the run.
        check_every: Steps between two comparisons.
    """

    def __init__(self, model: keras.Model, optimizers: Sequence[Any], session: Session, check_every: int) -> None:
        self._model, self._optimizers = weakref.ref(model), list(optimizers)
        self._session, self._check_every = session, check_every
        self._known: set[int] = set()
        self._begun = False
        self.step = 0

    def begin(self) -> None:
        """Give every rank rank 0's values of what is new since the last call; all ranks call it.

        Raises:
            InputError: The ranks have not built the same model.
        """
        if self._session.mesh is None:
            return
        fresh = [each for each in self._variables() if id(each) not in self._known]
        if self._begun and not fresh:
            return
        session = self._session
        shapes = [[each.path, list(each.shape), str(each.dtype)] for each in fresh]
        digest = hashlib.blake2b(repr(shapes).encode(), digest_size=16).hexdigest()
        everyone = session.all_gather_json({"digest": digest, "variables": len(shapes)}, "comparing models")
        other = next((rank for rank, each in enumerate(everyone) if each != everyone[0]), None)
        if other is not None:
            raise InputError(
                f"rank 0 has built {everyone[0]['variables']} variables and rank {other} {everyone[other]['variables']}"
                ", or others; let nothing in the model depend on nl.rank() or nl.world_size()"
            )
        for number, variable in enumerate(fresh):
            self._known.add(id(variable))
            mine = np.ascontiguousarray(variable.numpy())
            whole = session.connected.broadcast(f"start:{len(self._known)}:{number}", mine, "equal weights")
            value = whole.view(mine.dtype).reshape(variable.shape)
            if is_seed(variable) and session.rank:
                value = separated(value, session.rank)
            if session.rank:
                variable.assign(value)
        if any(map(is_seed, fresh)):
            session.notice("what layers draw at random (dropout, augmentation) differs by rank, and from one process")
        self._begun = True

    def stepped(self, steps: int) -> None:
        """Count ``steps`` more; compare the replicas after the first one and every ``check_every``."""
        before, self.step = self.step, self.step + steps
        if self._session.mesh is None:
            return
        self._session.mesh.step = self.step
        if before == 0 or before // self._check_every != self.step // self._check_every:
            self.compare()

    def compare(self) -> None:
        """Compare the replicas.

        Raises:
            DriftError: They are not equal.
        """
        named = [(each.path, each) for each in self._variables() if not is_seed(each)]
        digests = [_digest(variable.numpy()) for _, variable in named]
        everyone = self._session.all_gather_json(digests, "comparing replicas")
        for rank, other in enumerate(everyone):
            if other != everyone[0]:
                place = next((p for p, (a, b) in enumerate(zip(everyone[0], other, strict=False)) if a != b), 0)
                raise DriftError(
                    f"after step {self.step}, {named[place][0]} on rank {rank} is not what it is on rank 0; what "
                    "changes a weight must be the same on every rank (an assign under nl.is_main(), a callback that "
                    "draws at random)"
                )

    def _variables(self) -> list[Any]:
        model = self._model()
        variables = [] if model is None else list(model.variables)
        metrics = {id(variable) for metric in getattr(model, "metrics", []) for variable in metric.variables}
        variables += [variable for optimizer in self._optimizers for variable in optimizer.variables]
        unique = {id(each): each for each in variables if id(each) not in metrics}
        return [each for each in unique.values() if each.value is not None]


def separated(seed: Any, rank: int) -> Any:
    """Return rank 0's state of a stream of random numbers, shape ``(2,)``, as that of ``rank``'s own stream."""
    return (seed.astype(np.int64) + np.array([rank * _APART % 2**32, 0])).astype(seed.dtype)


def is_seed(variable: Any) -> bool:
    """Return whether a variable is the state of a stream of random numbers."""
    return "seed_generator_state" in variable.path


def _digest(array: Any) -> str:
    return hashlib.blake2b(np.ascontiguousarray(array).tobytes(), digest_size=8).hexdigest()
