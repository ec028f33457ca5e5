"""Turning stages and microbatches into a schedule: for every stage, what it computes in which order.

An action is written as its letter and its microbatch, with the model chunk behind a point where there are several:

    F0      forward of microbatch 0
    B0      backward of microbatch 0: the gradient of its input and of the stage's weights
    I0 W0   the two halves of B0: the gradient of its input, which the stage before waits for, and of the weights
    F0.1    forward of microbatch 0 through the stage's second chunk

The tables below have one column per unit of time, in which every action takes one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property

from nearlinear.errors import InputError


class Kind(StrEnum):
    """What an action computes."""

    FORWARD = "F"
    BACKWARD = "B"
    INPUT_GRADIENT = "I"
    WEIGHT_GRADIENT = "W"


@dataclass(frozen=True, slots=True, order=True)
class Action:
    """One pass of one microbatch through one stage.

    Args:
        kind: Which pass.
        microbatch: From 0.
        chunk: Which of the stage's model chunks; 0 where it has one.
    """

    kind: Kind
    microbatch: int
    chunk: int = 0

    def __str__(self) -> str:
        return f"{self.kind}{self.microbatch}" + (f".{self.chunk}" if self.chunk else "")


@dataclass(frozen=True)
class Schedule:
    """What every stage computes, in order.

    Args:
        stages: Actions of every stage.
        name: Whose schedule it is.

    Raises:
        InputError: A stage lacks an action or has it twice, a gradient comes before what it is the gradient of, or the
            stages wait for each other in a circle.

    Example:
        >>> print(Schedule.written("F0 F1 B0 B1", "F0 B0 F1 B1"))
        stage 0  F0 F1    B0    B1
        stage 1     F0 B0 F1 B1
    """

    stages: tuple[tuple[Action, ...], ...]
    name: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        if not self.stages or not self.stages[0]:
            raise InputError("a schedule needs at least one stage and one microbatch")
        wanted = set(self.stages[0])
        kinds: dict[tuple[int, int], set[Kind]] = {}
        for action in wanted:
            kinds.setdefault((action.microbatch, action.chunk), set()).add(action.kind)
        for (microbatch, _), passes in sorted(kinds.items()):
            if passes not in _WHOLE:
                raise InputError(
                    f"microbatch {microbatch} needs F and either B or I and W, not {', '.join(sorted(passes))}"
                )
        for stage, actions in enumerate(self.stages):
            if len(set(actions)) < len(actions) or set(actions) != wanted:
                odd = set(actions) ^ wanted or {each for each in actions if actions.count(each) > 1}
                raise InputError(f"stage {stage} must have every action once; see {min(odd)}")
            place = {action: index for index, action in enumerate(actions)}
            for action, index in place.items():
                before = self._same_stage(action)
                if before is not None and place.get(before, index) >= index:
                    raise InputError(f"stage {stage} has {action} without {before} before it")
        if not self.columns:
            raise InputError("the schedule's stages wait for each other in a circle")

    def __str__(self) -> str:
        width = max(len(str(action)) for actions in self.stages for action in actions)
        lines = []
        for stage, (actions, columns) in enumerate(zip(self.stages, self.columns, strict=True)):
            cells = [" " * width] * (columns[-1] + 1)
            for action, column in zip(actions, columns, strict=True):
                cells[column] = f"{action!s:{width}}"
            lines.append(f"stage {stage}  " + " ".join(cells).rstrip())
        return "\n".join(lines)

    @cached_property
    def microbatches(self) -> int:
        """How many there are."""
        return 1 + max(action.microbatch for action in self.stages[0])

    @cached_property
    def chunks(self) -> int:
        """Model chunks per stage."""
        return 1 + max(action.chunk for action in self.stages[0])

    @cached_property
    def splits_backward(self) -> bool:
        """Whether the two halves of a backward pass are actions of their own."""
        return any(action.kind is Kind.INPUT_GRADIENT for action in self.stages[0])

    def waits(self, stage: int, action: Action) -> tuple[int, Action] | None:
        """Return the stage and the action whose result ``action`` needs from another place in the pipeline.

        Forward passes go down the stages and from the last stage to the next chunk of the first; gradients come back
        the same way.
        """
        last, microbatch, chunk = len(self.stages) - 1, action.microbatch, action.chunk
        if action.kind is Kind.FORWARD:
            if stage > 0:
                return stage - 1, action
            return (last, Action(Kind.FORWARD, microbatch, chunk - 1)) if chunk > 0 else None
        if action.kind is Kind.WEIGHT_GRADIENT:
            return None
        if stage < last:
            return stage + 1, action
        return (0, Action(action.kind, microbatch, chunk + 1)) if chunk < self.chunks - 1 else None

    @cached_property
    def columns(self) -> tuple[tuple[int, ...], ...]:
        """The unit of time in which every action runs when each takes one and starts as soon as it can; () if never."""
        done: dict[tuple[int, Action], int] = {}
        columns: list[list[int]] = [[] for _ in self.stages]
        moved = True
        while moved:
            moved = False
            for stage, actions in enumerate(self.stages):
                mine = columns[stage]
                while len(mine) < len(actions):
                    action = actions[len(mine)]
                    needed = self.waits(stage, action)
                    if needed is not None and needed not in done:
                        break
                    earliest = max(mine[-1] if mine else -1, -1 if needed is None else done[needed]) + 1
                    done[stage, action] = earliest
                    mine.append(earliest)
                    moved = True
        complete = all(len(mine) == len(actions) for mine, actions in zip(columns, self.stages, strict=True))
        return tuple(tuple(mine) for mine in columns) if complete else ()

    def in_flight(self, stage: int) -> int:
        """Return how many forward passes' activations a stage holds at most.

        They are held from the forward pass to the end of the backward pass (of its weight half, where it is split).
        With several chunks, each counts a chunk's activations.
        """
        held = most = 0
        for action in self.stages[stage]:
            if action.kind is Kind.FORWARD:
                held += 1
                most = max(most, held)
            elif action.kind is not Kind.INPUT_GRADIENT:
                held -= 1
        return most

    @classmethod
    def written(cls, *stages: str, name: str = "") -> Schedule:
        """Return the schedule written as one line of actions per stage.

        Raises:
            InputError: A word is not an action, or the whole is not a schedule.
        """
        return cls(tuple(tuple(_action(word) for word in line.split()) for line in stages), name)

    def to_json(self) -> str:
        """Return the schedule as a JSON object."""
        lines = [" ".join(str(action) for action in actions) for actions in self.stages]
        return json.dumps({"format": _FORMAT, "name": self.name, "stages": lines})

    @classmethod
    def from_json(cls, text: str) -> Schedule:
        """Return the schedule that ``to_json`` wrote.

        Raises:
            InputError: ``text`` is not such an object.
        """
        try:
            raw = json.loads(text)
            if raw["format"] != _FORMAT:
                raise InputError(f"not a schedule: its format is {raw['format']!r}, not {_FORMAT!r}")
            return cls.written(*raw["stages"], name=raw["name"])
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise InputError(f"not a schedule: {error}") from error

    @staticmethod
    def _same_stage(action: Action) -> Action | None:
        """Return the action of the same stage that must come before."""
        if action.kind is Kind.FORWARD:
            return None
        first = Kind.INPUT_GRADIENT if action.kind is Kind.WEIGHT_GRADIENT else Kind.FORWARD
        return Action(first, action.microbatch, action.chunk)


def gpipe(stages: int, microbatches: int) -> Schedule:
    """Return all forward passes, then all backward passes.

    With equal stages it stands still for (stages - 1) / (microbatches + stages - 1) of the time, and every stage holds
    the activations of all microbatches.

    Args:
        stages: Number of stages.
        microbatches: Number of microbatches.

    Raises:
        InputError: Either is below 1.

    Example:
        >>> print(gpipe(3, 3))
        stage 0  F0 F1 F2             B0 B1 B2
        stage 1     F0 F1 F2       B0 B1 B2
        stage 2        F0 F1 F2 B0 B1 B2

    Source: Huang et al., GPipe, 2019, arXiv 1811.06965 (there the backward passes run from the last microbatch to the
    first; the time and the memory are the same).
    """
    _positive(stages=stages, microbatches=microbatches)
    row = (*_run(Kind.FORWARD, range(microbatches)), *_run(Kind.BACKWARD, range(microbatches)))
    return Schedule((row,) * stages, "gpipe")


def one_f_one_b(stages: int, microbatches: int) -> Schedule:
    """Return one forward and one backward pass in turn, after as many forward passes as there are stages below.

    It takes the time of ``gpipe``; stage s holds the activations of min(stages - s, microbatches) microbatches.

    Args:
        stages: Number of stages.
        microbatches: Number of microbatches.

    Raises:
        InputError: Either is below 1.

    Example:
        >>> print(one_f_one_b(3, 4))
        stage 0  F0 F1 F2       B0 F3 B1    B2    B3
        stage 1     F0 F1    B0 F2 B1 F3 B2    B3
        stage 2        F0 B0 F1 B1 F2 B2 F3 B3

    Source: Narayanan et al., PipeDream-Flush, 2021, arXiv 2006.09503.
    """
    _positive(stages=stages, microbatches=microbatches)
    rows = []
    for stage in range(stages):
        ahead = min(stages - stage - 1, microbatches)
        forward, backward = _run(Kind.FORWARD, range(microbatches)), _run(Kind.BACKWARD, range(microbatches))
        rows.append((*forward[:ahead], *_in_turn(forward[ahead:], backward)))
    return Schedule(tuple(rows), "1F1B")


def interleaved(stages: int, microbatches: int, chunks: int) -> Schedule:
    """Return 1F1B over ``chunks`` parts of the model per stage: less standing still, more messages and activations.

    Stage s holds chunk c's layers at place ``c * stages + s`` of the model. With equal stages it stands still
    ``chunks`` times less than ``one_f_one_b``. Stage s holds
    min(2 (stages - s - 1) + (chunks - 1) stages + 1, microbatches chunks) chunks' activations.

    Args:
        stages: Number of stages.
        microbatches: Number of microbatches, a multiple of ``stages``.
        chunks: Model chunks per stage.

    Raises:
        InputError: A number is below 1, or the stages do not divide the microbatches.

    Example:
        >>> print(interleaved(2, 2, 2))
        stage 0  F0   F1   F0.1 F1.1      B0.1      B1.1 B0   B1
        stage 1       F0   F1   F0.1 B0.1 F1.1 B1.1 B0   B1

    Source: Narayanan et al., Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM, 2021,
    arXiv 2104.04473.
    """
    _positive(stages=stages, microbatches=microbatches, chunks=chunks)
    if microbatches % stages:
        raise InputError(
            f"{stages} interleaved stages need a multiple of {stages} microbatches, not {microbatches}; "
            f"take {microbatches // stages * stages + stages}"
        )
    # Groups of as many microbatches as stages go through one chunk, then through the next, so that the first of them
    # is back at stage 0 when the last has left it.
    order = [
        (group + each, chunk)
        for group in range(0, microbatches, stages)
        for chunk in range(chunks)
        for each in range(stages)
    ]
    forward = tuple(Action(Kind.FORWARD, microbatch, chunk) for microbatch, chunk in order)
    backward = tuple(Action(Kind.BACKWARD, microbatch, chunks - 1 - chunk) for microbatch, chunk in order)
    rows = []
    for stage in range(stages):
        ahead = min(2 * (stages - stage - 1) + (chunks - 1) * stages, len(order))
        rows.append((*forward[:ahead], *_in_turn(forward[ahead:], backward)))
    return Schedule(tuple(rows), "interleaved 1F1B")


def zero_bubble(stages: int, microbatches: int) -> Schedule:
    """Return 1F1B with the backward pass split, its weight half moved to where the stage would stand still (ZB-H1).

    Stage s computes the weights' gradient s microbatches late, so that every stage holds the activations of
    min(stages, microbatches) microbatches, as many as stage 0 of ``one_f_one_b``. With equal times for F, I and W it
    stands still a third as long.

    Args:
        stages: Number of stages.
        microbatches: Number of microbatches.

    Raises:
        InputError: Either is below 1.

    Example:
        >>> print(zero_bubble(3, 4))
        stage 0  F0 F1 F2       I0 W0 F3 I1 W1 I2 W2 I3 W3
        stage 1     F0 F1    I0 F2 I1 W0 F3 I2 W1 I3 W2 W3
        stage 2        F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3

    Source: Qi et al., Zero Bubble Pipeline Parallelism, 2024, arXiv 2401.10241, section 2.
    """
    _positive(stages=stages, microbatches=microbatches)
    rows = []
    for stage in range(stages):
        ahead = min(stages - stage - 1, microbatches)
        row = [*_run(Kind.FORWARD, range(ahead))]
        for microbatch in range(microbatches):
            row += _run(Kind.FORWARD, range(ahead + microbatch, min(ahead + microbatch + 1, microbatches)))
            row.append(Action(Kind.INPUT_GRADIENT, microbatch))
            row += _run(Kind.WEIGHT_GRADIENT, range(max(microbatch - stage, 0), microbatch - stage + 1))
        row += _run(Kind.WEIGHT_GRADIENT, range(max(microbatches - stage, 0), microbatches))
        rows.append(tuple(row))
    return Schedule(tuple(rows), "zero bubble")


def _run(kind: Kind, microbatches: Iterable[int]) -> tuple[Action, ...]:
    return tuple(Action(kind, microbatch) for microbatch in microbatches)


def _in_turn(forward: Sequence[Action], backward: Sequence[Action]) -> list[Action]:
    """Return one of each in turn, forward first, and the rest of the backward passes."""
    paired = [action for pair in zip(forward, backward, strict=False) for action in pair]
    return [*paired, *backward[len(forward) :]]


def _action(word: str) -> Action:
    match = re.fullmatch(r"([FBIW])(\d+)(?:\.(\d+))?", word)
    if match is None:
        raise InputError(f"{word!r} is not an action; write it like 'F0', 'B3' or 'F0.1'")
    return Action(Kind(match[1]), int(match[2]), int(match[3] or 0))


def _positive(**numbers: int) -> None:
    for what, number in numbers.items():
        if number < 1:
            raise InputError(f"{what} is {number}; a schedule needs at least 1")


_WHOLE = (
    {Kind.FORWARD, Kind.BACKWARD},
    {Kind.FORWARD, Kind.INPUT_GRADIENT, Kind.WEIGHT_GRADIENT},
)
_FORMAT = "nearlinear-schedule/1"
