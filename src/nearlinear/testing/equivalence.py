"""Comparing a script on one process with the same script on N: where they part, by how much, and why, probably."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from nearlinear.errors import InputError, NearlinearError
from nearlinear.testing.comparison import Comparison, Parting, Row, count
from nearlinear.testing.gaps import Gap, loss_gap, widest_gap
from nearlinear.testing.processes import Result, run_python
from nearlinear.testing.reasons import find_reasons
from nearlinear.testing.record import Record

__all__ = ["Comparison", "RunError", "compare", "equivalent"]

# What sums in another order may differ by, over a handful of steps.
TOLERANCES = {"float64": 1e-10, "float32": 1e-5}
TOLERANCE_16_BIT = 1e-2


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
            f"{name} ended, or took {count(steps, 'optimizer step')}, without calling nl.distribute; add the two "
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
        partings += _beyond(tolerance, 0, "parameter", widest_gap(one.start, many.start, many.ranks))
    for number, (a, b) in enumerate(zip(one.steps, many.steps, strict=False), start=1):
        of_one, of_many, losses = loss_gap(a, b)
        gradients = widest_gap(a.gradients, b.gradients, many.ranks)
        parameters = widest_gap(a.parameters, b.parameters, many.ranks)
        loss = None if of_one is None else losses.error
        rows.append(Row(number, of_one, of_many, loss, gradients.error, parameters.error))
        partings += _beyond(tolerance, number, "loss", losses)
        partings += _beyond(tolerance, number, "gradient", gradients)
        partings += _beyond(tolerance, number, "parameter", parameters)
    if len(one.steps) != len(many.steps):
        detail = f"one process took {count(len(one.steps), 'step')}, {_processes(many.ranks)} {len(many.steps)}"
        partings.append(Parting(len(rows) + 1, "steps", detail=detail))
    parting = partings[0] if partings else None
    reasons = find_reasons(one, many, parting, tolerance) if parting else ()
    names = {name for step in one.steps for name in step.parameters}
    return Comparison(tuple(rows), parting, reasons, tolerance, len(names), many.ranks)


def _beyond(tolerance: float, step: int, kind: str, gap: Gap) -> list[Parting]:
    return [Parting(step, kind, gap.name, gap.error, gap.detail)] if gap.error > tolerance else []


def _processes(n: int) -> str:
    return "one process" if n == 1 else f"{n} processes"
