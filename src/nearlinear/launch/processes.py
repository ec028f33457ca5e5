"""Turning a command into the processes of one run, none of which outlives this one."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from typing import IO

from nearlinear.errors import NearlinearError
from nearlinear.launch.outcome import End

# A shell that is told the process groups, one a line. Its input ends when this process does, however it dies, and
# then it kills them. (The kernel's own PR_SET_PDEATHSIG is Linux's alone and reaches no grandchildren.)
_GUARD = 'g=; while read -r one; do g="$g -$one"; done; kill -s KILL -- $g'


class Processes:
    """The processes of one run, one per environment, each in a session of its own.

    They read nothing, write into pipes, and inherit the writing end of one more pipe as ``NEARLINEAR_EVENTS``.

    Attributes:
        pipes: ``(rank, "stdout" or "stderr", file)`` of each.
        events: The reading end of the events' pipe.
        wake: A file descriptor that can be read when a process has ended.
        alive: Ranks whose end ``ended`` has not returned yet.

    Raises:
        NearlinearError: The machine cannot start them.
    """

    def __init__(self, command: Sequence[str], environments: Sequence[Mapping[str, str]]) -> None:
        self.pipes: list[tuple[int, str, IO[bytes]]] = []
        self.alive: set[int] = set()
        self._processes: list[subprocess.Popen[bytes]] = []
        self._waiting: list[threading.Thread] = []
        self._ends: queue.SimpleQueue[End] = queue.SimpleQueue()
        self._open = contextlib.ExitStack()
        try:
            self._start(command, environments)
        except BaseException:
            self.close()
            raise

    def _start(self, command: Sequence[str], environments: Sequence[Mapping[str, str]]) -> None:
        self.wake, self._waker = self._pipe()
        self.events, events = self._pipe()
        os.set_blocking(events, False)  # a rank must not wait for whoever reads its events
        guard = subprocess.Popen(
            ["/bin/sh", "-c", _GUARD],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        assert guard.stdin is not None
        self._open.enter_context(guard)
        self._open.callback(guard.kill)
        began = time.monotonic()
        for rank, environment in enumerate(environments):
            try:
                process = subprocess.Popen(
                    command,
                    env={**environment, "NEARLINEAR_EVENTS": str(events)},
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    bufsize=0,
                    pass_fds=[events],
                    start_new_session=True,
                )
            except OSError as error:
                raise NearlinearError(f"rank {rank} of {len(environments)} could not be started: {error}") from None
            os.write(guard.stdin.fileno(), b"%d\n" % process.pid)
            self._processes.append(process)
            self.alive.add(rank)
            for name, file in (("stdout", process.stdout), ("stderr", process.stderr)):
                assert file is not None
                self.pipes.append((rank, name, self._open.enter_context(file)))
            # A thread each, so that the order of the ends is known: a rank that answers to another's death ends
            # within milliseconds of it, and the first is the one to name.
            thread = threading.Thread(target=self._wait, args=(rank, process, began), daemon=True)
            thread.start()
            self._waiting.append(thread)

    def _pipe(self) -> tuple[int, int]:
        read, write = os.pipe()
        self._open.callback(os.close, read)
        self._open.callback(os.close, write)
        return read, write

    def _wait(self, rank: int, process: subprocess.Popen[bytes], began: float) -> None:
        returncode = process.wait()
        self._ends.put(End(rank, returncode, time.monotonic() - began))
        os.write(self._waker, b".")

    def ended(self) -> list[End]:
        """Return the ends since the last call, in their order."""
        ends = []
        while not self._ends.empty():
            ends.append(self._ends.get())
            self.alive.discard(ends[-1].rank)
        return ends

    def signal(self, number: int) -> None:
        """Send a signal to every rank that is alive; not to its children, which it may want to end itself."""
        for rank in self.alive:
            self._processes[rank].send_signal(number)

    def kill_group(self, rank: int) -> None:
        """Kill a rank and whatever it has started."""
        with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS: EPERM when only a zombie is left
            os.killpg(self._processes[rank].pid, signal.SIGKILL)

    def close(self) -> None:
        """Kill what still runs, and let go of the pipes."""
        for rank in self.alive:
            self.kill_group(rank)
        for thread in self._waiting:
            thread.join()
        self._open.close()

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
