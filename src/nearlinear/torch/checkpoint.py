"""Turning model, optimizer, loader, extras and random streams into one checkpoint, and a checkpoint back into them.

    model.safetensors       the plain model's keys; a tied weight once
    optimizer.safetensors   <parameter's name>/<state's key>
    extra.safetensors       <keyword>/<place in the value>
    state.json              the rest: which tensor is where, hyperparameters, numbers, random streams of every rank

Saving, rank 0 writes and the others wait for its verdict. Loading, every rank reads and checks everything; only when
all agree does any of them change anything; and if a change fails on one, all take theirs back.
"""

from __future__ import annotations

import base64
import copy
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from nearlinear.checkpoint import folder, streams
from nearlinear.checkpoint.documents import Json, decode, encode, free_name
from nearlinear.checkpoint.tensors import Array
from nearlinear.checkpoint.together import Alone, Change, Ranks, change_all, on_all
from nearlinear.errors import CheckpointError, InputError

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
    positions = ranks.all_gather_json(_capture_streams(), what)

    def write() -> None:
        if ranks.rank == 0:
            _write(path, model, optimizer, loader, extra or {}, positions)

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
    for rank, other in enumerate(ranks.all_gather_json(identity, what)):
        if other != identity:
            raise CheckpointError(
                f"ranks {ranks.rank} and {rank} found different checkpoints at {os.fspath(path)}; "
                "copy one to all machines, or use a path that they share"
            )
    change_all(ranks, what, changes)
    return values


def _write(
    path: PathLike, model: Any, optimizer: Any, loader: Any, extra: Mapping[str, Any], positions: list[Json]
) -> None:
    modules = _modules(model)
    weights: dict[str, Array] = {}
    moments: dict[str, Array] = {}
    others: dict[str, Array] = {}
    state = {
        "model": _modules_out(modules, "model", (), weights, others),
        "optimizer": {
            name: _optimizer_out(each, _label("optimizer", name), _path(name), _names(modules), moments)
            for name, each in _optimizers(optimizer).items()
        },
        "loader": {
            name: encode(each.state_dict(), _label("loader", name), _path("loader", name), others, _array_or_none)
            for name, each in _loaders(loader).items()
        },
        "extra": {name: _extra_out(value, f"extra[{name!r}]", name, others) for name, value in extra.items()},
        "streams": positions,
    }
    arrays = {"model": weights, "optimizer": moments, "extra": others}
    folder.write(path, arrays, {"state": state}, {"format": "pt"})


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
    weights = _modules_in(modules, state["model"], saved.arrays["model"], others, "model", where)
    changes = []
    for name, each in _same_names(optimizers, state["optimizer"], "optimizer", where).items():
        moments = saved.arrays["optimizer"]
        label = f"{_label('optimizer', name)} in {where}"
        changes.append(_optimizer_in(each, state["optimizer"][name], label, _names(modules), moments))
    for name, each in _same_names(loaders, state["loader"], "loader", where).items():
        changes.append(_stateful_in(each, state["loader"][name], others))
    values = {
        name: decode(entry["value"], others, _own_tensor)
        for name, entry in state["extra"].items()
        if entry["kind"] == "value" and name not in extra
    }
    for name, target in extra.items():
        changes.append(_extra_in(target, name, state["extra"], others, where))
    positions = Change(_remember_streams, lambda: _restore_streams(state["streams"], rank))
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


# ---- modules


def _plain_keys(modules: Mapping[str, nn.Module]) -> dict[str, tuple[str, str]]:
    """Return each key as the plain model has it -> the module's name, and the key in the module's ``state_dict``."""
    keys: dict[str, tuple[str, str]] = {}
    for name, module in modules.items():
        for key in module.state_dict():
            plain = _plain(f"{name}.{key}" if name else key)
            if plain in keys:
                raise InputError(f"two of the model's tensors are called {plain!r}; rename one")
            keys[plain] = name, key
    return keys


def _plain(key: str) -> str:
    """Return ``key`` without what torch.compile put into it, which may be in the middle: ``block._orig_mod.weight``."""
    return key.replace("_orig_mod.", "")


def _names(modules: Mapping[str, nn.Module]) -> dict[int, str]:
    """Return the name of each parameter by its id."""
    return {
        id(parameter): _plain(f"{name}.{key}" if name else key)
        for name, module in modules.items()
        for key, parameter in module.named_parameters()
    }


def _values(modules: Mapping[str, nn.Module]) -> dict[str, Any]:
    states = {name: module.state_dict() for name, module in modules.items()}
    return {plain: states[name][key] for plain, (name, key) in _plain_keys(modules).items()}


def _memory(tensor: torch.Tensor) -> Any:
    """Return what two tensors have in common exactly if they are one: a tied weight under two names."""
    if tensor.numel() == 0:
        return id(tensor)
    return tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


def _modules_out(
    modules: Mapping[str, nn.Module],
    label: str,
    path: tuple[str, ...],
    arrays: dict[str, Array],
    rest: dict[str, Array],
) -> Json:
    """Put tensors into ``arrays``; return which key is in which array, and what is no tensor (``get_extra_state``)."""
    tensors: dict[str, str] = {}
    other: dict[str, Any] = {}
    stored: dict[Any, str] = {}
    for key, value in _values(modules).items():
        if not isinstance(value, torch.Tensor):
            other[key] = value
            continue
        array = _array(value, f"{label}[{key!r}]")  # first of all, because it refuses what has no address
        memory = _memory(value)
        if memory not in stored:
            stored[memory] = free_name((*path, key), arrays)
            arrays[stored[memory]] = array
        tensors[key] = stored[memory]
    return {"tensors": tensors, "other": encode(other, label, (*path, "other"), rest, _array_or_none)}


def _modules_in(
    modules: Mapping[str, nn.Module],
    saved: Json,
    arrays: Mapping[str, Array],
    rest: Mapping[str, Array],
    label: str,
    where: str,
) -> Change:
    tensors, other = saved["tensors"], saved["other"]
    _check_modules(modules, {key: arrays[name] for key, name in tensors.items()}, tensors, other, label, where)
    keys = _plain_keys(modules)

    def states() -> dict[str, Any]:
        return {name: module.state_dict() for name, module in modules.items()}

    def put(all_states: dict[str, Any]) -> None:
        for name, module in modules.items():
            module.load_state_dict(all_states[name])

    def remember() -> Callable[[], None]:
        before = states()
        for state in before.values():
            for key, value in state.items():
                state[key] = value.to("cpu", copy=True) if isinstance(value, torch.Tensor) else copy.deepcopy(value)
        return lambda: put(before)

    def apply() -> None:
        new = states()  # the model's own dicts, because they carry versions that load_state_dict looks at
        for plain, (name, key) in keys.items():
            if plain not in tensors:
                new[name][key] = decode(other[plain], rest, _own_tensor)
            elif _is_extra_state(plain):  # the model keeps it
                new[name][key] = _own_tensor(arrays[tensors[plain]])
            else:
                new[name][key] = _tensor(arrays[tensors[plain]])
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
            _check_plain(value, f"{label}[{key!r}]")
        if key not in saved or not isinstance(value, torch.Tensor) or _is_extra_state(key):
            continue
        shape, dtype = saved[key].shape, _DTYPES[saved[key].dtype]
        if shape != tuple(value.shape) or dtype != value.dtype:
            said.append(f"{key!r} is {shape} {dtype} in it and {tuple(value.shape)} {value.dtype} here")
            break
    missing = [key for key in here if key not in saved and key not in other]
    unknown = [key for key in (*saved, *other) if key not in here]
    said += [f"it has no {_few(missing)}"] * bool(missing) + [f"only it has {_few(unknown)}"] * bool(unknown)
    if said:
        raise CheckpointError(
            f"{where} is the checkpoint of another {label}: {'; '.join(said)}; build the {label} as it was when saved"
        )
    first: dict[Any, str] = {}
    for key in saved:
        if isinstance(here[key], torch.Tensor):
            twin = first.setdefault(_memory(here[key]), key)
            if places[twin] != places[key]:
                raise CheckpointError(
                    f"{key!r} and {twin!r} are one tensor here and two in {where}; build the {label} as it was "
                    "when saved"
                )


def _is_extra_state(key: str) -> bool:
    return key.split(".")[-1] == "_extra_state"


def _few(names: Iterable[str]) -> str:
    names = list(names)
    return ", ".join(repr(name) for name in names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


# ---- optimizers


def _group_names(optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> list[list[str]]:
    """Return the names of each group's parameters; what is not in the model goes by its place."""
    return [
        [names.get(id(parameter), f"group.{i}.{j}") for j, parameter in enumerate(group["params"])]
        for i, group in enumerate(optimizer.param_groups)
    ]


def _optimizer_out(
    optimizer: torch.optim.Optimizer,
    label: str,
    path: tuple[str, ...],
    names: Mapping[int, str],
    arrays: dict[str, Array],
) -> Json:
    """Put the state's tensors into ``arrays`` and return the rest, by the parameters' names."""
    packed = optimizer.state_dict()
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
            name: encode(state, f"{label}'s state of {name!r}", (*path, name), arrays, _array_or_none)
            for name, state in own.items()
        },
        "common": encode(common, f"{label}'s state", (*path, "common"), arrays, _array_or_none),
        "rest": encode(rest, f"{label}'s state_dict()", (*path, "rest"), arrays, _array_or_none),
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
                    _array_or_none,
                ),
            }
            for i, group in enumerate(optimizer.param_groups)
        ],
    }


_NOT_OPTIONS = ("params", "param_names")


def _optimizer_in(
    optimizer: torch.optim.Optimizer, saved: Json, label: str, names: Mapping[int, str], arrays: Mapping[str, Array]
) -> Change:
    """Return the change that gives each parameter the state that was saved under its name."""
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
        packed = optimizer.state_dict()
        state = decode(saved["common"], arrays, _own_tensor)
        for group, in_group in zip(packed["param_groups"], _group_names(optimizer, names), strict=True):
            for index, name in zip(group["params"], in_group, strict=True):
                if name in saved["state"]:
                    state[index] = decode(saved["state"][name], arrays, _own_tensor)
        options = [_on_devices(decode(g["options"], arrays, _own_tensor), now) for g, now in groups]
        kept = [{key: group[key] for key in _NOT_OPTIONS if key in group} for group in packed["param_groups"]]
        new = {"state": state, "param_groups": [{**o, **k} for o, k in zip(options, kept, strict=True)]}
        optimizer.load_state_dict({**new, **decode(saved["rest"], arrays, _own_tensor)})
        if type(optimizer).load_state_dict is torch.optim.Optimizer.load_state_dict:
            for group, was in zip(optimizer.param_groups, packed["param_groups"], strict=True):
                for parameter, index in zip(group["params"], was["params"], strict=True):
                    if index in state:
                        optimizer.state[parameter] = _uncast(optimizer.state[parameter], state[index])

    return Change(remember, apply)


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
            why = f"it has no {_few(strange)}" if strange else f"it divides {_few(in_group)} and others otherwise"
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
        raise CheckpointError(f"the {label} has a group more, of {_few(free[0]['shapes'])}; build the groups as saved")
    return pairs


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


# ---- extras


def _extra_out(value: Any, label: str, name: str, arrays: dict[str, Array]) -> Json:
    if isinstance(value, nn.Module):
        return {"kind": "module", **_modules_out(_modules(value), label, (name,), arrays, arrays)}
    kind = "state" if _is_stateful(value) else "value"
    plain = value.state_dict() if kind == "state" else value
    return {"kind": kind, "value": encode(plain, label, (name,), arrays, _array_or_none)}


def _extra_in(target: Any, name: str, saved: Mapping[str, Json], arrays: Mapping[str, Array], where: str) -> Change:
    kind = "module" if isinstance(target, nn.Module) else "state" if _is_stateful(target) else "value"
    if kind == "value":
        raise InputError(
            f"{name} is of type {type(target).__name__} and nothing to load into; leave it out, load(...) returns the "
            f"saved one: extras[{name!r}]"
        )
    if name not in saved:
        raise CheckpointError(f"{where} has no extra {name!r}; it has {_few(saved) or 'none'}")
    if saved[name]["kind"] != kind:
        kinds = {"module": "a module", "state": "an object with a state_dict", "value": "a plain value"}
        raise CheckpointError(f"{where} has {kinds[saved[name]['kind']]} as {name!r}, here it is {kinds[kind]}")
    if kind == "module":
        return _modules_in(_modules(target), saved[name], arrays, arrays, f"extra[{name!r}]", where)
    return _stateful_in(target, saved[name]["value"], arrays)


def _stateful_in(target: Any, saved: Json, arrays: Mapping[str, Array]) -> Change:
    state = decode(saved, arrays, _own_tensor)

    def remember() -> Callable[[], None]:
        before = copy.deepcopy(target.state_dict())
        return lambda: target.load_state_dict(before)

    return Change(remember, lambda: target.load_state_dict(state))


# ---- random streams


def _capture_streams() -> Json:
    cuda = None
    if torch.cuda.is_available():
        states = [base64.b64encode(state.numpy().tobytes()).decode() for state in torch.cuda.get_rng_state_all()]
        cuda = {"current": torch.cuda.current_device(), "devices": states}
    return {
        **streams.capture(),
        "torch": base64.b64encode(torch.get_rng_state().numpy().tobytes()).decode(),
        "cuda": cuda,
    }


def _restore_streams(saved: list[Json], rank: int) -> None:
    """Continue the stream of this rank, or begin the one that a rank without a saved one gets."""
    if rank >= len(saved):
        seed = streams.derived_seed(saved[0], rank)
        streams.reseed(seed)
        torch.manual_seed(seed)
        return
    streams.restore(saved[rank])
    torch.set_rng_state(_bytes_tensor(saved[rank]["torch"]))
    cuda = saved[rank]["cuda"]
    if cuda is None or not torch.cuda.is_available():
        return
    if len(cuda["devices"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all([_bytes_tensor(text) for text in cuda["devices"]])
    else:  # other machines: what counts is the device that this rank works on
        torch.cuda.set_rng_state(_bytes_tensor(cuda["devices"][cuda["current"]]))


def _remember_streams() -> Callable[[], None]:
    before = _capture_streams()
    return lambda: _restore_streams([before], 0)


def _bytes_tensor(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)


# ---- tensors

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "C64": torch.complex64,
    "C128": torch.complex128,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
}
_DTYPE_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


def _array_or_none(value: object, label: str) -> Array | None:
    return _array(value, label) if isinstance(value, torch.Tensor) else None


def _array(tensor: torch.Tensor, label: str) -> Array:
    """Return ``tensor`` as an array whose bytes come to the CPU when they are asked for."""
    _check_plain(tensor, label)

    def data() -> memoryview:
        flat = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
        view: memoryview = flat.view(torch.uint8).numpy().data
        return view

    return Array(_DTYPE_NAMES[tensor.dtype], tuple(tensor.shape), data)


def _check_plain(tensor: torch.Tensor, label: str) -> None:
    """Refuse a tensor that has no values, or other values than its plain bytes."""
    if nn.parameter.is_lazy(tensor):
        raise InputError(f"{label} has no shape yet; run the model on a batch first")
    if tensor.is_meta:
        raise InputError(f"{label} is on the meta device and has no values; call model.to_empty(device=...) first")
    if is_traceable_wrapper_subclass(tensor):
        raise InputError(f"{label} is a {type(tensor).__name__}; a checkpoint holds plain tensors, convert it first")
    if tensor.layout != torch.strided:
        raise InputError(f"{label} is sparse ({tensor.layout}); a checkpoint holds dense tensors, see .to_dense()")
    if tensor.dtype not in _DTYPE_NAMES:
        raise InputError(f"{label} has type {tensor.dtype}, which a checkpoint cannot hold; convert it first")


def _tensor(array: Array) -> torch.Tensor:
    """Return the array's bytes, where they are, as a tensor."""
    dtype = _DTYPES[array.dtype]
    if array.nbytes == 0:
        return torch.empty(array.shape, dtype=dtype)
    return torch.frombuffer(array.data(), dtype=dtype).reshape(array.shape)


def _own_tensor(array: Array) -> torch.Tensor:
    """Return a tensor with memory of its own, for whoever keeps it."""
    return _tensor(array).clone()
