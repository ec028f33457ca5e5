"""Processes for tests, and what the others do when one of them is killed, stopped, or goes astray."""

from __future__ import annotations

import signal
import socket
from pathlib import Path

import pytest

from nearlinear.errors import InputError, NearlinearError
from nearlinear.testing import Fault, InjectedFault, Network, Result, can_emulate, run_processes

pytestmark = pytest.mark.timeout(120)

SCRIPT = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import nearlinear as nl

torch.manual_seed(1)
model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
loader = DataLoader(TensorDataset(torch.randn(90, 4)), batch_size=9)
model, optimizer, loader = nl.distribute(model, optimizer, loader, strategy=nl.Plan(check_every=4))
for step, (x,) in enumerate(loader, start=1):
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()
    print(step, flush=True)
"""
# A stopped process is noticed by its silence alone; the others are to end by themselves, so nobody ends them meanwhile.
PATIENT = {"NEARLINEAR_SILENCE": "2 s", "NEARLINEAR_DEADLINE": "60 s", "OMP_NUM_THREADS": "1"}


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


def run(script: Path, n: int, fault: str, rank: int = 1, grace_s: float = 20) -> tuple[Result, list[Result]]:
    """Run with a fault on ``rank`` of n; return that rank and the others."""
    results = run_processes(script, n, env=PATIENT, fault=fault, timeout_s=90, grace_s=grace_s)
    assert [result.rank for result in results] == list(range(n))
    return results[rank], [result for result in results if result.rank != rank]


def steps(result: Result) -> int:
    return len(result.stdout.split())


# ---- faults as values


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("kill:1@3", Fault("kill", 1, 3)),
        ("stop:0@12", Fault("stop", 0, 12)),
        ("kill:1@3b", Fault("kill", 1, 3, in_backward=True)),
        ("drift:10@1", Fault("drift", 10, 1)),
    ],
)
def test_a_fault_is_read_as_it_is_written(text: str, fault: Fault) -> None:
    assert Fault.parse(text) == fault
    assert str(fault) == text


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("kill:1", "write it like kill:1@3"),
        ("hang:1@3", "kinds: kill, stop, raise, exit, drift"),
        ("kill:1@0", "counted from 1"),
        ("drift:1@3b", "leave out the b"),
    ],
)
def test_a_fault_that_cannot_be_is_refused(text: str, words: str) -> None:
    with pytest.raises(InputError, match=words):
        Fault.parse(text)


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(InputError, match="unknown fault 'burn'"):
        Fault("burn", 0, 1)


def plain(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "plain.py"
    path.write_text(text)
    return path


EVENTS = """
from nearlinear import events
for step in (1, 2, 3):
    print("backward", step, flush=True)
    for _ in range(2):
        events.publish("backward", model=0)
    print("step", step, flush=True)
    events.publish("step", model=0, step=step)
"""


@pytest.mark.parametrize(
    ("fault", "exit_code", "number", "last"),
    [
        ("exit:0@2", 3, None, "step 2"),
        ("exit:0@2b", 3, None, "backward 2"),
        ("kill:0@1", None, signal.SIGKILL, "step 1"),
        ("kill:0@1b", None, signal.SIGKILL, "backward 1"),
        ("raise:0@3", 1, None, "step 3"),
        ("raise:0@4", 0, None, "step 3"),
        ("kill:1@1", 0, None, "step 3"),
    ],
)
def test_a_fault_happens_at_its_rank_and_step(
    tmp_path: Path, fault: str, exit_code: int | None, number: int | None, last: str
) -> None:
    (result,) = run_processes(plain(tmp_path, EVENTS), 1, fault=fault)
    assert (result.exit_code, result.signal, result.stdout.splitlines()[-1]) == (exit_code, number, last)


def test_a_script_under_a_fault_is_run_as_python_runs_it(tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("")
    text = "import beside, sys\nprint(__name__, __file__, sys.argv, sys.path[0])\n"
    (result,) = run_processes(plain(tmp_path, text), 1, ["-x", "y"], fault="kill:0@1")
    (plainly,) = run_processes(plain(tmp_path, text), 1, ["-x", "y"])
    assert result.stdout == plainly.stdout != ""


# ---- processes


def test_each_rank_s_output_and_exit_code_are_its_own(tmp_path: Path) -> None:
    script = plain(
        tmp_path,
        "import os, sys\n"
        "rank = os.environ['RANK']\n"
        "print('out', rank, sys.argv[1], os.environ['EXTRA'])\n"
        "print('err', rank, file=sys.stderr)\n"
        "sys.exit(5 * int(rank))\n",
    )
    zero, one = run_processes(script, 2, ["word"], env={"EXTRA": "x"})
    assert (zero.stdout, zero.stderr, zero.exit_code, zero.signal) == ("out 0 word x\n", "err 0\n", 0, None)
    assert (one.stdout, one.stderr, one.exit_code, one.signal) == ("out 1 word x\n", "err 1\n", 5, None)
    assert str(one).startswith("rank 1 exited with code 5 after ")


def test_a_run_that_does_not_end_is_ended_and_its_ranks_named(tmp_path: Path) -> None:
    script = plain(tmp_path, "import signal\nprint('asleep', flush=True)\nsignal.pause()\n")
    with pytest.raises(
        NearlinearError, match=r"ranks 0, 1 of 2 still ran after .*\(rank 0 wrote last: 'asleep'; rank 1"
    ):
        run_processes(script, 2, timeout_s=3)


def test_bad_input_is_refused_before_anything_runs(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="there is no script"):
        run_processes(tmp_path / "missing.py", 2)
    with pytest.raises(InputError, match="is not a fault"):
        run_processes(plain(tmp_path, ""), 2, fault="kill 1")


@pytest.mark.netns
@pytest.mark.skipif(can_emulate() is not None, reason=str(can_emulate()))
def test_the_ranks_of_a_network_run_on_its_hosts(tmp_path: Path) -> None:
    script = plain(
        tmp_path,
        "import os, socket\n"
        "env = os.environ\n"
        "print(socket.gethostname(), env['RANK'], env['LOCAL_RANK'], env['LOCAL_WORLD_SIZE'], env['MASTER_ADDR'])\n",
    )
    with Network(hosts=2) as network:
        results = run_processes(script, 2, network=network)
        with pytest.raises(InputError, match="3 ranks on a network of 2 hosts"):
            run_processes(script, 3, network=network)
    assert [result.stdout for result in results] == ["host0 0 0 1 10.77.0.1\n", "host1 1 0 1 10.77.0.1\n"]
    assert socket.gethostname() != "host1"


# ---- what the others do


def test_a_killed_rank_is_named_by_the_others(script: Path) -> None:
    killed, others = run(script, 3, "kill:1@3")
    assert (killed.signal, killed.exit_code) == (signal.SIGKILL, None)
    assert steps(killed) == 2  # it dies at the end of the third, before it can say so
    for other in others:
        assert other.exit_code == 1
        assert "nearlinear: error: " in other.stderr and "rank 1" in other.stderr
        assert other.seconds - killed.seconds < 10
        assert steps(other) in (2, 3)


def test_a_stopped_rank_is_named_by_the_others(script: Path) -> None:
    stopped, (other,) = run(script, 2, "stop:1@3", grace_s=1)
    assert stopped.signal == signal.SIGKILL  # by the launcher, after the other had ended
    assert other.exit_code == 1 and "rank 1" in other.stderr
    assert other.seconds < stopped.seconds
    assert steps(stopped) == 2


def test_a_rank_that_raises_in_its_backward_pass_is_named_by_the_other(script: Path) -> None:
    raised, (other,) = run(script, 2, "raise:0@2b", rank=0)
    assert raised.exit_code == 1 and steps(raised) == 1
    assert f"{InjectedFault.__name__}: injected fault raise:0@2b" in raised.stderr
    assert other.exit_code == 1 and "rank 0" in other.stderr
    assert other.seconds - raised.seconds < 10


def test_a_parameter_that_drifts_on_one_rank_is_named(script: Path) -> None:
    drifted, (other,) = run(script, 2, "drift:1@2")
    for result in (drifted, other):
        assert result.exit_code == 1
        assert "after step 4 rank 1's 0.weight differs from rank 0's" in result.stderr
        assert steps(result) == 3
