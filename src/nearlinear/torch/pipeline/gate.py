"""Comparing the split model with the model itself, on a few samples, before the first step."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from nearlinear.errors import InputError
from nearlinear.torch import random_streams
from nearlinear.torch.capture import Captured
from nearlinear.torch.capture.batch import Call
from nearlinear.torch.capture.untouched import untouched
from nearlinear.torch.pipeline.executor import Executor, State, in_order
from nearlinear.torch.pipeline.stages import Split
from nearlinear.torch.session import Session

_SAMPLES = 4
_RELATIVE = {torch.float64: 1e-9, torch.float32: 1e-3}  # of the largest entry; sums in another order round otherwise
_COARSE = 5e-2


def require_same_numbers(model: nn.Module, call: Call, captured: Captured, cut: Split, session: Session) -> None:
    """Run both on rank 0 and compare outputs and gradients; all ranks call it and wait for the result.

    Models on the meta device are not run. Two microbatches are used where nothing in the model is random or normalises
    over the batch.

    Raises:
        InputError: They differ; the message names the first output or parameter that does.
    """
    why = ""
    if session.rank == 0 and not any(each.is_meta for each in model.parameters()):
        why = _difference(model, call, captured, cut)
    why = session.all_gather_json(why, "comparing the split model with the model")[0]
    if why:
        raise InputError(
            f"the split model does not have the numbers of {type(model).__name__}: {why}; use strategy 'data' or "
            "'sharded', and please report the model"
        )


def _difference(model: nn.Module, call: Call, captured: Captured, cut: Split) -> str:
    few = call.with_samples(min(call.samples, _SAMPLES))
    restart = random_streams.remember()
    with _afresh(model):
        outputs = _of_model(model, few)
        expected = _left_in(model)
    restart()
    with _afresh(model):
        split_outputs = _of_split(model, few, captured, cut)
        found = _left_in(model)
    restart()
    limit = _limit(captured)
    for number, (here, there) in enumerate(zip(outputs, split_outputs, strict=True)):
        off = _off(here, there, limit, 1e-6)
        if off:
            return f"output {number} {off}"
    # Some gradients are nothing but rounding (of a key's bias in an attention): measured by all gradients.
    least = 1e-3 * max((_largest(value) for value in expected.values() if value is not None), default=0.0)
    for what, value in expected.items():
        off = _off(value, found[what], limit, least)
        if off:
            return f"{what} {off}"
    return ""


def _limit(captured: Captured) -> float:
    """Return how far numbers may differ, relative to the largest, by the shortest that the model computes with."""
    assert captured.program is not None
    graphs = [each for each in captured.program.graph_module.modules() if isinstance(each, fx.GraphModule)]
    values = [node.meta.get("val") for graph in graphs for node in graph.graph.nodes]
    kinds = {each.dtype for each in values if isinstance(each, torch.Tensor) and each.dtype.is_floating_point}
    return max((_RELATIVE.get(each, _COARSE) for each in kinds), default=_COARSE)


@contextlib.contextmanager
def _afresh(model: nn.Module) -> Iterator[None]:
    """Begin without gradients, and leave no trace in the model."""
    with untouched(model), torch.enable_grad():
        for each in model.parameters():
            each.grad = None
        yield


def _of_model(model: nn.Module, call: Call) -> list[torch.Tensor]:
    returned = model(*call.args, **call.kwargs)
    outputs = [each for each in pytree.tree_leaves(returned) if isinstance(each, torch.Tensor)]
    loss = _loss(outputs)
    if loss.requires_grad:
        loss.backward()  # type: ignore[no-untyped-call]
    return [each.detach() for each in outputs]


def _of_split(model: nn.Module, call: Call, captured: Captured, cut: Split) -> list[torch.Tensor]:
    assert captured.program is not None
    leaves = in_order(call, captured.program.call_spec.in_spec)
    state = State(model, captured.program)
    device = next(model.parameters()).device
    alone = Executor(cut, [0] * cut.stages, 0, state, [call.along(each) for each in leaves], device)
    run = alone.begin(leaves, call.samples, 1 if _once(model) else 2, training=True)
    made = [
        each.detach().requires_grad_(each.requires_grad) if isinstance(each, torch.Tensor) else each
        for each in run.forward()
    ]
    outputs = [each for each in made if isinstance(each, torch.Tensor)]
    loss = _loss(outputs)
    if loss.requires_grad:
        loss.backward()  # type: ignore[no-untyped-call]
    found = [each.grad if isinstance(each, torch.Tensor) and each.requires_grad else None for each in made]
    run.backward(found, {place for place, each in enumerate(found) if each is not None})
    return [each.detach() for each in outputs]


def _once(model: nn.Module) -> bool:
    """Whether the model must see all samples at once to be compared: it draws, or normalises over the batch."""
    return any(_draws(each) or isinstance(each, nn.modules.batchnorm._BatchNorm) for each in _training(model))


def _training(model: nn.Module) -> Iterator[nn.Module]:
    return (each for each in model.modules() if each.training)


def _draws(module: nn.Module) -> bool:
    rate = (
        getattr(module, "p", None)
        if isinstance(module, nn.modules.dropout._DropoutNd)
        else getattr(module, "dropout", 0)
    )
    return isinstance(rate, float) and rate > 0


def _loss(outputs: list[torch.Tensor]) -> torch.Tensor:
    """Return a number in which every entry of every output has a part of its own."""
    total: Any = 0.0
    for number, each in enumerate(outputs):
        if each.is_floating_point() and each.requires_grad and each.numel():
            weight = torch.cos(torch.arange(each.numel(), device=each.device, dtype=each.dtype) + number)
            total = total + (each.reshape(-1) * weight).mean()
    return total if isinstance(total, torch.Tensor) else torch.zeros(())


def _left_in(model: nn.Module) -> dict[str, torch.Tensor | None]:
    """Return what a pass leaves in the model: gradients and buffers."""
    gradients = {
        f"the gradient of {name}": None if each.grad is None else each.grad.detach().clone()
        for name, each in model.named_parameters()
    }
    return {**gradients, **{f"buffer {name}": each.detach().clone() for name, each in model.named_buffers()}}


def _off(here: torch.Tensor | None, there: torch.Tensor | None, limit: float, least: float) -> str:
    """Return what is wrong, if more than ``limit`` of the largest entry, or of ``least`` where that is more."""
    if here is None or there is None:  # a stage gives zeros to what the loss turns out not to depend on
        only = there if here is None else here
        return "" if only is None or not only.any() else f"is {'none' if here is None else 'there'} in the model alone"
    if here.shape != there.shape:
        return f"has shape {tuple(there.shape)} instead of {tuple(here.shape)}"
    if not here.is_floating_point():
        return "" if torch.equal(here, there) else "differs"
    wide, other = here.double(), there.double()
    if not torch.equal(wide.isnan(), other.isnan()):
        return "is not a number elsewhere"
    off, most = _largest(wide - other), _largest(wide)
    return f"differs by {off:.3g} (largest entry {most:.3g})" if off > limit * max(most, least) else ""


def _largest(tensor: torch.Tensor) -> float:
    return float(tensor.detach().double().nan_to_num().abs().max()) if tensor.numel() else 0.0
