"""Making a tensor whose value lies on one rank look the same on all: operators compute there, elsewhere only shapes.

    out = model(x)            rank 1 (the owner)                 rank 0
    --------------------      -----------------------------      ------------------------------------
    out                       wraps the value                    wraps a meta tensor
    F.cross_entropy(out, y)   computes, and wraps the result     propagates the shape
    loss.backward()           the gradient's value               the gradient's shape
    loss.item()               reads it                           asks rank 1 (``ledger.py``)

Device, dtype, shape and strides are the value's own on all ranks, so that composite operators and autograd decide
alike; both work on the wrapper by themselves, above what is here. What an operator returns is placed, too, except
where its arguments have to be read on all ranks: a shape that depends on values (``nonzero``), a write into a plain
tensor (``total += loss``). A tensor of memory shared by views is one ``_Memory``; what its views are, a path from it
says (``recipe.py``).
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch

from nearlinear.errors import InputError
from nearlinear.torch.pipeline.ledger import SMALL, Ledger, Owned, State
from nearlinear.torch.pipeline.recipe import (
    Operator,
    Path,
    Plain,
    Recipe,
    Step,
    Written,
    digest,
    is_view,
    layout,
    name_of,
    random_state,
    walk,
)
from nearlinear.torch.pipeline.values import Values

__all__ = ["PlacedTensor", "placed", "real", "value_of"]

_META = torch.device("meta")


def placed(
    value_or_meta: torch.Tensor,
    *,
    values: Values,
    owner: int,
    call: int,
    index: int,
    device: torch.device | None = None,
) -> PlacedTensor:
    """Return an output of a model as a placed tensor, without autograd history.

    Args:
        value_or_meta: The value on the owner; elsewhere a meta tensor of its shape, dtype and strides.
        values: What carries questions to other ranks.
        owner: The rank where the value lies.
        call: The number of the model's call, as told to ``values.began_call``.
        index: Which of its outputs.
        device: Where the value would lie on a rank that does not have it; by default the CPU.
    """
    _keep_compiler_out()
    inner = value_or_meta.detach()
    key = digest(f"output {call} {index}".encode())
    if owner == values.session.rank:
        recipe = Recipe(key, owner, call, device=inner.device)
    else:
        recipe = Recipe(key, owner, call, like=inner, device=device or torch.device("cpu"))
    state = values.ledger.record(recipe, inner, output=True)
    return _wrap(inner, _Memory(state, values.ledger), (), b"")


def _keep_compiler_out() -> None:
    """Let a compiled loss function call what is here as it is: it keeps accounts that must not be traced."""
    global _run
    if "torch._dynamo" in sys.modules and not hasattr(_run, "_torchdynamo_disable"):
        _run = sys.modules["torch._dynamo"].disable(_run)


def real(tensor: torch.Tensor) -> torch.Tensor:
    """Return the plain tensor behind a placed one, sharing its memory where it lies here; a plain one as it is."""
    return _read(tensor) if isinstance(tensor, PlacedTensor) else tensor.detach()


def value_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a plain tensor with the value of ``tensor``, on any rank, in memory of its own if it was placed."""
    return _read(tensor).clone() if isinstance(tensor, PlacedTensor) else tensor.detach()


class _Memory:
    """What the views of one tensor share.

    Args:
        state: What it holds now.
        ledger: Who keeps and reads values.
    """

    __slots__ = ("__weakref__", "conjugated", "ledger", "state")

    def __init__(self, state: State, ledger: Ledger) -> None:
        self.state, self.ledger = state, ledger
        self.conjugated = False  # a conjugate was made of it, or it is one: torch would share their memory


class PlacedTensor(torch.Tensor):
    """A tensor whose value lies on one rank; made by ``placed`` and by operators on such tensors."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    _inner: torch.Tensor  # the value, or a meta tensor
    _memory: _Memory
    _path: Path  # from the memory's tensor to this one
    _word: bytes  # the path, for keys
    _recipe: tuple[State, Recipe] | None  # of a view, made for one state

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Operator, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        for kind in types:
            if kind is not PlacedTensor:
                return NotImplemented
        return _run(func, args, kwargs or {})

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        text = repr(_read(self))
        if self.grad_fn is not None:
            return f"{text[:-1]}, grad_fn=<{self.grad_fn.name()}>)"
        return f"{text[:-1]}, requires_grad=True)" if self.requires_grad else text

    def __format__(self, spec: str) -> str:
        return format(self.item(), spec) if self.dim() == 0 and spec else format(_read(self), spec)

    # As Python's own protocols, because torch.tensor([loss, loss]) looks at a number without dispatching.

    def __bool__(self) -> bool:
        return bool(_read(self))

    def __int__(self) -> int:
        return int(_read(self))

    def __index__(self) -> int:
        return _read(self).__index__()

    def __float__(self) -> float:
        return float(_read(self))

    def __complex__(self) -> complex:
        return complex(_read(self))

    def tolist(self) -> Any:
        """Return the values as nested lists."""
        return _read(self).tolist()

    def numpy(self, *, force: bool = False) -> Any:
        """Return the values as an array in memory of its own."""
        return self._plain().numpy(force=force)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        if not self.is_leaf:
            raise RuntimeError(
                "Only Tensors created explicitly by the user (graph leaves) support the deepcopy protocol at the "
                "moment; copy its .detach()"
            )
        memo[id(self)] = copy = self._plain()
        return copy

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._plain().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any:
        return self._plain().__dlpack__(*args, **kwargs)

    def data_ptr(self) -> NoReturn:
        """Refuse: there is no memory on most ranks."""
        self._refuse_memory("data_ptr")

    def untyped_storage(self) -> NoReturn:
        """Refuse: there is no memory on most ranks."""
        self._refuse_memory("untyped_storage")

    def storage(self) -> NoReturn:
        """Refuse: there is no memory on most ranks."""
        self._refuse_memory("storage")

    def _refuse_memory(self, name: str) -> NoReturn:
        owner = self._memory.state.recipe.owner
        raise InputError(
            f".{name}() of what a model in a pipeline returned: its memory is on rank {owner} alone; "
            ".numpy() gives its values anywhere"
        )

    def plain(self) -> torch.Tensor:
        """Return the values as a plain tensor in memory of its own, without history."""
        return value_of(self)

    def _plain(self) -> torch.Tensor:
        return value_of(self).requires_grad_(self.requires_grad)


_make = torch.Tensor._make_wrapper_subclass


def _wrap(inner: torch.Tensor, memory: _Memory, path: Path, word: bytes) -> PlacedTensor:
    tensor: PlacedTensor = _make(
        PlacedTensor,
        inner.shape,
        strides=inner.stride(),
        storage_offset=inner.storage_offset(),
        dtype=inner.dtype,
        device=memory.state.recipe.device,
    )
    tensor._inner, tensor._memory, tensor._path, tensor._word, tensor._recipe = inner, memory, path, word, None
    return tensor


# ---- reading


def _recipe_of(tensor: PlacedTensor) -> Recipe:
    state = tensor._memory.state
    if not tensor._path:
        return state.recipe
    if tensor._recipe is None or tensor._recipe[0] is not state:
        like = tensor._inner if tensor._inner.is_meta else None
        view = Recipe.view(state.recipe, digest(state.recipe.key + tensor._word), tensor._path, like)
        tensor._recipe = state, view
    return tensor._recipe[1]


def _read(tensor: PlacedTensor) -> torch.Tensor:
    """Return the value as a plain tensor, which nobody may write to."""
    memory = tensor._memory
    state = memory.state
    if state.recipe.owner == memory.ledger.rank:
        return tensor._inner
    if tensor._path and state.known is not None:
        return walk(state.known, tensor._path)
    if tensor._path:
        return memory.ledger.read(_recipe_of(tensor))
    if state.known is None:
        value = memory.ledger.read(state.recipe)
        if value.nbytes > SMALL:
            return value
        state.known = value
    return state.known


def _plainly(item: Any) -> Any:
    """Return an argument with the values of placed tensors in it."""
    if isinstance(item, PlacedTensor):
        return _read(item)
    if isinstance(item, list | tuple):
        return type(item)(map(_plainly, item))
    return item


# ---- operators


class _Facts:
    """What is to be known of an operator.

    Args:
        func: The operator.
    """

    def __init__(self, func: Operator) -> None:
        name, arguments = name_of(func), func._schema.arguments
        base = name.split(".")[0]
        self.name = name.removeprefix("aten::")
        self.word = name.encode()
        self.conjugates = base in ("aten::_conj", "aten::_neg_view")  # lazily, which a wrapper does not show
        self.view = is_view(func) and not self.conjugates
        self.same = base in ("aten::detach", "aten::alias")  # a view of all of it
        self.composite = torch._C._dispatch_has_kernel_for_dispatch_key(name, "CompositeImplicitAutograd")
        self.foreach = base.startswith("aten::_foreach_")
        self.elsewhere = "to_sparse" in base or "to_mkldnn" in base  # not a tensor of size and strides
        self.random = torch.Tag.nondeterministic_seeded in func.tags
        self.layout = "as_strided" in base
        written = [
            (place, each) for place, each in enumerate(arguments) if each.alias_info and each.alias_info.is_write
        ]
        self.writes = [(place, argument.name) for place, argument in written]
        if base in _NORMS:
            self.writes = [(3, "running_mean"), (4, "running_var")]
        self.reshapes = torch.Tag.inplace_view in func.tags or base in (
            "aten::set_",
            "aten::resize_",
            "aten::resize_as_",
        )
        self.out = any(argument.kwarg_only for _, argument in written)
        self.returns = len(func._schema.returns)
        self.more = any(returned.alias_info is None for returned in func._schema.returns)  # than what it writes to
        self.shape = _SHAPES.get(base)
        self.plain = 1 if base == "aten::_pack_padded_sequence" else -1  # a result that is known on all ranks
        self.reads = base in _UNEVEN or (
            self.shape is None
            and bool({torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & set(func.tags))
        )


_facts: dict[Operator, _Facts] = {}


def _run(func: Operator, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    facts = _facts.get(func)
    if facts is None:
        facts = _facts[func] = _Facts(func)
    if facts.composite:  # in inference mode, where nothing above has taken it apart
        result = func.decompose(*args, **kwargs)
        if result is not NotImplemented:
            return result
    if facts.elsewhere:
        raise InputError(
            f"{facts.name} of what a model in a pipeline returned is not supported; compute with dense tensors"
        )
    if facts.foreach:
        return _one_by_one(func, args, kwargs)
    if facts.reads:
        return func(*_plainly(args), **_plainly_named(kwargs))
    if facts.writes:
        plain, written = _written(facts, args, kwargs)
        if plain and written:
            raise InputError(
                f"{facts.name} writes to plain tensors and to what a model in a pipeline returned at once; call it for "
                "each alone"
            )
        if plain:
            return func(*_plainly(args), **_plainly_named(kwargs))
        if written and (facts.reshapes or facts.out or facts.more or any(t._memory.conjugated for t in written)):
            raise InputError(
                f"{facts.name} cannot write to what a model in a pipeline returned, whose memory is on rank "
                f"{written[0]._memory.state.recipe.owner} alone; use the operator that returns a new tensor"
            )
        return _Call(func, facts, args, kwargs, written).run()
    return _Call(func, facts, args, kwargs, []).run()


def _plainly_named(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {name: _plainly(item) for name, item in kwargs.items()}


def _written(
    facts: _Facts, args: Sequence[Any], kwargs: dict[str, Any]
) -> tuple[list[torch.Tensor], list[PlacedTensor]]:
    """Return the plain and the placed tensors that a call writes to."""
    plain: list[torch.Tensor] = []
    written: list[PlacedTensor] = []
    for place, name in facts.writes:
        item = args[place] if place < len(args) else kwargs.get(name)
        for each in item if isinstance(item, list | tuple) else [item]:
            if isinstance(each, PlacedTensor):
                written.append(each)
            elif isinstance(each, torch.Tensor):
                plain.append(each)
    return plain, written


def _one_by_one(func: Operator, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Call an operator on lists for each place of them: only where something placed stands is the result placed."""
    number = len(args[0])

    def at(item: Any, place: int) -> Any:
        return [item[place]] if isinstance(item, list | tuple) and len(item) == number else item

    results = []
    for place in range(number):
        one = [at(item, place) for item in args]
        named = {name: at(item, place) for name, item in kwargs.items()}
        items = itertools.chain(*(i if isinstance(i, list | tuple) else [i] for i in (*one, *named.values())))
        if not any(isinstance(item, PlacedTensor) for item in items):
            results.append(func(*one, **named))
            continue
        facts = _facts[func]
        plain, written = _written(facts, one, named) if facts.writes else ([], [])
        if plain:
            results.append(func(*_plainly(one), **_plainly_named(named)))
        else:
            results.append(_Call(func, facts, one, named, written).run())
    if results and isinstance(results[0], list | tuple):
        return list(itertools.chain(*results))
    return None


class _Call:
    """One call of an operator whose results are placed.

    Args:
        func: The operator.
        facts: What is known of it.
        args: Its arguments.
        kwargs: Its keyword arguments.
        written: The placed tensors among them that it writes to.
    """

    __slots__ = (
        "args",
        "bases",
        "device",
        "facts",
        "func",
        "kwargs",
        "late",
        "ledger",
        "mine",
        "owner",
        "parts",
        "tensors",
        "written",
    )

    def __init__(
        self, func: Operator, facts: _Facts, args: Sequence[Any], kwargs: dict[str, Any], written: list[PlacedTensor]
    ) -> None:
        self.func, self.facts, self.args, self.kwargs, self.written = func, facts, args, kwargs, written
        first = written[0] if written else _first([*args, *kwargs.values()])
        assert first is not None
        self.ledger = first._memory.ledger
        self.owner = first._memory.state.recipe.owner
        self.mine = self.owner == self.ledger.rank
        self.device = first.device
        self.parts: list[str | bytes] = [facts.name]
        self.late = False
        self.bases: list[_Memory] = []  # what is written to
        self.tensors: list[torch.Tensor] = []
        for tensor in written:
            if tensor._memory not in self.bases:
                self.bases.append(tensor._memory)

    def run(self) -> Any:
        """Compute where the value lies, propagate shapes elsewhere; return the results, placed."""
        if self.facts.view:
            return self._view()
        args = [self._noted(item) for item in self.args]
        kwargs = {}
        for name, item in self.kwargs.items():
            self.parts.append(name)
            kwargs[name] = self._noted(item)
        before = tuple(memory.state.recipe for memory in self.bases)
        self.late |= any(recipe.late for recipe in before)
        self.parts += [recipe.key for recipe in before]
        key = digest(b"\0".join([part if isinstance(part, bytes) else part.encode() for part in self.parts]))
        epoch, draw, state = self.ledger.values.began, None, None
        if self.facts.random:
            state = random_state(self.device, self.kwargs.get("generator"))
            draw = self.ledger.draw(key, state)
            key = digest(key + f"draw {epoch} {draw.number}".encode())

        def record(index: int | None, inner: torch.Tensor, device: torch.device) -> State:
            recipe = Recipe(
                key if index is None else digest(key + b"%d" % index),
                self.owner,
                epoch,
                self.func,
                args,
                kwargs,
                index,
                written=before,
                draw=draw,
                state=None if self.mine else state,
                like=None if self.mine else inner,
                device=device,
                late=self.late,
            )
            return self.ledger.record(recipe, inner)

        if self.bases:
            return self._write(record)
        result = self._compute() if self.mine else self._propagate()
        device = None if self.mine else self._result_device()
        return self._wrapped(result, record, device)

    def _wrapped(
        self,
        result: Any,
        record: Callable[[int | None, torch.Tensor, torch.device], State],
        device: torch.device | None,
    ) -> Any:
        def wrapped(index: int | None, inner: Any) -> Any:
            if not isinstance(inner, torch.Tensor) or index == self.facts.plain:
                return inner
            if self.facts.conjugates:
                self.args[0]._memory.conjugated = True
                inner = inner.resolve_conj().resolve_neg()
            if inner.layout != torch.strided:
                raise InputError(
                    f"{self.facts.name} of what a model in a pipeline returned has layout {inner.layout}, which cannot "
                    "be placed; compute with dense tensors"
                )
            memory = _Memory(record(index, inner, device or inner.device), self.ledger)
            memory.conjugated = self.facts.conjugates
            return _wrap(inner, memory, (), b"")

        if isinstance(result, list | tuple):
            return type(result)([wrapped(index, inner) for index, inner in enumerate(result)])
        return wrapped(None, result)

    # ---- the recipe

    def _noted(self, item: Any) -> Any:
        """Return an argument as a recipe holds it, and note what it adds to the key."""
        parts = self.parts
        if isinstance(item, PlacedTensor):
            recipe = _recipe_of(item)
            parts.append(recipe.key)
            self.late |= recipe.late
            self.tensors.append(item)
            if self.facts.layout:
                parts.append(str(layout(item)))
            if any(item is written for written in self.written):
                return Written(self.bases.index(item._memory), item._path)
            return recipe
        if isinstance(item, torch.Tensor):
            plain = Plain(item, copy=not self.mine)
            parts.append(plain.word)
            self.late |= plain.late
            self.tensors.append(item)
            return plain
        if isinstance(item, list | tuple):
            parts.append("[")
            noted = [self._noted(each) for each in item]
            parts.append("]")
            return noted
        if isinstance(item, torch.device):
            parts.append(item.type)  # its number may differ between machines
        elif isinstance(item, torch.Generator):
            parts.append("generator")
        else:
            parts.append(repr(item))
        return item

    # ---- views and writes

    def _view(self) -> Any:
        base, rest = self.args[0], tuple(self.args[1:])
        if self.facts.same:
            return _wrap(base._inner, base._memory, base._path, base._word)
        result = self.func(base._inner, *rest, **self.kwargs)
        had = layout(base._inner) if self.facts.layout else None

        def wrapped(index: int | None, inner: torch.Tensor) -> PlacedTensor:
            step = Step(self.func, rest, self.kwargs, index, had)
            return _wrap(inner, base._memory, (*base._path, step), base._word + step.word.encode())

        if isinstance(result, list | tuple):
            return type(result)([wrapped(index, inner) for index, inner in enumerate(result)])
        return wrapped(None, result)

    def _write(self, record: Callable[[int | None, torch.Tensor, torch.device], State]) -> Any:
        """Write in place; who is behind this rank goes on reading what was there before."""
        olds = [memory.state for memory in self.bases]
        inners = [state.tensor for state in olds]
        if self.mine:
            with self.ledger.lock:
                copies = [inner.clone() if _kept(old) else None for old, inner in zip(olds, inners, strict=True)]
                self._compute()
                # Autograd above counts the writes to the wrappers alone; the stage may have saved what is within.
                torch.autograd.graph.increment_version([inner for inner in inners if not inner.is_inference()])
                for old, copy in zip(olds, copies, strict=True):
                    self.ledger.overwritten(old, copy)
        else:
            self._propagate()
        for index, (memory, inner) in enumerate(zip(self.bases, inners, strict=True)):
            device = memory.state.recipe.device
            assert device is not None
            memory.state = record(index, inner, device)
        return None if self.facts.returns == 0 else self.written[0]

    # ---- values and shapes

    def _compute(self) -> Any:
        def inner(item: Any) -> Any:
            if isinstance(item, PlacedTensor):
                return _read(item)
            if isinstance(item, list | tuple):
                return [inner(each) for each in item]
            return item

        return self.func(*map(inner, self.args), **{name: inner(item) for name, item in self.kwargs.items()})

    def _propagate(self) -> Any:
        facts = self.facts
        if facts.shape is not None:
            return facts.shape(self.func, self.args)
        if facts.random:  # which advances the generators here as on the owner
            return self._of_anything()
        signature = facts.word, _signature(self.args), _signature(list(self.kwargs.items())), torch.get_default_dtype()
        known = _known_shapes.get(signature)
        if known is not None:
            return _filled(known)
        kwargs = {name: _shaped(item) for name, item in self.kwargs.items()}
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        try:
            result = self.func(*map(_shaped, self.args), **kwargs)
        except RuntimeError:  # it cannot propagate shapes, or they depend on a plain argument; else this raises again
            return self._of_anything()
        if len(_known_shapes) > _MOST_SHAPES:
            _known_shapes.clear()
        _known_shapes[signature] = _outline(result)
        return result

    def _of_anything(self) -> Any:
        fill = _ones if self.facts.random else _zeros  # probabilities must not all be zero
        kwargs = {name: fill(item) for name, item in self.kwargs.items()}
        return _shaped(self.func(*map(fill, self.args), **kwargs))

    def _result_device(self) -> torch.device:
        asked = self.kwargs.get("device")
        if asked is not None:
            return torch.device(asked)
        with_dims = (tensor.device for tensor in self.tensors if tensor.dim())
        return next(with_dims, self.device)


def _kept(state: State) -> bool:
    return isinstance(state, Owned) and state.keep


def _first(items: Sequence[Any]) -> PlacedTensor | None:
    for item in items:
        if isinstance(item, PlacedTensor):
            return item
        if isinstance(item, list | tuple):
            found = _first(item)
            if found is not None:
                return found
    return None


def _shaped(item: Any) -> Any:
    """Return an argument or result with meta tensors in place of tensors."""
    if isinstance(item, PlacedTensor):
        item = item._inner
    if isinstance(item, torch.Tensor):
        if item.is_meta:
            return item
        return torch.empty_strided(item.shape, item.stride(), dtype=item.dtype, device=_META)
    if isinstance(item, list | tuple):
        return [_shaped(each) for each in item]
    return _META if isinstance(item, torch.device) else item


# Shapes of results by operator and shapes of arguments: most of torch's rules for them are in Python and take up to a
# millisecond, and every step asks the same.
_known_shapes: dict[Any, Any] = {}
_MOST_SHAPES = 4096


def _signature(item: Any) -> Any:
    """Return what the shape of a result depends on."""
    if isinstance(item, torch.Tensor):
        return "T", tuple(item.shape), item.stride(), item.dtype
    if isinstance(item, list | tuple):
        return tuple([_signature(each) for each in item])
    return type(item), item


@dataclass(frozen=True, slots=True)
class _Outline:
    """A tensor without values."""

    shape: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype


def _outline(item: Any) -> Any:
    if isinstance(item, torch.Tensor):
        return _Outline(item.shape, item.stride(), item.dtype)
    return type(item)(map(_outline, item)) if isinstance(item, list | tuple) else item


def _filled(item: Any) -> Any:
    if isinstance(item, _Outline):
        return torch.empty_strided(item.shape, item.strides, dtype=item.dtype, device=_META)
    return type(item)(map(_filled, item)) if isinstance(item, list | tuple) else item


def _zeros(item: Any) -> Any:
    """Return an argument with zeros in place of placed tensors."""
    if isinstance(item, PlacedTensor):
        return torch.empty_strided(item.shape, item.stride(), dtype=item.dtype, device=item.device).zero_()
    if isinstance(item, list | tuple):
        return [_zeros(each) for each in item]
    return item


def _ones(item: Any) -> Any:
    """Return an argument with ones in place of placed tensors."""
    if isinstance(item, PlacedTensor):
        return _zeros(item).fill_(1)
    return [_ones(each) for each in item] if isinstance(item, list | tuple) else item


# Operators that write running statistics, as their arguments 3 and 4, without saying so.
_NORMS = {"aten::native_batch_norm", "aten::cudnn_batch_norm", "aten::miopen_batch_norm"}

# Random operators that draw as often as values say: computed on all ranks, so that the generators stay alike.
_UNEVEN = {"aten::poisson", "aten::binomial", "aten::_standard_gamma", "aten::_sample_dirichlet"}


# ---- shapes that depend on plain arguments


def _of_index(func: Operator, args: Sequence[Any]) -> Any:
    indices: list[Any] = []
    for index in args[1]:
        if index is not None and index.dtype in (torch.bool, torch.uint8):
            indices += map(_shaped, _plainly(index).nonzero().unbind(1))
        else:
            indices.append(_shaped(index))
    return func(_shaped(args[0]), indices)


def _of_masked_select(func: Operator, args: Sequence[Any]) -> Any:
    tensor, mask = args[0], _plainly(args[1])
    shape = torch.broadcast_shapes(tensor.shape, mask.shape)  # type: ignore[no-untyped-call]
    return torch.empty(int(mask.expand(shape).sum()), dtype=tensor.dtype, device=_META)


def _of_packed(func: Operator, args: Sequence[Any]) -> Any:
    data, batch_sizes = func(_zeros(args[0]), *args[1:])
    return _shaped(data), batch_sizes


def _of_first(func: Operator, args: Sequence[Any]) -> Any:
    return torch.empty_like(_shaped(args[0]))


_SHAPES: dict[str, Callable[[Operator, Sequence[Any]], Any]] = {
    "aten::index": _of_index,
    "aten::masked_select": _of_masked_select,
    "aten::_pack_padded_sequence": _of_packed,
    "aten::index_put": _of_first,
    "aten::index_put_": _of_first,
    "aten::_index_put_impl_": _of_first,
}
