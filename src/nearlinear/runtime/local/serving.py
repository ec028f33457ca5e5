"""Turning calls on a port into callers that are heard and answered, all in one thread that never waits for one of them.

A caller is a stranger until whoever serves says that it is known. Strangers are few, and shown out if they say nothing.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import ssl
import threading
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Generic, TypeVar

from nearlinear.errors import InputError
from nearlinear.runtime.local.connection import Connection, Malformed, tune
from nearlinear.runtime.local.frames import Header
from nearlinear.runtime.local.tls import Identity

HELLO_S = 10.0  # who has not introduced itself by then is shown out
STRANGERS = 64  # connections without a hello that are kept


@dataclass(slots=True, eq=False)
class Caller:
    """A connection, and whether its other end has said who it is."""

    connection: Connection
    known: bool = False


Someone = TypeVar("Someone", bound=Caller)


class Server(ABC, Generic[Someone]):
    """A port and its callers; ``start`` begins to serve.

    Attributes:
        port: Where it listens.

    Args:
        listener: The port.
        own: The run's identity.
        beat_s: Seconds between two calls of ``look_around``.
    """

    def __init__(self, listener: socket.socket, own: Identity, beat_s: float) -> None:
        self.port: int = listener.getsockname()[1]
        self._listener, self._identity, self._beat_s = listener, own, beat_s
        self._peers: list[Someone] = []  # oldest first
        self._gone_bytes = [0, 0]  # of connections that are over
        self._next_beat = time.monotonic()
        self._stop = False
        self._selector = selectors.DefaultSelector()
        self._bell, self._button = socket.socketpair()
        for end in (self._bell, self._button, listener):
            end.setblocking(False)
        self._selector.register(self._bell, selectors.EVENT_READ)
        self._selector.register(listener, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._serve, name="nearlinear-centre", daemon=True)

    def start(self) -> None:
        """Begin to serve."""
        self._thread.start()

    def stop(self) -> None:
        """Close all connections and end the thread."""
        self._stop = True
        with contextlib.suppress(OSError):
            self._button.send(b".")
        self._thread.join(10.0)

    @property
    def bytes(self) -> tuple[int, int]:
        """Bytes received and sent since the start."""
        received = self._gone_bytes[0] + sum(peer.connection.received for peer in self._peers)
        return received, self._gone_bytes[1] + sum(peer.connection.sent for peer in self._peers)

    # ---- what is served, in the thread

    @abstractmethod
    def answer(self, connection: Connection) -> Someone:
        """Return the caller at the other end of a connection."""

    @abstractmethod
    def bound(self, peer: Someone, header: Header) -> int:
        """Return the most bytes that the payload of such a message may have here and now.

        Raises:
            Malformed: It cannot come here.
        """

    @abstractmethod
    def hear(self, peer: Someone, header: Header, payload: memoryview) -> None:
        """Deal with a message.

        Raises:
            Malformed: It cannot come here.
        """

    @abstractmethod
    def here(self, peer: Someone) -> None:
        """Note that a caller that is known said something."""

    @abstractmethod
    def lost(self, peer: Someone, why: str) -> None:
        """Forget a caller whose connection is of no more use; ``why`` is for a person."""

    @abstractmethod
    def look_around(self, now: float) -> None:
        """Do what is to be done once a beat."""

    @abstractmethod
    def go_on(self, now: float) -> None:
        """Do what follows from what was heard."""

    @abstractmethod
    def over(self) -> None:
        """Note that the thread ends."""

    # ---- the thread

    def _serve(self) -> None:
        try:
            while not self._stop:
                self._turn()
        finally:
            for peer in list(self._peers):
                self._hang_up(peer)
            for each in (self._listener, self._bell, self._button):
                each.close()
            self._selector.close()
            self.over()

    def _turn(self) -> None:
        """Wait for bytes or the next beat, and deal with them."""
        more = [peer for peer in self._peers if peer.connection.more]
        wait = 0.0 if more else max(0.0, self._next_beat - time.monotonic())
        for key, events in self._selector.select(wait):
            if key.fileobj is self._bell:
                self._bell.recv(4096)
            elif key.fileobj is self._listener:
                self._accept()
            elif not key.data.connection.closed:
                self._attend(key.data, events)
        for peer in more:
            if not peer.connection.closed:
                self._attend(peer, selectors.EVENT_READ)
        now = time.monotonic()
        if now >= self._next_beat:
            self._next_beat = now + self._beat_s
            for peer in [peer for peer in self._peers if not peer.known]:
                if now - peer.connection.since > HELLO_S:
                    self._hang_up(peer)
            self.look_around(now)
        self.go_on(now)
        for peer in list(self._peers):
            self._watch(peer)

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError:  # it hung up already, or there are no descriptors left
            return
        strangers = [peer for peer in self._peers if not peer.known]
        if len(strangers) >= STRANGERS:
            self._hang_up(strangers[0])
        try:
            tune(sock)
            wrapped = self._identity.wrap(sock, listening=True)
        except OSError:
            sock.close()
            return
        peer = self.answer(
            Connection(wrapped, self._identity, lambda header: self.bound(peer, header), time.monotonic())
        )
        self._peers.append(peer)
        self._selector.register(wrapped, selectors.EVENT_READ, peer)

    def _attend(self, peer: Someone, events: int) -> None:
        connection = peer.connection
        try:
            if connection.handshake():
                if events & selectors.EVENT_WRITE:
                    connection.flush()
                for header, payload in connection.receive():
                    self.hear(peer, header, payload)
                    if connection.closed:
                        return
        except Malformed as error:
            self.lost(peer, f"sent what is no message ({error})")
        except OSError as error:
            self.lost(peer, _seen(error))
        else:
            if peer.known:
                self.here(peer)

    def _watch(self, peer: Someone) -> None:
        """Send what can be sent, and ask to be woken for the rest."""
        if peer.connection.closed:
            return
        try:
            peer.connection.flush()
        except OSError as error:
            self.lost(peer, _seen(error))
            return
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if peer.connection.writing else 0)
        self._selector.modify(peer.connection.sock, wanted, peer)

    def _hang_up(self, peer: Someone) -> bool:
        """Close a caller's connection; return whether it was open."""
        if peer not in self._peers:
            return False
        self._peers.remove(peer)
        self._selector.unregister(peer.connection.sock)
        peer.connection.close()
        self._gone_bytes[0] += peer.connection.received
        self._gone_bytes[1] += peer.connection.sent
        return True


def listen(bind: str, port: int) -> socket.socket:
    """Return a socket that listens.

    Raises:
        InputError: The address or port cannot be had.
    """
    family = socket.AF_INET6 if ":" in bind else socket.AF_INET
    try:
        return socket.create_server((bind, port), family=family, backlog=STRANGERS)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(
            f"cannot listen on {bind}:{port} ({reason}); give --listen an address of this machine and a free port"
        ) from None


def _seen(error: OSError) -> str:
    if isinstance(error, ConnectionError | ssl.SSLEOFError):
        return "hung up"
    return f"broke off ({getattr(error, 'reason', None) or error.strerror or error})"
