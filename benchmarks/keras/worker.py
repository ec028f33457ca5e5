"""Trains one model in one way on this process, and writes the samples per second of every block (rank 0).

    worker.py WAY MODEL SECONDS BLOCKS OUT

The process keeps to one core, that of its rank. Every way trains on the same whole batch; what is written counts it.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

RANK = int(os.environ.get("RANK", "0"))
CORES = sorted(os.sched_getaffinity(0))
os.sched_setaffinity(0, {CORES[RANK % len(CORES)]})
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

sys.path.insert(0, str(Path(__file__).parent))
from models import MODELS, Bench  # noqa: E402

STEPS = 6  # of an epoch; a block is as many epochs as fill its seconds


def main(way: str, name: str, seconds: float, blocks: int, out: str) -> None:
    """Train, and write."""
    bench = MODELS[name]
    speeds = globals()[f"_{way}"](bench, seconds, blocks)
    if RANK == 0:
        Path(out).write_text(json.dumps(speeds))
    if way.startswith("strategy"):
        os._exit(0)  # its processes wait for each other for a minute where one ends first


def _fit(model: Any, data: Any, batch: int, whole: int, seconds: float, blocks: int) -> list[float]:
    batches = _batches(data, batch)

    def epochs(count: int) -> float:
        began = time.perf_counter()
        model.fit(batches, epochs=count, verbose=0)
        return time.perf_counter() - began

    epochs(2)
    count = max(1, round(seconds / epochs(1)))
    if "nearlinear" in sys.modules:
        count = int(sys.modules["nearlinear"].total(float(count))) // max(1, int(os.environ.get("WORLD_SIZE", "1")))
    return [whole * STEPS * count / epochs(count) for _ in range(blocks)]


def _batches(data: Any, batch: int) -> Any:
    """Return a data set of whole batches, the same for all ways.

    It is not tuned: at the end of every epoch tf.data waits for the thread that does so, up to as long again as the
    epoch took, in some runs and not in others.
    """
    import tensorflow as tf

    options = tf.data.Options()
    options.autotune.enabled = False
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA
    return tf.data.Dataset.from_tensor_slices(data).batch(batch).prefetch(2).with_options(options)


def _compiled(keras: Any, bench: Bench) -> Any:
    keras.utils.set_random_seed(0)
    model = bench.build(keras)
    model.compile(keras.optimizers.SGD(0.01), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def _one(bench: Bench, seconds: float, blocks: int) -> list[float]:
    import keras

    return _fit(_compiled(keras, bench), bench.data(bench.batch * STEPS), bench.batch, bench.batch, seconds, blocks)


def _share(bench: Bench, seconds: float, blocks: int) -> list[float]:
    """Half of the batch, beside another process that does the same: what two processes reach without any exchange."""
    import keras

    half = bench.batch // 2
    return _fit(_compiled(keras, bench), bench.data(half * STEPS), half, bench.batch, seconds, blocks)


def _nearlinear(bench: Bench, seconds: float, blocks: int) -> list[float]:
    import keras

    import nearlinear as nl

    model = nl.distribute(_compiled(keras, bench))
    return _fit(model, bench.data(bench.batch * STEPS), bench.batch, bench.batch, seconds, blocks)


def _pipeline(bench: Bench, seconds: float, blocks: int) -> list[float]:
    """Two stages, eight microbatches."""
    import keras

    import nearlinear as nl

    model = nl.distribute(_compiled(keras, bench), strategy=nl.Plan("pipeline", microbatches=8))
    return _fit(model, bench.data(bench.batch * STEPS), bench.batch, bench.batch, seconds, blocks)


def _strategy(bench: Bench, seconds: float, blocks: int) -> list[float]:
    """A loop of its own under TensorFlow's multi-worker strategy, on Keras 3."""
    strategy = _multi_worker()
    import keras
    import tensorflow as tf

    with strategy.scope():
        keras.utils.set_random_seed(0)
        model = bench.build(keras)
        optimizer = keras.optimizers.SGD(0.01)
        optimizer.build(model.trainable_variables)
        loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="sum")
    batches = _batches(bench.data(bench.batch * STEPS), bench.batch).repeat()
    iterator = iter(strategy.experimental_distribute_dataset(batches))

    @tf.function  # type: ignore[untyped-decorator]
    def steps() -> None:
        for _ in tf.range(STEPS):
            strategy.run(step, args=(next(iterator),))

    def step(batch: Any) -> None:
        x, y = batch
        with tf.GradientTape() as tape:
            loss = loss_of(y, model(x, training=True)) / bench.batch
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)

    for _ in range(3):
        steps()
    began = time.perf_counter()
    for _ in range(3):
        steps()
    count = max(1, round(seconds / ((time.perf_counter() - began) / 3)))
    count = int(strategy.reduce("SUM", strategy.run(lambda: tf.constant(count)), axis=None)) // 2
    speeds = []
    for _ in range(blocks):
        began = time.perf_counter()
        for _ in range(count):
            steps()
        speeds.append(bench.batch * STEPS * count / (time.perf_counter() - began))
    return speeds


def _strategy_fit(bench: Bench, seconds: float, blocks: int) -> list[float]:
    """``fit`` under the multi-worker strategy: works on tf_keras alone."""
    strategy = _multi_worker()
    import tensorflow as tf
    import tf_keras

    with strategy.scope():
        model = _compiled(tf_keras, bench)
    data = _batches(bench.data(bench.batch * STEPS), bench.batch)

    def epochs(count: int) -> float:
        began = time.perf_counter()
        model.fit(data, epochs=count, verbose=0)
        return time.perf_counter() - began

    epochs(2)
    count = max(1, round(seconds / (epochs(3) / 3)))
    count = int(strategy.reduce("SUM", strategy.run(lambda: tf.constant(count)), axis=None)) // 2
    return [bench.batch * STEPS * count / epochs(count) for _ in range(blocks)]


def _multi_worker() -> Any:
    port = int(os.environ["MASTER_PORT"])
    workers = [f"127.0.0.1:{port}", f"127.0.0.1:{port + 1}"]
    os.environ["TF_CONFIG"] = json.dumps({"cluster": {"worker": workers}, "task": {"type": "worker", "index": RANK}})
    import tensorflow as tf

    return tf.distribute.MultiWorkerMirroredStrategy()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], float(sys.argv[3]), int(sys.argv[4]), sys.argv[5])
