"""Turning a plan, an update and what other members send into the next outer parameters, for the centre to commit.

    centre      plan ─▶        ready ─▶ go ─▶               done ─▶ commit          (member.py hears and says these)
    members              part, part, part ─▶ mean, mean, mean                       (peers.py carries these)

One object serves one connection to the centre. What it computes is in ``exchange.py``.
"""

from __future__ import annotations

import json
import selectors
import time
from collections.abc import Callable, Iterable

from nearlinear.runtime.local.chunks import Chunks
from nearlinear.runtime.local.codecs import Feedback, Floats
from nearlinear.runtime.local.connection import Connection
from nearlinear.runtime.local.exchange import CENTRE, Exchange, Plan, Refused
from nearlinear.runtime.local.frames import TEXT, Header, Malformed, number, pairs, text_of, whole
from nearlinear.runtime.local.peers import Entry, Peers
from nearlinear.runtime.local.tls import Identity
from nearlinear.runtime.local.update import hash_of

WORK_S = 0.004  # of computing before the sockets have their turn
MOST = 64  # broken links that are told at once
EARLY = 1000  # bytes that a message costs beside its payload


class Direct:
    """A member's part in direct exchanges.

    Args:
        connection: To the centre.
        identity: The run's.
        run: Which.
        me: This member's number.
        chunks: Of the vector.
        selector: Of the thread.
        bind: Address to listen on; empty: the one from which the centre is called.
        silence_s: Seconds of silence after which another member cannot be reached.

    Raises:
        OSError: It cannot listen there.
    """

    def __init__(
        self,
        connection: Connection,
        identity: Identity,
        run: str,
        me: int,
        chunks: Chunks,
        selector: selectors.BaseSelector,
        bind: str,
        silence_s: float,
    ) -> None:
        self._connection, self._me, self._chunks = connection, me, chunks
        self._centre: str = connection.sock.getpeername()[0]
        host = bind or connection.sock.getsockname()[0]
        self._peers = Peers(identity, run, me, chunks.largest, selector, host, silence_s)
        self._turn = -1
        self._exchange: Exchange | None = None
        self._early: list[tuple[int, Header, memoryview]] = []  # of turns that the centre has not told of yet
        self._early_bytes = 0
        self._ready: Callable[[list[float]], None] | None = None
        self._hash = ""  # of what is to be committed
        self._sent_before, self._busy_s, self._asked_at = 0, 0.0, 0.0
        connection.send("listening", port=self._peers.port)

    @property
    def busy(self) -> bool:
        """Whether there is something to do without waiting for a socket."""
        return self._peers.more or (self._exchange is not None and self._exchange.busy)

    @property
    def bytes(self) -> tuple[int, int]:
        """Bytes received from other members and sent to them."""
        return self._peers.bytes

    # ---- what the centre says

    def introduced(self, payload: memoryview, now: float) -> None:
        """Learn who the others are."""
        entries = text_of(payload)
        if not isinstance(entries, list):
            raise Malformed("a roster that is no list")
        self._peers.know([Entry.read(each) for each in entries], self._centre, now)

    def begin(self, turn: int, plan: Plan | None, outer: Floats, owed: Feedback) -> None:
        """Begin a turn; what belongs to an earlier one is void.

        Args:
            turn: Which.
            plan: ``None``: this turn goes through the centre.
            outer: What it starts from.
            owed: What was left out of the means that this member encoded.
        """
        self._turn, self._exchange, self._ready, self._hash = turn, None, None, ""
        self._peers.begin(self._due(plan))
        owed.settle(counted=False)
        if plan is not None and self._me in plan.members:
            if plan.bounds[-1] != self._chunks.count:
                raise Malformed(f"a plan of {plan.bounds[-1]} chunks, where there are {self._chunks.count}")
            self._exchange = Exchange(plan, self._me, self._chunks, outer, owed)
        self._sent_before, self._busy_s = self._peers.bytes[1], 0.0
        early, self._early, self._early_bytes = self._early, [], 0
        self._hear(early, time.monotonic())

    def _due(self, plan: Plan | None) -> dict[int, int]:
        """Return the bytes that this member sends each other one: their part of an update, its own of the mean."""
        if plan is None or self._me not in plan.members:
            return {}
        parts = {each: sum(map(self._chunks.nbytes, plan.chunks_of(each))) for each in plan.members}
        return {each: parts[each] + parts[self._me] for each in plan.members if each != self._me}

    @property
    def active(self) -> bool:
        """Whether chunks come and go."""
        return self._exchange is not None and self._exchange.begun and not self._exchange.whole

    def deliver(self, change: Floats, own: Feedback, ready: Callable[[list[float]], None]) -> None:
        """Begin to send an update.

        Args:
            change: Shape ``(sizes.total,)``.
            own: What was left out of this member's updates.
            ready: Called with the norms of its parts when it is all encoded.
        """
        if self._exchange is not None:
            self._ready = ready
            self._exchange.begin(change, own)

    def go(self, header: Header) -> None:
        """Learn whose updates count in this turn."""
        if whole(header, "turn") == self._turn and self._exchange is not None:
            weights, norms = dict(pairs(header, "weights")), dict(pairs(header, "norms"))
            if not set(weights) <= set(norms) or not set(weights) <= set(self._exchange.plan.members):
                raise Malformed("weights of others than the members of the plan")
            self._exchange.go(weights, norms)

    def committed(self, header: Header) -> Floats:
        """Return the outer parameters that the centre has made final.

        Raises:
            Malformed: There are none.
        """
        if self._exchange is None or whole(header, "committed") != self._turn:
            raise Malformed(f"a commit of turn {header['committed']}, which is not in hand")
        if not number(header, "samples"):
            return self._exchange.outer
        if not self._hash or header.get("hash") != self._hash:
            raise Malformed("a commit of what this member does not have")
        self._exchange.owed.settle(counted=True)
        return self._exchange.after

    # ---- what the thread does

    def attend(self, what: object, events: int) -> None:
        """Deal with what a select has told of something of this object's."""
        now = time.monotonic()
        self._hear(self._peers.attend(what, events, now), now)

    def go_on(self) -> None:
        """Read what was left, compute for a while, and send."""
        now = time.monotonic()
        if self._peers.more:
            self._hear(self._peers.rest(now), now)
        self._work(now + WORK_S)
        waiting = self._peers.sending
        self._peers.flush(now)
        if waiting and self._asked_at:
            self._busy_s += now - self._asked_at
        self._asked_at = now if self._peers.sending else 0.0
        if self._peers.changed:
            self._peers.changed = False
            reach = [[number, seconds] for number, seconds in self._peers.reach().items()]
            self._connection.send("reach", reach=reach, failed=self._peers.failed()[:MOST])

    def look_around(self, now: float, *, stood_still: bool) -> None:
        """Beat, and look who is silent."""
        self._peers.look_around(now, stood_still=stood_still)

    def close(self) -> None:
        """Close all connections with other members."""
        self._peers.close()

    # ---- an exchange

    def _hear(self, messages: Iterable[tuple[int, Header, memoryview]], now: float) -> None:
        for sender, header, payload in messages:
            try:
                self._chunk(sender, header, payload)
            except Malformed:
                self._peers.break_off(sender, now)

    def _chunk(self, sender: int, header: Header, payload: memoryview) -> None:
        turn, chunk = whole(header, "turn"), whole(header, "chunk")
        if turn > self._turn:
            self._early_bytes += len(payload) + EARLY
            if self._early_bytes > 2 * self._chunks.sizes.state_bytes + TEXT:
                raise Malformed("more than can be due in a turn to come")
            self._early.append((sender, header, payload))
        elif turn == self._turn and self._exchange is not None:
            if header["kind"] == "part":
                self._exchange.part(sender, chunk, payload)
            else:
                self._exchange.mean(sender, chunk, payload)

    def _work(self, until: float) -> None:
        exchange = self._exchange
        if exchange is None:
            return
        try:
            while exchange.busy and time.monotonic() < until:
                exchange.work()
                for sending in exchange.sendings:
                    fields = {"turn": self._turn, "chunk": sending.chunk}
                    if sending.to == CENTRE:
                        self._connection.send(sending.kind, sending.payload, **fields)
                    else:
                        self._peers.send(sending.to, sending.kind, sending.payload, **fields)
                exchange.sendings.clear()
        except Refused as refused:
            self._exchange = None
            self._connection.send("fault", turn=self._turn, member=refused.member, why=str(refused))
            return
        if self._ready is not None and exchange.norms is not None:
            self._ready(exchange.norms)
            self._ready = None
        if exchange.whole and not self._hash:
            self._hash = hash_of(exchange.after)
            sent = self._peers.bytes[1] - self._sent_before
            self._connection.send("done", turn=self._turn, hash=self._hash, sent=sent, busy=self._busy_s)


def roster(entries: Iterable[Entry]) -> bytes:
    """Return the payload that ``introduced`` reads."""
    return json.dumps([entry.fields() for entry in entries]).encode()
