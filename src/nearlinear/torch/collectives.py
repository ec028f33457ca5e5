"""Every wait for a peer: each has a deadline and names who is missing (``runtime/waiting.py``)."""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist

from nearlinear.runtime.liveness import Liveness
from nearlinear.runtime.waiting import Waiting


class Pending(Protocol):
    """An exchange under way."""

    def wait(self, timeout: datetime.timedelta = ...) -> bool: ...

    def is_completed(self) -> bool: ...


class Group:
    """Collective operations among ranks of the run.

    Attributes:
        rank: This rank's number in the run.
        size: Ranks of the run.

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
        self.rank = dist.get_rank()
        self.size = dist.get_world_size()
        self._waiting = Waiting(
            liveness, self.rank, self.size, deadline_s=deadline_s, silence_s=silence_s, step=lambda: Group.step
        )

    @property
    def process_group(self) -> dist.ProcessGroup:
        """What carries the messages."""
        return self._group

    @property
    def ranks(self) -> list[int]:
        """The run's numbers of those that take part, in their order."""
        return dist.get_process_group_ranks(self._group)

    def close(self) -> None:
        """Wait for what is under way and close the connections; the group is not used any more."""
        group = self.__dict__.pop("_group")
        if dist.is_initialized() and group is not dist.GroupMember.NON_GROUP_MEMBER:
            dist.destroy_process_group(group)

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

    def start_gather(self, whole: torch.Tensor, rows: torch.Tensor, what: str) -> Pending:
        """Begin to fill ``whole``, shape ``(N * n,)``, by every rank's ``rows``, shape ``(n,)``."""
        pending: Pending | None = self._guard(
            lambda: dist.all_gather_single(whole, rows, group=self._group, async_op=True), what
        )
        assert pending is not None
        return pending

    def start_reduce_scatter(self, rows: torch.Tensor, whole: torch.Tensor, what: str) -> Pending:
        """Begin to fill ``rows``, shape ``(n,)``, by this rank's part of the sum of every rank's ``whole``."""
        pending: Pending | None = self._guard(
            lambda: dist.reduce_scatter_single(rows, whole, group=self._group, async_op=True), what
        )
        assert pending is not None
        return pending

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

    def broadcast_json(self, value: Any, what: str = "a message") -> Any:
        """Return rank 0's ``value``, sent as JSON; the others' is not looked at."""
        payload = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        length = torch.tensor([payload.numel()])
        self.broadcast(length, what)
        if self.rank != 0:
            payload = torch.empty(int(length), dtype=torch.uint8)
        self.broadcast(payload, what)
        return json.loads(bytes(payload.tolist()))

    def barrier(self, what: str) -> None:
        """Return when every rank is here."""
        self.all_reduce(torch.zeros(1), what)

    def wait(self, pending: Pending, what: str) -> None:
        """Wait until the exchange is over.

        Raises:
            PeerLostError: A peer died, stalled or was cut off, or the deadline passed.
        """

        def done(limit_s: float) -> bool:
            try:
                pending.wait(datetime.timedelta(seconds=limit_s))
                return True
            except RuntimeError:
                if not pending.is_completed():
                    return False
            try:  # it failed, or came about after the time was up: where this process was stopped, say
                pending.wait(datetime.timedelta(seconds=limit_s))
                return True
            except RuntimeError as error:
                raise self._waiting.explain(error, what) from None

        self._waiting.until(done, what)

    def _guard(self, begin: Callable[[], Any], what: str) -> Any:
        try:
            return begin()
        except RuntimeError as error:
            raise self._waiting.explain(error, what) from None
