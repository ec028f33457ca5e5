"""Turning a graph and the stage of every operator into what each stage costs."""

from __future__ import annotations

import math
from collections.abc import Sequence

from nearlinear.core.graph import Graph
from nearlinear.errors import InputError
from nearlinear.planning.simulate.values import Bucket, Work


def split_work(
    graph: Graph, stage_of: Sequence[int], speeds: Sequence[float] | None = None, bucket_bytes: float = math.inf
) -> list[Work]:
    """Return what every stage of a split graph costs.

    A tensor that skips stages is handed on by each of them, so that what crosses from stage s to the next is every
    tensor made at s or before and read after s.

    Args:
        graph: Its costs are for one microbatch.
        stage_of: The stage of every operator, from 0.
        speeds: How many times faster than the measured device each stage's device is; by default 1.
        bucket_bytes: Gradients per all-reduce; by default all of a stage in one, after the backward pass.

    Raises:
        InputError: An operator has no stage, a tensor goes to an earlier stage, or speeds do not match the stages.
    """
    if len(stage_of) != len(graph.operators) or not stage_of:
        raise InputError(f"{graph.name} has {len(graph.operators)} operators; {len(stage_of)} have a stage")
    stages = max(stage_of) + 1
    if min(stage_of) < 0 or (speeds is not None and (len(speeds) != stages or min(speeds) <= 0)):
        raise InputError(f"{stages} stages need numbers from 0 and as many speeds above 0")
    crossing = [0.0] * stages
    for tensor in graph.tensors:
        if not tensor.consumers:
            continue
        made, read = stage_of[tensor.producer], [stage_of[consumer] for consumer in tensor.consumers]
        if min(read) < made:
            name = graph.operators[tensor.producer].name
            raise InputError(f"{graph.name}: the output of {name!r} goes from stage {made} back to stage {min(read)}")
        for stage in range(made, max(read)):
            crossing[stage] += tensor.bytes
    work = []
    for stage in range(stages):
        own = [operator for operator, its in zip(graph.operators, stage_of, strict=True) if its == stage]
        speed = 1.0 if speeds is None else speeds[stage]
        work.append(
            Work(
                forward=sum(operator.forward for operator in own) / speed,
                backward=sum(operator.backward for operator in own) / speed,
                update=sum(operator.update for operator in own) / speed,
                output_bytes=crossing[stage],
                buckets=in_buckets(
                    [operator.backward for operator in own],
                    [operator.parameter_bytes for operator in own],
                    bucket_bytes,
                ),
            )
        )
    return work


def in_buckets(backward: Sequence[float], gradient_bytes: Sequence[float], limit: float) -> tuple[Bucket, ...]:
    """Return the buckets of a stage's layers, filled from the last layer to the first.

    Args:
        backward: Seconds of every layer's backward pass, in forward order.
        gradient_bytes: Bytes of every layer's gradients.
        limit: Bytes at which a bucket is closed; ``inf`` makes one.

    Example:
        >>> in_buckets([1.0, 1.0, 2.0], [10.0, 10.0, 10.0], 20.0)
        (Bucket(bytes=20.0, ready=0.75), Bucket(bytes=10.0, ready=1.0))
    """
    whole = sum(backward)
    buckets, open_, passed = [], 0.0, 0.0
    for layer in reversed(range(len(backward))):
        passed += backward[layer]
        open_ += gradient_bytes[layer]
        if open_ >= limit or (layer == 0 and open_ > 0):
            buckets.append(Bucket(open_, min(passed / whole, 1.0) if whole else 1.0))
            open_ = 0.0
    return tuple(buckets)
