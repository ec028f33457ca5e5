"""Comparing a script on one process with the same script on N: where they part, by how much, and why, probably.

Errors are relative to the largest magnitude of the tensor on one process, or to a thousandth of the largest magnitude
among all tensors of that kind in that step, whichever is more. So a gradient that is zero but for rounding (that of a
bias before BatchNorm, say) is not judged against itself. NaN equals NaN.
"""

from __future__ import annotations

import math
import os
import signal
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from nearlinear.errors import InputError, NearlinearError
from nearlinear.testing.processes import Result, run_python
from nearlinear.testing.record import Arrays, Record, Step

# What sums in another order may differ by, over a handful of steps.
TOLERANCES = {"float64": 1e-10, "float32": 1e-5}
TOLERANCE_16_BIT = 1e-2
FLOOR = 1e-3


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
            f"equal: {_count(len(self.rows), 'step')}, {_count(self.parameters, 'parameter')}, "
            f"worst relative error {_short(self.worst)} {limit}{but}"
        )


class RunError(NearlinearError):
    """The script failed; ``result`` is the rank that failed first, with what it wrote."""

    def __init__(self, message: str, result: Result) -> None:
        super().__init__(message)
        self.result = result


def equivalent(
    script: str | os.PathLike[str],
    args: Sequence[str] = (),
    *,
    n: int = 2,
    steps: int = 5,
    float64: bool = False,
    tolerance: float | None = None,
    env: Mapping[str, str] | None = None,
    timeout_s: float = 600.0,
    say: Callable[[str], None] = lambda _: None,
) -> Comparison:
    """Run a script's first steps on one process and on ``n``, and compare them.

    Both runs get the same number of threads per process, so that sums within a tensor are taken alike; a script that
    sets no seed gets one.

    Args:
        script: A Python script that calls ``nl.distribute``.
        args: Its arguments.
        n: Processes of the larger run.
        steps: Optimizer steps after which the script is ended.
        float64: Compute in float64 (``record.compute_in_float64`` says what that can do).
        tolerance: Relative error that is allowed; by default 1e-10 in float64, 1e-5 in float32, 1e-2 in 16 bits.
        env: Variables for the script, added to this process's own.
        timeout_s: Seconds that each of the two runs may take.
        say: Told what is being done.

    Raises:
        InputError: There is no such script, it never called ``distribute``, or a number is out of range.
        RunError: The script failed.
        NearlinearError: A run took longer than ``timeout_s``.

    Example:
        assert equivalent("train.py", ["--lr", "0.1"], n=3, float64=True).equal
    """
    if n < 2 or steps < 1:
        raise InputError(
            f"{n} processes and {steps} steps; one process is compared with 2 or more, over 1 step or more"
        )
    if not Path(script).is_file():
        raise InputError(f"there is no script {os.fspath(script)!r} in {Path.cwd()}")
    with tempfile.TemporaryDirectory(prefix="nearlinear-check-") as folder:

        def record(processes: int) -> Record:
            say(f"{Path(script).name} on {_processes(processes)}")
            where = Path(folder) / str(processes)
            return _recorded(where, script, args, processes, steps, float64, env or {}, timeout_s)

        return compare(record(1), record(n), tolerance)


def _recorded(
    folder: Path,
    script: str | os.PathLike[str],
    args: Sequence[str],
    n: int,
    steps: int,
    float64: bool,
    env: Mapping[str, str],
    timeout_s: float,
) -> Record:
    words = [*(["--float64"] if float64 else []), str(folder), str(steps), os.fspath(script), *args]
    threads = {name: os.environ.get("OMP_NUM_THREADS", "1") for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
    results = run_python(
        ["-m", "nearlinear.testing.record", *words],
        n,
        env={**threads, "PYTHONHASHSEED": "0", **env},
        timeout_s=timeout_s,
    )
    failed = [result for result in results if result.exit_code != 0]
    name = Path(script).name
    if failed:
        first = min(failed, key=_consequence)
        raise RunError(f"{name} failed on {_processes(n)}: {first}", first)
    record = Record.read(folder)
    if not record.distributed:
        raise InputError(
            f"{name} ended, or took {_count(steps, 'optimizer step')}, without calling nl.distribute; add the two "
            "lines: import nearlinear as nl / model, optimizer, loader = nl.distribute(model, optimizer, loader)"
        )
    if not record.steps:
        raise InputError(
            f"{name} took no step with an optimizer that was handed to nl.distribute; hand over the one that steps"
        )
    return record


def _consequence(result: Result) -> tuple[bool, bool, float]:
    """Order failed ranks: who failed by itself, who reported another's failure, who was ended; each the first first.

    A rank that raises may take longer to end than another that notices it.
    """
    return result.signal == signal.SIGTERM, "nearlinear: error: " in result.stderr, result.seconds


# ---- comparing


def compare(one: Record, many: Record, tolerance: float | None = None) -> Comparison:
    """Compare a run on one process with the same run on several.

    Args:
        one: What one process did.
        many: What N did.
        tolerance: Relative error that is allowed; by default 1e-10 in float64, 1e-5 in float32, 1e-2 in 16 bits.
    """
    if tolerance is None:
        tolerance = max(TOLERANCES.get(record.dtype, TOLERANCE_16_BIT) for record in (one, many))
    rows: list[Row] = []
    partings: list[Parting] = []
    if one.start or many.start:
        partings += _beyond(tolerance, 0, "parameter", _widest(one.start, many.start, many.ranks))
    for number, (a, b) in enumerate(zip(one.steps, many.steps, strict=False), start=1):
        of_one, of_many, losses = _losses(a, b)
        gradients = _widest(a.gradients, b.gradients, many.ranks)
        parameters = _widest(a.parameters, b.parameters, many.ranks)
        loss = None if of_one is None else losses.error
        rows.append(Row(number, of_one, of_many, loss, gradients.error, parameters.error))
        partings += _beyond(tolerance, number, "loss", losses)
        partings += _beyond(tolerance, number, "gradient", gradients)
        partings += _beyond(tolerance, number, "parameter", parameters)
    if len(one.steps) != len(many.steps):
        detail = f"one process took {_count(len(one.steps), 'step')}, {_processes(many.ranks)} {len(many.steps)}"
        partings.append(Parting(len(rows) + 1, "steps", detail=detail))
    parting = partings[0] if partings else None
    reasons = _reasons(one, many, parting, tolerance) if parting else ()
    names = {name for step in one.steps for name in step.parameters}
    return Comparison(tuple(rows), parting, reasons, tolerance, len(names), many.ranks)


class _Gap(NamedTuple):
    error: float
    name: str = ""
    detail: str = ""


def _beyond(tolerance: float, step: int, kind: str, gap: _Gap) -> list[Parting]:
    return [Parting(step, kind, gap.name, gap.error, gap.detail)] if gap.error > tolerance else []


def _losses(one: Step, many: Step) -> tuple[float | None, float | None, _Gap]:
    """Return the loss of one process, of many, and how far apart they are, pass by pass."""
    passes = len(one.losses[0]) if one.losses else 0
    for rank, losses in enumerate(many.losses):
        if len(losses) != passes:
            detail = f"comes from {passes} backward passes on one process and {len(losses)} on rank {rank}"
            return None, None, _Gap(math.inf, detail=detail)
    if not passes:
        return None, None, _Gap(0.0)
    a, b = _loss_by_pass(one), _loss_by_pass(many)
    floor = FLOOR * max(map(_magnitude, a))
    gap = _Gap(max(_relative(_distance(x, y), _magnitude(x), floor) for x, y in zip(a, b, strict=True)))
    return float(sum(a)), float(sum(b)), gap


def _loss_by_pass(step: Step) -> list[NDArray[Any]]:
    # A share of weight zero may have any loss, NaN too (a mean over no tokens), and it does not count.
    return [
        np.asarray(sum(scale * loss if scale else 0.0 for loss, scale in ranks))
        for ranks in zip(*step.losses, strict=True)
    ]


def _widest(one: Arrays, many: Arrays, ranks: int) -> _Gap:
    """Return the tensor that differs most."""
    distances: dict[str, tuple[float, float]] = {}
    for name in [*one, *(name for name in many if name not in one)]:
        if name not in many or name not in one:
            where = "one process" if name in one else f"{ranks} processes"
            return _Gap(math.inf, name, f"exists on {where} only")
        a, b = one[name], many[name]
        if a.shape != b.shape:
            return _Gap(math.inf, name, f"has shape {a.shape} on one process and {b.shape} on {ranks}")
        distances[name] = _distance(a, b), _magnitude(a)
    floor = FLOOR * max((magnitude for _, magnitude in distances.values()), default=0.0)
    gaps = [_Gap(_relative(*each, floor), name) for name, each in distances.items()]
    return max(gaps, key=lambda gap: gap.error, default=_Gap(0.0))


def _distance(a: NDArray[Any], b: NDArray[Any]) -> float:
    """Return the largest difference between two elements; infinite where one alone is NaN or infinite."""
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    if same.all():
        return 0.0
    wide = np.result_type(a.dtype, np.float64)
    with np.errstate(invalid="ignore"):
        largest = float(np.abs(a.astype(wide) - b.astype(wide))[~same].max())
    return math.inf if math.isnan(largest) else largest


def _magnitude(a: NDArray[Any]) -> float:
    return float(np.abs(a).max(where=np.isfinite(a), initial=0.0))


def _relative(distance: float, magnitude: float, floor: float) -> float:
    scale = max(magnitude, floor)
    return 0.0 if distance == 0.0 else distance / scale if scale else math.inf


# ---- why


def _reasons(one: Record, many: Record, parting: Parting, tolerance: float) -> tuple[Reason, ...]:
    """Return why they part, probably: what is certain from the numbers alone, else what the model and script hold."""
    if parting.detail and parting.kind in ("parameter", "gradient"):
        return (
            Reason(
                "the script builds another model on N processes than on one",
                "let nothing in the model depend on nl.rank() or nl.world_size()",
            ),
        )
    if parting.step == 0:
        return (
            Reason(
                "the script starts from other weights in each run",
                "seed before the model is built (torch.manual_seed(0), not from the clock), or load one checkpoint",
            ),
        )
    certain = _from_sizes(one, many, parting) or _from_options(one, many, parting) or _from_sum(one, many, parting)
    if certain:
        return (certain,)
    if parting.detail:
        return (
            Reason(
                "the number of backward passes in a step depends on the number of processes",
                "accumulate over as many batches on any number of processes; each is the whole batch's",
            ),
        )
    if parting.kind == "parameter":
        return (_from_rounding(one, many, parting, tolerance) or _LOCAL_STEP,)
    reasons = _from_layers(one, many, parting)
    if not reasons:
        reasons = [_from_losses(one, many, parting) if parting.kind == "loss" else _LOCAL_GRADIENT]
    if parting.error < 100 * tolerance and one.dtype != "float64":
        reasons.insert(0, Reason(f"rounding, for the computation is in {one.dtype}", "--float64, which tells it apart"))
    return tuple(reasons)


_LOCAL_STEP = Reason(
    "the gradients agree, so the step itself depends on the rank or on N: clipping by a norm that the script takes "
    "otherwise, or a learning rate or condition taken from a local loss",
    "decide by what all ranks share: torch.nn.utils.clip_grad_norm_, nl.mean(loss)",
)
_LOCAL_GRADIENT = Reason(
    "the losses agree and their gradients do not: something in the backward pass depends on the share (a tensor hook, "
    "an autograd function, part of the loss under no_grad or detached)",
    "let it depend on single samples alone, or on nl.gather of the whole batch",
)


def _from_sizes(one: Record, many: Record, parting: Parting) -> Reason | None:
    for step, (a, b) in enumerate(zip(one.steps, many.steps, strict=False), start=1):
        if a.samples != b.samples and step <= parting.step:
            return Reason(
                f"step {step} takes {a.samples} samples on one process and {b.samples} on {many.ranks}",
                "leave batch_size that of the whole batch; nearlinear gives each rank its share",
            )
    if parting.kind != "steps":
        return None
    return Reason(
        "the length of the loop depends on the number of processes",
        "hand the loader to nl.distribute whole, and divide no length by nl.world_size()",
    )


def _from_options(one: Record, many: Record, parting: Parting) -> Reason | None:
    until = parting.step if parting.kind == "parameter" else parting.step - 1
    for step, (a, b) in enumerate(zip(one.steps[:until], many.steps, strict=False), start=1):
        for name in a.options:
            if name in b.options and a.options[name] != b.options[name]:
                return Reason(
                    f"the optimizer's {name} is {a.options[name]} on one process and {b.options[name]} on "
                    f"{many.ranks} at step {step}",
                    f"the same {name} on any number of processes, for the batch is the same too; where it follows "
                    "from the loss, from nl.mean(loss)",
                )
    return None


def _from_sum(one: Record, many: Record, parting: Parting) -> Reason | None:
    whole, shares = _loss_at(one, many, parting)
    if len(shares) < 2 or many.weight == "sum" or not math.isclose(sum(shares), whole, rel_tol=1e-5):
        return None
    return Reason(
        "the loss is a sum over the batch, for on one process it is the sum of the ranks' losses",
        'nl.distribute(..., weight="sum")',
    )


def _from_rounding(one: Record, many: Record, parting: Parting, tolerance: float) -> Reason | None:
    """Explain a parameter that moved by rounding: its gradient is zero there, and Adam divides it by itself."""
    step, name = one.steps[parting.step - 1], parting.name
    if name not in step.gradients or one.dtype == "float64":
        return None
    a, b = step.parameters[name], many.steps[parting.step - 1].parameters[name]
    noise = np.abs(step.gradients[name]) <= tolerance * max(map(_magnitude, step.gradients.values()))
    apart = ~(np.abs(a - b) <= tolerance * _magnitude(a))
    if not noise[apart].all():
        return None
    return Reason(
        f"rounding: where {name} parts, its gradient is zero but for rounding, and the optimizer makes a full step of "
        "it, as Adam does",
        "--float64, which tells it apart",
    )


def _from_layers(one: Record, many: Record, parting: Parting) -> list[Reason]:
    reasons = []
    if one.batchnorm:
        reasons.append(
            Reason(
                f"BatchNorm ({_some(one.batchnorm)}) normalises over each rank's share of the batch",
                "nn.SyncBatchNorm.convert_sync_batchnorm(model) before nl.distribute",
            )
        )
    if one.dropout:
        reasons.append(
            Reason(
                f"dropout ({_some(one.dropout)}) draws other random numbers on N processes than on one",
                "a dropout of 0 for the check; in training the difference is one of chance alone",
            )
        )
    steps = [*one.steps[: parting.step], *many.steps[: parting.step]]
    drawn = {stream for step in steps for stream in step.drawn}
    if one.dropout:
        drawn -= {"torch", "cuda"}
    if drawn:
        reasons.append(
            Reason(
                f"the script draws random numbers as it trains ({', '.join(sorted(drawn))}), each rank its own",
                "no noise or augmentation for the check; or draw for each sample from a generator seeded by its index",
            )
        )
    return reasons


def _from_losses(one: Record, many: Record, parting: Parting) -> Reason:
    whole, shares = _loss_at(one, many, parting)
    if not shares or not min(shares) <= whole <= max(shares):
        return Reason(
            "the loss mixes samples (a contrastive or ranking loss, a statistic of the batch): no weights make that of "
            "the batch out of those of the shares",
            "take it over the whole batch: loss(nl.gather(features), nl.gather(labels))",
        )
    if many.weight == "sum":
        return Reason(
            'the loss is a mean, and weight="sum" adds those of the ranks',
            "leave weight out, or divide the loss by a count of the whole batch: nl.total(count)",
        )
    if many.weight == "function":
        return Reason(
            "weight(batch) is not what the loss divides by: it lies between the ranks' losses and is not their mean by "
            "weight=",
            "return the number of the samples or tokens that count in this loss",
        )
    return Reason(
        "the loss is a mean in which samples do not weigh alike (a mean over tokens, class weights): it lies between "
        "the ranks' losses and is not their mean by samples",
        "nl.distribute(..., weight=lambda batch: ...) with what the mean divides by, such as (batch[1] != -100).sum(); "
        "or, if the loss compares samples with each other, nl.gather",
    )


def _loss_at(one: Record, many: Record, parting: Parting) -> tuple[float, list[float]]:
    """Return the loss of one process and those of the ranks that count, in the backward pass that differs most."""
    if parting.kind != "loss" or parting.detail:
        return math.nan, []
    a, b = one.steps[parting.step - 1], many.steps[parting.step - 1]
    gaps = [_distance(x, y) for x, y in zip(_loss_by_pass(a), _loss_by_pass(b), strict=True)]
    place = gaps.index(max(gaps))
    return a.losses[0][place][0], [rank[place][0] for rank in b.losses if rank[place][1] != 0.0]


# ---- words


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:2]) + (f" and {len(names) - 2} more" if len(names) > 2 else "")


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _processes(n: int) -> str:
    return "one process" if n == 1 else f"{n} processes"


def _short(error: float) -> str:
    return f"{error:.1e}" if error else "0"
