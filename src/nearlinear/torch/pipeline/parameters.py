"""Turning a model that every rank has whole into one of which each rank holds a part and every rank can read all.

The script's objects stay: a rank's own parameters are as they were, those of other stages hold no memory
(``foreign.py``), and their gradients take part in norms (``gradients.py``).

A value is known by the number of optimizer steps and by how often it was edited in place since the last; a buffer by
the number of calls of the model instead, because those change it. Whoever reads it here asks its keeper for the value
at that number, and the keeper waits until it is there. It cannot be further: an optimizer's step begins when all ranks
have come to it.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.weak import TensorWeakRef

from nearlinear.errors import InputError
from nearlinear.runtime.messages import Message, text, whole_number
from nearlinear.torch import gradient as slot
from nearlinear.torch.collectives import Group
from nearlinear.torch.pipeline.foreign import Foreign, Source, send_away
from nearlinear.torch.pipeline.gradients import GONE, Away, Gradients, Own, tensor_of, weakly
from nearlinear.torch.pipeline.shared import Shared
from nearlinear.torch.pipeline.values import Answer, Values
from nearlinear.torch.session import Session

UNSEEN = (
    "parameters were edited through .data, so whether that rank has done so too cannot be seen before the next step or "
    "call; edit the parameters themselves under torch.no_grad()"
)
_SMALL = 1 << 16  # elements of a buffer that is copied before a call without having been seen to change


class Parameters:
    """The parameters and buffers of a split model.

    An edit in place of what lies elsewhere (``p.mul_(0.9)`` over all parameters, ``load_state_dict``) does nothing
    here: every rank runs the same line, and the rank that holds the tensor does it. An edit that only some ranks make
    (under ``if nl.is_main()``) cannot be seen and is lost, or made, by accident.

    Args:
        model: The model, whole on every rank.
        owners: For every parameter and buffer by its first name the ranks that hold it, its keeper first.
        session: The run.
        group: All ranks of it.
        values: How the other ranks are asked.
        more: Parameters by name that the model does not list and the optimizer holds (a loss's temperature): their
            keeper is the rank on which the loss is computed, and what others find for them is dropped.

    Raises:
        InputError: Two parameters share memory and would lie on different ranks.
    """

    def __init__(
        self,
        model: nn.Module,
        owners: Mapping[str, tuple[int, ...]],
        session: Session,
        group: Group | None,
        values: Values,
        more: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        self._model, self.owners, self._rank = weakref.ref(model), owners, session.rank
        self._group, self._values, self._more = group, values, frozenset(more or ())
        self._parameters = {**dict(model.named_parameters()), **(more or {})}
        self._buffers = dict(model.named_buffers())
        self.steps = 0
        self.sums: list[int] = []  # of what the ranks told at the latest step
        self.unseen: tuple[int, int] | None = None  # where the script was at its latest edit through .data
        self.kind = f"tensor {sum(kind.startswith('tensor') for kind in values.handlers)}"
        _require_apart({**self._parameters, **self._buffers}, owners)
        self._gradients = Gradients({n: owners[n] for n in self._parameters}, session.rank, values, self.kind)
        self._share(session)
        self._kept: dict[str, _Kept] = {}
        self._away: dict[str, _Away] = {}
        for name in self._parameters:
            if owners[name][0] == session.rank:
                self._kept[name] = _Kept(_constant(self._parameters[name]))
        for name in self._buffers:
            if owners[name][0] == session.rank:
                self._kept[name] = _KeptBuffer(_attribute(model, name))
        self._held = set(map(id, self._parameters.values()))
        self._by_optimizer: dict[int, set[int]] = {}
        values.handlers[self.kind] = weakly(self._answer, GONE)
        values.on_began.append(weakly(self._call_began))
        values.on_ended.append(weakly(self._call_ended))

    def _share(self, session: Session) -> None:
        """Set up who combines what: every rank opens every group."""
        shared: dict[tuple[int, ...], Shared] = {}
        for name, parameter in self._parameters.items():
            holders = tuple(sorted(self.owners[name]))
            if len(holders) > 1 and holders not in shared:
                opened = session.new_group(parameter.device, holders)
                shared[holders] = Shared(holders, session.rank, opened, self._gradients.lock)
            if session.rank in holders:
                own = Own(name, parameter, self._gradients, shared.get(holders))
                self._gradients.own[name] = own
                if own.shared is not None:
                    own.shared.members.append(own)
        self._gradients.shared = [each for holders, each in shared.items() if session.rank in holders]

    def send_away(self) -> None:
        """Give back the memory of what this rank does not hold."""
        for name, parameter in self._parameters.items():
            self._gradients.present[name] = slot.get(parameter) is not None
        for name, tensor in [*self._parameters.items(), *self._buffers.items()]:
            if self._rank in self.owners[name]:
                continue
            keeper, away = self.owners[name][0], None
            if name in self._parameters:
                away = self._gradients.away[name] = Away(name, keeper, self._gradients)
            source = self._away[name] = _Away(name, keeper, self, away)
            send_away(tensor, source)
            source.attach(tensor)
            if away is not None and tensor.dtype.is_floating_point:
                trained = tensor.requires_grad
                tensor.requires_grad_(True)
                if name in self._more:
                    tensor.register_post_accumulate_grad_hook(_forget)  # type: ignore[no-untyped-call]
                else:
                    tensor.register_hook(_refuse(name, keeper))  # type: ignore[no-untyped-call]
                tensor.requires_grad_(trained)
        if self._group is not None:
            self._group.barrier("giving each rank its stage")  # from here on anyone may ask

    # ---- what happens in a step

    def backward_began(self) -> None:
        """Note that a backward pass begins; before it adds to any gradient."""
        self._gradients.backward_began()

    def backward_ended(self, present: Mapping[str, bool] | None = None) -> None:
        """Note that a backward pass is over on this rank.

        Args:
            present: Which parameters have a gradient, if all ranks know it; otherwise it is asked for when needed.
        """
        self._gradients.backward_ended(present)

    def combine(self) -> None:
        """Sum the gradients of what several ranks hold now, on all ranks, and not when they are read."""
        self._gradients.combine()

    def gradients(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield what has a gradient, and its values; after ``combine``, on one rank alone if need be."""
        for name, parameter in self._parameters.items():
            gradient = parameter.grad
            if gradient is not None:
                yield name, gradient.fetched() if isinstance(gradient, Foreign) else gradient

    def step_began(self, optimizer: torch.optim.Optimizer | None = None, told: Sequence[int] = ()) -> None:
        """Make the gradients ready for a step; return when every rank has come to it.

        Within the step the gradient of what lies elsewhere reads as None, so that the optimizer passes it over.

        Args:
            optimizer: Which one; None: one that holds all parameters, or nothing is known of it.
            told: Numbers, as many on all ranks, to be added up in the same message; ``sums`` has the result.

        Raises:
            InputError: The parameters are not those of the start, or the ranks are at different steps.
        """
        self.check(optimizer)
        self._gradients.combine()
        self.sums = list(told) if self._group is None else self._meet(self._group, told)
        self._gradients.met()
        if optimizer is not None:
            for name in self._gradients.away:
                optimizer.state.pop(self._parameters[name], None)  # made or loaded before the split
        self._gradients.stepping = True

    def step_ended(self, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Count the step, whose number readers ask for."""
        if optimizer is not None:
            self._gradients.stepped([parameter for group in optimizer.param_groups for parameter in group["params"]])
        for each in self._counted():
            each.stepped()
        self.steps += 1
        self._gradients.stepping = False
        self._gradients.tell()

    def require_equal(self, step: int) -> None:
        """Check that what several ranks hold is the same on them.

        Raises:
            DriftError: It is not, by more than rounding.
        """
        for shared in self._gradients.shared:
            shared.require_equal(step)

    def check(self, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Check that model and optimizer hold the parameters that they held at the start.

        Raises:
            InputError: They do not, or the optimizer is of a kind that needs all gradients on one rank.
        """
        if isinstance(optimizer, torch.optim.LBFGS):
            raise InputError(
                "LBFGS looks at all gradients at once, and a split model has each on one rank; use strategy='data', or "
                "an optimizer that treats parameters one by one"
            )
        model = self._model()
        for name, parameter in model.named_parameters() if model is not None else ():
            if id(parameter) not in self._held:
                raise InputError(f"{name} became a parameter of the model after distribute; build the model first")
        if optimizer is None:
            return
        held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        if not held <= self._by_optimizer.setdefault(id(optimizer), held):
            raise InputError("the optimizer was given parameters after distribute; give them to it before")

    def _meet(self, group: Group, told: Sequence[int]) -> list[int]:
        """Meet all ranks, tell which parameters have a gradient, and return the sums of ``told``."""
        names = list(self._parameters)
        kept = self._gradients.own
        found = [int(n in self._kept and slot.get(kept[n].parameter) is not None) for n in names]
        device = self._parameters[names[0]].device
        sums = torch.tensor([1, self.steps, self._gradients.passes, *found, *told], device=device)
        size, steps, passes, *rest = group.all_reduce(sums, "the beginning of an optimizer step").tolist()
        if (steps, passes) != (size * self.steps, size * self._gradients.passes):
            raise InputError(
                f"rank {self._rank} begins optimizer step {self.steps + 1} after {self._gradients.passes} backward "
                "passes, and another rank after more or fewer; every rank must make the same calls"
            )
        self._gradients.present = {name: bool(each) for name, each in zip(names, rest, strict=False)}
        return rest[len(names) :]

    # ---- buffers

    def _call_began(self, number: int) -> None:
        for each in self._kept.values():
            each.call_began(number)

    def _call_ended(self, number: int) -> None:
        for each in self._counted():
            each.call_ended(number)

    def _counted(self) -> list[_Kept | _Away]:
        return [*self._kept.values(), *self._away.values()]

    # ---- asking and being asked

    def ask(self, away: _Away) -> torch.Tensor:
        """Return the value of what lies elsewhere as one process would find it at this line of the script."""
        where = {"steps": self.steps, "calls": self._values.ended, "edits": away.edits()}
        answer = self._values.ask(away.keeper, away.what, self.kind, name=away.name, **where)
        return tensor_of(answer, away.what)

    @property
    def place(self) -> tuple[int, int]:
        """Steps and calls so far."""
        return self.steps, self._values.ended

    def _answer(self, message: Message) -> Answer:
        name = text(message, "name")
        steps, calls, edits = (whole_number(message, each) for each in ("steps", "calls", "edits"))
        kept = self._kept.get(name)
        if kept is None:
            raise InputError(f"rank {self._rank} does not keep {name}")
        found: list[torch.Tensor] = []

        def ready() -> dict[str, Any] | None:
            if self.unseen == (steps, calls):
                return {"kind": "refused", "why": UNSEEN}
            if self.steps < steps or self._values.ended < calls or self._gradients.stepping:
                return None
            with torch.no_grad():
                state, value = kept.at(steps=self.steps - steps, calls=calls, edits=edits)
            if value is not None:
                found.append(value)
            return None if state == "behind" else {"kind": "refused" if state == "ahead" else "ready", "why": why}

        why = (
            f"rank {self._rank} has gone on and changed it, by an edit in place or in the next call; read it on every "
            "rank before that, or edit it after an optimizer step"
        )
        answer = self._values.until(ready, f"rank {self._rank} did not come to step {steps} and edit {edits} of {name}")
        return found[0] if found else answer


class _Kept:
    """A parameter that this rank answers for."""

    def __init__(self, find: Callable[[], torch.Tensor]) -> None:
        self._find = find
        self._base: int = find()._version

    def stepped(self) -> None:
        """Begin to count edits."""
        self._base = self._find()._version

    def call_began(self, number: int) -> None:
        """Note that a call of the model begins."""

    def call_ended(self, number: int) -> None:
        """Note that it has returned."""

    def at(self, steps: int, calls: int, edits: int) -> tuple[str, torch.Tensor | None]:
        """Return the value at a point of the script, or whether this rank is "behind" or "ahead" of it.

        Args:
            steps: Optimizer steps since then.
            calls: Calls of the model until then.
            edits: Edits in place until then.
        """
        tensor = self._find()
        now = tensor._version - self._base
        if steps or now > edits:
            return "ahead", None
        if now < edits:
            return "behind", None
        value = tensor.detach().clone()
        return ("here", value) if tensor._version - self._base == edits else ("ahead", None)


class _KeptBuffer(_Kept):
    """A buffer that this rank answers for: a call of the model may change it, so what it was before is copied."""

    def __init__(self, find: Callable[[], torch.Tensor]) -> None:
        super().__init__(find)
        self._changes = False  # calls were seen to change it
        self._began = 0
        self._mark = self._now()
        self._before: tuple[int, torch.Tensor | None] = (0, None)  # edits and value when the latest call began

    def _now(self) -> tuple[int, int]:
        tensor = self._find()
        return id(tensor), tensor._version

    def stepped(self) -> None:
        """Leave the count of edits alone: it begins with a call."""

    def call_began(self, number: int) -> None:
        """Keep what it is."""
        tensor = self._find()
        keep = self._changes or tensor.numel() <= _SMALL
        with torch.no_grad():
            self._before = tensor._version - self._base, tensor.detach().clone() if keep else None
        self._began, self._mark = number, self._now()

    def call_ended(self, number: int) -> None:
        """Begin to count edits."""
        self._changes = self._changes or self._mark != self._now()
        self._base = self._find()._version

    def at(self, steps: int, calls: int, edits: int) -> tuple[str, torch.Tensor | None]:
        """Return the value at a point of the script, or whether this rank is "behind" or "ahead" of it."""
        if self._began <= calls:
            return super().at(0, calls, edits)
        edits_before, value = self._before
        if self._began == calls + 1 and edits == edits_before and value is not None:
            return "here", value
        value = self._find().detach().clone()
        return ("here", value) if self._mark == self._now() and not self._changes else ("ahead", None)


class _Away(Source):
    """Where the values of a parameter or buffer are that another rank keeps."""

    def __init__(self, name: str, keeper: int, parameters: Parameters, gradient: Away | None) -> None:
        self.name, self.keeper, self._parameters, self._gradient = name, keeper, parameters, gradient
        self.what = f"reading {name}, which lies on rank {keeper}"
        self._unseen: tuple[int, int] | None = None  # where the script was at an edit through .data

    def attach(self, tensor: torch.Tensor) -> None:
        """Begin to count the edits of ``tensor``."""
        self._tensor = TensorWeakRef(tensor)
        self._base = tensor._version

    def stepped(self) -> None:
        """Begin to count edits."""
        if self._gradient is not None:
            self._rebase()

    def call_ended(self, number: int) -> None:
        """Begin to count edits."""
        if self._gradient is None:
            self._rebase()

    def _rebase(self) -> None:
        tensor = self._tensor()
        self._base = tensor._version if tensor is not None else 0

    def edits(self) -> int:
        """Return how often the script has edited it.

        Raises:
            InputError: It was edited where nothing counts.
        """
        if self._unseen == self._parameters.place:
            raise InputError(f"{self.what}: {UNSEEN}")
        tensor = self._tensor()
        return tensor._version - self._base if tensor is not None else 0

    def read(self) -> torch.Tensor:
        """Return the values."""
        tensor, value = self._tensor(), self._parameters.ask(self)
        if tensor is None:
            return value
        if value.device == tensor.device and value.stride() == tensor.stride():
            return value
        like = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
        return like.copy_(value)

    def wrote_unseen(self) -> None:
        """Note an edit through ``.data``."""
        self._unseen = self._parameters.unseen = self._parameters.place

    def gradient(self, like: torch.Tensor) -> torch.Tensor | None:
        """Return what ``.grad`` is."""
        return self._gradient.of(like) if self._gradient is not None else None

    def put_gradient(self, gradient: torch.Tensor | None) -> None:
        """Set what ``.grad`` is."""
        if self._gradient is not None:
            self._gradient.put(gradient)


def _refuse(name: str, keeper: int) -> Callable[[torch.Tensor], torch.Tensor]:
    def hook(gradient: torch.Tensor) -> torch.Tensor:
        raise InputError(
            f"the loss depends on {name} outside the model's call, and it lies on rank {keeper}, where this part of "
            "its gradient would be missing; for an L2 penalty use the optimizer's weight_decay, and read parameters "
            "under torch.no_grad()"
        )

    return hook


def _forget(parameter: torch.Tensor) -> None:
    slot.put(parameter, None)


def _constant(tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
    return lambda: tensor


def _attribute(model: nn.Module, name: str) -> Callable[[], torch.Tensor]:
    """Return what finds a buffer by its name, because a module may put another tensor there."""
    path, _, attribute = name.rpartition(".")
    module = model.get_submodule(path)
    return lambda: getattr(module, attribute)


def _require_apart(tensors: Mapping[str, torch.Tensor], owners: Mapping[str, tuple[int, ...]]) -> None:
    # Nothing has an address that has no memory: no elements, or given back already.
    places = sorted((tensor.data_ptr(), _end(tensor), name) for name, tensor in tensors.items() if tensor.data_ptr())
    for (_, end, first), (begin, _, second) in itertools.pairwise(places):
        if begin < end and owners[first] != owners[second]:
            raise InputError(
                f"{first} and {second} are two tensors in the same memory, and would lie on different ranks; tie them "
                "by making them one parameter"
            )


def _end(tensor: torch.Tensor) -> int:
    span = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    return tensor.data_ptr() + span * tensor.element_size()
