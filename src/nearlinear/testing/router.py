"""Turning packets that leave one host into packets that reach another, later, at a given rate, or never.

A process of its own, started by ``links.py``; it imports nothing but the standard library, so that it starts fast.

    host 0 ─ TUN ─▶ uplink of 0 ─▶ lost? ─▶ delay ─▶ downlink of 1 ─ TUN ─▶ host 1
                    rate, queue             heap     rate, queue

The kernel hands over up to 64 KB of one TCP stream as a single frame (segmentation offload: a header plus a payload to
be cut into segments), which is what makes a gigabit affordable here. Rates, queues and losses nevertheless count
packets: a frame that loses a segment goes on in the pieces before and after it.
"""

from __future__ import annotations

import errno
import gc
import heapq
import itertools
import json
import math
import mmap
import os
import random
import select
import struct
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

SUBNET = bytes((10, 77, 0))  # host i is SUBNET.(i + 1)
ETHERNET_HEADER = 14  # bytes that a packet would carry on a cable; the kernel's TBF counts them too
BATCH = 32  # frames read from one host before the others, and the due ones, get their turn

# In front of every frame (linux/virtio_net.h): flags, kind, length of the headers, payload bytes per segment, and
# where the checksum goes. Offsets below count from the start of the frame, so the IP header begins at 10.
_OFFLOAD = struct.Struct("=BBHHHH")
_IP = _OFFLOAD.size
_LARGEST = _IP + 65535
_FIN, _PSH, _CWR = 0x01, 0x08, 0x80


def serve(router: Router, hosts: list[int], parent: int, cables: mmap.mmap) -> None:
    """Carry packets between the hosts until the parent's end of the pipe ``parent`` closes.

    Args:
        router: What decides when a frame arrives.
        hosts: One TUN descriptor per host, non-blocking, with offload headers.
        parent: A pipe to read from; at its end the router ends.
        cables: One byte per host, shared with the parent; not 0 where the cable is pulled.
    """
    number = {descriptor: host for host, descriptor in enumerate(hosts)}
    wait: float | None = None
    while True:
        readable, _, _ = select.select([parent, *hosts], [], [], wait)
        now = time.monotonic()
        for descriptor in readable:
            if descriptor == parent:
                return
            source = number[descriptor]
            for frame in _read(descriptor):
                target = frame[_IP + 19] - 1
                known = frame[_IP + 16 : _IP + 19] == SUBNET and 0 <= target < len(hosts)
                if known and not cables[source]:
                    router.send(source, target, frame, now)
        for target, frame in router.due(time.monotonic()):
            if not cables[target]:
                _write(hosts[target], frame)
        wait = router.wait(time.monotonic())


def _read(descriptor: int) -> Iterator[bytes]:
    for _ in range(BATCH):
        try:
            yield os.read(descriptor, _LARGEST)
        except BlockingIOError:
            return


def _write(descriptor: int, frame: bytes) -> None:
    try:
        os.write(descriptor, frame)
    except OSError as error:
        if error.errno != errno.EIO:  # EIO: the host took its interface down, so the packet is lost
            raise


@dataclass(slots=True)
class Line:
    """One direction of a host's cable: a rate, and a queue before it that drops what does not fit.

    Args:
        rate: Bytes per second, may be infinite.
        queue: Bytes that may wait.
        slack: Seconds by which a cable that idled may make up for it: the router is woken late now and then, and the
            hosts are not to lose bandwidth by that.
    """

    rate: float
    queue: float
    slack: float
    free: float = -math.inf  # when the last byte taken will have left

    def take(self, frame: bytes, first_bit: float, now: float) -> tuple[bytes | None, float]:
        """Return as much of the frame as the queue has room for, and when its last bit leaves.

        Args:
            frame: What arrives.
            first_bit: When its first bit could leave at the earliest.
            now: The time.
        """
        count, size = measured(frame)
        begin = max(self.free, first_bit - self.slack)
        if math.isfinite(self.queue):
            room = self.queue - (begin - now) * self.rate
            fits = math.ceil(room * count / size)  # the packet that fills the queue is still taken
            if fits <= 0:
                return None, begin
            if fits < count:
                frame = piece(frame, 0, fits)
                size = measured(frame)[1]
        self.free = begin + size / self.rate
        return frame, max(self.free, now)


class Loss:
    """Which packets of a stream are lost, each with the same probability, repeatable by the seed."""

    def __init__(self, probability: float, seed: str) -> None:
        self.probability = probability
        self._random = random.Random(seed)
        self._good = self._gap()

    def _gap(self) -> float:
        """Draw how many packets pass before the next is lost."""
        if not self.probability:
            return math.inf
        return math.floor(math.log(1 - self._random.random()) / math.log(1 - self.probability))

    def survivors(self, frame: bytes) -> list[bytes]:
        """Return what is left of the frame: itself, nothing, or the pieces between lost segments."""
        count, begin, left = measured(frame)[0], 0, []
        while begin + self._good < count:
            lost = begin + int(self._good)
            if lost > begin:
                left.append(piece(frame, begin, lost))
            begin = lost + 1
            self._good = self._gap()
        self._good -= count - begin
        if begin < count:
            left.append(piece(frame, begin, count) if begin else frame)
        return left


@dataclass(slots=True)
class Router:
    """The packets under way. It knows no clock and no descriptor: times come in, frames go out.

    Args:
        hosts: How many.
        rate: Bytes per second of each host, up and down; may be infinite.
        delay: Seconds from host to host.
        loss: Probability that a packet is lost.
        queue: Bytes that may wait before each line.
        slack: See ``Line``.
        seed: Of the losses.
    """

    hosts: int
    rate: float = math.inf
    delay: float = 0.0
    loss: float = 0.0
    queue: float = math.inf
    slack: float = 0.0
    seed: int = 0
    _up: list[Line] = field(init=False)
    _down: list[Line] = field(init=False)
    _losses: list[Loss] = field(init=False)
    # (due, order of entry, target, still before the downlink?, frame)
    _under_way: list[tuple[float, int, int, bool, bytes]] = field(init=False, default_factory=list)
    _order: Iterator[int] = field(init=False, default_factory=itertools.count)

    def __post_init__(self) -> None:
        self._up, self._down = ([Line(self.rate, self.queue, self.slack) for _ in range(self.hosts)] for _ in range(2))
        self._losses = [Loss(self.loss, f"{self.seed}/{host}") for host in range(self.hosts)]

    def send(self, source: int, target: int, frame: bytes, now: float) -> None:
        """Take a frame that leaves ``source``."""
        taken, gone = self._up[source].take(frame, now, now)
        for left in self._losses[source].survivors(taken) if taken else ():
            self._push(gone + self.delay, target, True, left)

    def due(self, now: float) -> Iterator[tuple[int, bytes]]:
        """Yield ``(target, frame)`` for every frame that has arrived, in order of arrival."""
        while self._under_way and self._under_way[0][0] <= now:
            due, _, target, before, frame = heapq.heappop(self._under_way)
            if before:
                # Bits stream through: a frame does not wait here for its own last bit, only for others.
                begun = due - measured(frame)[1] / self.rate
                taken, there = self._down[target].take(frame, begun, due)
                if taken and there > now:
                    self._push(there, target, False, taken)
                elif taken:
                    yield target, taken
            else:
                yield target, frame

    def wait(self, now: float) -> float | None:
        """Return the seconds until something is due, or None."""
        return max(0.0, self._under_way[0][0] - now) if self._under_way else None

    def _push(self, due: float, target: int, before: bool, frame: bytes) -> None:
        heapq.heappush(self._under_way, (due, next(self._order), target, before, frame))


def _headers(frame: bytes) -> tuple[int, int, int]:
    """Return where the TCP header and the payload of a frame begin, and the payload bytes per segment."""
    tcp = _IP + (frame[_IP] & 15) * 4
    return tcp, tcp + (frame[tcp + 12] >> 4) * 4, _OFFLOAD.unpack_from(frame)[3]


def measured(frame: bytes) -> tuple[int, int]:
    """Return how many packets a frame is on a cable, and how many bytes they have there."""
    if not frame[1]:  # not to be segmented
        return 1, len(frame) - _IP + ETHERNET_HEADER
    _, payload, segment = _headers(frame)
    count = -(-(len(frame) - payload) // segment)
    return count, len(frame) - payload + count * (payload - _IP + ETHERNET_HEADER)


def piece(frame: bytes, begin: int, end: int) -> bytes:
    """Return segments ``begin`` to ``end - 1`` of a frame as a frame.

    The TCP checksum is left: the receiving kernel trusts it ("partial"), as for any frame that never saw a cable.
    """
    tcp, payload, segment = _headers(frame)
    flags, kind, *rest = _OFFLOAD.unpack_from(frame)
    last = payload + end * segment >= len(frame)
    head = bytearray(frame[:payload])
    data = frame[payload + begin * segment : payload + end * segment]
    if end - begin == 1:
        kind, rest[1] = 0, 0
    _OFFLOAD.pack_into(head, 0, flags, kind, *rest)
    (sequence,) = struct.unpack_from("!I", head, tcp + 4)
    struct.pack_into("!I", head, tcp + 4, (sequence + begin * segment) % 2**32)
    head[tcp + 13] &= ~((0 if last else _FIN | _PSH) | (_CWR if begin else 0))
    struct.pack_into("!H", head, _IP + 2, payload - _IP + len(data))
    struct.pack_into("!H", head, _IP + 10, 0)
    total = sum(struct.unpack_from(f"!{(tcp - _IP) // 2}H", head, _IP))
    total = (total & 0xFFFF) + (total >> 16)
    struct.pack_into("!H", head, _IP + 10, ~(total + (total >> 16)) & 0xFFFF)
    return bytes(head) + data


def main(config: dict[str, Any]) -> None:
    """Serve what the parent's JSON describes; the descriptors in it are inherited."""
    gc.disable()  # nothing here is cyclic, and a collection would delay packets
    hosts = config["hosts"]
    with mmap.mmap(config["cables"], len(hosts)) as cables:
        serve(Router(len(hosts), **config["link"]), hosts, config["parent"], cables)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
