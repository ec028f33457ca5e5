"""Sending tensors between stages: described once, then bytes alone, while the next microbatch is computed."""

from __future__ import annotations

import json
import queue
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from nearlinear.errors import InputError, NearlinearError
from nearlinear.runtime.mesh import Mesh


class Links:
    """This rank's tensors on their way to others, and theirs on the way here.

    What is sent leaves in the background, in order. ``flush`` waits for it, and comes before any other exchange.

    Args:
        mesh: The connections.
        name: Of what they serve, among all that the mesh serves; the same on all ranks.
    """

    def __init__(self, mesh: Mesh, name: str) -> None:
        self.mesh, self._name = mesh, name
        self._queue: queue.Queue[Any] = queue.Queue()
        self._failed: BaseException | None = None
        self._sent: dict[tuple[int, str, Any], list[Any]] = {}
        self._told: dict[tuple[int, str, Any], list[Any]] = {}
        self._thread = threading.Thread(target=self._send_all, name="nearlinear-links", daemon=True)
        self._thread.start()

    # ---- tensors that both ends can describe

    def send(self, peer: int, tag: str, tensor: tf.Tensor | None, what: str) -> None:
        """Send the values of a tensor; None goes as no bytes."""
        self._put(peer, tag, np.empty(0, np.uint8) if tensor is None else array_of(tensor), what)

    def receive(self, peer: int, tag: str, like: tuple[str, Sequence[int]], what: str) -> tf.Tensor | None:
        """Return the tensor of a type and shape that was sent; None where None was."""
        name, shape = like
        raw = self._get(peer, tag, what)
        kind = tf.as_dtype(name)
        if not raw.nbytes:
            return tf.zeros(shape, kind) if 0 in shape else None
        return tf.convert_to_tensor(raw.view(kind.as_numpy_dtype).reshape(tuple(shape)))

    # ---- tensors that only the sender can

    def send_described(
        self, peer: int, tag: str, key: Any, tensors: Sequence[tf.Tensor | None], names: Sequence[str], what: str
    ) -> None:
        """Send tensors, described where ``key`` is new.

        Args:
            peer: To whom.
            tag: Whose name these tensors have, the same each time.
            key: What their types and shapes depend on, the same at both ends.
            tensors: The tensors; None where there is none, for this key.
            names: Of what each of them is, for messages.
            what: What they are sent in.

        Raises:
            InputError: They are of other types or shapes than the last time with this key, or of a type without bytes.
        """
        layout = [None if each is None else [each.dtype.name, list(each.shape)] for each in tensors]
        known = self._sent.get((peer, tag, key))
        if known is None:
            for each, name in zip(tensors, names, strict=True):
                if each is not None and each.dtype in (tf.string, tf.variant, tf.resource):
                    raise InputError(
                        f"{name} is a tensor of type {each.dtype.name}, which cannot pass from one stage to the next; "
                        "make it numbers before the model, or use strategy 'data'"
                    )
            self._sent[peer, tag, key] = layout
            self._put(peer, f"{tag}:layout", json.dumps(layout).encode(), what)
        elif known != layout:
            name = next(name for name, one, other in zip(names, known, layout, strict=True) if one != other)
            raise InputError(
                f"{name} has another shape for another batch of the same shapes; no stage can know what to wait for: "
                "use strategy 'data'"
            )
        for number, each in enumerate(tensors):
            if each is not None:
                self.send(peer, f"{tag}:{number}", each, what)

    def receive_described(self, peer: int, tag: str, key: Any, what: str) -> list[tf.Tensor | None]:
        """Return the tensors that ``send_described`` sent."""
        layout = self._told.get((peer, tag, key))
        if layout is None:
            layout = self._told[peer, tag, key] = json.loads(self._get(peer, f"{tag}:layout", what).tobytes())
        return [
            None if each is None else self.receive(peer, f"{tag}:{number}", each, what)
            for number, each in enumerate(layout)
        ]

    def send_once(self, peer: int, tag: str, tensors: Sequence[tf.Tensor | None], what: str) -> None:
        """Send tensors with their description."""
        layout = [None if each is None else [each.dtype.name, list(each.shape)] for each in tensors]
        self._put(peer, f"{tag}:layout", json.dumps(layout).encode(), what)
        for number, each in enumerate(tensors):
            if each is not None:
                self.send(peer, f"{tag}:{number}", each, what)

    def receive_once(self, peer: int, tag: str, what: str) -> list[tf.Tensor | None]:
        """Return the tensors that ``send_once`` sent."""
        layout = json.loads(self._get(peer, f"{tag}:layout", what).tobytes())
        return [
            None if each is None else self.receive(peer, f"{tag}:{number}", each, what)
            for number, each in enumerate(layout)
        ]

    # ---- the background

    def flush(self) -> None:
        """Return when all has been sent."""
        self._queue.join()
        self._raise()

    def _put(self, peer: int, tag: str, data: Any, what: str) -> None:
        self._raise()
        self._queue.put((peer, f"{self._name}:{tag}", data, what))

    def _get(self, peer: int, tag: str, what: str) -> Any:
        self._raise()
        return self.mesh.receive(peer, f"{self._name}:{tag}", what)

    def _send_all(self) -> None:
        while True:
            peer, tag, data, what = self._queue.get()
            try:
                if self._failed is None:
                    self.mesh.send(peer, tag, data, what)
            except (NearlinearError, OSError, ValueError) as error:
                self._failed = error
            finally:
                self._queue.task_done()

    def _raise(self) -> None:
        if self._failed is not None:
            raise self._failed


def array_of(tensor: tf.Tensor) -> np.ndarray[Any, Any]:
    """Return a tensor's values, without a copy where they are in this machine's memory."""
    return np.ascontiguousarray(tensor._numpy())
