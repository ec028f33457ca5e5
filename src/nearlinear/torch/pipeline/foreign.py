"""Turning a tensor, in place, into one whose values lie on another rank and hold no memory here.

The object stays the script's own: identity, shape, dtype, ``requires_grad`` and attributes. Every operator on it comes
here:

    looks at its values     they are fetched from the rank that keeps them
    views, ``detach``       another such tensor, which fetches when it is looked at, as an alias would
    ``*_like``, ``new_*``   made here, nothing is fetched
    writes into it          nothing: the rank that keeps it runs the same line on the real values
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map_only

from nearlinear.errors import InputError

aten = torch.ops.aten
_FACTORIES = {
    *(aten.empty_like, aten.zeros_like, aten.ones_like, aten.full_like, aten.rand_like, aten.randn_like),
    *(aten.randint_like, aten.new_empty, aten.new_empty_strided, aten.new_zeros, aten.new_ones, aten.new_full),
}


class Source:
    """Where the values of a tensor are."""

    name: str
    operators: Mapping[
        Any, Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
    ] = {}  # done otherwise than by reading

    def read(self) -> torch.Tensor:
        """Return the values as one process would find them at this line of the script."""
        raise AssertionError

    def wrote_unseen(self) -> None:
        """Note that it was written into past its version counter (``.data``)."""

    def gradient(self, like: torch.Tensor) -> torch.Tensor | None:
        """Return what ``.grad`` is."""
        return None

    def put_gradient(self, gradient: torch.Tensor | None) -> None:
        """Set what ``.grad`` is."""


class Foreign:
    """What a tensor becomes besides what it was. ``type(p)`` is then a subclass of what it was and of this."""

    _source: Source
    _views: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = ()  # from the source's tensor to this one
    _whole = True  # has every value of the source's tensor once
    _by_data = False  # does not share the version counter
    _held: torch.Tensor | None = None  # a copy for who asked for an address

    @property
    def grad(self) -> torch.Tensor | None:
        """The gradient: of a parameter a tensor as this one is, whose values lie where the parameter's do."""
        return self._source.gradient(self)  # type: ignore[arg-type]

    @grad.setter
    def grad(self, gradient: torch.Tensor | None) -> None:
        self._source.put_gradient(gradient)

    @grad.deleter
    def grad(self) -> None:
        self._source.put_gradient(None)

    def fetched(self) -> torch.Tensor:
        """Return the values, in a tensor of this rank."""
        with torch.no_grad():
            value = self._source.read()
            for view in self._views:
                value = view(value)
        return value

    def plain(self) -> torch.Tensor:
        """Return an ordinary tensor, or parameter, that is equal."""
        value = self.fetched().clone()
        if isinstance(self, nn.Parameter):
            return nn.Parameter(value, self.requires_grad)
        return value

    def __repr__(self) -> str:
        return repr(self.plain())

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        if id(self) not in memo:
            memo[id(self)] = self.plain()
        return memo[id(self)]  # type: ignore[no-any-return]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.plain().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        handler = _FUNCTIONS.get(func)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {})) if handler is None else handler(func, *args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, Foreign) and func.overloadpacket in leaf._source.operators:
                done = leaf._source.operators[func.overloadpacket](func, args, kwargs)
                if done is not NotImplemented:
                    return done
        if any(_is_foreign(value) for value in _written(func, args, kwargs)):
            return _write(func, args, kwargs)
        if func.overloadpacket in _FACTORIES:
            return _make(func, *args, **kwargs)
        if func.is_view and isinstance(args[0], Foreign):
            return _view(func, *args, **kwargs)
        return read(func, args, kwargs)


def send_away(tensor: torch.Tensor, source: Source) -> None:
    """Give the memory of ``tensor`` back; from here on its values are those of ``source``.

    The tensor gets the insides of a wrapper, as ``torch.utils.swap_tensors`` would give it, and the wrapper gets its
    memory and goes; but it may have weak references, a data loader's or a captured graph's.

    Raises:
        InputError: It is of a class that cannot be changed.
    """
    kind = _kind(type(tensor))
    wrapper = _wrapper(tensor, kind, requires_grad=tensor.requires_grad)
    try:
        tensor._backward_hooks = None  # no gradient comes here that they could see
        torch._C._swap_tensor_impl(tensor, wrapper)
        wrapper.__class__, tensor.__class__ = type(tensor), kind
    except (TypeError, RuntimeError) as error:
        raise InputError(f"{source.name} cannot be given to another rank: {error}") from None
    tensor._source = source  # type: ignore[attr-defined]


def stand_in(like: torch.Tensor, source: Source) -> torch.Tensor:
    """Return a tensor of the same shape, without memory, whose values are those of ``source``."""
    made: Any = _wrapper(like, _kind(torch.Tensor))
    made._source = source
    return made  # type: ignore[no-any-return]


def read(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call ``func`` with the values of what lies elsewhere."""
    found: dict[int, torch.Tensor] = {}

    def values(foreign: Any) -> torch.Tensor:
        if id(foreign) not in found:
            found[id(foreign)] = foreign.fetched()
        return found[id(foreign)]

    args, kwargs = tree_map_only(Foreign, values, (args, kwargs))
    return func(*args, **kwargs)


@cache
def _kind(base: type) -> Any:
    return type(f"Foreign{base.__name__}", (Foreign, base), {})


def _wrapper(like: torch.Tensor, kind: Any, *, requires_grad: bool = False, device: Any = None) -> torch.Tensor:
    made: torch.Tensor = torch.Tensor._make_wrapper_subclass(
        kind,
        like.shape,
        strides=like.stride(),
        storage_offset=like.storage_offset(),
        dtype=like.dtype,
        device=device or like.device,
        requires_grad=requires_grad,
    )
    return made


def _is_foreign(value: Any) -> bool:
    return isinstance(value, Foreign) or (isinstance(value, list | tuple) and any(map(_is_foreign, value)))


def _twin(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


# ---- operators


def _view(func: Any, base: Any, *args: Any, **kwargs: Any) -> Any:
    shapes = func(_twin(base), *args, **kwargs)
    if isinstance(shapes, torch.Tensor):
        return _alias(base, shapes, lambda value: func(value, *args, **kwargs))
    return [
        _alias(base, shape, functools.partial(_part, func, args, kwargs, number)) for number, shape in enumerate(shapes)
    ]


def _part(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], number: int, value: torch.Tensor) -> torch.Tensor:
    part: torch.Tensor = func(value, *args, **kwargs)[number]
    return part


def _alias(
    base: Any, shape: torch.Tensor, view: Callable[[torch.Tensor], torch.Tensor], *, by_data: bool = False
) -> Any:
    made: Any = _wrapper(shape, _kind(torch.Tensor), device=base.device)
    made._source, made._views = base._source, (*base._views, view)
    made._whole = base._whole and shape.numel() == base.numel() and shape.dtype == base.dtype
    made._by_data = base._by_data or by_data
    return made


def _make(func: Any, like: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    kwargs["device"] = kwargs.get("device") or like.device
    made: torch.Tensor = func(_twin(like), *args, **kwargs)
    return made


def _bound(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[Any, Any]]:
    arguments = func._schema.arguments
    return [
        (argument, args[place] if place < len(args) else kwargs.get(argument.name))
        for place, argument in enumerate(arguments)
    ]


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    if not func._schema.is_mutable:
        return []
    return [
        value
        for argument, value in _bound(func, args, kwargs)
        if argument.alias_info is not None and argument.alias_info.is_write and value is not None
    ]


def _write(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Write into what is here; leave the rest to those who have it."""
    written = _written(func, args, kwargs)
    for each in tree_leaves(written):
        if isinstance(each, Foreign) and each._by_data:
            each._source.wrote_unseen()
    if any(isinstance(value, list | tuple) for value in written):
        return _write_lists(func, args, kwargs, [value for value in written if isinstance(value, list | tuple)])
    target = written[0]
    if torch.Tag.inplace_view in func.tags or len(written) > 1:
        raise InputError(f"{func} on {target._source.name}, which lies on another rank; no such change can be made")
    if torch.Tag.nondeterministic_seeded in func.tags:
        # The random numbers are drawn all the same: what is drawn next must be what one process draws next.
        drawn = torch.empty(target.shape, dtype=target.dtype, device=target.device)
        read(func, *tree_map_only(Foreign, lambda each: drawn if each is target else each, (args, kwargs)))
    return target


def _write_lists(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], lists: list[Any]) -> None:
    number, tensors = len(lists[0]), tree_leaves(lists)
    keep = [n for n in range(number) if not any(isinstance(each[n], Foreign) for each in lists)]
    versions = [tensor._version for tensor in tensors]

    def shorter(value: Any) -> Any:
        return [value[n] for n in keep] if isinstance(value, list | tuple) and len(value) == number else value

    if keep:
        read(func, tuple(map(shorter, args)), {key: shorter(value) for key, value in kwargs.items()})
    if not torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "ADInplaceOrView"):
        # Where the tensors are all here, the operators on the single ones count as edits, which they do not from here.
        still = [tensor for tensor, version in zip(tensors, versions, strict=True) if tensor._version == version]
        torch.autograd.graph.increment_version(still)


# ---- functions above the operators


def _data(_: Any, tensor: Any) -> Any:
    return _alias(tensor, _twin(tensor), lambda value: value, by_data=True)


def _set_data(func: Any, tensor: Any, value: Any) -> None:
    if isinstance(tensor, Foreign):
        if not isinstance(value, Foreign) or value._source is not tensor._source:  # model.to(the same device)
            tensor._source.wrote_unseen()
    else:
        func(tensor, value.fetched())


def _on_values(func: Any, tensor: Any, *args: Any, **kwargs: Any) -> Any:
    return func(tensor.fetched(), *args, **kwargs)


def _on_memory(func: Any, tensor: Any, *args: Any, **kwargs: Any) -> Any:
    """Give an address to an alias: a copy that lives as long (safetensors asks for one)."""
    if not tensor._views or tensor._by_data:
        raise InputError(
            f"{tensor._source.name} lies on another rank and has no address here; .clone() gets its values"
        )
    if tensor._held is None:
        tensor._held = tensor.fetched().clone()
    return func(tensor._held, *args, **kwargs)


_FUNCTIONS: Mapping[Any, Callable[..., Any]] = {
    torch.Tensor.data.__get__: _data,  # type: ignore[attr-defined]
    torch.Tensor.data.__set__: _set_data,  # type: ignore[attr-defined]
    **dict.fromkeys(
        (torch.Tensor.numpy, torch.Tensor.tolist, torch.Tensor.__array__, torch.Tensor.__dlpack__), _on_values
    ),
    **dict.fromkeys(
        (torch.Tensor.untyped_storage, torch.Tensor.storage, torch.Tensor._typed_storage, torch.Tensor.data_ptr),
        _on_memory,
    ),
}
