"""How a run of several ranks ended: which failed first, why, and what to return to the shell."""

from __future__ import annotations

import signal
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class End:
    """How one rank ended.

    Args:
        rank: Its number.
        returncode: Its exit code, or minus the number of the signal that killed it.
        seconds: Seconds from the start of the run to its end.
    """

    rank: int
    returncode: int
    seconds: float

    @property
    def exit_code(self) -> int:
        """What a shell would show for it."""
        return self.returncode if self.returncode >= 0 else 128 - self.returncode

    def __str__(self) -> str:
        if self.returncode >= 0:
            return f"rank {self.rank} exited with code {self.returncode} after {self.seconds:,.1f} s"
        name = signal_name(-self.returncode)
        return f"rank {self.rank} was killed by {name} (signal {-self.returncode}) after {self.seconds:,.1f} s"


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run ended.

    Args:
        ends: One per rank, by rank.
        failure: The first that did not end with code 0, if any.
        stopped_by: The signal that the run was told to stop with, if any.
        overdue: The ranks that still ran when the time was up.

    Example:
        >>> ends = (End(0, 1, 2.5), End(1, -9, 2.0))
        >>> print(Outcome(ends, failure=ends[1]).message)
        rank 1 was killed by SIGKILL (signal 9) after 2.0 s; the other rank was ended
    """

    ends: tuple[End, ...]
    failure: End | None = None
    stopped_by: int | None = None
    overdue: tuple[int, ...] = ()

    @property
    def exit_code(self) -> int:
        """0 if all ranks ended with 0, else the first failing rank's code, or 128 and the number of the signal."""
        if self.overdue:
            return 124  # as timeout(1)
        if self.failure is None:
            return 0
        if self.failure.returncode < 0 and self.stopped_by is not None:
            return 128 + self.stopped_by
        return self.failure.exit_code

    @property
    def message(self) -> str | None:
        """One line on why the run failed; None if it did not."""
        if self.failure is None:
            return None
        if self.overdue:
            ranks = f"rank{'s' if len(self.overdue) > 1 else ''} {', '.join(map(str, self.overdue))}"
            return f"{ranks} of {len(self.ends)} still ran after {self.failure.seconds:,.1f} s and had to be killed"
        if self.stopped_by is not None:
            return f"stopped by {signal_name(self.stopped_by)}; {self.failure}{self._others()}"
        return f"{self.failure}{self._others()}"

    def _others(self) -> str:
        others = [end for end in self.ends if end != self.failure]
        done = sum(end.returncode == 0 for end in others)
        if not others:
            return ""
        if 0 < done < len(others):
            return f"; of the other {len(others)} ranks {done} had finished and {len(others) - done} ended too"
        them = "the other rank" if len(others) == 1 else f"the other {len(others)} ranks"
        return f"; {them} had finished" if done else f"; {them} {'was' if len(others) == 1 else 'were'} ended"


def signal_name(number: int) -> str:
    """Return ``"SIGKILL"`` for 9; a real-time signal has no name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return "a signal"
