"""Turning a way of training a graph on a cluster into its step time, where that goes, and its memory."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import numpy as np

from nearlinear.core.cluster import Cluster, Exchange
from nearlinear.planning.buckets import bucket_bytes
from nearlinear.planning.exchange import Network, links, scaled
from nearlinear.planning.overlap import Message, beside, in_turn
from nearlinear.planning.rounds import direct_s, interval, star_s
from nearlinear.planning.staged import pipeline
from nearlinear.planning.ways import Candidate, Way, Work, brought, slowest

SENT = (1 + 1 / 64) / 4
"""Bytes that local updates send for each byte of float32 parameters: the codec int8, with a scale per 256 values."""

ASSUMED_SPREAD = 0.15
"""Spread of a link that was described and not measured: what data sheets leave open, at one sigma; ours."""

_BUCKETS = (64e3, 512e3, 4e6, 25e6)


def predict(way: Way, work: Work, cluster: Cluster | Network) -> Candidate:
    """Return what ``way`` brings on the first devices of ``cluster``, without a band."""
    network = cluster if isinstance(cluster, Network) else Network(cluster)
    if way.devices < len(network.all):
        network = Network(network.cluster.first(way.devices))
    return _STRATEGIES[way.strategy](way, work, network)


def with_band(found: Candidate, work: Work, cluster: Cluster) -> Candidate:
    """Return ``found`` with a band from the spreads of the links and of the graph's times.

    The band: the step over links faster and slower by their spread (``ASSUMED_SPREAD`` where they were not measured),
    and its computing part faster and slower by ``Work.spread``.
    """
    cluster = cluster.first(found.way.devices)
    spread = max((link.spread for link in links(cluster)), default=0.0) or ASSUMED_SPREAD
    own = work.spread * (found.compute + found.update)
    quick, slow = (
        predict(found.way, work, scaled(cluster, factor)).seconds for factor in (1 + spread, 1 / (1 + spread))
    )
    low = max(min(quick, found.seconds) - own, 0.5 * found.seconds)
    return dataclasses.replace(found, low=low, high=max(slow, found.seconds) + own)


def _microbatch(way: Way, work: Work) -> float:
    """Return the samples of one of the microbatches that the largest share of the batch is cut into."""
    return math.ceil(work.samples(way.devices) / way.devices) / way.microbatches


def _data(way: Way, work: Work, network: Network) -> Candidate:
    """Every device a copy of the model; buckets of gradients leave while the backward pass goes on.

    backward   |====layer 9====|====layer 8====|== ... ==|
    network             |--bucket 0--|   |--bucket 1--|     |--bucket 2--|   <- what sticks out is exposed
    """
    micro = _microbatch(way, work)
    slow = slowest(work, network, network.all)
    scale = slow * micro / work.graph.samples
    compute = way.microbatches * (work.launch * slow + scale * (work.forward + work.backward))
    exposed = _exposed(work, network, scale * work.backward, slow)
    memory = work.state_bytes + work.activation_bytes * micro / work.graph.samples
    return brought(way, work, network, memory, compute, exposed, 0.0, _update(work, network))


def _update(work: Work, network: Network) -> float:
    """Return the seconds of the optimizer step, which moves memory."""
    return work.update * max(work.slowdown(device) for device in network.kinds(network.all)) / network.crowd.memory


def _exposed(work: Work, network: Network, backward: float, slow: float) -> float:
    """Return what the exchange of the gradients takes beyond a backward pass of ``backward`` seconds."""
    measured = network.reach(network.all).measured
    if len(network.all) == 1 or work.graph.parameter_bytes == 0:
        return 0.0
    when, total = work.ready
    when = when * (backward / when[-1] if when[-1] else 0.0)
    best = math.inf
    for limit in _BUCKETS if measured is None else [_bucket_bytes(float(total[-1]), measured)]:
        count = min(max(math.ceil(total[-1] / limit), 1), 4096)
        bucket = float(total[-1]) / count
        full = when[np.searchsorted(total, np.arange(1, count + 1) * bucket * (1 - 1e-12))]
        if measured is None:
            takes = network.all_reduce(network.all, bucket, work.algorithms)
            best = min(best, in_turn(full, takes))
        else:
            device = min(network.kinds(network.all), key=lambda each: each.memory_bandwidth)
            copy = 2.0 / (device.memory_bandwidth * network.crowd.memory)
            messages = [Message(bucket, float(each) / slow) for each in full]
            best = beside(backward / slow, messages, measured, slow, copy)
    return max(best - backward, 0.0)


def _bucket_bytes(total: float, measured: Exchange) -> int:
    """Return the bytes per message that the runtime will choose: from two or three timed messages, as it does."""
    tried = [4.0, 65536.0] + ([] if measured.time(65536.0) > 0.05 else [1048576.0])
    times = [measured.time(each) for each in tried]
    slope = max((times[-1] - times[0]) / (tried[-1] - tried[0]), 1e-15)
    latency = max(times[0] - slope * tried[0], 0.0)
    return bucket_bytes(int(total), latency, 1 / slope, shared=measured.processor is not None)


def _sharded(way: Way, work: Work, network: Network) -> Candidate:
    """Every device a part of the state; parameters are gathered for each pass, gradients scattered in the last.

    A gather or a scatter is half an all-reduce. The next layer's parameters come while one computes, so a pass takes
    the longer of its computing and its communication, and the first layer's gather before it.

    Where processors do both, one waits for the other. There a gather or a scatter takes as long as an all-reduce (gloo
    scatters what it has reduced whole) and is copied, and that is still too little: of 71 MB they took 100 ms each
    instead of 60.

    Source of the scheme: S. Rajbhandari et al., "ZeRO", 2020, arXiv 1910.02054, stage 3.
    """
    micro = _microbatch(way, work)
    count = way.devices
    slow = slowest(work, network, network.all)
    scale = slow * micro / work.graph.samples
    half = network.all_reduce(network.all, work.graph.parameter_bytes, work.algorithms) / 2
    largest = max(each.parameter_bytes for each in work.graph.operators)
    first = network.all_reduce(network.all, largest, work.algorithms) / 2
    launch = work.launch * slow / 2
    forward, backward = launch + scale * work.forward, launch + scale * work.backward
    compute = way.microbatches * (forward + backward)
    passes = way.microbatches * (max(forward, half) + max(backward, 2 * half) + 2 * first)
    measured = network.reach(network.all).measured
    if measured is not None and measured.processor is not None:
        slowest_memory = min(device.memory_bandwidth for device in network.kinds(network.all)) * network.crowd.memory
        copied = 2 * work.graph.parameter_bytes / slowest_memory
        passes = way.microbatches * (forward + backward + 3 * (2 * half + copied))
    exposed = passes - compute if count > 1 else 0.0
    memory = work.state_bytes / count + 2 * largest + work.activation_bytes * micro / work.graph.samples
    return brought(way, work, network, memory, compute, exposed, 0.0, _update(work, network) / count)


def _local(way: Way, work: Work, network: Network) -> Candidate:
    """Every device trains on its share apart from the others; what they learnt is exchanged once a round, beside it.

    steps     |== round 7 ==|== round 8 ==|     as many steps as hide the exchange twice over (planning/rounds.py)
    exchange                |- 7 -|       |- 8 -|
    """
    micro = _microbatch(way, work)
    slow = slowest(work, network, network.all)
    scale = slow * micro / work.graph.samples
    compute = way.microbatches * (work.launch * slow + scale * (work.forward + work.backward))
    update = _update(work, network)
    every, exposed = _rounds(work, network, compute + update)
    memory = work.state_bytes + 2 * work.graph.parameter_bytes + work.activation_bytes * micro / work.graph.samples
    return brought(way, work, network, memory, compute, exposed, 0.0, update, every)


def _rounds(work: Work, network: Network, step: float) -> tuple[int, float]:
    """Return the steps of a round of local updates, and the seconds per step that its exchange is not hidden."""
    if len(network.all) == 1:
        return 1, 0.0
    link = network.cluster.slowest(network.all)
    sent, count = SENT * work.graph.parameter_bytes, len(network.all)
    takes = min(
        direct_s(sent, 2 * link.latency, [link.bandwidth] * count),
        star_s(sent, count - 1, 2 * link.latency, link.bandwidth),
    )
    every = interval(takes, step)
    return every, max(takes / every - step, 0.0)


_STRATEGIES: dict[str, Callable[[Way, Work, Network], Candidate]] = {
    "data": _data,
    "sharded": _sharded,
    "pipeline": pipeline,
    "local": _local,
}
