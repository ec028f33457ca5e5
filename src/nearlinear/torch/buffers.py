"""Keeping buffers that training changes (running statistics, moving averages) equal on all ranks.

Each rank changes a buffer by what its own share says; the common value moves by the weighted mean of those changes:
``buffer = base + sum_r f_r (buffer_r - base)``. For running means that is what one process would have; for running
variances the spread between shares is missing (the start of a run says so). A buffer that no rank changed stays
exactly as it was.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from nearlinear.torch.collectives import Group, Pending
from nearlinear.torch.session import Session


@dataclass(slots=True)
class _Followed:
    module: weakref.ref[nn.Module]  # a model that the script drops is not held here
    name: str
    base: torch.Tensor

    def now(self) -> torch.Tensor:
        value: torch.Tensor = getattr(self.module(), self.name)
        return value


class Buffers:
    """The floating-point buffers of a model.

    Args:
        model: Whose buffers.
        session: The run.
        group: Where they are exchanged; None in a run of one process, which has nothing to do.
    """

    def __init__(self, model: nn.Module, session: Session, group: Group | None) -> None:
        self._session, self._group = session, group
        self.pending: list[Pending] = []
        self._flat: list[tuple[list[_Followed], torch.Tensor]] = []
        self._followed: dict[str, _Followed] = {}
        self._owners: dict[str, tuple[weakref.ref[nn.Module], str]] = {}
        self._others: dict[str, tuple[weakref.ref[nn.Module], str]] = {}
        self._seen: dict[str, tuple[int, int]] = {}
        statistics = []
        for path, module in model.named_modules():
            for name, buffer in module.named_buffers(recurse=False):
                full = f"{path}.{name}" if path else name
                if isinstance(module, nn.SyncBatchNorm):
                    continue
                kind = self._owners if buffer.is_floating_point() else self._others
                kind[full] = (weakref.ref(module), name)
                self._seen[full] = (id(buffer), buffer._version)
                if isinstance(module, _BatchNorm) and full in self._owners:
                    statistics.append(full)
        for full in statistics:
            owner, name = self._owners[full]
            self._followed[full] = _Followed(owner, name, getattr(owner(), name).detach().clone())

    def changed(self) -> list[str]:
        """Return the names of the buffers that training has changed and that are not kept equal yet."""
        names = []
        for full, (owner, name) in self._owners.items():
            buffer = getattr(owner(), name)
            if full not in self._followed and (id(buffer), buffer._version) != self._seen[full]:
                names.append(full)
        return names

    def own(self) -> dict[str, float]:
        """Return a sum of each buffer that training has changed and that is not combined, being no real number."""
        sums = {}
        for full, (owner, name) in self._others.items():
            buffer = getattr(owner(), name)
            if (id(buffer), buffer._version) != self._seen[full]:
                sums[full] = float(buffer.abs().sum() if buffer.is_complex() else buffer.double().sum())
        return sums

    def follow(self, names: Iterable[str]) -> None:
        """Keep these buffers equal from now on; all ranks call it with the same names."""
        for full in names:
            if full not in self._followed:
                owner, name = self._owners[full]
                # What it was before it changed is gone; from zero, the first exchange yields the weighted mean.
                self._followed[full] = _Followed(owner, name, torch.zeros_like(getattr(owner(), name)))

    def equal(self) -> list[tuple[str, torch.Tensor]]:
        """Return the buffers that every rank has just been given the same values of."""
        return [(full, followed.base) for full, followed in self._followed.items()]

    def start(self, fraction: float) -> None:
        """Begin to combine what every rank changed.

        Args:
            fraction: This rank's part of the samples.
        """
        if self._group is None:
            return
        kinds: dict[tuple[torch.device, torch.dtype], list[_Followed]] = {}
        for followed in self._followed.values():
            kinds.setdefault((followed.base.device, followed.base.dtype), []).append(followed)
        for each in kinds.values():
            deltas = [f.now().detach() - f.base if fraction else torch.zeros_like(f.base) for f in each]
            flat = torch.cat([delta.flatten() for delta in deltas]).mul_(fraction)
            self._flat.append((each, flat))
            self.pending.append(self._group.start_all_reduce(flat, "the exchange of buffers"))

    @torch.no_grad()
    def finish(self) -> None:
        """Write the combined buffers; what ``start`` began has been waited for."""
        for each, flat in self._flat:
            parts = torch.split(flat, [followed.base.numel() for followed in each])
            for followed, part in zip(each, parts, strict=True):
                followed.base.add_(part.view_as(followed.base))
                followed.now().copy_(followed.base)
        self.pending, self._flat = [], []
