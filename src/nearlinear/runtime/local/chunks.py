"""Turning a vector into chunks that are encoded, sent and summed one by one, and owners, each of a run of them.

    vector      |          parameters, as the codec says          | buffers, float32 |
    chunks      |  0  |  1  |  2  |  3  |  4  |  5  |  6  |  7  | 8|   9    |   10    |
    owners      |      member 0      |     member 2     |        member 3            |

A chunk is a whole number of the codecs' blocks, so what is decoded from chunks has the bits that the whole vector would
have had (but for ``topk``, which then keeps the largest values of every chunk).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from nearlinear.runtime.local.codecs import BLOCK, Bytes, Data, Feedback, Floats, decode, encode, nbytes
from nearlinear.runtime.local.update import Sizes

MANY = 128  # chunks that a vector of some size has at least: so many steps in which sums and messages overlap
LARGEST = 1 << 16  # values of a chunk


@dataclass(frozen=True, slots=True)
class Chunks:
    """The chunks of an update.

    Args:
        sizes: How much is trained.
        codec: Of parameters.

    Example:
        >>> chunks = Chunks(Sizes(1000, 8), "int8")
        >>> chunks.count, [(at.start, at.stop) for at in map(chunks.span, range(5))][2:]
        (5, [(512, 768), (768, 1000), (1000, 1008)])
    """

    sizes: Sizes
    codec: str

    @property
    def values(self) -> int:
        """Values of a chunk, the last ones left out."""
        return min(max(math.ceil(self.sizes.parameters / MANY / BLOCK), 1) * BLOCK, LARGEST)

    @property
    def count(self) -> int:
        """How many chunks there are."""
        return self._of_parameters + math.ceil(self.sizes.buffers / self.values)

    @property
    def largest(self) -> int:
        """Bytes that no chunk exceeds."""
        return 4 * self.values

    @property
    def _of_parameters(self) -> int:
        return math.ceil(self.sizes.parameters / self.values)

    def span(self, chunk: int) -> slice:
        """Return where in the vector a chunk is."""
        begin, end = chunk * self.values, self.sizes.parameters
        if chunk >= self._of_parameters:
            begin, end = self.sizes.parameters + (chunk - self._of_parameters) * self.values, self.sizes.total
        return slice(begin, min(begin + self.values, end))

    def nbytes(self, chunk: int) -> int:
        """Return how many bytes a chunk takes."""
        return nbytes(self._codec(chunk), self._length(chunk))

    def encode(self, chunk: int, values: Floats, feedback: Feedback) -> tuple[Bytes, Floats]:
        """Return a chunk as bytes, and what its receivers will read in them.

        Args:
            chunk: Which.
            values: Its values.
            feedback: Adds what was left out of it before.
        """
        if self._codec(chunk) == "fp32":
            return encode("fp32", values), values
        return feedback.encode_part(values, self.span(chunk))

    def decode(self, chunk: int, data: Data) -> Floats:
        """Return the values of a chunk.

        Raises:
            Undecodable: The bytes hold none.
        """
        return decode(self._codec(chunk), data, self._length(chunk))

    def _codec(self, chunk: int) -> str:
        return self.codec if chunk < self._of_parameters else "fp32"

    def _length(self, chunk: int) -> int:
        at = self.span(chunk)
        return int(at.stop - at.start)


def bounds(count: int, fractions: Sequence[float]) -> list[int]:
    """Return where the chunks of each owner begin, and where the last one's end.

    Args:
        count: Chunks.
        fractions: Of each owner; they sum to 1.

    Example:
        >>> bounds(11, [0.25, 0.25, 0.5])
        [0, 3, 6, 11]
    """
    edges, sum_ = [0], 0.0
    for fraction in fractions[:-1]:
        sum_ += fraction
        edges.append(min(max(math.floor(count * sum_ + 0.5), edges[-1]), count))
    return [*edges, count]
