"""Turning the stage of every step into what each stage runs, takes in, hands on and holds. Numbers alone."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Part:
    """One stage.

    Args:
        steps: Positions of its steps, in order.
        inputs: The model's inputs that it reads.
        entering: Values from earlier stages that its steps read.
        made: Values made here that later stages read, or that the model returns.
    """

    steps: tuple[int, ...]
    inputs: tuple[int, ...]
    entering: tuple[int, ...]
    made: tuple[int, ...]


@dataclass(frozen=True)
class Split:
    """A program in stages; the last one also has the model's outputs, for the loss.

    Args:
        parts: The stages.
        producer: The stage that makes each value that crosses or is returned.
        readers: The other stages that each of these goes to, ascending.
        wanted: Of these values, those whose gradient an earlier step has a use for.
        holders: The stages that hold each variable, ascending, by its position; the first speaks for it.
    """

    parts: tuple[Part, ...]
    producer: Mapping[int, int]
    readers: Mapping[int, tuple[int, ...]]
    wanted: frozenset[int]
    holders: tuple[tuple[int, ...], ...]

    @property
    def last(self) -> int:
        """The stage where the loss is."""
        return len(self.parts) - 1

    def arriving(self, stage: int) -> list[int]:
        """Return the values that come to a stage, ascending."""
        return sorted(value for value, stages in self.readers.items() if stage in stages)

    def between(self, source: int, target: int) -> list[int]:
        """Return the values that go from one stage to another, ascending."""
        return [value for value in self.arriving(target) if self.producer[value] == source]


def split(
    stage_of: Sequence[int],
    steps: Sequence[tuple[Sequence[int], Sequence[int]]],
    inputs: int,
    outputs: Sequence[int],
    uses: Sequence[Sequence[int]],
    trained: Collection[int],
    variables: int,
) -> Split:
    """Return the split.

    Args:
        stage_of: The stage of each step.
        steps: The values that each step reads, and those that it makes.
        inputs: How many values the program begins with.
        outputs: The values that it returns.
        uses: The variables that each step uses, by position.
        trained: The variables that take gradients.
        variables: How many there are; those that no step uses lie with the first stage.

    Example:
        >>> two = split([0, 1], [([0], [1]), ([1], [2])], 1, [2], [[0], [1]], {0, 1}, 2)
        >>> two.between(0, 1), two.holders
        ([1], ((0,), (1,)))
    """
    stages = 1 + max(stage_of)
    producer = {value: stage for stage, (_, makes) in zip(stage_of, steps, strict=True) for value in makes}
    readers: dict[int, set[int]] = {}
    for stage, (reads, _) in zip(stage_of, steps, strict=True):
        for value in reads:
            if value >= inputs:
                readers.setdefault(value, set()).add(stage)
    for value in outputs:
        if value >= inputs:
            readers.setdefault(value, set()).add(stages - 1)
    crossing = {value: tuple(sorted(ends - {producer[value]})) for value, ends in readers.items()}
    parts = []
    for stage in range(stages):
        own = [number for number, each in enumerate(stage_of) if each == stage]
        read = {value for number in own for value in steps[number][0]}
        made = {value for number in own for value in steps[number][1]}
        parts.append(
            Part(
                tuple(own),
                tuple(sorted(value for value in read if value < inputs)),
                tuple(sorted(value for value in read if value >= inputs and value not in made)),
                tuple(sorted(value for value in made if crossing.get(value) or value in outputs)),
            )
        )
    holders: list[set[int]] = [set() for _ in range(variables)]
    learnt: set[int] = set()  # values that depend on a variable that takes gradients
    for stage, (reads, makes), used in zip(stage_of, steps, uses, strict=True):
        for variable in used:
            holders[variable].add(stage)
        if learnt.intersection(reads) or not set(used).isdisjoint(trained):
            learnt.update(makes)
    return Split(
        tuple(parts),
        {value: producer[value] for value in crossing},
        crossing,
        frozenset(learnt.intersection(crossing)),
        tuple(tuple(sorted(each)) or (0,) for each in holders),
    )
