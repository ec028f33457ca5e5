"""Turning ``fit``, ``evaluate`` and ``predict`` of one process into those of N: the model keeps its own, with hooks.

    fit           reads shares of the batches (data.py), and is otherwise Keras's own
    train_step    the model's own, of the share; then metrics, statistics and logs become the batch's (metrics.py)
    apply         of the optimizer: gradients become the batch's before anything else is done to them (reducer.py)
    predict_step  the model's own, of the share; then the ranks' rows are joined

So every rank has the history, the logs and the predictions of one process, and its callbacks decide the same. What they
write is written by rank 0 alone (callbacks.py).
"""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf
from keras import tree
from keras.src import backend
from keras.src.trainers.data_adapters import array_slicing, data_adapter_utils, get_data_adapter
from keras.src.utils.python_utils import pythonify_logs

from nearlinear import events
from nearlinear.core.plan import Plan
from nearlinear.errors import InputError
from nearlinear.tensorflow import batchnorm
from nearlinear.tensorflow.callbacks import on_every_rank
from nearlinear.tensorflow.data import SharedData, compare_marks, share_of
from nearlinear.tensorflow.exchange import join_rows, total
from nearlinear.tensorflow.losses import share_loss
from nearlinear.tensorflow.metrics import MetricStates, agree_on
from nearlinear.tensorflow.reducer import Reducer
from nearlinear.tensorflow.session import Session, Share
from nearlinear.tensorflow.state import Replicas

_STEPS = ("train_step", "test_step", "predict_step")
_LOOPS = ("fit", "evaluate", "predict", "train_on_batch", "test_on_batch", "predict_on_batch")
_WRITERS = ("save", "save_weights", "export")
_OWN = "_nearlinear_own_apply"


class Training:
    """The hooks of one model.

    Args:
        model: A Keras model.
        optimizers: Those whose gradients are the model's.
        session: This process's part in the run.
        plan: How it is trained.
        number: Of the distribute call.
    """

    no_xla = "XLA cannot hold the exchange of gradients"  # why it is turned off

    def __init__(
        self, model: keras.Model, optimizers: Sequence[Any], session: Session, plan: Plan, number: int
    ) -> None:
        self._whole, self._session, self._plan, self.number = model, session, plan, number - 1
        names = (*_STEPS, *_LOOPS, *_WRITERS, "compile", "compute_metrics")
        self._own = {name: getattr(model, name) for name in names}
        self._iterations = 0
        self._attach(optimizers)
        for name in (*_STEPS, *_LOOPS, "compile", "compute_metrics"):
            setattr(model, name, _in_place_of(self._own[name], getattr(self, f"_{name}")))
        for name in _WRITERS:
            setattr(model, name, _in_place_of(self._own[name], self._writing(name)))
        after_batch = weakref.WeakMethod(self._after_batch)
        session.after_batch.append(lambda: act() if (act := after_batch()) is not None else None)

    def _attach(self, optimizers: Sequence[Any]) -> None:
        """Hook what ``compile`` makes."""
        model, session = self._whole, self._session
        self._optimizers = list(optimizers)
        self._states: MetricStates | None = None
        self.replicas = Replicas(model, optimizers, session, self._plan.check_every)
        self.reducers: list[Reducer] = []
        for optimizer in self._optimizers:
            self._hook(optimizer)
        for name in ("train_function", "test_function", "predict_function"):
            setattr(model, name, None)  # one that was traced before knows nothing of the hooks
        if model.compiled and model.jit_compile:
            model.jit_compile = False
            session.notice(f"jit_compile is turned off: {self.no_xla}")
        if model.compiled and events.listened_to("gradients"):
            model.steps_per_execution = 1
        if session.mesh is not None:
            share_loss(model, session)
            batchnorm.synchronise(model, session)

    def _hook(self, optimizer: Any) -> None:
        """Let an optimizer step by the gradients of the whole batch."""
        session = self._session
        session.optimizers += 1
        reducer = Reducer(
            session, session.optimizers, compress=self._plan.compress, bucket_bytes=self._plan.bucket_bytes
        )
        reducer.noted = {} if events.listened_to("gradients") else None
        optimizer.apply = _combining(optimizer, reducer)
        self.reducers.append(reducer)

    def _compile(self, *arguments: Any, **options: Any) -> None:
        """Compile again, as after layers were made trainable."""
        self._own["compile"](*arguments, **options)
        self._attach(optimizers_of(self._whole))

    # ---- loops

    def _fit(self, *arguments: Any, **options: Any) -> Any:
        given = self._bound("fit", arguments, options)
        data, validation = _split_off(given)
        given["x"] = self._shared(
            *data,
            batch_size=given["batch_size"],
            steps_per_epoch=given["steps_per_epoch"],
            shuffle=given["shuffle"],
            class_weight=given["class_weight"],
        )
        if validation is not None:
            x, y, weight = data_adapter_utils.unpack_x_y_sample_weight(validation)
            given["validation_data"] = self._shared(
                x,
                y,
                weight,
                batch_size=given["validation_batch_size"] or given["batch_size"],
                steps_per_epoch=given["validation_steps"],
            )
        given |= {"validation_split": 0.0, "class_weight": None, "shuffle": False, "batch_size": None}
        given["callbacks"] = on_every_rank(given["callbacks"], self._session, self.stepped)
        given["verbose"] = self._verbose(given["verbose"])
        self._begin(given["x"])
        with self._session.own_errors():
            return self._fit_on(given)

    def _fit_on(self, given: dict[str, Any]) -> Any:
        """Call the model's own ``fit`` with shares in place of the data."""
        return self._own["fit"](**given)

    def _evaluate(self, *arguments: Any, **options: Any) -> Any:
        if options.get("_use_cached_eval_dataset"):  # within fit
            return self._own["evaluate"](*arguments, **options)
        given = self._bound("evaluate", arguments, options)
        data = given.pop("x"), given.pop("y"), given.pop("sample_weight")
        given["x"] = self._shared(*data, batch_size=given.pop("batch_size"), steps_per_epoch=given["steps"])
        given["verbose"] = self._verbose(given["verbose"])
        self._begin(given["x"])
        with self._session.own_errors():
            return self._own["evaluate"](**given)

    def _predict(self, *arguments: Any, **options: Any) -> Any:
        given = self._bound("predict", arguments, options)
        given["x"] = self._shared(
            given["x"], None, None, batch_size=given.pop("batch_size"), steps_per_epoch=given["steps"]
        )
        given["verbose"] = self._verbose(given["verbose"])
        self._begin_on(given["x"].element_spec, alone=True)
        with self._session.own_errors():
            return self._own["predict"](**given)

    def _train_on_batch(self, *arguments: Any, **options: Any) -> Any:
        given = self._bound("train_on_batch", arguments, options)
        model = self._whole
        model._assert_compile_called("train_on_batch")
        if given["class_weight"] is not None:
            if given["sample_weight"] is not None:
                raise ValueError("Arguments `sample_weight` and `class_weight` cannot be specified at the same time.")
            given["sample_weight"] = data_adapter_utils.class_weight_to_sample_weights(
                given["y"], given["class_weight"]
            )
        return self._on_batch(given, "train")

    def _test_on_batch(self, *arguments: Any, **options: Any) -> Any:
        self._whole._assert_compile_called("test_on_batch")
        return self._on_batch(self._bound("test_on_batch", arguments, options), "test")

    def _on_batch(self, given: dict[str, Any], kind: str) -> Any:
        model = self._whole
        batch = share_of((given["x"], given["y"], given["sample_weight"]), self._session.rank, self._session.size)
        self._begin_on(batch[0])
        getattr(model, f"make_{kind}_function")()
        model.reset_metrics()
        with self._session.own_errors():
            logs = pythonify_logs(getattr(model, f"{kind}_function")(iter([batch])))
        if kind == "train":
            self.stepped(1)
        return logs if given["return_dict"] else model._flatten_metrics_in_order(logs)

    def _predict_on_batch(self, x: Any) -> Any:
        model = self._whole
        batch = share_of((x,), self._session.rank, self._session.size)
        self._begin_on(batch[0], alone=True)
        model.make_predict_function()
        with self._session.own_errors():
            return tree.map_structure(lambda each: each.numpy(), model.predict_function([batch]))

    def _bound(self, name: str, arguments: Sequence[Any], options: dict[str, Any]) -> dict[str, Any]:
        if name != "predict":
            self._whole._assert_compile_called(name)
        bound = inspect.signature(self._own[name]).bind(*arguments, **options)
        bound.apply_defaults()
        given = dict(bound.arguments)
        given |= given.pop("kwargs", {})
        return given

    def _shared(self, x: Any, y: Any, weight: Any, **options: Any) -> SharedData:
        if isinstance(x, SharedData):
            return x
        adapter = get_data_adapter(x, y, weight, **options)
        return SharedData(adapter, self._session.rank, self._session.size)

    def _verbose(self, verbose: Any) -> Any:
        return verbose if self._session.rank == 0 else 0

    def _writing(self, name: str) -> Callable[..., Any]:
        def write(*arguments: Any, **options: Any) -> Any:
            """Write on rank 0; on another wait until that is done. Rank 0 waits for nobody: it may call this alone."""
            mesh = self._session.mesh
            if mesh is None:
                return self._own[name](*arguments, **options)
            if mesh.rank:
                mesh.receive(0, "saved", f"waiting for rank 0 to save the model ({name})")
                return None
            written = self._own[name](*arguments, **options)
            for peer in mesh.peers:
                mesh.send(peer, "saved", b"", "saying that the model is saved")
            return written

        return write

    # ---- between steps

    def stepped(self, steps: int) -> None:
        """Take note that so many steps are over; all ranks call it."""
        self.replicas.stepped(steps)
        if self.reducers and self.reducers[0].noted is not None:
            found = {name: each for reducer in self.reducers for name, each in (reducer.noted or {}).items()}
            events.publish("gradients", model=self.number, gradients=lambda: list(found.items()))
        if events.listened_to("step"):
            events.publish(
                "step",
                model=self.number,
                step=self.replicas.step,
                seconds=0.0,
                waited=0.0,
                samples=self._session.samples,
                parameters=lambda: [(each.path, each) for each in self._whole.trainable_variables],
                options={
                    f"learning_rate of optimizer {place}" if place else "learning_rate": float(each.learning_rate)
                    for place, each in enumerate(self._optimizers)
                },
            )

    def _after_batch(self) -> None:
        """Find out whether a loop of the script's own has taken a step, and take note."""
        iterations = sum(int(optimizer.iterations) for optimizer in self._optimizers)
        if iterations > self._iterations:
            self._iterations = iterations
            if self._session.mesh is not None:
                agree_on(self._whole, self._session)
            self.stepped(1)

    # ---- before the first step

    def _begin(self, data: SharedData) -> None:
        self._begin_on(data.element_spec)

    def _begin_on(self, batch: Any, *, alone: bool = False) -> None:
        """Build what is not built, and make all ranks start alike.

        Args:
            batch: What a batch looks like.
            alone: The model alone is needed, without losses and metrics.
        """
        model = self._whole
        self._session.seen = tree.map_structure(
            lambda each: tf.TensorSpec(each.shape, each.dtype), data_adapter_utils.unpack_x_y_sample_weight(batch)[0]
        )
        if not is_built(model, alone=alone):
            try:
                if alone:
                    backend.compute_output_spec(model, tree.map_structure(_symbolic, self._session.seen))
                else:
                    model._symbolic_build(data_batch=batch)
            except (RuntimeError, ValueError, NotImplementedError) as error:
                reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
                raise InputError(
                    f"the model cannot be built from what its data look like ({reason}); "
                    "build it before nl.distribute: call it on a batch"
                ) from error
            if self._session.mesh is not None:
                batchnorm.synchronise(model, self._session)
        elif not alone and model.optimizer is not None and not model.optimizer.built:
            model.optimizer.build(model.trainable_variables)
        self.replicas.begin()
        if self._states is None and not alone:
            self._states = MetricStates(model, self._session)

    # ---- steps

    def _train_step(self, element: Any) -> Any:
        return self._step("train_step", element)

    def _test_step(self, element: Any) -> Any:
        return self._step("test_step", element)

    def _compute_metrics(self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        own = self._own["compute_metrics"]
        if self._states is None:  # the model is being built
            return own(x, y, y_pred, sample_weight=sample_weight)
        return self._states.compute(own, x, y, y_pred, sample_weight)

    def _step(self, name: str, element: Any) -> Any:
        data, mark = element
        assert self._states is not None
        share = self._share(data, mark)
        if events.listened_to("step"):
            tf.numpy_function(lambda samples: setattr(self._session, "samples", int(samples)), [share.samples], [])
        if self._session.mesh is None:
            with self._session.working_on(share):
                return self._own[name](data)
        before = self._states.before()
        with self._session.working_on(share):
            logs = self._own[name](data)
        return self._states.combine(before, logs, mark, share, compare_marks)

    def _predict_step(self, element: Any) -> Any:
        data, mark = element
        share = self._share(None, mark)
        with self._session.working_on(share):
            outputs = self._own["predict_step"](data)
        if self._session.mesh is None:
            return outputs
        return tree.map_structure(lambda rows: join_rows(rows, share, self._session), outputs)

    def _share(self, data: Any, mark: tf.Tensor) -> Share:
        samples, mine = mark[0], mark[1]
        weight = self._session.weight
        if weight is None or data is None or self._session.mesh is None:
            return Share(samples, mine, tf.math.divide_no_nan(mine, samples))
        counted = tf.cast(weight(data), tf.float64) * tf.cast(mine > 0, tf.float64)
        whole = total(self._session, self._session.tag("weight"), counted, "the weights of a batch")
        return Share(samples, mine, counted / whole)


def optimizers_of(model: keras.Model) -> list[Any]:
    """Return the optimizers that a model holds: a GAN's has one per network."""
    held: list[Any] = []
    for value in vars(model).values():
        values = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else [value]
        held += [each for each in values if isinstance(each, keras.optimizers.Optimizer)]
    return list({id(each): each for each in held}.values())


def _as_differentiated(gradients: Sequence[Any], session: Session) -> bool:
    """Return whether the gradients are just those that a tape has returned."""
    return all(id(each) in session.differentiated for each in gradients if each is not None)


def _in_place_of(own: Callable[..., Any], hook: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``hook`` under the name, documentation and signature of the model's own method."""

    @functools.wraps(own)
    def hooked(*arguments: Any, **options: Any) -> Any:
        return hook(*arguments, **options)

    return hooked


def _combining(optimizer: Any, reducer: Reducer) -> Callable[..., Any]:
    apply = getattr(optimizer, _OWN, optimizer.apply)  # hooked before, if it is compiled again with
    setattr(optimizer, _OWN, apply)

    @functools.wraps(apply)
    def combined(grads: Any, trainable_variables: Any = None) -> Any:
        grads = list(grads)
        session = reducer.session
        if session.mesh is not None and not _as_differentiated(grads, session):
            session.notice(
                "gradients are changed between tape.gradient and the optimizer, where they are those of a rank's "
                "share: sums and factors are right; before clipping by hand call grads = nl.mean(grads)"
            )
        variables = optimizer._trainable_variables if trainable_variables is None else list(trainable_variables)
        return apply(reducer.combine(grads, variables), trainable_variables)

    return combined


def _symbolic(spec: Any) -> keras.KerasTensor:
    return keras.KerasTensor(spec.shape, backend.standardize_dtype(spec.dtype))


def is_built(model: keras.Model, *, alone: bool) -> bool:
    """Return whether all variables are there: those of the model, and unless it is needed alone those of its losses."""
    if not all(layer.built for layer in model._flatten_layers(include_self=False)):
        return False
    if alone:
        return True
    own_step = type(model).train_step is not keras.Model.train_step
    unbuilt = (model._compile_metrics, model._compile_loss)
    return own_step or (model.built and all(each is None or each.built for each in unbuilt))


def _split_off(given: dict[str, Any]) -> tuple[tuple[Any, Any, Any], Any]:
    """Return the training data and the validation data of ``fit``'s arguments."""
    data = given["x"], given.pop("y"), given.pop("sample_weight")
    validation = given["validation_data"]
    if given["validation_split"] and validation is None:
        data, validation = array_slicing.train_validation_split(data, validation_split=given["validation_split"])
    return data, validation
