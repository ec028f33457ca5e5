"""`nearlinear run`: real processes, their output, their deaths, and what the shell is told."""

from __future__ import annotations

import itertools
import json
import os
import pty
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import nearlinear.errors
from nearlinear.cli.main import main
from nearlinear.core.plan import STRATEGIES
from nearlinear.errors import InputError
from nearlinear.launch import lines as lines_module
from nearlinear.launch.elastic import elastic_command, parse_endpoint, run_elastic
from nearlinear.launch.environment import free_port, parse_gpus, rank_environment, visible_gpus
from nearlinear.launch.lines import Lines, Printer
from nearlinear.launch.local import run_local
from nearlinear.launch.outcome import End, Outcome
from nearlinear.runtime.interface import address_to, interface_to

pytestmark = pytest.mark.timeout(60)

DEADLINE_S = 30.0
JOINED = "from nearlinear.events import send_to_launcher; send_to_launcher('distributed', rank=0, world_size=2)\n"
PREAMBLE = "import json, os, signal, subprocess, sys, time\nrank = int(os.environ.get('RANK', -1))\n"


class Fifo:
    """A named pipe that processes hold open while they live: they say lines into it, and it ends when all are gone."""

    def __init__(self, path: Path) -> None:
        os.mkfifo(path)
        self._fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        self._held = b""

    def _more(self) -> bool:
        assert select.select([self._fd], [], [], DEADLINE_S)[0], f"silent and alive for {DEADLINE_S} s"
        data = os.read(self._fd, 4096)
        self._held += data
        return bool(data)

    def lines(self, count: int) -> list[str]:
        """Return the next ``count`` lines, sorted."""
        while self._held.count(b"\n") < count:
            assert self._more(), f"all writers have gone; they said {self._held!r}"
        *lines, self._held = self._held.split(b"\n", count)
        return sorted(line.decode() for line in lines)

    def all_gone(self) -> bool:
        """Wait until no process holds it any more."""
        while self._more():
            pass
        return True


@pytest.fixture
def fifo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Fifo]:
    path = tmp_path / "fifo"
    monkeypatch.setenv("FIFO", str(path))
    fifo = Fifo(path)
    yield fifo
    os.close(fifo._fd)


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(nearlinear.errors.__file__).parents[1]))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    for name in ("RANK", "WORLD_SIZE", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)


def script(tmp_path: Path, text: str) -> str:
    path = tmp_path / "train.py"
    path.write_text(PREAMBLE + text)
    return str(path)


def command(*args: str) -> list[str]:
    return [sys.executable, "-m", "nearlinear", *args]


def nearlinear_run(*args: str, input: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(command("run", *args), input=input, capture_output=True, text=True, timeout=DEADLINE_S)


def python(text: str) -> list[str]:
    return [sys.executable, "-c", PREAMBLE + text]


# ---- what a rank finds


def test_each_rank_learns_who_it_is() -> None:
    said: dict[int, dict[str, str]] = {}

    def on_line(rank: int, stream: str, line: bytes) -> None:
        said[rank] = json.loads(line)

    assert run_local(python("print(json.dumps(dict(os.environ)))"), 2, on_line=on_line).exit_code == 0
    assert sorted(said) == [0, 1]
    for rank, env in said.items():
        assert (env["RANK"], env["LOCAL_RANK"]) == (str(rank), str(rank))
        assert (env["WORLD_SIZE"], env["LOCAL_WORLD_SIZE"], env["MASTER_ADDR"]) == ("2", "2", "127.0.0.1")
        assert env["PYTHONUNBUFFERED"] == "1"
    assert said[0]["MASTER_PORT"] == said[1]["MASTER_PORT"]


@pytest.mark.parametrize(
    ("n", "cores", "inherited", "expected"),
    [
        (2, 8, {}, {"OMP_NUM_THREADS": "4", "MKL_NUM_THREADS": "4"}),
        (3, 2, {}, {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}),
        (2, 8, {"OMP_NUM_THREADS": "7"}, {}),
        (2, 8, {"MKL_NUM_THREADS": "7"}, {"OMP_NUM_THREADS": "4"}),
    ],
)
def test_ranks_share_the_cores_unless_the_user_said_how(
    n: int, cores: int, inherited: dict[str, str], expected: dict[str, str]
) -> None:
    added = rank_environment(0, n, 1, [], cores, inherited)
    assert {name: value for name, value in added.items() if name.endswith("NUM_THREADS")} == expected


NVIDIA_SMI = """#!/bin/sh
[ "$1" = -L ] || exit 1
echo "GPU 0: NVIDIA H200 (UUID: GPU-aaaa)"
echo "GPU 1: NVIDIA H200 (UUID: GPU-bbbb)"
"""


@pytest.fixture
def two_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "bin" / "nvidia-smi"
    program.parent.mkdir()
    program.write_text(NVIDIA_SMI)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize(("visible", "expected"), [(None, ["0", "1"]), ("5, 3", ["5", "3"]), ("", ["", ""])])
def test_each_rank_sees_a_gpu_of_its_own(
    visible: str | None, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    seen = {}

    def on_line(rank: int, stream: str, line: bytes) -> None:
        seen[rank] = line.decode()

    assert run_local(python("print(os.environ['CUDA_VISIBLE_DEVICES'])"), 2, on_line=on_line).exit_code == 0
    assert seen == dict(enumerate(expected))


@pytest.mark.usefixtures("two_gpus")
def test_more_processes_than_gpus_is_an_error_with_its_remedy(tmp_path: Path) -> None:
    run = nearlinear_run("-n", "3", script(tmp_path, "print('started')"))
    assert (run.returncode, run.stdout) == (2, "")
    assert run.stderr == (
        "nearlinear: error: 3 processes need a GPU each and there are 2 (0, 1); "
        "use -n 2, or CUDA_VISIBLE_DEVICES= to run on the CPU\n"
    )


def test_a_broken_driver_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\nexit 9\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    assert visible_gpus({"PATH": str(tmp_path)}) == []
    assert "no GPUs are used" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("listed", "gpus"),
    [
        ("", []),
        ("No devices found.\n", []),
        ("GPU 0: A (UUID: GPU-a)\nGPU 1: A (UUID: GPU-b)\n", ["0", "1"]),
        (
            "GPU 0: A (UUID: GPU-a)\n  MIG 3g Device 0: (UUID: MIG-x)\n  MIG 3g Device 1: (UUID: MIG-y)\n",
            ["MIG-x", "MIG-y"],
        ),
    ],
)
def test_gpus_are_read_from_nvidia_smi(listed: str, gpus: list[str]) -> None:
    assert parse_gpus(listed) == gpus


@pytest.mark.parametrize(("visible", "gpus"), [("-1", []), ("NoDevFiles", ["NoDevFiles"]), ("2,-1,3", ["2"])])
def test_cuda_visible_devices_is_read_as_cuda_reads_it(visible: str, gpus: list[str]) -> None:
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": visible}) == gpus


def test_a_taken_port_is_named(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        run = nearlinear_run("-n", "2", "--port", str(port), script(tmp_path, "print('started')"))
    assert (run.returncode, run.stdout) == (2, "")
    assert run.stderr == (
        f"nearlinear: error: port {port} cannot be used (Address already in use); "
        "choose another --port, or leave it out for a free one\n"
    )


def test_a_given_port_and_strategy_reach_the_ranks(tmp_path: Path) -> None:
    text = JOINED + "print(os.environ['MASTER_PORT'], os.environ['NEARLINEAR_STRATEGY'])"
    port = str(free_port())
    run = nearlinear_run("-n", "2", "--port", port, "--strategy", "data", script(tmp_path, text))
    assert sorted(run.stdout.splitlines()) == [f"[0] {port} data", f"[1] {port} data"]


# ---- output


def test_each_line_says_whose_it_is_and_stays_on_its_stream(tmp_path: Path) -> None:
    text = JOINED + "print('[bold]a[/bold]', rank)\nprint('b', rank, file=sys.stderr)\nprint('no end', end='')"
    run = nearlinear_run("-n", "2", script(tmp_path, text))
    assert run.returncode == 0
    assert sorted(run.stdout.splitlines()) == [
        "[0] [bold]a[/bold] 0",
        "[0] no end",
        "[1] [bold]a[/bold] 1",
        "[1] no end",
    ]
    assert sorted(run.stderr.splitlines()) == ["[0] b 0", "[1] b 1"]


def test_binary_junk_and_huge_lines_come_through(tmp_path: Path) -> None:
    junk = bytes(range(256)).replace(b"\n", b"").replace(b"\r", b"")
    text = JOINED + f"sys.stdout.buffer.write({junk!r} + b'\\n' + b'x' * 3_000_000 + b'\\n')"
    run = subprocess.run(command("run", "-n", "2", script(tmp_path, text)), capture_output=True, timeout=DEADLINE_S)
    assert run.returncode == 0
    for rank in (b"[0] ", b"[1] "):
        mine = [line.removeprefix(rank) for line in run.stdout.split(b"\n") if line.startswith(rank)]
        assert mine[0] == junk
        assert b"".join(mine[1:]) == b"x" * 3_000_000


@given(text=st.binary(max_size=60).map(lambda text: text.replace(b"\r", b"")), cuts=st.lists(st.integers(0, 60)))
def test_lines_do_not_depend_on_how_the_bytes_arrive(text: bytes, cuts: list[int]) -> None:
    lines = Lines()
    ends = [0, *sorted(cuts), len(text)]
    pieces = [text[a:b] for a, b in itertools.pairwise(ends)]
    got = [line for piece in pieces for line in lines.feed(piece, 0.0)] + lines.end()
    assert got == (text.removesuffix(b"\n").split(b"\n") if text else [])


@pytest.mark.parametrize(
    ("fed", "shown"),
    [
        ([(b"one\r\ntwo\r\n", 0)], [b"one", b"two"]),
        ([(b"one\r", 0), (b"\ntwo", 0)], [b"one", b"two"]),
        # A bar that returns first, as tqdm's: one state at once, no other for five seconds, and its last.
        ([(b"\r 10%", 0), (b"\r 20%", 1), (b"\r 30%", 2), (b"\r100%\n", 3)], [b" 10%", b"100%"]),
        ([(b"\r 10%", 0), (b"\r 20%", 1), (b"\r 30%", 7), (b"\r100%", 8)], [b" 10%", b" 20%", b"100%"]),
        # One that returns last.
        ([(b"step 1\r", 0), (b"step 2\r", 1), (b"step 3\r", 2), (b"done\n", 3)], [b"step 1", b"done"]),
        ([(b"\r  \r  \r", 0), (b"end\n", 0)], [b"end"]),
    ],
)
def test_a_progress_bar_becomes_a_few_lines(fed: list[tuple[bytes, float]], shown: list[bytes]) -> None:
    lines = Lines()
    assert [line for data, now in fed for line in lines.feed(data, now)] + lines.end() == shown


def test_a_line_without_end_is_not_kept_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines_module, "LONGEST", 8)
    lines = Lines()
    assert (lines.feed(b"12345678", 0.0), lines.feed(b"9", 0.0), lines.feed(b"\n", 0.0)) == ([], [b"123456789"], [b""])


@pytest.mark.parametrize(("no_color", "prefix"), [("", b"\x1b[0;32m[1]\x1b[0m "), ("1", b"[1] ")])
def test_a_terminal_gets_coloured_prefixes_and_no_cursor_jumps(
    no_color: str, prefix: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_COLOR", no_color)
    monkeypatch.setenv("TERM", "xterm")
    master, terminal = pty.openpty()
    with os.fdopen(terminal, "w") as out:
        Printer(out, out)(1, "stdout", b"\x1b[2K\x1b[A\x1b[31mred\x1b[0m")
        assert os.read(master, 100) == prefix + b"\x1b[31mred\x1b[0m\r\n"
    os.close(master)


def test_the_same_error_of_all_ranks_is_one_line(tmp_path: Path) -> None:
    text = "print('nearlinear: error: batch of 3 for 4 ranks', file=sys.stderr); sys.exit(2)"
    run = nearlinear_run("-n", "3", script(tmp_path, text))
    assert (run.returncode, run.stdout) == (2, "")
    assert run.stderr == "nearlinear: error: batch of 3 for 4 ranks\n"


def test_a_reader_that_goes_ends_the_ranks_as_it_would_a_single_process(tmp_path: Path, fifo: Fifo) -> None:
    text = "say = open(os.environ['FIFO'], 'w')\nfor step in range(10**9): print(step)"
    run = subprocess.Popen(
        command("run", "-n", "2", script(tmp_path, text)), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    assert run.stdout is not None
    assert run.stdout.readline()
    run.stdout.close()
    assert run.wait(DEADLINE_S) == 1  # BrokenPipeError in the script
    assert fifo.all_gone()


def test_what_a_rank_leaves_running_does_not_hold_up_the_end(tmp_path: Path) -> None:
    text = JOINED + "subprocess.Popen(['sleep', '20'])\nprint('done')"
    began = time.monotonic()
    run = nearlinear_run("-n", "2", script(tmp_path, text))
    assert (run.returncode, sorted(run.stdout.splitlines())) == (0, ["[0] done", "[1] done"])
    assert time.monotonic() - began < 15.0


# ---- deaths

# Rank 1 holds the writing ends and dies with them; the others notice, as ranks notice that a peer is gone.
NOTICE = """
if rank == 1:
    peers = [open(os.environ['PEER'] + str(peer), 'w') for peer in (0, 2)]
    os.kill(os.getpid(), signal.SIGKILL)
assert open(os.environ['PEER'] + str(rank)).read() == ''
sys.exit('rank 1 is gone')
"""


def test_a_killed_rank_is_named_and_the_others_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PEER", str(tmp_path / "peer"))
    for rank in (0, 2):
        os.mkfifo(tmp_path / f"peer{rank}")
    run = nearlinear_run("-n", "3", script(tmp_path, NOTICE))
    assert run.returncode == 137
    *said, last = run.stderr.splitlines()
    assert sorted(said) == ["[0] rank 1 is gone", "[2] rank 1 is gone"]
    assert last.startswith("nearlinear: error: rank 1 was killed by SIGKILL (signal 9) after ")
    assert last.endswith(" s; the other 2 ranks were ended")


STUBBORN = """
say = open(os.environ['FIFO'], 'w', buffering=1)
worker = os.fork()
if worker == 0:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(60)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if rank == 1:
    sys.exit(3)
if sys.argv[1] == 'stopped':
    os.kill(os.getpid(), signal.SIGSTOP)
time.sleep(60)
"""


@pytest.mark.parametrize("how", ["busy", "stopped"])
def test_a_rank_that_does_not_end_is_killed_with_its_workers(how: str, fifo: Fifo) -> None:
    began = time.monotonic()
    outcome = run_local([*python(STUBBORN), how], 3, grace_s=0.1)
    assert fifo.all_gone()
    assert time.monotonic() - began < 10.0
    assert outcome.failure == outcome.ends[1]
    assert [end.returncode for end in outcome.ends] == [-signal.SIGKILL, 3, -signal.SIGKILL]
    assert outcome.exit_code == 3


def test_a_rank_that_takes_too_long_is_killed_and_named(fifo: Fifo) -> None:
    text = "say = open(os.environ['FIFO'], 'w')\nif rank != 1: time.sleep(60)"
    outcome = run_local(python(text), 3, limit_s=1.0)
    assert fifo.all_gone()
    assert (outcome.overdue, outcome.exit_code) == ((0, 2), 124)
    assert outcome.message is not None and outcome.message.startswith("ranks 0, 2 of 3 still ran after 1.")


ALIVE = """
say = open(os.environ['FIFO'], 'w', buffering=1)
worker = os.fork()
say.write(f'{rank}\\n')
time.sleep(60)
"""


def test_nothing_outlives_a_killed_launcher(tmp_path: Path, fifo: Fifo) -> None:
    run = subprocess.Popen(command("run", "-n", "2", script(tmp_path, ALIVE)))
    assert fifo.lines(4) == ["0", "0", "1", "1"]
    run.kill()
    run.wait()
    assert fifo.all_gone()


HANDLES = (
    JOINED
    + """
def handle(number, frame):
    say.write(f'{rank} {signal.Signals(number).name}\\n')
    if number in (signal.SIGTERM, signal.SIGHUP):
        sys.exit(0)
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
    signal.signal(number, handle)
say = open(os.environ['FIFO'], 'w', buffering=1)
say.write('ready\\n')
while True: time.sleep(60)
"""
)


@pytest.mark.parametrize("last", ["SIGTERM", "SIGHUP"])
def test_signals_reach_every_rank_once(last: str, tmp_path: Path, fifo: Fifo) -> None:
    run = subprocess.Popen(command("run", "-n", "2", script(tmp_path, HANDLES)), preexec_fn=default_signals)
    assert fifo.lines(2) == ["ready"] * 2
    for name in ("SIGUSR1", "SIGUSR2", "SIGINT", last):
        run.send_signal(signal.Signals[name])
        assert fifo.lines(2) == [f"0 {name}", f"1 {name}"]
    assert run.wait(DEADLINE_S) == 0  # each rank chose to end well
    assert fifo.all_gone()


def test_a_second_interrupt_kills(tmp_path: Path, fifo: Fifo) -> None:
    run = subprocess.Popen(
        command("run", "-n", "2", script(tmp_path, HANDLES)),
        preexec_fn=default_signals,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert fifo.lines(2) == ["ready"] * 2
    run.send_signal(signal.SIGINT)
    assert fifo.lines(2) == ["0 SIGINT", "1 SIGINT"]
    run.send_signal(signal.SIGINT)
    _, said = run.communicate(timeout=DEADLINE_S)
    assert fifo.all_gone()
    assert run.returncode == 130
    assert said.startswith("nearlinear: error: stopped by SIGINT; rank ")


def test_an_ignored_hangup_stays_ignored(tmp_path: Path, fifo: Fifo) -> None:
    run = subprocess.Popen(command("run", "-n", "2", script(tmp_path, HANDLES)), preexec_fn=no_hangup)
    assert fifo.lines(2) == ["ready"] * 2
    run.send_signal(signal.SIGHUP)  # the ranks would say it, and end
    for name in ("SIGUSR1", "SIGTERM"):
        run.send_signal(signal.Signals[name])
        assert fifo.lines(2) == [f"0 {name}", f"1 {name}"]
    assert run.wait(DEADLINE_S) == 0
    assert fifo.all_gone()


def default_signals() -> None:
    """Undo what a shell does to commands in the background, where the tests may run."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def no_hangup() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)


# ---- what the shell is told


@pytest.mark.parametrize(
    ("text", "code", "said"),
    [
        ("sys.exit(3 if rank == 1 else 0)", 3, "rank 1 exited with code 3 after "),
        (
            "os.kill(os.getpid(), signal.SIGSEGV) if rank == 0 else None",
            139,
            "rank 0 was killed by SIGSEGV (signal 11)",
        ),
        ("sys.exit('bad') if rank == 0 else None", 1, "rank 0 exited with code 1 after "),
    ],
)
def test_the_exit_code_is_that_of_the_first_rank_that_failed(tmp_path: Path, text: str, code: int, said: str) -> None:
    run = nearlinear_run("-n", "2", script(tmp_path, text))
    assert run.returncode == code
    assert run.stderr.splitlines()[-1].startswith(f"nearlinear: error: {said}")


@pytest.mark.parametrize(
    ("returncodes", "first", "message"),
    [
        ([0, 0], None, None),
        ([0, 3], 1, "rank 1 exited with code 3 after 1.0 s; the other rank had finished"),
        ([1, -15, -15], 0, "rank 0 exited with code 1 after 1.0 s; the other 2 ranks were ended"),
        (
            [0, -11, 1],
            1,
            "rank 1 was killed by SIGSEGV (signal 11) after 1.0 s; of the other 2 ranks 1 had finished and 1 ended too",
        ),
        ([-64], 0, "rank 0 was killed by SIGRTMAX (signal 64) after 1.0 s"),
    ],
)
def test_the_message_says_what_became_of_the_others(
    returncodes: Sequence[int], first: int | None, message: str | None
) -> None:
    ends = tuple(End(rank, code, 1.0) for rank, code in enumerate(returncodes))
    assert Outcome(ends, None if first is None else ends[first]).message == message


def test_two_processes_that_never_met_are_an_error(tmp_path: Path) -> None:
    run = nearlinear_run("-n", "2", script(tmp_path, "print('trained')"))
    assert run.returncode == 2
    assert sorted(run.stdout.splitlines()) == ["[0] trained", "[1] trained"]
    assert run.stderr == (
        "nearlinear: error: train.py never called nl.distribute, so 2 processes each trained alone; add the two "
        "lines: import nearlinear as nl / model, optimizer, loader = nl.distribute(model, optimizer, loader)\n"
    )


def test_a_run_that_went_well_adds_nothing(tmp_path: Path) -> None:
    run = nearlinear_run("-n", "2", script(tmp_path, JOINED))
    assert (run.returncode, run.stdout, run.stderr) == (0, "", "")


def test_no_thread_of_the_exchange_outlives_the_run(tmp_path: Path) -> None:
    """One that lets go of a tensor while the interpreter ends would abort a process that has done its work."""
    text = """
import atexit
from pathlib import Path

def gloo():
    found = 0
    for task in Path("/proc/self/task").iterdir():
        try:
            found += "gloo" in (task / "comm").read_text()
        except OSError:  # it ended meanwhile
            pass
    return found

atexit.register(lambda: print("left", gloo()))  # registered first, called last
import torch, nearlinear as nl
model = torch.nn.Linear(3, 1)
model, optimizer = nl.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))
model(torch.ones(2, 3)).sum().backward()
optimizer.step()
print("training", gloo() > 0)
"""
    run = nearlinear_run("-n", "2", script(tmp_path, text))
    assert run.returncode == 0, run.stderr
    assert sorted(run.stdout.splitlines()) == ["[0] left 0", "[0] training True", "[1] left 0", "[1] training True"]


RDZV = "--rdzv 127.0.0.1:1"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("run", "which script? write it like `nearlinear run -n 2 train.py`"),
        ("run -n 0 train.py", "argument -n: '0' is not a number from 1 up; see `nearlinear run --help`"),
        ("run -n -1 train.py", "argument -n: '-1' is not a number from 1 up; see `nearlinear run --help`"),
        ("run -n x train.py", "argument -n: 'x' is not a number from 1 up; see `nearlinear run --help`"),
        ("run -n 2 missing.py", "there is no script 'missing.py' in "),
        ("run missing.py", "there is no script 'missing.py' in "),
        ("run .", "'.' is a directory; name the script in it"),
        (
            "run --strategy magic train.py",
            f"argument --strategy: unknown strategy 'magic'; choose one of: auto, {', '.join(STRATEGIES)}",
        ),
        ("run --port 65536 train.py", "argument --port: '65536' is not a port; they run from 1 to 65535"),
        ("run --prot 1 train.py", "unrecognized arguments: --prot"),
        ("run --nnodes 2 train.py", "--nnodes needs --rdzv HOST:PORT"),
        ("run --nnodes 2 --rdzv here train.py", "'here' is not HOST:PORT; write it like 10.0.0.1:29500"),
        (f"run {RDZV} train.py", "--rdzv and --node-rank are for several machines; add --nnodes M"),
        (f"run --nnodes 2 --node-rank 2 {RDZV} train.py", "--node-rank is 2; the last of 2 is 1"),
        (f"run --nnodes 2 --port 5 {RDZV} train.py", "--port is for one machine"),
        ("fly", "argument COMMAND: invalid choice: 'fly'"),
        ("", "the following arguments are required: COMMAND; see `nearlinear --help`"),
    ],
)
def test_bad_input_is_one_line_and_code_2(
    tmp_path: Path, line: str, said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    script(tmp_path, "print('started')")
    assert main(line.split()) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"nearlinear: error: {said}")
    assert err.count("\n") == 1


@pytest.mark.parametrize("n", [[], ["-n", "2"]])
def test_the_scripts_arguments_are_left_alone(tmp_path: Path, n: list[str]) -> None:
    args = ["--help", "-n", "5", "--", "x", "--", "--port", "a b", "[0]", ""]
    text = JOINED + "print(sys.argv[1:]) if rank < 1 else None"
    run = nearlinear_run(*n, script(tmp_path, text), *args)
    assert (run.returncode, run.stdout.removeprefix("[0] ")) == (0, f"{args}\n")


@pytest.mark.parametrize("n", [[], ["-n", "1"]])
def test_one_process_is_the_plain_script(tmp_path: Path, n: list[str]) -> None:
    text = "print(sorted(os.environ), sys.stdin.read(), end='')\nprint('e', end='', file=sys.stderr)\nsys.exit(5)"
    path = script(tmp_path, text)
    plain = subprocess.run([sys.executable, path], input="in", capture_output=True, text=True, timeout=DEADLINE_S)
    run = nearlinear_run(*n, path, input="in")
    assert (run.returncode, run.stdout, run.stderr) == (plain.returncode, plain.stdout, plain.stderr)


def test_the_command_needs_no_framework() -> None:
    text = "import sys, nearlinear.cli.main; print({'torch', 'tensorflow', 'keras'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", text], capture_output=True, text=True).stdout == "set()\n"


def test_the_version_is_shown() -> None:
    run = subprocess.run(command("--version"), capture_output=True, text=True, timeout=DEADLINE_S)
    assert run.returncode == 0
    assert run.stdout.startswith("nearlinear")


# ---- several machines


@pytest.mark.parametrize(
    ("node_rank", "extra"), [(None, []), (0, ["--rdzv-conf=is_host=true"]), (1, ["--rdzv-conf=is_host=false"])]
)
def test_several_machines_are_handed_to_the_elastic_agent(node_rank: int | None, extra: list[str]) -> None:
    assert elastic_command(["train.py", "--lr", "1"], 4, 2, "10.0.0.1:29500", node_rank, "10.0.0.2") == [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nnodes=2",
        "--nproc-per-node=4",
        "--rdzv-backend=c10d",
        "--rdzv-endpoint=10.0.0.1:29500",
        "--rdzv-id=nearlinear",
        *extra,
        "--local-addr=10.0.0.2",
        "-m",
        "nearlinear.launch.one_gpu",  # the agent shows every process all GPUs
        "train.py",
        "--lr",
        "1",
    ]


@pytest.mark.parametrize("text", ["", "host", ":1", "host:", "host:x", "host:0", "host:65536", "::1:5"])
def test_a_bad_endpoint_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="is not HOST:PORT"):
        parse_endpoint(text)


def test_without_torch_several_machines_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)  # what the import system itself means by "there is none"
    with pytest.raises(InputError, match=r"needs torch.*pip install 'nearlinear\[torch\]'"):
        run_elastic(["train.py"], 1, 2, "127.0.0.1:29500", None, {})


@pytest.mark.full
@pytest.mark.timeout(180)
def test_two_machines_find_each_other(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    text = (
        "print(*(os.environ[name] for name in "
        "('RANK', 'WORLD_SIZE', 'LOCAL_RANK', 'MASTER_ADDR', 'GLOO_SOCKET_IFNAME', 'NEARLINEAR_STRATEGY')))"
    )
    args = ["run", "--nnodes", "2", "--rdzv", f"127.0.0.1:{free_port()}", "--strategy", "data"]
    runs = [
        subprocess.Popen(
            command(*args, "--node-rank", str(node), script(tmp_path, text)),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for node in (0, 1)
    ]
    ends = [run.communicate(timeout=150.0) for run in runs]
    assert [run.returncode for run in runs] == [0, 0], ends
    interface = interface_to("127.0.0.1")
    assert sorted(out for out, _ in ends) == [f"{rank} 2 0 127.0.0.1 {interface} data\n" for rank in (0, 1)]


def test_the_interface_to_a_host_is_the_one_its_packets_take() -> None:
    name = interface_to("localhost")
    assert name in [known for _, known in socket.if_nameindex()]
    assert name is not None and name.startswith("lo")
    assert address_to("127.0.0.1") == "127.0.0.1"


def test_a_host_without_an_address_is_named() -> None:
    with pytest.raises(InputError, match=r"cannot reach host 'no such host'"):
        interface_to("no such host")


@pytest.mark.netns
@pytest.mark.skipif(
    os.geteuid() != 0 or not (shutil.which("ip") and shutil.which("unshare")), reason="needs root and ip"
)
def test_the_interface_follows_the_route() -> None:
    """In a network of its own, two interfaces lead to two networks."""
    text = """
import sys
from nearlinear.runtime.interface import address_to, interface_to
print(interface_to("10.1.0.9"), interface_to("10.2.0.9"), address_to("10.2.0.9"))
"""
    setup = " && ".join(
        f"ip link add near{i} type veth peer name far{i} && "
        f"ip addr add 10.{i}.0.1/24 dev near{i} && ip link set near{i} up && ip link set far{i} up"
        for i in (1, 2)
    )
    run = subprocess.run(
        ["unshare", "-n", "sh", "-c", f'{setup} && exec "$@"', "sh", sys.executable, "-c", text],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    if run.returncode and "unshare" in run.stderr:
        pytest.skip(f"no network namespaces here: {run.stderr.strip()}")
    assert run.stdout == "near1 near2 10.2.0.1\n", run.stderr
