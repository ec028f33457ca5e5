"""Turning an unchanged ``fit`` into one member's part of a run over the Internet.

    fit's batch of 64 (data.py)   every member reads it whole and in the same order, and keeps its part of it
    train_step                    the model's own, of the part; the optimizer's state stays this member's
    between two steps             what was learnt is told, news are put in their place   (runtime/local/island.py)
    the end of an epoch           the outer parameters: they are what is evaluated and saved

A member that comes late leaves out the epochs that the run has behind it, and the steps of the one in hand: Keras
counts them, so callbacks see the numbers that they know. Its optimizer has missed those steps, too: a schedule of
learning rates is asked for the step that the run has come to; a rate that callbacks set is the most complete member's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from nearlinear.core.plan import Plan
from nearlinear.errors import InputError
from nearlinear.planning.rounds import LOOK_STEPS, adaptive_rate, noise_left, signal_share
from nearlinear.runtime.local.codecs import Floats
from nearlinear.runtime.local.island import Island, Place, Trained
from nearlinear.tensorflow.data import SharedData, part_of
from nearlinear.tensorflow.session import Session, Share, shuffle_alike
from nearlinear.tensorflow.state import is_seed, separated
from nearlinear.tensorflow.train import Training, is_built

_OWN = "_nearlinear_own_rate"
_COMPARED = 16  # of the first passes all have their first batch compared, and every so many afterwards
_ALIKE = 1e-4  # of the digests of a batch on two machines, whose decoders may round otherwise
_END = "the end of a pass over the data"


class Apart(Training):
    """The hooks of a model that members train apart.

    Args:
        model: A compiled Keras model.
        optimizers: What trains it.
        session: This process's part in its run, of which it is the only rank.
        plan: How often members meet, and how updates travel.
        number: Of the distribute call.

    Raises:
        InputError: The run refuses this member.
        PeerLostError: The run does not answer.
    """

    no_xla = "XLA compiles for one size of a batch, and a member's part of it changes"

    def __init__(
        self, model: keras.Model, optimizers: Sequence[Any], session: Session, plan: Plan, number: int
    ) -> None:
        self._part = tf.Variable([0.0, 1.0], dtype=tf.float64, trainable=False)  # of every batch
        # Of the steps since the last look: how many, their samples, what this member's count for; the latest digest.
        self._done = tf.Variable(tf.zeros(4, tf.float64), trainable=False)
        self._behind = tf.Variable(0, dtype=tf.int64, trainable=False)  # steps that the run made without this member
        self._rates: list[tf.Variable] = []  # of every optimizer, the run's; -1: its own
        self._factors: list[tuple[Any, tf.Variable]] = []  # every optimizer, and what its rate is multiplied by
        self._signals: list[float | None] = []  # share of signal in the gradients that each has seen
        self._seen = 0  # calls of the train function on a part of the batch
        self._known: Any = None  # what these variables hold
        self._compared: tuple[int, float, float] | None = None  # what is to be compared once more
        self._stepping = False
        self._averaged: list[Any] = []
        self._passes = self._batch = 0  # passes that are over, and steps of the one in hand
        self._running = False  # a pass is in hand
        super().__init__(model, optimizers, session, plan, number)
        self._own["make_train_function"] = model.make_train_function
        model.make_train_function = self._make_train_function
        if is_built(model, alone=True):
            self._enter()

    # ---- entering

    def _enter(self) -> None:
        """Join the run that the ticket names, and take over its outer parameters."""
        model, session = self._whole, self._session
        parameters, statistics = averaged(model)
        self._averaged = [*parameters, *statistics]
        if any(each.dtype == "float64" for each in self._averaged):
            session.notice("strategy 'local' exchanges float32: float64 variables are rounded to it every round")
        shapes = [(each.path, tuple(each.shape)) for each in self._averaged]
        trained = Trained(shapes, len(parameters), self._read, self._write, self._place, self._own_rates)
        island = session.island = Island.enter(trained, self._plan)
        shuffle_alike(lambda mine: island.agree(mine, "the seeds of the data"))
        for variable in model.variables:
            if is_seed(variable) and island.number:
                # Dropout and augmentation differ between members, as they do between the samples of one batch.
                variable.assign(separated(variable.numpy(), island.number))
        session.notice("members train apart between two rounds: the numbers are not those of one process")
        session.notice(
            "losses and metrics of training are of this member's part of the batches; those of an evaluation are of "
            "all of its data, at the run's parameters"
        )
        island.begin()

    @property
    def _island(self) -> Island:
        island = self._session.island
        assert island is not None
        return island

    def _begin_on(self, batch: Any, *, alone: bool = False) -> None:
        super()._begin_on(batch, alone=alone)
        if self._session.island is None:
            self._enter()

    def _read(self) -> Floats:
        return np.concatenate([each.numpy().astype(np.float32).reshape(-1) for each in self._averaged])

    def _write(self, values: Floats) -> None:
        ends = np.cumsum([math.prod(each.shape) for each in self._averaged])
        for variable, part in zip(self._averaged, np.split(values, ends[:-1]), strict=True):
            dtype = tf.as_dtype(variable.dtype).as_numpy_dtype
            variable.assign(part.reshape(variable.shape).astype(dtype))  # a copy: TensorFlow may keep what it is given

    def _place(self) -> Place:
        return [(self._passes, self._batch)]

    # ---- what stands in for the model's own

    def _hook(self, optimizer: Any) -> None:
        """Let an optimizer step at the rates of the run, where this member has missed steps."""
        inner = getattr(optimizer, "inner_optimizer", optimizer)
        own = getattr(inner, _OWN, inner._get_current_learning_rate)  # hooked before, if it is compiled again with
        setattr(inner, _OWN, own)
        run = tf.Variable(-1.0, dtype=tf.float32, trainable=False)
        self._rates.append(run)
        factor, decaying = tf.Variable(1.0, dtype=tf.float32, trainable=False), [False]
        self._factors.append((inner, factor))
        decay = type(inner)._apply_weight_decay

        def rate() -> Any:
            given = inner._learning_rate
            if isinstance(given, keras.optimizers.schedules.LearningRateSchedule):
                step = tf.convert_to_tensor(inner._iterations)
                here = tf.convert_to_tensor(given(step + tf.cast(self._behind, step.dtype)))
            elif not self._stepping:  # what callbacks read and set is this member's own
                return own()
            else:
                here = tf.convert_to_tensor(own())
                here = tf.where(run >= 0, tf.cast(run, here.dtype), here)
            return here * tf.cast(factor, here.dtype) if self._stepping and not decaying[0] else here

        def apply_weight_decay(variables: Any) -> None:
            decaying[0] = True  # weights shrink as on one machine
            try:
                decay(inner, variables)
            finally:
                decaying[0] = False

        inner._get_current_learning_rate, inner._apply_weight_decay = rate, apply_weight_decay

    def _attach(self, optimizers: Sequence[Any]) -> None:
        self._rates, self._factors, self._known, self._seen = [], [], None, 0
        super()._attach(optimizers)

    def _compute_metrics(self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        return self._own["compute_metrics"](x, y, y_pred, sample_weight=sample_weight)

    def _train_step(self, element: Any) -> Any:
        data, mark = element
        part, mine = part_of(data, mark[0], self._part)
        weight = self._session.weight
        counted = mine if weight is None else tf.cast(weight(part), tf.float64) * tf.cast(mine > 0, tf.float64)
        self._done.assign(tf.stack([self._done[0] + 1, self._done[1] + mark[0], self._done[2] + counted, mark[2]]))
        with self._session.working_on(Share(mine, mine, tf.constant(1.0, tf.float64))):
            return self._own["train_step"](part)

    def _fit_on(self, given: dict[str, Any]) -> Any:
        left_out = self._left_out(max(0, given["epochs"] - given["initial_epoch"]))
        data = Passes(given["x"], given["steps_per_epoch"], left_out)
        given["x"], given["initial_epoch"] = data, given["initial_epoch"] + left_out
        given["callbacks"] = _first(_Passing(self), given["callbacks"])
        fitted = super()._fit_on(given)
        data.leave_out()
        return fitted

    def _left_out(self, epochs: int) -> int:
        """Return how many of the next epochs the run has behind it."""
        first = self._passes
        while self._passes < first + epochs and self._island.is_past(0, self._passes):
            self._passes += 1
        return self._passes - first

    def _evaluate(self, *arguments: Any, **options: Any) -> Any:
        if options.get("_use_cached_eval_dataset"):  # within fit, before callbacks know that an epoch is over
            self.end_pass()
        return self._settled("_evaluate", arguments, options)

    def _predict(self, *arguments: Any, **options: Any) -> Any:
        return self._settled("_predict", arguments, options)

    def _test_on_batch(self, *arguments: Any, **options: Any) -> Any:
        return self._settled("_test_on_batch", arguments, options)

    def _predict_on_batch(self, *arguments: Any, **options: Any) -> Any:
        return self._settled("_predict_on_batch", arguments, options)

    def _settled(self, name: str, arguments: Sequence[Any], options: dict[str, Any]) -> Any:
        """Do it with the outer parameters."""
        self._session.settle("an evaluation")
        return getattr(super(), name)(*arguments, **options)

    def _writing(self, name: str) -> Callable[..., Any]:
        def write(*arguments: Any, **options: Any) -> Any:
            """Write the outer parameters, on every member's own machine."""
            self._session.settle("saving the model")
            return self._own[name](*arguments, **options)

        return write

    # ---- passes

    def begin_pass(self) -> None:
        """Note that an epoch begins."""
        self._running, self._batch = True, 0

    def end_pass(self) -> None:
        """Note that an epoch is over: what follows is to see the outer parameters, with all that was learnt."""
        if self._running:
            self._running, self._batch = False, 0
            self._passes += 1
        self._session.settle(_END)

    # ---- steps

    def _make_train_function(self, force: bool = False) -> Any:
        model = self._whole
        if model.train_function is None or force:
            self._own["make_train_function"](force)
            model.train_function = self._between(model.train_function)
        return model.train_function

    def _between(self, function: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Return a function that makes steps, with what happens between them."""

        def steps(iterator: Any) -> Any:
            if self._has_passed(iterator):
                compiled = self._whole._compile_metrics
                return {} if compiled is not None and not compiled.built else self._whole.get_metrics_result()
            self._before_steps()
            self._stepping = True
            try:
                logs = function(iterator)
            finally:
                self._stepping = False
            self._after_steps()
            return logs

        return steps

    def _has_passed(self, iterator: Any) -> bool:
        """Return whether the run has the next steps behind it; their batches are then read, and that is all."""
        if not self._running or not self._island.is_past(0, self._passes, self._batch):
            return False
        for number in range(self._whole.steps_per_execution):
            try:
                next(iterator)
            except StopIteration:
                if not number:
                    raise
                break
            self._batch += 1
        return True

    def _before_steps(self) -> None:
        island = self._island
        run = island.rates(len(self._rates)) or [-1.0] * len(self._rates)
        begin, end = island.share
        if end - begin < 1:  # else it is alone: the batch is whole
            if self._seen % LOOK_STEPS == 0:
                self._signals = [gradient_signal(optimizer) for optimizer, _ in self._factors]
            self._seen += 1
        known = island.share, island.behind, run, self._signals
        if known != self._known:
            self._known = known
            self._part.assign(island.share)
            self._behind.assign(island.behind)
            for variable, rate in zip(self._rates, run, strict=True):
                variable.assign(rate)
            for (_, factor), signal in zip(self._factors, self._signals, strict=False):
                factor.assign(1.0 if signal is None else adaptive_rate(end - begin, signal))

    def _after_steps(self) -> None:
        steps, samples, weight, digest = map(float, self._done.numpy())
        if not steps:
            return
        self._done.assign(tf.zeros(4, tf.float64))
        self._session.samples = int(samples / steps)
        first = self._running and not self._batch
        if self._running:
            self._batch += int(steps)
        if first:
            self._compare_again()
            if _is_compared(self._passes):
                self._compared = self._passes, samples, digest
                self._compare(*self._compared)
        self._island.stepped(weight, samples, int(steps))

    def _compare_again(self) -> None:
        """Do so with the last that was compared: of the two that differ there, the older may have asked after this."""
        if self._compared is not None:
            compared, self._compared = self._compared, None
            self._compare(*compared)

    def _compare(self, number: int, samples: float, digest: float) -> None:
        """Compare the first batch of a pass with the one that the oldest member read there.

        Raises:
            InputError: It is another one.
        """
        if math.isinf(digest):
            raise InputError(
                "the tensors of a batch differ in their first dimension, so which are its samples cannot be told; give "
                "each one row per sample, or keep what belongs to no sample out of the data"
            )
        if math.isnan(digest):
            return
        theirs = self._island.agree_now(f"the data of pass {number}", [samples, digest])
        if theirs[0] != samples or not math.isclose(theirs[1], digest, rel_tol=_ALIKE, abs_tol=1e-9):
            raise InputError(
                f"this member reads other batches than the run's first member in epoch {number + 1}; the data "
                "must come in the same order on every member: keras.utils.set_random_seed(0) at the start, or a seed "
                "for what shuffles (dataset.shuffle(n, seed=0), sorted file names)"
            )

    def _own_rates(self) -> list[float]:
        return [float(optimizer.learning_rate) for optimizer in self._optimizers]


def gradient_signal(optimizer: Any) -> float | None:
    """Return the share of the squared mean gradient in the mean squared gradient; None where no moments are kept.

    As of PyTorch's optimizers (``torch/local.py``).
    """
    firsts, seconds = getattr(optimizer, "_momentums", None), getattr(optimizer, "_velocities", None)
    step = float(optimizer.iterations)
    if not firsts or not seconds or not step:
        return None
    one, two, shares, count = optimizer.beta_1, optimizer.beta_2, 0.0, 0
    left = noise_left(one, step)
    for first, second in zip(firsts, seconds, strict=True):
        mean, square = first.numpy() / (1 - one**step), second.numpy() / (1 - two**step)
        ratio = mean[square > 0] ** 2 / square[square > 0]
        shares += signal_share(float(ratio.sum()), ratio.size, left)
        count += ratio.size
    return min(max(shares / count, 0.0), 1.0) if count else None


def _is_compared(number: int) -> bool:
    """Return whether the first batch of a pass is compared; a member that comes late has one before it soon."""
    return number < _COMPARED or number % _COMPARED == 0


class Passes(SharedData):
    """The batches of one ``fit``, whole and with their marks, in the order of a run of which some passes are over.

    What shuffles may draw a new order for every iterator, and Keras asks for one at the beginning of an epoch and,
    where it knows how long one is, for another at its end, which it does not read. So does a pass that is left out.

    Args:
        data: The batches.
        steps: ``steps_per_epoch``: one iterator then serves many epochs.
        left_out: Epochs that are over.
    """

    def __init__(self, data: SharedData, steps: int | None, left_out: int) -> None:
        self._whole, self._dataset = data, data.get_tf_dataset()
        self._twice = steps is None and self.num_batches is not None
        self._passes, self._skip = left_out, 0  # passes to leave out, and batches of the one after them
        if steps is not None:
            batches = left_out * steps
            self._passes, self._skip = divmod(batches, self.num_batches or batches + 1)

    def get_tf_dataset(self) -> Any:
        """Return what gives iterators."""
        return self

    def on_epoch_begin(self) -> None:
        """Tell the data; before the first epoch go to where they are."""
        self.leave_out()
        super().on_epoch_begin()

    def leave_out(self) -> None:
        """Go to where the data are after the passes that are over, if that was not done."""
        passes, self._passes = self._passes, 0
        for _ in range(passes):
            super().on_epoch_begin()
            next(iter(self._dataset), None)
            if self._twice:
                iter(self._dataset)
            super().on_epoch_end()

    def __iter__(self) -> Iterator[Any]:
        iterator: Iterator[Any] = iter(self._dataset.skip(self._skip) if self._skip else self._dataset)
        self._skip = 0
        return iterator


class _Passing(keras.callbacks.Callback):  # type: ignore[misc]
    """Tells where epochs begin and end."""

    def __init__(self, training: Apart) -> None:
        super().__init__()
        self._training = training

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._training.begin_pass()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._training.end_pass()


def _first(callback: keras.callbacks.Callback, callbacks: Any) -> Any:
    """Return the callbacks with one before all others."""
    if not isinstance(callbacks, keras.callbacks.CallbackList):
        return [callback, *callbacks]
    callback.set_model(callbacks.callbacks[-1].model)
    callback.set_params(callbacks.params)
    callbacks.callbacks.insert(0, callback)
    return callbacks


def averaged(model: keras.Model) -> tuple[list[Any], list[Any]]:
    """Return the variables that members have in common: parameters, also frozen ones, and statistics of BatchNorm.

    What metrics count, streams of random numbers and what is no real number stay each member's own.

    Raises:
        InputError: A parameter is no real number.
    """
    own = {id(variable) for metric in model.metrics for variable in metric.variables}
    unique = {id(each): each for each in model.variables if id(each) not in own and not is_seed(each)}
    made_to_train = {id(each) for layer in model._flatten_layers() for each in layer._trainable_variables}
    parameters = [each for key, each in unique.items() if key in made_to_train or each.trainable]
    for each in parameters:
        if not tf.as_dtype(each.dtype).is_floating:
            raise InputError(f"{each.path} is of type {each.dtype}; strategy 'local' averages real numbers")
    known = {id(each) for each in parameters}
    rest = [each for key, each in unique.items() if key not in known and tf.as_dtype(each.dtype).is_floating]
    return parameters, rest


def require_apart(
    model: keras.Model, optimizers: Sequence[Any], loaders: Sequence[Any], weight: Any, session: Session | None
) -> None:
    """Raise if members cannot train this model apart, before anything is changed."""
    if session is not None and session.models:
        raise InputError("strategy 'local' trains one model, and distribute was called for a second one")
    if not model.compiled or loaders:
        raise InputError(
            "strategy 'local' trains a Keras model through its fit; call model.compile(...) before nl.distribute, and "
            "give the data to fit"
        )
    if weight == "sum" or any(_reduction(each) == "sum" for each in _losses(model)):
        raise InputError(
            "the loss is a sum over the batch, of which every member would see its part and the mean of all too "
            "little; strategy 'local' needs a mean (reduction='sum_over_batch_size')"
        )
    if any(getattr(each, "use_ema", False) for each in optimizers):
        raise InputError(
            "the optimizer keeps an average of the weights (use_ema), and each member would have one of its own; leave "
            "it out under strategy 'local', which averages over the members"
        )


def _losses(model: keras.Model) -> list[Any]:
    compiled = model._compile_loss
    return [] if compiled is None else keras.tree.flatten(compiled._user_loss)


def _reduction(loss: Any) -> Any:
    return getattr(loss, "reduction", None)
