"""Turning an unmodified ``fit`` into runs of a pipeline, one stage per process.

At the first batch the model is read as steps, looked at on a few samples, timed, and cut; then every rank lets go of
what lies in other stages. From then on the model's train, test and predict functions run this rank's stage.

    every rank       the whole batch (only the first stage reads it, and the last one its targets)
    the last rank    loss, metrics; their values go to all, so logs, history and callbacks are the same everywhere
    each rank        steps its own variables
    saving           every rank calls it, rank 0 gets all variables for as long as that takes and writes a plain file
"""

from __future__ import annotations

import functools
import inspect
import itertools
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import tree
from keras.src.backend.tensorflow.trainer import TensorFlowTrainer
from keras.src.trainers.trainer import Trainer

from nearlinear import events
from nearlinear.core.plan import Plan
from nearlinear.errors import InputError
from nearlinear.tensorflow.callbacks import on_every_rank
from nearlinear.tensorflow.capture import flat_inputs
from nearlinear.tensorflow.pipeline.executor import Executor, FromLoss
from nearlinear.tensorflow.pipeline.first_batch import Cut, plan_of, require_one_batch, too_many
from nearlinear.tensorflow.pipeline.gradients import over_stages
from nearlinear.tensorflow.pipeline.optimizer import Stepping
from nearlinear.tensorflow.pipeline.penalties import Penalties
from nearlinear.tensorflow.pipeline.split import Split, split
from nearlinear.tensorflow.pipeline.stages import Stage
from nearlinear.tensorflow.pipeline.tail import Batch, Tail
from nearlinear.tensorflow.pipeline.transfer import Links
from nearlinear.tensorflow.pipeline.variables import Held
from nearlinear.tensorflow.session import Session

_PER_STAGE = 4  # microbatches: the pipeline then stands idle for at most a fifth of the time
_numbers = itertools.count()  # of pipelines, the same on all ranks


def distribute_pipeline(model: keras.Model, session: Session, plan: Plan) -> None:
    """Let ``model``'s ``fit``, ``evaluate`` and ``predict`` run in stages, one per process.

    Args:
        model: A compiled model.
        session: The run.
        plan: Its number of microbatches; stages are as many as ranks.

    Raises:
        InputError: The model is not compiled, trains in a way of its own, or has fewer layers than there are ranks.
    """
    _require_trainable(model)
    stages = plan.stages_on(session.size)
    if stages != session.size:
        raise InputError(
            f"{stages} stages on {session.size} processes would be {session.size // stages} copies of a Keras "
            f"pipeline, and there can be one; start {stages} processes, or leave `stages` out"
        )
    if session.size == 1:
        return
    if model.jit_compile:
        session.notice("jit_compile is left out: the stages of a pipeline run without XLA")
    layers = [each for each in model._flatten_layers(include_self=False) if not each._layers]
    if model.built and len(layers) < stages:
        raise too_many(stages, len(layers), model)
    Pipeline(model, session, plan)


@dataclass(frozen=True)
class _Ready:
    """What runs a step, for one ``compile``.

    Args:
        marks: What it was made for.
        executor: The stage's passes.
        stepping: The optimizer's step.
        tail: Loss and metrics.
    """

    marks: list[int]
    executor: Executor
    stepping: Stepping
    tail: Tail


class Pipeline:
    """A model of which every rank runs a stage.

    Args:
        model: The model; its functions are replaced.
        session: The run.
        plan: How many microbatches.
    """

    def __init__(self, model: keras.Model, session: Session, plan: Plan) -> None:
        self.model, self.session, self.mesh = model, session, session.connected
        self.microbatches = plan.microbatches or _PER_STAGE * session.size
        self.number = next(_numbers)
        self.name = f"pipeline {self.number}"
        self._held, self._links = Held(self.mesh, self.name), Links(self.mesh, self.name)
        self._plan: Cut | None = None
        self._ready: _Ready | None = None
        self._results: dict[str, Any] = {}
        self._order: list[str] = []
        self._begun = False  # whether this call of fit, evaluate or predict has seen a batch
        self._instead()

    # ---- what stands in for the model's own

    def _instead(self) -> None:
        own: dict[str, Any] = {
            "make_train_function": self._make("train_function", self._train),
            "make_test_function": self._make("test_function", self._test),
            "make_predict_function": self._make("predict_function", self._predict),
            "get_metrics_result": self._metrics_result,
            "_get_metrics_result_or_logs": lambda logs: logs,
            "_flatten_metrics_in_order": self._in_order,
            "get_weights": self._get_weights,
            "set_weights": self._set_weights,
            "load_weights": self._load_weights,
            "train_function": None,
            "test_function": None,
            "predict_function": None,
        }
        own.update((name, self._written_by_one(name)) for name in ("save", "save_weights", "export"))
        own.update((name, self._loop(name)) for name in ("fit", "evaluate", "predict"))
        vars(self.model).update(own)

    def _loop(self, name: str) -> Any:
        method = getattr(type(self.model), name)
        signature = inspect.signature(method)

        def loop(*args: Any, **kwargs: Any) -> Any:
            given = signature.bind(self.model, *args, **kwargs)
            if self.session.rank:
                given.arguments["verbose"] = 0
            if name == "fit":
                given.arguments["callbacks"] = on_every_rank(
                    given.arguments.get("callbacks"), self.session, lambda steps: None
                )
            with self.session.own_errors():
                return method(*given.args, **given.kwargs)

        return functools.wraps(method)(loop)

    def _make(self, name: str, function: Any) -> Any:
        def make(force: bool = False) -> Any:
            self._begun = False
            vars(self.model)[name] = function
            return function

        return make

    def _metrics_result(self) -> dict[str, Any]:
        if self._ready is not None and self._ready.tail.computing:
            found: dict[str, Any] = Trainer.get_metrics_result(self.model)
            return found
        return dict(self._results)

    def _in_order(self, logs: dict[str, Any]) -> Any:
        found = [logs[name] for name in self._order]
        return found[0] if len(found) == 1 else found

    def _get_weights(self) -> list[Any]:
        with self._held.together(range(self.session.size), self.model.weights):
            return list(type(self.model).get_weights(self.model))

    def _set_weights(self, weights: Sequence[Any]) -> None:
        with self._held.room():
            type(self.model).set_weights(self.model, weights)

    def _load_weights(self, *args: Any, **kwargs: Any) -> Any:
        with self._held.room():
            return type(self.model).load_weights(self.model, *args, **kwargs)

    def _written_by_one(self, name: str) -> Any:
        def write(*args: Any, **kwargs: Any) -> Any:
            found = None
            with self._held.together([0], [*self.model.variables, *self.model.optimizer.variables]):
                if self.session.rank == 0:
                    found = getattr(type(self.model), name)(self.model, *args, **kwargs)
            self.mesh.barrier("saving the model")
            return found

        return write

    # ---- a step

    def _train(self, iterator: Iterator[Any]) -> dict[str, Any]:
        return self._steps(iterator, self._train_step, training=True)

    def _test(self, iterator: Iterator[Any]) -> dict[str, Any]:
        return self._steps(iterator, self._test_step, training=False)

    def _steps(self, iterator: Iterator[Any], act: Any, *, training: bool) -> dict[str, Any]:
        logs: dict[str, Any] | None = None
        for _ in range(int(self.model.steps_per_execution)):
            try:
                data = next(iterator)
            except (StopIteration, tf.errors.OutOfRangeError):
                if logs is None and training:
                    self._count_what_keras_counts(iterator)
                break
            logs = act(_batch_of(data, _fixed(iterator)))
        if logs is None:
            raise StopIteration
        return logs

    def _count_what_keras_counts(self, iterator: Any) -> None:
        """Count a step that there was no batch for.

        Keras learns that a data set of unknown length is over from a step that fails, after it has counted it: the
        counter waits for no data. Schedules and bias corrections go by that number.
        """
        compiled = isinstance(iterator, tf.data.Iterator) and not self.model.run_eagerly
        if compiled and self.model.steps_per_execution == 1 and self._ready is not None:
            self._ready.stepping.count()

    def _train_step(self, batch: Batch) -> dict[str, Any]:
        began, waited = time.perf_counter(), self.mesh.waited_s
        ready = self._at(batch)
        self.mesh.step += 1
        run, outputs = ready.executor.forward(flat_inputs(self.model, batch.x), self.microbatches, training=True)
        self.session.samples = run.bounds[-1][1]
        loss = None
        if outputs is not None:
            found, added, penalties = ready.tail.loss_gradients(batch, outputs)
            loss = FromLoss(
                found,
                dict(zip(outputs.added, added, strict=True)),
                dict(zip(outputs.penalties, penalties, strict=True)),
            )
        own, gradients = ready.stepping.own, ready.executor.backward(run, loss)
        gradients = over_stages(own, gradients, self._held, self._links)
        self._links.flush()
        with self.session.own_errors():
            ready.stepping.step(gradients)
        logs = self._told(None if outputs is None else ready.tail.metrics(batch, outputs))
        waited = self.mesh.waited_s - waited
        self.session.waited_s += waited
        events.publish(
            "step",
            model=self.number,
            step=self.mesh.step,
            seconds=time.perf_counter() - began,
            waited=waited,
            samples=run.bounds[-1][1],
            parameters=lambda: [(each.path, each.numpy()) for each in own],
        )
        return logs

    def _test_step(self, batch: Batch) -> dict[str, Any]:
        ready = self._at(batch)
        _, outputs = ready.executor.forward(flat_inputs(self.model, batch.x), self.microbatches, training=False)
        if outputs is not None:
            ready.tail.loss(batch, outputs)
        return self._told(None if outputs is None else ready.tail.metrics(batch, outputs))

    def _told(self, metrics: dict[str, Any] | None) -> dict[str, Any]:
        """Return the metrics, as the last rank has them."""
        what, tag, last = "the metrics", f"{self.name}:metrics", self.session.size - 1
        if metrics is None:
            said = self.mesh.receive(last, tag, what).tobytes()
        else:
            values = {name: np.asarray(value).tolist() for name, value in metrics.items()}
            order = Trainer._flatten_metrics_in_order(self.model, {name: name for name in values})
            said = json.dumps([values, [order] if isinstance(order, str) else order]).encode()
            self._links.flush()
            for rank in range(last):
                self.mesh.send(rank, tag, said, what)
        values, self._order = json.loads(said)
        self._results = {name: np.array(each) if isinstance(each, list) else each for name, each in values.items()}
        return dict(self._results)

    def _predict(self, data: Sequence[Any]) -> Any:
        found = [self._predict_step(_batch_of(each)) for each in data]
        return found[0] if len(found) == 1 else tree.map_structure(lambda *each: tf.concat(each, 0), *found)

    def _predict_step(self, batch: Batch) -> Any:
        ready, last = self._at(batch), self.session.size - 1
        _, outputs = ready.executor.forward(flat_inputs(self.model, batch.x), self.microbatches, training=False)
        if outputs is None:
            tensors = self._links.receive_once(last, "predicted", "the predictions")
        else:
            tensors = list(outputs.tensors)
            for rank in range(last):
                self._links.send_once(rank, "predicted", tensors, "the predictions")
            self._links.flush()
        assert self._plan is not None
        return self._plan.program.pack(tensors)

    # ---- made ready

    def _at(self, batch: Batch) -> _Ready:
        """Return what runs a step on a batch like this one."""
        if not self._begun:
            require_one_batch(batch, self.session)
            self._begun = True
        if self._plan is None:
            self._plan = plan_of(self.model, batch, self.session, self.microbatches, self.name)
            for variable, ranks in zip(self._plan.variables, self._holders(self._plan), strict=True):
                self._held.place(variable, ranks)
            self._held.make_equal(self._plan.variables)
        trained = self.model.trainable_variables
        marks = [id(self.model.optimizer), id(self.model._compile_loss), *map(id, trained)]
        if self._ready is None or self._ready.marks != marks:
            self._ready = self._made_ready(self._plan, trained, marks)
        return self._ready

    def _cut(self, plan: Cut, trained: Sequence[keras.Variable]) -> Split:
        known = {id(each) for each in trained}
        positions = {number for number, each in enumerate(plan.variables) if id(each) in known}
        steps = [(step.reads, step.makes) for step in plan.program.steps]
        outputs, count = plan.program.outputs, len(plan.variables)
        return split(plan.stage_of, steps, plan.program.inputs, outputs, plan.uses, positions, count)

    def _holders(self, plan: Cut) -> tuple[tuple[int, ...], ...]:
        return self._cut(plan, []).holders

    def _made_ready(self, plan: Cut, trained: list[keras.Variable], marks: list[int]) -> _Ready:
        """Let the optimizer step what lies here, and let go of the rest."""
        if self._ready is not None:
            self._held.forget(self._ready.stepping.state)
        held, rank = self._held, self.session.rank
        stepping = Stepping(self.model.optimizer, trained, held, self.session, self.name)
        held.let_go()
        cut = self._cut(plan, trained)
        stage = Stage(plan.program, cut.parts[rank], self.model, [each.value for each in stepping.own])
        counted = [(held.ranks_of(each)[0], each) for each in trained if each.regularizer is not None]
        penalties = Penalties([each for owner, each in counted if owner == rank])
        penalized = sorted({owner for owner, _ in counted})
        executor = Executor(cut, stage, self._links, penalties, penalized, stepping.own)
        return _Ready(marks, executor, stepping, Tail(plan.program, self.model))


def _require_trainable(model: keras.Model) -> None:
    if not model.compiled or model.optimizer is None:
        raise InputError("the model has no optimizer yet; call model.compile(...) before nl.distribute")
    for name in ("train_step", "test_step", "predict_step"):
        if getattr(type(model), name) is not getattr(TensorFlowTrainer, name):
            raise InputError(
                f"{type(model).__name__} has a {name} of its own, which a pipeline cannot take apart; use strategy "
                "'data', or override compute_loss and compute_metrics instead"
            )


def _batch_of(data: Any, fixed: bool = False) -> Batch:
    """Return what an iterator gave, as tensors."""

    def tensor(each: Any) -> Any:
        if each is None or isinstance(each, tf.experimental.Optional):
            return None
        return each if isinstance(each, tf.SparseTensor | tf.RaggedTensor) else tf.convert_to_tensor(each)

    x, y, weight = keras.utils.unpack_x_y_sample_weight(tree.map_structure(tensor, data))
    return Batch(x, y, weight, fixed)


def _fixed(iterator: Any) -> bool:
    """Return whether an iterator says how many samples all its batches have."""
    specs = [each for each in tf.nest.flatten(getattr(iterator, "element_spec", ())) if isinstance(each, tf.TensorSpec)]
    return all(each.shape.rank is not None and (not each.shape.rank or each.shape[0] is not None) for each in specs)
