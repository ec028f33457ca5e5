"""Asking another rank for a value that lies there alone: a small server in every process, and the one who asks.

    rank 0 ──── hello; named: "block.3.weight", version 12 ──▶ rank 1   a thread per asking rank
           ◀─── tensor: dtype, shape; then the bytes ─────────          which waits until version() >= 12

Who asks waits at most the deadline, looks at liveness once a second and names whom it waits for. The messages are
those of ``runtime/messages.py``, at most ``LONGEST`` bytes; what follows a ``tensor`` are as many bytes as its dtype
and shape say, never more than this machine has. At exit every rank goes on serving until all others are at their end
too: the last line of a script may read a value on one rank alone.
"""

from __future__ import annotations

import atexit
import math
import os
import secrets
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import torch

from nearlinear.errors import NearlinearError, PeerLostError
from nearlinear.runtime.ending import failed
from nearlinear.runtime.environment import world_from
from nearlinear.runtime.interface import address_to
from nearlinear.runtime.messages import LONGEST, Malformed, Message, pack, text, unpack, whole_number
from nearlinear.runtime.waiting import OWN_CODE, explain, lost
from nearlinear.torch.collectives import Group
from nearlinear.torch.pipeline.ledger import Ledger
from nearlinear.torch.session import Session
from nearlinear.units import seconds

HELLO_S = 10.0  # who has not introduced himself by then is shown out
POLL_S = 0.02  # between two looks at what nobody announces: a version, a wait of the main thread
LATER_S = 10.0  # who is asked gives up later than who asks, who can say more
STRANGERS = 64  # connections that are kept beside one of every rank

Answer = torch.Tensor | dict[str, Any]
Handler = Callable[[Message], Answer]


class Values:
    """What this rank is asked for by the others, and what it asks of them; one per process.

    Args:
        session: This process's part in the run.

    Example:
        >>> from nearlinear.runtime.environment import World
        >>> values = Values(Session(World()))
        >>> values.offer("scale", lambda: torch.ones(()))
        >>> values.fetch(0, "scale")
        tensor(1.)
    """

    def __init__(self, session: Session) -> None:
        self.session = session
        self.began = self.ended = 0  # number of the latest call of the model that began and ended on this rank
        self.on_began: list[Callable[[int], None]] = []
        self.on_ended: list[Callable[[int], None]] = []
        self.handlers: dict[str, Handler] = {"named": self._named}
        self.changed = threading.Condition()
        self.ledger = Ledger(self)
        self.closing = False  # this rank's script is at its end
        self._offered: dict[str, tuple[Callable[[], torch.Tensor], Callable[[], int]]] = {}
        self._over = False  # nothing is served or asked any more
        self._done: set[int] = set()  # ranks at their end
        self._peers: dict[int, _Wire] = {}
        self._asking = threading.RLock()
        self._accepted: set[_Wire] = set()
        self._listener: socket.socket | None = None
        if session.size == 1:
            return
        bind = address_to(world_from().address or "127.0.0.1")
        family = socket.AF_INET6 if ":" in bind else socket.AF_INET
        self._listener = socket.create_server((bind, 0), family=family, backlog=session.size + STRANGERS)
        self._token = secrets.token_hex(16)
        here = [bind, self._listener.getsockname()[1], self._token]
        self._places = session.all_gather_json(here, "telling where values are served")
        _serving.add(self)
        threading.Thread(target=self._accept, name="nearlinear-values", daemon=True).start()
        last = weakref.WeakMethod(self.close)
        atexit.register(lambda: close() if (close := last()) is not None else None)  # before session.close says goodbye

    # ---- what the executor and the parameters call

    def offer(self, key: str, read: Callable[[], torch.Tensor], version: Callable[[], int] = lambda: 0) -> None:
        """Let the other ranks ask for ``key``; a second offer replaces the first.

        Args:
            key: A name that only one value of this rank has.
            read: Returns the value; called in a serving thread.
            version: Returns how often the value has changed; who asks for a later one waits for it.
        """
        with self.changed:
            self._offered[key] = read, version
            self.changed.notify_all()

    def fetch(self, owner: int, key: str, version: int = 0) -> torch.Tensor:
        """Return what ``owner`` offers as ``key``, at ``version`` or later, on the CPU.

        Raises:
            PeerLostError: The owner is gone, or did not answer within the deadline.
            NearlinearError: It could not read the value; the message says why.
        """
        what = f"reading {key} of rank {owner}"
        answer = self.ask(owner, what, "named", key=key, version=version)
        if isinstance(answer, torch.Tensor):
            return answer
        raise NearlinearError(f"{what}: {answer.get('why', 'no value came')}")

    def began_call(self, number: int) -> None:
        """Note that the ``number``-th call of a model (from 1) begins on this rank, before it waits for any other."""
        with self.changed:
            self.began = max(self.began, number)
            for hook in self.on_began:
                hook(number)
            self.changed.notify_all()

    def ended_call(self, number: int) -> None:
        """Note that the call has returned on this rank; where its output lies, every rank has then begun it."""
        with self.changed:
            self.ended = max(self.ended, number)
            for hook in self.on_ended:
                hook(number)
            self.changed.notify_all()

    def close(self) -> None:
        """Go on serving until every other rank is at its end or lost; at once if this process failed."""
        with self.changed:
            again, self.closing = self.closing, True
            self.changed.notify_all()
        if again or self._listener is None:
            return
        if not failed():
            self._serve_the_last()
        self._shut()

    # ---- asking

    def ask(self, owner: int, what: str, kind: str, **fields: Any) -> Answer:
        """Return the answer of ``owner``'s handler for ``kind``: a tensor on the CPU, or a message.

        Args:
            owner: The rank that is asked; may be this one.
            what: What is waited for, for messages.
            kind: The kind of message; ``handlers`` has a function for it there.
            fields: The rest of the message, as JSON.
        """
        message = {"kind": kind, **fields}
        with self._waiting(what):
            if owner == self.session.rank:
                answer = self.handlers[kind](message)
                return answer.detach().clone() if isinstance(answer, torch.Tensor) else answer
            if self._over or self._listener is None:
                raise NearlinearError(f"{what}: this process has no connection to it (a forked child, or at its end)")
            tick = self._watch(owner, what)
            with self._asking:
                try:
                    wire = self._wire(owner, tick)
                    wire.send(pack(**message), tick)
                    return wire.answer(tick)
                except (OSError, Malformed) as error:
                    self._hang_up(owner)
                    raise self._why(error, owner, what) from None
                except BaseException:
                    self._hang_up(owner)  # half an answer may be under way
                    raise

    @contextmanager
    def _waiting(self, what: str) -> Iterator[None]:
        liveness = self.session.liveness
        if liveness is not None:
            liveness.where(Group.step, what)
        yield
        if liveness is not None:
            liveness.where(Group.step, OWN_CODE)

    def _watch(self, owner: int, what: str) -> Callable[[], None]:
        """Return what is called once a second while ``owner`` is waited for; it raises when that is pointless."""
        began, session = time.monotonic(), self.session
        assert session.liveness is not None
        liveness = session.liveness

        def tick() -> None:
            loss = liveness.lost()
            if loss is not None:
                raise lost(loss, what) from None
            waited = time.monotonic() - began
            if waited > session.deadline_s:
                where = liveness.progress().get(owner, f"rank {owner}")
                raise PeerLostError(
                    f"waited {seconds(waited)} in {what} for {where}; NEARLINEAR_DEADLINE='1 h' waits longer", owner
                ) from None

        return tick

    def _wire(self, owner: int, tick: Callable[[], None]) -> _Wire:
        if owner not in self._peers:
            address, port, token = self._places[owner]
            while True:
                try:
                    sock = socket.create_connection((address, port), timeout=1.0)
                    break
                except TimeoutError:
                    tick()
            self._peers[owner] = wire = _Wire(sock)
            wire.send(pack("hello", rank=self.session.rank, token=token), tick)
        return self._peers[owner]

    def _hang_up(self, owner: int) -> None:
        wire = self._peers.pop(owner, None)
        if wire is not None:
            wire.close()

    def _why(self, error: Exception, owner: int, what: str) -> NearlinearError:
        session = self.session
        assert session.liveness is not None
        reason = RuntimeError(f"rank {owner}: {error or 'it hung up'}")
        return explain(reason, what, session.liveness, session.silence_s)

    # ---- being asked, in threads of their own

    def until(self, ready: Callable[[], dict[str, Any] | None], what: str) -> dict[str, Any]:
        """Return what ``ready`` returns once it is something; for handlers. Refuse when the deadline has passed."""
        until = time.monotonic() + self.session.deadline_s + LATER_S
        with self.changed:
            while True:
                answer = ready()
                if answer is not None:
                    return answer
                if self._over or time.monotonic() > until:
                    return {"kind": "refused", "why": f"{what} within {seconds(self.session.deadline_s)}"}
                self.changed.wait(POLL_S)

    def stands(self) -> str | None:
        """Return the exchange with other ranks in which this rank's main thread stands, None in its own code."""
        liveness = self.session.liveness
        at = liveness.at if liveness is not None else ""
        return None if at in ("", OWN_CODE) else at

    def _named(self, message: Message) -> Answer:
        key, version = _name(message), whole_number(message, "version")

        def ready() -> dict[str, Any] | None:
            offered = self._offered.get(key)
            return {"kind": "ready"} if offered is not None and offered[1]() >= version else None

        answer = self.until(ready, f"rank {self.session.rank} had no {key} of version {version}")
        return self._offered[key][0]() if answer["kind"] == "ready" else answer  # read without holding the lock

    def _accept(self) -> None:
        assert self._listener is not None
        while not self._over:
            try:
                sock, _ = self._listener.accept()
            except OSError:  # closed, or this process has no file descriptor to spare
                if self._over:
                    return
                time.sleep(POLL_S)
                continue
            wire = _Wire(sock)
            if len(self._accepted) >= self.session.size + STRANGERS:
                wire.close()
                continue
            self._accepted.add(wire)
            threading.Thread(target=self._serve, args=(wire,), name="nearlinear-value", daemon=True).start()

    def _serve(self, wire: _Wire) -> None:
        try:
            rank = self._introduced(wire)
            while not self._over:
                message = wire.message(self._tick)
                if message["kind"] == "done":
                    with self.changed:
                        self._done.add(rank)
                        self.changed.notify_all()
                    continue
                answer = self._answer(message)
                if isinstance(answer, torch.Tensor):
                    wire.send_tensor(answer, self._tick)
                else:
                    wire.send(pack(**answer), self._tick)
        except (OSError, Malformed):
            pass  # it has gone, or is none of ours; who it was and whether it is missed, liveness says
        finally:
            self._accepted.discard(wire)
            wire.close()

    def _introduced(self, wire: _Wire) -> int:
        until = time.monotonic() + HELLO_S

        def tick() -> None:
            if time.monotonic() > until:
                raise Malformed("said nothing")

        hello = wire.message(tick)
        token = str(hello.get("token")).encode(errors="replace")
        if hello["kind"] != "hello" or not secrets.compare_digest(token, self._token.encode()):
            raise Malformed("not of this run")
        return whole_number(hello, "rank")

    def _answer(self, message: Message) -> Answer:
        handler = self.handlers.get(message["kind"])
        if handler is None:
            raise Malformed(f"of kind {message['kind']!r}"[:80])
        try:
            return handler(message)
        except Malformed:
            raise
        except Exception as error:  # noqa: BLE001  whatever it is, who asked waits to hear of it
            return {"kind": "refused", "why": f"{type(error).__name__}: {error}"[:500]}

    def _tick(self) -> None:
        if self._over:
            raise ConnectionAbortedError

    # ---- the end

    def _serve_the_last(self) -> None:
        liveness = self.session.liveness
        assert liveness is not None
        liveness.where(Group.step, "the end of the script")
        others = set(range(self.session.size)) - {self.session.rank}
        for rank in sorted(others):
            with suppress(OSError, NearlinearError), self._asking:
                tick = self._watch(rank, "the end of the script")
                self._wire(rank, tick).send(pack("done"), tick)
                continue
            self._done.add(rank)  # it has gone already
        with self.changed:
            while not others <= self._done and liveness.lost() is None:
                self.changed.wait(0.2)

    def _shut(self) -> None:
        self._over = True
        if self._listener is not None:
            with suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
            self._listener.close()
        for wire in [*self._peers.values(), *self._accepted]:
            wire.close()

    def _after_fork(self) -> None:
        """Let go of the sockets in a forked child, a data loader's worker say: its parent's peers are not its own."""
        self.changed, self._asking = threading.Condition(), threading.RLock()
        self.closing = self._over = True
        # Closed and not shut down: that would end the parent's connections too.
        for sock in (self._listener, *(wire.sock for wire in (*self._peers.values(), *self._accepted))):
            if sock is not None:
                sock.close()


class _Wire:
    """A connection on which messages and tensors pass, each waited for in slices of a second."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        sock.settimeout(1.0)
        with suppress(OSError):  # it has hung up already; reading will say so
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, data: bytes | memoryview, tick: Callable[[], None]) -> None:
        rest = memoryview(data)
        while rest:
            try:
                rest = rest[self.sock.send(rest) :]
            except TimeoutError:
                tick()

    def send_tensor(self, tensor: torch.Tensor, tick: Callable[[], None]) -> None:
        flat = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
        dtype = str(tensor.dtype).removeprefix("torch.")
        self.send(pack("tensor", dtype=dtype, shape=list(tensor.shape)), tick)
        if flat.numel():
            self.send(flat.view(torch.uint8).numpy().data, tick)

    def message(self, tick: Callable[[], None]) -> Message:
        inbox = bytearray(4)
        self._fill(memoryview(inbox), tick)
        length = int.from_bytes(inbox, "big")
        if length > LONGEST:
            raise Malformed(f"{length} bytes long, at most {LONGEST} are allowed")
        body = bytearray(length)
        self._fill(memoryview(body), tick)
        return next(unpack(inbox + body))

    def answer(self, tick: Callable[[], None]) -> Answer:
        message = self.message(tick)
        if message["kind"] != "tensor":
            return message
        dtype, shape = _dtype(message), _shape(message)
        nbytes = math.prod(shape) * dtype.itemsize
        if nbytes > _MEMORY:
            raise Malformed(f"a tensor of {nbytes} bytes")
        tensor = torch.empty(shape, dtype=dtype)
        if nbytes:
            self._fill(tensor.reshape(-1).view(torch.uint8).numpy().data, tick)
        return tensor

    def _fill(self, rest: memoryview, tick: Callable[[], None]) -> None:
        while rest:
            try:
                got = self.sock.recv_into(rest)
            except TimeoutError:
                tick()
                continue
            if not got:
                raise ConnectionResetError("it hung up")
            rest = rest[got:]

    def close(self) -> None:
        with suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)  # wakes the thread that reads
        self.sock.close()


_MEMORY = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _name(message: Message) -> str:
    key = message.get("key")
    if not isinstance(key, str):
        raise Malformed("without a key")
    return key


def _dtype(message: Mapping[str, Any]) -> torch.dtype:
    dtype = getattr(torch, text(dict(message), "dtype"), None)
    if not isinstance(dtype, torch.dtype) or dtype.itemsize < 1:
        raise Malformed("of no dtype")
    return dtype


def _shape(message: Mapping[str, Any]) -> list[int]:
    shape = message.get("shape")
    if not isinstance(shape, list) or not all(type(size) is int and 0 <= size < 2**62 for size in shape):
        raise Malformed("of no shape")
    return shape


_serving: weakref.WeakSet[Values] = weakref.WeakSet()


def _let_go() -> None:
    for values in list(_serving):
        values._after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_let_go)
