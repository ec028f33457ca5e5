"""Turning a script and a number into N processes of it, and these into what each wrote and how it ended."""

from __future__ import annotations

import os
import shlex
import signal as signals
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from nearlinear.errors import InputError, NearlinearError
from nearlinear.launch.local import run_local
from nearlinear.launch.outcome import End
from nearlinear.testing.faults import Fault
from nearlinear.testing.links import Network


@dataclass(frozen=True, slots=True)
class Result:
    """What became of one rank.

    Args:
        rank: Its number.
        exit_code: What it returned; None if a signal ended it.
        signal: The number of the signal that ended it; None if it returned.
        stdout: What it wrote there.
        stderr: What it wrote there.
        seconds: Seconds from the start of the run to its end.
    """

    rank: int
    exit_code: int | None
    signal: int | None
    stdout: str
    stderr: str
    seconds: float

    def __str__(self) -> str:
        return str(End(self.rank, -self.signal if self.signal is not None else self.exit_code or 0, self.seconds))


def run_processes(
    script: str | os.PathLike[str],
    n: int,
    args: Sequence[str] = (),
    *,
    env: Mapping[str, str] | None = None,
    timeout_s: float = 60.0,
    grace_s: float = 5.0,
    fault: Fault | str | None = None,
    network: Network | None = None,
) -> list[Result]:
    """Run ``script`` as ranks 0 to ``n - 1`` and return what each wrote and how it ended, by rank.

    Args:
        script: A Python script.
        n: Number of processes.
        args: The script's arguments.
        env: Variables added to this process's own.
        timeout_s: Seconds after which all are killed.
        grace_s: Seconds that the others have to notice and end when one has failed; then they are ended.
        fault: What is to go wrong: a ``Fault`` or how it is written, ``"kill:1@3"``.
        network: Rank ``r`` runs on ``network[r]``, and they meet on ``network[0]``; by default all run here.

    Raises:
        InputError: There is no such script, or the network has fewer hosts than there are ranks.
        NearlinearError: Some still ran after ``timeout_s``; the message says which, and what they wrote last.

    Example:
        results = run_processes("train.py", 3, ["--lr", "0.1"], fault="kill:1@3")
        assert results[1].signal == signal.SIGKILL
        assert "rank 1" in results[0].stderr
    """
    if not Path(script).is_file():
        raise InputError(f"there is no script {os.fspath(script)!r} in {Path.cwd()}")
    command = [os.fspath(script), *args]
    if fault is not None:
        command = ["-m", "nearlinear.testing.faults", str(Fault.parse(str(fault))), *command]
    return run_python(command, n, env=env, timeout_s=timeout_s, grace_s=grace_s, network=network)


def run_python(
    words: Sequence[str],
    n: int,
    *,
    env: Mapping[str, str] | None = None,
    timeout_s: float = 60.0,
    grace_s: float = 5.0,
    network: Network | None = None,
) -> list[Result]:
    """Do what ``run_processes`` does, with any arguments of the Python interpreter in place of a script."""
    command = [sys.executable, *words]
    if network is not None:
        command = _on_hosts(command, n, network)
    written: dict[tuple[int, str], list[str]] = {}

    def on_line(rank: int, stream: str, line: bytes) -> None:
        written.setdefault((rank, stream), []).append(line.decode(errors="replace") + "\n")

    outcome = run_local(command, n, env=env, on_line=on_line, grace_s=grace_s, limit_s=timeout_s)
    if outcome.stopped_by == signals.SIGINT:
        raise KeyboardInterrupt
    results = []
    for end in outcome.ends:
        code, number = (end.returncode, None) if end.returncode >= 0 else (None, -end.returncode)
        out, err = ("".join(written.get((end.rank, stream), ())) for stream in ("stdout", "stderr"))
        results.append(Result(end.rank, code, number, out, err, end.seconds))
    if outcome.stopped_by is not None:
        raise NearlinearError(f"{outcome.message}")
    if outcome.overdue:
        last = "; ".join(f"rank {rank} wrote last: {_last_line(results[rank])}" for rank in outcome.overdue)
        raise NearlinearError(f"{outcome.message} ({last})")
    return results


def _last_line(result: Result) -> str:
    lines = (result.stderr.strip() or result.stdout.strip()).splitlines()
    return repr(lines[-1]) if lines else "nothing"


def _on_hosts(command: Sequence[str], n: int, network: Network) -> list[str]:
    """Return a command that, run as rank ``r`` on this machine, becomes ``command`` on host ``r``.

    It replaces itself by exec, so that it stays the process the launcher knows.
    """
    if len(network) < n:
        raise InputError(f"{n} ranks on a network of {len(network)} hosts; make one with hosts={n}")
    hosts = [network[rank] for rank in range(n)]
    enter = "".join(f'{host.number}) exec {shlex.join(host.command([]))} "$@";;\n' for host in hosts)
    alone = f"export MASTER_ADDR={hosts[0].address} LOCAL_RANK=0 LOCAL_WORLD_SIZE=1"
    return ["/bin/sh", "-c", f'{alone}\ncase "$RANK" in\n{enter}esac', "sh", *command]
