"""Turning what members say to each other into bytes, and bytes, read as a stranger's, into what was said.

    4 bytes           8 bytes            header        payload
    header's length   payload's length   a JSON object raw bytes: an update, a state, a longer JSON text

The header has at most ``HEADER`` bytes. How long a payload may be is said by whoever reads, before anything of it is
read or any memory is taken for it: nothing from one who is not yet known, and from a member what its message can need.

    message     from     says
    -------     ------   -------------------------------------------------------------------------------------
    hello       member   version, identity, name, sizes, layout, codec, every, round: who, and how far it has come
    refused     centre   why: it cannot join
    welcome     centre   number, codec, run: it is a member; what it needs to enter follows
    found       centre   nobody has come farther: it gives the state
    state       both     round, hash, counted, who: of the round before; the outer parameters
    agree       member   name; JSON
    agreed      centre   name; what the first said under that name
    update      member   round, base, samples, steps, seconds, exchange, codec, where it is; the pseudo-gradient
    close       centre   round: whoever entered in the midst of this round sends what it has
    result      centre   round, hash, counted, who, codec, and what is to follow; the mean pseudo-gradient
    rejected    centre   round, why: the update is not admitted
    beat        all      I am here
    leave       member   goodbye

    and of direct exchanges (``exchange.py``), "plan" being what also comes with a state, a result and a commit:

    listening   member   port: others may call it there
    roster      centre   a JSON list of who the others are, and whom of them it is to call
    reach       member   reach, failed: whom it has links with, and which of them broke
    plan        centre   round, turn, plan: the round is begun again, directly or through the centre
    ready       member   turn, norms, and what an update says: its chunks are on their way to the others
    go          centre   turn, weights, norms: whose updates count
    done        member   turn, hash, sent, busy: it holds the mean
    commit      centre   committed, hash, counted, and what is to follow: the turn is over
    fault       member   turn, member, why: a part of that one's update must not enter the mean
    peer        members  run, number, token, of: who calls, and with how many streams
    part        members  turn, chunk; a chunk of an update, to who sums it
    mean        members  turn, chunk; a chunk of the mean, to all, and from one or all of them to the centre
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator
from typing import Any

HEADER = 1 << 16  # bytes of a header
TEXT = 1 << 22  # bytes of a JSON text that travels as a payload
LARGEST = 1e300  # of a number in a header
_LENGTHS = struct.Struct("!IQ")

Header = dict[str, Any]
Bound = Callable[[Header], int]


class Malformed(Exception):
    """Bytes that are no message of ours, or a message that cannot come here."""


def pack(kind: str, payload_bytes: int = 0, **fields: object) -> bytes:
    """Return what goes before ``payload_bytes`` bytes of payload.

    Example:
        >>> pack("close", round=3)[12:]
        b'{"kind": "close", "round": 3}'
    """
    header = json.dumps({"kind": kind, **fields}).encode()
    if len(header) > HEADER:
        raise ValueError(f"a header of {len(header)} bytes")  # a fault of ours
    return _LENGTHS.pack(len(header), payload_bytes) + header


class Reader:
    """Cuts the bytes of one connection into messages.

    Args:
        bound: Given a header, the most bytes that its payload may have; it raises ``Malformed`` where such a message
            cannot come. Called before any of the payload is taken in.
    """

    def __init__(self, bound: Bound) -> None:
        self._bound = bound
        self._head = bytearray()
        self._header: Header | None = None
        self._payload = memoryview(b"")
        self._filled = 0

    def wanted(self) -> memoryview | None:
        """Return where the next bytes of a payload go, if one is under way: they may be received straight into it."""
        return self._payload[self._filled :] if self._header is not None else None

    def filled(self, count: int) -> Iterator[tuple[Header, memoryview]]:
        """Note that ``count`` bytes were put where ``wanted`` said, and yield the message if that makes it whole."""
        self._filled += count
        yield from self._whole()

    def feed(self, data: bytes | memoryview) -> Iterator[tuple[Header, memoryview]]:
        """Take in bytes and yield the messages that they make whole.

        Raises:
            Malformed: They are no message of ours, and nothing after them can be.
        """
        data = memoryview(data)
        while data:
            if self._header is not None:
                count = min(len(data), len(self._payload) - self._filled)
                self._payload[self._filled : self._filled + count] = data[:count]
                data = data[count:]
                yield from self.filled(count)
                continue
            count = min(len(data), self._missing())
            self._head += data[:count]
            data = data[count:]
            if not self._missing():
                self._begin_payload()
                yield from self._whole()

    def _missing(self) -> int:
        """Return how many bytes of the header are still to come."""
        if len(self._head) < _LENGTHS.size:
            return _LENGTHS.size - len(self._head)
        length, _ = _LENGTHS.unpack_from(self._head)
        if not 2 <= length <= HEADER:
            raise Malformed(f"a header of {length} bytes; it has 2 to {HEADER}")
        return int(_LENGTHS.size + length - len(self._head))

    def _begin_payload(self) -> None:
        _, length = _LENGTHS.unpack_from(self._head)
        header = _object(bytes(self._head[_LENGTHS.size :]))
        if not isinstance(header.get("kind"), str):
            raise Malformed("a header without a kind")
        most = self._bound(header)
        if length > most:
            raise Malformed(f"a payload of {length} bytes in {header['kind'][:20]!r}; it may have {most}")
        self._head.clear()
        self._header, self._payload, self._filled = header, memoryview(bytearray(length)), 0

    def _whole(self) -> Iterator[tuple[Header, memoryview]]:
        if self._header is not None and self._filled == len(self._payload):
            message = self._header, self._payload
            self._header, self._payload = None, memoryview(b"")
            yield message


def text_of(payload: memoryview) -> Any:
    """Return the JSON value in a payload.

    Raises:
        Malformed: It is none.
    """
    return _value(bytes(payload))


def _object(data: bytes) -> Header:
    value = _value(data)
    if not isinstance(value, dict):
        raise Malformed("a header that is no object")
    return value


def _value(data: bytes) -> Any:
    try:
        return json.loads(data.decode())
    except (ValueError, RecursionError):
        raise Malformed("no JSON") from None


# ---- fields, each of the type it must have


def whole(header: Header, name: str, least: int = 0, most: int = 2**53) -> int:
    """Return a field that is a whole number within bounds."""
    value = header.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise Malformed(f"without a whole number {name} from {least} to {most}")
    return value


def number(header: Header, name: str) -> float:
    """Return a field that is a number from 0 on."""
    value = header.get(name)
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value <= LARGEST:
        raise Malformed(f"without a number {name} from 0 on")
    return float(value)


def text(header: Header, name: str, most: int = 200) -> str:
    """Return a field that is a text, as it may appear in a terminal."""
    value = header.get(name)
    if not isinstance(value, str):
        raise Malformed(f"without a text {name}")
    return "".join(c if c.isprintable() else "?" for c in value[:most])


def truth(header: Header, name: str) -> bool:
    """Return a field that is true or false."""
    value = header.get(name)
    if not isinstance(value, bool):
        raise Malformed(f"without a {name} that is true or false")
    return value


def numbers(header: Header, name: str) -> list[float]:
    """Return a field that is a short list of numbers from 0 on."""
    value = header.get(name)
    if not isinstance(value, list) or len(value) > 64:
        raise Malformed(f"without a short list {name}")
    return [number({"n": each}, "n") for each in value]


def wholes(header: Header, name: str, least: int = 0) -> list[int]:
    """Return a field that is a list of whole numbers."""
    value = header.get(name)
    if not isinstance(value, list) or len(value) > 1024:
        raise Malformed(f"without a short list {name}")
    return [whole({"n": each}, "n", least) for each in value]


def pairs(header: Header, name: str) -> list[tuple[int, float]]:
    """Return a field that is a list of pairs, a whole number and a number from 0 on."""
    value = header.get(name)
    if not isinstance(value, list) or len(value) > 1024:
        raise Malformed(f"without a short list {name}")
    found = []
    for pair in value:
        if not isinstance(pair, list) or len(pair) != 2:
            raise Malformed(f"without pairs in {name}")
        found.append((whole({"n": pair[0]}, "n"), number({"n": pair[1]}, "n")))
    return found


def texts(header: Header, name: str) -> list[str]:
    """Return a field that is a list of texts."""
    value = header.get(name)
    if not isinstance(value, list):
        raise Malformed(f"without a list {name}")
    return [text({"t": each}, "t") for each in value]


def places(header: Header, name: str) -> list[tuple[int, int]]:
    """Return a field that is a short list of pairs of whole numbers."""
    value = header.get(name)
    if not isinstance(value, list) or len(value) > 64:
        raise Malformed(f"without a short list {name}")
    pairs = []
    for pair in value:
        if not isinstance(pair, list) or len(pair) != 2:
            raise Malformed(f"without pairs in {name}")
        pairs.append((whole({"n": pair[0]}, "n"), whole({"n": pair[1]}, "n")))
    return pairs
