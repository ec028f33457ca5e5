"""Connections between every two ranks, over which named messages pass; and the sum of an array over all ranks.

    rank 0 ◀──▶ rank 1      a message: [1: length of the tag][8: length of the payload][tag][payload]
        ◣      ◢            one reading thread per process drains all connections, so two ranks may send at once
         rank 2             a message is fetched by its tag, whatever came before it

No framework, no pickle. Every wait has a deadline and names the peer (``waiting.py``); who is of the run is shown by a
token that rank 0 draws and the ranks tell each other when they meet (``meeting.py``).

An all-reduce takes two rounds (reduce-scatter and all-gather, each direct): everyone sends rank p the p-th part, rank p
adds them up in a fixed order and sends everyone the sum. It moves what a ring moves, 2 (N - 1) / N of the array per
rank, in 2 latencies instead of 2 (N - 1); each sum is made once, so all ranks hold the same bits.
"""

from __future__ import annotations

import hmac
import json
import os
import secrets
import select
import selectors
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nearlinear.errors import InputError, PeerLostError
from nearlinear.runtime.ending import end_if_stuck
from nearlinear.runtime.environment import World, deadline_s, silence_s
from nearlinear.runtime.interface import address_to
from nearlinear.runtime.liveness import Liveness
from nearlinear.runtime.meeting import Star, read_exactly
from nearlinear.runtime.waiting import POLL_S, Waiting
from nearlinear.units import seconds

LONGEST = 1 << 36  # bytes of one message
_HEAD = struct.Struct(">BQ")
_HELLO = struct.Struct(">32sI")
_HELLO_S = 10.0
_TURN = 1 << 23  # bytes read from one peer before the next has its turn

Bytes = NDArray[np.uint8]
Message = tuple[int, str]  # from whom, under which tag


class Mesh:
    """This process's connections to all others; made by ``join``.

    Args:
        rank: This process's number.
        peers: Connected sockets by rank, without this one's own.
        liveness: Who still answers.
        deadline_s: Seconds that a wait for a living peer may take.
        silence_s: Seconds within which liveness notices a peer that is gone.

    Attributes:
        step: Which step the run is in, for messages.
        waited_s: Seconds spent in waits for peers so far, over all threads.
    """

    def __init__(
        self,
        rank: int,
        peers: dict[int, socket.socket],
        liveness: Liveness,
        *,
        deadline_s: float,
        silence_s: float,
    ) -> None:
        self.rank, self.size = rank, len(peers) + 1
        self.liveness = liveness
        self.step, self.waited_s = 0, 0.0
        self._waiting = Waiting(
            liveness, rank, self.size, deadline_s=deadline_s, silence_s=silence_s, step=lambda: self.step
        )
        self._deadline_s = deadline_s
        self._senders = {peer: _Sender(sock) for peer, sock in peers.items()}
        self._inbox = _Inbox(peers)
        self._scratch: dict[int, Bytes] = {}
        # Whom this rank sends to, beginning with the next: so not everyone sends to rank 0 at first.
        self.peers = [(rank + distance) % self.size for distance in range(1, self.size)]
        self._calls: dict[str, int] = {}
        self._closed = False

    def send(self, peer: int, tag: str, data: Any, what: str = "sending") -> None:
        """Send a message; return when the kernel has taken it.

        Args:
            peer: To whom.
            tag: At most 255 bytes; the messages of one tag arrive in order.
            data: Bytes, or a contiguous array.
            what: For the message should the peer be gone.
        """
        sender = self._senders[peer]
        name, payload = tag.encode(), _bytes_of(data)
        with sender.lock:
            sender.put(_HEAD.pack(len(name), payload.nbytes) + name, payload)
            if not self._guard(peer, what, lambda: sender.flush(0.0)):
                self.until(lambda limit: self._guard(peer, what, lambda: sender.flush(limit)), what)

    def expect(self, peer: int, tag: str, into: Any) -> None:
        """Let the next message of this tag be written straight into ``into``, if it has not come yet."""
        self._inbox.expect((peer, tag), _bytes_of(into))

    def receive(self, peer: int, tag: str, what: str, into: Any = None) -> Bytes:
        """Return the bytes of the next message of this tag.

        Args:
            peer: From whom.
            tag: As it was sent.
            what: What is waited for, in words.
            into: A contiguous array that takes them; it must have their length.

        Raises:
            PeerLostError: The peer is gone, or sent nothing within the deadline.
            InputError: ``into`` is of another length.
        """
        key = (peer, tag)
        if into is not None:
            self.expect(peer, tag, into)
        payload = self._inbox.take(key)
        if payload is None:
            self.until(lambda limit: self._inbox.wait(key, limit), what)
            payload = self._inbox.take(key)
        if payload is None:
            raise self._waiting.explain(ConnectionError(self._inbox.gone[peer]), what)
        if into is None:
            return payload
        target = _bytes_of(into)
        if target.nbytes != payload.nbytes:
            raise InputError(
                f"rank {peer} sent {payload.nbytes} bytes in {what} and rank {self.rank} expects {target.nbytes}; "
                "do all ranks build the same model and read the same batches?"
            )
        if payload.ctypes.data != target.ctypes.data:
            target[:] = payload
        return target

    def arrived(self, peer: int, tag: str, limit_s: float = POLL_S) -> bool:
        """Return whether there is a message of this tag, or never will be, looking for at most ``limit_s`` seconds.

        For a thread that has nothing else to do: it asks nothing of the peer, so there is no deadline.
        """
        return self._inbox.wait((peer, tag), limit_s)

    def exchange(self, tag: str, data: Any, what: str) -> list[Bytes]:
        """Return what every rank sent under this tag, by rank; all call it."""
        mine = _bytes_of(data)
        for peer in self.peers:
            self.send(peer, tag, mine, what)
        return [mine if peer == self.rank else self.receive(peer, tag, what) for peer in range(self.size)]

    def all_gather_json(self, value: Any, what: str = "a message") -> list[Any]:
        """Return every rank's ``value``, sent as JSON; all call it, in the same order."""
        said = self.exchange(self._numbered("json"), json.dumps(value).encode(), what)
        return [json.loads(each.tobytes()) for each in said]

    def barrier(self, what: str) -> None:
        """Return when every rank is here."""
        self.exchange(self._numbered("barrier"), b"", what)

    def all_reduce(self, tag: str, array: NDArray[Any], what: str) -> None:
        """Replace ``array`` by its sum over the ranks, the same bits on all.

        Args:
            tag: Of its own for every call, the same on all ranks; at most 250 bytes.
            array: Numbers, shape ``(n,)``, contiguous; the same ``n`` and type on all ranks.
            what: What is summed, in words.
        """
        cuts = [array.size * rank // self.size for rank in range(self.size + 1)]
        parts = [array[start:end] for start, end in pairwise(cuts)]
        mine, one, two = parts[self.rank], f"{tag}:1", f"{tag}:2"
        others = {peer: self._scratch_for(peer, mine.nbytes).view(array.dtype) for peer in self.peers}
        for peer in self.peers:
            self.expect(peer, one, others[peer])
            # No peer sends its sum before it has this rank's addend, so what is overwritten has been sent.
            self.expect(peer, two, parts[peer])
        for peer in self.peers:
            self.send(peer, one, parts[peer], what)
        for peer in self.peers:
            self.receive(peer, one, what, others[peer])
            np.add(mine, others[peer], out=mine)
        for peer in self.peers:
            self.send(peer, two, mine, what)
        for peer in self.peers:
            self.receive(peer, two, what, parts[peer])

    def broadcast(self, tag: str, data: Any, what: str) -> Bytes:
        """Return rank 0's ``data``; the others' is not looked at."""
        if self.rank:
            return self.receive(0, tag, what)
        for peer in self.peers:
            self.send(peer, tag, data, what)
        return _bytes_of(data)

    def close(self, *, failed: bool) -> None:
        """Say goodbye, or hang up at once so that the peers notice that this process failed."""
        if self._closed:
            return
        self._closed = True
        if failed:
            self.liveness.hang_up()
        else:
            self.liveness.leave()
        self._inbox.close()

    def _numbered(self, kind: str) -> str:
        self._calls[kind] = self._calls.get(kind, 0) + 1
        return f"{kind}:{self._calls[kind]}"

    def _scratch_for(self, peer: int, nbytes: int) -> Bytes:
        if peer not in self._scratch or self._scratch[peer].nbytes < nbytes:
            self._scratch[peer] = np.empty(nbytes, np.uint8)
        return self._scratch[peer][:nbytes]

    def until(self, done: Callable[[float], bool], what: str) -> None:
        """Return when ``done(seconds)``, which looks for at most so long, is true; see ``Waiting.until``."""
        began = time.monotonic()
        self._waiting.until(done, what)
        self.waited_s += time.monotonic() - began

    def _guard(self, peer: int, what: str, act: Callable[[], bool]) -> bool:
        try:
            return act()
        except OSError as error:
            raise self._waiting.explain(error, what) from None


def join(world: World) -> Mesh:
    """Return this process's connections to all others, once all have arrived.

    Raises:
        InputError: The environment is wrong, or rank 0's port is taken.
        PeerLostError: A rank did not arrive within the deadline (``NEARLINEAR_DEADLINE``).
    """
    limit = deadline_s()
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        world = replace(world, port=world.port + 1)  # the agent itself listens on the port that it tells
    address = address_to(world.address)
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    star = Star(world, limit)
    with socket.create_server((address, 0), family=family, backlog=world.size + 8) as listener:
        here: dict[str, Any] = {"address": address, "port": listener.getsockname()[1]}
        if world.rank == 0:
            here["token"] = token = secrets.token_hex(16)
            liveness = Liveness.listen(
                world.size, token, host=world.host, bind=address, silence_s=silence_s(), on_lost=end_if_stuck
            )
            here["liveness"] = liveness.port
        everyone = star.all_gather_json(here, "meeting")
        star.close()
        token = everyone[0]["token"]
        if world.rank:
            liveness = Liveness.connect(
                (everyone[0]["address"], everyone[0]["liveness"]),
                world.rank,
                token,
                host=world.host,
                deadline_s=limit,
                silence_s=silence_s(),
                on_lost=end_if_stuck,
            )
        peers = _connect(world, everyone, token, listener, limit)
    return Mesh(world.rank, peers, liveness, deadline_s=limit, silence_s=silence_s())


def _connect(
    world: World, everyone: Sequence[dict[str, Any]], token: str, listener: socket.socket, limit_s: float
) -> dict[int, socket.socket]:
    """Dial the lower ranks and wait for the higher ones."""
    peers, until = dict[int, socket.socket](), time.monotonic() + limit_s
    hello = _HELLO.pack(token.encode(), world.rank)
    for peer in range(world.rank):
        place = everyone[peer]["address"], everyone[peer]["port"]
        try:
            peers[peer] = socket.create_connection(place, timeout=max(0.01, until - time.monotonic()))
            peers[peer].sendall(hello)
        except OSError as error:
            raise PeerLostError(
                f"rank {peer} cannot be reached at {place[0]}:{place[1]} from rank {world.rank} ({error}); "
                "do the machines let each other's ports through?",
                peer,
            ) from None
    while len(peers) < world.size - 1:
        try:
            listener.settimeout(max(0.01, until - time.monotonic()))
            one, _ = listener.accept()
        except TimeoutError:
            missing = [rank for rank in range(world.rank + 1, world.size) if rank not in peers]
            raise PeerLostError(
                f"rank {missing[0]} opened no connection to rank {world.rank} within {seconds(limit_s)}; "
                "do the machines let each other's ports through?",
                missing[0],
            ) from None
        try:
            one.settimeout(_HELLO_S)
            said, rank = _HELLO.unpack(read_exactly(one, _HELLO.size))
        except OSError:
            one.close()
            continue
        if hmac.compare_digest(said, token.encode()) and world.rank < rank < world.size and rank not in peers:
            peers[rank] = one
        else:
            one.close()
    for sock in peers.values():
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setblocking(False)
    return peers


class _Sender:
    """One direction of a connection: what the kernel has not taken yet."""

    def __init__(self, sock: socket.socket) -> None:
        self.lock = threading.Lock()
        self._sock = sock
        self._queue: deque[memoryview] = deque()
        self._writable = select.poll()
        self._writable.register(sock, select.POLLOUT)

    def put(self, head: bytes, payload: Bytes) -> None:
        if payload.nbytes <= 4096:
            self._queue.append(memoryview(head + payload.tobytes()))
        else:
            self._queue += (memoryview(head), payload.data)

    def flush(self, limit_s: float) -> bool:
        """Hand over what there is, waiting up to ``limit_s`` in all; return whether nothing is left."""
        until = time.monotonic() + limit_s
        while self._queue:
            try:
                sent = self._sock.send(self._queue[0])
            except BlockingIOError:
                left = until - time.monotonic()
                if left <= 0 or not self._writable.poll(1000 * left):
                    return False
                continue
            if sent == self._queue[0].nbytes:
                self._queue.popleft()
            else:
                self._queue[0] = self._queue[0][sent:]
        return True


class _Incoming:
    """What has come over one connection of a message that is not whole yet."""

    def __init__(self, sock: socket.socket, peer: int) -> None:
        self.sock, self.peer, self.length = sock, peer, 0
        self.begin()

    def begin(self) -> None:
        self.part, self.tag = "head", ""
        self.want(np.empty(_HEAD.size, np.uint8))

    def want(self, buffer: Bytes) -> None:
        self.buffer, self.got = buffer, 0


class _Inbox:
    """The thread that reads all connections, and the messages that nobody has fetched yet."""

    def __init__(self, peers: dict[int, socket.socket]) -> None:
        self.gone: dict[int, str] = {}
        self._whole: dict[Message, deque[Bytes]] = {}
        self._expected: dict[Message, Bytes] = {}
        self._changed = threading.Condition()
        self._selector = selectors.DefaultSelector()
        self._bell, self._button = socket.socketpair()
        self._selector.register(self._bell, selectors.EVENT_READ)
        self._sockets = list(peers.values())
        for peer, sock in peers.items():
            self._selector.register(sock, selectors.EVENT_READ, _Incoming(sock, peer))
        self._thread = threading.Thread(target=self._read_all, name="nearlinear-mesh", daemon=True)
        self._thread.start()

    def expect(self, key: Message, into: Bytes) -> None:
        with self._changed:
            self._expected[key] = into

    def take(self, key: Message) -> Bytes | None:
        """Return the next message, or None if there is none yet."""
        with self._changed:
            messages = self._whole.get(key)
            if not messages:
                return None
            self._expected.pop(key, None)
            payload = messages.popleft()
            if not messages:
                del self._whole[key]
            return payload

    def wait(self, key: Message, limit_s: float) -> bool:
        """Return whether the message has come, or never will."""
        with self._changed:
            return self._changed.wait_for(lambda: key in self._whole or key[0] in self.gone, limit_s)

    def close(self) -> None:
        self._button.send(b"!")
        self._thread.join(1.0)
        for sock in (*self._sockets, self._bell, self._button):
            sock.close()

    def _read_all(self) -> None:
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is self._bell:
                    return
                try:
                    self._read(key.data)
                except OSError as error:
                    self._selector.unregister(key.fileobj)
                    with self._changed:
                        self.gone[key.data.peer] = str(error) or "it hung up"
                        self._changed.notify_all()

    def _read(self, coming: _Incoming) -> None:
        budget = _TURN
        while budget > 0:
            if coming.got < coming.buffer.nbytes:
                try:
                    got = coming.sock.recv_into(coming.buffer[coming.got :].data)
                except BlockingIOError:
                    return
                if not got:
                    raise ConnectionResetError("it hung up")
                coming.got += got
                budget -= got
            if coming.got == coming.buffer.nbytes:
                self._advance(coming)

    def _advance(self, coming: _Incoming) -> None:
        match coming.part:
            case "head":
                tag_bytes, coming.length = _HEAD.unpack(coming.buffer.tobytes())
                if coming.length > LONGEST:
                    raise ConnectionResetError(f"it wants to send {coming.length} bytes")
                coming.part = "tag"
                coming.want(np.empty(tag_bytes, np.uint8))
            case "tag":
                coming.part, coming.tag = "payload", coming.buffer.tobytes().decode()
                with self._changed:
                    place = self._expected.get((coming.peer, coming.tag))
                    if place is not None and place.nbytes == coming.length:
                        del self._expected[coming.peer, coming.tag]
                    else:
                        place = np.empty(coming.length, np.uint8)
                coming.want(place)
            case _:
                with self._changed:
                    self._whole.setdefault((coming.peer, coming.tag), deque()).append(coming.buffer)
                    self._changed.notify_all()
                coming.begin()


def _bytes_of(data: Any) -> Bytes:
    """Return the memory of bytes or of a contiguous array as an array of bytes."""
    if isinstance(data, np.ndarray):
        if not data.flags.c_contiguous:
            raise ValueError("an array that is sent or filled must be contiguous")
        return data.reshape(-1).view(np.uint8)
    return np.frombuffer(data, np.uint8)
