"""Turning a training script into its losses and times on one process and on N, and into what keeps N from N times."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

from nearlinear.errors import NearlinearError
from nearlinear.launch.environment import threads

DEADLINE_S = 1800.0  # for one training; on two idle cores the longest takes a minute
WARM_UP_STEPS = 3

# One thread each, so that a process means the same alone and among others; and no GPU, which they would have to share.
ENVIRONMENT = {
    **threads(1, 1, {}),
    "CUDA_VISIBLE_DEVICES": "",
    "PYTHONUNBUFFERED": "1",
}


@dataclass(frozen=True, slots=True)
class Example:
    """A training script that writes what it did to ``--record FILE`` and knows ``--batch-size``.

    Args:
        name: Its name in tables and of files.
        title: What stands above its curve.
        script: Where it lies.
        batch: Samples per step of all processes.
        whole: Arguments of the training to be shown.
        quick: Those with ``--quick``.
        timed: Those for timing a share of the batch.
    """

    name: str
    title: str
    script: Path
    batch: int
    whole: tuple[str, ...]
    quick: tuple[str, ...]
    timed: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Limits:
    """What a step on N processes is made of, in seconds; a part may come out below zero by the noise of timing.

    Args:
        ideal: A step of one process, divided by N.
        fixed: Compute that does not shrink with the batch.
        crowding: What N processes lose by working side by side on one machine, without any exchange.
        exchange: Exchanging gradients, and waiting for it.
    """

    ideal: float
    fixed: float
    crowding: float
    exchange: float

    @classmethod
    def of(cls, n: int, *, one: float, alone: float, crowded: float, many: float) -> Limits:
        """Return them from four measured steps, each the next one's lower bound.

        Args:
            n: Number of processes.
            one: Seconds of a step on one process.
            alone: The same with one process's share of the batch.
            crowded: The same while N processes do so at once, each for itself.
            many: Seconds of a step on N processes.

        Example:
            >>> Limits.of(2, one=8.0, alone=4.5, crowded=5.0, many=5.25)
            Limits(ideal=4.0, fixed=0.5, crowding=0.5, exchange=0.25)
        """
        return cls(one / n, alone - one / n, crowded - alone, many - crowded)

    @property
    def step(self) -> float:
        """Seconds of the measured step, the sum of the parts."""
        return self.ideal + self.fixed + self.crowding + self.exchange


@dataclass(frozen=True, slots=True)
class Comparison:
    """One example's losses and times on one process and on ``n``.

    Args:
        example: What was trained.
        n: Number of processes of the second run.
        steps: Numbers of the steps, from 1.
        losses_one: Loss at each step on one process.
        losses_many: The same on ``n``.
        step_one: Seconds of a step on one process.
        step_many: The same on ``n``.
        limits: What a step on ``n`` is made of; None if that was not measured.
    """

    example: Example
    n: int
    steps: tuple[float, ...]
    losses_one: tuple[float, ...]
    losses_many: tuple[float, ...]
    step_one: float
    step_many: float
    limits: Limits | None = None

    @property
    def difference(self) -> float:
        """The largest difference of the two runs' losses."""
        return max(abs(a - b) for a, b in zip(self.losses_one, self.losses_many, strict=True))


def compare(example: Example, n: int, out: Path, *, quick: bool) -> Comparison:
    """Train on one process and on ``n``; unless it is to be quick, also measure what a step is made of.

    Args:
        example: What to train.
        n: Number of processes of the second run.
        out: Folder for the records of all runs.
        quick: Whether a few steps are enough.

    Raises:
        NearlinearError: A training failed, or was not over before the deadline.
    """
    args = example.quick if quick else example.whole
    _say(f"{example.name} on one process")
    one = _train(example, out / f"{example.name}-one.jsonl", *args)
    _say(f"{example.name} on {n} processes")
    many = _train(example, out / f"{example.name}-many.jsonl", *args, n=n)
    compared = Comparison(
        example=example,
        n=n,
        steps=tuple(row["step"] for row in one),
        losses_one=tuple(row["loss"] for row in one),
        losses_many=tuple(row["loss"] for row in many),
        step_one=seconds_per_step(one, example.batch),
        step_many=seconds_per_step(many, example.batch),
    )
    return compared if quick else replace(compared, limits=_limits(compared, out))


def _limits(compared: Comparison, out: Path) -> Limits:
    """Time one process's share of the batch, alone and next to others that do the same without any exchange."""
    example, n = compared.example, compared.n
    share = -(-example.batch // n)  # the largest, which the others wait for
    _say(f"{example.name}: timing a share of the batch ({share} of {example.batch}), alone and then {n} at once")
    names = [f"{example.name}-alone", *(f"{example.name}-crowd{i}" for i in range(n))]
    records = [out / f"{name}.jsonl" for name in names]
    commands = [_command(example, record, *example.timed, "--batch-size", str(share)) for record in records]
    _run(commands[:1], f"{example.name} with a share of the batch", quiet=True)
    _run(commands[1:], f"{example.name}, {n} at once with a share of the batch each", quiet=True)
    alone, *crowd = (seconds_per_step(_read(record), share) for record in records)
    return Limits.of(n, one=compared.step_one, alone=alone, crowded=max(crowd), many=compared.step_many)


def _train(example: Example, record: Path, *args: str, n: int = 1) -> list[dict[str, float]]:
    launcher = ["-m", "nearlinear", "run", "-n", str(n)] if n > 1 else []
    _run([launcher + _command(example, record, *args)], f"{example.name} on {n} process{'es' if n > 1 else ''}")
    return _read(record)


def _command(example: Example, record: Path, *args: str) -> list[str]:
    return [str(example.script), *args, "--record", str(record)]


def _say(text: str) -> None:
    print(f"nearlinear: {text}", file=sys.stderr, flush=True)


def _run(commands: Sequence[Sequence[str]], what: str, *, quiet: bool = False) -> None:
    """Run Python with each of the arguments, all at once, and wait for all; what they print is progress here."""
    env = {**os.environ, **ENVIRONMENT}
    stdout = subprocess.DEVNULL if quiet else 2  # the file descriptor of stderr
    processes = [subprocess.Popen([sys.executable, *args], env=env, stdout=stdout) for args in commands]
    deadline = time.monotonic() + DEADLINE_S
    try:
        codes = [process.wait(max(0.0, deadline - time.monotonic())) for process in processes]
    except subprocess.TimeoutExpired:
        raise NearlinearError(f"{what} was not over after {DEADLINE_S:.0f} s; try `nearlinear demo --quick`") from None
    finally:
        for process in processes:
            _end(process)
    if any(codes):
        raise NearlinearError(f"{what} ended with exit code {max(codes, key=abs)}; what it said is above")


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the process if it still runs; `nearlinear run` ends its ranks when it is told to."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _read(record: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in record.read_text().splitlines()]


def seconds_per_step(rows: Sequence[dict[str, float]], batch: int) -> float:
    """Return the median seconds of a step, without the first ones and those of an epoch's short last batch.

    Args:
        rows: A script's record: ``seconds`` and ``samples`` so far at the end of each step.
        batch: Samples of a full step.
    """
    pairs = list(pairwise(rows))[WARM_UP_STEPS - 1 :]
    return statistics.median(b["seconds"] - a["seconds"] for a, b in pairs if b["samples"] - a["samples"] == batch)
