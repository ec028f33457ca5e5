"""Turning the measured blocks into what people ask: samples per second, share of the ideal, who is ahead."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from nearlinear.units import bandwidth, seconds, size

OURS = "nearlinear"
RATIO, CEILING, OVERHEAD = 0.98, 0.9, 0.01  # the targets
CEILING_HOLDS = {(model, link) for model in ("gpt", "cnn") for link in ("loopback", "1 Gbit/s")}


@dataclass(frozen=True, slots=True)
class Cell:
    """One model on one link.

    Args:
        link: Its name.
        raw: What the worker printed.
    """

    link: str
    raw: dict[str, Any]

    @property
    def model(self) -> str:
        """Name of the model."""
        return str(self.raw["model"])

    @property
    def bytes(self) -> int:
        """Bytes of all gradients."""
        return 4 * int(self.raw["parameters"])

    @property
    def rivals(self) -> list[str]:
        """Who was measured."""
        return [name for name in self.raw["blocks"] if name not in ("one", "half", "in step", "all-reduce")]

    def times(self, name: str) -> list[float]:
        """Return the seconds per step of every block; of every block and rank for ``"half"``."""
        blocks = [block["seconds"] for block in self.raw["blocks"][name]]
        if name == "one":
            return [ranks[0] for ranks in blocks]
        if name == "half":
            return [each for ranks in blocks for each in ranks]
        return [max(ranks) for ranks in blocks]

    def time(self, name: str) -> float:
        """Return the median of ``times``."""
        return median(self.times(name))

    @property
    def ceiling(self) -> float:
        """Seconds per step if the exchange cost no computing time and all of it ran beside backward."""
        return max(self.time("half"), self.time("all-reduce"))

    @property
    def in_sequence(self) -> float:
        """Seconds per step if the exchange ran after backward, all at once."""
        return self.time("half") + self.time("all-reduce")

    @property
    def ceiling_in_step(self) -> float:
        """Return the same for two processes that wait for each other at every step, as all rivals make them."""
        return max(self.time("in step"), self.time("all-reduce"))

    def efficiency(self, step: float) -> float:
        """Return the speed-up over one process, per process."""
        return self.time("one") / (2 * step)

    def ratio(self, rival: str) -> float:
        """Return how many samples nearlinear trains on while ``rival`` trains on one."""
        return self.time(rival) / self.time(OURS)

    def ratios(self, rival: str) -> list[float]:
        """Return ``ratio`` for each round."""
        return [theirs / ours for theirs, ours in zip(self.times(rival), self.times(OURS), strict=True)]

    @property
    def others(self) -> list[float]:
        """Share of the two cores that other programs took, per block."""
        return [block["others"] for blocks in self.raw["blocks"].values() for block in blocks]


def markdown(cells: Sequence[Cell], overhead: Sequence[dict[str, Any]]) -> str:
    """Return the tables and the verdicts on the targets."""
    parts = [_speeds(cells), _bounds(cells), _overhead(overhead), _verdicts(cells, overhead)]
    return "\n\n".join(part for part in parts if part) + "\n"


def _speeds(cells: Sequence[Cell]) -> str:
    rows = []
    for cell in cells:
        for rival in cell.rivals:
            batch, step = cell.raw["batch"], cell.time(rival)
            ahead = (
                ""
                if rival == OURS or OURS not in cell.rivals
                else f"{cell.ratio(rival):.3f} {_range(cell.ratios(rival), '.2f')}"
            )
            rows.append([
                cell.model, cell.link, rival,
                f"{batch / step:.1f} {_range([batch / each for each in cell.times(rival)], '.1f')}",
                f"{cell.efficiency(step):.3f}", f"{cell.ceiling / step:.3f}", f"{cell.ceiling_in_step / step:.3f}",
                ahead,
            ])  # fmt: skip
    head = [
        "model", "link", "rival", "samples/s", "scaling efficiency", "of the ceiling", "of that in step",
        "nearlinear / rival",
    ]  # fmt: skip
    return _table(head, rows)


def _bounds(cells: Sequence[Cell]) -> str:
    rows = []
    for cell in cells:
        exchange = cell.time("all-reduce")
        busy = median(max(block["processor"]) for block in cell.raw["blocks"]["all-reduce"])
        half = _range([1e3 * each for each in cell.times("half")], ".0f")
        others = f"{median(cell.others):.0%}, at most {max(cell.others):.0%}"
        rows.append([
            cell.model, cell.link, seconds(cell.time("one")), f"{seconds(cell.time('half'))} {half}",
            seconds(cell.time("in step")),
            size(cell.bytes), f"{seconds(exchange)} ({bandwidth(cell.bytes / exchange)})", seconds(busy),
            f"{seconds(cell.ceiling)} ({cell.efficiency(cell.ceiling):.2f})",
            f"{seconds(cell.in_sequence)} ({cell.efficiency(cell.in_sequence):.2f})", others,
        ])  # fmt: skip
    head = [
        "model", "link", "one process", "half the batch", "half, in step", "gradients", "all-reduce",
        "of it on the processor", "ceiling (efficiency)", "without overlap (efficiency)", "others on the cores",
    ]  # fmt: skip
    return _table(head, rows)


def _overhead(overhead: Sequence[dict[str, Any]]) -> str:
    rows = [
        [
            each["model"], str(each["batch"]), seconds(median(each["plain"])), seconds(median(each["distributed"])),
            f"{100 * _added(each):+.2f} % {_range([100 * one for one in _added_by_block(each)], '+.1f')}",
        ]
        for each in overhead
    ]  # fmt: skip
    return _table(["model", "batch", "plain loop, one process", "after nl.distribute", "added"], rows) if rows else ""


def _added_by_block(each: dict[str, Any]) -> list[float]:
    return [ours / plain - 1 for plain, ours in zip(each["plain"], each["distributed"], strict=True)]


def _added(each: dict[str, Any]) -> float:
    return median(_added_by_block(each))


def _verdicts(cells: Sequence[Cell], overhead: Sequence[dict[str, Any]]) -> str:
    lines = []
    measured = [cell for cell in cells if OURS in cell.rivals]
    for cell in measured:
        for rival in ("ddp", "accelerate"):
            if rival in cell.rivals:
                ratio = cell.ratio(rival)
                lines.append(_verdict(ratio >= RATIO, f"{cell.model}, {cell.link}: {ratio:.3f} of {rival}", RATIO))
    for cell in measured:
        if (cell.model, cell.link) in CEILING_HOLDS:
            reached = cell.ceiling / cell.time(OURS)
            lines.append(
                _verdict(reached >= CEILING, f"{cell.model}, {cell.link}: {reached:.3f} of the ceiling", CEILING)
            )
    for each in overhead:
        added = _added(each)
        lines.append(_verdict(added <= OVERHEAD, f"{each['model']}: {added:+.2%} in one process", OVERHEAD))
    return "\n".join(lines)


def _verdict(met: bool, what: str, target: float) -> str:
    return f"- {'met' if met else '**missed**'}: {what} (target {target:g})"


def _range(values: Iterable[float], form: str) -> str:
    ordered = sorted(values)
    return f"[{ordered[0]:{form}} .. {ordered[-1]:{form}}]"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    lines = [head, ["-" * width for width in widths], *rows]
    return "\n".join("| " + " | ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)) + " |" for line in lines)
