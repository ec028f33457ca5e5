"""What tests of strategy `local` share: its two commands, and what members that train under them say after a pass."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import IO, NamedTuple

import pytest

from nearlinear.testing.links import Host

# Each of two members makes up for what Adam loses on its half of the batch, by up to the root of 2 and as noisy as its
# gradients are (planning.rounds.adaptive_rate). The rate of one who came late would be three times the run's.
ADAPTED = 0.42
# Where three processes share two cores, members are of unequal speed: one with a ninth of the batch steps at up to
# three times the rate of one with the rest.
UNEVEN = 2.2
DEADLINE_S = 90.0
LOOK_S = 0.2


class Command:
    """`nearlinear ...` in a session of its own, and what it writes."""

    def __init__(self, *arguments: str, host: Host | None = None, **env: str) -> None:
        command = [sys.executable, "-m", "nearlinear", *arguments]
        self.process = subprocess.Popen(
            command if host is None else host.command(command),
            env={**os.environ, "OMP_NUM_THREADS": "1", "NEARLINEAR_DEADLINE": "60 s", **env},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.lines: list[str] = []
        self._more = threading.Condition()
        self._readers = [
            threading.Thread(target=self._read, args=(f,)) for f in (self.process.stdout, self.process.stderr)
        ]
        for reader in self._readers:
            reader.start()

    def _read(self, file: IO[str] | None) -> None:
        assert file is not None
        for line in file:
            with self._more:
                self.lines.append(line.rstrip())
                self._more.notify_all()

    def line(self, pattern: str, after: int = 0) -> re.Match[str]:
        """Return the first line that matches, waiting for it."""

        def found() -> re.Match[str] | None:
            return next((match for line in self.lines[after:] if (match := re.search(pattern, line))), None)

        with self._more:
            for _ in range(int(DEADLINE_S / LOOK_S)):
                if self._more.wait_for(lambda: found() is not None, LOOK_S) or self.process.poll() is not None:
                    break
        for reader in self._readers if self.process.poll() is not None else ():
            reader.join(10)
        match = found()
        assert match is not None, f"no line {pattern!r} in {self.lines[-20:]}"
        return match

    def end(self) -> int:
        """Return its exit code."""
        code = self.process.wait(DEADLINE_S)
        for reader in self._readers:
            reader.join(10)
        return code

    def rank(self) -> int:
        """Return the process number of the script that it runs."""
        (only,) = self.ranks()
        return only

    def ranks(self) -> list[int]:
        """Return the process numbers of the scripts that it runs, by rank."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return [int(pid) for pid in children if "train.py" in Path(f"/proc/{pid}/cmdline").read_text()]

    def passes(self, rank: int = 0) -> dict[int, Pass]:
        """Return, by number, the passes that a rank told of."""
        pattern = rf"^(?:\[{rank}\] )?pass (\d+) (\d+) (\d+) (\w+) (\S+)$"
        told = [match.groups() for line in self.lines if (match := re.search(pattern, line))]
        return {int(each[0]): Pass(int(each[1]), int(each[2]), each[3], float(each[4])) for each in told}


class Pass(NamedTuple):
    """A pass over the data: its steps, how many samples were right after it, the outer state, the learning rate."""

    steps: int
    right: int
    digest: str
    rate: float


class Runs:
    """Commands that train one script, and are over when this is closed."""

    def __init__(self, folder: Path, text: str) -> None:
        self.script, self.stop = folder / "train.py", folder / "stop"
        self.script.write_text(text)
        self.commands: list[Command] = []
        self.ticket = ""

    def listen(self, passes: int = 500, host: Host | None = None, record: str = "none", **env: str) -> Command:
        where = "127.0.0.1" if host is None else host.address
        arguments = ("run", "--listen", f"{where}:0", "--record", record, str(self.script), str(passes), str(self.stop))
        command = self.start(*arguments, host=host, **env)
        self.ticket = command.line(rf"^nearlinear join (nl1:{re.escape(where)}:\d+:\S{{32}}) .*train\.py")[1]
        return command

    def take_over(self, passes: int = 500) -> Command:
        """Listen in the place of one that died."""
        where = ("--listen", ":".join(self.ticket.split(":")[1:3]), "--ticket", self.ticket)
        return self.start("run", *where, "--record", "none", str(self.script), str(passes), str(self.stop))

    def join(
        self, passes: int = 500, host: Host | None = None, processes: int = 1, options: Sequence[str] = (), **env: str
    ) -> Command:
        arguments = (
            "join",
            "-n",
            str(processes),
            "--record",
            "none",
            *options,
            self.ticket,
            str(self.script),
            str(passes),
            str(self.stop),
        )
        return self.start(*arguments, host=host, **env)

    def start(self, *arguments: str, host: Host | None = None, **env: str) -> Command:
        self.commands.append(Command(*arguments, host=host, **env))
        return self.commands[-1]

    def close(self) -> None:
        for command in self.commands:
            if command.process.poll() is None:
                os.killpg(command.process.pid, signal.SIGKILL)
                command.process.wait()


def assert_equal_where_both_were(a: Command, b: Command, since: int, rates: float = 0.03) -> None:
    """Compare two members' passes from one on.

    Args:
        a: One.
        b: Another, which may have come late.
        since: The first of these passes.
        rates: By how much learning rates may differ. Who was not always here steps at the rate that the run had a round
            before: three steps of a slow decay.
    """
    mine, others = a.passes(), b.passes()
    common = [number for number in mine if number in others and number >= since and others[number].steps]
    assert common, (mine, others)
    for number in common:
        assert mine[number][1:3] == others[number][1:3], f"pass {number} ended with other parameters"
        assert others[number].rate == pytest.approx(mine[number].rate, rel=rates), f"pass {number}"
