"""Turning a function that takes a batch and returns its loss into one that also runs the backward pass."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from nearlinear.core.schedule import Kind, one_f_one_b
from nearlinear.errors import InputError
from nearlinear.torch.capture.batch import Call
from nearlinear.torch.pipeline.executor import parts
from nearlinear.torch.pipeline.train import Pipeline
from nearlinear.torch.session import current


def step(fn: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Decorate a loss function; ``nearlinear.step`` documents it."""

    @functools.wraps(fn)
    def run(*args: Any, **kwargs: Any) -> torch.Tensor:
        pipelines = Pipeline.alive()
        if pipelines:
            return _interleaved(pipelines, fn, args, kwargs)
        loss = _checked(fn(*args, **kwargs))
        torch.autograd.backward(loss)
        return loss.detach()

    return run


def _interleaved(
    pipelines: Sequence[Pipeline], fn: Callable[..., torch.Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> torch.Tensor:
    """Run the function on one microbatch after another, forward and backward in the order of 1F1B."""
    call = Call.of(args, kwargs, 0)
    pipeline = pipelines[-1]  # all of a script are of the same ranks
    batch, parts_of_it = pipeline.session.batch, pipeline.session.parts
    # As many in every pipeline, though its share may be a sample larger: each is a backward pass, which are counted.
    least = call.samples if batch is None or parts_of_it == 1 else min(call.samples, batch.samples // parts_of_it)
    count = max(1, min(pipeline.microbatches, least // 2))
    pieces = [call.rows(begin, end) for begin, end in parts(call.samples, count)]
    weights = _weights(pieces, call)
    stage = pipeline.session.rank - pipeline.ranks[0]
    losses: dict[int, torch.Tensor] = {}
    total: torch.Tensor | None = None
    with contextlib.ExitStack() as stack:
        for each in pipelines:
            stack.enter_context(each.interleaving())
        for action in one_f_one_b(len(pipeline.ranks), count).stages[stage]:
            number = action.microbatch
            if action.kind is Kind.FORWARD:
                piece = pieces[number]
                following = pieces[number + 1].samples if number + 1 < count else 0
                for each in pipelines:
                    each.begin_microbatch(piece.samples, following)
                losses[number] = _checked(fn(*piece.args, **piece.kwargs))
            else:
                loss, weight = losses.pop(number), weights[number]
                torch.autograd.backward(loss, torch.full((), weight, dtype=loss.dtype, device=loss.device))
                with torch.no_grad():
                    total = loss * weight if total is None else torch.add(total, loss, alpha=weight)
    assert total is not None
    return total


def _weights(pieces: Sequence[Call], call: Call) -> list[float]:
    """Return what each microbatch's loss counts for in the batch's: by samples, or as ``distribute`` was told."""
    session = current()
    assert session is not None
    if session.summed:
        return [1.0] * len(pieces)
    if session.weight is None:
        return [piece.samples / call.samples for piece in pieces]
    found = []
    for piece in pieces:
        given = (*piece.args, *piece.kwargs.values())
        found.append(float(session.weight(given[0] if len(given) == 1 else given)))
    whole = sum(found)
    return [each / whole if whole else math.nan for each in found]


def _checked(loss: Any) -> torch.Tensor:
    if not isinstance(loss, torch.Tensor) or loss.ndim:
        what = (
            f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else f"a {type(loss).__name__}"
        )
        raise InputError(f"the function given to nl.step returned {what}; return the loss, a tensor with one number")
    return loss
