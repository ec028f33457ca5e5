"""Keras training scripts, each as its users write it; what they note is compared between 1, 2 and 3 processes."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers

import nearlinear as nl

Note = Callable[[str, Any], None]
CASES: dict[str, Callable[[Note], None]] = {}


def case(function: Callable[[Note], None]) -> Callable[[Note], None]:
    """Register a case under its name."""
    CASES[function.__name__] = function
    return function


def history(note: Note, fitted: Any) -> None:
    for key, values in fitted.history.items():
        note(f"history {key}", values)


def weights(note: Note, model: Any) -> None:
    for number, each in enumerate(model.weights):
        if "seed" not in each.path:
            note(f"weight {number} {each.path}", each.numpy())


def points(n: int, seed: int = 0) -> tuple[Any, Any]:
    """Return ``n`` points of 10 numbers and their classes, 0 to 3."""
    draw = np.random.default_rng(seed)
    x = draw.normal(size=(n, 10))
    return x, np.argmax(x @ draw.normal(size=(10, 4)) + 0.5 * draw.normal(size=(n, 4)), 1)


def mlp(**options: Any) -> Any:
    model = keras.Sequential([keras.Input((10,)), layers.Dense(16, activation="tanh"), layers.Dense(4)])
    compiled = {
        "optimizer": keras.optimizers.SGD(0.1, momentum=0.9),
        "loss": keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        "metrics": ["accuracy"],
    }
    model.compile(**(compiled | options))
    return model


@case
def mlp_numpy(note: Note) -> None:
    x, y = points(205)
    model = nl.distribute(mlp())
    folder = Path(tempfile.mkdtemp())
    fitted = model.fit(
        x[:104],
        y[:104],
        batch_size=16,
        epochs=3,
        verbose=0,
        validation_data=(x[104:], y[104:]),
        callbacks=[
            keras.callbacks.EarlyStopping("val_loss", patience=1),
            keras.callbacks.ModelCheckpoint(folder / "best.keras", monitor="val_loss", save_best_only=True),
            keras.callbacks.CSVLogger(folder / "log.csv"),
        ],
    )
    assert (folder / "best.keras").exists() == nl.is_main()
    assert (folder / "log.csv").exists() == nl.is_main()
    history(note, fitted)
    weights(note, model)
    note("evaluate", model.evaluate(x, y, batch_size=50, verbose=0))
    note("predict", model.predict(x, batch_size=32, verbose=0))


@case
def a_message_for_every_variable(note: Note) -> None:
    x, y = points(67)
    model = nl.distribute(mlp(), strategy=nl.Plan("data", bucket_bytes=64))
    history(note, model.fit(x, y, batch_size=16, epochs=2, verbose=0))
    weights(note, model)


@case
def stops_early(note: Note) -> None:
    x, y = points(64)
    model = nl.distribute(mlp(optimizer=keras.optimizers.SGD(2.5)))
    stop = keras.callbacks.EarlyStopping("val_loss", patience=1, restore_best_weights=True)
    fitted = model.fit(x, y, batch_size=16, epochs=9, verbose=0, validation_split=0.3, callbacks=[stop])
    note("epochs", len(fitted.history["loss"]))
    history(note, fitted)
    weights(note, model)


@case
def one_file(note: Note) -> None:
    """A tf.data pipeline over a single file, shuffled, of a length that is not known."""
    x, y = points(101)
    path = Path(tempfile.mkdtemp()) / "points.csv"
    path.write_text(
        "\n".join(",".join(map(repr, [*map(float, row), int(label)])) for row, label in zip(x, y, strict=True))
    )

    def parse(line: Any) -> Any:
        columns = tf.io.decode_csv(line, [tf.constant(0.0, tf.float64)] * 10 + [tf.constant(0, tf.int32)])
        return tf.stack(columns[:10]), columns[10]

    data = tf.data.TextLineDataset(str(path)).map(parse).shuffle(64, seed=3).batch(16)
    model = nl.distribute(mlp(optimizer="adam"))
    history(note, model.fit(data, epochs=3, verbose=0, validation_data=points(33, 1)))
    weights(note, model)


@case
def a_generator(note: Note) -> None:
    x, y = points(101)

    def batches() -> Iterator[Any]:
        while True:
            for start in range(0, 101, 16):
                yield x[start : start + 16], y[start : start + 16]

    model = nl.distribute(mlp())
    history(note, model.fit(batches(), steps_per_epoch=7, epochs=3, verbose=0, validation_data=points(33, 1)))
    weights(note, model)


@case
def a_py_dataset(note: Note) -> None:
    x, y = points(101)

    class Batches(keras.utils.PyDataset):  # type: ignore[misc]
        def __len__(self) -> int:
            return 7

        def __getitem__(self, number: int) -> Any:
            rows = slice(16 * number, 16 * number + 16)
            return x[rows], y[rows]

    model = nl.distribute(mlp())
    history(note, model.fit(Batches(), epochs=2, verbose=0, shuffle=False))
    weights(note, model)


@case
def cnn_batchnorm_synchronized(note: Note) -> None:
    draw = np.random.default_rng(0)
    x, y = draw.normal(size=(50, 8, 8, 2)), draw.integers(0, 3, 50)
    model = keras.Sequential(
        [
            keras.Input((8, 8, 2)),
            layers.Conv2D(6, 3, padding="same", use_bias=False),
            layers.BatchNormalization(synchronized=True),
            layers.ReLU(),
            layers.Conv2D(6, 3, strides=2, use_bias=False),
            layers.BatchNormalization(synchronized=True),
            layers.ReLU(),
            layers.GlobalAveragePooling2D(),
            layers.Dense(3, activation="softmax"),
        ]
    )
    model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    model = nl.distribute(model)
    history(note, model.fit(x, y, batch_size=16, epochs=3, verbose=0, validation_data=(x[:21], y[:21])))
    weights(note, model)


@case
def transformer(note: Note) -> None:
    draw = np.random.default_rng(0)
    x = draw.integers(1, 30, (51, 12))
    x[:, 7:] *= draw.integers(0, 2, (51, 5))  # padding, which the embedding masks
    y = draw.integers(0, 5, 51)
    tokens = keras.Input((12,), dtype="int32")
    hidden = layers.Embedding(30, 16, mask_zero=True)(tokens)
    attended = layers.MultiHeadAttention(2, 8)(hidden, hidden)
    hidden = layers.LayerNormalization()(hidden + attended)
    hidden = layers.LayerNormalization()(hidden + layers.Dense(16)(layers.Dense(32, activation="gelu")(hidden)))
    model = keras.Model(tokens, layers.Dense(5)(layers.GlobalAveragePooling1D()(hidden)))
    model.compile(
        keras.optimizers.Adam(1e-2, global_clipnorm=0.3),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy", keras.metrics.SparseCategoricalCrossentropy(from_logits=True)],
    )
    model = nl.distribute(model)
    history(note, model.fit(x, y, batch_size=16, epochs=3, verbose=0, validation_data=(x[:21], y[:21])))
    weights(note, model)


@case
def masked_tokens(note: Note) -> None:
    """A mean over the tokens that a mask leaves, and labels that are ignored."""
    draw = np.random.default_rng(0)
    x = draw.integers(1, 20, (27, 9)) * (np.arange(9) < draw.integers(2, 10, (27, 1)))
    y = np.where(x > 0, draw.integers(0, 6, (27, 9)), -1)
    tokens = keras.Input((9,), dtype="int32")
    hidden = layers.LSTM(8, return_sequences=True)(layers.Embedding(20, 8, mask_zero=True)(tokens))
    model = keras.Model(tokens, layers.Dense(6)(hidden))
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=-1))
    model = nl.distribute(model)
    history(note, model.fit(x, y, batch_size=8, epochs=3, verbose=0))
    weights(note, model)


@case
def lstm(note: Note) -> None:
    draw = np.random.default_rng(0)
    x, y = draw.normal(size=(37, 6, 3)), draw.normal(size=(37, 1))
    model = keras.Sequential([keras.Input((6, 3)), layers.LSTM(7), layers.Dense(1)])
    model.compile("rmsprop", "mse", metrics=["mae", keras.metrics.RootMeanSquaredError()])
    model = nl.distribute(model)
    history(note, model.fit(x, y, batch_size=8, epochs=3, verbose=0, validation_split=0.2))
    weights(note, model)


@case
def two_inputs_two_outputs(note: Note) -> None:
    draw = np.random.default_rng(0)
    a, b = draw.normal(size=(45, 5)), draw.normal(size=(45, 5))
    y, z = draw.normal(size=(45, 1)), draw.integers(0, 2, (45, 1))
    left, right = keras.Input((5,), name="left"), keras.Input((5,), name="right")
    shared = layers.Dense(8, activation="tanh")
    both = layers.concatenate([shared(left), shared(right)])
    model = keras.Model(
        {"left": left, "right": right},
        {"y": layers.Dense(1, name="y")(both), "z": layers.Dense(1, activation="sigmoid", name="z")(both)},
    )
    model.compile(
        "adam", {"y": "mse", "z": "binary_crossentropy"}, loss_weights={"y": 1.0, "z": 0.3}, metrics={"z": ["accuracy"]}
    )
    model = nl.distribute(model)
    fitted = model.fit({"left": a, "right": b}, {"y": y, "z": z}, batch_size=8, epochs=3, verbose=0)
    history(note, fitted)
    weights(note, model)


@case
def weighted_samples(note: Note) -> None:
    x, y = points(53)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="mean_with_sample_weight")
    heavy = np.random.default_rng(5).uniform(0.1, 3.0, 53)
    model = nl.distribute(mlp(loss=loss, weighted_metrics=["accuracy"]))
    history(note, model.fit(x, y, sample_weight=heavy, batch_size=8, epochs=2, verbose=0))
    weights(note, model)


@case
def weighted_classes(note: Note) -> None:
    x, y = points(53)
    model = nl.distribute(mlp())
    history(note, model.fit(x, y, class_weight={0: 1.0, 1: 2.0, 2: 0.5, 3: 0.1}, batch_size=8, epochs=2, verbose=0))
    weights(note, model)


@case
def a_sum_and_penalties(note: Note) -> None:
    x, y = points(29)
    model = keras.Sequential(
        [
            keras.Input((10,)),
            layers.Dense(8, kernel_regularizer="l2", activity_regularizer=keras.regularizers.L2(0.01)),
            layers.Dense(4, bias_constraint=keras.constraints.MaxNorm(0.5)),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="sum")
    model.compile(keras.optimizers.AdamW(1e-3, clipnorm=0.5, use_ema=True, ema_overwrite_frequency=3), loss)
    model = nl.distribute(model)
    history(note, model.fit(x, y, batch_size=8, epochs=2, verbose=0))
    weights(note, model)


@case
def accumulated_gradients(note: Note) -> None:
    x, y = points(64)
    optimizer = keras.optimizers.Adam(1e-2, gradient_accumulation_steps=3, global_clipnorm=0.2)
    model = nl.distribute(mlp(optimizer=optimizer))
    history(note, model.fit(x, y, batch_size=8, epochs=2, verbose=0))
    weights(note, model)


@case
def scaled_loss(note: Note) -> None:
    x, y = points(40)
    optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1), initial_scale=2.0**10)
    model = nl.distribute(mlp(optimizer=optimizer))
    history(note, model.fit(x, y, batch_size=8, epochs=2, verbose=0))
    weights(note, model)


@case
def several_steps_at_once(note: Note) -> None:
    x, y = points(101)
    model = nl.distribute(mlp(steps_per_execution=3))
    history(note, model.fit(x, y, batch_size=8, epochs=2, verbose=0, validation_data=points(33, 1)))
    weights(note, model)


@case
def eagerly(note: Note) -> None:
    x, y = points(29)
    model = nl.distribute(mlp(run_eagerly=True))
    history(note, model.fit(x, y, batch_size=8, epochs=1, verbose=0))
    weights(note, model)


@case
def fewer_samples_than_ranks(note: Note) -> None:
    """A last batch of one sample: some ranks hold a filler, which counts for nothing."""
    x, y = points(17)
    model = nl.distribute(mlp())
    history(note, model.fit(x, y, batch_size=8, epochs=2, verbose=0, validation_data=(x[:9], y[:9])))
    note("predict", model.predict(x[:1], verbose=0))
    weights(note, model)


@case
def single_batches(note: Note) -> None:
    x, y = points(30)
    model = nl.distribute(mlp())
    for start in range(0, 30, 7):
        rows = slice(start, start + 7)
        note(f"train {start}", model.train_on_batch(x[rows], y[rows], class_weight={0: 2.0, 1: 1.0, 2: 1.0, 3: 1.0}))
    note("test", model.test_on_batch(x, y))
    note("predict", model.predict_on_batch(x[:11]))
    weights(note, model)


@case
def built_by_its_data(note: Note) -> None:
    """A model without an input shape: its variables are made in fit."""
    x, y = points(40)
    model = keras.Sequential([layers.Dense(8, activation="tanh"), layers.Dense(4)])
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
    model = nl.distribute(model)
    history(note, model.fit(x, y, batch_size=8, epochs=2, verbose=0))
    weights(note, model)


@case
def shares_of_other_shapes(note: Note) -> None:
    """A function is traced anew where its shapes are: more often on one rank than on the other."""
    x, y = points(17)
    model = nl.distribute(mlp())
    for start, rows in ((0, 9), (9, 8), (0, 3), (3, 7)):
        note(f"train {start} {rows}", model.train_on_batch(x[start : start + rows], y[start : start + rows]))
        note(f"predict {start} {rows}", model.predict_on_batch(x[start : start + rows]))
    layer, optimizer = keras.Sequential([keras.Input((10,)), layers.Dense(4)]), keras.optimizers.SGD(0.1)
    layer, optimizer, data = nl.distribute(layer, optimizer, tf.data.Dataset.from_tensor_slices((x, y)).batch(9))

    @tf.function  # type: ignore[untyped-decorator]
    def step(x: Any, y: Any) -> Any:
        for _ in range(2):
            with tf.GradientTape() as tape:
                rows = keras.losses.sparse_categorical_crossentropy(y, layer(x), from_logits=True)
                loss = tf.reduce_mean(rows)
            optimizer.apply(tape.gradient(loss, layer.trainable_variables), layer.trainable_variables)
        return nl.mean(loss), nl.gather(rows)

    for number, (x_, y_) in enumerate(data):
        loss, rows = step(x_, y_)
        note(f"loss {number}", loss)
        note(f"rows {number}", rows)
    weights(note, model)


@case
def predicted_first(note: Note) -> None:
    """A compiled model is asked before it is trained, and saved and loaded by every rank."""
    x, y = points(29)
    model = nl.distribute(mlp())
    note("before", model.predict(x, batch_size=9, verbose=0))
    model.fit(
        x, y, batch_size=9, epochs=1, verbose=0, callbacks=keras.callbacks.CallbackList(add_history=True, model=model)
    )
    path = Path(tempfile.gettempdir()) / f"nearlinear-{nl.world_size()}.keras"
    model.save(path)
    note("loaded", keras.models.load_model(path, compile=False).predict(x, verbose=0))


@case
def logs_of_its_own(note: Note) -> None:
    """Logs that are a metric's result under another name, or a number under a metric's name."""

    class Own(keras.Sequential):  # type: ignore[misc]
        def train_step(self, data: Any) -> Any:
            x, y = data
            with tf.GradientTape() as tape:
                loss = self.compute_loss(x, y, self(x, training=True))
            found = tape.gradient(loss, self.trainable_variables)
            clipped, norm = tf.clip_by_global_norm(nl.mean(found), 0.2)
            self.optimizer.apply_gradients(zip(clipped, self.trainable_variables, strict=True))
            self.cost.update_state(loss)
            return {"loss": loss, "mean": self.cost.result(), "norm": norm}

    model = Own([keras.Input((10,)), layers.Dense(8, activation="tanh"), layers.Dense(4)])
    model.cost = keras.metrics.Mean(name="cost")
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    model = nl.distribute(model)
    history(note, model.fit(*points(29), batch_size=8, epochs=2, verbose=0))
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    for key, values in model.fit(*points(29), batch_size=8, epochs=2, verbose=0).history.items():
        note(f"compiled again {key}", values)
    weights(note, model)


@case
def batchnorm_in_a_loop_of_its_own(note: Note) -> None:
    x, y = points(29)
    model = keras.Sequential([keras.Input((10,)), layers.BatchNormalization(synchronized=True), layers.Dense(4)])
    optimizer = keras.optimizers.SGD(0.1)
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(8)
    model, optimizer, data = nl.distribute(model, optimizer, data)
    for x_, y_ in data:
        with tf.GradientTape() as tape:
            rows = keras.losses.sparse_categorical_crossentropy(y_, model(x_, training=True), from_logits=True)
            loss = tf.reduce_mean(rows)
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
    weights(note, model)


@case
def losses_that_mix_samples(note: Note) -> None:
    """One number for a batch that is no mean over its samples: the loss of the whole batch is taken."""
    x, y = points(29)
    hot = np.eye(4)[y]

    def over_valid(y_true: Any, y_pred: Any) -> Any:
        cost = keras.losses.categorical_crossentropy(y_true, y_pred, from_logits=True)
        valid = keras.ops.cast(y_true[:, 0] < 1, cost.dtype)
        return keras.ops.sum(cost * valid) / keras.ops.sum(valid)

    class OfSums(keras.losses.Loss):  # type: ignore[misc]
        def call(self, y_true: Any, y_pred: Any) -> Any:
            return keras.losses.CategoricalCrossentropy(from_logits=True, reduction="sum")(y_true, y_pred)

    for name, loss in {"dice": keras.losses.Dice(), "own": over_valid, "sums": OfSums()}.items():
        model = nl.distribute(mlp(loss=loss, metrics=[]))
        note(f"{name} loss", model.fit(x, hot, batch_size=8, epochs=2, verbose=0).history["loss"])
        note(f"{name} weight", model.get_weights()[0])


@case
def compiled_again(note: Note) -> None:
    """Layers are frozen, the model is trained, they are made trainable, and it is compiled and trained again."""
    x, y = points(40)
    model = mlp()
    model.layers[0].trainable = False
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="sum"))
    model = nl.distribute(model)
    history(note, model.fit(x, y, batch_size=8, epochs=1, verbose=0))
    model.layers[0].trainable = True
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
    note("again", model.fit(x, y, batch_size=8, epochs=2, verbose=0).history["accuracy"])
    weights(note, model)


@case
def a_metric_of_its_own(note: Note) -> None:
    """Metrics that are no sums: a largest value, and a function that gives one number per batch."""

    class Largest(keras.metrics.Metric):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__(name="largest")
            self.value = self.add_variable((), "zeros", name="value")

        def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
            self.value.assign(keras.ops.maximum(self.value, keras.ops.max(y_pred)))

        def result(self) -> Any:
            return self.value

    def spread(y_true: Any, y_pred: Any) -> Any:
        return keras.ops.std(y_pred)

    x, y = points(45)
    model = nl.distribute(mlp(metrics=["accuracy", Largest(), spread]))
    history(note, model.fit(x, y, batch_size=8, epochs=2, verbose=0, validation_split=0.2))


@case
def a_step_of_its_own(note: Note) -> None:
    class Own(keras.Model):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.inner = keras.Sequential([keras.Input((10,)), layers.Dense(8, activation="tanh"), layers.Dense(4)])
            self.tracker = keras.metrics.Mean(name="cost")

        def call(self, x: Any) -> Any:
            return self.inner(x)

        @property
        def metrics(self) -> list[Any]:
            return [self.tracker]

        def train_step(self, data: Any) -> Any:
            x, y = data
            with tf.GradientTape() as tape:
                cost = keras.ops.mean(keras.losses.sparse_categorical_crossentropy(y, self(x), from_logits=True))
            found = tape.gradient(cost, self.trainable_variables)
            self.optimizer.apply_gradients(zip(found, self.trainable_variables, strict=True))
            self.tracker.update_state(cost)
            return {"cost": self.tracker.result(), "last": cost}

    x, y = points(37)
    model = Own()
    model.compile(optimizer="adam")
    model = nl.distribute(model)
    history(note, model.fit(x, y, batch_size=8, epochs=2, verbose=0))
    weights(note, model)


@case
def gan(note: Note) -> None:
    class Gan(keras.Model):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.generator = keras.Sequential([keras.Input((3,)), layers.Dense(10)])
            self.critic = keras.Sequential([keras.Input((10,)), layers.Dense(8, activation="tanh"), layers.Dense(1)])

        def compile(self, of_critic: Any, of_generator: Any) -> None:
            super().compile()
            self.of_critic, self.of_generator = of_critic, of_generator

        def train_step(self, data: Any) -> Any:
            real, noise = data
            with tf.GradientTape() as tape:
                apart = tf.reduce_mean(self.critic(self.generator(noise))) - tf.reduce_mean(self.critic(real))
            found = tape.gradient(apart, self.critic.trainable_variables)
            self.of_critic.apply_gradients(zip(found, self.critic.trainable_variables, strict=True))
            with tf.GradientTape() as tape:
                cost = -tf.reduce_mean(self.critic(self.generator(noise)))
            found = tape.gradient(cost, self.generator.trainable_variables)
            self.of_generator.apply_gradients(zip(found, self.generator.trainable_variables, strict=True))
            return {"apart": apart, "cost": cost}

    draw = np.random.default_rng(0)
    model = Gan()
    model.compile(keras.optimizers.Adam(1e-3), keras.optimizers.RMSprop(1e-3))
    model = nl.distribute(model)
    fitted = model.fit(draw.normal(size=(44, 10)), draw.normal(size=(44, 3)), batch_size=8, epochs=2, verbose=0)
    history(note, fitted)
    weights(note, model.generator)
    weights(note, model.critic)


@case
def a_loop_of_its_own(note: Note) -> None:
    x, y = points(53)
    model = keras.Sequential([keras.Input((10,)), layers.Dense(8, activation="tanh"), layers.Dense(4)])
    optimizer = keras.optimizers.Adam(1e-2)
    data = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(53, seed=1).batch(8)
    model, optimizer, data = nl.distribute(model, optimizer, data)

    @tf.function  # type: ignore[untyped-decorator]
    def step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(keras.losses.sparse_categorical_crossentropy(y, model(x), from_logits=True))
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        return loss

    for epoch in range(2):
        for number, (x_, y_) in enumerate(data):
            note(f"loss {epoch} {number}", nl.mean(step(x_, y_)))
            note(f"right {epoch} {number}", nl.total(tf.reduce_sum(tf.cast(tf.argmax(model(x_), 1) == y_, tf.float64))))
            note(f"rows {epoch} {number}", nl.gather(x_))
        if epoch == 0:
            folder = tempfile.gettempdir() + f"/nearlinear-keras-{nl.world_size()}"
            nl.save(folder, model, optimizer, data, epoch=epoch)
            nl.load(folder, model, optimizer, data)
    weights(note, model)


@case
def a_contrastive_loss(note: Note) -> None:
    """A loss over the gathered batch has the gradients of one process."""
    draw = np.random.default_rng(0)
    data = tf.data.Dataset.from_tensor_slices((draw.normal(size=(29, 6)), draw.normal(size=(29, 6)))).batch(8)
    model = keras.Sequential([keras.Input((6,)), layers.Dense(5)])
    optimizer = keras.optimizers.SGD(0.1)
    model, optimizer, data = nl.distribute(model, optimizer, data)
    for number, (a, b) in enumerate(data):
        with tf.GradientTape() as tape:
            u, v = nl.gather(model(a)), nl.gather(model(b))
            scores = tf.matmul(u, v, transpose_b=True)
            loss = tf.reduce_mean(
                keras.losses.sparse_categorical_crossentropy(tf.range(tf.shape(u)[0]), scores, from_logits=True)
            )
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        note(f"loss {number}", loss)
    weights(note, model)
