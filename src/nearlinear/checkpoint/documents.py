"""Turning nested Python values into JSON and named arrays, and back into values of the same types.

What JSON has is stored as it is. The rest becomes an object with the one key ``"@"``, its kind first:

    {"@": ["tuple", [...]]}             {"@": ["dict", [[key, value], ...]]}      int keys, or a key "@"
    {"@": ["float", "nan"]}             {"@": ["counter", [[key, value], ...]]}
    {"@": ["bytes", "base64"]}          {"@": ["tensor", name]}                   also "array", "scalar" (NumPy's)

Arrays go to a safetensors file under the name of their place in the value.
"""

from __future__ import annotations

import base64
import math
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from nearlinear.checkpoint.tensors import Array
from nearlinear.errors import CheckpointError, InputError

Json = Any
_DEEPEST = 100
_NUMPY_DTYPES = {
    "F64": "<f8", "F32": "<f4", "F16": "<f2", "C64": "<c8", "C128": "<c16", "BOOL": "|b1",
    "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "|i1", "U64": "<u8", "U32": "<u4", "U16": "<u2", "U8": "|u1",
}  # fmt: skip
_NAMES = {numpy_name: name for name, numpy_name in _NUMPY_DTYPES.items()}


def encode(
    value: object,
    label: str,
    path: tuple[str, ...],
    arrays: dict[str, Array],
    tensor: Callable[[object, str], Array | None] = lambda value, label: None,
) -> Json:
    """Return ``value`` as JSON and put the arrays in it into ``arrays``.

    None, bool, int, float, str, bytes, list, tuple, dict with string or int keys, Counter, and NumPy's numbers and
    arrays come back as they were; other kinds of dict come back as dict.

    Args:
        value: What to store.
        label: What to call it in a message, ``"extra['epoch']"`` say.
        path: Where it stands, the beginning of its arrays' names.
        arrays: Where to put arrays, by name.
        tensor: Returns a framework's tensor as an array, and None for what is not a tensor.

    Raises:
        InputError: A value of another type is in it; the message names its place.
    """
    if len(path) > _DEEPEST:
        raise InputError(f"{label[:80]}... is nested deeper than {_DEEPEST} levels; does it contain itself?")

    def inner(part: object, key: object) -> Json:
        return encode(part, f"{label}[{key!r}]", (*path, str(key)), arrays, tensor)

    def put(kind: str, array: Array) -> Json:
        name = free_name(path, arrays)
        arrays[name] = array
        return {"@": [kind, name]}

    if value is None or type(value) in (bool, int, str):
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {"@": ["float", repr(value)]}
    if isinstance(value, np.ndarray | np.generic):
        return put("array" if isinstance(value, np.ndarray) else "scalar", _numpy_array(value, label))
    if type(value) is bytes:
        return {"@": ["bytes", base64.b64encode(value).decode()]}
    if type(value) is list:
        return [inner(part, i) for i, part in enumerate(value)]
    if isinstance(value, tuple) and not hasattr(value, "_fields"):  # a named tuple could not be built again
        return {"@": ["tuple", [inner(part, i) for i, part in enumerate(value)]]}
    if isinstance(value, dict):
        for key in value:
            if type(key) not in (str, int):
                raise InputError(f"{label} has the key {key!r}, {_a(key)}; keys are strings or ints")
        if type(value) is not Counter and "@" not in value and all(type(key) is str for key in value):
            return {key: inner(part, key) for key, part in value.items()}
        kind = "counter" if type(value) is Counter else "dict"
        return {"@": [kind, [[key, inner(part, key)] for key, part in value.items()]]}
    array = tensor(value, label)
    if array is None:
        remedy = "give it a keyword of its own" if hasattr(value, "state_dict") else "save its numbers"
        raise InputError(f"{label} is {_a(value)}; {remedy}")
    return put("tensor", array)


def decode(document: Json, arrays: Mapping[str, Array], tensor: Callable[[Array], object]) -> Any:
    """Return the value that ``encode`` turned into ``document`` and ``arrays``.

    Args:
        document: What ``encode`` returned.
        arrays: The arrays, by name.
        tensor: Returns an array as the framework's tensor.

    Raises:
        CheckpointError: The document has a mark that this version does not know.
    """

    def inner(part: Json) -> Any:
        return decode(part, arrays, tensor)

    if isinstance(document, list):
        return [inner(part) for part in document]
    if not isinstance(document, dict):
        return document
    if "@" not in document:
        return {key: inner(part) for key, part in document.items()}
    match document["@"]:
        case ["tuple", parts]:
            return tuple(inner(part) for part in parts)
        case ["dict", pairs]:
            return {key: inner(part) for key, part in pairs}
        case ["counter", pairs]:
            return Counter({key: inner(part) for key, part in pairs})
        case ["float", text]:
            return float(text)
        case ["bytes", text]:
            return base64.b64decode(text)
        case ["tensor", name]:
            return tensor(arrays[name])
        case ["array" | "scalar" as kind, name]:
            array = arrays[name]
            values = np.frombuffer(array.data(), _NUMPY_DTYPES[array.dtype]).reshape(array.shape)
            return values.copy() if kind == "array" else values[()]
        case mark:
            raise CheckpointError(f"the checkpoint holds a value of kind {mark}, unknown here; upgrade nearlinear")


def free_name(path: tuple[str, ...], arrays: Mapping[str, Array]) -> str:
    """Return a name for the array at ``path`` that none of ``arrays`` has.

    Example:
        >>> free_name(("weight", "exp_avg"), {})
        'weight/exp_avg'
    """
    name = "/".join(path)
    while name in arrays:  # {1: a, "1": b}
        name += "'"
    return name


def _numpy_array(value: np.ndarray[Any, Any] | np.generic, label: str) -> Array:
    if not isinstance(value, np.generic) and type(value) is not np.ndarray:  # a mask, say, would be lost
        raise InputError(f"{label} is {_a(value)}; save plain arrays")
    name = _NAMES.get(value.dtype.newbyteorder("<").str)
    if name is None:
        raise InputError(f"{label} is NumPy's {value.dtype}; save it as numbers of a standard type, or as a list")
    plain = np.asarray(value, dtype=_NUMPY_DTYPES[name], order="C")
    return Array(name, plain.shape, lambda: plain.reshape(-1).view(np.uint8).data)


def _a(value: object) -> str:
    name = type(value).__name__
    return f"{'an' if name[0].lower() in 'aeiou' else 'a'} {name}"
