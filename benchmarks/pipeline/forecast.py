"""Turning what was planned into what the split should gain over as many layers on either stage."""

from __future__ import annotations

from typing import Any

from ways import Planned, layers_alike

from nearlinear.core.cluster import Cluster, Device, Island, Link
from nearlinear.core.schedule import gpipe
from nearlinear.planning.simulate import Work, simulate, split_work


def forecast(planned: Planned, microbatches: int) -> dict[str, Any]:
    """Return, of the split that was run and of the one by layers, the loads of the stages and the seconds of a step."""
    found: dict[str, Any] = {"bandwidth": planned.bandwidth}
    for name, stages in (("run", planned.stages), ("alike", layers_alike(planned.graph))):
        work = split_work(planned.graph, stages)
        moved = 2 * work[0].output_bytes / planned.bandwidth  # there, and its gradient back
        loads = [each.forward + each.backward + moved for each in work]
        found[name] = {"loads": loads, "step": _step(work, planned.bandwidth, microbatches), "moved": moved}
    layers = sorted({each.name.partition(".")[0] for each in planned.graph.operators}, key=int)
    # The layers of stage 0; one that is cut is given by the share of its operators.
    inside = {layer: [s for o, s in zip(planned.graph.operators, planned.stages, strict=True)
                      if o.name.partition(".")[0] == layer] for layer in layers}  # fmt: skip
    found["first stage"] = {layer: 1 - sum(each) / len(each) for layer, each in inside.items() if not all(each)}
    return found


def _step(work: list[Work], bandwidth: float, microbatches: int) -> float:
    each = [
        Work(
            stage.forward / microbatches, stage.backward / microbatches, output_bytes=stage.output_bytes / microbatches
        )
        for stage in work
    ]
    device, link = Device("core", 1e9, {"float32": 1e11}, 1e10), Link(0.0, bandwidth)
    pair = Cluster((device, device), (Island((0,), link), Island((1,), link)), link)
    return simulate(gpipe(2, microbatches), [each], pair).seconds
