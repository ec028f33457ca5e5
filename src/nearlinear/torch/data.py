"""Giving each rank its share of every batch, with the loop, the batch size and the number of steps unchanged.

    batch sampler     [17 4 9 | 30 2 8 | 11 5]          one process: a batch of 8
    rank 0 of 3       [17 4 9]                          consecutive shares, so that joining them in the order of
    rank 1                    [30 2 8]                  the ranks gives the batch back
    rank 2                             [11 5]
    a last batch of 1 [21]  [21]  [21]                  ranks 1 and 2 hold a filler of weight zero

The order of the data depends on a seed and on the number of the pass alone: it is drawn from a generator of its own,
so dropout or any other draw does not change it, and one and N processes see the same batches.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import random
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from nearlinear.core.shares import share
from nearlinear.errors import InputError
from nearlinear.torch.session import Batch, Passage, Session, Weight, derived_seed

_PARTS = 64  # data sets that a data set consists of
_GLANCE = 64  # values of a tensor that stand for all of them
_KNOWN_SAMPLERS = (SequentialSampler, RandomSampler, SubsetRandomSampler, WeightedRandomSampler, BatchSampler)


def share_out(loader: Any, session: Session, weight: Weight | None, number: int) -> None:
    """Make ``loader`` hand out this rank's share of every batch.

    The object stays the user's own; its class becomes a subclass of what it was.

    Args:
        loader: A ``torch.utils.data.DataLoader``.
        session: The run.
        weight: What a share counts for; None: its samples.
        number: Which of the run's loaders it is, counted from zero.
    """
    seed = session.all_gather_json(_seed_of(loader), "the seeds of the data")[0]
    state = LoaderState(session, weight, number, derived_seed(seed, "loader", number))
    fields = vars(loader)
    if isinstance(loader.dataset, IterableDataset):
        if loader.batch_size is not None:
            fields["collate_fn"] = _ShareCollate(loader.collate_fn, session.part, session.parts)
    elif loader.batch_sampler is not None:
        fields["batch_sampler"] = _ShareSampler(loader.batch_sampler, state)
    else:
        fields["sampler"] = _OrderedSampler(loader.sampler, state)
    fields["_nearlinear"] = state
    fields["_iterator"] = None  # workers that persist from before would go on drawing the whole batches
    loader.__class__ = _shared(type(loader))  # type: ignore[arg-type]


def require_shareable(loader: Any, session: Session, number: int) -> None:
    """Check, with all ranks, that ``share_out`` can do its work.

    Raises:
        InputError: It is no DataLoader, is sharded already, has fewer samples than there are ranks, or has another
            length on another rank.
    """
    what = f"loader {number}"
    if not isinstance(loader, DataLoader):
        raise InputError(
            f"{what} is a {type(loader).__name__}; nearlinear shares out torch DataLoaders: wrap ready-made batches "
            "as DataLoader(batches, batch_size=None), or keep data that you shard yourself out of distribute"
        )
    if "_nearlinear" in vars(loader):
        raise InputError(f"{what} was handed to distribute before; hand each loader over once")
    for sampler in (loader.sampler, loader.batch_sampler, getattr(loader.batch_sampler, "sampler", None)):
        if isinstance(sampler, DistributedSampler):
            raise InputError(
                f"{what} has a DistributedSampler, which would shard the data a second time; remove it "
                "(shuffle=True does what it did), or keep this loader out of distribute"
            )
    try:
        length: int | None = len(loader.dataset)  # type: ignore[arg-type]
    except TypeError:
        length = None
    mine = {"length": length, "split": _split_of(loader.dataset), "content": _content_of(loader.dataset)}
    everyones = session.all_gather_json(mine, "the lengths of the data sets")
    lengths = [other["length"] for other in everyones]
    for rank, other in enumerate(lengths):
        if other != lengths[0]:
            raise InputError(
                f"the data set of {what} has {lengths[0]} samples on rank 0 and {other} on rank {rank}; "
                "every rank needs the whole data set (nearlinear shares it out)"
            )
        if everyones[rank]["split"] != everyones[0]["split"]:
            raise InputError(
                f"the data set of {what} is another part of the whole on rank {rank} than on rank 0; give "
                "random_split a generator=torch.Generator().manual_seed(0), or seed before it"
            )
        for name, digest in everyones[0]["content"].items():
            if everyones[rank]["content"].get(name, digest) != digest:
                raise InputError(
                    f"the data set of {what} holds other {name} on rank {rank} than on rank 0, or in another order, so "
                    "the ranks' shares would not make one batch; sort what is listed and seed what is drawn "
                    "(torch.manual_seed, random.seed), the same on all ranks"
                )
    if not getattr(loader, "in_order", True):
        raise InputError(f"{what} has in_order=False, so ranks would see batches in different orders; set it to True")
    if length is not None and not isinstance(loader.dataset, IterableDataset) and loader.batch_sampler is not None:
        if length < session.parts:
            raise InputError(
                f"the data set of {what} has {length} samples for {session.parts} ranks; start at most {max(length, 1)}"
            )
        if loader.batch_size is not None and loader.batch_size < session.parts:
            session.notice(
                f"batches of {loader.batch_size} leave {session.parts - loader.batch_size} of {session.parts} ranks "
                "without work in every step"
            )


def _split_of(dataset: Any) -> list[int]:
    """Return what tells one ``Subset`` (``random_split`` makes them) from another."""
    split = []
    while isinstance(dataset, Subset):
        split.append(derived_seed(*dataset.indices))
        dataset = dataset.dataset
    return split


def _content_of(dataset: Any, depth: int = 3) -> dict[str, int]:
    """Return digests, by attribute, of the names of files and the tensors that a data set consists of.

    Directories are listed in any order, and unseeded draws differ: then a sample's index says something else on each
    rank. Only file names are compared, for data may lie in different folders on different machines.
    """
    found: dict[str, int] = {}
    for name, value in (vars(dataset) if hasattr(dataset, "__dict__") else {}).items():
        if isinstance(value, Dataset | list | tuple) and depth:
            parts = [value] if isinstance(value, Dataset) else value
            for number, part in enumerate(parts if len(parts) <= _PARTS else ()):
                if isinstance(part, Dataset):
                    found |= {f"{name}[{number}].{n}": d for n, d in _content_of(part, depth - 1).items()}
        rows = value if isinstance(value, list | tuple) else ()
        if isinstance(dataset, TensorDataset) and name == "tensors":
            found[name] = derived_seed(*(_glance(tensor) for tensor in rows))
        elif len(rows) > 1 and all(isinstance(_first(row), str | os.PathLike) for row in rows):
            found[name] = derived_seed(*(os.fspath(_first(row)).rpartition("/")[2] for row in rows))
    return found


def _first(row: Any) -> Any:
    """Return a file's name from a row of a list of files: the name alone, or the name with its label."""
    return row[0] if isinstance(row, tuple) and row else row


def _glance(tensor: torch.Tensor) -> str:
    """Return some of a tensor's values as text."""
    flat = tensor.detach().flatten()
    return f"{tuple(tensor.shape)} {flat[:: max(1, len(flat) // _GLANCE)][:_GLANCE].tolist()}"


def _seed_of(loader: DataLoader[Any]) -> int:
    for source in (loader.sampler, getattr(loader.batch_sampler, "sampler", None), loader):
        generator = getattr(source, "generator", None)
        if isinstance(generator, torch.Generator):
            return int(generator.initial_seed())
    return int(torch.initial_seed())


class LoaderState:
    """Where one loader is in the data, and what it tells the session.

    Args:
        session: The run.
        weight: What a share counts for; None: its samples.
        number: Which of the run's loaders it is.
        seed: What its order depends on, the same on all ranks.
    """

    def __init__(self, session: Session, weight: Weight | None, number: int, seed: int) -> None:
        self.session, self.weight, self.number, self.seed = session, weight, number, seed
        self.next_pass = 0
        self.skip = 0  # batches of the next pass that a checkpoint says were seen
        self.drawn_ahead: list[tuple[int, Batch]] = []  # number and batch of what the latest iteration has drawn
        self.handed_out = 0  # batches of the pass in hand
        self.drawn = 0  # a digest of every index the sampler has given out, the same on all ranks
        self.running = False

    def seed_of_pass(self) -> int:
        """Return the seed of the pass that is about to begin."""
        return derived_seed(self.seed, "pass", self.next_pass)

    def state_dict(self) -> dict[str, int]:
        """Return the place in the data: the seed, the pass, and how many of its batches were handed out."""
        if self.running:
            return {"seed": self.seed, "pass": self.next_pass - 1, "batch": self.handed_out}
        return {"seed": self.seed, "pass": self.next_pass, "batch": self.skip}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go to that place: the next pass goes on there."""
        self.seed, self.next_pass, self.skip = state["seed"], state["pass"], state["batch"]
        self.running = False


@functools.cache
def _shared(base: type[Any]) -> type[Any]:
    """Return the subclass of the user's loader class that hands out shares."""

    def begin(self: Any) -> Iterator[Any]:
        state: LoaderState = self._nearlinear
        if state.session.is_past(state.number, state.next_pass):
            state.next_pass += 1
            return iter(())
        seed = state.seed_of_pass()
        # Workers that augment draw differently on each rank; a stream of data must come out the same on all.
        iterable = isinstance(self.dataset, IterableDataset)
        generator = torch.Generator()
        generator.manual_seed(seed if iterable else derived_seed(seed, "rank", state.session.part))
        vars(self)["generator"] = generator
        return _Pass(self, base.__iter__(self), _Streams(seed) if iterable and self.num_workers == 0 else None)

    def state_dict(self: Any) -> dict[str, int]:
        return self._nearlinear.state_dict()  # type: ignore[no-any-return]

    def load_state_dict(self: Any, state: Mapping[str, int]) -> None:
        self._nearlinear.load_state_dict(state)

    fields = {"__iter__": begin, "state_dict": state_dict, "load_state_dict": load_state_dict}
    return type(base.__name__, (base,), {**fields, "__module__": base.__module__, "__doc__": base.__doc__})


def require_same_batches(session: Session, step: int) -> None:
    """Check that all ranks draw the same batches from their samplers.

    Raises:
        InputError: They do not.
    """
    drawn = session.all_gather_json([state.drawn for state in session.states], "comparing the batches")
    for rank, other in enumerate(drawn):
        for number, digest in enumerate(other):
            if digest != drawn[0][number]:
                raise InputError(
                    f"by step {step} the sampler of loader {number} has given rank {rank} other batches than rank 0; "
                    "seed it, or let it draw from torch's, NumPy's or python's own generators"
                )


class _Pass(Iterator[Any]):
    """One pass over a loader: unpacks each share and tells the session what it counts for."""

    def __init__(self, loader: Any, batches: Iterator[Any], streams: _Streams | None) -> None:
        self._state: LoaderState = loader._nearlinear
        self._session = self._state.session
        self._batches = batches
        self._streams = streams
        self._ready_made = loader.batch_size is None and loader.batch_sampler is None
        self._indexed = not self._ready_made and not isinstance(loader.dataset, IterableDataset)
        self._drawn_ahead = self._state.drawn_ahead  # of the iteration that began with this pass
        self._passage: Passage = self._session.began_pass(self._state.number)
        state = self._state
        state.next_pass, state.running = state.next_pass + 1, True
        state.handed_out, skip, state.skip = (state.skip if self._indexed else 0), state.skip, 0
        if not self._indexed:
            for _ in range(skip):
                self._fetch()
                state.handed_out += 1

    def __len__(self) -> int:
        return len(self._batches)  # type: ignore[arg-type]

    def __del__(self) -> None:
        self._session.left_pass(self._passage)

    def _fetch(self) -> Any:
        if self._streams is None:
            return next(self._batches)
        with self._streams:
            return next(self._batches)

    def __next__(self) -> Any:
        state, session = self._state, self._session
        session.fetching()
        try:
            batch = self._fetch()
        except StopIteration:
            state.running = False
            session.ended_pass(self._passage)
            raise
        if self._indexed:
            if not self._drawn_ahead:
                raise InputError(
                    f"loader {state.number} hands out batches that it did not draw in this pass (does it fetch ahead "
                    "by itself?); hand the plain DataLoader over"
                )
            state.handed_out, info = self._drawn_ahead.pop(0)
        elif self._ready_made:
            batch, samples = split(batch, session)
            info = session.batch_of(samples)
        else:
            batch, info = batch.content, session.batch_of(batch.samples)
        state.handed_out += 1
        if 0 < info.samples < session.parts:
            session.notice(
                f"loader {state.number} has a batch of {info.samples} for {session.parts} ranks: the others hold a "
                "filler, which nl.mean and nl.gather leave out and sums of your own do not"
            )
        if state.weight is not None:
            info.weight = 0.0 if info.filler else float(state.weight(batch))
            if not 0.0 <= info.weight < math.inf:
                raise InputError(
                    f"weight(batch) is {info.weight:g} for batch {state.handed_out} of loader {state.number} on rank "
                    f"{session.rank}; it must be a number from 0 on, such as a count of tokens"
                )
        session.fetched(self._passage, info)
        return batch


class _OrderedSampler:
    """A sampler whose order depends on the seed and the number of the pass alone."""

    def __init__(self, sampler: Any, state: LoaderState) -> None:
        self._sampler, self._state = sampler, state

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._sampler, name)

    def __len__(self) -> int:
        return len(self._sampler)

    def __iter__(self) -> Iterator[Any]:
        # Not a generator function: the seed is that of now, not of the first `next`.
        seed = self._state.seed_of_pass()
        generator = torch.Generator()
        generator.manual_seed(seed)
        known, sampler = True, self._sampler
        while sampler is not None:
            known = known and type(sampler) in _KNOWN_SAMPLERS
            if hasattr(sampler, "generator"):
                sampler.generator = generator
            sampler = getattr(sampler, "sampler", None)
        return iter(self._sampler) if known else _under(_Streams(seed), self._sampler)


class _ShareSampler(_OrderedSampler):
    """A batch sampler that gives out this rank's share of each batch and notes the batch's size."""

    def __iter__(self) -> Iterator[list[Any]]:
        state = self._state
        state.drawn_ahead = []
        return self._shares(super().__iter__(), state.next_pass, state.skip, state.drawn_ahead)

    def _shares(
        self, batches: Iterator[Any], number_of_pass: int, skip: int, drawn: list[tuple[int, Batch]]
    ) -> Iterator[list[Any]]:
        session = self._state.session
        for number, batch in enumerate(batches):
            if number < skip or session.is_past(self._state.number, number_of_pass, number):
                continue
            indices = list(batch)
            drawn.append((number, session.batch_of(len(indices))))
            if session.parts > 1:
                self._state.drawn = derived_seed(self._state.drawn, *indices)
            mine = session.share(len(indices))
            yield indices[mine.start : mine.stop] or indices[-1:]


class _Streams:
    """The random streams of python, NumPy and torch, as a seed sets them; they stand still outside ``with``.

    For samplers and data sets that draw from the global streams: what else the script draws must not change them.
    """

    def __init__(self, seed: int) -> None:
        generator = torch.Generator()
        generator.manual_seed(seed)
        self._states: tuple[Any, Any, Any] = (
            random.Random(seed).getstate(),
            np.random.RandomState(seed % 2**32).get_state(),
            generator.get_state(),
        )

    def __enter__(self) -> None:
        self._exchange()

    def __exit__(self, *_: object) -> None:
        self._exchange()

    def _exchange(self) -> None:
        now = (random.getstate(), np.random.get_state(), torch.get_rng_state())
        ours, self._states = self._states, now
        random.setstate(ours[0])
        np.random.set_state(ours[1])
        torch.set_rng_state(ours[2])


def _under(streams: _Streams, items: Any) -> Iterator[Any]:
    with streams:
        iterator = iter(items)
    while True:
        with streams:
            try:
                item = next(iterator)
            except StopIteration:
                return
        yield item


@dataclasses.dataclass(slots=True)
class _Piece:
    """A rank's share of a batch of an iterable data set, with the batch's size."""

    content: Any
    samples: int

    def pin_memory(self) -> _Piece:
        return _Piece(torch.utils.data._utils.pin_memory.pin_memory(self.content), self.samples)  # type: ignore[no-untyped-call]


@dataclasses.dataclass(frozen=True, slots=True)
class _ShareCollate:
    """Collates this rank's share of the samples. (Every rank reads the whole stream: only so is it the same one.)"""

    collate: Callable[[list[Any]], Any]
    rank: int
    size: int

    def __call__(self, samples: list[Any]) -> _Piece:
        mine = share(len(samples), self.rank, self.size)
        return _Piece(self.collate(samples[mine.start : mine.stop] or samples[-1:]), len(samples))


def split(batch: Any, session: Session) -> tuple[Any, int]:
    """Return a rank's share of a ready-made batch, and the batch's size.

    The size is dimension 0 of the first tensor found; tensors and arrays that share it are split along it, everything
    else goes to all ranks.

    Raises:
        InputError: There is no tensor of at least one dimension in the batch.
    """
    sizes = [leaf.shape[0] for leaf in _leaves(batch)]
    if not sizes:
        raise InputError(
            f"a ready-made batch (a {type(batch).__name__}) holds no tensor whose dimension 0 could be shared out "
            "among the ranks; hand over a DataLoader with a batch_size"
        )
    samples = sizes[0]
    mine = session.share(samples)
    rows = slice(mine.start, mine.stop) if len(mine) else slice(max(samples - 1, 0), samples)

    def cut(leaf: Any) -> Any:
        return leaf[rows] if leaf.shape[0] == samples else leaf

    return (batch if len(mine) == samples else map_leaves(cut, batch)), samples


def _is_leaf(value: Any) -> bool:
    return isinstance(value, torch.Tensor | np.ndarray) and value.ndim > 0


def _leaves(value: Any) -> Iterator[Any]:
    if _is_leaf(value):
        yield value
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from _leaves(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _leaves(each)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for each_field in dataclasses.fields(value):
            yield from _leaves(getattr(value, each_field.name))


def map_leaves(fn: Callable[[Any], Any], value: Any) -> Any:
    """Return ``value`` with ``fn`` applied to its tensors and arrays, through mappings, sequences and dataclasses."""
    if _is_leaf(value):
        return fn(value)
    if isinstance(value, Mapping):
        mapped = {key: map_leaves(fn, each) for key, each in value.items()}
        if type(value) is dict:
            return mapped
        try:
            return type(value)(mapped)  # type: ignore[call-arg]
        except TypeError:
            return mapped
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_leaves(fn, each) for each in value))
    if isinstance(value, list | tuple):
        return type(value)(map_leaves(fn, each) for each in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        changed = {f.name: map_leaves(fn, getattr(value, f.name)) for f in dataclasses.fields(value) if f.init}
        return dataclasses.replace(value, **changed)
    return value
