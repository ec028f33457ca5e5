"""Foretelling, from the passes seen so far, whether a backward pass is the last before its gradients are used.

Gradient accumulation leaves the loop unchanged, so nothing says beforehand that a backward pass is the last of its
window. But loops repeat themselves. A cycle is what lies between two optimizer steps:

    cycle 1    b   b   b   b | step       nothing is known: every pass may be the last, so each is combined
               C   C   C   C
    cycle 2    b   b   b   b | step       the pattern (no, no, no, yes) is known: one exchange, overlapped with
               .   .   .   C              the last pass

A pass is also the last of a window when its gradients are gone at the next pass (SAM's first half step, a
discriminator's gradients from the generator's loss): somebody may have read them.
"""

from __future__ import annotations


class Windows:
    """Learn which backward passes of a cycle end a window.

    Example:
        >>> windows = Windows()
        >>> for _ in range(2):
        ...     first, second = windows.begin(fresh=True), windows.begin(fresh=False)
        ...     windows.step()
        >>> first, second
        (False, True)
    """

    def __init__(self) -> None:
        self._pattern: tuple[bool, ...] = ()
        self._cycle: list[bool] = []

    def begin(self, *, fresh: bool) -> bool:
        """Note that a backward pass begins; return whether it is expected to be the last of its window.

        Args:
            fresh: The gradients it adds to were dropped, zeroed or changed since the pass before.
        """
        if fresh:
            self.used()
        place = len(self._cycle)
        self._cycle.append(False)
        return self._pattern[place] if place < len(self._pattern) else True

    def used(self) -> None:
        """Note that the gradients of the latest pass were read."""
        if self._cycle:
            self._cycle[-1] = True

    def step(self) -> None:
        """Note that the optimizer stepped: the cycle is over."""
        self.used()
        if self._cycle:
            self._pattern, self._cycle = tuple(self._cycle), []
