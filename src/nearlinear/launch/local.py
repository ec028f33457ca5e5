"""Running one command as N ranks on this machine, and ending them together."""

from __future__ import annotations

import json
import os
import selectors
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import FrameType
from typing import IO, Any

from nearlinear.launch.environment import checked_port, free_port, gpus_for, rank_environment
from nearlinear.launch.lines import Lines, Printer
from nearlinear.launch.outcome import End, Outcome
from nearlinear.launch.processes import Processes
from nearlinear.runtime.environment import usable_cores

OnLine = Callable[[int, str, bytes], None]
OnEvent = Callable[[dict[str, Any]], None]

KILL_AFTER_S = 2.0  # from SIGTERM to SIGKILL
DRAIN_S = 1.0  # how long output is awaited from what a rank has left running
LOOK_S = 0.2  # how long a signal to this process may go unseen

_STOP = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_PASS_ON = (*_STOP, signal.SIGUSR1, signal.SIGUSR2)


def run_local(
    command: Sequence[str],
    n: int,
    *,
    env: Mapping[str, str] | None = None,
    port: int | None = None,
    on_line: OnLine | None = None,
    on_event: OnEvent | None = None,
    grace_s: float = 5.0,
    limit_s: float | None = None,
) -> Outcome:
    """Run ``command`` as ranks 0 to ``n - 1`` and return how they ended.

    When a rank fails, the others get ``grace_s`` to notice and say so, then SIGTERM, then SIGKILL, with all they have
    started. Signals to this process go to the ranks; a second SIGINT kills them. They do not outlive this process.

    Args:
        command: Program and arguments, the same for all.
        n: Number of processes.
        env: Variables added to this process's own; the launcher's (RANK and so on) come on top.
        port: Where rank 0 opens the rendezvous; a free one by default.
        on_line: Called with rank, ``"stdout"`` or ``"stderr"``, and each line without its end; by default it is
            printed here behind its rank. When it raises OSError, nobody reads that stream: the ranks' are closed.
        on_event: Called with each event that a rank sends with ``nearlinear.events.send_to_launcher``.
        grace_s: Seconds from a rank's failure to the others' SIGTERM.
        limit_s: Seconds after which all are killed; by default they may take as long as they like.

    Raises:
        InputError: ``port`` is in use, or there are fewer GPUs than processes.
        NearlinearError: The machine cannot start them.

    Example:
        >>> said = []
        >>> run_local(["echo", "hello"], 2, on_line=lambda rank, stream, line: said.append((rank, line))).exit_code
        0
        >>> sorted(said)
        [(0, b'hello'), (1, b'hello')]
    """
    inherited = {**os.environ, **(env or {})}
    gpus = gpus_for(n, inherited)
    port = free_port() if port is None else checked_port(port)
    environments = [inherited | rank_environment(rank, n, port, gpus, usable_cores(), inherited) for rank in range(n)]
    with _Signals() as signals, Processes(command, environments) as processes:
        return _Watch(processes, signals, on_line or Printer(), on_event, grace_s, limit_s).until_all_ended()


@dataclass(slots=True)
class _Pipe:
    rank: int
    stream: str
    file: IO[bytes]
    lines: Lines


class _Watch:
    """Hands on what the ranks write, and decides when which of them is ended."""

    def __init__(
        self,
        processes: Processes,
        signals: _Signals,
        on_line: OnLine,
        on_event: OnEvent | None,
        grace_s: float,
        limit_s: float | None,
    ) -> None:
        self._processes, self._signals = processes, signals
        self._on_line, self._on_event = on_line, on_event
        self._grace_s = grace_s
        self._limit = time.monotonic() + limit_s if limit_s is not None else None
        self._ends: dict[int, End] = {}
        self._failure: End | None = None
        self._stopped_by: int | None = None
        self._overdue: tuple[int, ...] = ()
        self._due: list[tuple[float, int]] = []  # signals to come, by time
        self._event = b""
        self._selector = selectors.DefaultSelector()
        self._pipes = [_Pipe(rank, stream, file, Lines()) for rank, stream, file in processes.pipes]
        for pipe in self._pipes:
            self._selector.register(pipe.file, selectors.EVENT_READ, partial(self._output, pipe))
        self._selector.register(processes.events, selectors.EVENT_READ, self._events)
        self._selector.register(processes.wake, selectors.EVENT_READ, lambda: os.read(processes.wake, 64))

    def until_all_ended(self) -> Outcome:
        with self._selector:
            while self._processes.alive:
                self._look(self._patience())
                self._pass_on_signals()
                for end in self._processes.ended():
                    self._ended(end)
                self._send_due()
            # One more look reads all that the pipes hold; what a rank has left running may keep them open.
            until = time.monotonic() + DRAIN_S
            while (self._look(0.0 if not self._pipes else 0.05) or self._pipes) and time.monotonic() < until:
                pass
            for pipe in tuple(self._pipes):
                self._close(pipe)
        ends = tuple(self._ends[rank] for rank in sorted(self._ends))
        return Outcome(ends, self._failure, self._stopped_by, self._overdue)

    # ---- what the ranks write

    def _look(self, timeout_s: float) -> bool:
        """Handle what can be read, and return whether there was anything."""
        ready = self._selector.select(timeout_s)
        for key, _ in ready:
            if key.fileobj in self._selector.get_map():  # not closed by one before it
                key.data()
        return bool(ready)

    def _output(self, pipe: _Pipe) -> None:
        data = os.read(pipe.file.fileno(), 1 << 16)
        if data:
            self._show(pipe, pipe.lines.feed(data, time.monotonic()))
        else:
            self._close(pipe)

    def _show(self, pipe: _Pipe, lines: list[bytes]) -> None:
        try:
            for line in lines:
                self._on_line(pipe.rank, pipe.stream, line)
        except OSError:
            # Nobody reads it any more (`nearlinear run ... | head`): the ranks find out as a single process would.
            for other in [other for other in self._pipes if other.stream == pipe.stream]:
                self._forget(other)

    def _close(self, pipe: _Pipe) -> None:
        self._show(pipe, pipe.lines.end())
        self._forget(pipe)

    def _forget(self, pipe: _Pipe) -> None:
        if pipe in self._pipes:
            self._pipes.remove(pipe)
            self._selector.unregister(pipe.file)
            pipe.file.close()

    def _events(self) -> None:
        *lines, self._event = (self._event + os.read(self._processes.events, 1 << 16)).split(b"\n")
        for line in lines:
            try:
                event = json.loads(line)
            except ValueError:  # cut at the length a pipe takes in one piece
                continue
            if self._on_event is not None and isinstance(event, dict):
                self._on_event(event)

    # ---- who is ended when

    def _patience(self) -> float:
        times = [time for time, _ in self._due] + ([self._limit] if self._limit is not None else [])
        return max(0.0, min([LOOK_S, *(at - time.monotonic() for at in times)]))

    def _ended(self, end: End) -> None:
        self._ends[end.rank] = end
        if end.returncode != 0 and self._failure is None:
            self._failure = end
            term_at = time.monotonic() + self._grace_s
            self._due += [(term_at, signal.SIGTERM), (term_at + KILL_AFTER_S, signal.SIGKILL)]
        if self._failure is not None:
            self._processes.kill_group(end.rank)  # its data workers: nobody ends them now

    def _pass_on_signals(self) -> None:
        for number in self._signals.take():
            if number == signal.SIGINT and self._stopped_by == signal.SIGINT:
                self._due = [(time.monotonic(), signal.SIGKILL)]
                continue
            if number in _STOP:
                self._stopped_by = number
            self._processes.signal(number)

    def _send_due(self) -> None:
        now = time.monotonic()
        if self._limit is not None and now >= self._limit:
            self._limit = None
            self._overdue = tuple(sorted(self._processes.alive))
            self._due = [(now, signal.SIGKILL)]
        for at, number in tuple(self._due):
            if now >= at:
                self._due.remove((at, number))
                if number == signal.SIGKILL:
                    for rank in self._processes.alive:
                        self._processes.kill_group(rank)
                else:
                    self._processes.signal(number)


class _Signals:
    """Collects the signals that are passed on, while the run lasts.

    One that is ignored (by nohup, say) stays so, for the ranks too. Handlers belong to the main thread: a run started
    in another passes nothing on.
    """

    def __init__(self) -> None:
        self._taken: list[int] = []
        self._before: dict[int, Any] = {}

    def __enter__(self) -> _Signals:
        if threading.current_thread() is threading.main_thread():
            for number in _PASS_ON:
                if signal.getsignal(number) not in (signal.SIG_IGN, None):
                    self._before[number] = signal.signal(number, self._take)
        return self

    def _take(self, number: int, frame: FrameType | None) -> None:
        self._taken.append(number)

    def take(self) -> list[int]:
        taken, self._taken = self._taken, []
        return taken

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
