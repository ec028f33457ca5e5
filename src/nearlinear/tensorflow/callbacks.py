"""Letting callbacks decide the same on every rank, and write on rank 0 alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any

import keras

from nearlinear import events
from nearlinear.tensorflow.session import Session

# These write and decide nothing: other ranks do without.
WRITERS = ("TensorBoard", "CSVLogger", "ProgbarLogger", "RemoteMonitor")
_REPORT_S = 0.2


def on_every_rank(callbacks: Any, session: Session, stepped: Callable[[int], None]) -> Any:
    """Return the callbacks for this rank: those of the script, and one that keeps the ranks together.

    Args:
        callbacks: A callback, a list of them, a ``CallbackList`` or None.
        session: This process's part in the run.
        stepped: Called with the number of steps that are over since the last call.
    """
    together = Together(session, stepped)
    if isinstance(callbacks, keras.callbacks.CallbackList):
        callbacks.callbacks = _of_this_rank(callbacks.callbacks, session)
        together.set_model(callbacks._model if hasattr(callbacks, "_model") else callbacks.model)
        together.set_params(callbacks.params)
        callbacks.callbacks.append(together)
        return callbacks
    given: Sequence[Any] = callbacks if isinstance(callbacks, (list, tuple)) else [callbacks] if callbacks else []
    return [*_of_this_rank(given, session), together]


def _of_this_rank(callbacks: Sequence[Any], session: Session) -> list[Any]:
    """Return the callbacks without those that only write, where this is not rank 0."""
    if session.rank == 0:
        return list(callbacks)
    kept = [each for each in callbacks if type(each).__name__ not in WRITERS]
    for each in kept:
        _take_part(each)
    return kept


def _take_part(callback: Any) -> None:
    """Let a callback that saves the model take part in that, and write and make no folders of its own.

    To save is a call of every rank: rank 0 writes and the others wait, or in a pipeline send what they hold.
    """
    if isinstance(callback, keras.callbacks.ModelCheckpoint):

        def save(epoch: Any, batch: Any, logs: Any) -> None:
            path = callback._get_file_path(epoch, batch, logs)
            if callback._should_save_model(epoch, batch, logs, path):
                (callback.model.save_weights if callback.save_weights_only else callback.model.save)(path)

        vars(callback)["_save_model"] = save
    elif isinstance(callback, keras.callbacks.BackupAndRestore):
        vars(callback)["_save_model"] = lambda: callback.model.save_weights(callback._weights_path)
        callback.delete_checkpoint = False  # rank 0 does


class Together(keras.callbacks.Callback):  # type: ignore[misc]
    """Counts the steps, lets all ranks stop where one does, and tells how the run goes."""

    def __init__(self, session: Session, stepped: Callable[[int], None]) -> None:
        super().__init__()
        self._session, self._stepped = session, stepped
        self._seen = -1
        self._clock = perf_counter()
        self._sent = (0, 0.0)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._seen = -1
        self._clock = perf_counter()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        steps, self._seen = batch - self._seen, batch
        self._stepped(steps)
        if self._session.mesh is not None:
            self._tell(steps)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if self._session.mesh is None:
            return
        self._tell(0, last=True)
        self.model.stop_training = any(
            self._session.all_gather_json(bool(self.model.stop_training), "whether to stop after this epoch")
        )

    def _tell(self, steps: int, *, last: bool = False) -> None:
        """Tell the launcher how far and how fast the run is."""
        now = perf_counter()
        done, waited = self._sent[0] + steps, self._session.waited_s
        if (now - self._clock < _REPORT_S and not last) or not done:
            self._sent = done, self._sent[1]
            return
        elapsed, self._clock = now - self._clock, now
        events.send_to_launcher(
            "step",
            rank=self._session.rank,
            model=0,
            step=self._session.connected.step,
            samples_per_s=done * self._session.samples / elapsed,
            waiting=(waited - self._sent[1]) / elapsed,
        )
        self._sent = 0, waited
