"""Numbers and tensors of the whole batch, from those of each rank's share."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from nearlinear.core.shares import share
from nearlinear.errors import InputError
from nearlinear.torch.data import map_leaves
from nearlinear.torch.session import Batch, Session, derived_seed


def mean(value: Any, session: Session) -> Any:
    """Return the mean over the ranks, weighted by what each rank's share of the batch in hand counts for."""
    fraction = session.mean_fraction(training=isinstance(value, torch.Tensor) and value.requires_grad)
    return _combine(value, session, fraction, "nl.mean")


def total(value: Any, session: Session) -> Any:
    """Return the sum over the ranks; a rank that holds a filler adds nothing."""
    filler = session.batch is not None and session.batch.filler and not session.pass_over
    return _combine(value, session, 0.0 if filler else 1.0, "nl.total")


def _combine(value: Any, session: Session, factor: float, what: str) -> Any:
    """Sum ``factor * value`` over the ranks, leaf by leaf, in one message."""
    if session.peers is None:
        return detached(value)
    leaves = list(_numbers(value, what))
    if not leaves:
        return value
    tensors = [plain(torch.as_tensor(leaf)) for leaf in leaves]
    wide = [t.to("cpu", torch.complex128 if t.is_complex() else torch.float64).reshape(-1) for t in tensors]
    flat = torch.cat([torch.view_as_real(w).reshape(-1) if w.is_complex() else w for w in wide])
    # The last element tells whether all ranks sum the same things: a number for the structure, the same everywhere.
    structure = derived_seed(*_structure(value), *(str(tuple(t.shape)) for t in tensors)) % 2**20
    flat = torch.cat([flat * factor if factor else torch.zeros_like(flat), flat.new_tensor([structure])])
    session.peers.all_reduce(flat, what)
    if flat[-1] != structure * session.parts:
        raise InputError(f"{what} got values of different structure on different ranks; give it the same names on all")
    results, offset = [], 0
    for leaf, tensor in zip(leaves, tensors, strict=True):
        count = tensor.numel() * (2 if tensor.is_complex() else 1)
        part, offset = flat[offset : offset + count], offset + count
        part = torch.view_as_complex(part.view(-1, 2)) if tensor.is_complex() else part
        results.append(_as_given(leaf, tensor, part.reshape(tensor.shape), integers=what == "nl.total"))
    return _rebuilt(value, iter(results))


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's values, also where they lie on another rank (``pipeline.placed``)."""
    elsewhere = getattr(tensor, "plain", None)
    return tensor.detach() if elsewhere is None else elsewhere()


def detached(value: Any) -> Any:
    """Return ``value`` with its tensors detached, as those that come from several ranks are."""
    if isinstance(value, torch.Tensor):
        return value.detach()
    if isinstance(value, Mapping):
        return {key: detached(each) for key, each in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(detached, value))
    return type(value)(map(detached, value)) if isinstance(value, list | tuple) else value


def _as_given(leaf: Any, tensor: torch.Tensor, result: torch.Tensor, *, integers: bool) -> Any:
    whole = not tensor.is_floating_point() and not tensor.is_complex()
    if not isinstance(leaf, torch.Tensor) and tensor.ndim:
        return result.numpy()
    if not isinstance(leaf, torch.Tensor):
        number = result.item()
        return round(number) if whole and integers else number
    if whole:
        return result.round().to(tensor.device, torch.int64) if integers else result.to(tensor.device, torch.float32)
    return result.to(tensor.device, tensor.dtype)


def _numbers(value: Any, what: str) -> Any:
    if isinstance(value, Mapping):
        for key in sorted(value, key=str):
            yield from _numbers(value[key], what)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _numbers(each, what)
    elif isinstance(value, torch.Tensor | int | float | complex) or hasattr(value, "__array__"):
        yield value
    else:
        raise InputError(f"{what} takes numbers and tensors, not a {type(value).__name__}")


def _rebuilt(value: Any, results: Any) -> Any:
    if isinstance(value, Mapping):
        summed = {key: _rebuilt(value[key], results) for key in sorted(value, key=str)}
        return {key: summed[key] for key in value}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_rebuilt(each, results) for each in value))
    if isinstance(value, list | tuple):
        return type(value)(_rebuilt(each, results) for each in value)
    return next(results)


def _structure(value: Any) -> Any:
    if isinstance(value, Mapping):
        for key in sorted(value, key=str):
            yield str(key)
            yield from _structure(value[key])
    elif isinstance(value, list | tuple):
        yield len(value)
        for each in value:
            yield from _structure(each)


def gather(value: Any, session: Session) -> Any:
    """Return the tensors of all ranks joined in the order of the unsplit data, fillers left out.

    Args:
        value: A tensor, or a mapping, sequence or dataclass of tensors, with one row per sample of this rank's share
            of the batch in hand or, after the pass, of its shares of all batches of the pass.

    Returns:
        The same structure; its rows are those one process would have. Differentiable.

    Raises:
        InputError: The rows are neither those of the batch nor those of the pass.
    """
    if session.peers is None:
        return value

    def one(leaf: Any) -> Any:
        tensor = torch.as_tensor(leaf)
        joined = _gather_rows(tensor, session)
        return joined if isinstance(leaf, torch.Tensor) else joined.numpy()

    _require_rows(value)
    return map_leaves(one, value)


def _require_rows(value: Any) -> None:
    if isinstance(value, Mapping):
        for each in value.values():
            _require_rows(each)
    elif isinstance(value, list | tuple) and value and isinstance(value[0], torch.Tensor | Mapping | list | tuple):
        for each in value:
            _require_rows(each)
    elif not getattr(value, "ndim", 0) and not dataclasses.is_dataclass(value):
        raise InputError(
            f"nl.gather takes tensors with one row per sample, not a {type(value).__name__} without rows; for numbers "
            "there are nl.mean and nl.total"
        )


def _gather_rows(tensor: torch.Tensor, session: Session) -> torch.Tensor:
    batches = _batches_of(tensor, session)
    rank, size = session.part, session.parts
    # Rows this rank holds of each batch, a filler included, and rows each rank holds in truth.
    held = [max(len(share(batch.samples, rank, size)), 1) for batch in batches]
    real = [[len(share(batch.samples, r, size)) for r in range(size)] for batch in batches]
    if any(batch.filler for batch in batches):
        starts = [sum(held[:i]) for i in range(len(held))]
        keep = [s + k for s, batch, h in zip(starts, batches, held, strict=True) if not batch.filler for k in range(h)]
        tensor = tensor[torch.tensor(keep, dtype=torch.int64, device=tensor.device)]
    rows = [sum(each[r] for each in real) for r in range(size)]
    join: Any = _AllGather.apply if tensor.requires_grad else _exchange
    joined: torch.Tensor = join(tensor, rows, session)
    if len(batches) == 1:
        return joined
    # From one block per rank to one block per batch.
    offsets = [sum(rows[:r]) for r in range(size)]
    order: list[int] = []
    for counts in real:
        for r, count in enumerate(counts):
            order += range(offsets[r], offsets[r] + count)
            offsets[r] += count
    return joined[torch.tensor(order, dtype=torch.int64, device=joined.device)]


def _batches_of(tensor: torch.Tensor, session: Session) -> list[Batch]:
    """Return the batches that the rows belong to: the one in training, the one in hand, or all of the pass."""
    rows, training = tensor.shape[0], session.training_batch() if tensor.requires_grad else None
    if training is not None and max(training.mine, 1) == rows:
        return [training]
    if session.batch is None or session.passage is None:
        raise InputError("nl.gather puts rows in the order of the data, so hand the loader to nl.distribute first")
    choices = [[session.batch], session.passage.batches]
    if session.pass_over:
        choices.reverse()
    counts = []
    for batches in choices:
        counts.append(sum(max(batch.mine, 1) for batch in batches))
        if counts[-1] == rows:
            return batches
    names = ("the pass", "its last batch") if session.pass_over else ("the batch in hand", "the pass so far")
    raise InputError(
        f"nl.gather got {rows} rows on rank {session.rank}, where {names[0]} has {counts[0]} and {names[1]} "
        f"{counts[1]}; give it one row per sample"
    )


def _exchange(tensor: torch.Tensor, rows: list[int], session: Session) -> torch.Tensor:
    assert session.peers is not None
    carried = plain(tensor).cpu()
    boolean = carried.dtype == torch.bool
    parts = session.peers.all_gather_rows(carried.to(torch.uint8) if boolean else carried, rows, "nl.gather")
    joined = torch.cat(parts)
    return (joined.bool() if boolean else joined).to(tensor.device)


class _AllGather(torch.autograd.Function):
    """Joins the ranks' rows; the gradient of a row is what all ranks' losses say about it, by their weights."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, rows: list[int], session: Session) -> torch.Tensor:
        ctx.rows, ctx.session = rows, session
        return _exchange(tensor, rows, session)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        session: Session = ctx.session
        assert session.peers is not None
        scale = session.gradient_scale()
        summed = (gradient * scale if scale else torch.zeros_like(gradient)).cpu()
        session.peers.all_reduce(summed, "the gradient of nl.gather")
        start = sum(ctx.rows[: session.part])
        own = summed[start : start + ctx.rows[session.part]].to(gradient.device)
        return (own / scale if scale else torch.zeros_like(own)), None, None
