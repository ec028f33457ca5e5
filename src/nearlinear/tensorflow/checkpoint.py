"""Turning model, optimizer, data set, extras and random streams into one checkpoint, and a checkpoint back into them.

    model.safetensors       every variable of the model under its path
    optimizer.safetensors   every variable of its optimizer under its path
    extra.safetensors       <keyword>/<place in the value>
    state.json              the rest: the place in the data, numbers, random streams of every rank

All ranks of strategy ``data`` hold the same, so rank 0 writes. Loading, every rank reads and checks everything; only
when all agree does any of them change anything.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from nearlinear.checkpoint import folder, streams
from nearlinear.checkpoint.documents import Json, decode, encode, free_name
from nearlinear.checkpoint.tensors import Array
from nearlinear.checkpoint.together import Alone, Change, Ranks, change_all, on_all, require_one_checkpoint
from nearlinear.errors import CheckpointError, InputError
from nearlinear.tensorflow.session import Session
from nearlinear.tensorflow.state import is_seed, separated

PathLike = str | os.PathLike[str]
_DTYPES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "bool": "BOOL",
    "int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8",
    "uint64": "U64", "uint32": "U32", "uint16": "U16", "uint8": "U8",
}  # fmt: skip


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
        model: A Keras model, or a dict of them. A compiled one's optimizer is saved with it.
        optimizer: An optimizer, or a dict of them.
        loader: A data set that ``nl.distribute`` returned.
        extra: By keyword: numbers, strings, arrays, tensors, lists and dicts. Rank 0's are saved.
        ranks: The processes that save together; None for this one alone.

    Raises:
        InputError: Something cannot be saved; the message names it. The disk is as before.
        CheckpointError: The disk is full or refuses, or another rank failed. The checkpoint that was there is whole.
    """
    ranks = ranks or Alone()
    what = f"saving {os.fspath(path)}"
    if isinstance(ranks, Session):
        ranks.settle(what)
    positions = ranks.all_gather_json(streams.capture(), what)

    def write() -> None:
        if ranks.rank:
            return
        others: dict[str, Array] = {}
        kept = {
            name: encode(value, f"extra[{name!r}]", (name,), others, _tensor) for name, value in (extra or {}).items()
        }
        arrays = {
            "model": {name: _array(variable) for name, variable in _variables(_models(model)).items()},
            "optimizer": {
                name: _array(variable) for name, variable in _variables(_optimizers(model, optimizer)).items()
            },
            "extra": others,
        }
        place = None if loader is None else loader.state_dict()
        state = {"front end": "keras", "loader": place, "extra": kept, "streams": positions}
        folder.write(path, arrays, {"state": state}, {"format": "keras"})

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

    Args:
        path: The folder.
        model: As it was saved, built.
        optimizer: As it was saved; a compiled model's comes with it.
        loader: As it was saved, or None to leave the place in the data.
        extra: Nothing: of Keras's objects, none but these have a state to restore.
        ranks: The processes that load together; None for this one alone.

    Returns:
        The extras.

    Raises:
        CheckpointError: There is no checkpoint, it is damaged, or it is one of something else; the message names the
            first difference. Nothing was changed.
    """
    ranks = ranks or Alone()
    what = f"loading {os.fspath(path)}"
    if extra:
        raise InputError(f"{next(iter(extra))} cannot be restored in place; load(...) returns what was saved under it")

    def prepare() -> tuple[str, dict[str, Any], list[Change]]:
        saved = folder.read(path)
        state = saved.documents.get("state", {})
        if state.get("front end") != "keras":
            raise CheckpointError(f"{os.fspath(path)} was not saved from a Keras model; load another checkpoint")
        models, optimizers = _models(model), _optimizers(model, optimizer)
        for each in optimizers.values():
            if not each.built:
                each.build([variable for one in models.values() for variable in one.trainable_variables])
        changes = [
            *_assignments(_variables(models), saved.arrays["model"], "model", os.fspath(path), ranks.rank),
            *_assignments(_variables(optimizers), saved.arrays["optimizer"], "optimizer", os.fspath(path), ranks.rank),
        ]
        if loader is not None:
            if state["loader"] is None:
                raise CheckpointError(f"{os.fspath(path)} holds no place in the data; give no loader")
            changes.append(Change(lambda: _returning(loader), lambda: loader.load_state_dict(state["loader"])))
        changes.append(Change(_remember_streams, lambda: _restore_streams(state["streams"], ranks.rank)))
        values = {name: decode(each, saved.arrays["extra"], _own_tensor) for name, each in state["extra"].items()}
        return saved.identity, values, changes

    identity, values, changes = on_all(ranks, what, prepare)
    require_one_checkpoint(ranks, what, os.fspath(path), identity)
    change_all(ranks, what, changes)
    return values


def _models(model: Any) -> dict[str, keras.Model]:
    models = model if isinstance(model, dict) else {"": model}
    for name, each in models.items():
        if not isinstance(each, keras.Model):
            raise InputError(f"model {name or ''} is a {type(each).__name__}; give a Keras model, or a dict of them")
        if not each.variables:
            raise InputError(f"model {each.name} is not built and has no variables; call it on a batch first")
    return models


def _optimizers(model: Any, optimizer: Any) -> dict[str, Any]:
    if optimizer is not None:
        return optimizer if isinstance(optimizer, dict) else {"": optimizer}
    held = {name: getattr(each, "optimizer", None) for name, each in _models(model).items()}
    return {name: each for name, each in held.items() if each is not None}


def _variables(owners: Mapping[str, Any]) -> dict[str, Any]:
    """Return all variables by name; those of one path are told apart by their order."""
    named: dict[str, Any] = {}
    for name, owner in owners.items():
        for variable in owner.variables:
            named[free_name(tuple(part for part in (name, variable.path) if part), named)] = variable
    return named


def _array(variable: Any) -> Array:
    return _numpy_as_array(variable.numpy(), variable.path)


def _numpy_as_array(value: Any, label: str) -> Array:
    dtype = _DTYPES.get(str(value.dtype))
    if dtype is None:
        raise InputError(f"{label} has type {value.dtype}, which a checkpoint cannot hold; convert it first")
    plain = np.ascontiguousarray(value)
    return Array(dtype, tuple(value.shape), lambda: plain.reshape(-1).view(np.uint8).data)


def _tensor(value: object, label: str) -> Array | None:
    return _numpy_as_array(value.numpy(), label) if isinstance(value, tf.Tensor | tf.Variable) else None


def _own_tensor(array: Array) -> tf.Tensor:
    return tf.constant(_values(array, next(name for name, code in _DTYPES.items() if code == array.dtype)))


def _values(array: Array, dtype: str) -> Any:
    return np.frombuffer(array.data(), tf.as_dtype(dtype).as_numpy_dtype).reshape(array.shape)


def _assignments(
    variables: Mapping[str, Any], saved: Mapping[str, Array], kind: str, where: str, rank: int
) -> list[Change]:
    """Return what makes the variables what was saved, after checking that it can."""
    missing = [name for name in variables if name not in saved]
    beyond = [name for name in saved if name not in variables]
    if missing or beyond:
        there = f"{beyond[0]}, which the {kind} has not" if beyond else f"no {missing[0]}"
        raise CheckpointError(
            f"{where} is of another {kind}: it holds {there} ({len(beyond)} more and {len(missing)} fewer variables)"
        )
    changes = []
    for name, variable in variables.items():
        array = saved[name]
        have = _DTYPES.get(str(variable.dtype)), tuple(variable.shape)
        if (array.dtype, tuple(array.shape)) != have:
            raise CheckpointError(
                f"{where} is of another {kind}: {name} is {array.dtype} {list(array.shape)} there and "
                f"{have[0]} {list(have[1])} here"
            )
        changes.append(Change(_remember(variable), _assigning(variable, array, rank)))
    return changes


def _assigning(variable: Any, array: Array, rank: int) -> Callable[[], None]:
    def assign() -> None:
        value = _values(array, str(variable.dtype))
        variable.assign(separated(value, rank) if is_seed(variable) else value)

    return assign


def _remember(variable: Any) -> Callable[[], Callable[[], None]]:
    def remember() -> Callable[[], None]:
        before = variable.numpy().copy()
        return lambda: variable.assign(before)

    return remember


def _returning(loader: Any) -> Callable[[], None]:
    before = loader.state_dict()
    return lambda: loader.load_state_dict(before)


def _remember_streams() -> Callable[[], None]:
    before = streams.capture()
    return lambda: streams.restore(before)


def _restore_streams(saved: list[Json], rank: int) -> None:
    if rank < len(saved):
        streams.restore(saved[rank])
    else:
        streams.reseed(streams.derived_seed(saved[0], rank))
