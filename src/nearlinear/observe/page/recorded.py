"""Turning a run's record into the page of its report: what was planned, and what was measured beside it."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Sequence
from pathlib import Path

from nearlinear.core.forecast import Point
from nearlinear.observe.live import Apart
from nearlinear.observe.page.content import Bar, Comparison, Content, Figure, Measured, Stage, Timeline
from nearlinear.observe.page.text import count, percent
from nearlinear.observe.page.timeline import kind
from nearlinear.observe.record import Run, comparable
from nearlinear.planning.simulate.values import Span
from nearlinear.units import seconds, size


def report(run: Run, others: Sequence[Run] = ()) -> Content:
    """Return what the page of a run shows.

    Args:
        run: The run.
        others: Runs of the same script with the same arguments, whose speed is drawn beside the forecast.
    """
    plan = run.plan or Content("")
    expected = comparable(run.plan, run.processes, run.strategy)
    name = Path(run.script).name
    arguments = f" {' '.join(run.arguments)}" if run.arguments else ""
    rate, waiting = median_rate(run), _waiting(run)
    timelines = tuple(each for each in plan.timelines if each.name != "measured")
    return dataclasses.replace(
        plan,
        title=f"{name} on {_processes(run.processes)}",
        about=f"{name}{arguments}, begun {run.began.replace('T', ' ')} on {', '.join(run.hosts)}",
        figures=_figures(run, rate, waiting, expected),
        measured=_points([run, *others]),
        stages=_stages(plan.stages, run.measured),
        timelines=(*timelines, run.measured) if run.measured else timelines,
        pace=run.reports,
        expected=expected,
        spent=_spent(run, rate, waiting, expected),
        compared=_compared(rate, waiting, expected, run),
        notes=(*_ending(run), *run.notices, *filter(None, [plan.about]), *plan.notes, _versions(run)),
    )


def median_rate(run: Run) -> float | None:
    """Return the samples per second of the middle report; ``None`` without any."""
    rates = [each.samples_per_s for each in run.reports if math.isfinite(each.samples_per_s)]
    return statistics.median(rates) if rates else None


def _waiting(run: Run) -> float | None:
    shares = [each.waiting for each in run.reports if math.isfinite(each.waiting)]
    return statistics.fmean(shares) if shares else None


def _figures(run: Run, rate: float | None, waiting: float | None, expected: Point | None) -> tuple[Figure, ...]:
    found = []
    if rate is not None:
        remark = f"{off(rate, expected.rate)} than the forecast" if expected is not None else "median"
        found.append(Figure("samples/s", count(rate), remark))
    if waiting is not None:
        what = "communicating" if run.apart is None else "waiting for other members"
        found.append(Figure(what, percent(waiting), "of the time of rank 0"))
    if run.apart is not None:
        found += _apart(run.apart)
    found.append(Figure("processes", f"{run.processes}", f"on {len(run.hosts)} machine{'s' * (len(run.hosts) > 1)}"))
    found.append(Figure("steps", f"{run.steps:,}", f"in {run.seconds:,.1f} s"))
    if run.exit_code is None:
        ended = Figure("end", "none", "it was killed or goes on")
    else:
        ended = Figure("exit code", str(run.exit_code), "as it should" if run.exit_code == 0 else "see the notes")
    return (*found, ended)


def _apart(apart: Apart) -> list[Figure]:
    """Return how a member stood among others far away."""
    found = [
        Figure("rounds", f"{apart.round:,}", f"{apart.members} member{'s' * (apart.members != 1)} at the end"),
        Figure("sent", size(apart.sent), f"received {size(apart.received)}"),
    ]
    alone, together = apart.alone_samples_per_s, apart.together_samples_per_s
    if alone and together:
        found.append(Figure("over this machine alone", f"{together / alone:.3g} x", f"{count(alone)} samples/s alone"))
    return found


def off(measured: float, predicted: float) -> str:
    """Return how far a speed is from its forecast.

    Example:
        >>> off(90.0, 100.0), off(125.0, 100.0)
        ('10 % slower', '25 % faster')
    """
    share = measured / predicted - 1
    return f"{percent(abs(share))} {'slower' if share < 0 else 'faster'}"


def _points(runs: Sequence[Run]) -> tuple[Measured, ...]:
    """Return the speed at each number of processes: of the first run given that has one."""
    found: dict[int, Measured] = {}
    for run in runs:
        rate = median_rate(run)
        if rate is not None and rate > 0:
            found.setdefault(run.processes, Measured(run.processes, rate, f"begun {run.began.replace('T', ' ')}"))
    return tuple(found[devices] for devices in sorted(found))


def _stages(stages: tuple[Stage, ...], measured: Timeline | None) -> tuple[Stage, ...]:
    """Return the stages with what their slowest device took to compute a microbatch, where it said so."""
    if measured is None:
        return stages
    found = []
    for stage in stages:
        times = [
            took for device in _devices(stage.devices) if (took := _microbatch(measured.spans, device)) is not None
        ]
        found.append(dataclasses.replace(stage, measured=max(times)) if times else stage)
    return tuple(found)


def _devices(written: str) -> range:
    """Return the devices in ``"3"`` or ``"0-3"``."""
    first, _, last = written.partition("-")
    return range(int(first), int(last or first) + 1) if first.isdecimal() and (last or first).isdecimal() else range(0)


def _microbatch(spans: Sequence[Span], device: int) -> float | None:
    """Return the seconds that a device computed per forward pass."""
    mine = [span for span in spans if span.device == device and span.computing]
    passes = sum(kind(span.what) == "forward" for span in mine)
    took = sum(span.end - span.start for span in mine if kind(span.what) in ("forward", "backward"))
    return took / passes if passes else None


def _spent(run: Run, rate: float | None, waiting: float | None, expected: Point | None) -> tuple[Bar, ...]:
    step = _step(run)
    if rate is None or waiting is None or step is None:
        return ()
    bars = [Bar.of(expected)] if expected is not None else []
    return (
        *bars,
        Bar(
            "measured",
            (("compute", step * (1 - waiting)), ("network", step * waiting)),
            "network is waiting for the exchange or for slower ranks, compute all the rest of the loop",
        ),
    )


def _step(run: Run) -> float | None:
    """Return the seconds of a step: the median between two reports."""
    pairs = zip(run.reports, run.reports[1:], strict=False)
    times = [(b.at - a.at) / (b.step - a.step) for a, b in pairs if b.step > a.step and b.at > a.at]
    return statistics.median(times) if times else None


def _compared(rate: float | None, waiting: float | None, expected: Point | None, run: Run) -> tuple[Comparison, ...]:
    if expected is None or rate is None or waiting is None:
        return ()
    low, high = expected.samples / expected.high, expected.samples / expected.low
    inside = "within the band" if low <= rate <= high else "outside the band"
    rows = [
        Comparison(
            "samples/s",
            f"{count(expected.rate)} ({count(low)} to {count(high)})",
            count(rate),
            f"{off(rate, expected.rate)}, {inside}",
        )
    ]
    step = _step(run)
    if step is not None:
        band = f"{seconds(expected.seconds)} ({seconds(expected.low)} to {seconds(expected.high)})"
        rows.append(Comparison("a step", band, seconds(step)))
    exposed = (expected.exposed + expected.bubble) / expected.seconds
    rows.append(Comparison("communicating", percent(exposed), percent(waiting), _points_apart(waiting - exposed)))
    return tuple(rows)


def _points_apart(share: float) -> str:
    points = round(100 * share)
    if points == 0:
        return "as forecast"
    return f"{abs(points)} point{'s' * (abs(points) > 1)} {'more' if points > 0 else 'less'}"


def _ending(run: Run) -> tuple[str, ...]:
    if run.exit_code is None:
        return (f"the record ends after {run.seconds:,.1f} s without an end: the run was killed, or it goes on",)
    return (run.message,) if run.message else ()


def _versions(run: Run) -> str:
    return "ran with " + ", ".join(f"{name} {version}" for name, version in run.versions.items())


def _processes(number: int) -> str:
    return f"{number} process{'' if number == 1 else 'es'}"
