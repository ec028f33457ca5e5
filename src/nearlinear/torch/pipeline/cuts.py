"""Deciding where a captured model is cut: its operators with measured times in, the stage of each out."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils import _pytree as pytree

from nearlinear.core.graph import Graph
from nearlinear.errors import InputError
from nearlinear.planning.partition import partition
from nearlinear.torch.capture import Captured
from nearlinear.torch.capture.batch import Call
from nearlinear.torch.profile import default_loss, profile
from nearlinear.torch.sharded_blocks import blocks_of

_PROFILE_S = 2.0
_WORTH = 0.03  # by how much less busy the busiest stage must be for a cut within a block: times are no more exact
_PASSES = 5  # over the output in a loss and its gradient: read, write; read, read, write


def stages_of(graph: Graph, model: nn.Module, captured: Captured, stages: int, bandwidth: float) -> list[int]:
    """Return the stage of each operator.

    A cut lies between two of the model's blocks where that costs little: one tensor passes there, and often several
    within.

    Args:
        graph: The model with times (``timed``).
        model: The model, for its blocks.
        captured: Its graph as it was captured.
        stages: How many there are to be.
        bandwidth: Between two ranks, bytes per second.
    """
    found, whole = partition(graph, stages, bandwidth), partition(_by_block(graph, model, captured), stages, bandwidth)
    if len(whole.stages) >= len(found.stages) and whole.objective <= (1 + _WORTH) * found.objective:
        found = whole
    if len(found.stages) < stages:  # the script asked for so many, whatever the links would advise
        found = partition(_without_bytes(graph), stages, 1e15)
    place = {device: position for position, device in enumerate(found.stages)}
    return [place[device] for device in found.assignment]


def _by_block(graph: Graph, model: nn.Module, captured: Captured) -> Graph:
    """Return the graph with the operators of each of the model's blocks kept together."""
    names = {module: name for name, module in model.named_modules()}
    blocks = [f"{names[block]}." for block in blocks_of(model, leaf_bytes=0)]

    def block_of(path: str) -> str | None:
        return next((f"block {block}" for block in blocks if f"{path}.".startswith(block)), None)

    operators = (
        dataclasses.replace(operator, group=operator.group or block_of(path))
        for operator, path in zip(graph.operators, captured.modules, strict=True)
    )
    return dataclasses.replace(graph, operators=tuple(operators))


def _without_bytes(graph: Graph) -> Graph:
    return dataclasses.replace(graph, tensors=tuple(dataclasses.replace(each, bytes=0.0) for each in graph.tensors))


# ---- times


def timed(model: nn.Module, call: Call, captured: Captured, *, interleaved: bool) -> Graph:
    """Return the graph with measured times, or, where the model cannot be run here whole, with times by FLOP.

    The script's loss runs on the last stage's rank. Under ``nl.step`` it is taken piece by piece while the other stages
    are busy, so it counts as that stage's work. In a plain loop all stages wait for it, however the model is cut: there
    it does not count.

    Args:
        model: The model.
        call: What it is called with.
        captured: Its graph.
        interleaved: Whether each microbatch has a loss of its own (``nl.step``).
    """
    if any(each.is_meta for each in model.parameters()):
        return _by_flop(captured, interleaved)
    loss = _usual_loss if interleaved else None
    try:
        graph = profile(
            model, call.args, call.kwargs, loss=loss, captured=captured, budget=_PROFILE_S, least=4, warmup=1
        ).graph
    except InputError:
        return _by_flop(captured, interleaved)
    if len(graph.operators) == len(captured.graph.operators):
        return graph
    *operators, last = graph.operators
    graph = dataclasses.replace(graph, operators=tuple(operators), tensors=captured.graph.tensors)
    return _with_loss(graph, captured, last.forward, last.backward)


def _by_flop(captured: Captured, loss: bool) -> Graph:
    operators = tuple(
        dataclasses.replace(each, forward=(each.flop + 10.0 * each.moved_bytes) / 1e10, backward=2e-10 * each.flop)
        for each in captured.graph.operators
    )
    graph = dataclasses.replace(captured.graph, operators=operators)
    largest = max((size for _, size in captured.outputs), default=0.0)
    return _with_loss(graph, captured, 10.0 * _PASSES * largest / 1e10, 0.0) if loss else graph


def _with_loss(graph: Graph, captured: Captured, forward: float, backward: float) -> Graph:
    """Return the graph with a loss's seconds added to the operator that makes the last of the outputs."""
    operators = list(graph.operators)
    place = max((producer for producer, _ in captured.outputs), default=len(operators) - 1)
    last = operators[place]
    operators[place] = dataclasses.replace(last, forward=last.forward + forward, backward=last.backward + backward)
    return dataclasses.replace(graph, operators=tuple(operators))


def _usual_loss(output: Any) -> torch.Tensor:
    """Return a loss that takes as long as the script's may, which nobody has seen yet.

    That is the output's own where it has one; otherwise the cross entropy of its largest tensor.
    """
    own = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    tensors = [each for each in pytree.tree_leaves(output) if isinstance(each, torch.Tensor) and each.requires_grad]
    largest = max(tensors, key=torch.numel, default=None)
    if isinstance(own, torch.Tensor) or largest is None or largest.dim() == 0:
        return default_loss(output)
    rows = largest.reshape(-1, largest.shape[-1])
    return F.cross_entropy(rows, torch.zeros(len(rows), dtype=torch.int64, device=rows.device))
