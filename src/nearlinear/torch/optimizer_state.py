"""Turning an optimizer into its state by the parameters' names and the state's keys, and that back into it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch

from nearlinear.checkpoint.documents import Json, decode, encode
from nearlinear.checkpoint.tensors import Array
from nearlinear.checkpoint.together import Change
from nearlinear.errors import CheckpointError
from nearlinear.torch.arrays import is_elsewhere, own_tensor
from nearlinear.torch.model_state import few
from nearlinear.torch.sharded_tensors import array_or_none, state_of

collecting: list[torch.optim.Optimizer] = []  # whose state is being read for a checkpoint, of all ranks
_NOT_OPTIONS = ("params", "param_names")


def optimizer_out(
    optimizer: torch.optim.Optimizer,
    label: str,
    path: tuple[str, ...],
    names: Mapping[int, str],
    arrays: dict[str, Array],
) -> Json:
    """Put the state's tensors into ``arrays`` and return the rest, by the parameters' names.

    Args:
        optimizer: The optimizer.
        label: What to call it in a message.
        path: The beginning of the arrays' names.
        names: The name of each parameter by its id; one that is not here goes by its place in its group.
        arrays: Where to put tensors.

    Raises:
        InputError: Something cannot be saved; the message names its place.
    """
    packed = _packed(optimizer)
    groups = _group_names(optimizer, names)
    name_of = {
        index: name
        for group, in_group in zip(packed["param_groups"], groups, strict=True)
        for index, name in zip(group["params"], in_group, strict=True)
    }
    own = {name_of[key]: value for key, value in packed["state"].items() if key in name_of}
    common = {key: value for key, value in packed["state"].items() if key not in name_of}
    rest = {key: value for key, value in packed.items() if key not in ("state", "param_groups")}
    return {
        "type": type(optimizer).__name__,
        "state": {
            name: encode(state, f"{label}'s state of {name!r}", (*path, name), arrays, array_or_none)
            for name, state in own.items()
        },
        "common": encode(common, f"{label}'s state", (*path, "common"), arrays, array_or_none),
        "rest": encode(rest, f"{label}'s state_dict()", (*path, "rest"), arrays, array_or_none),
        "groups": [
            {
                "shapes": {
                    name: list(parameter.shape) for name, parameter in zip(groups[i], group["params"], strict=True)
                },
                "options": encode(
                    {key: value for key, value in packed["param_groups"][i].items() if key not in _NOT_OPTIONS},
                    f"{label}.param_groups[{i}]",
                    (*path, f"group.{i}"),
                    arrays,
                    array_or_none,
                ),
            }
            for i, group in enumerate(optimizer.param_groups)
        ],
    }


def optimizer_in(
    optimizer: torch.optim.Optimizer, saved: Json, label: str, names: Mapping[int, str], arrays: Mapping[str, Array]
) -> Change:
    """Return the change that gives each parameter the state that was saved under its name.

    Args:
        optimizer: One of the kind that was saved; its groups may list parameters in another order.
        saved: What ``optimizer_out`` returned.
        label: What to call the saved one in a message.
        names: The name of each parameter by its id.
        arrays: The arrays, by name.

    Raises:
        CheckpointError: It is the state of another kind of optimizer, or of other groups.
    """
    if saved["type"] != type(optimizer).__name__:
        raise CheckpointError(
            f"the {label} is {saved['type']} and this one {type(optimizer).__name__}; load into the same kind"
        )
    groups = _matching_groups(optimizer, saved["groups"], label, names)

    def remember() -> Callable[[], None]:
        # load_state_dict puts new dicts in the place of these, so that holding on to them is enough.
        before = {"state": optimizer.state, "param_groups": optimizer.param_groups}
        return lambda: optimizer.__setstate__(before)

    def apply() -> None:
        packed = _packed(optimizer)
        state = decode(saved["common"], arrays, own_tensor)
        here = [p for group in optimizer.param_groups for p in group["params"]]
        indices = [index for group in packed["param_groups"] for index in group["params"]]
        in_order = [name for in_group in _group_names(optimizer, names) for name in in_group]
        for parameter, index, name in zip(here, indices, in_order, strict=True):
            if name in saved["state"] and not is_elsewhere(parameter):
                state[index] = decode(saved["state"][name], arrays, functools.partial(state_of, parameter=parameter))
        options = [_on_devices(decode(g["options"], arrays, own_tensor), now) for g, now in groups]
        kept = [{key: group[key] for key in _NOT_OPTIONS if key in group} for group in packed["param_groups"]]
        new = {"state": state, "param_groups": [{**o, **k} for o, k in zip(options, kept, strict=True)]}
        optimizer.load_state_dict({**new, **decode(saved["rest"], arrays, own_tensor)})
        if type(optimizer).load_state_dict is torch.optim.Optimizer.load_state_dict:
            for group, was in zip(optimizer.param_groups, packed["param_groups"], strict=True):
                for parameter, index in zip(group["params"], was["params"], strict=True):
                    if index in state:
                        optimizer.state[parameter] = _uncast(optimizer.state[parameter], state[index])

    return Change(remember, apply)


def _packed(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    collecting.append(optimizer)
    try:
        return optimizer.state_dict()
    finally:
        collecting.pop()


def _matching_groups(
    optimizer: torch.optim.Optimizer, saved: list[Json], label: str, names: Mapping[int, str]
) -> list[tuple[Json, dict[str, Any]]]:
    """Return for each group of the optimizer the saved one that holds the same parameters, in whatever order."""
    free = list(saved)
    pairs = []
    for i, (group, in_group) in enumerate(zip(optimizer.param_groups, _group_names(optimizer, names), strict=True)):
        # Several groups without parameters look alike; then the order decides.
        match = next((other for other in free if other["shapes"].keys() == set(in_group)), None)
        if match is None:
            there = {name for other in saved for name in other["shapes"]}
            strange = [name for name in in_group if name not in there]
            why = f"it has no {few(strange)}" if strange else f"it divides {few(in_group)} and others otherwise"
            raise CheckpointError(f"the {label} has no group like group {i} here: {why}; build the groups as saved")
        for name, parameter in zip(in_group, group["params"], strict=True):
            if match["shapes"][name] != list(parameter.shape):
                shape = tuple(match["shapes"][name])
                raise CheckpointError(
                    f"the {label} has {name!r} with shape {shape}, here it is {tuple(parameter.shape)}; "
                    "build the groups as saved"
                )
        free.remove(match)
        pairs.append((match, group))
    if free:
        raise CheckpointError(f"the {label} has a group more, of {few(free[0]['shapes'])}; build the groups as saved")
    return pairs


def _group_names(optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> list[list[str]]:
    """Return the names of each group's parameters; what is not in the model goes by its place."""
    return [
        [names.get(id(parameter), f"group.{i}.{j}") for j, parameter in enumerate(group["params"])]
        for i, group in enumerate(optimizer.param_groups)
    ]


def _on_devices(options: dict[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``options`` with their tensors (a learning rate, say) where the group's own are now."""
    return {
        key: value.to(now[key].device)
        if isinstance(value, torch.Tensor) and isinstance(now.get(key), torch.Tensor)
        else value
        for key, value in options.items()
    }


def _uncast(loaded: Any, saved: Any) -> Any:
    """Return ``loaded`` with the saved types: torch casts all but ``"step"`` to the parameter's, bfloat16 say."""
    if isinstance(loaded, torch.Tensor) and isinstance(saved, torch.Tensor):
        return loaded if loaded.dtype == saved.dtype else saved.to(loaded.device)
    if isinstance(loaded, dict):
        return {key: _uncast(value, saved.get(key)) for key, value in loaded.items()}
    if isinstance(loaded, list | tuple):
        return type(loaded)(_uncast(value, other) for value, other in zip(loaded, saved, strict=True))
    return loaded
