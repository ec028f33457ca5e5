"""Strategy `local` through an unchanged `fit`, in processes that have no PyTorch."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from local_commands import ADAPTED, DEADLINE_S, Runs, assert_equal_where_both_were

pytest.importorskip("keras")
pytest.importorskip("cryptography")
pytestmark = pytest.mark.timeout(280)

WITHOUT_TORCH = """
import sys

class Without:
    def find_spec(self, name, path, target=None):
        if name.split(".")[0] == "torch":
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Without())
import os
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
import hashlib, json, time
from pathlib import Path
import keras, numpy as np, tensorflow as tf
import nearlinear as nl
"""

# Prints, after every epoch, a digest of the outer parameters, which every member has then.
TRAIN = (
    WITHOUT_TORCH
    + """
epochs, stop = int(sys.argv[1]), Path(sys.argv[2])
keras.utils.set_random_seed(0)
draw = np.random.default_rng(7)
x = draw.normal(size=(192, 10)).astype("float32")
y = (x @ draw.normal(size=(10, 3))).argmax(1)
layers, stepped_at = keras.layers, tf.Variable(0.0)


class Noting(keras.Sequential):
    def train_step(self, data):
        stepped_at.assign(self.optimizer.learning_rate)
        return super().train_step(data)


model = Noting([
    keras.Input((10,)), layers.Dense(16), layers.BatchNormalization(), layers.Activation("tanh"), layers.Dropout(0.1),
    layers.Dense(3),
])
rate = keras.optimizers.schedules.InverseTimeDecay(0.02, 50, 0.5)
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
model.compile(keras.optimizers.AdamW(rate), loss, metrics=["accuracy"])
model = nl.distribute(model, strategy=nl.Plan("local", every=3))
print("entered", flush=True)


class Tell(keras.callbacks.Callback):
    before = 0

    def on_train_batch_begin(self, batch, logs):
        pass  # (1)

    def on_train_batch_end(self, batch, logs):
        time.sleep(0.01)

    def on_epoch_end(self, epoch, logs):
        outer = b"".join(each.numpy().tobytes() for each in model.weights)
        steps, right = int(model.optimizer.iterations) - self.before, round(192 * logs["val_accuracy"])
        self.before += steps
        print("pass", epoch, steps, right, hashlib.md5(outer).hexdigest(), float(stepped_at), flush=True)
        self.model.stop_training = stop.exists()


model.fit(x, y, batch_size=48, epochs=epochs, validation_data=(x, y), callbacks=[Tell()], verbose=0)
assert "torch" not in sys.modules
"""
)


@pytest.fixture
def runs(tmp_path: Path) -> Iterator[Runs]:
    made = Runs(tmp_path, TRAIN)
    yield made
    made.close()


def test_a_member_that_comes_late_trains_with_the_first_and_may_be_killed(runs: Runs) -> None:
    first = runs.listen()
    first.line(r"pass 6 4 ")
    second = runs.join()
    second.line(r"pass \d+ [1-4] ")
    assert min(second.passes()) > 2, "epochs that the run has behind it are left out"
    last = max(second.passes())
    second.line(rf"pass {last + 4} 4 ")
    first.line(rf"pass {last + 4} 4 ")
    assert_equal_where_both_were(first, second, since=last + 1, rates=ADAPTED)
    now = len(first.lines)
    os.kill(second.rank(), signal.SIGKILL)
    first.line("member 1 on .* hung up; round .* goes on without it", now)
    first.line(r"pass \d+ 4 ", now)
    runs.stop.touch()
    assert first.end() == 0 and second.end() == 128 + signal.SIGKILL
    assert max(each.right for each in first.passes().values()) >= 180, "of 192: it has learnt"
    first.line(r"rounds · sent .*, received .* · with others .* samples/s, alone .*: \S+ x one machine")


def test_a_stopped_member_leaves_out_what_the_others_did_meanwhile(runs: Runs) -> None:
    # A rate of the script's own, which counts steps that a member was there for; so it takes the other's.
    own = "self.seen = getattr(self, 'seen', 0) + 1; model.optimizer.learning_rate = 0.02 / (1 + self.seen / 400)"
    runs.script.write_text(TRAIN.replace("pass  # (1)", own).replace("AdamW(rate)", "AdamW(0.02)"))
    first = runs.listen(NEARLINEAR_SILENCE="2 s")
    first.line(r"pass 12 4 ")
    second = runs.join(NEARLINEAR_SILENCE="2 s")
    second.line(r"pass \d+ 4 ")
    rank, now = second.rank(), len(first.lines)
    os.kill(rank, signal.SIGSTOP)
    first.line("member 1 on .* was silent for [23] s; round .* goes on without it", now)
    first.line(r"pass \d+ 4 ", now)
    os.kill(rank, signal.SIGCONT)
    first.line("member 1 on .* joined at round", now)
    second.line(r"pass \d+ 4 ", len(second.lines))
    last = max(second.passes())
    second.line(rf"pass {last + 3} 4 ")
    runs.stop.touch()
    assert second.end() == 0 and first.end() == 0
    assert_equal_where_both_were(first, second, since=last + 1, rates=ADAPTED)
    second.line("rounds · .* samples/s; this machine alone was not measured, for others were always here")


EXACT = (
    WITHOUT_TORCH
    + """
out, here, members = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
keras.utils.set_random_seed(0)
x = np.random.default_rng(1).normal(size=(100, 10)).astype("float32")
model = keras.Sequential([keras.Input((10,)), keras.layers.Dense(16, activation="tanh"), keras.layers.Dense(3)])
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
model.compile(keras.optimizers.SGD(0.0), loss)
model = nl.distribute(model, strategy=nl.Plan("local", every=1, compress="fp32"))
(here / Path(out).name).touch()
while len(list(here.iterdir())) < members:
    time.sleep(0.02)


class EachStep(keras.callbacks.Callback):
    step = 0

    def on_train_batch_begin(self, batch, logs):
        model.optimizer.learning_rate = 0.2 if self.step >= 3 else 0.0  # (1)
        self.step += 1

    def on_train_batch_end(self, batch, logs):
        model.predict_on_batch(x[:1])  # (2)


each = EachStep()
model.fit(x, x[:, :3].argmax(1), batch_size=8, epochs=3, callbacks=[each], verbose=0)
assert each.step == 39
np.savez(out + ".npz", *(each.numpy() for each in model.weights))
"""
)
# (1) Members learn their shares with the news of a round, so the first ones teach nothing.
# (2) An evaluation waits for the round; without it the next step would begin meanwhile.


def test_with_a_round_per_step_the_numbers_are_those_of_one_process(tmp_path: Path, runs: Runs) -> None:
    runs.script.write_text(EXACT)
    here = tmp_path / "here"
    here.mkdir()
    first = runs.start("run", "--listen", "127.0.0.1:0", str(runs.script), str(tmp_path / "a"), str(here), "2")
    runs.ticket = first.line(r"(nl1:\S+)")[1]
    second = runs.start("join", runs.ticket, str(runs.script), str(tmp_path / "b"), str(here), "2")
    alone = plain(runs.script, str(tmp_path / "alone"), str(tmp_path), "0")
    assert alone.returncode == 0, alone.stderr
    assert first.end() == 0 and second.end() == 0, (first.lines, second.lines)
    one, two, both = (dict(np.load(tmp_path / f"{name}.npz")) for name in ("alone", "a", "b"))
    assert one
    for name, array in one.items():
        np.testing.assert_array_equal(two[name], both[name])
        # 39 steps of float32, of which the mean over members rounds each once more.
        np.testing.assert_allclose(two[name], array, rtol=1e-5, atol=1e-6)


WAYS = (
    WITHOUT_TORCH
    + """
keras.utils.set_random_seed(0)
draw = np.random.default_rng(2)
x, y = draw.normal(size=(50, 6)).astype("float32"), draw.integers(0, 3, 50)


class Own(keras.Model):  # built at its first batch
    def __init__(self, **options):
        super().__init__(**options)
        self.first, self.norm = keras.layers.Dense(8, activation="relu"), keras.layers.BatchNormalization()
        self.second = keras.layers.Dense(3)

    def call(self, x, training=False):
        return self.second(self.norm(self.first(x), training=training))


def endless():
    while True:
        for start in range(0, 48, 12):
            yield x[start : start + 12], y[start : start + 12]


def batches(n):
    return tf.data.Dataset.from_tensor_slices((x, y)).shuffle(50, seed=3).batch(n)


model = Own()
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
model.compile(keras.optimizers.Adam(0.01), loss, metrics=["accuracy"])
model = nl.distribute(model, strategy=nl.Plan("local", every=2, compress="fp32"))
said = []
note = lambda fitted: said.append(fitted.history)
note(model.fit(x, y, batch_size=8, epochs=2, validation_split=0.2, class_weight={0: 1.0, 1: 2.0, 2: 1.0}, verbose=0))
note(model.fit(batches(16), epochs=2, validation_data=batches(20), verbose=0))
note(model.fit(endless(), steps_per_epoch=3, epochs=2, verbose=0))
model.compile(model.optimizer, loss, metrics=["accuracy"], steps_per_execution=3)
note(model.fit(x, y, batch_size=8, epochs=2, verbose=0))
model.compile(keras.optimizers.SGD(0.1), loss, metrics=["accuracy"], run_eagerly=True)
note(model.fit(x, y, batch_size=25, epochs=1, verbose=0))
said.append({"batch": [float(each) for each in model.train_on_batch(x[:9], y[:9])]})
said.append({"evaluate": model.evaluate(x, y, verbose=0), "predict": float(np.abs(model.predict(x, verbose=0)).mean())})
if len(sys.argv) > 1:
    model.save(sys.argv[1] + ".keras")
    nl.save(sys.argv[1], model)
    again = keras.models.load_model(sys.argv[1] + ".keras", custom_objects={"Own": Own})
    assert np.array_equal(again.predict(x, verbose=0), model.predict(x, verbose=0))
print("SAID", json.dumps(said), flush=True)
"""
)


@pytest.mark.full
def test_a_member_alone_has_the_history_of_one_process_in_all_ways_of_fit(tmp_path: Path, runs: Runs) -> None:
    runs.script.write_text(WAYS)
    first = runs.start("run", "--listen", "127.0.0.1:0", "--record", "none", str(runs.script), str(tmp_path / "saved"))
    one = plain(runs.script)
    assert one.returncode == 0, one.stderr[-3000:]
    assert first.end() == 0, first.lines[-20:]
    mine, plain_ones = json.loads(first.line("SAID (.*)")[1]), json.loads(said_by(one.stdout, "SAID (.*)"))
    assert len(mine) == len(plain_ones) == 7
    for number, (ours, theirs) in enumerate(zip(mine, plain_ones, strict=True)):
        assert ours.keys() == theirs.keys()
        for name, values in theirs.items():
            # A round puts outer + (values - outer) in the place of values, which rounds.
            assert ours[name] == pytest.approx(values, rel=1e-4), (number, name)
    first.line("members train apart between two rounds")
    first.line("losses and metrics of training are of this member's part of the batches")


REFUSED = (
    WITHOUT_TORCH
    + """
def made(**how):
    model = keras.Sequential([keras.Input((2,), sparse=how.pop("sparse", False)), keras.layers.Dense(1)])
    if how.pop("compile", True):
        model.compile(how.pop("optimizer", "sgd"), how.pop("loss", "mse"))
    return model


def refused(name, *given, **options):
    try:
        nl.distribute(*given, **options)
    except nl.NearlinearError as error:
        print("REFUSED", name, error, flush=True)


refused("uncompiled", made(compile=False))
refused("a loop of one's own", made(compile=False), keras.optimizers.SGD(0.1))
refused("loaders", made(), None, tf.data.Dataset.range(3).batch(2))
refused("sparse", made(sparse=True))
refused("sum", made(loss=keras.losses.MeanSquaredError(reduction="sum")))
refused("sum by weight", made(compile=False), keras.optimizers.SGD(0.1), weight="sum")
refused("ema", made(optimizer=keras.optimizers.Adam(use_ema=True)))
here = dict(os.environ)
os.environ.update(RANK="0", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT="1")
refused("several", made())
os.environ.clear()
os.environ.update(here)
first = nl.distribute(made())
refused("twice", first)
refused("second", made())
"""
)


def test_what_cannot_be_trained_apart_is_refused_in_one_line(runs: Runs) -> None:
    runs.script.write_text(REFUSED)
    first = runs.start("run", "--listen", "127.0.0.1:0", "--record", "none", str(runs.script))
    assert first.end() == 0, first.lines[-20:]
    for name, words in (
        ("uncompiled", "the model is not compiled and no optimizer was given"),
        ("a loop of one's own", r"trains a Keras model through its fit; call model.compile\(...\) before"),
        ("loaders", "give the data to fit"),
        ("sparse", "the model has sparse inputs"),
        ("sum", "the loss is a sum over the batch, .* needs a mean"),
        ("sum by weight", "the loss is a sum over the batch|through its fit"),
        ("ema", r"keeps an average of the weights \(use_ema\)"),
        ("several", "trains apart in one process of each machine; leave out -n"),
        ("twice", "this model was distributed before"),
        ("second", "trains one model, and distribute was called for a second one"),
    ):
        first.line(f"REFUSED {name} .*{words}")


def test_other_data_are_refused_by_name(runs: Runs) -> None:
    another = "default_rng(7 if 'NEARLINEAR_IDENTITY' in os.environ else 8)"
    runs.script.write_text(TRAIN.replace("default_rng(7)", another))
    first = runs.listen()
    first.line(r"pass 17 4 ")  # no longer all passes are compared
    second = runs.join()
    second.line("this member reads other batches than the run's first member in epoch [0-9]+; the data must come in")
    assert second.end() == 2
    runs.stop.touch()
    assert first.end() == 0


@pytest.mark.full
def test_passes_that_are_left_out_leave_the_order_of_the_others_as_it_is(tmp_path: Path) -> None:
    """As a member that comes late must read what those read who were there from the beginning."""
    script = tmp_path / "order.py"
    script.write_text(ORDER)
    ran = plain(script)
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert "6 ways" in ran.stdout


ORDER = (
    WITHOUT_TORCH
    + """
import random
from keras.src.trainers.data_adapters import get_data_adapter
from keras.src.backend.tensorflow.trainer import TFEpochIterator
from nearlinear.tensorflow.data import SharedData
from nearlinear.tensorflow.local import Passes

x = np.arange(24, dtype="float32")[:, None]


class Listed(keras.utils.PyDataset):
    def __init__(self):
        super().__init__()
        self.order = list(range(24))

    def __len__(self):
        return 4

    def __getitem__(self, number):
        return x[self.order[6 * number : 6 * number + 6]], x[:6]

    def on_epoch_end(self):
        random.shuffle(self.order)


def endless():
    while True:
        yield x[:6], x[:6]
        yield x[6:12], x[:6]
        yield x[12:18], x[:6]


def data(way):
    whole = tf.data.Dataset.from_tensor_slices((x, x)).shuffle(24, seed=5).batch(6)
    if way == "arrays":
        return dict(x=x, y=x, batch_size=6, shuffle=True), None
    if way == "tf.data":
        return dict(x=whole), None
    if way == "unknown length":
        return dict(x=whole.filter(lambda *_: True)), None
    if way == "repeated":
        return dict(x=whole.repeat()), 3
    if way == "PyDataset":
        return dict(x=Listed(), shuffle=True), None
    return dict(x=endless()), 5


def epochs(way, each, left_out=None):
    keras.utils.set_random_seed(3)
    given, steps = data(way)
    seen = []
    for fit in range(4 // each):
        passes, missed = SharedData(get_data_adapter(steps_per_epoch=steps, **given), 0, 1), 0
        if left_out is not None:
            missed = min(each, max(0, left_out - fit * each))
            passes = Passes(passes, steps, missed)
        iterator = TFEpochIterator(x=passes, steps_per_epoch=steps, distribute_strategy=tf.distribute.get_strategy())
        iterator.reset()
        for _ in range(each - missed):
            seen.append([])
            with iterator.catch_stop_iteration():
                for _, _, batches in iterator:
                    ((batch, _), mark) = next(batches)
                    seen[-1] += batch.numpy()[:, 0].tolist()
        if left_out is not None:
            passes.leave_out()
    return seen


ways = ("arrays", "tf.data", "unknown length", "repeated", "PyDataset", "generator")
for way in ways:
    for each in (4, 2) if way in ("arrays", "tf.data", "unknown length") else (4,):
        whole = epochs(way, each)
        assert len(whole[1]) >= 18
        assert (whole[1] == whole[2]) == (way == "arrays"), way  # Keras draws one order where there is a seed
        for left_out in (0, 3):
            assert epochs(way, each, left_out) == whole[left_out:], (way, each, left_out)
print(len(ways), "ways")
"""
)


def plain(script: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a script by itself."""
    return subprocess.run(
        [sys.executable, str(script), *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "2"},
        capture_output=True,
        text=True,
        timeout=2 * DEADLINE_S,
    )


def said_by(text: str, pattern: str) -> str:
    match = re.search(pattern, text)
    assert match is not None, text[-2000:]
    return match[1]


@pytest.mark.parametrize(("mean", "share"), [(0.0, 0.0), (1.0, 0.5), (1e3, 1.0)])
def test_adams_moments_tell_the_signal_in_a_gradient_from_its_noise(mean: float, share: float) -> None:
    from nearlinear.tensorflow.local import gradient_signal

    keras = pytest.importorskip("keras")
    variable, optimizer = keras.Variable(np.zeros(20_000, np.float32)), keras.optimizers.AdamW(0.0)
    draw = np.random.default_rng(0)
    optimizer.build([variable])
    assert gradient_signal(optimizer) is None
    for _ in range(200):
        optimizer.apply([(mean + draw.normal(size=20_000)).astype(np.float32)])  # noise of variance 1
    found = gradient_signal(optimizer)
    # The running means are of some twenty and a thousand steps: their ratio is known to about a hundredth.
    assert found is not None and abs(found - share) < 0.03
    assert gradient_signal(keras.optimizers.SGD(0.1)) is None
