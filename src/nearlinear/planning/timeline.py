"""Turning the way that was chosen into one step of it, event by event, to be drawn."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from nearlinear.core.cluster import Cluster
from nearlinear.core.schedule import gpipe, one_f_one_b
from nearlinear.planning.collectives import all_reduce
from nearlinear.planning.exchange import Network
from nearlinear.planning.simulate import Simulation, simulate, split_work
from nearlinear.planning.simulate import Work as StageWork
from nearlinear.planning.ways import Way, Work, sized, slowest

DRAWN = 4
"""Copies that are simulated one by one; of more, which are alike, one stands for all."""

_BUCKETS = (64e3, 512e3, 4e6, 25e6, math.inf)


def timeline(way: Way, work: Work, cluster: Cluster) -> Simulation | None:
    """Return one step of ``way``; ``None`` for ways that no schedule describes: sharded, local, stages of several each.

    Args:
        way: ``"data"``, or a pipeline with one device per stage.
        work: What is trained.
        cluster: Its first ``way.devices`` devices take part.
    """
    if way.strategy not in ("data", "pipeline") or any(group.replicas != 1 for group in way.groups):
        return None
    stages = max(len(way.groups), 1)
    copies = way.devices // stages
    graph = sized(work.graph, math.ceil(work.samples(way.devices) / copies) / way.microbatches / work.graph.samples)
    home = {operator: number for number, group in enumerate(way.groups) for operator in group.operators}
    stage_of = [home.get(operator, 0) for operator in range(len(graph.operators))]
    schedule = (gpipe if way.eager else one_f_one_b)(stages, way.microbatches)
    rows = [[copy * stages + stage if way.along else stage * copies + copy for stage in range(stages)]
            for copy in range(copies)]  # fmt: skip
    drawn = rows if copies <= DRAWN else rows[:1]

    def over_all(message_bytes: float, devices: Sequence[int]) -> float:
        stage = next(stage for row in drawn for stage, device in enumerate(row) if device == devices[0])
        return all_reduce(message_bytes, [row[stage] for row in rows], cluster)

    network, found = Network(cluster.first(way.devices)), []
    for limit in _BUCKETS if copies > 1 else _BUCKETS[-1:]:
        each_row = []
        for row in drawn:
            speeds = [1 / slowest(work, network, (device,)) for device in row]
            each_row.append(
                [_launched(each, work.launch / stages) for each in split_work(graph, stage_of, speeds, limit)]
            )
        found.append(
            simulate(
                schedule, each_row, cluster, drawn, all_reduce=over_all if copies > DRAWN else None, combine=copies > 1
            )
        )
    return min(found, key=lambda each: each.seconds)


def _launched(stage: StageWork, launch: float) -> StageWork:
    """Return the stage's work with what a microbatch costs however small it is, a third of it forward."""
    return dataclasses.replace(stage, forward=stage.forward + launch / 3, backward=stage.backward + 2 * launch / 3)
