"""Measuring the links between all ranks: every pair alone, then several pairs at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from nearlinear.measure import rounds
from nearlinear.measure.islands import Pair, islands_of
from nearlinear.measure.messages import STREAMS, Both, time_many, time_pair
from nearlinear.measure.wire import Listener, SocketWire, Wire, connect, new_token
from nearlinear.runtime.meeting import Meeting


def measure_links(
    meeting: Meeting,
    hosts: Sequence[str],
    *,
    address: str,
    deadline_s: float,
    wire: Callable[[int], Wire] | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> tuple[dict[Pair, Both], dict[Pair, float]]:
    """Measure; all ranks call it, and all get the same result.

    Args:
        meeting: All ranks, at least two.
        hosts: Name of every rank's machine.
        address: Of this machine, where the other ranks reach it.
        deadline_s: Seconds that any wait for a peer may take.
        wire: Makes the wire to a peer, where sockets are not what devices talk over.
        say: Called with what is measured next, on every rank.

    Returns:
        What messages took, per pair of ranks, the lower first; and for pairs that were timed at once the bytes per
        second from the lower to the higher rank.

    Raises:
        PeerLostError: A rank died, hung up, or did not answer within the deadline.
    """
    wires = _Wires(meeting, address, deadline_s, wire)
    try:
        pairs = _pairs(meeting, wires, hosts, say)
        return pairs, _at_once(meeting, wires, pairs, hosts)
    finally:
        wires.close()


class _Wires:
    """Makes wires to peers, as the sockets of this probe or as a front end does."""

    def __init__(self, meeting: Meeting, address: str, deadline_s: float, other: Callable[[int], Wire] | None) -> None:
        self._rank, self._deadline_s, self._other = meeting.rank, deadline_s, other
        self._token = str(meeting.all_gather_json(new_token(), "the start of the probe")[0])  # rank 0's
        self._listener = Listener(address, self._token) if other is None else None
        place = None if self._listener is None else [self._listener.address, self._listener.port]
        self._places = meeting.all_gather_json(place, "the addresses of the ranks")
        self._open: list[SocketWire] = []

    def to(self, peer: int, streams: int) -> Wire:
        """Return a new wire to ``peer``, which asks for one to this rank."""
        if self._other is not None:
            return self._other(peer)
        assert self._listener is not None
        if self._rank < peer:
            address, port = self._places[peer]
            made = connect(address, port, self._rank, peer, streams, self._token, self._deadline_s)
        else:
            made = self._listener.accept(peer, streams, self._deadline_s)
        self._open.append(made)
        return made

    def close(self) -> None:
        """Close all."""
        for each in self._open:
            each.close()
        if self._listener is not None:
            self._listener.close()


def _pairs(meeting: Meeting, wires: _Wires, hosts: Sequence[str], say: Callable[[str], None]) -> dict[Pair, Both]:
    """Time the pairs, round by round."""
    pairs: dict[Pair, Both] = {}
    for number, at_a_time in enumerate(plan := rounds.alone(hosts)):
        names = ", ".join(f"{low} - {high}" for low, high in at_a_time[:4]) + (", ..." if len(at_a_time) > 4 else "")
        say(f"link {names} ({number + 1} of {len(plan)})")
        found = None
        for low, high in at_a_time:
            if meeting.rank in (low, high):
                peer = high if meeting.rank == low else low
                # Several streams are for links between machines: within one they would share its processor.
                streams = STREAMS if hosts[low] != hosts[high] else 1
                both = time_pair(wires.to(peer, streams), meeting.rank, peer)
                found = both.to_dict() if meeting.rank == low else None
        for raw in meeting.all_gather_json(found, "measuring the links"):
            if raw is not None:
                both = Both.from_dict(raw)
                pairs[both.there.source, both.there.target] = both
    return pairs


def _at_once(meeting: Meeting, wires: _Wires, pairs: Mapping[Pair, Both], hosts: Sequence[str]) -> dict[Pair, float]:
    """Time several pairs between islands at once."""
    islands, _, _ = islands_of({pair: both.link for pair, both in pairs.items()}, hosts)
    together = rounds.at_once([island.devices for island in islands])
    mine = next((pair for pair in together if meeting.rank in pair), None)
    wire = wires.to(mine[1] if meeting.rank == mine[0] else mine[0], 1) if mine is not None else None
    meeting.all_gather_json(None, "measuring links at once")
    found = None
    if mine is not None and wire is not None:
        typical = pairs.get(mine) or next(iter(pairs.values()))
        peer = mine[1] if meeting.rank == mine[0] else mine[0]
        rate = time_many(wire, meeting.rank, peer, typical.there.sizes[-1], typical.link.latency)
        found = [*mine, rate] if meeting.rank == mine[0] else None
    everyones = meeting.all_gather_json(found, "measuring links at once")
    return {(each[0], each[1]): each[2] for each in everyones if each is not None}
