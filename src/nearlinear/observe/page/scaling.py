"""The scaling curve: a forecast with its band and its stop point, the ideal line, and what was measured."""

from __future__ import annotations

from collections.abc import Sequence

from nearlinear.core.forecast import Forecast, Point
from nearlinear.observe.page.content import Measured
from nearlinear.observe.page.marks import both, legend
from nearlinear.observe.page.plot import Band, Curve, Plot
from nearlinear.observe.page.tables import table
from nearlinear.observe.page.text import count, percent, text
from nearlinear.units import seconds, size

LINEAR = 16  # devices up to which a plain axis shows more than a logarithmic one


def scaling(forecast: Forecast | None, measured: Sequence[Measured]) -> str:
    """Return the section's content: the curve, the sentence on where to stop, the numbers; empty without any."""
    if forecast is None:
        return _alone(measured) if len(measured) > 1 else ""
    points = forecast.points
    stop = forecast.at(forecast.stop)
    curves = [
        Curve("ideal dashed", tuple((float(p.devices), points[0].rate * p.devices) for p in points)),
        Curve("c0 line", tuple((float(p.devices), p.rate) for p in points)),
        Curve("c0", _places(points, fits=True), "disc", tuple(_said(forecast, p) for p in points if p.fits)),
        Curve("c0", _places(points, fits=False), "ring", tuple(_said(forecast, p) for p in points if not p.fits)),
        _marks(measured),
    ]
    band = Band(
        "c0",
        tuple(float(p.devices) for p in points),
        tuple(p.samples / p.high for p in points),
        tuple(p.samples / p.low for p in points),
    )
    plot = Plot(
        "Samples per second over devices",
        f"Forecast {_spoken([(p.devices, p.rate) for p in points])}; ideal would be "
        f"{count(points[0].rate * points[-1].devices)} on {points[-1].devices}. Stop at {forecast.stop}."
        + (f" Measured: {_spoken([(m.devices, m.samples_per_s) for m in measured])}." if measured else ""),
        "devices",
        "samples/s",
        tuple(curves),
        (band,),
        (float(forecast.stop), f"stop at {forecast.stop}"),
        log=points[-1].devices > LINEAR,
        counts=True,
    )
    key = [("c0 line", "forecast"), ("c0 area", "its band"), ("ideal dashed", "ideal: every device adds a whole one")]
    key += [("c0 ring", "does not fit in memory")] if not all(p.fits for p in points) else []
    key += [("c1 diamond", "measured")] if measured else []
    caption = [f"{text(forecast.name)}."] if forecast.name else []
    caption += (
        ["Both axes are logarithmic: on the ideal line, twice the devices are twice as fast."] if plot.log else []
    )
    return (
        f'<p class="lead">Stop at <strong>{_devices(forecast.stop)}</strong>: {text(forecast.reason)}. '
        f"There: {count(stop.rate)} samples/s, {percent(forecast.efficiency(stop))} of ideal.</p>"
        f"<figure>{legend(key)}{both(lambda suffix, across: plot.drawn(f'scaling-{suffix}', across))}"
        f"<figcaption>{' '.join(caption)}</figcaption></figure>{_to_a_loss(forecast)}"
        f"<details><summary>The forecast in numbers</summary>{_numbers(forecast)}</details>"
    )


def _to_a_loss(forecast: Forecast) -> str:
    """Return the curve of speedups in samples per second and to a given loss; empty where the second is not known."""
    known = [(point, 1 / point.to_loss) for point in forecast.points if point.to_loss]
    if len(known) < 2:
        return ""
    last = known[-1][0].devices
    plot = Plot(
        "How many times as fast as one device",
        f"To a given loss {', '.join(f'{gain:.2f} times on {point.devices}' for point, gain in known)}.",
        "devices",
        "times as fast as one",
        (
            Curve("ideal dashed", ((1.0, 1.0), (float(last), float(last)))),
            Curve("c0 line", tuple((float(p.devices), forecast.speedup(p)) for p in forecast.points)),
            Curve(
                "c2 line",
                tuple((float(p.devices), gain) for p, gain in known),
                "disc",
                tuple((_devices(p.devices), f"{gain:.2f} times as fast to a loss") for p, gain in known),
            ),
        ),
        log=last > LINEAR,
        counts=True,
        height=300,
    )
    key = [("c0 line", "in samples/s"), ("c2 line", "to a given loss"), ("ideal dashed", "ideal")]
    return (
        f"<figure>{legend(key)}{both(lambda suffix, across: plot.drawn(f'loss-{suffix}', across))}<figcaption>"
        "A larger batch needs fewer steps, but more samples: the gradients' noise says how many.</figcaption></figure>"
    )


def _alone(measured: Sequence[Measured]) -> str:
    """Return measured points without a forecast beside them."""
    most = max(each.devices for each in measured)
    least = min(measured, key=lambda each: each.devices)
    ideal = least.samples_per_s / least.devices
    line = Curve("ideal dashed", tuple((float(n), ideal * n) for n in (least.devices, most)))
    plot = Plot(
        "Samples per second over devices",
        f"Measured: {_spoken([(m.devices, m.samples_per_s) for m in measured])}.",
        "devices",
        "samples/s",
        (line, _marks(measured)),
        log=most > LINEAR,
        counts=True,
    )
    key = [("c1 diamond", "measured"), ("ideal dashed", f"ideal, from {_devices(least.devices)} up")]
    return f"<figure>{legend(key)}{both(lambda suffix, across: plot.drawn(f'scaling-{suffix}', across))}</figure>"


def _marks(measured: Sequence[Measured]) -> Curve:
    tips = tuple((f"{_devices(m.devices)}, measured", f"{count(m.samples_per_s)} samples/s", m.label) for m in measured)
    return Curve("c1", tuple((float(m.devices), m.samples_per_s) for m in measured), "diamond", tips)


def _places(points: Sequence[Point], *, fits: bool) -> tuple[tuple[float, float], ...]:
    return tuple((float(p.devices), p.rate) for p in points if p.fits is fits)


def _said(forecast: Forecast, point: Point) -> tuple[str, ...]:
    return (
        f"{_devices(point.devices)}: {point.way}",
        f"{count(point.rate)} samples/s ({count(point.samples / point.high)} to {count(point.samples / point.low)})",
        f"{forecast.speedup(point):.2f} times one device, {percent(forecast.efficiency(point))} of ideal",
        f"step {seconds(point.seconds)}, of which network {percent(point.exposed / point.seconds)}, "
        f"waiting {percent(point.bubble / point.seconds)}",
        f"{size(point.memory)} on the fullest device{'' if point.fits else ': too much'}" if point.memory else "",
    )


def _spoken(pairs: Sequence[tuple[int, float]]) -> str:
    return ", ".join(f"{count(rate)} samples per second on {devices}" for devices, rate in pairs)


def _devices(number: int) -> str:
    return f"{number:,} device{'' if number == 1 else 's'}"


def _numbers(forecast: Forecast) -> str:
    head, *rows = forecast.table()
    marked = ["chosen" if point.devices == forecast.stop else "" for point in forecast.points]
    return table("Forecast by number of devices", head, rows, left={len(head) - 1}, classes=marked)
