"""The engine behind ``simulate``: a clock, devices with programs, ports, and what has arrived."""

from __future__ import annotations

import heapq
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

from nearlinear.core.cluster import Cluster, Link
from nearlinear.core.schedule import Action, Kind, Schedule
from nearlinear.errors import InputError
from nearlinear.planning.simulate.values import Simulation, Span, Spent, Work

Reduction = Callable[[float, Sequence[int]], float]
_Port = tuple[str, str]  # whose, and which way


@dataclass(frozen=True, slots=True)
class _Message:
    """What stage ``source`` of a replica hands to stage ``target``: the result of ``action``."""

    replica: int
    source: int
    target: int
    action: Action


@dataclass(slots=True)
class _Compute:
    what: str
    pieces: list[tuple[float, int | None]]  # seconds, and the bucket that is ready after them
    needs: _Message | None = None
    sends: list[_Message] = field(default_factory=list)


@dataclass(slots=True)
class _Exchange:
    message: _Message


@dataclass(slots=True)
class _Device:
    position: int
    replica: int
    stage: int
    program: list[_Compute | _Exchange]
    at: int = 0  # the operation in hand
    piece: int = 0
    began: float | None = None  # when the operation in hand began, if it has
    remaining: float = 0.0
    since: float = 0.0
    version: int = 0  # outdates completion events after a change of speed
    messages: int = 0  # communications it takes part in now
    ready: int = 0  # buckets that are ready here
    buckets_left: int = 0  # buckets that are not combined yet
    finished: bool = False


class Step:
    """The state of one step: a clock, devices, ports, and what has arrived."""

    def __init__(
        self,
        schedule: Schedule,
        work: Sequence[Sequence[Work]],
        cluster: Cluster,
        placement: Sequence[Sequence[int]],
        blocking: bool,
        reduction: Reduction,
        core_share: float,
        combine: bool,
    ) -> None:
        self.schedule, self.work, self.cluster, self.placement = schedule, work, cluster, placement
        self.blocking, self.reduction, self.core_share, self.combine = blocking, reduction, core_share, combine
        self.columns = {
            (stage, action): column
            for stage, (actions, columns) in enumerate(zip(schedule.stages, schedule.columns, strict=True))
            for action, column in zip(actions, columns, strict=True)
        }
        self.events: list[tuple[float, int, Callable[[float], None]]] = []
        self.numbers = itertools.count()
        self.free: dict[_Port, list[float]] = {}  # when each of a port's messages is through
        self.arrived: set[_Message] = set()
        self.met: set[_Message] = set()
        self.spans: list[Span] = []
        self.full: dict[tuple[int, int], int] = defaultdict(int)  # (stage, bucket): replicas where it is ready
        self.next_bucket = [0] * len(schedule.stages)
        self.reducing = [False] * len(schedule.stages)
        self.devices = {
            (replica, stage): _Device(placement[replica][stage], replica, stage, self._program(replica, stage))
            for replica in range(len(work))
            for stage in range(len(schedule.stages))
        }

    def result(self) -> Simulation:
        """Run the step and return what happened."""
        if self.combine:
            for device in self.devices.values():
                device.buckets_left = len(self.work[device.replica][device.stage].buckets)
            counts = {(d.stage, d.buckets_left) for d in self.devices.values()}
            if len(counts) > len(self.schedule.stages):
                raise InputError("the replicas of a stage have different numbers of buckets; they must be the same")
        for device in self.devices.values():
            self._advance(device, 0.0)
        while self.events:
            now, _, happen = heapq.heappop(self.events)
            happen(now)
        end = max((span.end for span in self.spans), default=0.0)
        timeline = tuple(sorted(self.spans, key=lambda span: (span.start, span.device, span.end)))
        return Simulation(end, timeline, _spent(timeline, [d.position for d in self.devices.values()], end))

    # -- what a device will do -----------------------------------------------------------------------------------------

    def _program(self, replica: int, stage: int) -> list[_Compute | _Exchange]:
        work, actions = self.work[replica][stage], self.schedule.stages[stage]
        last_gradient = max(
            i for i, action in enumerate(actions) if action.kind in (Kind.BACKWARD, Kind.WEIGHT_GRADIENT)
        )
        # The order of blocking messages is that of their receivers' actions on the grid of equal times. It is the same
        # on both sides and total, so that nobody waits in a circle.
        keyed: list[tuple[tuple[int, int, int], _Compute | _Exchange]] = []
        for index, (action, column) in enumerate(zip(actions, self.schedule.columns[stage], strict=True)):
            pieces = self._pieces(work, action, with_buckets=index == last_gradient and self.combine)
            compute = _Compute(str(action), pieces)
            incoming = self._incoming(replica, stage, action)
            outgoing = self._outgoing(replica, stage, action)
            keyed.append(((column, 2, 0), compute))
            if not self.blocking:
                compute.needs, compute.sends = incoming, outgoing
                continue
            for message in [*([incoming] if incoming else []), *outgoing]:
                keyed.append((self._turn(message), _Exchange(message)))
        keyed.sort(key=lambda pair: pair[0])
        return [operation for _, operation in keyed]

    def _pieces(self, work: Work, action: Action, with_buckets: bool) -> list[tuple[float, int | None]]:
        chunks = self.schedule.chunks
        duration = {
            Kind.FORWARD: work.forward,
            Kind.BACKWARD: work.backward,
            Kind.INPUT_GRADIENT: work.backward * work.input_share,
            Kind.WEIGHT_GRADIENT: work.backward * (1 - work.input_share),
        }[action.kind] / chunks
        if not with_buckets or not work.buckets:
            return [(duration, None)]
        pieces, passed = [], 0.0
        for number, bucket in enumerate(work.buckets):
            if bucket.ready >= 1:
                break
            share = max(bucket.ready, passed)
            pieces.append((duration * (share - passed), number))
            passed = share
        return [*pieces, (duration * max(1 - passed, 0.0), None)]

    def _incoming(self, replica: int, stage: int, action: Action) -> _Message | None:
        needed = self.schedule.waits(stage, action)
        return None if needed is None or needed[0] == stage else _Message(replica, needed[0], stage, needed[1])

    def _outgoing(self, replica: int, stage: int, action: Action) -> list[_Message]:
        last = len(self.schedule.stages) - 1
        if action.kind is Kind.WEIGHT_GRADIENT or last == 0:
            return []
        if action.kind is Kind.FORWARD:
            if stage == last and action.chunk == self.schedule.chunks - 1:
                return []
            return [_Message(replica, stage, (stage + 1) % (last + 1), action)]
        if stage == 0 and action.chunk == 0:
            return []
        return [_Message(replica, stage, (stage - 1) % (last + 1), action)]

    def _turn(self, message: _Message) -> tuple[int, int, int]:
        """Return when a blocking message is due: at its receiver's action, gradients first, then by receiver."""
        action, target = message.action, message.target
        if action.kind is Kind.FORWARD:
            wanted = Action(action.kind, action.microbatch, action.chunk + (message.source > target))
        else:
            wanted = Action(action.kind, action.microbatch, action.chunk - (message.source < target))
        return self.columns[target, wanted], 1 if action.kind is Kind.FORWARD else 0, target

    def _bytes(self, message: _Message) -> float:
        end = message.source if message.action.kind is Kind.FORWARD else message.target
        return self.work[message.replica][end].output_bytes

    # -- computing -----------------------------------------------------------------------------------------------------

    def _advance(self, device: _Device, now: float) -> None:
        """Begin the next operation of a device, if what it needs is there."""
        if device.finished or device.began is not None:
            return
        if device.at == len(device.program):
            self._all_ready(device, now)
            if device.buckets_left == 0 and not device.finished:
                self._update(device, now)
            return
        operation = device.program[device.at]
        if isinstance(operation, _Exchange):
            device.began = now
            self._meet(operation.message, now)
        elif operation.needs is None or operation.needs in self.arrived:
            device.began, device.piece = now, 0
            self._compute_piece(device, operation, now)

    def _compute_piece(self, device: _Device, operation: _Compute, now: float) -> None:
        device.remaining, device.since = operation.pieces[device.piece][0], now
        self._expect(device, now)

    def _expect(self, device: _Device, now: float) -> None:
        """Schedule the end of the piece in hand at the present speed."""
        device.version += 1
        self._at(now + device.remaining / self._speed(device), partial(self._piece_done, device, device.version))

    def _speed(self, device: _Device) -> float:
        return 1 - self.core_share if device.messages else 1.0

    def _piece_done(self, device: _Device, version: int, now: float) -> None:
        if version != device.version:
            return
        device.version += 1
        operation = device.program[device.at]
        assert isinstance(operation, _Compute) and device.began is not None
        bucket = operation.pieces[device.piece][1]
        device.remaining = 0.0
        device.piece += 1
        if bucket is not None:
            device.ready = bucket + 1
            self.full[device.stage, bucket] += 1
            self._reduce(device.stage, now)
        if device.piece < len(operation.pieces):
            self._compute_piece(device, operation, now)
            return
        self._span(device, device.began, now, operation.what, computing=True)
        device.began = None
        device.at += 1
        for message in operation.sends:
            self._transfer(message, now)
        self._advance(device, now)

    def _all_ready(self, device: _Device, now: float) -> None:
        """Note that the buckets not ready before the last operation are so now."""
        buckets = self.work[device.replica][device.stage].buckets if self.combine else ()
        waiting, device.ready = range(device.ready, len(buckets)), len(buckets)
        for number in waiting:
            self.full[device.stage, number] += 1
        if waiting:
            self._reduce(device.stage, now)

    def _update(self, device: _Device, now: float) -> None:
        device.finished = True
        update = self.work[device.replica][device.stage].update
        if update > 0:
            self._span(device, now, now + update, "update", computing=True)

    # -- communicating -------------------------------------------------------------------------------------------------

    def _meet(self, message: _Message, now: float) -> None:
        if message in self.met:
            self._transfer(message, now)
        else:
            self.met.add(message)

    def _transfer(self, message: _Message, now: float) -> None:
        source = self.devices[message.replica, message.source]
        target = self.devices[message.replica, message.target]
        link, ports = self._way(source.position, target.position)
        begin = self._entry(ports, now)
        through = begin + self._bytes(message) / link.bandwidth
        self._occupy(ports, through)
        end = through + link.latency
        if end > begin:
            self._span(source, begin, end, f"send {message.action}", computing=False)
            self._span(target, begin, end, f"receive {message.action}", computing=False)
            self._busy([source, target], begin, end)
        self._at(end, partial(self._delivered, message))

    def _delivered(self, message: _Message, now: float) -> None:
        self.arrived.add(message)
        source = self.devices[message.replica, message.source]
        target = self.devices[message.replica, message.target]
        for device in (source, target) if self.blocking else (target,):
            if self.blocking:
                device.began = None
                device.at += 1
            self._advance(device, now)

    def _reduce(self, stage: int, now: float) -> None:
        """Begin the all-reduce of the stage's next bucket, if it is full everywhere and none is under way."""
        number, replicas = self.next_bucket[stage], range(len(self.work))
        if self.reducing[stage] or self.full[stage, number] < len(replicas):
            return
        members = [self.devices[replica, stage] for replica in replicas]
        positions = [device.position for device in members]
        size = max(self.work[replica][stage].buckets[number].bytes for replica in replicas)
        ports = self._ports_of_ring(positions)
        begin = self._entry(ports, now)
        end = begin + self.reduction(size, positions)
        self._occupy(ports, end)
        self.reducing[stage] = True
        for device in members:
            self._span(device, begin, end, f"all-reduce {number}", computing=False)
        self._busy(members, begin, end)
        self._at(end, partial(self._reduced, stage, members))

    def _reduced(self, stage: int, members: list[_Device], now: float) -> None:
        self.reducing[stage] = False
        self.next_bucket[stage] += 1
        for device in members:
            device.buckets_left -= 1
            self._advance(device, now)
        self._reduce(stage, now)

    def _busy(self, devices: Sequence[_Device], begin: float, end: float) -> None:
        """Slow the devices down from ``begin`` to ``end``."""
        if self.core_share == 0:
            return
        for device in devices:
            self._at(begin, partial(self._share, device, +1))
            self._at(end, partial(self._share, device, -1))

    def _share(self, device: _Device, change: int, now: float) -> None:
        computing = device.began is not None and device.at < len(device.program)
        computing = computing and isinstance(device.program[device.at], _Compute)
        if computing:
            device.remaining = max(device.remaining - (now - device.since) * self._speed(device), 0.0)
            device.since = now
        device.messages += change
        if computing:
            self._expect(device, now)

    # -- links ---------------------------------------------------------------------------------------------------------

    def _way(self, source: int, target: int) -> tuple[Link, list[_Port]]:
        return self.cluster.link(source, target), self._ports([source, target], ("out", "in"))

    def _ports_of_ring(self, devices: Sequence[int]) -> list[_Port]:
        return [port for way in ("out", "in") for port in self._ports(devices, (way,) * len(devices))]

    def _ports(self, devices: Sequence[int], ways: Sequence[str]) -> list[_Port]:
        """Return the ports through which messages among ``devices`` go, each once."""
        islands = [self.cluster.island_of[device] for device in devices]
        hosts = [self.cluster.devices[device].host for device in devices]
        if len(set(islands)) > 1:
            names = [
                f"host {host}" if host else f"island {island}" for host, island in zip(hosts, islands, strict=True)
            ]
        else:
            apart = len(set(hosts)) > 1
            names = [f"inside {host if apart else device}" for host, device in zip(hosts, devices, strict=True)]
        return list(dict.fromkeys(zip(names, ways, strict=True)))

    def _lanes(self, port: _Port) -> list[float]:
        count = 1 if port[0].startswith("inside") else max(round(self.cluster.uplinks), 1)
        return self.free.setdefault(port, [0.0] * count)

    def _entry(self, ports: Sequence[_Port], now: float) -> float:
        """Return when a message that is ready now finds a free lane in every port."""
        return max(now, *(self._lanes(port)[0] for port in ports))

    def _occupy(self, ports: Sequence[_Port], until: float) -> None:
        for port in ports:
            heapq.heapreplace(self._lanes(port), until)

    # -- the clock -----------------------------------------------------------------------------------------------------

    def _at(self, when: float, happen: Callable[[float], None]) -> None:
        heapq.heappush(self.events, (when, next(self.numbers), happen))

    def _span(self, device: _Device, start: float, end: float, what: str, *, computing: bool) -> None:
        self.spans.append(Span(device.position, start, end, what, computing))


def _spent(timeline: Sequence[Span], devices: Sequence[int], end: float) -> dict[int, Spent]:
    found = {}
    by_device: dict[int, list[Span]] = defaultdict(list)
    for span in timeline:
        by_device[span.device].append(span)
    for device in devices:
        mine = by_device[device]
        compute = _length((span.start, span.end) for span in mine if span.computing)
        either = _length((span.start, span.end) for span in mine)
        found[device] = Spent(compute, max(either - compute, 0.0), max(end - either, 0.0))
    return found


def _length(intervals: Iterable[tuple[float, float]]) -> float:
    """Return the length of the union of intervals that are sorted by start."""
    total, reached = 0.0, float("-inf")
    for start, stop in intervals:
        total += max(stop - max(start, reached), 0.0)
        reached = max(reached, stop)
    return total
