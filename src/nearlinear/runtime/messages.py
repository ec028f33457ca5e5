"""Turning what two ranks say to each other into bytes, and the bytes of a connection into messages.

A message is its length in four bytes, then a JSON object. It is read as a stranger's until it has shown to be of the
run: at most ``LONGEST`` bytes, and every field is of the type it must have, or the message is ``Malformed``.

    message     from       says
    -------     -------    --------------------------------------------------------------------
    hello       rank k     rank, host, token: the first message, or the connection is closed
    welcome     rank 0     host, size
    refused     rank 0     why: such a rank cannot join
    beat        both       step, at: where it is; ask: send me the table with your next beat
    place       rank 0     rank, host, step, at, age_s, left: one row of the table
    table       rank 0     the rows before this are all
    lost        both       rank, host, why, silent_s
    leave       both       goodbye
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from typing import Any

from nearlinear.errors import InputError, PeerLostError

LONGEST = 4096  # bytes of one message

Message = dict[str, Any]


class Malformed(Exception):
    """Bytes that are no message of ours."""


def pack(kind: str, **fields: object) -> bytes:
    """Return the message as bytes: its length in four, then JSON."""
    body = json.dumps({"kind": kind, **fields}, ensure_ascii=False).encode()
    return len(body).to_bytes(4, "big") + body


def unpack(inbox: bytearray) -> Iterator[Message]:
    """Take the whole messages off the front of ``inbox``.

    Raises:
        Malformed: It does not begin with a message, and never will.
    """
    while len(inbox) >= 4:
        end = 4 + int.from_bytes(inbox[:4], "big")
        if end > 4 + LONGEST:
            raise Malformed(f"{end - 4} bytes long, at most {LONGEST} are allowed")
        if len(inbox) < end:
            return
        try:
            message = json.loads(inbox[4:end].decode())
        except (ValueError, RecursionError):
            raise Malformed("not JSON") from None
        if not isinstance(message, dict) or not isinstance(message.get("kind"), str):
            raise Malformed("without a kind")
        del inbox[:end]
        yield message


class Connection:
    """A socket with the bytes that are not yet a message and those that are not yet sent.

    Args:
        sock: The socket, non-blocking.
        rank: Who is at the other end; None until it has said so.
        since: When it was opened, by the caller's clock.
    """

    def __init__(self, sock: socket.socket, rank: int | None, since: float) -> None:
        self.sock, self.rank, self.since = sock, rank, since
        self.inbox, self.outbox = bytearray(), bytearray()
        self.last_word = False  # nothing is to be sent after what is in the outbox
        self.closed = False

    def receive(self) -> Iterator[Message]:
        """Read what has come and yield the messages that are whole.

        Raises:
            ConnectionError: The other side hung up, and all it said before has been yielded.
            Malformed: What it says is no message.
        """
        try:
            data = self.sock.recv(65536)
        except BlockingIOError:
            return
        if not data:
            raise ConnectionResetError
        self.inbox += data
        yield from unpack(self.inbox)


def say_hello(address: tuple[str, int], hello: bytes, deadline_s: float) -> tuple[socket.socket, str, int]:
    """Say hello to rank 0 until it answers; return the connection, its host and the number of processes.

    Args:
        address: Host and port of rank 0.
        hello: The packed message.
        deadline_s: Seconds to keep trying.

    Raises:
        InputError: It answers that there is no place.
        PeerLostError: ``deadline_s`` is over.
    """
    deadline, pause = time.monotonic() + deadline_s, 0.02
    while True:
        try:
            sock = socket.create_connection(address, timeout=max(0.01, deadline - time.monotonic()))
            try:
                sock.sendall(hello)
                answer = _first_message(sock, deadline)
                if answer["kind"] == "refused":
                    raise InputError(text(answer, "why"))
                if answer["kind"] != "welcome":
                    raise Malformed("not a welcome")
                return sock, text(answer, "host"), whole_number(answer, "size")
            except BaseException:
                sock.close()
                raise
        except (OSError, Malformed) as error:
            pause = min(2 * pause, 0.5)
            if time.monotonic() + pause >= deadline:
                raise PeerLostError(
                    f"rank 0 at {address[0]}:{address[1]} did not welcome this process within {deadline_s:g} s "
                    f"({error or type(error).__name__}); check that it runs and that its port can be reached from here",
                    rank=0,
                ) from error
            time.sleep(pause)


def _first_message(sock: socket.socket, deadline: float) -> Message:
    inbox = bytearray()
    wanted = 4
    while True:
        sock.settimeout(max(0.01, deadline - time.monotonic()))
        data = sock.recv(wanted - len(inbox))  # not a byte more: what follows belongs to the watching thread
        if not data:
            raise ConnectionResetError("it hung up: it has ended, or is of another run")
        inbox += data
        for message in unpack(inbox):
            return message
        if len(inbox) >= 4:
            wanted = 4 + int.from_bytes(inbox[:4], "big")


def whole_number(message: Message, name: str) -> int:
    """Return a field that is an int, and no bool."""
    value = message.get(name)
    if not isinstance(value, int) or isinstance(value, bool):
        raise Malformed(f"without a whole number {name}")
    return value


def seconds(message: Message, name: str) -> float:
    """Return a field that is a number, as a float."""
    value = message.get(name)
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise Malformed(f"without a number {name}")
    return float(value)


def text(message: Message, name: str) -> str:
    """Return a field that is a string, made ``printable``."""
    value = message.get(name)
    if not isinstance(value, str):
        raise Malformed(f"without a text {name}")
    return printable(value)


def printable(text: str) -> str:
    """Return ``text`` as it may appear in a terminal, and so short that a message of three fits ``LONGEST`` bytes."""
    return "".join(c if c.isprintable() else "?" for c in text[:200])
