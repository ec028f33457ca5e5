"""Turning a schedule, what its actions cost, and a cluster into the time of one step, event by event.

    replica 0   stage 0   F0 F1 .. B0 B1 |==== all-reduce ====| update
                stage 1      F0 B0 F1 B1 |=|                    update
    replica 1   stage 0   F0 F1 .. B0 B1 |==== all-reduce ====| update
                ...

Every device computes its actions in order, one at a time. What an action needs from another stage travels over the
link between the two devices. Links are entered through ports: a host (or an island that names no hosts) has one out and
one in, of as many lanes as the cluster has uplinks. Messages through the same port queue in the order in which they
were sent, so that devices of one host, and replicas, are in each other's way. Devices of one host have ports of their
own among themselves.

Transfers are one of two kinds. *Overlapped*: they run beside the computation, and the receiver alone waits.
*Blocking*: sender and receiver meet, and neither computes until the message is through, as in DeepSpeed's pipeline
engine; of two messages that are due at the same time between the same stages, the gradient goes first.

Replicas of a stage combine their gradients bucket by bucket, one all-reduce at a time, each as soon as its bucket is
full on all of them. While a device takes part in any communication it computes at ``1 - core_share`` of its speed.
"""

from __future__ import annotations

from collections.abc import Sequence

from nearlinear.core.cluster import Cluster
from nearlinear.core.schedule import Schedule
from nearlinear.errors import InputError
from nearlinear.planning import collectives
from nearlinear.planning.simulate.stages import in_buckets, split_work
from nearlinear.planning.simulate.step import Reduction, Step
from nearlinear.planning.simulate.values import Bucket, Simulation, Span, Spent, Work

__all__ = ["Bucket", "Reduction", "Simulation", "Span", "Spent", "Work", "in_buckets", "simulate", "split_work"]


def simulate(
    schedule: Schedule,
    work: Sequence[Sequence[Work]],
    cluster: Cluster,
    placement: Sequence[Sequence[int]] | None = None,
    *,
    blocking: bool = False,
    all_reduce: Reduction | str | None = None,
    core_share: float = 0.0,
    combine: bool | None = None,
) -> Simulation:
    """Simulate one step of a pipeline and its replicas.

    Data parallelism alone is a schedule of one stage; one pipeline is one replica.

    Args:
        schedule: What every stage computes, in order; the same in all replicas.
        work: What a stage costs, ``work[replica][stage]``. Replicas may differ (mixed devices, uneven shares).
        cluster: The devices and the links between them.
        placement: The device of every stage, ``placement[replica][stage]``; by default the devices in order.
        blocking: Whether a message holds up both of its ends.
        all_reduce: Its algorithm (see ``collectives``), or a function of bytes and devices that returns seconds. By
            default as measured, where the cluster says so for just these devices, and else a ring.
        core_share: The share of a device's computing that communication takes while it lasts, from 0 to below 1. On a
            CPU the two share the cores.
        combine: Whether gradients are combined; by default where there are replicas. With True, one replica can stand
            for many that are alike and not in each other's way; ``all_reduce`` must then know how many they are.

    Raises:
        InputError: The numbers of stages, replicas and devices do not match, or ``core_share`` is out of range.

    Example:
        >>> from nearlinear.core.cluster import Device, Island, Link
        >>> from nearlinear.core.schedule import gpipe
        >>> device, cable = Device("cpu", 8e9, {"float32": 5e10}, 1e10), Link(1e-3, 1e8)
        >>> pair = Cluster((device, device), (Island((0,), cable), Island((1,), cable)), cable)
        >>> print(simulate(gpipe(2, 3), [[Work(0.1, 0.2), Work(0.1, 0.2)]], pair))
        step 1.2 s
        device 0: compute 75%, communication 0%, waiting 25%
        device 1: compute 75%, communication 0%, waiting 25%
    """
    stages = len(schedule.stages)
    if any(len(row) != stages for row in work) or not work:
        raise InputError(f"work must be given for the schedule's {stages} stages in each of at least one replica")
    if placement is None:
        placement = [range(replica * stages, (replica + 1) * stages) for replica in range(len(work))]
    used = [device for row in placement for device in row]
    if [len(row) for row in placement] != [stages] * len(work) or len(set(used)) < len(used):
        raise InputError(f"{len(work)} replicas of {stages} stages need {len(work) * stages} devices, each once")
    if not all(0 <= device < len(cluster.devices) for device in used):
        raise InputError(f"a stage is placed on device {max(used)}; the cluster has {len(cluster.devices)}")
    if not 0 <= core_share < 1:
        raise InputError(f"core_share is {core_share}; it must be at least 0 and below 1")
    reduction = all_reduce if callable(all_reduce) else _over(cluster, all_reduce)
    combined = len(work) > 1 if combine is None else combine
    return Step(schedule, work, cluster, placement, blocking, reduction, core_share, combined).result()


def _over(cluster: Cluster, algorithm: str | None) -> Reduction:
    def seconds(size: float, devices: Sequence[int]) -> float:
        measured = cluster.exchange("all_reduce", len(devices)) if algorithm is None else None
        if measured is not None and sorted(devices) == list(range(len(devices))):
            return measured.time(size)
        return collectives.all_reduce(size, devices, cluster, algorithm or "ring")

    return seconds
