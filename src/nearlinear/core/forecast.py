"""A forecast: how fast a model trains on 1, 2, 4, ... devices, what the time goes into, and where to stop."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from nearlinear.core.plan import Plan
from nearlinear.errors import InputError
from nearlinear.units import seconds, size


@dataclass(frozen=True, slots=True)
class Point:
    """What is expected of one number of devices.

    The four parts are those of the device that the others wait for; their sum is ``seconds``.

    Args:
        devices: How many take part.
        way: How they share the work (``"data"``, ``"pipeline, 4 stages x 2"``).
        samples: Samples per step, all devices together.
        seconds: Of a step.
        low: The step may be this fast.
        high: It may be this slow.
        memory: Bytes on the fullest device.
        compute: Seconds of forward and backward passes.
        exposed: Seconds of communication that no computation hides.
        bubble: Seconds of waiting for other stages.
        update: Seconds of the optimizer step.
        fits: Whether ``memory`` is there.
        to_loss: Time to a given loss, as a share of one device's; ``None`` where the gradients' noise is not known.
        plan: What ``distribute`` is to be asked for; ``None`` where this is not how the runtime trains.
    """

    devices: int
    way: str
    samples: float
    seconds: float
    low: float
    high: float
    memory: float = 0.0
    compute: float = 0.0
    exposed: float = 0.0
    bubble: float = 0.0
    update: float = 0.0
    fits: bool = True
    to_loss: float | None = None
    plan: Plan | None = None

    def __post_init__(self) -> None:
        if not (self.devices >= 1 and self.samples > 0 and 0 < self.low <= self.seconds <= self.high < float("inf")):
            raise InputError(
                f"not a forecast for {self.devices} devices: {self.samples} samples in "
                f"{self.low} <= {self.seconds} <= {self.high} s"
            )

    @property
    def rate(self) -> float:
        """Samples per second."""
        return self.samples / self.seconds

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> Self:
        """Return the point that ``dataclasses.asdict`` took apart."""
        plan = raw.get("plan")
        return cls(**{**raw, "plan": None if plan is None else Plan(**plan)})


@dataclass(frozen=True, slots=True)
class Forecast:
    """What is expected of 1, 2, 4, ... devices.

    Args:
        points: By devices, ascending. The first says what one device does, also where the model does not fit on it.
        stop: More devices than this do not pay.
        reason: Why, in one sentence.
        name: What is trained, on what.

    Raises:
        InputError: There is no point for one device, points are out of order, or ``stop`` is not one of them.

    Example:
        >>> one = Point(1, "alone", 64, 1.0, 0.95, 1.05, compute=1.0)
        >>> two = Point(2, "data", 64, 0.6, 0.55, 0.7, compute=0.5, exposed=0.1)
        >>> print(Forecast((one, two), 2, "there are no more devices", "gpt on two laptops"))
        gpt on two laptops
        devices    step     low    high  samples/s  speedup  of ideal  memory  compute  network  waiting  update  way
              1     1 s  950 ms  1.05 s         64     1.00     100 %     0 B    100 %      0 %      0 %     0 %  alone
              2  600 ms  550 ms  700 ms        107     1.67      83 %     0 B     83 %     17 %      0 %     0 %  data
        stop at 2: there are no more devices
    """

    points: tuple[Point, ...]
    stop: int
    reason: str
    name: str = ""

    def __post_init__(self) -> None:
        counts = [point.devices for point in self.points]
        if not counts or counts[0] != 1 or counts != sorted(set(counts)):
            raise InputError(f"a forecast is for 1 device and more, ascending, got {counts}")
        if self.stop not in counts:
            raise InputError(f"a forecast cannot stop at {self.stop} devices; it knows {counts}")

    def at(self, devices: int) -> Point:
        """Return the point for ``devices``.

        Raises:
            InputError: There is none.
        """
        for point in self.points:
            if point.devices == devices:
                return point
        raise InputError(f"no forecast for {devices} devices; it knows {[each.devices for each in self.points]}")

    def speedup(self, point: Point) -> float:
        """Return the samples per second of ``point`` over those of one device."""
        return point.rate / self.points[0].rate

    def efficiency(self, point: Point) -> float:
        """Return the speedup per device, 1 at best where devices are alike."""
        return self.speedup(point) / point.devices

    def __str__(self) -> str:
        lines = [self.name, _columns(self.table()), f"stop at {self.stop}: {self.reason}"]
        return "\n".join(line for line in lines if line)

    def table(self) -> list[list[str]]:
        """Return the forecast as rows of text, the heads of the columns first."""
        known = any(point.to_loss is not None for point in self.points)
        rows = [[*_HEADS, *(["time to loss"] if known else []), "way"]]
        for point in self.points:
            parts = (point.compute, point.exposed, point.bubble, point.update)
            to_loss = "" if point.to_loss is None else f"{point.to_loss:.3g}"
            rows.append(
                [
                    str(point.devices),
                    seconds(point.seconds),
                    seconds(point.low),
                    seconds(point.high),
                    f"{point.rate:,.3g}" if point.rate < 1000 else f"{point.rate:,.0f}",
                    f"{self.speedup(point):.2f}",
                    f"{100 * self.efficiency(point):.0f} %",
                    size(point.memory) + ("" if point.fits else " (too much)"),
                    *(f"{100 * part / point.seconds:.0f} %" for part in parts),
                    *([to_loss] if known else []),
                    point.way,
                ]
            )
        return rows

    def to_json(self) -> str:
        """Return the forecast as a JSON object."""
        return json.dumps({"format": _FORMAT, **dataclasses.asdict(self)})

    @classmethod
    def from_json(cls, text: str) -> Forecast:
        """Return the forecast that ``to_json`` wrote.

        Raises:
            InputError: ``text`` is not such an object.
        """
        try:
            raw = json.loads(text)
            if raw.pop("format", None) != _FORMAT:
                raise InputError(f"not a forecast: its format is not {_FORMAT!r}")
            return cls(tuple(map(Point.from_dict, raw.pop("points"))), **raw)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise InputError(f"not a forecast: {error}") from error


_FORMAT = "nearlinear-forecast/1"
_HEADS = (
    "devices",
    "step",
    "low",
    "high",
    "samples/s",
    "speedup",
    "of ideal",
    "memory",
    "compute",
    "network",
    "waiting",
    "update",
)


def _columns(rows: Sequence[Sequence[str]]) -> str:
    """Return rows with columns set right, the last one left."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [
            cell.ljust(width) if column == len(row) - 1 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)
