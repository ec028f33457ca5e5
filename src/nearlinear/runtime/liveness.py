"""Watching who still answers: every rank beats to rank 0, and rank 0 tells all who fell silent or hung up.

    rank 1 ──── hello, beat, beat, ... ───▶ rank 0 ◀─── hello, beat, beat, ... ──── rank 2
           ◀─── welcome, beat, beat, ...                                      ✗ hangs up, or is silent
           ◀─── lost: rank 2 on host-b: its process ended

One TCP connection per rank, one daemon thread per process. Who counts as lost is decided in ``membership.py``; here
the bytes are moved, as the messages of ``messages.py``. The token keeps runs apart that meet by accident; it is no
secret on the wire.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import selectors
import socket
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Self

from nearlinear.errors import InputError
from nearlinear.runtime.membership import Loss, Membership, Progress
from nearlinear.runtime.messages import (
    Connection,
    Malformed,
    Message,
    pack,
    printable,
    say_hello,
    seconds,
    text,
    whole_number,
)

__all__ = ["Liveness", "Loss", "Progress"]

HELLO_S = 10.0  # who has not introduced himself by then is shown out
GOODBYE_S = 2.0  # the longest that `leave` waits for the others to have heard it
STRANGERS = 64  # connections without a hello that are kept beside those of the ranks still expected
HUNG_UP = "its process ended"


class Liveness:
    """This rank's connection to the others' pulse; made by ``listen`` on rank 0 and by ``connect`` on the others.

    Example:
        >>> zero = Liveness.listen(2, "9f" * 16, host="here")
        >>> one = Liveness.connect(("127.0.0.1", zero.port), 1, "9f" * 16, host="there", deadline_s=10)
        >>> zero.missing(timeout_s=10)
        []
        >>> one.where(12, "gradient exchange")
        >>> one.progress()[1].at
        'gradient exchange'
        >>> one.leave(); zero.leave(); print(zero.lost(), one.lost())
        None None
    """

    @classmethod
    def listen(
        cls,
        size: int,
        token: str,
        *,
        host: str,
        bind: str = "127.0.0.1",
        beat_s: float = 1.0,
        silence_s: float = 5.0,
        on_lost: Callable[[Loss], None] | None = None,
    ) -> Self:
        """Return rank 0's side, listening on a free port: ``port``.

        Args:
            size: Number of processes.
            token: What all processes of this run share and no other run has, such as 16 random bytes in hex.
            host: This machine's name, for messages.
            bind: Address of the interface to listen on; ``"0.0.0.0"`` for all.
            beat_s: Seconds between two beats.
            silence_s: Seconds of silence after which a rank is lost.
            on_lost: Called once with the first loss, in the watching thread, so it must not wait.

        Raises:
            InputError: ``silence_s`` is shorter than two beats.
            OSError: ``bind`` is not an address of this machine.
        """
        members = Membership(0, printable(host), size, beat_s=beat_s, silence_s=silence_s, now=time.monotonic())
        family = socket.AF_INET6 if ":" in bind else socket.AF_INET
        listener = socket.create_server((bind, 0), family=family, backlog=size + STRANGERS)
        return cls(members, printable(host), token, beat_s, on_lost, listener=listener)

    @classmethod
    def connect(
        cls,
        address: tuple[str, int],
        rank: int,
        token: str,
        *,
        host: str,
        deadline_s: float = 60.0,
        beat_s: float = 1.0,
        silence_s: float = 5.0,
        on_lost: Callable[[Loss], None] | None = None,
    ) -> Self:
        """Return the side of rank 1, 2, ..., once rank 0 has welcomed it.

        Args:
            address: Host and port of rank 0, as reached from here.
            rank: This process's number.
            token: The run's token.
            host: This machine's name, for messages.
            deadline_s: Seconds to keep trying.
            beat_s: Seconds between two beats.
            silence_s: Seconds of silence after which rank 0 is lost.
            on_lost: Called once with the first loss, in the watching thread, so it must not wait.

        Raises:
            InputError: Rank 0 has no place for this rank, or ``silence_s`` is shorter than two beats.
            PeerLostError: Rank 0 did not answer within ``deadline_s``.
        """
        # Bad limits are told before anyone is called.
        Membership(rank, host, rank + 1, beat_s=beat_s, silence_s=silence_s, now=0.0)
        hello = pack("hello", rank=rank, host=printable(host), token=token)
        sock, zeros_host, size = say_hello(address, hello, deadline_s)
        now = time.monotonic()
        members = Membership(rank, printable(host), size, beat_s=beat_s, silence_s=silence_s, now=now)
        members.joined(0, zeros_host, now)
        return cls(members, printable(host), token, beat_s, on_lost, zero=sock)

    def __init__(
        self,
        members: Membership,
        host: str,
        token: str,
        beat_s: float,
        on_lost: Callable[[Loss], None] | None,
        *,
        listener: socket.socket | None = None,
        zero: socket.socket | None = None,
    ) -> None:
        # The watching thread alone touches what is in this block.
        self._members, self._host, self._token, self._beat_s, self._on_lost = members, host, token, beat_s, on_lost
        self._peers: dict[int, Connection] = {}
        self._strangers: dict[Connection, None] = {}  # connected, but not yet known by a hello; oldest first
        self._asking: set[Connection] = set()
        self._selector = selectors.DefaultSelector()
        self._next_beat = time.monotonic()
        self._goodbye_until: float | None = None

        # Single writes, read by the other side without a lock.
        self._loss: Loss | None = None
        self._here = (0, "")
        self._missing = members.missing()
        self._table: tuple[float, dict[int, Progress]] = (time.monotonic(), members.table(time.monotonic()))
        self._ask = self._leave = self._hang_up = False
        self._found, self._complete, self._answered, self._over = (threading.Event() for _ in range(4))

        self._listener = listener
        self.port: int = listener.getsockname()[1] if listener else 0
        self._bell, self._button = socket.socketpair()  # a byte into the button wakes the thread
        self._bell.setblocking(False)
        self._button.setblocking(False)
        self._selector.register(self._bell, selectors.EVENT_READ)
        if listener is not None:
            listener.setblocking(False)
            self._selector.register(listener, selectors.EVENT_READ)
            if members.size == 1:
                self._complete.set()
        if zero is not None:
            self._peers[0] = self._open(zero, 0)
        _watching.add(self)
        self._thread = threading.Thread(target=self._watch, name="nearlinear-liveness", daemon=True)
        self._thread.start()

    def lost(self) -> Loss | None:
        """Return the first loss, if there was one; costs an attribute's reading."""
        return self._loss

    def wait_lost(self, timeout_s: float) -> Loss | None:
        """Return the first loss as soon as there is one, None if there is none for ``timeout_s`` seconds.

        To be asked after a collective failed: the sockets of a dead rank close everywhere at once, and the word who it
        was takes a message longer.
        """
        self._found.wait(timeout_s)
        return self._loss

    def missing(self, timeout_s: float = 0.0) -> list[int]:
        """Return the ranks that have never come, after waiting up to ``timeout_s`` for all; for rank 0 alone."""
        self._complete.wait(timeout_s)
        return list(self._missing)

    @property
    def at(self) -> str:
        """What this rank last said it was doing."""
        return self._here[1]

    def where(self, step: int, at: str) -> None:
        """Say where this rank is; sent with the next beat, costs an attribute's writing."""
        self._here = (int(step), at)

    def progress(self, timeout_s: float = 3.0) -> dict[int, Progress]:
        """Return where every rank is, by rank 0's table, which comes with its next beat.

        Returns:
            By rank. If rank 0 does not send it within ``timeout_s``, what was known here before, with its age.
        """
        if not self._over.is_set():
            self._answered.clear()
            self._ask = True
            self._wake()
            self._answered.wait(timeout_s)
        then, table = self._table
        age_s = time.monotonic() - then
        return {rank: replace(place, age_s=place.age_s + age_s) for rank, place in table.items()}

    def leave(self) -> None:
        """Say where this rank is and goodbye, and stop; what happens to the others is no longer noticed here."""
        self._leave = True
        self._stop()

    def hang_up(self) -> None:
        """Close the connections at once, without a goodbye, and stop: to the others, this process has ended.

        For a process that is failing: its interpreter may take seconds to end, and the others need not wait for it.
        """
        self._hang_up = True
        self._stop()

    def _stop(self) -> None:
        self._wake()
        if threading.current_thread() is not self._thread:
            self._thread.join(GOODBYE_S + self._beat_s)

    # ---- the watching thread ----

    def _watch(self) -> None:
        try:
            while self._turn() and not self._hang_up:
                pass
        finally:
            self._table = (time.monotonic(), self._members.table(time.monotonic()))
            self._over.set()
            self._answered.set()
            self._close()

    def _turn(self) -> bool:
        """Wait for bytes or the next beat and deal with them; return whether to go on."""
        before = time.monotonic()
        self._members.wake(before)
        ready = self._selector.select(max(0.0, self._next_beat - before))
        now = time.monotonic()
        self._members.wake(now)
        for key, events in ready:
            if key.fileobj is self._bell:
                self._bell.recv(4096)
            elif key.fileobj is self._listener:
                self._accept(now)
            elif key.data.closed:
                continue  # shown out earlier in this turn
            elif events & selectors.EVENT_READ:
                self._read(key.data, now)
            else:
                self._flush(key.data)
        if self._leave and self._goodbye_until is None:
            self._say_goodbye(now)
        if self._goodbye_until is not None:
            self._next_beat = self._goodbye_until
            return bool(self._peers) and now < self._goodbye_until
        if self._ask:
            self._ask = False
            self._table = (now, self._members.table(now))
            if self._members.rank == 0:
                self._answered.set()
            else:
                self._beat(now, ask=True)
        if now >= self._next_beat:
            self._next_beat = now + self._beat_s
            self._members.judge(before)
            self._beat(now)
            self._look_at_the_door(now)
        if self._members.loss is not self._loss:
            self._report(self._members.loss)
        return bool(self._peers) or self._members.rank == 0

    def _beat(self, now: float, ask: bool = False) -> None:
        beat, table = self._packed_beat(now, ask), b""
        for peer in self._peers.values():
            if peer.outbox:
                continue  # it does not read: more of the same would only pile up
            if peer in self._asking:
                self._asking.discard(peer)
                table = table or self._packed_table(now)
                self._send(peer, table)
            self._send(peer, beat)

    def _packed_beat(self, now: float, ask: bool) -> bytes:
        step, at = self._here
        at = printable(at)
        self._members.moved(self._members.rank, step, at, now)
        return pack("beat", step=step, at=at, ask=ask)

    def _packed_table(self, now: float) -> bytes:
        rows = self._members.table(now).values()
        return b"".join(pack("place", **asdict(row)) for row in rows) + pack("table")

    def _report(self, loss: Loss | None) -> None:
        assert loss is not None
        # First the others, then this process: its main thread may end it as soon as it knows.
        for peer in self._peers.values():
            self._send(peer, pack("lost", **asdict(loss)))
        self._loss = loss
        self._found.set()
        if self._on_lost is not None:
            self._on_lost(loss)

    def _say_goodbye(self, now: float) -> None:
        # Whoever reads it hangs up. To hang up here instead, with a beat unread, would reset the connection, and the
        # goodbye might be lost with it.
        self._goodbye_until = now + GOODBYE_S
        goodbye = self._packed_beat(now, ask=False) + pack("leave")  # after which step: not that of the last beat
        for peer in self._peers.values():
            self._send(peer, goodbye)
            peer.last_word = True

    # ---- what comes in ----

    def _read(self, peer: Connection, now: float) -> None:
        try:
            for message in peer.receive():
                if peer.rank is None:
                    self._hello(peer, message, now)
                else:
                    self._message(peer, peer.rank, message, now)
                if peer.closed:
                    return
        except ConnectionError:
            self._drop(peer, HUNG_UP)
        except OSError as error:
            self._drop(peer, f"its connection broke ({error.strerror})")
        except Malformed as error:
            self._drop(peer, f"sent what is no message ({error})")
        else:
            if peer.rank is not None:
                self._members.heard(peer.rank, now)

    def _hello(self, peer: Connection, message: Message, now: float) -> None:
        token = str(message.get("token")).encode(errors="replace")
        if message["kind"] != "hello" or not secrets.compare_digest(token, self._token.encode()):
            raise Malformed("not of this run")
        rank = whole_number(message, "rank")
        try:
            self._members.joined(rank, text(message, "host"), now)
        except InputError as error:
            self._send(peer, pack("refused", why=str(error)))
            self._drop(peer, "refused")
            return
        del self._strangers[peer]
        peer.rank = rank
        self._peers[rank] = peer
        self._send(peer, pack("welcome", host=self._host, size=self._members.size))
        if self._loss is not None:
            self._send(peer, pack("lost", **asdict(self._loss)))
        self._missing = self._members.missing()
        if not self._missing:
            self._complete.set()

    def _message(self, peer: Connection, rank: int, message: Message, now: float) -> None:
        match message["kind"]:
            case "beat":
                self._members.moved(rank, whole_number(message, "step"), text(message, "at"), now)
                if message.get("ask") is True:
                    self._asking.add(peer)
            case "leave":
                self._members.left(rank)
                self._drop(peer, "left")
            case "lost":
                loss = Loss(
                    whole_number(message, "rank"),
                    text(message, "host"),
                    text(message, "why"),
                    seconds(message, "silent_s"),
                )
                self._members.told(rank, loss)
            case "place" if rank == 0:
                place = Progress(
                    whole_number(message, "rank"),
                    text(message, "host"),
                    whole_number(message, "step"),
                    text(message, "at"),
                    seconds(message, "age_s"),
                    message.get("left") is True,
                )
                self._members.placed(place, now)
            case "table" if rank == 0:
                self._table = (now, self._members.table(now))
                self._answered.set()
            case kind:
                raise Malformed(f"of kind {kind!r}"[:80])

    # ---- connections ----

    def _accept(self, now: float) -> None:
        assert self._listener is not None
        try:
            sock, _ = self._listener.accept()
        except OSError:  # gone again, or this process has no file descriptor to spare: look again at the next beat
            self._selector.unregister(self._listener)
            return
        self._strangers[self._open(sock, None)] = None
        if len(self._strangers) > self._members.size + STRANGERS:
            self._drop(next(iter(self._strangers)), "crowded out")

    def _look_at_the_door(self, now: float) -> None:
        for stranger in [s for s in self._strangers if now - s.since > HELLO_S]:
            self._drop(stranger, "said nothing")
        if self._listener is not None and self._listener not in self._selector.get_map():
            self._selector.register(self._listener, selectors.EVENT_READ)

    def _open(self, sock: socket.socket, rank: int | None) -> Connection:
        sock.setblocking(False)
        with contextlib.suppress(OSError):  # it has hung up already; reading will say so
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        peer = Connection(sock, rank, time.monotonic())
        self._selector.register(sock, selectors.EVENT_READ, peer)
        return peer

    def _send(self, peer: Connection, data: bytes) -> None:
        if not peer.last_word:
            peer.outbox += data
            self._flush(peer)

    def _flush(self, peer: Connection) -> None:
        try:
            if peer.outbox:
                del peer.outbox[: peer.sock.send(peer.outbox)]
        except BlockingIOError:
            pass  # full; the selector will say when it is not
        except OSError:
            # What it said before it went (lost, leave) may still lie here unread, so reading has the last word.
            peer.outbox.clear()
            peer.last_word = True
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if peer.outbox else 0)
        if self._selector.get_key(peer.sock).events != events:
            self._selector.modify(peer.sock, events, peer)

    def _drop(self, peer: Connection, why: str) -> None:
        peer.closed = True
        self._selector.unregister(peer.sock)
        peer.sock.close()
        self._strangers.pop(peer, None)
        self._asking.discard(peer)
        if peer.rank is not None:
            del self._peers[peer.rank]
            if self._goodbye_until is None:
                self._members.ended(peer.rank, why)  # no effect on one that has said goodbye

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError, OSError):  # full: it will wake anyway; closed: it is over
            self._button.send(b"!")

    def _close(self) -> None:
        for peer in [*self._peers.values(), *self._strangers]:
            peer.sock.close()
        for sock in (self._listener, self._bell, self._button):
            if sock is not None:
                sock.close()
        self._selector.close()

    def _after_fork(self) -> None:
        """Let go of the sockets in a forked child, a data loader's worker say.

        A child that held them would keep the connection open when its parent is killed, and the loss would show as
        silence only.
        """
        self._over = threading.Event()  # the old one's lock may be held by a thread that does not exist here
        self._over.set()
        self._close()


_watching: weakref.WeakSet[Liveness] = weakref.WeakSet()


def _let_go() -> None:
    for liveness in list(_watching):
        liveness._after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_let_go)
