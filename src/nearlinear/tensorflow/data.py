"""Turning the batches that a script reads into this rank's share of each.

Every rank reads the whole of the data, in the same order, and keeps consecutive samples of every batch. So any source
works (arrays, ``tf.data``, generators, ``PyDataset``), a file that cannot be split too, and the batch size, the number
of steps and the order are those of one process. Beside its share a rank gets three numbers, the *mark* of the batch:

    samples   in the whole batch
    mine      of this rank's share; 0 where there are fewer samples than ranks and it holds a copy of the first
    digest    of some of the batch's values, by which the ranks see that they read the same
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf
from keras import tree
from keras.src.trainers.data_adapters.data_adapter import DataAdapter

from nearlinear.core.shares import share
from nearlinear.errors import InputError
from nearlinear.tensorflow.session import Session

_DIGESTED = 4096  # values of every tensor of a batch


class SharedData(DataAdapter):  # type: ignore[misc]
    """A Keras data adapter whose batches are ``(this rank's share, mark)``.

    Args:
        whole: The adapter of the unsplit data.
        rank: Which share.
        ranks: Of how many.
    """

    def __init__(self, whole: Any, rank: int, ranks: int) -> None:
        self._whole, self._rank, self._ranks = whole, rank, ranks
        self._dataset = share_out(whole.get_tf_dataset(), rank, ranks)

    @property
    def element_spec(self) -> Any:
        """What a share looks like."""
        return self._dataset.element_spec[0]

    def get_tf_dataset(self) -> tf.data.Dataset:
        """Return the shares."""
        return self._dataset

    @property
    def num_batches(self) -> int | None:
        """Batches of a pass, as many as of the unsplit data; None if that is unknown."""
        batches: int | None = self._whole.num_batches
        return batches

    @property
    def batch_size(self) -> int | None:
        """Samples of a whole batch."""
        size: int | None = self._whole.batch_size
        return size

    @property
    def has_partial_batch(self) -> bool | None:
        """Whether the last batch is shorter."""
        partial: bool | None = self._whole.has_partial_batch
        return partial

    @property
    def partial_batch_size(self) -> int | None:
        """Samples of the last whole batch, if it is shorter."""
        size: int | None = self._whole.partial_batch_size
        return size

    def on_epoch_begin(self) -> None:
        """Tell the unsplit data."""
        self._whole.on_epoch_begin()

    def on_epoch_end(self) -> None:
        """Tell the unsplit data."""
        self._whole.on_epoch_end()


class SharedDataset:
    """A ``tf.data.Dataset`` for a loop of the script's own, of which a rank sees its share of every batch.

    It is iterated in Python; ``len``, ``cardinality`` and ``element_spec`` are there, further transformations belong
    before ``distribute``.
    """

    def __init__(self, whole: tf.data.Dataset, session: Session) -> None:
        self._session = session
        self._dataset = share_out(whole, session.rank, session.size).prefetch(1)
        self._passes = self._batches = 0  # begun so far, and fetched of the last one
        self._skip = 0  # batches of the next pass, for a checkpoint was taken in its middle

    @property
    def element_spec(self) -> Any:
        """What a share looks like."""
        return self._dataset.element_spec[0]

    def cardinality(self) -> tf.Tensor:
        """Return the number of batches, as ``tf.data.Dataset`` does."""
        return self._dataset.cardinality()

    def __len__(self) -> int:
        return len(self._dataset)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"a distributed data set has no {name}; transform the data set before nl.distribute")

    def state_dict(self) -> dict[str, int]:
        """Return the place in the data."""
        return {"passes": self._passes, "batches": self._batches}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go to that place: the next pass begins there."""
        begun = state["passes"] - (1 if state["batches"] else 0)
        for _ in range(begun - self._passes):
            next(iter(self._dataset), None)  # one that shuffles draws a new order for every pass
        self._passes, self._batches, self._skip = begun, 0, state["batches"]

    def __iter__(self) -> Iterator[Any]:
        if not tf.executing_eagerly():
            raise InputError(
                "a data set that nl.distribute returned is iterated in Python; take the loop out of @tf.function and "
                "leave the step in it"
            )
        self._passes += 1
        self._batches, self._skip = self._skip, 0
        for data, mark in self._dataset.skip(self._batches):
            self._batches += 1
            samples, mine, _ = mark.numpy()
            if self._session.mesh is not None:
                require_same_batch(self._session, mark.numpy())
            self._session.fetched(int(samples), int(mine))
            inputs = data[0] if isinstance(data, tuple) else data
            self._session.seen = tree.map_structure(lambda each: tf.TensorSpec(each.shape, each.dtype), inputs)
            yield data
            for act in self._session.after_batch:
                act()
        self._batches = 0


def share_out(whole: tf.data.Dataset, rank: int, ranks: int) -> tf.data.Dataset:
    """Return a data set of ``(share, mark)`` of batches; in a run of one process the share is the batch."""
    is_tuple = isinstance(whole.element_spec, tuple)

    def split(*element: Any) -> Any:
        return share_of(element if is_tuple else element[0], rank, ranks)

    shares = whole.map(split, num_parallel_calls=2, deterministic=True)
    if ranks == 1 or whole.options().autotune.enabled is not None:
        return shares
    # At the end of a pass tf.data waits for the thread that tunes it to wake up, which it does in longer and longer
    # intervals (seen in TensorFlow 2.21: every other epoch took twice its time). All ranks would wait for the unlucky.
    options = tf.data.Options()
    options.autotune.enabled = False
    return shares.with_options(options)


def share_of(batch: Any, rank: int, ranks: int) -> tuple[Any, tf.Tensor]:
    """Return ``(share, mark)`` of a batch.

    Args:
        batch: A structure of tensors (dense, ragged or sparse) or arrays with their samples along dimension 0.
        rank: Which share.
        ranks: Of how many.

    Raises:
        InputError: Nothing in it has a dimension for its samples.
    """
    batch = tree.map_structure(lambda leaf: tf.convert_to_tensor(leaf) if isinstance(leaf, np.ndarray) else leaf, batch)
    leaves = [leaf for leaf in tree.flatten(batch) if _is_batched(leaf)]
    if not leaves:
        raise InputError("a batch holds no tensor with a dimension for its samples; batch the data (dataset.batch(64))")
    samples = tf.cast(_rows(leaves[0]), tf.int64)
    each, rest = samples // ranks, samples % ranks
    start = rank * each + tf.minimum(tf.constant(rank, tf.int64), rest)
    mine = each + tf.cast(rank < rest, tf.int64)
    filler = mine == 0
    start, stop = tf.where(filler, tf.zeros_like(start), start), tf.where(filler, tf.ones_like(start), start + mine)
    digest = tf.add_n([_digest(leaf) for leaf in leaves])
    agree = tf.reduce_all([tf.equal(tf.cast(_rows(leaf), tf.int64), samples) for leaf in leaves])
    digest = tf.where(agree, digest, tf.constant(np.inf, tf.float64))
    mark = tf.stack([tf.cast(samples, tf.float64), tf.cast(mine, tf.float64), digest])
    if ranks == 1:
        return batch, mark

    def cut(leaf: Any) -> Any:
        part = _cut(leaf, start, stop)
        if isinstance(leaf, tf.Tensor) and leaf.shape.rank and leaf.shape[0] is not None:
            rows = max(1, len(share(leaf.shape[0], rank, ranks)))
            part = tf.ensure_shape(part, [rows, *leaf.shape[1:]])
        return part

    return tree.map_structure(lambda leaf: cut(leaf) if _is_batched(leaf) else leaf, batch), mark


def part_of(batch: Any, samples: tf.Tensor, share: tf.Tensor) -> tuple[Any, tf.Tensor]:
    """Return the part of a batch that lies between two fractions of it, and how many samples that is.

    Where it is none, a copy of the first sample stands in for it.

    Args:
        batch: As that of ``share_of``.
        samples: In the batch.
        share: The fractions, shape ``(2,)``; where one part ends the next begins (``core.shares.share_between``).
    """
    ends = tf.cast(tf.floor(share * samples + 0.5), tf.int64)
    mine = ends[1] - ends[0]
    start, stop = tf.where(mine > 0, ends[0], 0), tf.where(mine > 0, ends[1], 1)
    part = tree.map_structure(lambda leaf: _cut(leaf, start, stop) if _is_batched(leaf) else leaf, batch)
    return part, tf.cast(mine, tf.float64)


def require_same_batch(session: Session, mark: Any) -> None:
    """Compare the batches of all ranks by their marks.

    Raises:
        InputError: They are not of one size, or hold other values.
    """
    marks = np.stack(
        [each.view(np.float64) for each in session.connected.exchange("mark", mark[[0, 2]], "comparing batches")]
    )
    compare_marks(marks)


def compare_marks(marks: Any) -> None:
    """Raise if the ranks' ``(samples, digest)``, shape ``(ranks, 2)``, are not all the same."""
    if np.isinf(marks[0][1]):
        raise InputError(
            "the tensors of a batch differ in their first dimension, so which are its samples cannot be told; give "
            "each one row per sample, or keep what belongs to no sample out of the data"
        )
    other = next((rank for rank, mark in enumerate(marks) if not np.array_equal(mark, marks[0], equal_nan=True)), None)
    if other is None:
        return
    if marks[other][0] != marks[0][0]:
        what = f"rank 0 reads a batch of {marks[0][0]:.0f} samples and rank {other} one of {marks[other][0]:.0f}"
    else:
        what = f"rank 0 and rank {other} read different batches"
    raise InputError(
        f"{what}; the data must come in the same order on every rank: keras.utils.set_random_seed(0) at the start, or "
        "a seed for what shuffles (dataset.shuffle(n, seed=0), sorted file names)"
    )


def _is_batched(leaf: Any) -> bool:
    if isinstance(leaf, (tf.RaggedTensor, tf.SparseTensor)):
        return True
    return isinstance(leaf, tf.Tensor) and leaf.dtype != tf.variant and leaf.shape.rank != 0


def _rows(leaf: Any) -> tf.Tensor:
    if isinstance(leaf, tf.RaggedTensor):
        return leaf.nrows()
    return leaf.dense_shape[0] if isinstance(leaf, tf.SparseTensor) else tf.shape(leaf, tf.int64)[0]


def _cut(leaf: Any, start: tf.Tensor, stop: tf.Tensor) -> Any:
    if isinstance(leaf, tf.SparseTensor):
        shape = leaf.dense_shape
        first = tf.concat([start[None], tf.zeros_like(shape[1:])], 0)
        return tf.sparse.slice(leaf, first, tf.concat([(stop - start)[None], shape[1:]], 0))
    return leaf[start:stop]


def _digest(leaf: Any) -> tf.Tensor:
    values = leaf.flat_values if isinstance(leaf, tf.RaggedTensor) else leaf
    values = values.values if isinstance(values, tf.SparseTensor) else values
    some = tf.reshape(values, [-1])[:_DIGESTED]
    if some.dtype == tf.string:
        some = tf.strings.to_hash_bucket_fast(some, 1 << 20)
    if some.dtype.is_complex:
        some = tf.math.real(some)
    weights = tf.range(1, tf.size(some) + 1, dtype=tf.float64)  # the order counts too
    return tf.reduce_sum(tf.cast(some, tf.float64) * weights)
