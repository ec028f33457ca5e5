"""Keeping what this rank computed for those who may read it, and reading what another rank computed.

    reader, rank 0                                       owner, rank 1
    loss.item() ── key, identity, epoch, path ──▶        computed it: the value
                                                         not yet there: wait
                ◀── tensor / absent ────────────         went past it: absent
    absent: read the arguments, compute it here

*Epochs* are the calls of a model: all ranks take part in each, so when one has ended where its output lies, no rank
can be before it. A value of at most ``SMALL`` bytes, and every output of a model, is kept until the call after the one
in which the owner's program let go of it has ended; others live as long as the owner's program holds them.

The owner *went past* a result if it has begun a later call or is at its end. If it stands in an exchange with others,
or has all arguments of the result and still does not compute it, that is taken for going past too, after a patience
that grows with what the reader has to move instead: a computation that only the reader does (``if nl.is_main(): ...``)
must not wait for ever. An answer that comes too early is never wrong, it only makes the reader compute.
"""

from __future__ import annotations

import json
import threading
import time
import weakref
from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from nearlinear.errors import InputError, NearlinearError
from nearlinear.runtime.messages import LONGEST, Malformed, Message, whole_number
from nearlinear.torch.pipeline.recipe import (
    Draw,
    Path,
    RandomState,
    Recipe,
    content,
    digest,
    pack_path,
    unpack_path,
    walk,
)

if TYPE_CHECKING:
    from nearlinear.torch.pipeline.values import Answer, Values

SMALL = 2**20  # bytes of a value that is kept whether or not the program keeps it
PATIENCE_S, PATIENCE_BYTES_PER_S = 0.02, 1e8  # with an owner that stands in an exchange, before the reader computes
SLOWER = 5.0  # patience with an owner that is in its own code
LONGEST_PATIENCE_S = 5.0
DRAW_PATIENCE_S = 5.0  # with a random result, which the reader had better not compute before the owner has drawn


class State:
    """A value at one time: what a tensor holds until it is written to.

    Args:
        recipe: How it came to be.
        tensor: The value on the owner; elsewhere a meta tensor.
    """

    __slots__ = ("__weakref__", "known", "recipe", "tensor")

    def __init__(self, recipe: Recipe, tensor: torch.Tensor) -> None:
        self.recipe, self.tensor = recipe, tensor
        self.known: torch.Tensor | None = None  # a small value that was read from the owner


class Owned(State):
    """A value that lies on this rank.

    Args:
        recipe: How it came to be.
        tensor: The value.
        ledger: Whom to tell when nobody holds it any more.
        keep: Whether it is to outlive its holders for an epoch.
    """

    __slots__ = ("keep", "ledger")

    def __init__(self, recipe: Recipe, tensor: torch.Tensor, ledger: Ledger, keep: bool) -> None:
        super().__init__(recipe, tensor)
        self.ledger, self.keep = ledger, keep

    def __del__(self) -> None:
        self.ledger.dying.append((self.recipe, self.tensor if self.keep else None))


class Ledger:
    """What this rank computed of placed values, by key.

    Args:
        values: What carries questions and answers.
    """

    def __init__(self, values: Values) -> None:
        self.values = values
        self.rank = values.session.rank
        self.lock = threading.RLock()  # held while a value is written to, copied, or looked for
        self.dying: deque[tuple[Recipe, torch.Tensor | None]] = deque()
        self._alive: dict[bytes, list[weakref.ref[Owned]]] = {}
        self._kept: dict[int, dict[bytes, list[tuple[Recipe, torch.Tensor]]]] = {}  # by the epoch of its death
        self._recipes: dict[int, list[weakref.ref[Recipe]]] = {}
        self._draws: dict[tuple[int, bytes], list[bytes]] = {}  # what stands for the random state before each
        self._wanted: set[bytes] = set()
        values.on_ended.append(self._ended)
        values.handlers["placed"] = self._asked

    # ---- what is computed

    def record(self, recipe: Recipe, tensor: torch.Tensor, *, output: bool = False) -> State:
        """Note a result; return what a tensor holds."""
        recipes = self._recipes.get(recipe.epoch)
        if recipes is None:
            recipes = self._recipes.setdefault(recipe.epoch, [])
        recipes.append(weakref.ref(recipe))
        if recipe.owner != self.rank:
            return State(recipe, tensor)
        state = Owned(recipe, tensor, self, output or tensor.nbytes <= SMALL)
        with self.lock:
            if self.dying:
                self._bury()
            alive = self._alive.get(recipe.key)
            if alive is None:
                self._alive[recipe.key] = [weakref.ref(state)]
            else:
                alive.append(weakref.ref(state))
        if recipe.key in self._wanted:
            with self.values.changed:
                self.values.changed.notify_all()
        return state

    def overwritten(self, state: State, copy: torch.Tensor | None) -> None:
        """Note that the memory of a value holds another one now; the lock is held since before it was written to."""
        if copy is not None:
            state.tensor = copy
        elif isinstance(state, Owned):
            alive = [ref for ref in self._alive.get(state.recipe.key, ()) if ref() is not state]
            self._alive[state.recipe.key] = alive

    def draw(self, key: bytes, state: RandomState) -> Draw:
        """Return the call of a random operator that begins, whose key would be ``key``."""
        draws = self._draws.setdefault((self.values.began, key), [])
        draws.append(digest(b"".join(map(content, state))))
        return Draw(key, len(draws), draws[-1])

    def _bury(self) -> None:
        while self.dying:
            recipe, tensor = self.dying.popleft()
            alive = [ref for ref in self._alive.get(recipe.key, ()) if ref() is not None]
            if alive:
                self._alive[recipe.key] = alive
            else:
                self._alive.pop(recipe.key, None)
            if tensor is not None:
                graves = self._kept.setdefault(self.values.began, {}).setdefault(recipe.key, [])
                if recipe.late or not graves:  # what has the same key has the same value
                    graves.append((recipe, tensor))

    def _ended(self, number: int) -> None:
        with self.lock:
            self._bury()
            for epoch in [epoch for epoch in self._kept if epoch < number]:
                del self._kept[epoch]
        for epoch in [epoch for epoch in self._recipes if epoch < number]:
            for ref in self._recipes.pop(epoch):
                recipe = ref()
                if recipe is not None:
                    recipe.seal()
        self._draws = {place: draws for place, draws in self._draws.items() if place[0] >= number}

    # ---- what is asked for

    def _asked(self, message: Message) -> Answer:
        epoch, key, identity = whole_number(message, "epoch"), _bytes(message, "key"), _bytes(message, "identity")
        needs = [(_hex(pair[0]), _hex(pair[1])) for pair in message.get("needs", ())]
        draw = _draw(message)
        patience = DRAW_PATIENCE_S if draw else float(message.get("patience", PATIENCE_S))
        path = unpack_path(message.get("path"))
        since: float | None = None
        values = self.values

        def ready() -> dict[str, Any] | None:
            nonlocal since
            past = values.began > epoch or values.closing
            if self._find(key, identity) is not None:
                return {"kind": "found"}
            if values.closing and values.began < epoch:
                return {
                    "kind": "refused",
                    "why": f"it has ended after call {values.began} of the model, and call {epoch} was made elsewhere; "
                    "every rank must call the model (guard what prints with nl.is_main(), not the call)",
                }
            if past or (draw and len(self._draws.get((epoch, draw.key), ())) >= draw.number):
                return self._absent(draw, epoch)
            stuck = values.ended >= epoch and values.stands() is not None
            if stuck or (needs and not draw and all(self._find(*need) is not None for need in needs)):
                since = since or time.monotonic()
                if time.monotonic() - since > (patience if stuck else SLOWER * patience):
                    return self._absent(draw, epoch, stuck=stuck)
            else:
                since = None
            return None

        self._wanted.add(key)
        try:
            answer = values.until(ready, f"rank {self.rank} did not come to a result of call {epoch}")
        finally:
            self._wanted.discard(key)
        if answer["kind"] != "found":
            return answer
        with self.lock:
            tensor = self._find(key, identity)
            if tensor is None:  # written to, or let go of, since
                return {"kind": "absent"}
            try:
                view = walk(tensor, path)
            except (ValueError, RuntimeError):  # laid out otherwise here
                return {"kind": "absent"}
            if view.is_cuda:
                torch.cuda.synchronize(view.device)
            return view.detach().cpu() if view.is_cuda else view.detach().clone()

    def _absent(self, draw: Draw | None, epoch: int, *, stuck: bool = False) -> dict[str, Any]:
        """Return the answer that sends the reader to compute; a random result must then come out the same."""
        made = self._draws.get((epoch, draw.key), []) if draw else []
        if draw and (made[draw.number - 1 : draw.number] != [draw.before] if made else stuck):
            return {
                "kind": "refused",
                "why": f"a random operator was called on the output {draw.number} times there and {len(made)} times "
                "here, or with other random numbers; call it on every rank, or on none but the reader's, after the "
                "same random numbers on all",
            }
        return {"kind": "absent"}

    def _find(self, key: bytes, identity: bytes) -> torch.Tensor | None:
        with self.lock:
            self._bury()
            candidates = [(recipe, tensor) for graves in self._kept.values() for recipe, tensor in graves.get(key, ())]
            for ref in self._alive.get(key, ()):
                state = ref()
                if state is not None:
                    candidates.append((state.recipe, state.tensor))
        for recipe, tensor in candidates:
            try:
                if recipe.identity() == identity:
                    return tensor
            except InputError:
                continue  # a plain argument has been changed since, so nobody knows any more whether it is the same
        return None

    # ---- what is read

    def read(self, recipe: Recipe) -> torch.Tensor:
        """Return a value: from its owner, or computed here from what its owner has.

        Raises:
            NearlinearError: The owner has let go of it, or of what it was computed from.
            PeerLostError: The owner is gone, or did not answer within the deadline.
        """
        values: dict[Recipe, torch.Tensor] = {}
        asked: set[Recipe] = set()
        stack = [recipe]
        with torch.no_grad(), torch._C._DisableAutocast():
            while stack:
                last = stack[-1]
                if last in values:
                    stack.pop()
                    continue
                if last not in asked:
                    asked.add(last)
                    value = last.value if last.value is not None else self._ask(last)
                    if value is not None:
                        values[last] = value
                        continue
                if not last.can_be_computed():
                    raise NearlinearError(
                        f"a value of call {last.epoch} of the model is read on rank {self.rank}, but its rank, "
                        f"{last.owner}, has let go of it; keep it on every rank, or read it before the next call"
                    )
                missing = [parent for parent in last.parents() if parent not in values]
                if missing:
                    stack += missing
                else:
                    values[last] = last.compute(values)
        return values[recipe]

    def _ask(self, recipe: Recipe) -> torch.Tensor | None:
        base, path = (recipe.args[0], recipe.path) if recipe.path else (recipe, ())
        fields = _question(base, path)
        if fields is None:
            return None
        answer = self.values.ask(recipe.owner, f"reading a result of rank {recipe.owner}", "placed", **fields)
        if isinstance(answer, torch.Tensor):
            return _as(answer, recipe)
        if answer["kind"] == "refused":
            raise NearlinearError(f"reading a result of rank {recipe.owner}: {answer.get('why')}")
        return None


def _question(base: Recipe, path: Path) -> dict[str, Any] | None:
    """Return the message that asks for a value; None if it would be too long."""
    parents = base.parents()
    bases = [parent.args[0] if parent.path else parent for parent in parents]
    moved = sum(parent.like.numel() * parent.like.element_size() for parent in parents if parent.like is not None)
    fields: dict[str, Any] = {
        "key": base.key.hex(),
        "identity": base.identity().hex(),
        "epoch": base.epoch,
        "path": pack_path(path),
        "patience": min(PATIENCE_S + moved / PATIENCE_BYTES_PER_S, LONGEST_PATIENCE_S),
        "needs": [[each.key.hex(), each.identity().hex()] for each in bases] if len(bases) <= 8 else [],
    }
    if base.draw is not None:
        fields["draw"] = [base.draw.key.hex(), base.draw.number, base.draw.before.hex()]
    return fields if len(json.dumps(fields)) < LONGEST - 64 else None


def _as(answer: torch.Tensor, recipe: Recipe) -> torch.Tensor:
    """Return the answer with the strides and on the device that its reader knows."""
    like = recipe.like
    if like is None:
        return answer
    if answer.shape != like.shape or answer.dtype != like.dtype:
        raise NearlinearError(
            f"rank {recipe.owner} has {tuple(answer.shape)} {answer.dtype} where this rank knows of "
            f"{tuple(like.shape)} {like.dtype}; do all ranks run the same program with the same versions?"
        )
    if answer.stride() != like.stride() and like.numel():
        answer = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype).copy_(answer)
    return answer if recipe.device is None else answer.to(recipe.device)


def _bytes(message: Mapping[str, Any], name: str) -> bytes:
    return _hex(message.get(name))


def _draw(message: Mapping[str, Any]) -> Draw | None:
    draw = message.get("draw")
    if draw is None:
        return None
    if not isinstance(draw, list) or len(draw) != 3 or not isinstance(draw[1], int):
        raise Malformed("of no draw")
    return Draw(_hex(draw[0]), draw[1], _hex(draw[2]))


def _hex(value: Any) -> bytes:
    try:
        return bytes.fromhex(value)
    except (TypeError, ValueError):
        raise Malformed("without a key") from None
