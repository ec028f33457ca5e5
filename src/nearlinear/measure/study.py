"""What a script's first steps show: its graph with measured times, and the pace and noise of its steps.

Each front end watches them in its own way (``study.py`` there); the planner is given this.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import statistics
import time
from collections.abc import Iterator

from nearlinear.core.graph import Graph, Operator
from nearlinear.core.plan import EXACT

STEPS = 16  # optimizer steps that are watched at most
ENOUGH = 8  # that say how noisy a batch is; watched while they take no more than PATIENCE times what they may
LEAST = 4  # watched in any case, if the script takes so many
PATIENCE = 5
NOISE_PARAMETERS = 200_000_000  # of larger models the sum of the gradients is not kept
LOOP = "the loop (data, loss, metrics)"


class Enough(BaseException):
    """Ends the script; no ``except Exception`` of its own catches it."""


@dataclasses.dataclass(frozen=True)
class Study:
    """What a script's first steps show.

    Args:
        graph: The model's, with the times of one call's samples, and the rest of the loop as its last operator.
        rung: How it was captured.
        notes: What a person should know of the capture.
        tied: Names of operators that share a parameter, per parameter.
        batch: Samples per optimizer step.
        calls: Calls of the model per optimizer step (gradient accumulation).
        launch: Seconds of a forward and backward pass that a smaller batch does not save; within the graph's times.
        steps: Seconds of each whole step that was watched.
        spread: Relative spread of a step's time, one sigma.
        dtype: What it computes in.
        optimizer: Its class.
        norms: Squared norm of the gradient of every step watched; empty where none was kept.
        mean_norm: Squared norm of their mean.
        strategies: That its front end trains by.
        variants: Whether its pipelines may have copies, or make activations again.
    """

    graph: Graph
    rung: str
    notes: tuple[str, ...]
    tied: tuple[tuple[str, ...], ...]
    batch: int
    calls: int
    launch: float
    steps: tuple[float, ...]
    spread: float
    dtype: str
    optimizer: str
    norms: tuple[float, ...] = ()
    mean_norm: float = 0.0
    strategies: tuple[str, ...] = EXACT
    variants: bool = True

    def to_json(self) -> str:
        """Return it as a JSON object."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return json.dumps({**fields, "graph": json.loads(self.graph.to_json())})

    @classmethod
    def from_json(cls, text: str) -> Study:
        """Return what ``to_json`` wrote."""
        raw = json.loads(text)
        raw["graph"] = Graph.from_json(json.dumps(raw["graph"]))
        for name in ("notes", "steps", "norms", "strategies"):
            raw[name] = tuple(raw[name])
        raw["tied"] = tuple(map(tuple, raw["tied"]))
        return cls(**raw)


class Pace:
    """The moments at which a script's steps were over.

    Args:
        budget_s: Seconds that they may take.
    """

    def __init__(self, budget_s: float) -> None:
        self._budget_s = budget_s
        self._marks: list[float] = []  # without what was spent aside
        self._aside_s = self._began = 0.0

    @property
    def steps(self) -> tuple[float, ...]:
        """Seconds of each whole step."""
        return tuple(after - before for before, after in zip(self._marks, self._marks[1:], strict=False))

    def mark(self) -> None:
        """Note that a step is over.

        Raises:
            Enough: There is nothing more to be seen.
        """
        now = time.perf_counter()
        self._began = self._began if self._marks else now
        self._marks.append(now - self._aside_s)
        watched, late = len(self._marks) - 1, now - self._began
        enough = late > self._budget_s if watched >= ENOUGH else watched >= LEAST and late > PATIENCE * self._budget_s
        if watched >= STEPS or enough:
            raise Enough

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Do something that is not of the script's step."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self._aside_s += time.perf_counter() - began


def with_loop(graph: Graph, rest: float) -> Graph:
    """Return the graph with what a step takes beyond the model as an operator of its own; it mixes no batch.

    Args:
        graph: The model's.
        rest: Seconds; nothing is added where there are none.
    """
    if rest <= 0:
        return graph
    return dataclasses.replace(graph, operators=(*graph.operators, Operator(LOOP, kind="loop", forward=rest)))


def spread(steps: tuple[float, ...]) -> float:
    """Return the relative spread of a step's time, one sigma, from the median distance to the median."""
    middle = statistics.median(steps)
    return 1.4826 * statistics.median(abs(each - middle) for each in steps) / middle
