"""Receiving what a microbatch waits for while earlier ones are computed.

The microbatches of one call of the model are known, and some are received ahead. Where every call is one microbatch
(``nl.step``), the next call is the script's to make. Both ends of a link *promise* each other that it will be like this
one, of the samples of the next microbatch, and the reader has room ready before it computes:

    call 3 begins    take what call 2 promised ── promise call 4, begin to receive it ── compute ── send
    call 4 is other  the maker sends what was promised, whatever it holds; the reader drops it; then what is meant

Every rank makes the same calls, so both ends know whether a promise was kept.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from nearlinear.torch.pipeline.stages import Crossing
from nearlinear.torch.pipeline.transfer import Arriving

if TYPE_CHECKING:
    from nearlinear.torch.pipeline.executor import Executor

_AHEAD = 2  # microbatches whose tensors are being received while one is computed

Coming = list[tuple[Crossing, list[Arriving]]]


@dataclass(frozen=True)
class Direction:
    """Tensors that this rank takes from others, or that others take from it.

    Args:
        executor: This rank's part of the model.
        what: The pass that they are of, for messages.
        crossings: What they are, in the order in which they pass.
        ranks: The other ranks that each comes from, or goes to.
    """

    executor: Executor
    what: str
    crossings: Sequence[Crossing]
    ranks: Callable[[Crossing], Sequence[int]]

    def receive(self, names: Collection[str], samples: int, microbatch: int) -> Coming:
        """Begin to receive those in ``names``, of one microbatch."""
        return [
            (each, [self._receive(each, samples, rank, microbatch) for rank in self.ranks(each)])
            for each in self.crossings
            if each.name in names
        ]

    def _receive(self, crossing: Crossing, samples: int, rank: int, microbatch: int) -> Arriving:
        links = self.executor.links
        assert links is not None
        room = self.executor.empty(crossing, samples)
        return links.expect(room, rank, f"the {self.what} of microbatch {microbatch}")

    def send_anything(self, names: Collection[str], samples: int) -> None:
        """Send as much as ``receive`` takes."""
        links = self.executor.links
        for each in self.crossings:
            for rank in self.ranks(each) if each.name in names else ():
                assert links is not None
                links.send(self.executor.empty(each, samples).zero_(), rank, f"the {self.what} of no microbatch")


class Promise:
    """What this rank and its neighbours take the next microbatch to be.

    Args:
        coming: What this rank takes.
        going: What others take from it.
    """

    def __init__(self, coming: Direction, going: Direction) -> None:
        self.coming, self._going = coming, going
        self._made: tuple[frozenset[str], int, Coming] | None = None

    def make(self, names: Collection[str], samples: int) -> None:
        """Promise a microbatch of so many samples of which ``names`` pass, and begin to receive it."""
        self._made = frozenset(names), samples, self.coming.receive(names, samples, 0)

    def take(self, names: Collection[str], samples: int) -> Coming | None:
        """Return what is arriving if this was promised; None, with the promise settled, if not."""
        if self._made is not None and self._made[:2] == (frozenset(names), samples):
            coming, self._made = self._made[2], None
            return coming
        self.settle()
        return None

    def settle(self) -> None:
        """Pass what was promised, if anything was, without using it."""
        if self._made is None:
            return
        (names, samples, coming), self._made = self._made, None
        self._going.send_anything(names, samples)
        for _, arriving in coming:
            for each in arriving:
                each.take()


class Ahead:
    """Receives tensors some microbatches before they are needed.

    Args:
        promise: What the run before this one promised.
        sizes: Samples in each microbatch of this one.
        names: What passes.
        following: Samples of the run that will follow, which is promised; 0: none will.
    """

    def __init__(self, promise: Promise, sizes: Sequence[int], names: Collection[str], following: int) -> None:
        self._promise, self._sizes, self._names, self._following = promise, sizes, frozenset(names), following
        begun = promise.take(self._names, sizes[0])
        self._arriving: list[Coming] = [] if begun is None else [begun]

    def take(self, microbatch: int) -> Iterator[tuple[Crossing, list[torch.Tensor]]]:
        """Return what one microbatch waits for."""
        while len(self._arriving) < min(microbatch + 1 + _AHEAD, len(self._sizes)):
            number = len(self._arriving)
            self._arriving.append(self._promise.coming.receive(self._names, self._sizes[number], number))
        if self._following and microbatch == len(self._sizes) - 1:
            self._promise.make(self._names, self._following)
        coming, self._arriving[microbatch] = self._arriving[microbatch], []
        return ((each, [one.take() for one in arriving]) for each, arriving in coming)
