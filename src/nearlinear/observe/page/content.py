"""What a page shows: values, all optional but the title."""

from __future__ import annotations

import dataclasses
import itertools
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nearlinear.core.forecast import Forecast, Point
from nearlinear.core.graph import Graph
from nearlinear.errors import InputError

if TYPE_CHECKING:  # values alone are needed here, not the search and the simulation behind them
    from nearlinear.planning.partition import Partition
    from nearlinear.planning.simulate import Simulation, Span
    from nearlinear.planning.ways import Way


@dataclass(frozen=True, slots=True)
class Figure:
    """A number that the page opens with.

    Args:
        label: What it is (``"stop at"``).
        value: As people read it (``"8 devices"``).
        remark: A few words below.
    """

    label: str
    value: str
    remark: str = ""


@dataclass(frozen=True, slots=True)
class Measured:
    """A measured point beside the forecast curve.

    Args:
        devices: How many took part.
        samples_per_s: Of all of them together.
        label: Which run it was.
    """

    devices: int
    samples_per_s: float
    label: str = ""


@dataclass(frozen=True, slots=True)
class Split:
    """A graph and the stage of each of its operators.

    Args:
        graph: What was split.
        stage: From 0, for every operator.

    Raises:
        InputError: There is not one stage per operator, or one is below 0.
    """

    graph: Graph
    stage: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.stage) != len(self.graph.operators) or min(self.stage, default=0) < 0:
            raise InputError(f"{self.graph.name}: {len(self.graph.operators)} operators, {len(self.stage)} stages")

    @classmethod
    def of(cls, graph: Graph, partition: Partition) -> Split:
        """Return the split with stages numbered in the order in which a microbatch passes them."""
        number = {device: stage for stage, device in enumerate(partition.stages)}
        return cls(graph, tuple(number[device] for device in partition.assignment))


@dataclass(frozen=True, slots=True)
class Stage:
    """One stage of a plan.

    Args:
        label: What is in it.
        load: Seconds per microbatch that its device is busy.
        memory: Bytes on each of its devices; 0 where that is not known.
        sent: Bytes that it hands on per microbatch, one way.
        devices: Where it runs (``"0-3"``).
        measured: Seconds per microbatch as measured, where they were.
    """

    label: str
    load: float
    memory: float = 0.0
    sent: float = 0.0
    devices: str = ""
    measured: float | None = None

    @classmethod
    def of_partition(cls, graph: Graph, partition: Partition) -> tuple[Stage, ...]:
        """Return the stages of a partition."""
        from nearlinear.planning.partition.table import stages

        return tuple(
            cls(
                _from_to([graph.operators[place].name for place in each.operators]),
                partition.loads[each.device],
                partition.memory[each.device],
                each.sent,
                str(each.device),
            )
            for each in stages(graph, partition.assignment, partition.stages)
        )

    @classmethod
    def of_way(cls, way: Way, scale: float = 1.0) -> tuple[Stage, ...]:
        """Return the stages of a way of sharing the work, none where it has no stages; their memory is left open.

        Args:
            way: The way.
            scale: Samples of one of its microbatches over the samples that its groups' sums are for.
        """
        starts = itertools.accumulate((group.replicas for group in way.groups), initial=0)
        found = []
        for start, group in zip(starts, way.groups, strict=False):
            last = start + group.replicas - 1
            devices = f"{start}" if last == start else f"{start}-{last}"
            load, sent = group.compute * scale, group.leaving * scale
            found.append(cls(group.label, load, 0.0, sent, devices if way.along and way.copies == 1 else ""))
        return tuple(found)


def _from_to(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} … {names[-1]}"


@dataclass(frozen=True, slots=True)
class Timeline:
    """What devices did in one step.

    Args:
        name: ``"predicted"`` or ``"measured"``.
        seconds: Of the step.
        spans: In any order.
    """

    name: str
    seconds: float
    spans: tuple[Span, ...]

    @classmethod
    def of(cls, simulation: Simulation, name: str = "predicted") -> Timeline:
        """Return the timeline of a simulated step."""
        return cls(name, simulation.seconds, simulation.timeline)


@dataclass(frozen=True, slots=True)
class Pace:
    """How fast a run was at a time.

    Args:
        at: Seconds since it began.
        step: Optimizer steps made.
        samples_per_s: Samples per second of all devices together.
        waiting: Share of the time, 0 to 1, in which the reporting device waited for others.
    """

    at: float
    step: int
    samples_per_s: float
    waiting: float = 0.0


@dataclass(frozen=True, slots=True)
class Bar:
    """Where the time of a step went.

    Args:
        name: Whose time: ``"predicted"``, ``"measured"``, ``"device 3"``.
        parts: What it went into, and how many seconds; ``"compute"``, ``"network"``, ``"waiting"`` and ``"update"``
            have colours of their own.
        remark: Stands below it.
    """

    name: str
    parts: tuple[tuple[str, float], ...]
    remark: str = ""

    @classmethod
    def of(cls, point: Point, name: str = "predicted") -> Bar:
        """Return the parts of a point of a forecast."""
        return cls(
            name,
            (
                ("compute", point.compute),
                ("network", point.exposed),
                ("waiting", point.bubble),
                ("update", point.update),
            ),
        )


@dataclass(frozen=True, slots=True)
class Comparison:
    """A forecast beside what was measured, as people read them.

    Args:
        what: Of what.
        predicted: The forecast, with its band.
        measured: What was measured.
        remark: How far apart they are.
    """

    what: str
    predicted: str
    measured: str
    remark: str = ""


@dataclass(frozen=True)
class Content:
    """What a page shows; what is empty is left out.

    Args:
        title: The page's.
        about: A sentence below the title: what, on which machines.
        figures: Numbers that the page opens with.
        forecast: Curve, band, ideal line and stop point.
        measured: Points to draw beside the curve.
        split: The graph, drawn in the colours of its stages.
        stages: Their table.
        timelines: Drawn below each other on one scale of time.
        pace: Samples per second over time.
        expected: The point of the forecast that the run is held against; its band lies behind ``pace``.
        spent: Where the time went, a bar each.
        compared: Forecast against measurement.
        reasons: Why the plan won, sentence by sentence.
        notes: What else should be known.
        ways: What to expect of every strategy that a run may be asked for, the best first for each number of processes;
            not shown, but what a run is held against.
    """

    title: str
    about: str = ""
    figures: tuple[Figure, ...] = ()
    forecast: Forecast | None = None
    measured: tuple[Measured, ...] = ()
    split: Split | None = None
    stages: tuple[Stage, ...] = ()
    timelines: tuple[Timeline, ...] = ()
    pace: tuple[Pace, ...] = ()
    expected: Point | None = None
    spent: tuple[Bar, ...] = ()
    compared: tuple[Comparison, ...] = ()
    reasons: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    ways: tuple[Point, ...] = ()

    def to_json(self) -> str:
        """Return the content as a JSON object."""
        known = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return json.dumps(
            {"format": _FORMAT, **{name: value for name, value in known.items() if value}}, default=_plain
        )

    @classmethod
    def from_json(cls, text: str) -> Content:
        """Return the content that ``to_json`` wrote.

        Raises:
            InputError: ``text`` is not such an object.
        """
        from nearlinear.planning.simulate import Span

        try:
            raw: dict[str, Any] = json.loads(text)
            if raw.pop("format", None) != _FORMAT:
                raise InputError(f"not a page's content: its format is not {_FORMAT!r}")
            found: dict[str, Any] = {name: raw.pop(name) for name in ("title", "about") if name in raw}
            for name in ("reasons", "notes"):
                found[name] = tuple(map(str, raw.pop(name, ())))
            for name, kind in _LISTS.items():
                found[name] = tuple(kind(**each) for each in raw.pop(name, ()))
            found["spent"] = tuple(
                Bar(each["name"], tuple((what, took) for what, took in each["parts"]), each["remark"])
                for each in raw.pop("spent", ())
            )
            found["timelines"] = tuple(
                Timeline(each["name"], each["seconds"], tuple(Span(*span) for span in each["spans"]))
                for each in raw.pop("timelines", ())
            )
            if "forecast" in raw:
                found["forecast"] = Forecast.from_json(json.dumps(raw.pop("forecast")))
            if "expected" in raw:
                found["expected"] = Point.from_dict(raw.pop("expected"))
            found["ways"] = tuple(map(Point.from_dict, raw.pop("ways", ())))
            if "split" in raw:
                split = raw.pop("split")
                found["split"] = Split(Graph.from_json(json.dumps(split["graph"])), tuple(split["stage"]))
            return cls(**found, **raw)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise InputError(f"not a page's content: {error}") from error


def _plain(value: Any) -> Any:
    """Return a value that JSON does not know as one that it does."""
    if isinstance(value, Graph | Forecast):
        return json.loads(value.to_json())
    if isinstance(value, Timeline):  # spans are many
        return {
            "name": value.name,
            "seconds": value.seconds,
            "spans": [dataclasses.astuple(each) for each in value.spans],
        }
    if isinstance(value, Split):
        return {"graph": value.graph, "stage": value.stage}
    return dataclasses.asdict(value)


_FORMAT = "nearlinear-page/1"
_LISTS: dict[str, Any] = {
    "figures": Figure,
    "measured": Measured,
    "stages": Stage,
    "pace": Pace,
    "compared": Comparison,
}
