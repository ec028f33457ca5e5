"""Turning what members say of a direct exchange into the outer parameters that all hold, or into a reason why not.

    ready, ready, ready ─▶ close: whose updates count ─▶ chunks of the mean, and a hash from every member ─▶ verdict

The centre's side of ``exchange.py``: it sums nothing, but holds at the end what the members hold. No socket, no clock.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from nearlinear.runtime.local.admission import FAR, Rejected, norm_of
from nearlinear.runtime.local.chunks import Chunks
from nearlinear.runtime.local.codecs import Floats, Undecodable
from nearlinear.runtime.local.exchange import CENTRE, Plan
from nearlinear.runtime.local.frames import Malformed
from nearlinear.runtime.local.update import hash_of


@dataclass(frozen=True, slots=True)
class Ready:
    """What a member says of an update whose chunks are on their way.

    Args:
        samples: What it counts for; 0: there are no chunks.
        steps: Steps it was made in.
        norms: Of every owner's part of it, in the order of the plan's members.
        came: When this was said.
    """

    samples: float
    steps: int
    norms: tuple[float, ...]
    came: float

    @property
    def norm(self) -> float:
        """Of the whole update."""
        return math.sqrt(sum(each * each for each in self.norms))


class Vote:
    """One turn, as the centre sees it.

    Attributes:
        plan: Who takes part in it.
        ready: What was said of updates, by member.
        weights: What each update enters the mean with, by member; ``None`` until ``close``.
        samples: What the mean is of.
        after: The outer parameters with the mean, as far as it is here.
        hash: Of ``after``, once it is whole.
        done: The hashes that members told.

    Args:
        plan: Of the turn.
        chunks: Of the vector.
        outer: Where it starts from.
    """

    def __init__(self, plan: Plan, chunks: Chunks, outer: Floats) -> None:
        self.plan, self.ready, self.done = plan, dict[int, Ready](), dict[int, str]()
        self.weights: dict[int, float] | None = None
        self.samples, self.hash = 0.0, ""
        self.after = np.empty_like(outer)
        self._chunks, self._outer = chunks, outer
        self._missing = set(range(chunks.count))
        self._square = self._most = 0.0  # of the mean's norm

    def close(self, counted: Collection[int], factors: Mapping[int, float], before: float) -> None:
        """Settle whose updates count.

        Args:
            counted: Members that are ready.
            factors: What clipping leaves of each one's update.
            before: The norm that the mean of the round before could have.
        """
        self.samples = sum(self.ready[member].samples for member in sorted(counted))
        self.weights = {
            member: factors[member] * self.ready[member].samples / self.samples
            for member in sorted(counted)
            if self.ready[member].samples
        }
        # Beside the updates the mean has what encoding left out of the ones before.
        self._most = FAR * (self.norm + before)

    @property
    def norm(self) -> float:
        """The largest norm that the mean of these updates can have."""
        return sum(weight * self.ready[member].norm for member, weight in (self.weights or {}).items())

    def told(self, member: int) -> tuple[list[tuple[int, float]], list[tuple[int, float]]]:
        """Return what an owner needs to sum its part: weights, and norms of the parts that it sums, by member."""
        assert self.weights is not None
        place = self.plan.members.index(member)
        return list(self.weights.items()), [(each, self.ready[each].norms[place]) for each in self.weights]

    def mean(self, sender: int, chunk: int, payload: memoryview) -> None:
        """Take in a chunk of the mean.

        Raises:
            Malformed: It cannot come from there.
            Rejected: It must not enter the outer parameters.
        """
        due = 0 <= chunk < self._chunks.count and chunk in self._missing and self.weights is not None
        if not due or sender != (self.plan.owner(chunk) if self.plan.teller == CENTRE else self.plan.teller):
            raise Malformed(f"chunk {chunk} of a mean that does not come from there")
        try:
            values = self._chunks.decode(chunk, payload)
        except Undecodable as error:
            raise Malformed(str(error)) from None
        self._square += norm_of(values) ** 2
        if self._square > self._most**2:
            raise Rejected(
                f"a mean has the norm {self._square**0.5:.3g}, where {self._most:.3g} is the most there can be"
            )
        at = self._chunks.span(chunk)
        np.subtract(self._outer[at], values, out=self.after[at])
        self._missing.remove(chunk)
        if not self._missing:
            self.hash = hash_of(self.after)

    def agreed(self, here: Collection[int]) -> bool:
        """Return whether all of these members, and the centre, hold the mean.

        Raises:
            Rejected: One holds another.
        """
        for member, told in sorted(self.done.items()):
            if self.hash and told != self.hash:
                raise Rejected(f"member {member} has made other outer parameters of it than the centre")
        return bool(self.hash) and all(member in self.done for member in here)

    def missing(self, here: Collection[int]) -> Sequence[int]:
        """Return the members of the plan that are not among these and have not told that they hold the mean."""
        return [each for each in self.plan.members if each not in here and each not in self.done]
