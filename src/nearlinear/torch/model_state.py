"""Turning modules into a checkpoint's model, by the plain model's keys, and a checkpoint's model back into them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from nearlinear.checkpoint.documents import Json, decode, encode, free_name
from nearlinear.checkpoint.tensors import Array
from nearlinear.checkpoint.together import Change
from nearlinear.errors import CheckpointError, InputError
from nearlinear.torch.arrays import DTYPES, check_plain, own_tensor
from nearlinear.torch.sharded_tensors import (
    array_of,
    array_or_none,
    copy_of,
    is_sharded,
    local,
    memory,
    state_dict,
    tensor_for,
)


def modules_out(
    modules: Mapping[str, nn.Module],
    label: str,
    path: tuple[str, ...],
    arrays: dict[str, Array],
    rest: dict[str, Array],
) -> Json:
    """Put tensors into ``arrays``; return which key is in which array, and what is no tensor (``get_extra_state``).

    Args:
        modules: By name; ``""`` for a model that is one module.
        label: What to call it in a message.
        path: The beginning of the arrays' names.
        arrays: Where to put the tensors that ``state_dict`` lists.
        rest: Where to put those within what is no tensor.

    Raises:
        InputError: Something cannot be saved; the message names its place.
    """
    tensors: dict[str, str] = {}
    other: dict[str, Any] = {}
    stored: dict[Any, str] = {}
    for key, value in _values(modules).items():
        if not isinstance(value, torch.Tensor):
            other[key] = value
            continue
        array = array_of(value, f"{label}[{key!r}]")  # first of all, because it refuses what has no address
        place = memory(value)
        if place not in stored:
            stored[place] = free_name((*path, key), arrays)
            arrays[stored[place]] = array
        tensors[key] = stored[place]
    return {"tensors": tensors, "other": encode(other, label, (*path, "other"), rest, array_or_none)}


def modules_in(
    modules: Mapping[str, nn.Module],
    saved: Json,
    arrays: Mapping[str, Array],
    rest: Mapping[str, Array],
    label: str,
    where: str,
) -> Change:
    """Return the change that puts what ``modules_out`` returned into ``modules``, after checking that it fits.

    Args:
        modules: By name, as they were saved.
        saved: What ``modules_out`` returned.
        arrays: The arrays, by name.
        rest: Those within what is no tensor.
        label: What to call it in a message.
        where: The checkpoint's path.

    Raises:
        InputError: A tensor of the modules cannot be loaded into.
        CheckpointError: It is the checkpoint of another model; the message names the first difference.
    """
    tensors, other = saved["tensors"], saved["other"]
    _check_modules(modules, {key: arrays[name] for key, name in tensors.items()}, tensors, other, label, where)
    keys = _plain_keys(modules)

    def states() -> dict[str, Any]:
        return {name: state_dict(module) for name, module in modules.items()}

    def put(all_states: dict[str, Any]) -> None:
        for name, module in modules.items():
            module.load_state_dict(all_states[name])

    def remember() -> Callable[[], None]:
        before = states()
        for state in before.values():
            for key, value in state.items():
                state[key] = copy_of(value) if isinstance(value, torch.Tensor) else copy.deepcopy(value)
        return lambda: put(before)

    def apply() -> None:
        new = states()  # the model's own dicts, because they carry versions that load_state_dict looks at
        for plain, (name, key) in keys.items():
            if plain not in tensors:
                new[name][key] = decode(other[plain], rest, own_tensor)
            elif _is_extra_state(plain):  # the model keeps it
                new[name][key] = own_tensor(arrays[tensors[plain]])
            else:
                new[name][key] = tensor_for(arrays[tensors[plain]], new[name][key])
        put(new)

    return Change(remember, apply)


def _check_modules(
    modules: Mapping[str, nn.Module],
    saved: Mapping[str, Array],
    places: Mapping[str, str],
    other: Mapping[str, Json],
    label: str,
    where: str,
) -> None:
    here = _values(modules)
    said = []
    for key, value in here.items():
        if isinstance(value, torch.Tensor):
            check_plain(local(value) if is_sharded(value) else value, f"{label}[{key!r}]")
        if key not in saved or not isinstance(value, torch.Tensor) or _is_extra_state(key):
            continue
        shape, dtype = saved[key].shape, DTYPES[saved[key].dtype]
        if shape != tuple(value.shape) or dtype != value.dtype:
            said.append(f"{key!r} is {shape} {dtype} in it and {tuple(value.shape)} {value.dtype} here")
            break
    missing = [key for key in here if key not in saved and key not in other]
    unknown = [key for key in (*saved, *other) if key not in here]
    said += [f"it has no {few(missing)}"] * bool(missing) + [f"only it has {few(unknown)}"] * bool(unknown)
    if said:
        raise CheckpointError(
            f"{where} is the checkpoint of another {label}: {'; '.join(said)}; build the {label} as it was when saved"
        )
    first: dict[Any, str] = {}
    for key in saved:
        if isinstance(here[key], torch.Tensor):
            twin = first.setdefault(memory(here[key]), key)
            if places[twin] != places[key]:
                raise CheckpointError(
                    f"{key!r} and {twin!r} are one tensor here and two in {where}; build the {label} as it was "
                    "when saved"
                )


def _is_extra_state(key: str) -> bool:
    return key.split(".")[-1] == "_extra_state"


def parameter_names(modules: Mapping[str, nn.Module]) -> dict[int, str]:
    """Return the name of each parameter by its id."""
    return {
        id(parameter): _plain(f"{name}.{key}" if name else key)
        for name, module in modules.items()
        for key, parameter in module.named_parameters()
    }


def _plain_keys(modules: Mapping[str, nn.Module]) -> dict[str, tuple[str, str]]:
    """Return each key as the plain model has it -> the module's name, and the key in the module's ``state_dict``."""
    keys: dict[str, tuple[str, str]] = {}
    for name, module in modules.items():
        for key in state_dict(module):
            plain = _plain(f"{name}.{key}" if name else key)
            if plain in keys:
                raise InputError(f"two of the model's tensors are called {plain!r}; rename one")
            keys[plain] = name, key
    return keys


def _plain(key: str) -> str:
    """Return ``key`` without what torch.compile put into it, which may be in the middle: ``block._orig_mod.weight``."""
    return key.replace("_orig_mod.", "")


def _values(modules: Mapping[str, nn.Module]) -> dict[str, Any]:
    states = {name: state_dict(module) for name, module in modules.items()}
    return {plain: states[name][key] for plain, (name, key) in _plain_keys(modules).items()}


def few(names: Iterable[str]) -> str:
    """Return the first three names, and how many more there are."""
    names = list(names)
    return ", ".join(repr(name) for name in names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
