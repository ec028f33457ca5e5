"""Turning the steps that rank 0 reports into one live line during the run and a summary after it."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TextIO

from nearlinear.units import size

REDRAW_S = 0.1
KEPT = 10_000  # steps kept for the summary; of a longer run every second, fourth, ... one


@dataclass(frozen=True, slots=True)
class Step:
    """One optimizer step of the whole run, as rank 0 saw it.

    Args:
        step: Steps made so far.
        samples_per_s: Samples per second of all ranks together.
        waiting: Share of the step's time, 0 to 1, in which the rank waited for the exchange.
        loss: The loss, where it is known.
        predicted_samples_per_s: What was forecast, where it was.
    """

    step: int
    samples_per_s: float
    waiting: float = 0.0
    loss: float | None = None
    predicted_samples_per_s: float | None = None

    @classmethod
    def from_event(cls, event: Mapping[str, Any]) -> Step | None:
        """Return the step in an event; None if it is another event, or of another rank or model than the first."""
        first = event.get("rank", 0) == 0 and event.get("model", 0) == 0
        if event.get("kind") != "step" or not first or not {"step", "samples_per_s"} <= event.keys():
            return None
        return cls(**{name: event[name] for name in cls.__slots__ if name in event})


@dataclass(frozen=True, slots=True)
class Apart:
    """How a member of a run over the Internet stands (strategy ``local``).

    Args:
        round: The round in hand.
        members: How many are here.
        sent: Bytes since it entered.
        received: Bytes since it entered.
        alone_samples_per_s: What was measured while no other member was here; ``None``: there always was one.
        together_samples_per_s: What was measured while others were here, all members together.
    """

    round: int
    members: int
    sent: int
    received: int
    alone_samples_per_s: float | None = None
    together_samples_per_s: float | None = None

    @classmethod
    def from_event(cls, event: Mapping[str, Any]) -> Apart | None:
        """Return what is in an event; None if it is another event."""
        if event.get("kind") != "apart" or not {"round", "members", "sent", "received"} <= event.keys():
            return None
        return cls(**{name: event[name] for name in cls.__slots__ if name in event})


def live_text(step: Step, apart: Apart | None = None) -> str:
    """Return the live line.

    Args:
        step: The latest step.
        apart: How this member stands, where machines train apart.

    Example:
        >>> live_text(Step(120, 1234.0, 0.07, predicted_samples_per_s=1300.0))
        'step 120 · 1,234 samples/s · 7 % communicating · (predicted 1,300)'
        >>> live_text(Step(120, 1200.0, 0.07), Apart(12, 2, 4_500_000, 5_000_000, alone_samples_per_s=650.0))
        'round 12 · 2 members · step 120 · 1,200 samples/s = 1.85 x alone · 7 % waiting · sent 4.5 MB, received 5 MB'
    """
    parts = [f"step {step.step:,}"]
    if step.loss is not None:
        parts.append(f"loss {step.loss:.4g}")
    if apart is None:
        parts += [f"{_count(step.samples_per_s)} samples/s", f"{_percent(step.waiting)} communicating"]
    else:
        parts = [f"round {apart.round:,}", _members(apart.members), *parts]
        rate = f"{_count(step.samples_per_s)} samples/s"
        if apart.members > 1 and apart.alone_samples_per_s:
            rate += f" = {step.samples_per_s / apart.alone_samples_per_s:.3g} x alone"
        parts += [rate, f"{_percent(step.waiting)} waiting", _traffic(apart)]
    if step.predicted_samples_per_s is not None:
        parts.append(f"(predicted {_count(step.predicted_samples_per_s)})")
    return " · ".join(parts)


def summary_text(steps: Sequence[Step], wall_s: float, apart: Apart | None = None) -> str:
    """Return one line or a few on a run; nothing if it made no step.

    Args:
        steps: What was reported.
        wall_s: Seconds from the start to the end of the run.
        apart: How this member stood at the end, where machines trained apart.

    Example:
        >>> print(summary_text([Step(1, 900.0, 0.1), Step(2, 1000.0, 0.3, predicted_samples_per_s=1250.0)], 12.3))
        2 steps in 12.3 s · median 950 samples/s · 20 % of the time communicating
        predicted 1,250 samples/s, measured 950 (24 % slower)
    """
    if not steps:
        return ""
    last = max(step.step for step in steps)
    measured = statistics.median(step.samples_per_s for step in steps)
    waiting = statistics.fmean(step.waiting for step in steps)
    lines = [
        f"{last:,} step{'' if last == 1 else 's'} in {wall_s:,.1f} s · median {_count(measured)} samples/s · "
        f"{_percent(waiting)} of the time {'communicating' if apart is None else 'waiting for other members'}"
    ]
    if apart is not None:
        lines.append(f"{apart.round:,} round{'' if apart.round == 1 else 's'} · {_traffic(apart)} · {_gain(apart)}")
    predicted = next((s.predicted_samples_per_s for s in reversed(steps) if s.predicted_samples_per_s), None)
    if predicted is not None:
        off = measured / predicted - 1
        lines.append(
            f"predicted {_count(predicted)} samples/s, measured {_count(measured)} "
            f"({_percent(abs(off))} {'slower' if off < 0 else 'faster'})"
        )
    return "\n".join(lines)


def _gain(apart: Apart) -> str:
    """Return what the other members brought, as far as it was measured here."""
    alone, together = apart.alone_samples_per_s, apart.together_samples_per_s
    if together is None:
        return "no time with other members was measured"
    both = f"with others {_count(together)} samples/s"
    if alone is None:
        return f"{both}; this machine alone was not measured, for others were always here"
    return f"{both}, alone {_count(alone)}: {together / alone:.3g} x one machine"


def _traffic(apart: Apart) -> str:
    return f"sent {size(apart.sent)}, received {size(apart.received)}"


def _members(count: int) -> str:
    return f"{count} member{'' if count == 1 else 's'}"


def _count(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


class Live:
    """Keeps the live line as the last one on a terminal.

    Args:
        file: Where it is drawn; where that is no terminal, nothing is, and only the summary remains.
    """

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self._shown = file.isatty() and os.environ.get("TERM") != "dumb"
        self._drawn = False
        self._drawn_at = float("-inf")
        self._steps: list[Step] = []
        self._seen, self._every = 0, 1
        self._last: Step | None = None
        self._apart: Apart | None = None
        self._began = time.monotonic()

    def event(self, event: Mapping[str, Any]) -> None:
        """Note an event, and redraw the line if it is a step."""
        self._apart = Apart.from_event(event) or self._apart
        step = Step.from_event(event)
        if step is None:
            return
        self._note(step)
        now = time.monotonic()
        if self._shown and now - self._drawn_at >= REDRAW_S:
            self._drawn, self._drawn_at = True, now
            columns = os.get_terminal_size(self._file.fileno()).columns or 80  # 0: a terminal that was told no size
            self._write("\r\x1b[2K" + live_text(step, self._apart)[: columns - 1])

    def clear(self) -> None:
        """Make way for other output; the next step draws the line again."""
        if self._drawn:
            self._write("\r\x1b[2K")
            self._drawn = False

    def summary(self) -> str:
        """Return the summary of the run so far."""
        steps = self._steps if self._last is None or self._last is self._steps[-1] else [*self._steps, self._last]
        return summary_text(steps, time.monotonic() - self._began, self._apart)

    def _note(self, step: Step) -> None:
        self._last = step
        if self._seen % self._every == 0:
            self._steps.append(step)
            if len(self._steps) > KEPT:
                self._steps = self._steps[::2]
                self._every *= 2
        self._seen += 1

    def _write(self, text: str) -> None:
        try:
            self._file.write(text)
            self._file.flush()
        except OSError:  # the terminal is gone; the run goes on
            self._shown = self._drawn = False
