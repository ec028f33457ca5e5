"""Turning what members say of their steps into how long a round is, and which part of a batch each of them takes."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

WARM = 2  # updates of a member in which libraries wake up, whose times say nothing
SMOOTH = 0.3  # of a new measurement in the running one
IDLE = 1 / 3  # of a core: with less a process waits for something else, a GPU say, and rounds have what is left of it

Interval = Callable[[float, float, float], int]
Fractions = Callable[[Sequence[float], Sequence[float]], list[float]]


@dataclass(slots=True)
class Speed:
    """What is known of a member's speed; 0 while it is not.

    Args:
        near: It is on the centre's machine.
        part: Of every batch.
        step_s: Seconds of a step.
        exchange_s: Seconds that an exchange takes it, the wait for others left out.
        work_s: Seconds of the processor that a round takes it.
        step_work_s: And a step.
        updates: That it has told of.
    """

    near: bool = False
    part: float = 0.0
    step_s: float = 0.0
    exchange_s: float = 0.0
    work_s: float = 0.0
    step_work_s: float = 0.0
    updates: int = 0

    def note(self, *, step_s: float, exchange_s: float, work_s: float, step_work_s: float) -> None:
        """Note what it says; a step of no time: it made none."""
        self.updates += 1
        if not step_s or self.updates <= WARM:
            return
        pace = SMOOTH if self.step_s else 1.0
        self.step_s += pace * (step_s - self.step_s)
        self.exchange_s += pace * (exchange_s - self.exchange_s)
        self.work_s += pace * (work_s - self.work_s)
        self.step_work_s += pace * (step_work_s - self.step_work_s)


class Pace:
    """Steps per round, and parts of batches.

    Args:
        interval: Steps per round, from the seconds of an exchange and of a step, and the processor time that a round
            takes in that of a step.
        fractions: Each member's part of a batch, from the parts before (0: a newcomer) and the seconds of a step (0
            while unknown).
    """

    def __init__(self, interval: Interval, fractions: Fractions) -> None:
        self._interval, self._fractions = interval, fractions
        self._work_s = self._worked = 0.0  # seconds of the processor that a round takes this thread, and took in all

    def every(self, speeds: Sequence[Speed]) -> int | None:
        """Return the steps of the next round; None while nothing is known. To be called once a round."""
        worked, self._worked = time.thread_time() - self._worked, time.thread_time()
        self._work_s += SMOOTH * (worked - self._work_s)
        known = [each for each in speeds if each.step_s]
        if not known:
            return None
        # The processor of the member beside the centre does the centre's work too.
        burden = max(
            (each.work_s + self._work_s * each.near) / max(each.step_work_s, IDLE * each.step_s) for each in known
        )
        return self._interval(max(each.exchange_s for each in known), max(each.step_s for each in known), burden)

    def shares(self, speeds: Mapping[int, Speed], *, again: bool) -> dict[int, tuple[float, float]]:
        """Return where every member's part of a batch begins and ends, as fractions.

        Args:
            speeds: By member, in the order of their numbers.
            again: A round is over, so the time of a step may be another than before.
        """
        found: dict[int, tuple[float, float]] = {}
        if not speeds:
            return found
        begin = 0.0
        known = [each.step_s if again else 0.0 for each in speeds.values()]
        parts = self._fractions([each.part for each in speeds.values()], known)
        for (member, speed), part in zip(speeds.items(), parts, strict=True):
            found[member] = begin, begin + part
            begin += part
            speed.part = part
        return found
