"""Turning a run into a file of JSON lines while it lasts, and such a file back into values.

    {"format": "nearlinear-run/1", "kind": "run", "script": ..., "processes": 2, "began": ..., "plan": {...}, ...}
    {"kind": "strategy", "at": 2.1, "strategy": "data"}
    {"kind": "step", "at": 3.2, "step": 40, "samples_per_s": 1234.0, "waiting": 0.07}
    {"kind": "apart", "at": 3.2, "round": 12, "members": 2, "sent": 45000, "received": 50000, ...}
    {"kind": "notice", "at": 3.3, "message": "..."}
    {"kind": "spans", "at": 9.1, "seconds": 0.05, "spans": [[device, start, end, what, computing], ...]}
    {"kind": "end", "at": 60.1, "exit_code": 0, "message": null, "steps": 700}

``at`` is in seconds since the run began. Every line is handed to the system as it is written, so a run that is killed
leaves all of them; the end is then missing. Of a long run every second, fourth, ... step is written.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

from nearlinear.core.forecast import Point
from nearlinear.errors import InputError, NearlinearError
from nearlinear.observe import kept
from nearlinear.observe.live import KEPT, Apart, Step
from nearlinear.observe.page.content import Content, Pace, Timeline
from nearlinear.planning.simulate.values import Span

FORMAT = "nearlinear-run/1"
_SERIES = "nearlinear-run/"
_FIRST_BYTES = 64 << 20  # a first line longer than this is no record's


def comparable(plan: Content | None, processes: int, strategy: str | None) -> Point | None:
    """Return the point of a plan's forecast that a run can be held against.

    Args:
        plan: What was planned for the script.
        processes: How many train it.
        strategy: By which strategy; ``None``, or ``"auto"``: the best.

    Returns:
        The point; ``None`` where the plan knows no such number of processes, or not this strategy for them.
    """
    for point in () if plan is None else plan.ways:
        assert point.plan is not None
        if point.devices == processes and (strategy in (None, "auto", point.plan.strategy) or processes == 1):
            return point
    return None


# ---- writing


class Recorder:
    """Writes a run's record; what goes wrong with that is said once and never stops the run.

    Args:
        path: Where to; ``None`` for the folder of records.
        script: Path and arguments.
        processes: How many run it.
        strategy: What was asked for on the command line.
        plan: What was planned for it.
        say: Told in a line why there is no record.
    """

    def __init__(
        self,
        path: Path | None,
        script: Sequence[str],
        processes: int,
        strategy: str | None,
        plan: Content | None,
        say: Callable[[str], None],
    ) -> None:
        self.path: Path | None = None
        self._say, self._ended, self._named = say, False, False
        self._file: TextIO | None = None
        self._seen = self._written = self._lines = 0
        self._every = 1
        self._last: Step | None = None
        self._apart: Apart | None = None
        self._lock = threading.Lock()  # another thread may have something to note
        self._began = time.monotonic()
        began = datetime.now().astimezone()
        try:
            path = kept.new_run(script[0], began) if path is None else path
            self._file = open(_descriptor(path), "w", buffering=1, encoding="utf-8")  # noqa: SIM115
            self.path = path
        except (OSError, InputError) as error:
            say(f"this run is not recorded: {error}")
            return
        self._write({"format": FORMAT, "kind": "run", **_about(script, processes, strategy, began, plan)})

    def event(self, event: Mapping[str, Any]) -> None:
        """Note what a rank has sent."""
        self._apart = Apart.from_event(event) or self._apart
        if event.get("kind") == "distributed" and "strategy" in event and not self._named:
            self._named = True
            self._line("strategy", strategy=event["strategy"])
        step = Step.from_event(event)
        if step is not None:
            self._last = step
            if self._seen % self._every == 0:
                self._step(step)
            self._seen += 1
        elif event.get("kind") == "spans" and {"seconds", "spans"} <= event.keys():
            self._line("spans", seconds=event["seconds"], spans=event["spans"])

    def notice(self, message: str) -> None:
        """Note something a person was told."""
        self._line("notice", message=message)

    def end(self, exit_code: int, message: str | None) -> None:
        """Write the last line."""
        if self._ended:
            return
        self._ended = True
        if self._last is not None and (self._seen - 1) % self._every != 0:
            self._step(self._last)  # the last step is in the record, whichever are left out
        if self._apart is not None:
            self._line("apart", **asdict(self._apart))
        self._line("end", exit_code=exit_code, message=message, steps=self._last.step if self._last else 0)
        with self._lock:
            if self._file is not None:
                self._file.close()
                self._file = None

    def __enter__(self) -> Recorder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            return
        if self.path is not None and not self._lines:  # it never began; there is nothing to report
            self.path.unlink(missing_ok=True)
        self.end(getattr(error, "exit_code", 130 if kind is KeyboardInterrupt else 1), str(error) or repr(error))

    def _step(self, step: Step) -> None:
        if self._apart is not None:
            self._line("apart", **asdict(self._apart))
        known = {"loss": step.loss} if step.loss is not None else {}
        self._line("step", step=step.step, samples_per_s=step.samples_per_s, waiting=step.waiting, **known)
        self._written += 1
        if self._written >= KEPT:  # from here on half as many: the file grows with the logarithm of the run
            self._written //= 2
            self._every *= 2

    def _line(self, kind: str, **fields: Any) -> None:
        self._lines += 1
        self._write({"kind": kind, "at": round(time.monotonic() - self._began, 4), **fields})

    def _write(self, line: Mapping[str, Any]) -> None:
        with self._lock:
            if self._file is None:
                return
            try:
                self._file.write(json.dumps(line) + "\n")
            except OSError as error:
                self._say(f"this run is recorded up to here, not on: {error}")
                self._give_up()

    def _give_up(self) -> None:
        assert self._file is not None
        file, self._file = self._file, None
        with contextlib.suppress(OSError):  # what it still held does not fit either; it is closed all the same
            file.close()


def _descriptor(path: Path) -> int:
    """Open a new file that others may not read; arguments can hold secrets. An older record gives way, nothing else.

    Raises:
        FileExistsError: Something that is no record is there.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    try:
        return os.open(path, flags, 0o600)
    except FileExistsError:
        if not path.is_file() or not _is_record(path):
            raise
        path.unlink()
        return os.open(path, flags, 0o600)


def _is_record(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(64).startswith(f'{{"format": "{_SERIES}'.encode())


def _about(
    script: Sequence[str], processes: int, strategy: str | None, began: datetime, plan: Content | None
) -> dict[str, Any]:
    """Return the fields of the first line."""
    from importlib.metadata import PackageNotFoundError, version  # takes longer than all else here

    versions = {"python": platform.python_version()}
    for name in ("nearlinear", "torch", "numpy"):
        try:
            versions[name] = version(name)
        except PackageNotFoundError:  # run from its source without being installed
            continue
    try:
        same = kept.identity(script)
    except OSError:
        same = ""
    return {
        "script": str(Path(script[0]).resolve()),
        "arguments": list(script[1:]),
        "same": same,
        "processes": processes,
        "strategy": strategy,
        "began": began.isoformat(timespec="seconds"),
        "hosts": [socket.gethostname()],
        "system": platform.platform(),
        "versions": versions,
        "plan": None if plan is None else json.loads(plan.to_json()),
    }


# ---- reading


@dataclass(frozen=True)
class Run:
    """A run as its record tells it.

    Args:
        path: The record.
        script: The script's path.
        arguments: Its arguments.
        same: Equal for runs of the same script with the same arguments.
        processes: How many.
        strategy: By which it trained; what was asked for on the command line where it never said so.
        began: Date and time.
        hosts: The machines.
        versions: Of what it ran on, by name.
        plan: What was planned.
        reports: What rank 0 reported.
        notices: What a person was told.
        measured: What devices did in one step, where they said so.
        apart: How this member stood at the last among others far away, where there were any.
        seconds: From the start to the last line.
        steps: How many.
        exit_code: How it ended; ``None`` where it was killed or still runs.
        message: Why it failed.
    """

    path: Path
    script: str
    arguments: tuple[str, ...]
    same: str
    processes: int
    strategy: str | None
    began: str
    hosts: tuple[str, ...]
    versions: Mapping[str, str]
    plan: Content | None = field(repr=False)
    reports: tuple[Pace, ...] = field(repr=False)
    notices: tuple[str, ...]
    measured: Timeline | None = field(repr=False)
    apart: Apart | None
    seconds: float
    steps: int
    exit_code: int | None
    message: str | None


# What reading damaged JSON, and taking it for what it should be, may raise.
_MOST = 10**6  # processes
_DAMAGED = (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError)


def read_run(path: Path) -> Run:
    """Return the run in a record; one that is killed or goes on ends with its last whole line.

    Raises:
        InputError: There is no such file, it is no record, or a line in it is damaged.
    """
    reports: list[Pace] = []
    notices: list[str] = []
    measured: dict[int, Timeline] = {}
    at, steps = 0.0, 0
    exit_code: int | None = None
    message: str | None = None
    apart: Apart | None = None
    try:
        with path.open("rb") as file:
            first = _first(file.readline(_FIRST_BYTES), path)
            for number, line in enumerate(file, 2):
                if not line.endswith(b"\n"):
                    break  # the last, cut in two when the run was killed
                try:
                    raw = json.loads(line)
                    kind, at = raw["kind"], _number(raw["at"])
                    if kind == "step":
                        reports.append(Pace(at, int(raw["step"]), float(raw["samples_per_s"]), float(raw["waiting"])))
                        steps = max(steps, reports[-1].step)
                    elif kind == "strategy":
                        first["strategy"] = str(raw["strategy"])
                    elif kind == "apart":
                        apart = _standing(raw)
                    elif kind == "notice":
                        notices.append(str(raw["message"]))
                    elif kind == "spans":
                        spans = tuple(_span(each) for each in raw["spans"])
                        if spans:  # a device's latest
                            measured[spans[0].device] = Timeline("measured", _number(raw["seconds"]), spans)
                    elif kind == "end":
                        exit_code, message = int(raw["exit_code"]), raw["message"]
                        steps = max(steps, int(raw["steps"]))
                except _DAMAGED as error:
                    raise InputError(f"{path}: line {number} of this record is damaged: {_why(error)}") from error
    except OSError as error:
        raise InputError(f"cannot read the record {path}: {error.strerror}") from error
    return Run(path=path, **first, reports=tuple(reports), notices=tuple(notices), measured=_joined(measured),
               apart=apart, seconds=at, steps=steps, exit_code=exit_code, message=message)  # fmt: skip


def _first(line: bytes, path: Path) -> dict[str, Any]:
    """Return what the first line says."""
    try:
        raw = json.loads(line)
        written = raw["format"]
    except _DAMAGED as error:
        raise InputError(f"{path} is not the record of a run") from error
    if written != FORMAT:
        newer = str(written).startswith(_SERIES)
        raise InputError(
            f"{path} is a record in the format {written!r}, this version reads {FORMAT!r}; update nearlinear"
            if newer
            else f"{path} is not the record of a run"
        )
    try:
        return {
            "script": str(raw["script"]),
            "arguments": tuple(map(str, raw["arguments"])),
            "same": str(raw["same"]),
            "processes": _count(raw["processes"]),
            "strategy": raw["strategy"],
            "began": datetime.fromisoformat(raw["began"]).isoformat(),
            "hosts": tuple(map(str, raw["hosts"])),
            "versions": {str(name): str(version) for name, version in raw["versions"].items()},
            "plan": None if raw["plan"] is None else Content.from_json(json.dumps(raw["plan"])),
        }
    except (*_DAMAGED, NearlinearError) as error:
        raise InputError(f"{path}: line 1 of this record is damaged: {_why(error)}") from error


def _count(value: Any) -> int:
    number = int(value)
    if not 1 <= number <= _MOST:
        raise ValueError(f"{number:.3g} is not a number of processes")
    return number


def _number(value: Any) -> float:
    number = float(value)
    if not 0 <= number < float("inf"):
        raise ValueError(f"{value} is not a time")
    return number


def _standing(raw: Mapping[str, Any]) -> Apart:
    rates = (raw[name] for name in ("alone_samples_per_s", "together_samples_per_s"))
    counts = (int(_number(raw[name])) for name in ("round", "members", "sent", "received"))
    return Apart(*counts, *(None if rate is None else _number(rate) for rate in rates))


def _span(raw: Sequence[Any]) -> Span:
    device, start, end, what, computing = raw
    return Span(int(device), _number(start), _number(end), str(what), bool(computing))


def _joined(by_device: Mapping[int, Timeline]) -> Timeline | None:
    """Return what all devices did, as one timeline."""
    if not by_device:
        return None
    spans = tuple(span for each in by_device.values() for span in each.spans)
    return Timeline("measured", max(each.seconds for each in by_device.values()), spans)


def _why(error: Exception) -> str:
    return f"it has no {error}" if isinstance(error, KeyError) else str(error)
