"""Strategy `local` as a user sees it: two commands, real processes, members that come late, die, stop and come back."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from local_commands import ADAPTED, DEADLINE_S, UNEVEN, Runs, assert_equal_where_both_were
from nearlinear.cli.main import main
from nearlinear.core.plan import Plan
from nearlinear.errors import InputError
from nearlinear.launch.environment import free_port
from nearlinear.observe.record import read_run
from nearlinear.testing import Network, can_emulate
from nearlinear.torch.local import gradient_signal

pytest.importorskip("cryptography")
pytestmark = pytest.mark.timeout(150)

# Prints, after every pass, a digest of the outer parameters, which every member has then.
TRAIN = """
import hashlib, os, sys, time
from pathlib import Path
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import nearlinear as nl

passes, stop = int(sys.argv[1]), Path(sys.argv[2])
torch.manual_seed(0)
generator = torch.Generator().manual_seed(7)
x = torch.randn(192, 10, generator=generator)
y = (x @ torch.randn(10, 3, generator=generator)).argmax(1)
model = nn.Sequential(nn.Linear(10, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Dropout(0.1), nn.Linear(16, 3))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
loader = DataLoader(TensorDataset(x, y), batch_size=48, shuffle=True)
tests = DataLoader(TensorDataset(x, y), batch_size=50)
model, optimizer, loader, tests = nl.distribute(model, optimizer, loader, tests, strategy=nl.Plan("local", every=3))
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: (1 + step / 50) ** -0.5)
rate = 0.0


def note_rate(*_):
    global rate
    rate = optimizer.param_groups[0]["lr"]


optimizer.register_step_pre_hook(note_rate)
print("entered", flush=True)
for number in range(passes):
    model.train()
    steps = 0
    for a, b in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(a), b).backward()
        optimizer.step()
        schedule.step()
        steps += 1
        time.sleep(0.01)
    model.eval()
    with torch.no_grad():
        right = sum(nl.total((model(a).argmax(1) == b).sum()) for a, b in tests)
    outer = b"".join(p.detach().numpy().tobytes() for p in (*model.parameters(), model[1].running_var))
    print("pass", number, steps, int(right), hashlib.md5(outer).hexdigest(), rate, flush=True)
    if nl.total(float(stop.exists())) and steps:  # one answer for all processes of a member
        break
"""


@pytest.fixture
def runs(tmp_path: Path) -> Iterator[Runs]:
    made = Runs(tmp_path, TRAIN)
    yield made
    made.close()


def test_a_member_that_comes_late_is_killed_and_comes_again_while_the_others_train(tmp_path: Path, runs: Runs) -> None:
    first = runs.listen(record=str(tmp_path / "record"))
    first.line(r"pass 1 4 ")
    second = runs.join()
    second.line(r"pass \d+ [1-4] ")
    assert second.passes()[0].steps == 0, "a pass that the run has left behind is empty"
    first.line("member 1 on .* joined at round")
    now = len(first.lines)
    os.kill(second.rank(), signal.SIGKILL)
    first.line("member 1 on .* hung up; round .* goes on without it", now)
    first.line(r"pass \d+ 4 ", now)
    third = runs.join()
    third.line("member 2 of the run")
    seen = len(third.lines)
    third.line(r"pass \d+ 4 ", seen)
    last = max(third.passes())
    third.line(rf"pass {last + 3} 4 ")
    runs.stop.touch()
    assert third.end() == 0 and first.end() == 0 and second.end() == 128 + signal.SIGKILL
    assert_equal_where_both_were(first, third, since=last + 1, rates=ADAPTED)
    assert max(each.right for each in first.passes().values()) >= 180, "of 192: it has learnt"
    first.line(r"\d+ rounds; received .* from the members, sent ")
    run = read_run(tmp_path / "record")
    assert run.apart is not None and run.apart.round > 10 and run.apart.sent > 1000 and run.apart.together_samples_per_s
    assert any("member 1 on" in notice and "hung up" in notice for notice in run.notices)


def test_the_others_go_on_when_the_process_beside_the_centre_dies(runs: Runs) -> None:
    first = runs.listen()
    second = runs.join()
    second.line(r"pass \d+ 4 ")
    os.kill(first.rank(), signal.SIGKILL)
    first.line("member 0 on .* hung up")
    first.line("1 member still trains; the run lasts until the last has left")
    seen = len(second.lines)
    second.line(r"pass \d+ 4 ", seen)
    runs.stop.touch()
    assert second.end() == 0 and first.end() == 128 + signal.SIGKILL


def test_a_stopped_member_is_left_behind_and_comes_back(runs: Runs) -> None:
    first = runs.listen(NEARLINEAR_SILENCE="2 s")
    second = runs.join(NEARLINEAR_SILENCE="2 s")
    second.line(r"pass \d+ 4 ")
    rank = second.rank()
    os.kill(rank, signal.SIGSTOP)
    now = len(first.lines)
    first.line("member 1 on .* was silent for [23] s; round .* goes on without it", now)
    first.line(r"pass \d+ 4 ", now)
    seen = len(second.lines)
    os.kill(rank, signal.SIGCONT)
    second.line("the connection to .* broke .*; training goes on, and it is called again", seen)
    first.line("member 1 on .* joined at round", now)
    second.line(r"pass \d+ 4 ", len(second.lines))
    last = max(second.passes())
    second.line(rf"pass {last + 3} ")
    runs.stop.touch()
    assert second.end() == 0 and first.end() == 0
    assert_equal_where_both_were(first, second, since=last + 1, rates=ADAPTED)


@pytest.mark.netns
@pytest.mark.skipif(can_emulate() is not None, reason=str(can_emulate()))
def test_a_member_whose_cable_is_pulled_comes_back_when_it_is_mended(runs: Runs) -> None:
    with Network(hosts=2, rate="20 Mbit/s", delay="20 ms") as network:
        first = runs.listen(host=network[0], NEARLINEAR_SILENCE="2 s")
        second = runs.join(host=network[1], NEARLINEAR_SILENCE="2 s")
        second.line(r"pass \d+ 4 ")
        network[1].cut()
        now, seen = len(first.lines), len(second.lines)
        first.line("member 1 on host1 was silent for [23] s; round .* goes on without it", now)
        first.line(r"pass \d+ 4 ", now)
        second.line("the connection to .* broke .*; training goes on, and it is called again", seen)
        network[1].mend()
        first.line("member 1 on host1 joined at round", now)
        second.line(r"pass \d+ 4 ", len(second.lines))
        last = max(second.passes())
        second.line(rf"pass {last + 3} ")
        runs.stop.touch()
        assert second.end() == 0 and first.end() == 0
    assert_equal_where_both_were(first, second, since=last + 1, rates=ADAPTED)


EXACT = """
import os, sys, time
from pathlib import Path
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import nearlinear as nl

out, here, members = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])


class Samples(TensorDataset):
    late = False

    def __len__(self):
        time.sleep(0.3 * self.late)  # (3)
        return super().__len__()


torch.manual_seed(0)
model = nn.Sequential(nn.Linear(10, 16), nn.Tanh(), nn.Linear(16, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
x = torch.randn(100, 10)
samples = Samples(x, x[:, :3].argmax(1))
loader = DataLoader(samples, batch_size=8, shuffle=True)
samples.late = out.endswith("a")
model, optimizer, loader = nl.distribute(model, optimizer, loader, strategy=nl.Plan("local", every=1, compress="fp32"))
samples.late = False
(here / Path(out).name).touch()
while len(list(here.iterdir())) < members:
    time.sleep(0.02)
step = 0
for _ in range(3):
    for a, b in loader:
        model.train()
        optimizer.param_groups[0]["lr"] = 0.2 if step >= 8 else 0.0  # (1)
        optimizer.zero_grad()
        F.cross_entropy(model(a), b).backward()
        optimizer.step()
        step += 1
        model.eval()
        with torch.no_grad():
            model(x[:1])  # (2)
assert step == 39
rank = os.environ.get("RANK", "0")
torch.save(model.state_dict(), out + rank + ".pt")
"""
# (1) Members learn their shares with the news of a round, so the first ones teach nothing.
# (2) An evaluation waits for the round; without it the next step would begin meanwhile.
# (3) The second member is the first to say what it has. It must be what the script's seed makes it.


@pytest.mark.parametrize(("processes", "others"), [(1, 1), (2, 1), (1, 2)])
def test_with_a_round_per_step_the_numbers_are_those_of_one_process(
    processes: int, others: int, tmp_path: Path, runs: Runs
) -> None:
    """Whether a member is one process, or several that train among themselves."""
    import torch

    runs.script.write_text(EXACT)
    here = tmp_path / "here"
    here.mkdir()
    alone = subprocess.run(
        [sys.executable, str(runs.script), str(tmp_path / "alone"), str(here), "0"], capture_output=True, text=True
    )
    assert alone.returncode == 0, alone.stderr
    (here / "alone").unlink(missing_ok=True)
    first = runs.start(
        "run", "--listen", "127.0.0.1:0", "-n", str(processes), str(runs.script), str(tmp_path / "a"), str(here), "2"
    )
    runs.ticket = first.line(r"(nl1:\S+)")[1]
    second = runs.start("join", "-n", str(others), runs.ticket, str(runs.script), str(tmp_path / "b"), str(here), "2")
    assert first.end() == 0 and second.end() == 0, (first.lines, second.lines)
    names = ["alone0", *(f"a{rank}" for rank in range(processes)), *(f"b{rank}" for rank in range(others))]
    one, *all_of_them = (torch.load(tmp_path / f"{name}.pt") for name in names)
    for name, tensor in one.items():
        for each in all_of_them:
            assert torch.equal(each[name], all_of_them[0][name])
        torch.testing.assert_close(all_of_them[0][name], tensor, rtol=1e-5, atol=1e-6)  # 39 steps of float32


def test_another_takes_the_place_of_a_listener_that_died(runs: Runs) -> None:
    # Unseeded, a process that begins now would draw another order of the data; it must read what the others read.
    tell = 'print("entered", loader.state_dict()["seed"], flush=True)'
    unseeded = TRAIN.replace("torch.manual_seed(0)\n", "").replace('print("entered", flush=True)', tell)
    runs.script.write_text(unseeded)
    first = runs.listen()
    second = runs.join()
    second.line(r"pass \d+ 4 ")
    now = len(second.lines)
    os.killpg(first.process.pid, signal.SIGKILL)
    second.line("the connection to .* broke .*; training goes on, and it is called again", now)
    third = runs.take_over()
    second.line("was started anew; the run goes on from the member that has come farthest", now)
    seeds = {each.line(r"entered (\d+)")[1] for each in (first, second, third)}
    assert len(seeds) == 1
    third.line(r"pass \d+ [1-4] ")
    assert min(each for each, told in third.passes().items() if told.steps) > 0, (
        "what the run has behind it is left out"
    )
    last = max(third.passes())
    third.line(rf"pass {last + 3} 4 ")
    runs.stop.touch()
    assert second.end() == 0 and third.end() == 0
    assert_equal_where_both_were(second, third, since=last + 1, rates=ADAPTED)


def test_a_member_of_two_processes_comes_late_and_ends_when_one_of_them_dies(runs: Runs) -> None:
    first = runs.listen()
    first.line(r"pass 1 4 ")
    second = runs.join(processes=2)
    second.line(r"^\[0\] pass \d+ 4 ")
    last = max(second.passes())
    for rank in range(2):
        second.line(rf"^\[{rank}\] pass {last + 3} 4 ")
    by_rank = [second.passes(rank) for rank in range(2)]
    assert all(by_rank[0][number] == by_rank[1][number] for number in range(last + 4)), "also those that were left out"
    assert_equal_where_both_were(first, second, since=last + 1, rates=UNEVEN)
    now = len(first.lines)
    os.kill(second.ranks()[1], signal.SIGKILL)
    assert second.end() == 128 + signal.SIGKILL
    assert any("rank 1 was killed by SIGKILL" in line for line in second.lines)
    first.line("member 1 on .* left after round", now)
    first.line(r"pass \d+ 4 ", now)
    runs.stop.touch()
    assert first.end() == 0


def test_a_member_of_two_processes_survives_a_pause_of_one(runs: Runs) -> None:
    first = runs.listen()
    second = runs.join(processes=2)
    second.line(r"^\[1\] pass \d+ 4 ")
    for _ in range(4):
        second.line(r"^\[1\] pass \d+ 4 ", len(second.lines))
        pid = second.ranks()[1]
        os.kill(pid, signal.SIGSTOP)
        time.sleep(1.5)
        os.kill(pid, signal.SIGCONT)
        second.line(r"^\[1\] pass \d+ 4 ", len(second.lines))
    runs.stop.touch()
    assert second.end() == 0 and first.end() == 0


def test_a_member_of_two_processes_trains_on_data_of_its_own_and_on_parts_that_weigh_nothing(runs: Runs) -> None:
    """Of a batch of four this member may have what is masked out; and the loop need not fetch from a loader."""
    runs.script.write_text(MASKED)
    first = runs.listen()
    second = runs.join(processes=2)
    assert second.end() == 0 and first.end() == 0, (first.lines[-20:], second.lines[-20:])
    ended = {line.split("ended ")[1] for line in second.lines if "ended " in line}
    assert len(ended) == 1 and "nan" not in ended.pop()


MASKED = """
import sys, time
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import nearlinear as nl

torch.manual_seed(0)
x, mask = torch.randn(40, 3), torch.tensor([1.0, 1.0, 0.0, 0.0]).repeat(10)
model = nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
loader = DataLoader(TensorDataset(x, mask), batch_size=4)
plan = nl.Plan("local", every=2, check_every=5)
model, optimizer, loader = nl.distribute(
    model, optimizer, loader, strategy=plan, weight=lambda batch: float(batch[1].sum())
)
for number in range(60):
    for a, m in loader:
        optimizer.zero_grad()
        ((model(a)[:, 0] - 1).square() * m).sum().div(m.sum().clamp(min=1)).backward()
        optimizer.step()
        time.sleep(0.01)
    for _ in range(3):  # the same samples on every process: the mean of their gradients is each one's
        optimizer.zero_grad()
        (model(x[:4])[:, 0] - 1).square().mean().backward()
        optimizer.step()
for _ in loader:
    pass
print("ended", model.weight.tolist(), flush=True)
"""


def test_a_member_may_be_on_two_machines(tmp_path: Path, runs: Runs) -> None:
    """Two elastic agents that meet each other; the first process of all joins the run."""
    first = runs.listen()
    meet = ("--nnodes", "2", "--rdzv", f"127.0.0.1:{free_port()}")
    machines = [runs.join(2000, options=(*meet, "--node-rank", str(number))) for number in range(2)]
    for machine in machines:
        machine.line(r"pass \d+ 4 ")
    last = max(machines[0].passes())
    for machine in machines:
        machine.line(rf"pass {last + 3} 4 ")
    runs.stop.touch()
    assert first.end() == 0 and [machine.end() for machine in machines] == [0, 0]
    assert_equal_where_both_were(first, machines[0], since=last + 1, rates=UNEVEN)
    shared = machines[0].passes().keys() & machines[1].passes().keys()
    assert len(shared) > 3 and all(machines[0].passes()[each] == machines[1].passes()[each] for each in shared)


def test_on_one_process_the_strategy_changes_nothing(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(TRAIN)
    said = []
    for strategy in ("data", "local"):
        result = subprocess.run(
            [sys.executable, str(script), "2", str(tmp_path / "stop")],
            env={**os.environ, "NEARLINEAR_STRATEGY": strategy, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
        )
        assert result.returncode == 0, result.stderr
        said.append(result.stdout)
    assert said[0] == said[1]


def test_a_plan_says_how_members_train_apart() -> None:
    assert str(Plan("local", every=30)) == "local updates, rounds of 30 steps, int8 on the wire"
    plan = Plan("local", compress="topk")
    assert str(plan) == "local updates, rounds as long as the measured link asks for, topk on the wire"
    assert Plan.from_json(plan.to_json()) == plan
    for fields, error in (
        ({"every": 3}, "every is 3, and strategy 'data' has none; ask for 'local'"),
        ({"strategy": "local", "every": 0}, "every is 0; it must be at least 1"),
        ({"compress": "int8"}, "unknown compression 'int8'; choose None or 'bf16'"),
        ({"strategy": "local", "compress": "zip"}, "choose None or 'fp32' or 'bf16' or 'int8' or 'int4' or 'topk'"),
    ):
        with pytest.raises(InputError, match=error):
            Plan(**fields)  # type: ignore[arg-type]


# ---- what cannot be, said in one line


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ("run --nnodes 2 --rdzv 127.0.0.1:1 --listen 127.0.0.1:0 {script}", "--listen is for one machine"),
        ("run --strategy data --listen 127.0.0.1:0 {script}", "--strategy data needs fast links"),
        (
            "run --ticket nl1:127.0.0.1:1:AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA {script}",
            "--ticket is for --listen, in the place",
        ),
        ("run --listen 127.0.0.1:0 --ticket nl1 {script}", "that is not a ticket; copy the whole word"),
        ("run --listen 4242 {script}", "--listen '4242' is not HOST:PORT; write it like --listen 0.0.0.0:4242"),
        ("run --listen 192.0.2.1:4242 {script}", "cannot listen on 192.0.2.1:4242"),
        ("run --address 1.2.3.4 {script}", "--address says where --listen is reached"),
        ("join nl1:host:1:short {script}", "that is not a ticket; copy the whole word"),
        ("join @no-such-file {script}", "the ticket in 'no-such-file' cannot be read"),
    ],
)
def test_a_command_that_cannot_be_is_refused(
    arguments: str, error: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "train.py").write_text("")
    assert main([word.format(script=tmp_path / "train.py") for word in arguments.split()]) == 2
    assert error in capfd.readouterr().err


BUILD = """
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset
import nearlinear as nl

class Stream(IterableDataset):
    def __iter__(self):
        yield from torch.zeros(8, 2)

model = nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
"""


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("nl.distribute(model)", "strategy 'local' counts the optimizer's steps; hand the optimizer over too"),
        ("nl.distribute(model, optimizer)\nnl.distribute(model, optimizer)", "trains one model, and distribute was"),
        ("nl.distribute(model, optimizer, DataLoader(Stream(), batch_size=2))", "a loader's is an IterableDataset"),
        ("nl.distribute(model.to(torch.complex64), None)", "averages real numbers"),
        ("nl.distribute(model, optimizer, weight='sum')", "the mean of what members learn would be too little"),
    ],
)
def test_a_script_that_cannot_be_distributed_is_refused(
    text: str, error: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "train.py").write_text(BUILD + text)
    assert main(["run", "--listen", "127.0.0.1:0", "--record", "none", str(tmp_path / "train.py")]) == 2
    assert error in capfd.readouterr().err


def test_processes_of_one_machine_are_sent_elsewhere(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "train.py").write_text(BUILD + "nl.distribute(model, optimizer, strategy='local')")
    assert main(["run", "-n", "2", "--record", "none", str(tmp_path / "train.py")]) == 2
    assert "these are 2 processes of one run; start them with `nearlinear run --listen" in capfd.readouterr().err


BROKEN = """
nl.distribute(model, optimizer)
for _ in range(3):
    (model(torch.ones(1, 2)) * torch.nan).sum().backward()
    optimizer.step()
"""


def test_a_model_that_is_not_finite_ends_this_member_by_name(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "train.py").write_text(BUILD + BROKEN)
    assert main(["run", "--listen", "127.0.0.1:0", "--record", "none", str(tmp_path / "train.py")]) == 1
    assert "after step 1 3 of 3 parameters are not finite on this member" in capfd.readouterr().err


HOOKS = """
import copy, io, pickle
nl.distribute(model, optimizer)
for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
    again.eval()
    with torch.no_grad():
        again(torch.ones(1, 2))
print("copied")
"""


def test_a_model_can_still_be_copied_and_pickled(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "train.py").write_text(BUILD + HOOKS)
    assert main(["run", "--listen", "127.0.0.1:0", "--record", "none", str(tmp_path / "train.py")]) == 0
    assert "copied" in capfd.readouterr().out


@pytest.mark.parametrize(("mean", "share"), [(0.0, 0.0), (1.0, 0.5), (1e3, 1.0)])
def test_adams_moments_tell_the_signal_in_a_gradient_from_its_noise(mean: float, share: float) -> None:
    torch.manual_seed(0)
    parameter = torch.nn.Parameter(torch.zeros(20_000))
    optimizer = torch.optim.AdamW([parameter], lr=0.0)
    assert gradient_signal(optimizer) is None
    for _ in range(200):
        parameter.grad = mean + torch.randn(20_000)  # noise of variance 1
        optimizer.step()
    found = gradient_signal(optimizer)
    # The running means are of some twenty and a thousand steps: their ratio is known to about a hundredth.
    assert found is not None and abs(found - share) < 0.03
    assert gradient_signal(torch.optim.SGD([parameter], lr=0.1)) is None
