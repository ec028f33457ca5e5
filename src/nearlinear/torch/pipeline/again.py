"""Running a pass a second time as the first: its activations need not be kept meanwhile.

    forward    microbatch 0 | 1 | 2 | 3                              what enters the stage is kept of each
    backward                             0 again, 0 | 1 again, 1 ... what is computed within it, of one at a time

Random operators draw by their place (``draws.py``), so they draw the same again.

Source: T. Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016, arXiv 1604.06174.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from nearlinear.errors import InputError


class Again:
    """The circumstances of a pass that will be run again: buffers it writes, casts, versions of what it reads.

    Args:
        state: Parameters, buffers and constants that it reads.
        buffers: Places of those that it writes.
        doubtful: Whether it does so or something else, of each.
    """

    def __init__(self, state: Sequence[Any], buffers: Sequence[int], doubtful: Sequence[bool]) -> None:
        self._tensors: list[torch.Tensor] = [each for each in state if isinstance(each, torch.Tensor)]
        self._written: list[tuple[torch.Tensor, torch.Tensor]] = [
            (state[place], state[place].clone()) for place in buffers
        ]
        self._doubtful = doubtful
        self._versions: list[int] = []
        self._kinds = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
        self._casts = [(torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in self._kinds]
        self._cached = torch.is_autocast_cache_enabled()

    def ran(self) -> None:
        """Note that the first pass is over."""
        # Not by its version: the one of running statistics that an operator keeps stays as it was.
        self._written = [
            (buffer, value)
            for (buffer, value), doubtful in zip(self._written, self._doubtful, strict=True)
            if not (doubtful and torch.equal(buffer, value))
        ]
        changing = {id(buffer) for buffer, _ in self._written}
        self._tensors = [each for each in self._tensors if id(each) not in changing]
        self._versions = self._now()

    def _now(self) -> list[int]:
        return [each._version for each in self._tensors]

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Let the buffers be as they were before the pass; afterwards they are as they were meanwhile.

        Raises:
            InputError: Something that it reads was changed since.
        """
        if self._now() != self._versions:
            raise InputError(
                "a parameter was changed between a forward pass and its backward pass, which makes the activations "
                "again; change it after backward(), or plan without recompute"
            )
        now = [(buffer, buffer.clone()) for buffer, _ in self._written]
        with contextlib.ExitStack() as stack:
            for buffer, _ in now:  # who watches it for changes is to see none
                stack.enter_context(torch.autograd.grad_mode._unsafe_preserve_version_counter(buffer))
            _put(self._written)
            try:
                yield
            finally:
                _put(now)

    @contextlib.contextmanager
    def as_then(self) -> Iterator[None]:
        """Cast as in the first pass, and note what gradients need."""
        with contextlib.ExitStack() as stack:
            for kind, (enabled, dtype) in zip(self._kinds, self._casts, strict=True):
                stack.enter_context(torch.autocast(kind, dtype, enabled, self._cached))
            stack.enter_context(torch.enable_grad())
            yield


@torch.no_grad()
def _put(values: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    for buffer, value in values:
        buffer.copy_(value)
