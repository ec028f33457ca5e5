"""Naming a result by how it was computed, so that two processes speak of the same one, and computing it anew.

    out = output 0 of call 7                                    key: H("output", 7, 0)
    loss = nll_loss(log_softmax(out, 1), y)                     key: H("nll_loss", key of the log_softmax, content of y)
    loss /= 4                                                   key: H("div_", the key before, 4)
    loss[0]                                                     the key of loss and a path of views

Every rank runs the same program, so it makes the same keys, without any value of the output. A plain tensor among the
arguments counts by its content: short ones at once, long ones (and those on a GPU) when somebody asks, which is the
difference between ``key`` and ``identity``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from nearlinear.errors import InputError

SHORT = 16 * 1024  # bytes of a plain argument whose content is taken at once

Operator = torch._ops.OpOverload


def digest(data: Any) -> bytes:
    """Return 16 bytes that stand for ``data``."""
    return hashlib.sha256(data).digest()[:16]


class Plain:
    """A plain tensor among the arguments, as it was then.

    Args:
        tensor: The argument.
        copy: Its content is needed later, so what is short is copied; otherwise its digest is enough.
    """

    __slots__ = ("_digest", "_tensor", "_version", "word")

    def __init__(self, tensor: torch.Tensor, *, copy: bool) -> None:
        self._digest: bytes | None = None
        self._tensor: torch.Tensor | None = None
        self._version = -1
        if tensor.is_inference() or (tensor.device.type == "cpu" and tensor.nbytes <= SHORT):
            self._digest = content(tensor)
            if copy:
                self._tensor = tensor.detach().clone()
        else:
            # Not a detached alias: below autograd that would count its writes by itself.
            self._tensor, self._version = tensor, tensor._version
        self.word = f"{tuple(tensor.shape)}{tensor.dtype}{self._digest!r}"

    @property
    def late(self) -> bool:
        """Whether the word does not hold the content."""
        return self._version >= 0

    def digest(self) -> bytes:
        """Return what stands for its content."""
        if self._digest is None:
            self._digest = content(self.tensor())
        return self._digest

    def tensor(self) -> torch.Tensor:
        """Return it.

        Raises:
            Changed: It was written to since.
        """
        assert self._tensor is not None
        if self._version >= 0 and self._tensor._version != self._version:
            raise Changed(
                f"a tensor {tuple(self._tensor.shape)} that it was computed with has been changed in place since; read "
                "it before, or compute it with a copy of that tensor"
            )
        return self._tensor


class Changed(InputError):
    """An argument is no longer what it was."""


def content(tensor: torch.Tensor) -> bytes:
    """Return what stands for the values of a tensor."""
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().cpu().reshape(-1)
    return digest(flat.view(torch.uint8).numpy().data if flat.numel() else b"")


@dataclass(frozen=True, slots=True)
class Step:
    """One view of a path.

    Args:
        func: The operator.
        args: Its arguments after the tensor, all constants.
        kwargs: Its keyword arguments.
        index: Which of its results; None if it has one.
        layout: Size, strides and offset of the tensor, where the view depends on them (``as_strided``).
    """

    func: Operator
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    index: int | None
    layout: list[list[int]] | None

    @property
    def word(self) -> str:
        """What stands for it in a key."""
        return f"{name_of(self.func)}{self.args}{dict(self.kwargs)}{self.index}{self.layout}"


Path = tuple[Step, ...]


def layout(tensor: torch.Tensor) -> list[list[int]]:
    """Return size, strides and offset."""
    return [[*map(int, tensor.shape)], [*map(int, tensor.stride())], [int(tensor.storage_offset())]]


def walk(tensor: torch.Tensor, path: Path) -> torch.Tensor:
    """Return the view at the end of a path.

    Raises:
        ValueError: A step depends on a layout, and this tensor has another.
    """
    for step in path:
        if step.layout is not None and step.layout != layout(tensor):
            raise ValueError(f"{step.func} of a tensor with another layout")
        result = step.func(tensor, *step.args, **step.kwargs)
        tensor = result if step.index is None else result[step.index]
    return tensor


def pack_path(path: Path) -> list[Any]:
    """Return a path as JSON."""

    def packed(value: Any) -> Any:
        if isinstance(value, torch.dtype):
            return {"dtype": str(value).removeprefix("torch.")}
        return [packed(item) for item in value] if isinstance(value, list | tuple) else value

    return [
        [name_of(step.func), packed(step.args), {k: packed(v) for k, v in step.kwargs.items()}, step.index, step.layout]
        for step in path
    ]


def unpack_path(value: Any) -> Path:
    """Return the path that came as JSON; it can do no more than view.

    Raises:
        ValueError: It is none.
    """

    def unpacked(item: Any) -> Any:
        if isinstance(item, dict):
            dtype = getattr(torch, str(item.get("dtype")), None)
            if not isinstance(dtype, torch.dtype):
                raise ValueError(item)
            return dtype
        if isinstance(item, list):
            return [unpacked(each) for each in item]
        if item is None or isinstance(item, bool | int):
            return item
        raise ValueError(item)

    if not isinstance(value, list):
        raise ValueError(value)
    path = []
    for name, args, kwargs, index, had in value:
        func = _view_named(str(name))
        path.append(Step(func, tuple(unpacked(args)), {str(k): unpacked(v) for k, v in kwargs.items()}, index, had))
    return tuple(path)


def name_of(func: Operator) -> str:
    """Return the name of an operator, such as ``aten::add.Tensor``."""
    return str(func.name())  # type: ignore[no-untyped-call]


def is_view(func: Operator) -> bool:
    """Return whether the result shares the memory of the first argument."""
    return func.is_view or name_of(func) == "aten::_unsafe_view"


def _view_named(name: str) -> Operator:
    space, _, rest = name.partition("::")
    packet, _, overload = rest.partition(".")
    func = getattr(getattr(torch.ops.aten, packet, None), overload or "default", None)
    if space != "aten" or not isinstance(func, torch._ops.OpOverload) or not is_view(func):
        raise ValueError(f"{name} is no view")
    return func


@dataclass(frozen=True, slots=True)
class Written:
    """The place of an argument that is written to.

    Args:
        slot: Which of the recipe's ``written``.
        path: Which view of it.
    """

    slot: int
    path: Path


class Recipe:
    """How a value came to be.

    Args:
        key: Stands for the operator, its constants and the keys of its arguments.
        owner: The rank on which the value lies.
        epoch: The latest call of a model that had begun.
        func: The operator; None for an output of a model, and for what is too long ago.
        args: Its arguments, with a ``Recipe`` for a placed one, a ``Plain`` for another tensor, and ``Written``.
        kwargs: Its keyword arguments likewise.
        index: Which of its results; of what was ``written``, if anything was.
        written: What the operator writes to, before it does.
        draw: For a random operator: which call it is; the key is different for each.
        state: The random generators' states before it; None on the owner.
        like: A meta tensor of the value's shape; None on the owner.
        device: Where the value lies on this rank.
        late: Whether the key does not hold the content of all that went into it.
    """

    __slots__ = (
        "__weakref__",
        "_identity",
        "args",
        "device",
        "draw",
        "epoch",
        "func",
        "index",
        "key",
        "kwargs",
        "like",
        "lost",
        "owner",
        "path",
        "state",
        "value",
        "written",
    )

    def __init__(
        self,
        key: bytes,
        owner: int,
        epoch: int,
        func: Operator | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        index: int | None = None,
        *,
        written: tuple[Recipe, ...] = (),
        path: Path = (),
        draw: Draw | None = None,
        state: RandomState | None = None,
        like: torch.Tensor | None = None,
        device: torch.device | None = None,
        late: bool = False,
    ) -> None:
        self.key, self.owner, self.epoch, self.func = key, owner, epoch, func
        self.args, self.kwargs, self.index, self.written, self.path = args, kwargs or {}, index, written, path
        self.draw, self.state, self.like, self.device = draw, state, like, device
        self.lost: str | None = None  # why its identity cannot be told any more
        self.value: torch.Tensor | None = None  # a random one that was computed here: it must stay the same
        self._identity: bytes | None = None if late else key

    @classmethod
    def view(cls, base: Recipe, key: bytes, path: Path, like: torch.Tensor | None) -> Recipe:
        """Return the recipe of a view of ``base``."""
        return cls(key, base.owner, base.epoch, args=(base,), path=path, like=like, device=base.device, late=base.late)

    @property
    def late(self) -> bool:
        """Whether the key does not hold the content of all that went into it."""
        return self._identity is not self.key

    def _ingredients(self) -> Iterator[Recipe | Plain]:
        yield from self.written
        for item in (*self.args, *self.kwargs.values()):
            if isinstance(item, Recipe | Plain):
                yield item
            elif isinstance(item, list | tuple):
                for each in item:
                    if isinstance(each, Recipe | Plain):
                        yield each

    def parents(self) -> list[Recipe]:
        """Return what must be known to compute it."""
        return [item for item in self._ingredients() if isinstance(item, Recipe)]

    def can_be_computed(self) -> bool:
        """Return whether it is known how."""
        return self.func is not None or bool(self.path)

    def identity(self) -> bytes:
        """Return what stands for the recipe and the contents of all that went into it.

        Raises:
            Changed: One of them was changed since.
        """
        stack = [self]
        while self._identity is None:
            last = stack[-1]
            if last.lost is not None:
                raise Changed(last.lost)
            missing = [parent for parent in last.parents() if parent._identity is None]
            if missing:
                stack += missing
                continue
            parts = [item.digest() if isinstance(item, Plain) else item.identity() for item in last._ingredients()]
            last._identity = digest(b"".join((last.key, *parts)))
            stack.pop()
        return self._identity

    def seal(self) -> None:
        """Forget how it was computed; its identity stays."""
        if self.path:
            return
        try:
            self.identity()
        except Changed as error:
            self.lost = str(error)
        self.func, self.args, self.kwargs, self.written = None, (), {}, ()

    def compute(self, values: Mapping[Recipe, torch.Tensor]) -> torch.Tensor:
        """Return the value, given those of its parents."""
        if self.path:
            return walk(values[self.args[0]], self.path)
        assert self.func is not None
        fresh = [values[base].clone() for base in self.written]

        def filled(item: Any) -> Any:
            if isinstance(item, Recipe):
                return values[item]
            if isinstance(item, Plain):
                return item.tensor()
            if isinstance(item, Written):
                return walk(fresh[item.slot], item.path)
            if isinstance(item, list | tuple):
                return type(item)(map(filled, item))
            return item

        args, kwargs = filled(self.args), {name: filled(item) for name, item in self.kwargs.items()}
        if self.state is None:
            result = self.func(*args, **kwargs)
        else:
            with drawing_from(self.state, kwargs):
                result = self.func(*args, **kwargs)
        made: Any = fresh if fresh else result
        value: torch.Tensor = made if self.index is None else made[self.index]
        value = value.resolve_conj().resolve_neg()
        if self.draw is not None:
            self.value = value
        return value


@dataclass(frozen=True, slots=True)
class Draw:
    """A call of a random operator.

    Args:
        key: What its key would be if it were not random.
        number: Which of the epoch's calls with that key, from 1.
        before: What stands for the random generators' states before it.
    """

    key: bytes
    number: int
    before: bytes


RandomState = tuple[
    torch.Tensor, ...
]  # of the operator's own generator; or of the CPU's, and a GPU's where it is on one


def random_state(device: torch.device, generator: torch.Generator | None) -> RandomState:
    """Return the states of the generators that a random operator draws from."""
    if generator is not None:
        return (generator.get_state(),)
    return (torch.get_rng_state(), *([torch.cuda.get_rng_state(device)] if device.type == "cuda" else []))


@contextmanager
def drawing_from(state: RandomState, kwargs: dict[str, Any]) -> Iterator[None]:
    """Let a random operator draw from generators in ``state``; those of the process are left as they are."""
    generator = kwargs.get("generator")
    if generator is not None:
        kwargs["generator"] = torch.Generator(generator.device)
        kwargs["generator"].set_state(state[0])
        yield
        return
    with torch.random.fork_rng():
        torch.set_rng_state(state[0])
        for each in state[1:]:
            torch.cuda.set_rng_state(each)
        yield
