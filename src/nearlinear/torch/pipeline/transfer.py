"""Moving tensors between the ranks of a pipeline, beside the computing; every wait has a deadline and names the peer.

Activations go to later ranks, gradients to earlier ones, so each direction of a pair carries one kind, in an order
that both ends know. A direction has a group of its own: what waits in one never holds up the other.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping

import torch

from nearlinear.torch.collectives import Group, Pending
from nearlinear.torch.session import Session

_UNSENT = 32  # messages under way to one rank, after which a further one waits


class Links:
    """The directions in which this rank sends or receives.

    Args:
        session: The run.
        pairs: All directions used by any rank, (from, to), in the same order on all ranks.
        device: Of the tensors.
    """

    def __init__(self, session: Session, pairs: Iterable[tuple[int, int]], device: torch.device) -> None:
        self.rank = session.rank
        self._groups: Mapping[tuple[int, int], Group] = {}
        groups = {}
        for pair in pairs:  # every rank opens every group
            group = session.new_group(device, pair)
            if self.rank in pair and group is not None:
                groups[pair] = group
        self._groups = groups
        self._sent: dict[int, deque[tuple[Pending, torch.Tensor]]] = {}
        self.waited_s = 0.0  # for messages, whether they or what makes them took the time

    def send(self, tensor: torch.Tensor, to: int, what: str) -> None:
        """Begin to send a tensor; it must not be changed before ``flush``."""
        group = self._groups[self.rank, to]
        tensor = _bytes(tensor.contiguous())
        under_way = self._sent.setdefault(to, deque())
        under_way.append((group.start_broadcast(tensor, self.rank, what), tensor))
        while len(under_way) > _UNSENT:
            self.wait(group, under_way.popleft()[0], what)

    def expect(self, tensor: torch.Tensor, sender: int, what: str) -> Arriving:
        """Begin to receive into ``tensor``, which is contiguous."""
        group = self._groups[sender, self.rank]
        pending = group.start_broadcast(_bytes(tensor), sender, what)
        return Arriving(tensor, lambda: self.wait(group, pending, what))

    def flush(self, what: str) -> None:
        """Wait until all that was sent has been taken."""
        for to, under_way in self._sent.items():
            while under_way:
                self.wait(self._groups[self.rank, to], under_way.popleft()[0], what)

    def wait(self, group: Group, pending: Pending, what: str) -> None:
        """Wait for a message, and count the time."""
        began = time.perf_counter()
        group.wait(pending, what)
        self.waited_s += time.perf_counter() - began


class Arriving:
    """A tensor that is being received."""

    def __init__(self, tensor: torch.Tensor, wait: Callable[[], None]) -> None:
        self._tensor, self._wait = tensor, wait

    def take(self) -> torch.Tensor:
        """Wait for it."""
        self._wait()
        return self._tensor


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor's memory: no transport knows every type of number."""
    return tensor.reshape(-1).view(torch.uint8)
