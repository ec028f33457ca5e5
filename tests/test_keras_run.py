"""The rest of the house serves Keras too: run, check, demo, faults, checkpoints; without torch."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nearlinear.testing import run_processes

from conftest import run

pytest.importorskip("keras")
pytestmark = pytest.mark.timeout(240)

WITHOUT = """
import sys

class Without:
    def find_spec(self, name, path, target=None):
        if name.split(".")[0] in WITHOUT:
            raise ModuleNotFoundError(name)
"""
TRAIN = (
    WITHOUT
    + """
import os
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
import sys, json
if "--without-torch" in sys.argv:
    WITHOUT = ("torch",)
    sys.meta_path.insert(0, Without())
import keras, numpy as np
import nearlinear as nl

keras.utils.set_random_seed(0)
draw = np.random.default_rng(0)
x, y = draw.normal(size=(41, 10)), draw.integers(0, 4, 41)
model = keras.Sequential([keras.Input((10,)), keras.layers.Dense(16, activation="tanh"), keras.layers.Dense(4)])
model.compile(
    keras.optimizers.Adam(0.01), keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"]
)
model = nl.distribute(model)
"""
)
STEPS = (
    TRAIN
    + """
if "--load" in sys.argv:
    assert nl.load(sys.argv[1], model) == {"epoch": 1}
fitted = model.fit(x, y, batch_size=8, epochs=int(sys.argv[2]), verbose=2, shuffle=False)
if "--save" in sys.argv:
    nl.save(sys.argv[1], model, epoch=1)
if nl.is_main():
    print("HISTORY " + json.dumps(fitted.history))
"""
)


def written(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text)
    return path


def history(ran: subprocess.CompletedProcess[str]) -> dict[str, list[float]]:
    assert ran.returncode == 0, (ran.stdout + ran.stderr)[-3000:]
    (said,) = re.findall(r"HISTORY (.*)$", ran.stdout, re.MULTILINE)
    found: dict[str, list[float]] = json.loads(said)
    return found


def close(a: list[float], b: list[float]) -> bool:
    return a == pytest.approx(b, rel=1e-5)  # float32: sums in another order


def test_a_checkpoint_of_two_processes_resumes_on_one_and_three_without_torch(tmp_path: Path) -> None:
    script, folder = written(tmp_path, "train.py", STEPS), str(tmp_path / "checkpoint")
    whole = history(run(1, script, folder, "3"))
    begun = history(run(2, script, folder, "1", "--save", "--without-torch"))
    assert close(begun["loss"], whole["loss"][:1])
    for n in (1, 3):
        resumed = history(run(n, script, folder, "2", "--load"))
        assert close(resumed["loss"], whole["loss"][1:])
        assert close(resumed["accuracy"], whole["accuracy"][1:])


def test_one_rank_alone_prints(tmp_path: Path) -> None:
    ran = run(2, written(tmp_path, "train.py", STEPS), "none", "1")
    assert len(re.findall(r"loss: ", ran.stdout)) == 1, ran.stdout
    assert re.search(r"nearlinear: 6 steps in .* samples/s · \d+ % of the time communicating", ran.stderr), ran.stderr


@pytest.mark.parametrize(("rank", "step"), [(1, 3), pytest.param(0, 2, marks=pytest.mark.full)])
def test_a_killed_worker_ends_the_others_with_its_number(tmp_path: Path, rank: int, step: int) -> None:
    script = written(tmp_path, "train.py", TRAIN + "model.fit(x, y, batch_size=8, epochs=500, verbose=0)\n")
    results = run_processes(script, 2, fault=f"kill:{rank}@{step}", timeout_s=120, grace_s=10)
    assert results[rank].signal == signal.SIGKILL
    other = results[1 - rank]
    assert re.search(rf"nearlinear: error: rank {rank} on \S+: its process ended", other.stderr), other.stderr[-2000:]
    assert other.seconds - results[rank].seconds < 10


@pytest.mark.full
def test_a_backup_goes_on_where_a_killed_run_was(tmp_path: Path) -> None:
    text = (
        TRAIN
        + """
class Die(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        if "--die" in sys.argv and epoch == 2 and nl.rank() == 1:
            os.kill(os.getpid(), 9)

backup = keras.callbacks.BackupAndRestore(sys.argv[1])
fitted = model.fit(x, y, batch_size=8, epochs=4, verbose=0, shuffle=False, callbacks=[backup, Die()])
if nl.is_main():
    print("HISTORY " + json.dumps([fitted.epoch, fitted.history["loss"]]))
"""
    )
    script = written(tmp_path, "train.py", text)

    def trained(processes: int, folder: str, *words: str) -> tuple[int, list[list[float]]]:
        ran = run(processes, script, str(tmp_path / folder), *words)
        found = re.search(r"HISTORY (.*)", ran.stdout)
        return ran.returncode, json.loads(found[1]) if found else []

    assert trained(2, "backup", "--die")[0] == 128 + signal.SIGKILL
    again, (epochs, losses) = trained(2, "backup")
    assert again == 0 and epochs == [2, 3]
    assert losses == pytest.approx(trained(1, "whole")[1][1][2:], rel=1e-5)  # of float32 in another order


def test_check_compares_a_keras_script_step_by_step(tmp_path: Path) -> None:
    script = written(tmp_path, "train.py", TRAIN + "model.fit(x, y, batch_size=8, epochs=1, verbose=0)\n")
    words = [sys.executable, "-m", "nearlinear", "check", "-n", "2", "--steps", "3", "--float64", str(script)]
    checked = subprocess.run(words, capture_output=True, text=True, timeout=200, check=False)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert re.search(r"equal: 3 steps, 4 parameters, worst relative error \S+ \(tolerance 1e-10\)", checked.stdout)


def test_check_names_batchnorm_as_the_reason(tmp_path: Path) -> None:
    text = TRAIN.replace("keras.layers.Dense(4)", "keras.layers.BatchNormalization(), keras.layers.Dense(4)")
    script = written(tmp_path, "train.py", text + "model.fit(x, y, batch_size=8, epochs=1, verbose=0)\n")
    words = [sys.executable, "-m", "nearlinear", "check", "-n", "2", "--steps", "2", str(script)]
    checked = subprocess.run(words, capture_output=True, text=True, timeout=200, check=False)
    assert checked.returncode == 1, checked.stdout + checked.stderr
    assert "BatchNorm" in checked.stdout + checked.stderr
    assert "synchronized=True" in checked.stdout + checked.stderr


def test_the_demo_trains_keras_on_real_data(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "nearlinear", "demo", "--keras", "--quick", "--out", str(tmp_path / "out")]
    shown = subprocess.run(words, capture_output=True, text=True, timeout=200, check=False)
    assert shown.returncode == 0, shown.stderr
    (difference,) = re.findall(r"largest difference of the two losses in 24 steps: (\S+)", shown.stdout)
    assert float(difference) < 1e-4


def test_buckets_that_start_at_once_are_summed_in_one_order_on_all_ranks() -> None:
    """Where TensorFlow has several threads: all of them find one exchange, and tell what they heard themselves."""
    from nearlinear.tensorflow.reducer import _exchanger

    class Slow:
        """The connections of rank 0, which take a moment for everything."""

        rank, peers = 0, (1,)

        def __init__(self) -> None:
            self.told, self.summed = list[int](), list[int]()

        @property
        def connected(self) -> Slow:
            time.sleep(0.1)
            return self

        def send(self, peer: int, tag: str, name: bytes, what: str) -> None:
            time.sleep(0.001 * (int(name) % 3))
            self.told.append(int(name))

        def all_reduce(self, tag: str, flat: np.ndarray[Any, Any], what: str) -> None:
            self.summed.append(int(flat[0]))

        def until(self, done: Callable[[float], bool], what: str) -> None:
            assert done(10.0)

    session: Any = Slow()

    def exchange(name: int) -> None:
        exchanger = _exchanger(session)
        exchanger.get(exchanger.put(str(name), np.array([float(name)]), None))

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(exchange, range(100)))
    assert sorted(session.told) == list(range(100)) and session.told == session.summed


@pytest.mark.parametrize("framework", ["torch", "tensorflow"])
def test_importing_the_package_imports_no_framework(framework: str) -> None:
    words = [sys.executable, "-c", f"import sys, nearlinear; sys.exit({framework!r} in sys.modules)"]
    assert subprocess.run(words, check=False).returncode == 0


def test_the_torch_path_needs_no_tensorflow(tmp_path: Path) -> None:
    script = written(
        tmp_path,
        "train.py",
        WITHOUT + "WITHOUT = ('tensorflow', 'keras')\n"
        "sys.meta_path.insert(0, Without())\n"
        "import torch, nearlinear as nl\n"
        "model = torch.nn.Linear(3, 1)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "model, optimizer = nl.distribute(model, optimizer)\n"
        "model(torch.ones(2, 3)).sum().backward()\n"
        "optimizer.step()\n",
    )
    ran = run(2, script)
    assert ran.returncode == 0, ran.stderr


def test_a_refusal_is_one_line_and_exit_code_2(tmp_path: Path) -> None:
    script = written(
        tmp_path,
        "train.py",
        "import keras, nearlinear as nl\n"
        "model = nl.distribute(keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(2)]))\n",
    )
    ran = run(2, script)
    assert ran.returncode == 2, ran.stderr
    assert "nearlinear: error: the model is not compiled and no optimizer was given" in ran.stderr
    assert "Traceback" not in ran.stderr


def test_plan_captures_a_keras_script_and_forecasts_it() -> None:
    script = str(Path(__file__).parent.parent / "examples/digits_keras.py")
    words = [sys.executable, "-m", "nearlinear", "plan", "--cluster", "4 x A100 80GB, 25 Gbit/s between", script]
    planned = subprocess.run(words, capture_output=True, text=True, timeout=200, check=False)
    assert planned.returncode == 0, planned.stderr
    said = " ".join(planned.stdout.split())
    assert "6 operators, 5 tensors" in said and "batch 64, captured by the layers of Keras" in said
    assert "stop at 1" in said  # 113 thousand parameters are not worth a second A100
