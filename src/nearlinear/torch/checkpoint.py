"""Turning model, optimizer, loader, extras and random streams into one checkpoint, and a checkpoint back into them.

    model.safetensors       the plain model's keys; a tied weight once
    optimizer.safetensors   <parameter's name>/<state's key>
    extra.safetensors       <keyword>/<place in the value>
    state.json              the rest: which tensor is where, hyperparameters, numbers, random streams of every rank

Saving, rank 0 writes and the others wait for its verdict; of a sharded tensor they send it their rows, one tensor at a
time, when it comes to write it. Loading, every rank reads and checks everything; only when
all agree does any of them change anything; and if a change fails on one, all take theirs back.
"""

from __future__ import annotations

import contextlib
import copy
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import torch
from torch import nn

from nearlinear.checkpoint import folder
from nearlinear.checkpoint.documents import Json, decode, encode
from nearlinear.checkpoint.tensors import Array, Buffer
from nearlinear.checkpoint.together import Alone, Change, Ranks, change_all, on_all, require_one_checkpoint
from nearlinear.errors import CheckpointError, InputError
from nearlinear.torch import random_streams
from nearlinear.torch.arrays import own_tensor
from nearlinear.torch.model_state import few, modules_in, modules_out, parameter_names
from nearlinear.torch.optimizer_state import optimizer_in, optimizer_out
from nearlinear.torch.session import Session
from nearlinear.torch.sharded_tensors import ShardedArray, array_or_none, is_sharded

T = TypeVar("T")
PathLike = str | os.PathLike[str]


def save(
    path: PathLike,
    model: Any,
    optimizer: Any = None,
    loader: Any = None,
    extra: Mapping[str, Any] | None = None,
    *,
    ranks: Ranks | None = None,
) -> None:
    """Write a checkpoint; every rank calls it, and none returns before it is whole.

    Args:
        path: The folder. It may hold an older checkpoint, which is replaced at one stroke.
        model: A module, or a list or dict of them.
        optimizer: An optimizer, or a list or dict of them.
        loader: What has ``state_dict`` and ``load_state_dict`` and knows the place in the data, or a list or dict.
        extra: By keyword: modules, what has ``state_dict`` and ``load_state_dict`` (a scheduler, say), and plain
            values. Rank 0's are saved.
        ranks: The processes that save together; None for this one alone.

    Raises:
        InputError: Something cannot be saved; the message names its place. The disk is as before.
        CheckpointError: The disk is full or refuses, or another rank failed. The checkpoint that was there is whole.
    """
    ranks = ranks or Alone()
    what = f"saving {os.fspath(path)}"
    if isinstance(ranks, Session):
        ranks.settle(what)
    positions = ranks.all_gather_json(random_streams.capture(), what)

    def collect() -> tuple[dict[str, dict[str, Array]], Json]:
        if ranks.rank == 0:
            return _collect(model, optimizer, loader, extra or {}, positions)
        # Of the others only sharded tensors are asked for.
        modules = {name: value for name, value in (extra or {}).items() if isinstance(value, nn.Module)}
        return _collect(model, optimizer, None, modules, []) if _any_sharded(model, modules) else ({}, None)

    arrays, state = on_all(ranks, what, collect)
    arrays, state = on_all(ranks, what, lambda: from_all_stages(ranks, what, model, optimizer, arrays, state))
    shared = any(isinstance(array, ShardedArray) for named in arrays.values() for array in named.values())

    def write() -> None:
        if ranks.rank == 0:
            with _lending(ranks, what, arrays if shared else {}) as lent:
                folder.write(path, {**arrays, **lent}, {"state": state}, {"format": "pt"})
        elif shared:
            _lend(ranks, what, arrays)

    on_all(ranks, what, write)


def load(
    path: PathLike,
    model: Any,
    optimizer: Any = None,
    loader: Any = None,
    extra: Mapping[str, Any] | None = None,
    *,
    ranks: Ranks | None = None,
) -> dict[str, Any]:
    """Read a checkpoint into the objects given, in place, on any number of ranks; every rank calls it.

    Tensors are copied into the model's own, on their devices. Python's, NumPy's and torch's random streams continue
    where they were. If the load fails on any rank, everything is as it was on all of them.

    Args:
        path: The folder.
        model: As it was saved: a module, or a list or dict of them.
        optimizer: As it was saved, or None to leave the optimizer's part. Its groups may list parameters in another
            order.
        loader: As it was saved, or None to leave the place in the data.
        extra: By keyword: the modules and stateful objects to restore.
        ranks: The processes that load together; None for this one alone.

    Returns:
        The plain values among the extras.

    Raises:
        InputError: An argument cannot be loaded into.
        CheckpointError: There is no checkpoint, it is damaged, or it is one of something else; the message names the
            first difference.
    """
    ranks = ranks or Alone()
    what = f"loading {os.fspath(path)}"
    identity, values, changes = on_all(
        ranks, what, lambda: _prepare(path, model, optimizer, loader, extra or {}, ranks.rank)
    )
    require_one_checkpoint(ranks, what, os.fspath(path), identity)
    change_all(ranks, what, changes)
    return values


def _collect(
    model: Any, optimizer: Any, loader: Any, extra: Mapping[str, Any], positions: list[Json]
) -> tuple[dict[str, dict[str, Array]], Json]:
    """Return what is to be written; no tensor's bytes have been asked for yet."""
    modules = _modules(model)
    weights: dict[str, Array] = {}
    moments: dict[str, Array] = {}
    others: dict[str, Array] = {}
    state = {
        "model": modules_out(modules, "model", (), weights, others),
        "optimizer": {
            name: optimizer_out(each, _label("optimizer", name), _path(name), parameter_names(modules), moments)
            for name, each in _optimizers(optimizer).items()
        },
        "loader": {
            name: encode(each.state_dict(), _label("loader", name), _path("loader", name), others, array_or_none)
            for name, each in _loaders(loader).items()
        },
        "extra": {name: _extra_out(value, f"extra[{name!r}]", name, others) for name, value in extra.items()},
        "streams": positions,
    }
    return {"model": weights, "optimizer": moments, "extra": others}, state


def from_all_stages(
    ranks: Ranks, what: str, model: Any, optimizer: Any, arrays: dict[str, dict[str, Array]], state: Json
) -> tuple[dict[str, dict[str, Array]], Json]:
    """Return rank 0's state with that of optimizers whose parameters lie on other ranks of a pipeline."""
    values = _values_of_pipelines()
    if values is None or optimizer is None:
        return arrays, state
    mine: dict[str, Array] = {}
    names = parameter_names(_modules(model))
    states = {
        name: optimizer_out(each, _label("optimizer", name), _path(name), names, mine)["state"]
        for name, each in _optimizers(optimizer).items()
    }
    for name, array in mine.items():
        values.offer(f"to be saved: {name}", lambda array=array: _bytes(array))
    facts = {name: [array.dtype, array.shape] for name, array in mine.items()}
    everyones = ranks.all_gather_json([states, facts], what)
    if ranks.rank > 0:
        return arrays, state
    moments = dict(arrays["optimizer"])
    for rank, (theirs, made) in enumerate(everyones):
        for name, by_parameter in theirs.items():
            state["optimizer"][name]["state"] = by_parameter | state["optimizer"][name]["state"]
        for name, (dtype, shape) in made.items():
            moments.setdefault(name, Array(dtype, tuple(shape), _asked(values, rank, name)))
    return {**arrays, "optimizer": moments}, state


def _values_of_pipelines() -> Any:
    """Return what asks other ranks for values; None where no model runs in a pipeline (nor was that imported)."""
    train = sys.modules.get("nearlinear.torch.pipeline.train")
    served = list(train._served.values()) if train is not None else []
    return served[0] if served else None


def _bytes(array: Array) -> torch.Tensor:
    return torch.frombuffer(array.data(), dtype=torch.uint8) if array.nbytes else torch.empty(0, dtype=torch.uint8)


def _asked(values: Any, rank: int, name: str) -> Callable[[], Buffer]:
    return lambda: values.fetch(rank, f"to be saved: {name}").numpy().data


def _any_sharded(model: Any, modules: Mapping[str, Any]) -> bool:
    everything = [*_modules(model).values(), *modules.values()]
    return any(is_sharded(parameter) for module in everything for parameter in module.parameters())


@contextlib.contextmanager
def _lending(
    ranks: Ranks, what: str, arrays: Mapping[str, Mapping[str, Array]]
) -> Iterator[dict[str, dict[str, Array]]]:
    """Yield ``arrays``, of which asking for a sharded one's bytes tells the other ranks; in the end tell them so."""

    def lent(group: str, name: str, array: Array) -> Array:
        if not isinstance(array, ShardedArray):
            return array

        def data() -> Buffer:
            ranks.all_gather_json([group, name], what)
            return array.data()

        return Array(array.dtype, array.shape, data)

    try:
        yield {
            group: {name: lent(group, name, array) for name, array in named.items()} for group, named in arrays.items()
        }
    finally:
        if arrays:
            ranks.all_gather_json(None, what)


def _lend(ranks: Ranks, what: str, arrays: Mapping[str, Mapping[str, Array]]) -> None:
    """Take part in gathering each sharded tensor that rank 0 asks for, until it says that it is over."""
    while (asked := ranks.all_gather_json(None, what)[0]) is not None:
        group, name = asked
        arrays[group][name].data()


def _prepare(
    path: PathLike, model: Any, optimizer: Any, loader: Any, extra: Mapping[str, Any], rank: int
) -> tuple[str, dict[str, Any], list[Change]]:
    """Return the checkpoint's identity, its plain values and what a load will do, after checking that it can."""
    modules, optimizers, loaders = _modules(model), _optimizers(optimizer), _loaders(loader)
    saved = folder.read(path)
    if "state" not in saved.documents or not {"model", "optimizer", "extra"} <= saved.arrays.keys():
        raise CheckpointError(f"{os.fspath(path)} was not saved by nearlinear's PyTorch side; load another checkpoint")
    state, others = saved.documents["state"], saved.arrays["extra"]
    where = os.fspath(path)
    weights = modules_in(modules, state["model"], saved.arrays["model"], others, "model", where)
    changes = []
    for name, each in _same_names(optimizers, state["optimizer"], "optimizer", where).items():
        moments = saved.arrays["optimizer"]
        label = f"{_label('optimizer', name)} in {where}"
        changes.append(optimizer_in(each, state["optimizer"][name], label, parameter_names(modules), moments))
    for name, each in _same_names(loaders, state["loader"], "loader", where).items():
        changes.append(_stateful_in(each, state["loader"][name], others))
    values = {
        name: decode(entry["value"], others, own_tensor)
        for name, entry in state["extra"].items()
        if entry["kind"] == "value" and name not in extra
    }
    for name, target in extra.items():
        changes.append(_extra_in(target, name, state["extra"], others, where))
    positions = Change(random_streams.remember, lambda: random_streams.restore(state["streams"], rank))
    return saved.identity, values, [*changes, weights, positions]


# ---- several of a kind


def _named(thing: Any) -> dict[str, Any]:
    """Return one object as ``{"": object}``, a list by its indices, a dict by its keys, None as nothing."""
    if thing is None:
        return {}
    if isinstance(thing, list | tuple):
        return {str(i): each for i, each in enumerate(thing)}
    return {str(key): each for key, each in thing.items()} if isinstance(thing, dict) else {"": thing}


def _label(kind: str, name: str) -> str:
    return f"{kind}[{name!r}]" if name else kind


def _path(*names: str) -> tuple[str, ...]:
    return tuple(name for name in names if name)


def _modules(model: Any) -> dict[str, nn.Module]:
    """Return the plain modules in ``model``: what DataParallel and torch.compile wrapped."""
    modules = {}
    for name, module in ({"": None} if model is None else _named(model)).items():
        if not isinstance(module, nn.Module):
            raise InputError(f"{_label('model', name)} is of type {type(module).__name__}; give a torch.nn.Module")
        inside: Any = module
        while isinstance(inside, nn.Module):
            module = inside
            parallel = isinstance(module, nn.DataParallel | nn.parallel.DistributedDataParallel)
            inside = module.module if parallel else getattr(module, "_orig_mod", None)
        modules[name] = module
    return modules


def _optimizers(optimizer: Any) -> dict[str, torch.optim.Optimizer]:
    optimizers = _named(optimizer)
    for name, each in optimizers.items():
        if not isinstance(each, torch.optim.Optimizer):
            label = _label("optimizer", name)
            raise InputError(f"{label} is of type {type(each).__name__}; give a torch.optim.Optimizer")
    return optimizers


def _loaders(loader: Any) -> dict[str, Any]:
    loaders = _named(loader)
    for name, each in loaders.items():
        if not _is_stateful(each):
            raise InputError(
                f"{_label('loader', name)} is of type {type(each).__name__} and has no state_dict() and "
                "load_state_dict(); give the loader that nl.distribute returned"
            )
    return loaders


def _is_stateful(value: Any) -> bool:
    if isinstance(value, type):
        return False
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


def _same_names(given: dict[str, T], saved: Mapping[str, Json], kind: str, where: str) -> dict[str, T]:
    """Return ``given`` if it is nothing or as many objects, under the same names, as were saved."""
    if given and given.keys() != saved.keys():
        there, here = (", ".join(_label(kind, name) for name in names) or f"no {kind}" for names in (saved, given))
        raise CheckpointError(f"{where} holds {there}, and {here} is to be loaded; give what was saved")
    return given


# ---- extras


def _extra_out(value: Any, label: str, name: str, arrays: dict[str, Array]) -> Json:
    if isinstance(value, nn.Module):
        return {"kind": "module", **modules_out(_modules(value), label, (name,), arrays, arrays)}
    kind = "state" if _is_stateful(value) else "value"
    plain = value.state_dict() if kind == "state" else value
    return {"kind": kind, "value": encode(plain, label, (name,), arrays, array_or_none)}


def _extra_in(target: Any, name: str, saved: Mapping[str, Json], arrays: Mapping[str, Array], where: str) -> Change:
    kind = "module" if isinstance(target, nn.Module) else "state" if _is_stateful(target) else "value"
    if kind == "value":
        raise InputError(
            f"{name} is of type {type(target).__name__} and nothing to load into; leave it out, load(...) returns the "
            f"saved one: extras[{name!r}]"
        )
    if name not in saved:
        raise CheckpointError(f"{where} has no extra {name!r}; it has {few(saved) or 'none'}")
    if saved[name]["kind"] != kind:
        kinds = {"module": "a module", "state": "an object with a state_dict", "value": "a plain value"}
        raise CheckpointError(f"{where} has {kinds[saved[name]['kind']]} as {name!r}, here it is {kinds[kind]}")
    if kind == "module":
        return modules_in(_modules(target), saved[name], arrays, arrays, f"extra[{name!r}]", where)
    return _stateful_in(target, saved[name]["value"], arrays)


def _stateful_in(target: Any, saved: Json, arrays: Mapping[str, Array]) -> Change:
    state = decode(saved, arrays, own_tensor)

    def remember() -> Callable[[], None]:
        before = copy.deepcopy(target.state_dict())
        return lambda: target.load_state_dict(before)

    return Change(remember, lambda: target.load_state_dict(state))
