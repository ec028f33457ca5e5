"""Letting every rank take part in what callbacks save, and rank 0 alone write it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras

from nearlinear.tensorflow.callbacks import WRITERS, Together
from nearlinear.tensorflow.session import Session


def for_stages(callbacks: Any, session: Session, stepped: Callable[[int], None]) -> Any:
    """Return the callbacks for this rank: those of the script, and one that keeps the ranks together.

    To save a model asks every rank for its part, so a callback that saves does so on every rank, at the same time;
    where that writes nothing it makes no folders either.

    Args:
        callbacks: A callback, a list of them, a ``CallbackList`` or None.
        session: This process's part in the run.
        stepped: Called with the number of steps that are over since the last call.
    """
    together = Together(session, stepped)
    if isinstance(callbacks, keras.callbacks.CallbackList):
        for each in callbacks.callbacks:
            _take_part(each, session)
        callbacks.append(together)
        return callbacks
    given: Sequence[Any] = callbacks if isinstance(callbacks, (list, tuple)) else [callbacks] if callbacks else []
    kept = [each for each in given if session.rank == 0 or type(each).__name__ not in WRITERS]
    for each in kept:
        _take_part(each, session)
    return [*kept, together]


def _take_part(callback: Any, session: Session) -> None:
    if session.rank == 0:
        return
    if isinstance(callback, keras.callbacks.ModelCheckpoint):

        def save(epoch: Any, batch: Any, logs: Any) -> None:
            path = callback._get_file_path(epoch, batch, logs)
            if callback._should_save_model(epoch, batch, logs, path):
                (callback.model.save_weights if callback.save_weights_only else callback.model.save)(path)

        vars(callback)["_save_model"] = save
    elif isinstance(callback, keras.callbacks.BackupAndRestore):
        vars(callback)["_save_model"] = lambda: callback.model.save_weights(callback._weights_path)
        callback.delete_checkpoint = False
