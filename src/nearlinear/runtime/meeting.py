"""How the ranks of a run meet: what one says, all hear. Here by sockets alone, without a framework."""

from __future__ import annotations

import json
import socket
import time
from typing import Any, Protocol

from nearlinear.errors import InputError, PeerLostError
from nearlinear.runtime.environment import World
from nearlinear.runtime.interface import address_to
from nearlinear.units import seconds

LONGEST_TOLD = 1 << 24  # bytes of one message


class Meeting(Protocol):
    """All ranks, each of which can say something to all."""

    rank: int
    size: int

    def all_gather_json(self, value: Any, what: str = ...) -> list[Any]:
        """Return every rank's ``value``, by rank; all call it."""


class Star:
    """A meeting at rank 0, which listens on the port of the run's rendezvous.

    Args:
        world: Who this process is.
        deadline_s: Seconds that any wait may take.

    Raises:
        InputError: The port is taken.
        PeerLostError: A rank did not come within the deadline.
    """

    def __init__(self, world: World, deadline_s: float) -> None:
        self.rank, self.size, self._deadline_s = world.rank, world.size, deadline_s
        self._peers: dict[int, socket.socket] = {}
        if world.size == 1:
            return
        until = time.monotonic() + deadline_s
        if world.rank == 0:
            self._listen(world, until)
        else:
            self._peers[0] = self._call(world, until)

    def _listen(self, world: World, until: float) -> None:
        address = address_to(world.address)
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        try:
            server = socket.create_server((address, world.port), family=family, backlog=world.size)
        except OSError as error:
            raise InputError(
                f"port {world.port} on {address} cannot be used ({error.strerror}); choose another MASTER_PORT"
            ) from None
        with server:
            while len(self._peers) < world.size - 1:
                server.settimeout(max(0.01, until - time.monotonic()))
                try:
                    one, _ = server.accept()
                    one.settimeout(10.0)
                    rank = int(_read(one)["rank"])
                except TimeoutError:
                    if time.monotonic() < until:
                        continue  # a stranger that says nothing
                    missing = [str(rank) for rank in range(1, world.size) if rank not in self._peers]
                    raise PeerLostError(
                        f"rank {', '.join(missing)} of {world.size} did not arrive within "
                        f"{seconds(self._deadline_s)}; start all of them, or set NEARLINEAR_DEADLINE='10 min'",
                        int(missing[0]),
                    ) from None
                except (OSError, ValueError, TypeError, KeyError):
                    one.close()
                    continue
                if 0 < rank < world.size and rank not in self._peers:
                    one.settimeout(self._deadline_s)
                    self._peers[rank] = one
                else:
                    one.close()

    def _call(self, world: World, until: float) -> socket.socket:
        while True:
            try:
                one = socket.create_connection((world.address, world.port), timeout=max(0.01, until - time.monotonic()))
                one.settimeout(self._deadline_s)
                _write(one, {"rank": world.rank})
                return one
            except OSError as error:
                if time.monotonic() + 0.1 > until:
                    raise PeerLostError(
                        f"rank {world.rank} found no rank 0 at {world.address}:{world.port} within "
                        f"{seconds(self._deadline_s)} ({error}); is it running, and does MASTER_ADDR name its machine?",
                        0,
                    ) from None
                time.sleep(0.05)

    def all_gather_json(self, value: Any, what: str = "a message") -> list[Any]:
        """Return every rank's ``value``, by rank.

        Raises:
            PeerLostError: A rank hung up, or said nothing within the deadline.
        """
        if self.rank != 0:
            self._say(0, value, what)
            everyones: list[Any] = self._hear(0, what)
            return everyones
        heard = [value] + [self._hear(rank, what) for rank in range(1, self.size)]
        for rank in range(1, self.size):
            self._say(rank, heard, what)
        return heard

    def _say(self, rank: int, value: Any, what: str) -> None:
        try:
            _write(self._peers[rank], value)
        except OSError as error:
            raise PeerLostError(f"rank {rank} was lost in {what}: {error}", rank) from None

    def _hear(self, rank: int, what: str) -> Any:
        try:
            return _read(self._peers[rank])
        except TimeoutError:
            raise PeerLostError(f"waited {seconds(self._deadline_s)} for rank {rank} in {what}", rank) from None
        except (OSError, ValueError) as error:
            raise PeerLostError(f"rank {rank} was lost in {what}: {error}", rank) from None

    def close(self) -> None:
        """Leave."""
        for each in self._peers.values():
            each.close()


def _write(to: socket.socket, value: Any) -> None:
    body = json.dumps(value).encode()
    to.sendall(len(body).to_bytes(4, "big") + body)


def _read(source: socket.socket) -> Any:
    length = int.from_bytes(read_exactly(source, 4), "big")
    if length > LONGEST_TOLD:
        raise ConnectionResetError(f"it wants to say {length} bytes")
    return json.loads(read_exactly(source, length))


def read_exactly(source: socket.socket, size: int) -> bytes:
    """Return the next ``size`` bytes.

    Raises:
        ConnectionResetError: The other side hung up before.
        TimeoutError: The socket's time-out passed.
    """
    got = bytearray()
    while len(got) < size:
        data = source.recv(size - len(got))
        if not data:
            raise ConnectionResetError("it hung up")
        got += data
    return bytes(got)
