"""Turning what several ranks found for a parameter that they all hold into one gradient, the same on all of them.

A parameter that several stages use is held by all their ranks; what they found is summed when its gradient is read,
or stepped, and once for several backward passes:

    passes 1, 2     g0 on rank 0, g1 on rank 1          nothing is sent
    p.grad read     g0 + g1 on both                     one exchange
    pass 3          set aside; g0' and g1' start anew
    p.grad read     what was set aside + (g0' + g1')
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Protocol

import torch

from nearlinear.errors import DriftError
from nearlinear.torch import gradient as slot
from nearlinear.torch.collectives import Group
from nearlinear.torch.state import _ROUNDING as ROUNDING
from nearlinear.torch.state import _checksum as checksum

_LARGE = 256 * 1024  # bytes of a gradient that travels alone


class Member(Protocol):
    """The gradient of one of the parameters."""

    name: str
    parameter: torch.Tensor

    def restart(self) -> None:
        """Note that it was summed."""


class Shared:
    """Parameters that the same ranks hold: each finds a part of their gradients."""

    def __init__(self, holders: tuple[int, ...], rank: int, group: Group | None, lock: threading.RLock) -> None:
        self.holders, self.rank, self._group, self._lock = holders, rank, group, lock
        self.members: list[Member] = []
        self.apart = False
        self._aside: list[torch.Tensor | None] = []

    def set_aside(self) -> None:
        """Keep the sums out of the way of the backward pass that begins, unless there are none yet."""
        if self.apart or self._aside:
            return
        self._aside = [slot.get(each.parameter) for each in self.members]
        for each in self.members:
            slot.put(each.parameter, None)

    def combine(self) -> None:
        """Replace each member's gradient by the sum over the holders, added to what was there before."""
        what = f"the sum of the gradients of {self.members[0].name}"
        parameters = [each.parameter for each in self.members]
        gradients = [slot.get(parameter) for parameter in parameters]
        found = torch.tensor([float(each is not None) for each in gradients], device=parameters[0].device)
        self._sum([found], what)
        somewhere = [n for n, count in enumerate(found.tolist()) if count]
        with torch.no_grad():
            sums = {n: _dense_or_zeros(gradients[n], parameters[n]) for n in somewhere}
            self._sum(list(sums.values()), what)
            for n, parameter in enumerate(parameters):
                before = self._aside[n] if self._aside else None
                if before is not None and n in sums:
                    sums[n] = before.add_(sums[n])
                slot.put(parameter, sums.get(n, before))
        with self._lock:
            self._aside = []
            for each in self.members:
                each.restart()
            self.apart = False

    def _sum(self, tensors: Sequence[torch.Tensor], what: str) -> None:
        """Sum over the holders, in place; small ones travel together."""
        assert self._group is not None
        alone = [each for each in tensors if each.nbytes >= _LARGE]
        together: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
        for each in tensors:
            if each.nbytes < _LARGE:
                together.setdefault((each.device, each.dtype), []).append(each)
        flats = [torch.cat([each.reshape(-1) for each in small]) for small in together.values()]
        for pending in [self._group.start_all_reduce(each, what) for each in (*alone, *flats)]:
            self._group.wait(pending, what)
        for flat, small in zip(flats, together.values(), strict=True):
            for each, part in zip(small, torch.split(flat, [each.numel() for each in small]), strict=True):
                each.copy_(part.view_as(each))

    @torch.no_grad()
    def require_equal(self, step: int) -> None:
        """Check that the holders have the same parameters; what differs by rounding is set to the first holder's.

        Raises:
            DriftError: One differs by more.
        """
        what, rank = f"comparing the holders after step {step}", self.holders.index(self.rank)
        sums = torch.zeros(len(self.holders), len(self.members), dtype=torch.int64)
        sums[rank] = torch.stack([checksum(each.parameter).cpu() for each in self.members])
        device = self.members[0].parameter.device
        sums = sums.to(device)
        self._sum([sums], what)
        for number in (sums != sums[0]).any(0).nonzero().flatten().tolist():
            name, parameter = self.members[number].name, self.members[number].parameter
            reference = parameter.detach().clone()
            assert self._group is not None
            self._group.wait(self._group.start_broadcast(reference, self.holders[0], what), what)
            off = torch.zeros(len(self.holders), dtype=torch.float64, device=device)
            off[rank] = (parameter - reference).abs().max().nan_to_num(1e300)
            self._sum([off], what)
            worst, largest = int(off.argmax()), float(reference.abs().max())
            if float(off[worst]) > ROUNDING.get(parameter.dtype, 0.0) * max(largest, 1e-30):
                raise DriftError(
                    f"after step {step} rank {self.holders[worst]}'s {name} differs from rank {self.holders[0]}'s by "
                    f"{float(off[worst]):.3g} (largest value {largest:.3g}); was it changed on one rank only? change "
                    "parameters on all ranks alike"
                )
            parameter.copy_(reference)


def _dense_or_zeros(gradient: torch.Tensor | None, parameter: torch.Tensor) -> torch.Tensor:
    return (
        torch.zeros_like(parameter, memory_format=torch.contiguous_format)
        if gradient is None
        else gradient.contiguous()
    )
