"""Turning the gradients of every rank's share into those of the whole batch, within TensorFlow's graph.

    backward pass ──▶ gradients of bucket 0 ready ──▶ start ──┐  copied, times the share's fraction
                 ──▶ gradients of bucket 1 ready ──▶ start ──┤
                 ──▶ ...                                     ▼
                      thread: all-reduce of bucket 0, of bucket 1, ... while the backward pass goes on
                                                             ▼
                 all started ──▶ finish of bucket 0, of bucket 1, ... ──▶ optimizer

A *start* returns at once, and the dataflow runtime calls it as soon as the bucket's gradients are there, so what is
exchanged overlaps with what is still computed. A *finish* waits; none begins before all are started, so a runtime with
a single thread cannot stand in one while the other rank waits for a start. Rank 0 tells the order: the runtimes of two
ranks may reach their buckets in different ones.

Gradients of embeddings are rows (``IndexedSlices``): all ranks' rows are joined in the order of the batch, which is
what one process has. To make them dense would change the optimizer, which is lazy on rows.
"""

from __future__ import annotations

import hashlib
import itertools
import queue
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from nearlinear.tensorflow.session import Session

SMALLEST, LARGEST = 1 << 18, 1 << 22  # bytes of a bucket, between which they are
BUCKETS = 5  # that a model is cut into there: all but the last are exchanged beside the backward pass
WHAT = "gradient exchange"
_ALIGNED = 64  # bytes: TensorFlow takes an array over without copying it if it begins at a multiple of this

Array = NDArray[Any]


@dataclass(slots=True)
class _Bucket:
    """Gradients that are exchanged together.

    Args:
        name: The same on all ranks, its own among all buckets.
        places: Numbers of the gradients.
        dtype: Their type.
        offsets: Where each begins, in elements; and where the last ends.
        memory: Of this step and of earlier ones.
    """

    name: str
    places: list[int]
    dtype: tf.DType
    offsets: list[int] = field(default_factory=list)
    memory: list[Array] = field(default_factory=list)

    def flat(self) -> Array:
        """Return memory for the whole bucket that TensorFlow does not look into."""
        dtype = np.dtype(self.dtype.as_numpy_dtype)
        size = self.offsets[-1] * dtype.itemsize
        # Every view counts as one reference, and TensorFlow's tensors hold views: beside the list, the loop and the
        # call there are none if it has let go of all.
        raw = next((each for each in self.memory if sys.getrefcount(each) == 3), None)
        if raw is None:
            raw = np.empty(size + _ALIGNED, np.uint8)
            self.memory.append(raw)
        shift = -raw.ctypes.data % _ALIGNED
        flat: Array = raw[shift : shift + size].view(dtype)
        return flat


class Reducer:
    """The exchange of the gradients of one optimizer.

    Args:
        session: This process's part in the run.
        number: Of the optimizer, its own in this run and the same on all ranks.
        compress: ``"bf16"``: what float32 gradients are rounded to on the wire.
        bucket_bytes: Bytes of gradient per exchange; None: a few exchanges per step.
    """

    def __init__(self, session: Session, number: int, *, compress: str | None, bucket_bytes: int | None) -> None:
        self.session, self._number = session, number
        self._compress, self._bucket_bytes = compress, bucket_bytes
        self._before: tuple[Any, list[tf.Tensor]] | None = None  # the graph of the latest exchange, and its outcome
        self.noted: dict[str, Array] | None = None  # the latest whole gradients by name, where somebody asked for them

    def combine(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """Return the gradients of the whole batch.

        Args:
            gradients: Of this rank's share: tensors, ``IndexedSlices`` or None.
            variables: That they belong to.
        """
        names = [each.path for each in variables]
        gradients = [
            each if each is None or isinstance(each, tf.IndexedSlices) else tf.ensure_shape(each, variable.shape)
            for each, variable in zip(gradients, variables, strict=True)
        ]
        whole = list(gradients) if self.session.mesh is None else self._after_the_last(gradients, names)
        if self.noted is not None:
            there = [
                (name, tf.convert_to_tensor(each)) for name, each in zip(names, whole, strict=True) if each is not None
            ]

            def note(*arrays: Array) -> None:
                self.noted = {name: array.copy() for (name, _), array in zip(there, arrays, strict=True)}

            tf.numpy_function(note, [each for _, each in there], [])
        return whole

    def _after_the_last(self, gradients: Sequence[Any], names: Sequence[str]) -> list[Any]:
        """Sum gradients; where one graph does so twice, one after the other, for their messages may bear one name."""
        if tf.executing_eagerly():
            return self._summed(gradients, names)
        graph = tf.compat.v1.get_default_graph()
        before = self._before[1] if self._before is not None and self._before[0] is graph else []
        with tf.control_dependencies(before):
            whole = self._summed(gradients, names)
        self._before = graph, [tf.nest.flatten(each, expand_composites=True)[0] for each in whole if each is not None]
        return whole

    def _summed(self, gradients: Sequence[Any], names: Sequence[str]) -> list[Any]:
        # A name that does not tell how often this was traced, which may differ between ranks.
        site = f"{self._number}.{hashlib.blake2b(repr(names).encode(), digest_size=6).hexdigest()}"
        scale = self.session.share().fraction if not self.session.summed else self.session.share().counts
        whole = list(gradients)
        rows = [place for place, each in enumerate(whole) if isinstance(each, tf.IndexedSlices)]
        for place in rows:
            whole[place] = self._join_rows(f"{site}.{place}", whole[place], scale)
        buckets = self._buckets(site, whole)
        started = [self._start(bucket, [whole[place] for place in bucket.places], scale) for bucket in buckets]
        with tf.control_dependencies([*started, *(whole[place].indices for place in rows)]):
            for bucket, ticket in zip(buckets, started, strict=True):
                finished = self._finish(bucket, ticket, [whole[place] for place in bucket.places])
                for place, gradient in zip(bucket.places, finished, strict=True):
                    whole[place] = gradient
        return whole

    def _buckets(self, site: str, gradients: Sequence[Any]) -> list[_Bucket]:
        """Group the dense gradients, those of the last layers first, for they are ready first."""
        dense = [each for each in gradients if each is not None and not isinstance(each, tf.IndexedSlices)]
        total = sum(each.shape.num_elements() * each.dtype.size for each in dense)
        limit = self._bucket_bytes or min(max(total // BUCKETS, SMALLEST), LARGEST)
        buckets: list[_Bucket] = []
        open_: dict[tf.DType, tuple[_Bucket, int]] = {}
        for place in reversed(range(len(gradients))):
            gradient = gradients[place]
            if gradient is None or isinstance(gradient, tf.IndexedSlices):
                continue
            size = gradient.shape.num_elements() * gradient.dtype.size
            bucket, filled = open_.get(gradient.dtype, (None, 0))
            if bucket is None or filled + size > limit:
                bucket, filled = _Bucket(f"{site}.{len(buckets)}", [], gradient.dtype, [0]), 0
                buckets.append(bucket)
            bucket.places.append(place)
            step = _ALIGNED // gradient.dtype.size
            bucket.offsets.append(bucket.offsets[-1] + -(-gradient.shape.num_elements() // step) * step)
            open_[gradient.dtype] = bucket, filled + size
        return buckets

    def _start(self, bucket: _Bucket, gradients: Sequence[tf.Tensor], scale: tf.Tensor) -> tf.Tensor:
        def start(scale: Array, *arrays: Array) -> Array:
            flat = bucket.flat()
            factor = arrays[0].dtype.type(scale)
            for array, begin, end in zip(arrays, bucket.offsets, bucket.offsets[1:], strict=False):
                used = begin + array.size
                np.multiply(array.reshape(-1), factor, out=flat[begin:used])
                flat[used:end] = 0
            return np.array(_exchanger(self.session).put(bucket.name, flat, self._compress))

        ticket = tf.numpy_function(self.session.guarded(start), [scale, *gradients], tf.int64, stateful=False)
        ticket.set_shape([])
        return ticket

    def _finish(self, bucket: _Bucket, ticket: tf.Tensor, gradients: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        shapes = [tuple(gradient.shape) for gradient in gradients]

        def finish(ticket: Array) -> list[Array]:
            flat = _exchanger(self.session).get(int(ticket))
            return [
                flat[begin : begin + int(np.prod(shape))].reshape(shape)
                for begin, shape in zip(bucket.offsets, shapes, strict=False)
            ]

        dtypes = [bucket.dtype] * len(gradients)
        finished = tf.numpy_function(self.session.guarded(finish), [ticket], dtypes, stateful=False)
        for gradient, shape in zip(finished, shapes, strict=True):
            gradient.set_shape(shape)
        return list(finished)

    def _join_rows(self, tag: str, rows: tf.IndexedSlices, scale: tf.Tensor) -> tf.IndexedSlices:
        mesh = self.session.connected

        def join(scale: Array, indices: Array, values: Array) -> list[Array]:
            if not scale:  # a filler's rows are no one's
                indices, values = indices[:0], values[:0]
            all_indices = mesh.exchange(f"{tag}.i", np.ascontiguousarray(indices), WHAT)
            mine = np.ascontiguousarray(values * values.dtype.type(scale))
            all_values = mesh.exchange(f"{tag}.v", mine, WHAT)
            return [
                np.concatenate([each.view(indices.dtype) for each in all_indices]),
                np.concatenate([each.view(values.dtype).reshape(-1, *values.shape[1:]) for each in all_values]),
            ]

        guarded = self.session.guarded(join)
        types = [rows.indices.dtype, rows.values.dtype]
        indices, values = tf.numpy_function(guarded, [scale, rows.indices, rows.values], types)
        indices.set_shape([None])
        values.set_shape([None, *rows.values.shape[1:]])
        return tf.IndexedSlices(values, indices, rows.dense_shape)


class _Exchanger:
    """The thread that sums buckets over the ranks, in the order in which rank 0 started them."""

    def __init__(self, session: Session) -> None:
        self._mesh = session.connected
        self._order: queue.SimpleQueue[str] = queue.SimpleQueue()  # rank 0's own, as it starts them
        self._telling = threading.Lock()  # of two buckets that start at once, all ranks hear of the same one first
        self._tickets = 0
        self._started: dict[str, list[tuple[int, Array, str | None]]] = {}
        self._done: dict[int, Array] = {}
        self._error: Exception | None = None
        self._changed = threading.Condition()
        threading.Thread(target=self._work, name="nearlinear-reducer", daemon=True).start()

    def put(self, name: str, flat: Array, compress: str | None) -> int:
        with self._changed:
            self._tickets += 1
            ticket = self._tickets
            self._started.setdefault(name, []).append((ticket, flat, compress))
            self._changed.notify_all()
        if self._mesh.rank == 0:
            with self._telling:
                self._order.put(name)
                for peer in self._mesh.peers:
                    self._mesh.send(peer, "order", name.encode(), WHAT)
        return ticket

    def get(self, ticket: int) -> Array:
        self._mesh.until(lambda limit_s: self._over(ticket, limit_s), WHAT)
        with self._changed:
            if ticket not in self._done:
                assert self._error is not None
                raise self._error
            return self._done.pop(ticket)

    def _over(self, ticket: int, limit_s: float) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: ticket in self._done or self._error is not None, limit_s)

    def _work(self) -> None:
        try:
            for number in itertools.count():
                name = self._next()
                with self._changed:
                    self._changed.wait_for(partial(self._started.get, name))
                    ticket, flat, compress = self._started[name].pop(0)
                if compress and flat.dtype == np.float32:
                    short = flat.astype(tf.bfloat16.as_numpy_dtype)
                    self._mesh.all_reduce(f"sum:{number}", short, WHAT)
                    flat[:] = short
                else:
                    self._mesh.all_reduce(f"sum:{number}", flat, WHAT)
                with self._changed:
                    self._done[ticket] = flat
                    del flat
                    self._changed.notify_all()
        except Exception as error:  # noqa: BLE001  whatever it is, who waits for a sum is to hear of it
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _next(self) -> str:
        """Return which bucket comes next; between two steps there is none for as long as the script likes."""
        if self._mesh.rank == 0:
            return self._order.get()
        while not self._mesh.arrived(0, "order"):
            pass
        return self._mesh.receive(0, "order", WHAT).tobytes().decode()


_exchangers: dict[int, _Exchanger] = {}
_making = threading.Lock()  # TensorFlow starts two buckets at once


def _exchanger(session: Session) -> _Exchanger:
    """Return the one thread of this process; buckets of all optimizers pass through it."""
    with _making:
        if id(session) not in _exchangers:
            _exchangers[id(session)] = _Exchanger(session)
        return _exchangers[id(session)]
