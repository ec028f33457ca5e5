"""`nearlinear plan script.py`: what a script's first steps and a cluster say of 1, 2, 4, ... devices."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from nearlinear.core.cluster import Cluster, Device, Island, Link
from nearlinear.core.forecast import Forecast
from nearlinear.core.graph import Graph, Operator, Tensor
from nearlinear.planning.choice import Planner
from nearlinear.planning.strategies import predict
from nearlinear.planning.timeline import timeline
from nearlinear.planning.ways import Way, Work

SCRIPT = """
import sys
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
import nearlinear as nl

torch.manual_seed(0)
data = TensorDataset(torch.randn(640, 64), torch.randint(0, 10, (640,)))
model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))
optimizer = torch.optim.Adam(model.parameters())
loader = DataLoader(data, batch_size=32, shuffle=True)
if "forget" not in sys.argv:
    model, optimizer, loader = nl.distribute(model, optimizer, loader)
if "leave" in sys.argv:
    sys.exit(0)
while "hang" in sys.argv:
    pass
for epoch in range(2):
    for x, y in loader:
        if "fail" in sys.argv:
            raise RuntimeError("the disk is full")
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        if "clip" in sys.argv:
            nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        optimizer.step()
print("trained")
"""

H100S = "16 x H100 80GB, NVLink within 8, 400 Gbit/s between"


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory, probed: tuple[Any, Path]) -> Any:
    """Return a function that runs the command on the script, on a machine that has been measured."""
    folder = tmp_path_factory.mktemp("plan")
    (folder / "train.py").write_text(SCRIPT)

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        caches = {"XDG_CACHE_HOME": str(probed[1]), "XDG_STATE_HOME": str(folder / "state")}
        env = {**os.environ, "OMP_NUM_THREADS": "1", **caches}
        command = [sys.executable, "-m", "nearlinear", "plan", *words]
        return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=240, check=False)

    return run


def test_a_script_is_planned_for_this_machine(plan: Any) -> None:
    done = plan("--json", "train.py")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    graph = Graph.from_json(json.dumps(found["graph"]))
    forecast = Forecast.from_json(json.dumps(found["forecast"]))
    assert found["batch"] == graph.samples == 32
    assert graph.parameter_bytes == 4 * (64 * 512 + 512 + 512 * 512 + 512 + 512 * 10 + 10)
    assert sum(operator.flop for operator in graph.operators) == pytest.approx(
        2 * 32 * (64 * 512 + 512**2 + 5120), rel=0.01
    )
    assert [point.devices for point in forecast.points] == [1, 2]
    assert forecast.points[0].seconds == pytest.approx(
        graph.time + sum(each.update for each in graph.operators), rel=0.1
    )
    ways = {point.way for point in forecast.points}
    assert not any("local" in way for way in ways), f"only what this version can run is forecast here, not {ways}"
    assert "trained" not in done.stdout + done.stderr


@pytest.fixture(scope="module")
def described(plan: Any) -> subprocess.CompletedProcess[str]:
    """Plan the script with clipping for machines that are not there."""
    done: subprocess.CompletedProcess[str] = plan("--cluster", H100S, "--html", "page.html", "train.py", "clip")
    assert done.returncode == 0, done.stderr
    return done


def test_a_described_cluster_needs_none_of_its_machines(described: subprocess.CompletedProcess[str]) -> None:
    assert "16 x H100 80GB" in described.stdout and "stop at" in described.stdout
    assert "page.html" in described.stderr


def test_clipped_gradients_do_not_say_how_noisy_a_batch_is(described: subprocess.CompletedProcess[str]) -> None:
    assert "the gradients are clipped" in " ".join(described.stdout.split())


def test_machines_far_apart_are_planned_by_their_link(plan: Any) -> None:
    done = plan("--strategy", "local", "--link", "1 Mbit/s, 80 ms", "-n", "4", "--json", "train.py")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    points = found["forecast"]["points"]
    assert [point["devices"] for point in points] == [1, 2, 3, 4]
    four = points[-1]
    (every,) = re.findall(r"^local, exchange every (\d+) steps$", four["way"])
    assert int(every) > 10  # 0.3 MB of int8 at 1 Mbit/s are some seconds, and a step milliseconds
    # The batch stays, so what is lost in time to a loss is the price of training apart.
    assert four["to_loss"] == pytest.approx(1.13**2 * four["seconds"] / points[0]["seconds"])
    data = json.loads(plan("--strategy", "data", "--link", "1 Mbit/s, 80 ms", "-n", "2", "--json", "train.py").stdout)
    assert data["forecast"]["stop"] == 1 and data["forecast"]["points"][-1]["seconds"] > 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "which script? write it like `nearlinear plan train.py`"),
        (["absent.py"], "there is no script 'absent.py'"),
        (["--cluster", "64 x H1000", "train.py"], "H1000"),
        (["--cluster", H100S, "-n", "17", "train.py"], "-n is 17; the cluster has 16 devices"),
        (["--share", "0", "train.py"], "--share is 0"),
        (["--link", "100 Mbit/s", "train.py"], "'100 Mbit/s' has one part; write the bandwidth and the round trip"),
        (["--link", "0 Mbit/s, 80 ms", "train.py"], "carries nothing"),
        (["--link", "100 Mbit/s, 80 ms", "-n", "0", "train.py"], "-n is 0; --link plans for 1 to 1024 machines"),
        (["--link", "1 Gbit/s, 1 ms", "--cluster", H100S, "train.py"], "give one of them"),
        (["train.py", "forget"], "without calling nl.distribute"),
        (["train.py", "fail"], "failed in its first steps"),
        (["--graph", "train.py", "train.py"], "give one of them"),
        (["--graph", "train.py", "--devices", "2", "--bandwidth", "1e9", "--html", "x.html"], "--html is for scripts"),
        (["--cluster", "999999999999 x H100", "train.py"], "more than 100,000 devices"),
        (["--cluster", H100S, "train.py", "leave"], "without calling its model in training mode"),
        (["--cluster", H100S, "--timeout", "4 s", "train.py", "hang"], "took more than 4 s for its first steps"),
    ],
)
def test_bad_input_gets_one_line(plan: Any, words: list[str], said: str) -> None:
    done = plan(*words)
    last = done.stderr.strip().splitlines()[-1]
    assert said in last and last.startswith("nearlinear: error: "), done.stderr
    assert done.returncode == (1 if words[-1:] in (["fail"], ["hang"]) else 2)
    assert done.stdout == ""


@pytest.mark.parametrize("bandwidth", [1e8, 1e9, 1e11])
def test_the_timeline_of_a_plan_takes_as_long_as_the_plan_says(bandwidth: float) -> None:
    layers = tuple(
        Operator(f"layer {n}", forward=0.01, backward=0.02, parameter_bytes=4e6, state_bytes=16e6, activation_bytes=1e6)
        for n in range(8)
    )
    graph = Graph(layers, tuple(Tensor(n, (n + 1,), 1e5) for n in range(7)), samples=8)
    device, link = Device("cpu", 1e12, {"float32": 1e12}, 1e11), Link(1e-4, bandwidth)
    cluster = Cluster((device,) * 4, tuple(Island((n,), link) for n in range(4)), link)
    work = Work(graph, batch=32, algorithms=("ring",))
    for candidate in Planner(work, cluster).rank(4):
        step = timeline(candidate.way, work, cluster)
        if step is not None:
            assert step.seconds == pytest.approx(candidate.seconds, rel=0.25), candidate.way
    assert timeline(Way("sharded", 4), work, cluster) is None
    assert predict(Way("data", 4), work, cluster).seconds == pytest.approx(
        timeline(Way("data", 4), work, cluster).seconds,
        rel=0.1,  # type: ignore[union-attr]
    )
