"""Every wait for a peer: each has a deadline and names who is missing.

A wait looks at the transport once a second and at liveness in between. So it ends in seconds when a peer died, is
patient with a peer that is alive and busy elsewhere, and in the end says where that peer was last seen.
"""

from __future__ import annotations

import datetime
import json
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist

from nearlinear import events
from nearlinear.errors import InputError, NearlinearError, PeerLostError
from nearlinear.runtime.liveness import Liveness, Loss
from nearlinear.runtime.membership import Progress
from nearlinear.units import seconds

_POLL = datetime.timedelta(seconds=1)
_NOTICE_AFTER_S = 15.0
OWN_CODE = "its own code"

noticed = threading.Event()  # a wait has ended with the news that a peer is gone


class Pending(Protocol):
    """An exchange under way."""

    def wait(self, timeout: datetime.timedelta = ...) -> bool: ...

    def is_completed(self) -> bool: ...


class Group:
    """Collective operations among all ranks of the run.

    Args:
        process_group: What carries the messages.
        liveness: Who still answers.
        deadline_s: Seconds that a wait for a living peer may take.
        silence_s: Seconds within which liveness notices a peer that is gone.
    """

    step = 0  # of the run, for messages

    def __init__(
        self, process_group: dist.ProcessGroup, liveness: Liveness, *, deadline_s: float, silence_s: float
    ) -> None:
        self._group = process_group
        self._liveness = liveness
        self._deadline_s, self._silence_s = deadline_s, silence_s
        self.rank = dist.get_rank()
        self.size = dist.get_world_size()

    def start_all_reduce(self, tensor: torch.Tensor, what: str) -> Pending:
        """Begin to sum ``tensor`` over the ranks, in place."""
        pending: Pending | None = self._guard(lambda: dist.all_reduce(tensor, group=self._group, async_op=True), what)
        assert pending is not None
        return pending

    def all_reduce(self, tensor: torch.Tensor, what: str) -> torch.Tensor:
        """Sum ``tensor`` over the ranks, in place, and return it."""
        self.wait(self.start_all_reduce(tensor, what), what)
        return tensor

    def start_broadcast(self, tensor: torch.Tensor, source: int, what: str) -> Pending:
        """Begin to overwrite ``tensor`` by that of the rank ``source``."""
        pending: Pending | None = self._guard(
            lambda: dist.broadcast(tensor, src=source, group=self._group, async_op=True), what
        )
        assert pending is not None
        return pending

    def broadcast(self, tensor: torch.Tensor, what: str) -> None:
        """Overwrite ``tensor`` by rank 0's."""
        self.wait(self.start_broadcast(tensor, 0, what), what)

    def all_gather(self, tensor: torch.Tensor, what: str) -> list[torch.Tensor]:
        """Return every rank's ``tensor``; all have the same shape."""
        tensor = tensor.contiguous()
        parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size(self._group))]
        pending: Pending | None = self._guard(
            lambda: dist.all_gather(parts, tensor, group=self._group, async_op=True), what
        )
        assert pending is not None
        self.wait(pending, what)
        return parts

    def all_gather_rows(self, tensor: torch.Tensor, rows: Sequence[int], what: str) -> list[torch.Tensor]:
        """Return every rank's ``tensor``; rank ``r``'s has ``rows[r]`` rows, and the other dimensions agree."""
        most = max(rows)
        padded = tensor.new_zeros((most, *tensor.shape[1:]))
        padded[: tensor.shape[0]] = tensor
        return [part[:n] for part, n in zip(self.all_gather(padded, what), rows, strict=True)]

    def all_gather_json(self, value: Any, what: str = "a message") -> list[Any]:
        """Return every rank's ``value``, sent as JSON (never pickled)."""
        payload = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        lengths = self.all_gather(torch.tensor([payload.numel()]), what)
        parts = self.all_gather_rows(payload, [int(length) for length in lengths], what)
        return [json.loads(bytes(part.tolist())) for part in parts]

    def barrier(self, what: str) -> None:
        """Return when every rank is here."""
        self.all_reduce(torch.zeros(1), what)

    def wait(self, pending: Pending, what: str) -> None:
        """Wait until the exchange is over.

        Raises:
            PeerLostError: A peer died, stalled or was cut off, or the deadline passed.
        """
        began, noticed = time.monotonic(), False
        patience, before = min(_NOTICE_AFTER_S, self._deadline_s / 4), dict[int, Progress]()
        self._liveness.where(Group.step, what)
        while True:
            try:
                pending.wait(_POLL)
                self._liveness.where(Group.step, OWN_CODE)
                return
            except RuntimeError as error:
                if pending.is_completed():
                    raise self._explain(error, what) from None
            loss = self._liveness.lost()
            waited = time.monotonic() - began
            if loss is not None:
                raise lost(loss, what) from None
            if waited > self._deadline_s:
                rank, where = self._elsewhere(what)
                raise PeerLostError(
                    f"waited {seconds(waited)} in {what} for {where}; do all ranks call the same steps? "
                    "NEARLINEAR_DEADLINE='1 h' waits longer",
                    rank,
                ) from None
            if waited > patience and not noticed:
                noticed = True
                before = self._liveness.progress()
                message = f"waiting in {what} for {self._elsewhere(what)[1]}, up to {seconds(self._deadline_s)}"
                events.publish("notice", message=message)
                print(f"nearlinear: {message}", file=sys.stderr, flush=True)
            if waited > 2 * patience and before:
                self._require_one_exchange(before)
                before = {}

    def _guard(self, begin: Callable[[], Any], what: str) -> Any:
        try:
            return begin()
        except RuntimeError as error:
            raise self._explain(error, what) from None

    def _explain(self, error: RuntimeError, what: str) -> NearlinearError:
        return explain(error, what, self._liveness, self._silence_s)

    def _require_one_exchange(self, before: Mapping[int, Progress]) -> None:
        """Raise if all ranks have stood since ``before``, each in an exchange, but not in the same one."""
        now = self._liveness.progress()
        places = {rank: (place.step, place.at) for rank, place in now.items()}
        stood = places == {rank: (place.step, place.at) for rank, place in before.items()}
        exchanges = {at for _, at in places.values()}
        if not stood or len(places) < self.size or OWN_CODE in exchanges or len(exchanges) == 1:
            return
        other = next(rank for rank, (_, at) in places.items() if at != places[0][1])
        raise InputError(
            f"{now[0]}, while {now[other]}: each waits for the other; every rank must make the same calls "
            "(guard what prints and writes with nl.is_main(), never what all ranks take part in, such as nl.save)"
        )

    def _elsewhere(self, what: str) -> tuple[int | None, str]:
        """Return the first rank that is not in this exchange, and a description of all such ranks."""
        away = [place for place in self._liveness.progress().values() if place.rank != self.rank and place.at != what]
        if not away:
            return None, "the other ranks, which are in it too"
        more = f" and {len(away) - 3} more" if len(away) > 3 else ""
        return away[0].rank, "; ".join(map(str, away[:3])) + more


def explain(error: RuntimeError, what: str, liveness: Liveness, silence_s: float) -> NearlinearError:
    """Return who is missing after the transport failed; liveness may learn it a moment later."""
    until = time.monotonic() + silence_s + 2.0
    while time.monotonic() < until:
        loss = liveness.wait_lost(0.5)
        if loss is not None:
            return lost(loss, what)
        for place in liveness.progress(timeout_s=0.5).values():
            if place.left:
                return PeerLostError(f"{place}, while others wait for it in {what}", place.rank)
    first_line = str(error).strip().splitlines()[0]
    return NearlinearError(f"{what} failed although every rank still answers: {first_line}")


def lost(loss: Loss, what: str) -> PeerLostError:
    """Return the error for a peer that is gone; from here on its wait has ended by itself."""
    noticed.set()
    return PeerLostError(f"{loss}; it was missing in {what}", loss.rank)
