"""Turning gradients of which each lies on the rank of its parameter into gradients that every rank can ask for.

    rank 0   w.grad ████        b.grad ┄┄┄┄  a stand-in: shape alone; its norm is asked of rank 1
    rank 1   w.grad ┄┄┄┄        b.grad ████

A gradient is known by the number of backward passes (``passes``) and by how often it was edited in place since the
last (``edits``): the script runs the same lines on all ranks, so a stand-in counts the edits that its keeper makes. The
keeper may be ahead, so what others may ask late is kept from the moment when the script gets hold of a gradient, which
is before it can edit it:

    norms           noted when p.grad is read
    values          copied when p.grad is read, in a pass in which this rank too asks for values of others
    one rank alone  (``if nl.is_main()``) reads values, and then all clip: a rank tells its norms to others when its own
                    script has come to a norm, or stands waiting for somebody
"""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils.weak import TensorWeakRef  # a plain one may hand out a tensor whose insides are gone

from nearlinear.errors import InputError, NearlinearError
from nearlinear.runtime.messages import Message, text, whole_number
from nearlinear.torch import gradient as slot
from nearlinear.torch.pipeline.foreign import Foreign, Source, aten, read, stand_in
from nearlinear.torch.pipeline.shared import Shared
from nearlinear.torch.pipeline.values import Answer, Values

GONE: Mapping[str, Any] = {"kind": "refused", "why": "the model is gone there"}
_READING = "reading the gradient of"
_NOTES = 4  # edits of one gradient whose norms are kept
_ABSENT, _HERE, _APART = 0.0, 1.0, 2.0  # no gradient; a gradient; one that is not summed over its holders yet


class Gradients:
    """The gradients of one model, as one rank has them.

    Args:
        owners: For each parameter the ranks that hold it, its keeper first; in the same order on all ranks.
        rank: This one.
        values: How the other ranks are asked.
        kind: Of the messages; another for each model.
    """

    def __init__(self, owners: Mapping[str, tuple[int, ...]], rank: int, values: Values, kind: str) -> None:
        self.owners, self.rank, self.values, self.kind = owners, rank, values, kind
        self.own: dict[str, Own] = {}
        self.away: dict[str, Away] = {}
        self.shared: list[Shared] = []
        self.passes = 0
        self.inside = self.stepping = False  # of a backward pass; of an optimizer's step
        self.orders = {2.0, math.inf}  # of the norms that are noted
        self.present: dict[str, bool] = {}  # whether there is a gradient, as far as it is known in this pass
        self.lock = threading.RLock()  # the script's thread notes, and so do those that answer
        self._tables: dict[tuple[int, float], dict[str, dict[int, float]]] = {}
        self._noted: set[float] = set()  # orders that were noted for all that is here
        self.valued = False  # the script asks for values of gradients in this pass
        values.handlers[f"{kind} norms"] = weakly(self._answer_norms, GONE)
        values.handlers[f"{kind} gradient"] = weakly(self._answer_gradient, GONE)
        _count_unscaling()

    # ---- what happens in a step

    def backward_began(self) -> None:
        """Set aside the sums that are made already: what follows is added to them."""
        self.inside = True
        for each in self.shared:
            each.set_aside()

    def backward_ended(self, present: Mapping[str, bool] | None = None) -> None:
        """Note that the gradients have changed; ``present``, if all ranks know which parameters have one."""
        if not self.inside:
            raise NearlinearError("a backward pass ended that had not begun")
        with self.lock:
            for each in self.shared:
                each.apart = True
            for own in self.own.values():
                own.restart()
            for away in self.away.values():
                away.restart()
            self._tables, self._noted, self.present = {}, set(), dict(present or {})
            self.valued = False
            self.passes, self.inside = self.passes + 1, False
        if torch._C._current_graph_task_id() != -1:
            torch.autograd.Variable._execution_engine.queue_callback(self._settle)
        self.tell()

    def _settle(self) -> None:
        """Count from here: the script's own graph, around the model's, may have added to a gradient after it."""
        with self.lock:
            for own in self.own.values():
                if own.shared is None and not own.handed:
                    own.restart()

    def combine(self) -> None:
        """Sum what is still apart."""
        for each in self.shared:
            if each.apart:
                each.combine()
        self.tell()

    @property
    def copying(self) -> bool:
        """Whether a gradient is copied when it is read: other ranks ask for values, and perhaps late.

        A rank that asks for values itself knows that the others do so at the same line. One that holds everything has
        nothing to ask for.
        """
        return self.valued or not self.away

    def stepped(self, parameters: Sequence[torch.Tensor]) -> None:
        """Note that the gradients of these have served: what is read of them now is not noted any more."""
        ids = set(map(id, parameters))
        for own in self.own.values():
            own.served = own.served or id(own.parameter) in ids

    def met(self) -> None:
        """Note that every rank has come to a step: nothing is asked any more that was before it."""
        self.valued = False
        for own in self.own.values():
            own.copies.clear()

    def tell(self) -> None:
        """Wake who waits for this rank."""
        with self.values.changed:
            self.values.changed.notify_all()

    # ---- asking

    def is_present(self, away: Away) -> bool:
        """Return whether a parameter of another rank has a gradient there."""
        if away.name not in self.present:
            self._ask_norms(away, 2.0, -1)
        return self.present[away.name]

    def norm(self, away: Away, order: float) -> float:
        """Return the norm of another rank's gradient as it is at this line of the script."""
        self._note_all(order)
        edits = away.edits()
        row = self._tables.get((away.keeper, order), {}).get(away.name, {})
        if edits not in row:
            row = self._ask_norms(away, order, edits)[away.name]
        if edits not in row:
            raise InputError(f"{away.what}: {_gone(away.name, away.keeper)['why']}")
        return row[edits]

    def _note_all(self, order: float) -> None:
        """Note such a norm of all that is here, once in a pass: the other ranks will ask for it too, perhaps late."""
        self.orders.add(order)
        if order not in self._noted:
            for own in self.own.values():
                if not own.apart and own.look() is not None:
                    own.norm(order)
            self._noted.add(order)
            self.tell()

    def fetch(self, away: Away) -> torch.Tensor:
        """Return the values of another rank's gradient as they are at this line of the script."""
        self.valued = True
        for own in self.own.values():
            if own.handed and not own.apart and own.look() is not None:
                own.copy()
        asked = {"name": away.name, "passes": self.passes, "edits": away.edits()}
        return tensor_of(self.values.ask(away.keeper, away.what, f"{self.kind} gradient", **asked), away.what)

    def _ask_norms(self, away: Away, order: float, edits: int) -> dict[str, dict[int, float]]:
        """Ask for the norms of all that this keeper keeps: who clips asks for the next one next."""
        asked = {"name": away.name, "passes": self.passes, "edits": edits, "order": str(order)}
        answer = self.values.ask(away.keeper, away.what, f"{self.kind} norms", **asked)
        table = tensor_of(answer, away.what).tolist()
        rows = self._tables.setdefault((away.keeper, order), {})
        for name, (state, *notes) in zip(self._kept_by(away.keeper), table, strict=True):
            if state != _APART:
                self.present[name] = state == _HERE
            rows.setdefault(name, {}).update(
                (int(e), n) for e, n in zip(notes[::2], notes[1::2], strict=True) if e >= 0
            )
        return rows

    def _kept_by(self, rank: int) -> list[str]:
        return [name for name, holders in self.owners.items() if holders[0] == rank]

    # ---- being asked, in other threads

    def _answer_norms(self, message: Message) -> Answer:
        own, passes, edits = self._asked(message)
        order = float(text(message, "order"))
        self.orders.add(order)

        def before_norms() -> bool:
            standing = self.values.stands()
            between = standing is None or standing.startswith(_READING)  # it may still ask for values
            return edits >= 0 and not self._noted and between

        def known(now: int | None) -> bool:
            return edits in (-1, now) or (order, edits) in own.notes

        refused = self._until(own, passes, edits, known, before_norms)
        if refused is not None:
            return refused
        rows = [self.own[name].row(order if edits >= 0 else None) for name in self._kept_by(self.rank)]
        return torch.tensor(rows, dtype=torch.float64).reshape(len(rows), 1 + 2 * _NOTES)

    def _answer_gradient(self, message: Message) -> Answer:
        own, passes, edits = self._asked(message)
        refused = self._until(own, passes, edits, lambda now: edits in own.copies or now == edits)
        if refused is not None:
            return refused
        with self.lock, torch.no_grad():
            value, gradient = own.copies.get(edits), own.gradient()
            if value is None and gradient is not None and own.edits() == edits:
                value = gradient.to_dense().clone()
                if own.edits() != edits:
                    value = None
            return value if value is not None and self.passes == passes else _gone(own.name, self.rank)

    def _asked(self, message: Message) -> tuple[Own, int, int]:
        own = self.own.get(text(message, "name"))
        if own is None:
            raise InputError(f"rank {self.rank} does not keep {text(message, 'name')}")
        return own, whole_number(message, "passes"), whole_number(message, "edits")

    def _until(
        self,
        own: Own,
        passes: int,
        edits: int,
        known: Callable[[int | None], bool],
        held: Callable[[], bool] = lambda: False,
    ) -> Answer | None:
        """Wait until what is asked is known here; return the refusal if this rank has gone past.

        Args:
            own: What is asked for.
            passes: Backward passes that the asking rank has seen.
            edits: Edits since; -1 if any will do.
            known: Tells, from the number of edits here, whether it is known.
            held: Tells whether it is too early to say.
        """

        def ready() -> dict[str, Any] | None:
            if self.passes < passes or self.inside or own.apart or (self.passes == passes and held()):
                return None
            with self.lock:
                now = own.edits()
                if self.passes == passes and known(now):
                    return {"kind": "ready"}
                past = self.passes > passes or now is None or now > edits
                return _gone(own.name, self.rank) if past else None

        answer = self.values.until(
            ready, f"rank {self.rank} did not come to edit {edits} of the gradient of {own.name}"
        )
        return None if answer["kind"] == "ready" else answer

    # ---- operators on stand-ins

    def norm_of(self, tensor: torch.Tensor, order: float, own: Mapping[int, Own]) -> torch.Tensor:
        """Return the norm of one tensor, wherever it lies; of a gradient the noted one, the same on all ranks."""
        if isinstance(tensor, Foreign):
            source = tensor._source
            if not isinstance(source, Away) or not tensor._whole:
                return _norm(tensor.fetched(), order)
            return torch.tensor(self.norm(source, order), dtype=tensor.dtype.to_real(), device=tensor.device)
        if id(tensor) in own:
            return own[id(tensor)].norm(order)
        return _norm(tensor, order)

    def by_id(self) -> dict[int, Own]:
        """Return which gradient is whose."""
        here = [own for own in self.own.values() if own.look() is not None]
        return {id(own.gradient()): own for own in here}

    def vector_norm(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Do ``linalg.vector_norm`` and ``norm`` over all elements."""
        tensor, *rest = args
        named = dict(zip((argument.name for argument in func._schema.arguments[1:]), rest, strict=False)) | kwargs
        dims = named.get("dim")
        over_all = not dims or sorted(d % tensor.dim() for d in dims) == list(range(tensor.dim()))
        if not over_all or named.get("keepdim") or named.get("dtype") is not None:
            return NotImplemented
        order = named.get("ord", named.get("p", 2))
        return self.norm_of(tensor, 2.0 if order is None else float(order), {})

    def foreach_norm(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Do ``_foreach_norm`` of a list of which some lie elsewhere."""
        if kwargs.get("dtype") is not None:
            return NotImplemented
        order, own = float(args[1]) if len(args) > 1 else 2.0, self.by_id()
        for tensor in args[0]:
            if id(tensor) in own:
                own[id(tensor)].note()  # before another rank waits for it
        return [self.norm_of(tensor, order, own) for tensor in args[0]]

    def unscale(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Divide what is here by the loss scale; find out whether anything anywhere is infinite or NaN."""
        tensors, found, scale = args
        own, here = self.by_id(), [tensor for tensor in tensors if not isinstance(tensor, Foreign)]
        for tensor in here:
            if id(tensor) in own:
                own[id(tensor)].note()
        away = [tensor._source for tensor in tensors if isinstance(tensor, Foreign)]
        if not all(math.isfinite(self.norm(source, math.inf)) for source in away if isinstance(source, Away)):
            found.fill_(1.0)
        if here:
            read(func, (here, found, scale), kwargs)


class Own:
    """The gradient of a parameter that this rank holds: what has become of it since the last backward pass."""

    def __init__(self, name: str, parameter: torch.Tensor, gradients: Gradients, shared: Shared | None) -> None:
        self.name, self.parameter, self._gradients, self.shared = name, parameter, gradients, shared
        self.notes: dict[tuple[float | None, int], torch.Tensor] = {}  # norms by order and edits
        self.copies: dict[int, torch.Tensor] = {}  # values by edits
        self.served = self.handed = False  # stepped with; read by the script
        self.restart()
        slot.own(parameter, self)

    def restart(self) -> None:
        """Begin to count: a backward pass has ended, or the holders' gradients were summed."""
        self._set(slot.get(self.parameter), 0)
        self.notes, self.copies, self.served, self.handed = {}, {}, False, False
        self.found = slot.get(self.parameter) is not None  # the script may put None there before others ask

    def _set(self, gradient: torch.Tensor | None, offset: int) -> None:
        self._seen = TensorWeakRef(gradient) if gradient is not None else None
        self._offset = self._last = offset
        self._base = gradient._version if gradient is not None else 0

    @property
    def apart(self) -> bool:
        """Whether other ranks hold a part of it."""
        return self.shared is not None and self.shared.apart

    def gradient(self) -> torch.Tensor | None:
        """Return it, as it was seen last; in any thread."""
        return self._seen() if self._seen is not None else None

    def edits(self) -> int | None:
        """Return how often it was edited; None if there is none."""
        gradient = self.gradient()
        return None if gradient is None else self._offset + gradient._version - self._base

    def look(self) -> int | None:
        """See whether the script has put another one there; return the edits. In the script's thread alone.

        Another thread must not touch the slot: the script may be emptying it, and lets go of Python's lock half-way.
        """
        with self._gradients.lock:
            now, edits = slot.get(self.parameter), self.edits()
            if edits is not None:
                self._last = edits
            if now is not self.gradient():
                self._set(now, self._last + 1)
            return self.edits()

    # ---- what stands before p.grad (torch/gradient.py)

    @property
    def pending(self) -> bool:
        """Whether something is to be done before the script gets it."""
        with self._gradients.lock:
            if self.apart or self._gradients.inside:
                return self.shared is not None
            if self._gradients.stepping or self.served:
                return False
            edits, self.handed = self.look(), True
            if edits is not None and self._gradients.copying and edits not in self.copies:
                return True
            return edits is not None and any(
                (order, edits) not in self.notes for order in tuple(self._gradients.orders)
            )

    def read(self) -> None:
        """Sum it over its holders, and note its norms: from here on the script may edit it."""
        if self.shared is not None:
            if self._gradients.inside:
                raise InputError(
                    f"the gradient of {self.name} was read inside the backward pass, where it is this rank's part "
                    "alone; read it after loss.backward()"
                )
            if self.shared.apart:
                self.shared.combine()
                self._gradients.tell()
        if self.look() is not None:
            self.note()
            if self._gradients.copying:
                self.copy()

    def note(self) -> None:
        """Note its norms as it is now."""
        for order in tuple(self._gradients.orders):
            self.norm(order)

    def copy(self) -> None:
        """Copy its values as they are now."""
        with self._gradients.lock, torch.no_grad():
            edits, gradient = self.edits(), self.gradient()
            if edits is not None and gradient is not None and edits not in self.copies:
                self.copies[edits] = gradient.to_dense().clone()
                for old in [key for key in self.copies if key < edits - 1]:
                    del self.copies[old]

    def norm(self, order: float) -> torch.Tensor:
        """Return its norm, and note it."""
        with self._gradients.lock, torch.no_grad():
            edits, gradient = self.edits(), self.gradient()
            assert edits is not None and gradient is not None
            if (order, edits) not in self.notes:
                self.notes[order, edits] = torch.linalg.vector_norm(self._dense(gradient), order)
                for old in [key for key in self.notes if key[1] <= edits - _NOTES]:
                    del self.notes[old]
            return self.notes[order, edits]

    def _dense(self, gradient: torch.Tensor) -> torch.Tensor:
        if gradient.layout != torch.strided:
            raise InputError(
                f"the gradient of {self.name} is sparse, which a split model does not support; make the embedding with "
                "sparse=False"
            )
        return gradient

    def row(self, order: float | None) -> list[float]:
        """Return what another rank is told: whether there is one, and its norms by edits."""
        with self._gradients.lock:
            if self.apart:
                return [_APART, *[-1.0, 0.0] * _NOTES]
            if not self.found:
                return [_ABSENT, *[-1.0, 0.0] * _NOTES]
            if order is None:
                return [_HERE, *[-1.0, 0.0] * _NOTES]
            self._norm_undisturbed(order)
            known = [(edits, float(norm)) for (each, edits), norm in self.notes.items() if each == order][-_NOTES:]
        known += [(-1, 0.0)] * (_NOTES - len(known))
        return [_HERE, *(number for pair in known for number in pair)]

    def _norm_undisturbed(self, order: float) -> None:
        """Note the norm, but not if the script's thread edits the gradient meanwhile."""
        gradient, edits = self.gradient(), self.edits()
        if gradient is None or edits is None or (order, edits) in self.notes:
            return
        with torch.no_grad():
            first, second = (torch.linalg.vector_norm(self._dense(gradient), order) for _ in range(2))
            if self.edits() == edits and torch.equal(first.nan_to_num(math.inf), second.nan_to_num(math.inf)):
                self.notes[order, edits] = first


class Away(Source):
    """The gradient of a parameter that another rank holds."""

    def __init__(self, name: str, keeper: int, gradients: Gradients) -> None:
        self.name, self.keeper, self._gradients = name, keeper, gradients
        self.what = f"{_READING} {name}, which lies on rank {keeper}"
        self._tensor: torch.Tensor | None = None
        self._base = 0
        self._put: torch.Tensor | None = None  # what the script has put there
        self._gone = False  # the script has put None there
        self._unseen = False
        self.operators = {
            aten.linalg_vector_norm: gradients.vector_norm,
            aten.norm: gradients.vector_norm,
            aten._foreach_norm: gradients.foreach_norm,
            aten._amp_foreach_non_finite_check_and_unscale_: gradients.unscale,
        }

    def restart(self) -> None:
        """Begin to count edits: a backward pass has ended."""
        self._base = self._tensor._version if self._tensor is not None else 0
        self._put, self._gone, self._unseen = None, False, False

    def edits(self) -> int:
        """Return how often the script has edited it.

        Raises:
            InputError: It was edited where nothing counts.
        """
        if self._unseen:
            raise InputError(
                f"the gradient of {self.name} was edited through .data, so whether rank {self.keeper} has done so too "
                "cannot be seen; edit p.grad itself"
            )
        return self._tensor._version - self._base if self._tensor is not None else 0

    def read(self) -> torch.Tensor:
        """Return its values."""
        value = self._gradients.fetch(self)
        assert self._tensor is not None
        return value.to(self._tensor.device)

    def wrote_unseen(self) -> None:
        """Note an edit through ``.data``."""
        self._unseen = True

    def of(self, parameter: torch.Tensor) -> torch.Tensor | None:
        """Return what ``parameter.grad`` is.

        Raises:
            InputError: It is still coming.
        """
        if self._gradients.stepping or self._gone:
            return None
        if self._gradients.inside:
            raise InputError(f"the gradient of {self.name} was read inside the backward pass; read it after it")
        if self._put is not None:
            return self._put
        if not self._gradients.is_present(self):
            return None
        if self._tensor is None:
            self._tensor = stand_in(parameter, self)
            self._base = 0
        return self._tensor

    def put(self, gradient: torch.Tensor | None) -> None:
        """Take what the script puts there."""
        if gradient is None:
            self._tensor, self._put, self._gone = None, None, True
        elif gradient is not self._tensor:
            self._put, self._gone = gradient, False


def weakly(method: Callable[..., Any], gone: Any = None) -> Callable[..., Any]:
    """Return a function that calls ``method`` as long as its object lives, and then returns ``gone``."""
    reference = weakref.WeakMethod(method)

    def call(*args: Any) -> Any:
        alive = reference()
        return alive(*args) if alive is not None else gone

    return call


def tensor_of(answer: Answer, what: str) -> torch.Tensor:
    """Return the tensor that was asked for.

    Raises:
        InputError: It was refused.
    """
    if isinstance(answer, torch.Tensor):
        return answer
    raise InputError(f"{what}: {answer.get('why', 'no value came')}")


def _gone(name: str, rank: int) -> dict[str, Any]:
    why = (
        f"rank {rank} has gone on and changed it; read the gradient of {name} before it is edited in place, stepped or "
        f"zeroed, or read it on rank {rank}"
    )
    return {"kind": "refused", "why": why}


_libraries: list[Any] = []


def _norm(tensor: torch.Tensor, order: float) -> torch.Tensor:
    norm: torch.Tensor = torch.linalg.vector_norm(tensor, order)
    return norm


def _count_unscaling() -> None:
    """Let ``GradScaler.unscale_`` count as the edit of a gradient that it is: its operator bumps no version."""
    if _libraries:
        return

    def unscale(gradients: list[torch.Tensor], found: torch.Tensor, scale: torch.Tensor) -> None:
        with torch._C._AutoDispatchBelowADInplaceOrView():
            aten._amp_foreach_non_finite_check_and_unscale_(gradients, found, scale)
        torch.autograd.graph.increment_version(gradients)

    library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    library.impl("_amp_foreach_non_finite_check_and_unscale_", unscale, "ADInplaceOrView")  # type: ignore[no-untyped-call]
    _libraries.append(library)
