"""Turning a list of the other members into connections with each of them, and chunks into what travels on those.

    a pair of members     one of them calls, the other listens; several TCP streams, under TLS with the run's key
    a chunk               takes whichever stream has room: a lost packet holds up one stream, not the others

Who calls whom, where, and with what word both prove that the centre has introduced them, the centre tells (``roster``).
A call that fails is made again, after longer and longer pauses, or by the other side. Nothing here waits.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import selectors
import socket
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from nearlinear.runtime.local.codecs import Bytes
from nearlinear.runtime.local.connection import Connection, Malformed, tune
from nearlinear.runtime.local.frames import Header, text, truth, whole
from nearlinear.runtime.local.tls import Identity

STREAMS = 2  # of a pair
AHEAD = 1 << 17  # bytes by which a link may be ahead of the one that has sent the least of what it is to send
UNSENT = 1 << 16  # bytes that a socket takes beyond those under way: what follows is decided late
MOST_STREAMS = 16
LOW = 1 << 15  # bytes before a stream; with fewer it takes the next chunk
CALL_S = 5.0  # a call that was not answered by then has failed
AGAIN_S, RARELY_S = 0.2, 30.0  # pauses between calls
STRANGERS = 64  # connections that have not said who they are

_READ, _WRITE = selectors.EVENT_READ, selectors.EVENT_WRITE


@dataclass(frozen=True, slots=True)
class Entry:
    """Another member, as the centre introduces it.

    Args:
        number: Which.
        host: Its address; empty where it is the centre's.
        port: Where it listens.
        token: What both sides show.
        dial: This side calls.
    """

    number: int
    host: str
    port: int
    token: str
    dial: bool

    def fields(self) -> dict[str, object]:
        """Return it as it travels."""
        return {"number": self.number, "host": self.host, "port": self.port, "token": self.token, "dial": self.dial}

    @classmethod
    def read(cls, value: object) -> Entry:
        """Return the entry that ``fields`` wrote.

        Raises:
            Malformed: It is none.
        """
        if not isinstance(value, dict):
            raise Malformed("an entry that is no object")
        host, token = text(value, "host"), text(value, "token")
        return cls(whole(value, "number"), host, whole(value, "port", 1, 65535), token, truth(value, "dial"))


@dataclass(slots=True, eq=False)
class _Call:
    """A connection that is not one yet."""

    sock: socket.socket
    number: int
    since: float


@dataclass(slots=True, eq=False)
class _Stream:
    """A connection, and whose it is."""

    connection: Connection
    number: int  # -1: it has not said
    of: int = 0  # streams that the link is to have; 0: it is not up
    watched: int = _READ  # what the selector is to tell of


@dataclass(slots=True, eq=False)
class _Link:
    """All that goes to and comes from one other member."""

    entry: Entry
    heard: float
    calls: list[_Call] = field(default_factory=list)
    streams: list[_Stream] = field(default_factory=list)
    queue: deque[tuple[str, Bytes | memoryview, dict[str, object]]] = field(default_factory=deque)
    begun: int = 0  # bytes of chunks in this turn that have left the queue
    share: float = 1.0  # of what it is to send in this turn, to what the others are
    pause_s: float = AGAIN_S
    call_at: float = 0.0
    round_trip_s: float = 0.0
    failures: int = 0
    announced: bool = False  # it was up when last asked

    @property
    def up(self) -> bool:
        return bool(self.streams) and all(len(self.streams) == each.of for each in self.streams)

    @property
    def waiting(self) -> bool:
        return bool(self.queue) or any(each.connection.unsent for each in self.streams)


class Peers:
    """One member's connections to the others, while one connection to the centre lasts.

    Attributes:
        port: Where it listens.
        changed: Somebody can be reached who could not, or the other way round; cleared by whoever tells.

    Args:
        identity: The run's.
        run: Which run.
        number: This member's.
        chunk_bytes: That no chunk exceeds.
        selector: Of the thread; what is registered there has this object's own data.
        host: Address to listen on.
        silence_s: Seconds of silence after which a link is broken off.

    Raises:
        OSError: It cannot listen there.
    """

    def __init__(
        self,
        identity: Identity,
        run: str,
        number: int,
        chunk_bytes: int,
        selector: selectors.BaseSelector,
        host: str,
        silence_s: float,
    ) -> None:
        self._identity, self._run, self._number, self._chunk_bytes = identity, run, number, chunk_bytes
        self._selector, self._silence_s = selector, silence_s
        self._links: dict[int, _Link] = {}
        self._strangers: list[_Stream] = []
        self._gone = [0, 0]
        self._centre = ""
        self.changed = False
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family, backlog=STRANGERS)
        self._listener.setblocking(False)
        tune(self._listener)
        self.port: int = self._listener.getsockname()[1]
        selector.register(self._listener, _READ, self)

    # ---- what a member does with it

    def know(self, entries: list[Entry], centre: str, now: float) -> None:
        """Learn who the others are.

        Args:
            entries: All of them.
            centre: The centre's address as it is called from here.
            now: The time.
        """
        met = {entry.number: entry for entry in entries}
        for number, link in list(self._links.items()):
            if met.get(number) != link.entry:
                self._break(link, now)
                del self._links[number]
        for number, entry in met.items():
            if number not in self._links and number != self._number:
                self._links[number] = _Link(entry, now)
        self._centre = centre
        self._call_all(now)

    def reach(self) -> dict[int, float]:
        """Return who can be reached, with the seconds of a round trip where this side called, else 0."""
        return {number: link.round_trip_s for number, link in self._links.items() if link.up}

    def failed(self) -> list[int]:
        """Return the links that broke or did not come about since this was last asked."""
        found = [number for number, link in self._links.items() if link.failures]
        for number in found:
            self._links[number].failures = 0
        return found

    def send(self, to: int, kind: str, payload: Bytes | memoryview, **fields: object) -> None:
        """Send a chunk; to one who cannot be reached it is lost."""
        link = self._links.get(to)
        if link is not None and link.up:
            link.queue.append((kind, payload, fields))

    def break_off(self, number: int, now: float) -> None:
        """Break off the link to one that says what no member says."""
        if number in self._links:
            self._break(self._links[number], now)

    def begin(self, due: Mapping[int, int]) -> None:
        """Begin a turn: leave out what has not begun to be sent, and learn how much will be.

        Args:
            due: Bytes of all chunks, by member.
        """
        for number, link in self._links.items():
            link.queue.clear()
            link.begun, link.share = 0, max(due.get(number, 0), 1) / max(*due.values(), 1, 1)

    @property
    def sending(self) -> bool:
        """Whether something waits to be sent."""
        return any(link.waiting for link in self._links.values())

    @property
    def more(self) -> bool:
        """Whether a stream has bytes that no select will tell of."""
        return any(stream.connection.more for link in self._links.values() for stream in link.streams)

    @property
    def bytes(self) -> tuple[int, int]:
        """Bytes received and sent."""
        # Lists, for another thread may ask.
        open_ = [each.connection for link in list(self._links.values()) for each in list(link.streams)]
        open_ += [each.connection for each in list(self._strangers)]
        return self._gone[0] + sum(e.received for e in open_), self._gone[1] + sum(e.sent for e in open_)

    def attend(self, what: object, events: int, now: float) -> Iterator[tuple[int, Header, memoryview]]:
        """Deal with what a select has told, and yield what the others said: their number, header and payload.

        Args:
            what: The object that was registered.
            events: What happened to it.
            now: The time.
        """
        if what is self:
            self._accept(now)
        elif isinstance(what, _Call):
            self._called(what, now)
        elif isinstance(what, _Stream) and not what.connection.closed:
            yield from self._receive(what, now)

    def rest(self, now: float) -> Iterator[tuple[int, Header, memoryview]]:
        """Yield what came and was left, so that others had their turn."""
        for link in list(self._links.values()):
            for stream in list(link.streams):
                if stream.connection.more and not stream.connection.closed:
                    yield from self._receive(stream, now)

    def flush(self, now: float) -> None:
        """Send what the sockets take."""
        # All links share this machine's own, and the exchange lasts as long as the slowest of them: none runs ahead.
        most = min((each.begun / each.share for each in self._links.values() if each.waiting), default=0.0) + AHEAD
        for link in list(self._links.values()):
            try:
                self._pump(link, most)
            except OSError:
                self._break(link, now)
                continue
            for stream in link.streams:
                self._watch(stream)
        for stream in list(self._strangers):
            try:
                stream.connection.flush()
                self._watch(stream)
            except OSError:
                self._drop(stream)

    def look_around(self, now: float, *, stood_still: bool) -> None:
        """Beat, call again who could not be reached, and break off what is silent; to be called once a beat.

        Args:
            now: The time.
            stood_still: This process did, so nobody could be heard.
        """
        for link in list(self._links.values()):
            if stood_still:
                link.heard = now
            if link.up and now - link.heard > self._silence_s:
                self._break(link, now)
            for stream in link.streams:
                if stream.of and not stream.connection.unsent:
                    stream.connection.send("beat")
            if any(now - call.since > CALL_S for call in link.calls) or (
                not link.up and any(now - stream.connection.since > CALL_S for stream in link.streams)
            ):
                self._break(link, now)
        for stream in list(self._strangers):
            if now - stream.connection.since > CALL_S:
                self._drop(stream)
        self._call_all(now)

    def close(self) -> None:
        """Close everything."""
        for link in self._links.values():
            self._cut(link)
        for stream in list(self._strangers):
            self._drop(stream)
        self._selector.unregister(self._listener)
        self._listener.close()

    # ---- calls

    def _call_all(self, now: float) -> None:
        for link in self._links.values():
            if link.entry.dial and not link.calls and not link.streams and now >= link.call_at:
                try:
                    for _ in range(STREAMS):
                        self._call(link, now)
                except OSError:
                    self._break(link, now)

    def _call(self, link: _Link, now: float) -> None:
        host = link.entry.host or self._centre
        sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
        sock.setblocking(False)
        try:
            tune(sock, UNSENT)
            code = sock.connect_ex((host, link.entry.port))
            if code not in (0, errno.EINPROGRESS):
                raise OSError(code, "no way there")
        except OSError:
            sock.close()
            raise
        call = _Call(sock, link.entry.number, now)
        link.calls.append(call)
        self._selector.register(sock, _WRITE, call)

    def _called(self, call: _Call, now: float) -> None:
        """A call was answered, or was not."""
        link = self._links.get(call.number)
        if link is None or call not in link.calls:
            return  # it was cut since the select
        link.calls.remove(call)
        self._selector.unregister(call.sock)
        if call.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            call.sock.close()
            self._break(link, now)
            return
        link.round_trip_s = now - call.since
        try:
            stream = self._stream(call.sock, call.number, listening=False, now=now)
        except OSError:
            call.sock.close()
            self._break(link, now)
            return
        link.streams.append(stream)
        stream.connection.send("peer", run=self._run, number=self._number, token=link.entry.token, of=STREAMS)
        self._go_on(stream, now)

    def _accept(self, now: float) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError:
            return
        if len(self._strangers) >= STRANGERS:
            self._drop(self._strangers[0])
        try:
            tune(sock, UNSENT)
            self._strangers.append(self._stream(sock, -1, listening=True, now=now))
        except OSError:
            sock.close()

    def _stream(self, sock: socket.socket, number: int, *, listening: bool, now: float) -> _Stream:
        wrapped = self._identity.wrap(sock, listening=listening)
        stream = _Stream(Connection(wrapped, self._identity, lambda header: self._bound(stream, header), now), number)
        self._selector.register(wrapped, _READ, stream)
        return stream

    # ---- streams

    def _bound(self, stream: _Stream, header: Header) -> int:
        kind = header["kind"]
        if kind == "peer" and not stream.of:
            return 0
        if stream.of and kind in ("part", "mean"):
            return self._chunk_bytes
        if stream.of and kind == "beat":
            return 0
        raise Malformed(f"{kind[:20]!r} between members")

    def _go_on(self, stream: _Stream, now: float) -> None:
        for _ in self._receive(stream, now):
            raise AssertionError("nothing comes before the handshake is over")

    def _receive(self, stream: _Stream, now: float) -> Iterator[tuple[int, Header, memoryview]]:
        try:
            if stream.connection.handshake():
                stream.connection.flush()
                for header, payload in stream.connection.receive():
                    if header["kind"] == "peer":
                        self._introduced(stream, header, now)
                    elif header["kind"] != "beat":
                        yield stream.number, header, payload
                    if stream.connection.closed:
                        return
        except (OSError, Malformed):
            link = self._links.get(stream.number)
            if link is not None and stream in link.streams:
                self._break(link, now)
            else:
                self._drop(stream)
        else:
            if stream.number in self._links:
                self._links[stream.number].heard = now

    def _introduced(self, stream: _Stream, header: Header, now: float) -> None:
        number, of = whole(header, "number"), whole(header, "of", 1, MOST_STREAMS)
        link = self._links.get(number)
        if link is None or text(header, "run") != self._run:
            raise Malformed("from one that the centre has not introduced")
        if not hmac.compare_digest(text(header, "token").encode(), link.entry.token.encode()):
            raise Malformed("with another word than the centre gave")
        if stream.number < 0:  # it calls us
            if link.entry.dial:
                raise Malformed("a call where none was due")
            if len(link.streams) >= of:  # it has noticed before us that the old ones are broken
                self._break(link, now)
            self._strangers.remove(stream)
            stream.number = number
            link.streams.append(stream)
            stream.connection.send("peer", run=self._run, number=self._number, token=link.entry.token, of=of)
        elif stream.number != number:
            raise Malformed("another answers than was called")
        stream.of = of
        if link.up and not link.announced:
            link.announced = self.changed = True
            link.pause_s = AGAIN_S

    def _pump(self, link: _Link, most: float) -> None:
        while True:
            for stream in link.streams:
                stream.connection.flush()
            free = [each for each in link.streams if each.connection.unsent < LOW] if link.up else []
            if not free or not link.queue or link.begun / link.share > most:
                return
            for stream in free:
                if link.queue:
                    kind, payload, fields = link.queue.popleft()
                    link.begun += len(payload)
                    stream.connection.send(kind, payload, **fields)

    def _watch(self, stream: _Stream) -> None:
        wanted = _READ | (_WRITE if stream.connection.writing else 0)
        if wanted != stream.watched and not stream.connection.closed:
            self._selector.modify(stream.connection.sock, wanted, stream)
            stream.watched = wanted

    # ---- ends

    def _break(self, link: _Link, now: float) -> None:
        """Break a link off; if this side calls, it will call again."""
        if link.calls or link.streams:
            link.failures += 1
        self._cut(link)
        if link.announced:
            link.announced, self.changed = False, True
        elif link.failures:
            self.changed = True
        link.call_at, link.pause_s = now + link.pause_s, min(2 * link.pause_s, RARELY_S)

    def _cut(self, link: _Link) -> None:
        for call in link.calls:
            self._selector.unregister(call.sock)
            call.sock.close()
        for stream in list(link.streams):
            self._drop(stream)
        link.calls.clear()
        link.streams.clear()
        link.queue.clear()

    def _drop(self, stream: _Stream) -> None:
        if stream in self._strangers:
            self._strangers.remove(stream)
        if stream.connection.closed:
            return
        self._gone[0] += stream.connection.received
        self._gone[1] += stream.connection.sent
        with contextlib.suppress(KeyError):
            self._selector.unregister(stream.connection.sock)
        stream.connection.close()
