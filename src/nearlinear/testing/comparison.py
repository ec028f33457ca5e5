"""How two runs of a script compare, as values that print themselves: rows, where they part, and why, probably."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class Row:
    """One step of both runs.

    Args:
        step: Its number, from 1.
        loss_of_one: The loss on one process, summed over the step's backward passes; None if none was seen.
        loss_of_many: The same on N processes, the ranks' losses weighted as their gradients were.
        loss: Largest relative error of a backward pass's loss; None if none was seen.
        gradients: Largest relative error of a tensor's gradient.
        parameters: Largest relative error of a tensor's value after the step.
    """

    step: int
    loss_of_one: float | None
    loss_of_many: float | None
    loss: float | None
    gradients: float
    parameters: float


@dataclass(frozen=True, slots=True)
class Parting:
    """Where the runs part.

    Args:
        step: The first step that differs; 0 is the start.
        kind: The first that differs in that step: ``"loss"``, ``"gradient"``, ``"parameter"``, or ``"steps"`` if one
            run took more of them.
        name: The tensor that differs most.
        error: By how much; infinite if it cannot be said in a number.
        detail: What to say in place of a number.
    """

    step: int
    kind: str
    name: str = ""
    error: float = math.inf
    detail: str = ""

    def __str__(self) -> str:
        when = f"at step {self.step}" if self.step else "at the start"
        what = "" if self.kind == "steps" else f"{self.kind}{' of' if self.kind == 'gradient' else ''} {self.name}"
        how = self.detail if self.detail else f"by {_short(self.error)}"
        return " ".join(f"{when}: {what} {how}".split())


class Reason(NamedTuple):
    """What may be behind it, and what would help."""

    likely: str
    remedy: str

    def __str__(self) -> str:
        return f"likely: {self.likely}; try: {self.remedy}"


@dataclass(frozen=True, slots=True)
class Comparison:
    """How two runs compare; ``print`` shows the verdict.

    Args:
        rows: One per step that both took.
        parting: Where they part; None if they are equal.
        reasons: Why, probably; the likeliest first.
        tolerance: Relative error up to which they count as equal.
        parameters: How many parameters were compared.
        ranks: Processes of the larger run.
    """

    rows: tuple[Row, ...]
    parting: Parting | None
    reasons: tuple[Reason, ...]
    tolerance: float
    parameters: int
    ranks: int

    @property
    def equal(self) -> bool:
        """Whether the runs agree within the tolerance."""
        return self.parting is None

    @property
    def worst(self) -> float:
        """The largest relative error of all."""
        return max(
            (e for row in self.rows for e in (row.loss, row.gradients, row.parameters) if e is not None), default=0
        )

    def __str__(self) -> str:
        limit = f"(tolerance {self.tolerance:.0e})"
        if self.parting is not None:
            return "\n".join([f"different {self.parting} {limit}", *map(str, self.reasons)])
        no_number = [row.step for row in self.rows if row.loss_of_one is not None and math.isnan(row.loss_of_one)]
        but = f"; but the loss is NaN at step {no_number[0]}" if no_number else ""
        return (
            f"equal: {count(len(self.rows), 'step')}, {count(self.parameters, 'parameter')}, "
            f"worst relative error {_short(self.worst)} {limit}{but}"
        )


def count(number: int, what: str) -> str:
    """Return a number and what is counted: "1 step", "2 steps"."""
    return f"{number} {what}{'' if number == 1 else 's'}"


def _short(error: float) -> str:
    return f"{error:.1e}" if error else "0"
