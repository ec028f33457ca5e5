"""Measuring the devices and links of a run, all ranks together, and turning what was found into a cluster.

    1  speed        the first rank of every machine computes alone: products per dtype, copies
    2  crowds       the first 2, 4, ... ranks compute at once (crowds.py)
    3  pairs        messages between two ranks: latency and bandwidth each way, both ways at once, several streams
    4  at once      several pairs between two islands: do they share a link?
    5  exchanges    what data parallel runs over: all-reduce and broadcast among the first 2, 4, ... ranks

Messages go over sockets of ours on a CPU: the link itself is to be seen, with one stream and with several, whatever
framework will use it. Between GPUs a front end brings its own wire (NCCL), since sockets cannot see NVLink. What a
framework's collective operations make of the links is measured apart, with the framework itself (5).
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Protocol

from nearlinear.core.cluster import Cluster, Crowd, Device, Exchange
from nearlinear.errors import InputError
from nearlinear.measure import rounds
from nearlinear.measure.crowds import doublings, measure_crowds
from nearlinear.measure.hardware import Hardware, Others, Place, place
from nearlinear.measure.islands import Pair, islands_of
from nearlinear.measure.links import measure_links
from nearlinear.measure.messages import Both
from nearlinear.measure.speed import Computer, Speed, measure_speed
from nearlinear.measure.wire import Wire
from nearlinear.runtime.meeting import Meeting


class Collectives(Protocol):
    """A framework's collective operations."""

    def measure(self, ranks: int) -> list[Exchange]:
        """Return what its operations cost among the first ``ranks``; all ranks call it, and all get the same."""


@dataclass(frozen=True, slots=True)
class Measured:
    """All that a probe found.

    Args:
        hardware: Of every rank.
        names: What every rank's device is called.
        memories: Bytes of every rank's device.
        speeds: Of every rank's device, working alone.
        crowds: What they lose to each other.
        pairs: What messages took, per pair of ranks.
        at_once: Pairs that were timed at once, and bytes per second of each.
        exchanges: What collective operations took.
        others: Share of a machine's processors that other programs took while its device was measured, at most.
        began: When, as ISO 8601 in UTC.
        seconds: How long all that took.
    """

    hardware: tuple[Hardware, ...]
    names: tuple[str, ...]
    memories: tuple[float, ...]
    speeds: tuple[Speed, ...]
    crowds: tuple[Crowd, ...]
    pairs: Mapping[Pair, Both]
    at_once: Mapping[Pair, float]
    exchanges: tuple[Exchange, ...]
    others: float
    began: str
    seconds: float

    @property
    def hosts(self) -> list[str]:
        """Name of every rank's machine."""
        return [each.host for each in self.hardware]

    @property
    def at_once_share(self) -> float | None:
        """Bandwidth of each of the pairs timed at once, as a share of its own alone; None where none were."""
        shares = [
            rate / self.pairs[pair].there.link.bandwidth for pair, rate in self.at_once.items() if pair in self.pairs
        ]
        return mean(shares) if shares else None

    def cluster(self) -> Cluster:
        """Return the cluster."""
        devices = tuple(
            Device(name, memory, speed.flops, speed.memory_bandwidth, host)
            for name, memory, speed, host in zip(self.names, self.memories, self.speeds, self.hosts, strict=True)
        )
        links = {pair: both.link for pair, both in self.pairs.items()}
        islands, between, others = islands_of(links, self.hosts)
        share = self.at_once_share
        # Of pairs between the same two islands; between islands of one device nothing is shared but the network.
        same = share is not None and max(len(island.devices) for island in islands) > 1
        uplinks = min(max(1.0, len(self.at_once) * share), len(self.at_once)) if same and share is not None else 1.0
        where = ", ".join(dict.fromkeys(self.hosts))
        return Cluster(
            devices,
            islands,
            between,
            others,
            uplinks=round(uplinks, 2),
            crowds=self.crowds,
            exchanges=self.exchanges,
            source=f"measured on {where}, {self.began}",
        )

    def to_json(self) -> str:
        """Return the cluster as JSON, with what was measured beside it: a cluster file."""
        raw = json.loads(self.cluster().to_json())
        raw["measured"] = {
            "hardware": [each.to_dict() for each in self.hardware],
            "sizes": [each.sizes for each in self.speeds],
            "pairs": [each.to_dict() for each in self.pairs.values()],
            "at_once": [[*pair, rate] for pair, rate in self.at_once.items()],
            "others": self.others,
            "began": self.began,
            "seconds": self.seconds,
        }
        return json.dumps(raw, indent=1)

    @classmethod
    def from_json(cls, text: str) -> Measured:
        """Return what ``to_json`` wrote.

        Raises:
            InputError: ``text`` is no cluster, or one that was described, not measured.
        """
        cluster = Cluster.from_json(text)
        try:
            raw = json.loads(text)["measured"]
            both = [Both.from_dict(each) for each in raw["pairs"]]
            return cls(
                hardware=tuple(Hardware.from_dict(each) for each in raw["hardware"]),
                names=tuple(device.name for device in cluster.devices),
                memories=tuple(device.memory for device in cluster.devices),
                speeds=tuple(
                    Speed(dict(device.flops), device.memory_bandwidth, sizes)
                    for device, sizes in zip(cluster.devices, raw["sizes"], strict=True)
                ),
                crowds=cluster.crowds,
                pairs={(each.there.source, each.there.target): each for each in both},
                at_once={(low, high): rate for low, high, rate in raw["at_once"]},
                exchanges=cluster.exchanges,
                others=raw["others"],
                began=raw["began"],
                seconds=raw["seconds"],
            )
        except (KeyError, TypeError, ValueError) as error:
            raise InputError(f"this cluster was not measured by `nearlinear probe`: {error!r} is missing") from None


def probe(
    meeting: Meeting,
    computer: Computer,
    hardware: Hardware,
    *,
    address: str,
    deadline_s: float,
    collectives: Collectives | None = None,
    wire: Callable[[int], Wire] | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> Measured:
    """Measure; all ranks call it, and all get the same result.

    Args:
        meeting: All ranks.
        computer: This rank's device.
        hardware: What this rank runs on.
        address: Of this machine, where the other ranks reach it.
        deadline_s: Seconds that any wait for a peer may take.
        collectives: Of the framework that will train; without one they are not measured.
        wire: Makes the wire to a peer, where sockets are not what devices talk over.
        say: Called with what is measured next, on every rank.

    Raises:
        PeerLostError: A rank died, hung up, or did not answer within the deadline.
    """
    began, clock = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"), time.monotonic()
    where = _place(computer, hardware, meeting.rank)
    own = [hardware.to_dict(), computer.name, computer.memory, dataclasses.asdict(where)]
    everyones = meeting.all_gather_json(own, "the start of the probe")
    everyone = tuple(Hardware.from_dict(each[0]) for each in everyones)
    hosts = [each.host for each in everyone]
    say("devices")
    speeds, others = _speeds(meeting, computer, hosts)
    crowds = measure_crowds(meeting, computer, speeds, [Place(**each[3]) for each in everyones])
    pairs: dict[Pair, Both] = {}
    at_once: dict[Pair, float] = {}
    exchanges: list[Exchange] = []
    if meeting.size > 1:
        pairs, at_once = measure_links(meeting, hosts, address=address, deadline_s=deadline_s, wire=wire, say=say)
        for ranks in doublings(meeting.size):
            if collectives is not None:
                say(f"collective operations among {ranks}")
                exchanges += collectives.measure(ranks)
    return Measured(
        everyone,
        tuple(each[1] for each in everyones),
        tuple(float(each[2]) for each in everyones),
        speeds,
        crowds,
        pairs,
        at_once,
        tuple(exchanges),
        others,
        began,
        round(time.monotonic() - clock, 1),
    )


def _place(computer: Computer, hardware: Hardware, rank: int) -> Place:
    """Return where a rank computes; a GPU counts as a core that is this rank's alone."""
    here = place(hardware)
    return here if computer.name == "cpu" else Place(here.machine, (rank,), 1)


def _speeds(meeting: Meeting, computer: Computer, hosts: Sequence[str]) -> tuple[tuple[Speed, ...], float]:
    """Measure every device alone, and how busy others kept the processors."""
    members = rounds.ranks_of(hosts)
    first = {rank: ranks[0] for ranks in members.values() for rank in ranks}
    # Ranks that share a processor are one device to measure; GPUs are one each, and do not disturb each other.
    leads = computer.name != "cpu" or first[meeting.rank] == meeting.rank
    own: Speed | None = None
    others = 0.0
    # Machine by machine: what look like machines may be parts of one.
    for lead in members.values():
        meeting.all_gather_json(None, "measuring the devices")
        if leads and meeting.rank in lead:
            watch = Others()
            own = measure_speed(computer)
            others = watch.share() if computer.name == "cpu" else 0.0
    found_by = meeting.all_gather_json([own and dataclasses.asdict(own), others], "the speeds of the devices")
    speeds = tuple(Speed(**(found_by[rank][0] or found_by[first[rank]][0])) for rank in range(meeting.size))
    return speeds, round(max(each[1] for each in found_by), 3)
