"""Turning a socket that never blocks into messages of one run, under TLS, in both directions."""

from __future__ import annotations

import contextlib
import socket
import ssl
from collections import deque
from collections.abc import Iterator

from nearlinear.runtime.local import frames
from nearlinear.runtime.local.codecs import Bytes
from nearlinear.runtime.local.frames import Bound, Header, Malformed, Reader
from nearlinear.runtime.local.tls import Identity

PIECE = 1 << 16  # bytes taken from a connection at one stroke
TURN = 1 << 22  # bytes taken from it before the others have their turn
BBR = b"bbr"

__all__ = ["Connection", "Malformed", "tune"]


class Connection:
    """One connection.

    Args:
        sock: Under TLS, the handshake yet to come.
        identity: The run's.
        bound: The most bytes of payload that a message may have, from its header.
        since: When it was opened.
    """

    def __init__(self, sock: ssl.SSLSocket, identity: Identity, bound: Bound, since: float) -> None:
        sock.setblocking(False)
        self.sock, self.since = sock, since
        self.shaken = False  # hands: the other side has the key
        self.more = False  # it has bytes that no select will tell of
        self.closed = False
        self.received = self.sent = 0  # bytes
        self._identity = identity
        self._reader = Reader(bound)
        self._outbox: deque[memoryview] = deque()
        self._wants_write = False
        self._landing = bytearray(PIECE)

    def handshake(self) -> bool:
        """Go on with the handshake; return whether it is over.

        Raises:
            OSError: It failed: the other side has not the key, or is gone.
        """
        if not self.shaken:
            self._wants_write = False
            try:
                self.sock.do_handshake()
            except ssl.SSLWantReadError:
                return False
            except ssl.SSLWantWriteError:
                self._wants_write = True
                return False
            self._identity.require_own(self.sock)
            self.shaken = True
        return True

    def receive(self) -> Iterator[tuple[Header, memoryview]]:
        """Read what has come and yield the messages that are whole.

        Raises:
            OSError: The other side hung up or broke off; all it said before has been yielded.
            Malformed: What it says is no message.
        """
        self.more, taken = False, 0
        while not self.closed:
            if taken >= TURN:
                self.more = True
                return
            place = self._reader.wanted()
            into = self._landing if place is None else place
            try:
                count = self.sock.recv_into(into)
            except ssl.SSLWantReadError:
                return
            except ssl.SSLWantWriteError:
                self._wants_write = True
                return
            if not count:
                raise ConnectionResetError("it hung up")
            taken += count
            self.received += count
            if place is None:
                yield from self._reader.feed(memoryview(self._landing)[:count])
            else:
                yield from self._reader.filled(count)

    def send(self, kind: str, payload: Bytes | bytes | memoryview = b"", /, **fields: object) -> None:
        """Say something; what does not leave at once waits for ``flush``."""
        view = payload if isinstance(payload, memoryview) else memoryview(payload)  # type: ignore[arg-type]
        self._outbox.append(memoryview(frames.pack(kind, len(view), **fields)))
        if len(view):
            self._outbox.append(view)

    @property
    def unsent(self) -> int:
        """Bytes that have not left."""
        return sum(map(len, self._outbox))

    @property
    def writing(self) -> bool:
        """Whether it is to be told when the socket takes more."""
        return self._wants_write or (self.shaken and bool(self._outbox))

    def flush(self) -> None:
        """Send what the socket takes.

        Raises:
            OSError: The other side is gone.
        """
        self._wants_write = False
        while self.shaken and self._outbox and not self.closed:
            head = self._outbox[0]
            try:
                count = self.sock.send(head[: 4 * PIECE])
            except (ssl.SSLWantWriteError, ssl.SSLWantReadError):
                return
            self.sent += count
            if count == len(head):
                self._outbox.popleft()
            else:
                self._outbox[0] = head[count:]

    def close(self) -> None:
        """Close it without ceremony."""
        self.closed = True
        self._outbox.clear()
        with contextlib.suppress(OSError):
            self.sock.close()


def tune(sock: socket.socket, unsent: int = 0) -> None:
    """Let a connection send small messages at once, and fill a long or lossy link where the kernel knows how.

    One flow over 100 Mbit/s, 80 ms and 0.5 % of loss carries 5 Mbit/s by CUBIC, the usual default, and 76 by BBR.

    Args:
        sock: Of the connection.
        unsent: Bytes that the kernel takes beyond those that are under way; 0: as many as it likes.

    Source: N. Cardwell et al., "BBR: Congestion-Based Congestion Control", 2016, doi:10.1145/3012426.3022184.
    """
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if unsent and hasattr(socket, "TCP_NOTSENT_LOWAT"):
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, unsent)
    if hasattr(socket, "TCP_CONGESTION"):
        with contextlib.suppress(OSError):  # not built into this kernel, or not for everyone
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, BBR)
