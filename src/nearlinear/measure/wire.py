"""Turning sockets into a wire between two ranks, over which messages are timed.

A wire of several sockets sends a message in as many parts at once. Nothing is pickled; what is told is JSON.
"""

from __future__ import annotations

import hmac
import json
import secrets
import socket
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol, TypeVar

from nearlinear.errors import InputError, PeerLostError
from nearlinear.runtime.meeting import LONGEST_TOLD, read_exactly
from nearlinear.units import seconds

_Value = TypeVar("_Value")
PIECE = 1 << 20  # bytes handed to the kernel at once: a message is sent from one buffer again and again
HELLO_S = 10.0


class Wire(Protocol):
    """Two ranks, each of which sends and receives messages that hold nothing but bytes."""

    def tell(self, value: Any) -> None:
        """Send a value as JSON; takes as long as it takes."""

    def told(self) -> Any:
        """Return the value that the peer tells."""

    def send(self, size: int) -> None:
        """Send ``size`` bytes."""

    def receive(self, size: int) -> None:
        """Return when ``size`` bytes have come."""

    def exchange(self, size: int) -> None:
        """Send and receive ``size`` bytes at once."""


class SocketWire:
    """A wire of one or more TCP connections.

    Args:
        sockets: Connected to the same peer.
        peer: Who is at the other end, for messages.
        deadline_s: Seconds that any wait for it may take.
    """

    def __init__(self, sockets: Sequence[socket.socket], peer: str, deadline_s: float) -> None:
        self._sockets, self._peer, self._deadline_s = list(sockets), peer, deadline_s
        self._out = memoryview(bytearray(PIECE))
        self._into = {each: memoryview(bytearray(PIECE)) for each in self._sockets}
        for each in self._sockets:
            each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            each.settimeout(deadline_s)
        # One thread per connection and direction; the first connection's sender is the caller.
        self._threads = ThreadPoolExecutor(2 * len(self._sockets), thread_name_prefix="wire")

    def first(self) -> SocketWire:
        """Return the wire of the first connection alone; it stays this wire's."""
        return self if len(self._sockets) == 1 else SocketWire(self._sockets[:1], self._peer, self._deadline_s)

    def tell(self, value: Any) -> None:
        """Send a value as JSON."""
        body = json.dumps(value).encode()
        self._guard(lambda: self._sockets[0].sendall(len(body).to_bytes(4, "big") + body))

    def told(self) -> Any:
        """Return the value that the peer tells."""
        return json.loads(self._guard(self._read_told))

    def send(self, size: int) -> None:
        """Send ``size`` bytes, a part over each connection."""
        self._guard(lambda: self._both(size, 0))

    def receive(self, size: int) -> None:
        """Return when ``size`` bytes have come."""
        self._guard(lambda: self._both(0, size))

    def exchange(self, size: int) -> None:
        """Send and receive ``size`` bytes at once."""
        self._guard(lambda: self._both(size, size))

    def close(self) -> None:
        """Close the connections."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        for each in self._sockets:
            each.close()

    def _both(self, out: int, into: int) -> None:
        work: list[Callable[[], None]] = []
        for place, each in enumerate(self._sockets):
            for total, action in ((out, self._send_on), (into, self._receive_on)):
                part = _part(total, place, len(self._sockets))
                if part:
                    work.append(lambda each=each, part=part, action=action: action(each, part))  # type: ignore[misc]
        futures = [self._threads.submit(one) for one in work[1:]]
        work[0]()
        for future in futures:
            future.result(self._deadline_s)

    def _send_on(self, to: socket.socket, size: int) -> None:
        while size > 0:
            piece = min(size, PIECE)
            to.sendall(self._out[:piece])
            size -= piece

    def _receive_on(self, source: socket.socket, size: int) -> None:
        buffer = self._into[source]
        while size > 0:
            got = source.recv_into(buffer[: min(size, PIECE)])
            if got == 0:
                raise ConnectionResetError("it hung up")
            size -= got

    def _read_told(self) -> bytes:
        length = int.from_bytes(read_exactly(self._sockets[0], 4), "big")
        if length > LONGEST_TOLD:
            raise ConnectionResetError(f"it wants to tell {length} bytes")
        return read_exactly(self._sockets[0], length)

    def _guard(self, action: Callable[[], _Value]) -> _Value:
        try:
            return action()
        except TimeoutError:
            raise PeerLostError(
                f"{self._peer} did not answer within {seconds(self._deadline_s)} while the link to it was measured; "
                "NEARLINEAR_DEADLINE='10 min' waits longer"
            ) from None
        except OSError as error:
            raise PeerLostError(f"{self._peer} was lost while the link to it was measured: {error}") from None


def _part(size: int, place: int, parts: int) -> int:
    return size // parts + (1 if place < size % parts else 0)


class Listener:
    """Where the other ranks reach this one for a wire.

    Args:
        address: Of the interface to listen on.
        token: What all ranks of this probe share, in letters and digits; who does not know it is hung up on.
    """

    def __init__(self, address: str, token: str) -> None:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        try:
            self._socket = socket.create_server((address, 0), family=family, backlog=64)
        except OSError as error:
            raise InputError(f"cannot listen on {address} for messages to time: {error}") from None
        self.address, self.port, self._token = address, int(self._socket.getsockname()[1]), token

    def accept(self, rank: int, count: int, deadline_s: float) -> SocketWire:
        """Return the wire that rank ``rank`` opens with ``count`` connections.

        Raises:
            PeerLostError: It did not within the deadline.
        """
        until, sockets = time.monotonic() + deadline_s, dict[int, socket.socket]()
        while len(sockets) < count:
            try:
                self._socket.settimeout(max(0.01, until - time.monotonic()))
                one, _ = self._socket.accept()
            except TimeoutError:
                raise PeerLostError(
                    f"rank {rank} opened {len(sockets)} of {count} connections to {self.address}:{self.port} within "
                    f"{seconds(deadline_s)}; can its machine reach that port?",
                    rank,
                ) from None
            place = self._place(one, rank)
            if place is None or place in sockets or not 0 <= place < count:
                one.close()
            else:
                sockets[place] = one
        return SocketWire([sockets[place] for place in range(count)], f"rank {rank}", deadline_s)

    def _place(self, one: socket.socket, rank: int) -> int | None:
        """Return the number of the connection that a caller says it is; None for a stranger."""
        try:
            one.settimeout(HELLO_S)
            hello = json.loads(read_exactly(one, int.from_bytes(read_exactly(one, 2), "big")))
            known = hmac.compare_digest(str(hello["token"]).encode(), self._token.encode())
            return int(hello["place"]) if known and hello["rank"] == rank else None
        except (OSError, ValueError, TypeError, KeyError):
            return None

    def close(self) -> None:
        """Stop listening."""
        self._socket.close()


def connect(address: str, port: int, rank: int, peer: int, count: int, token: str, deadline_s: float) -> SocketWire:
    """Return a wire of ``count`` connections to rank ``peer``, which ``accept``s it.

    Raises:
        PeerLostError: It cannot be reached within the deadline.
    """
    sockets: list[socket.socket] = []
    for place in range(count):
        try:
            one = socket.create_connection((address, port), timeout=deadline_s)
            hello = json.dumps({"token": token, "rank": rank, "place": place}).encode()
            one.sendall(len(hello).to_bytes(2, "big") + hello)
        except OSError as error:
            for each in sockets:
                each.close()
            raise PeerLostError(
                f"rank {peer} cannot be reached at {address}:{port} from rank {rank} ({error}); "
                "do the machines let each other's ports through?",
                peer,
            ) from None
        sockets.append(one)
    return SocketWire(sockets, f"rank {peer}", deadline_s)


def new_token() -> str:
    """Return what the ranks of one probe share."""
    return secrets.token_hex(16)
