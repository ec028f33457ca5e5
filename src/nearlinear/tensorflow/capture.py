"""Turning a Keras model into steps that run one by one, and those into the planner's graph with measured times.

    inputs   values 0, 1, ...                    a step is one call of a layer or operation
    steps    dense(0) -> 2, add(2, 1) -> 3       a layer called twice is two steps; a nested model is its own steps
    outputs  values (3,)                         a value is what a step makes, or the model is called with

A Functional or Sequential model is such a graph already. Another model's ``call`` is followed on symbolic tensors,
which works where it uses layers and ``keras.ops`` alone.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import tree
from keras.src import backend
from keras.src.backend.common import global_state
from keras.src.layers.layer import CallContext
from keras.src.models.functional import Functional, unpack_singleton
from keras.src.ops.function import _build_map

from nearlinear.core.graph import Graph, Operator, Tensor
from nearlinear.errors import InputError

_SLOW_S = 0.02  # of an operation by operation run, beyond which the compiled step is timed: loops over time do worse
_ROUNDS = 5
_SLOTS = 3.0  # copies of the parameters that training holds beside them: a gradient and, for Adam, two slots

Values = dict[int, Any]


@dataclass(frozen=True, slots=True)
class Call:
    """The arguments of one call as they were recorded: symbolic tensors among anything else."""

    arguments: Any
    tensors: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Step:
    """One call of a layer or operation.

    Args:
        name: Unique, as the model's author would say it.
        operation: What is called.
        training: The call in training.
        inference: The call otherwise.
        reads: The value of each symbolic tensor of the arguments.
        makes: The values of what is returned.
        told: Whether the call is told to be in training by whoever runs it, as a Functional model tells its layers.
    """

    name: str
    operation: Any
    training: Call
    inference: Call
    reads: tuple[int, ...]
    makes: tuple[int, ...]
    told: bool

    @property
    def kind(self) -> str:
        """The class of what is called."""
        return type(self.operation).__name__

    def run(self, values: Mapping[int, Any], *, training: bool) -> list[Any]:
        """Return what the step makes of ``values``."""
        call = self.training if training else self.inference
        known = {id(tensor): values[value] for tensor, value in zip(call.tensors, self.reads, strict=True)}
        args, kwargs = call.arguments.fill_in(known)
        if self.told and "training" in getattr(self.operation, "_call_context_args", ()):
            kwargs["training"] = training
        return list(tree.flatten(self.operation(*args, **kwargs)))

    @property
    def variables(self) -> list[Any]:
        """The variables that it is known to use: of its layer, and those among its arguments."""
        own = list(getattr(self.operation, "variables", ()))
        given = tree.flatten((self.training.arguments.args, self.training.arguments.kwargs))
        return own + [each for each in given if isinstance(each, keras.Variable)]

    @property
    def keeps_state(self) -> bool:
        """Whether a call changes what the next one does: running statistics, a stream of random numbers."""
        layers = self.operation._flatten_layers() if isinstance(self.operation, keras.Layer) else ()
        return any(each._non_trainable_variables or each._seed_generators for each in layers)


@dataclass(frozen=True)
class Program:
    """A model as steps in an order in which they can run.

    Args:
        steps: The calls.
        inputs: How many values the model is called with; they are the first.
        outputs: The values that it returns, in order.
        shapes: Of every value, as far as it is known before there is a batch.
        structure: What the model returns, of symbolic tensors.
        single: Whether a list of one output is returned as that output.
    """

    steps: tuple[Step, ...]
    inputs: int
    outputs: tuple[int, ...]
    shapes: tuple[tuple[int | None, ...], ...]
    structure: Any
    single: bool

    def maker(self, value: int) -> str:
        """Return what makes a value, in words."""
        step = next((step for step in self.steps if value in step.makes), None)
        return f"input {value}" if step is None else f"what layer {step.name!r} makes"

    def pack(self, outputs: Sequence[Any]) -> Any:
        """Return the outputs as the model does."""
        packed = tree.pack_sequence_as(self.structure, list(outputs))
        return unpack_singleton(packed) if self.single else packed

    def run(self, inputs: Sequence[Any], *, training: bool) -> list[Any]:
        """Return the flat outputs of all steps, one after the other."""
        values: Values = dict(enumerate(inputs))
        for step in self.steps:
            values.update(zip(step.makes, step.run(values, training=training), strict=False))
        return [values[value] for value in self.outputs]


@contextlib.contextmanager
def inside(model: keras.Model, *, training: bool) -> Iterator[None]:
    """Let layers that are called within think that ``model`` calls them."""
    context = CallContext(entry_layer=model)
    context.set_value("training", training)
    before = global_state.get_global_attribute("current_call_ctx")
    mixed = backend.get_autocast_scope() is None and model.compute_dtype != model.variable_dtype
    global_state.set_global_attribute("current_call_ctx", context)
    try:
        with backend.AutocastScope(model.compute_dtype) if mixed else contextlib.nullcontext():
            yield
    finally:
        global_state.set_global_attribute("current_call_ctx", before)


def flat_inputs(model: keras.Model, x: Any) -> list[Any]:
    """Return what the model is called with as its program's inputs: flat, in their order and of their types."""
    if model._convert_input_args:
        x = tree.map_structure(lambda each: _converted(model, each), x)
    function = _function(model)
    flat = list(tree.flatten(x)) if function is None else list(function._standardize_inputs(x))
    for each in flat:
        if isinstance(each, tf.SparseTensor | tf.RaggedTensor):
            raise InputError(
                f"the batch holds a {type(each).__name__}, which no pipeline cuts into microbatches; make it dense, or "
                "use strategy 'data'"
            )
    return flat


def program_of(model: keras.Model, x: Any) -> Program:
    """Return the model's program.

    Args:
        model: The model; where it has no variables yet, it is built for ``x``.
        x: A batch, with its structure.

    Raises:
        InputError: The model's ``call`` does something that cannot be followed; the message says where.
    """
    if not model.built:
        model(_symbolic(model, x))
    function = _function(model)
    if function is not None:
        writer = _Writer()
        scope = {id(tensor): writer.value(tensor.shape) for tensor in function._inputs}
        writer.walk(function, scope)
        outputs = tuple(scope[id(tensor)] for tensor in function._outputs)
        program = writer.program(len(function._inputs), outputs, function._outputs_struct, single=True)
    else:
        program = _followed(model, x)
    for step in program.steps:
        layers = step.operation._flatten_layers() if isinstance(step.operation, keras.Layer) else ()
        if any(getattr(layer, "stateful", False) for layer in layers):
            raise InputError(
                f"layer {step.name!r} ({step.kind}) is stateful: it carries a state from one batch to the next, which "
                "microbatches would mix; use stateful=False, or strategy 'data'"
            )
    return program


def regularized_by_sample(layer: keras.Layer) -> bool:
    """Return whether what a layer adds to the loss is a mean over samples.

    That is so of the penalties on its activity that Keras has: it divides them by the number of samples.
    """
    known = keras.regularizers.L1, keras.regularizers.L2, keras.regularizers.L1L2
    return isinstance(layer.activity_regularizer, known) and len(layer._losses) == 1


def adds_a_loss_of_its_own(name: str) -> str:
    """Return the message for a layer whose loss parts of a batch do not add up to."""
    return (
        f"layer {name!r} adds a loss of its own making to the model's, which of parts of a batch need not be that of "
        "the batch; ask for Plan('pipeline', microbatches=1), or strategy 'data'"
    )


# ---- reading the graph


class _Writer:
    """Numbers values and writes steps."""

    def __init__(self) -> None:
        self._steps: list[Step] = []
        self._shapes: list[tuple[int | None, ...]] = []
        self._used: dict[str, int] = {}

    def value(self, shape: Sequence[int | None]) -> int:
        self._shapes.append(tuple(shape))
        return len(self._shapes) - 1

    def walk(self, function: Functional, scope: dict[int, int]) -> None:
        """Write the nodes of a Functional model, whose inputs' values are in ``scope``."""
        for depth in sorted(function._nodes_by_depth, reverse=True):
            for node in function._nodes_by_depth[depth]:
                if node.operation and not node.is_input and all(id(each) in scope for each in node.input_tensors):
                    self._node(node, scope)

    def _node(self, node: Any, scope: dict[int, int]) -> None:
        inner = _function(node.operation)
        given = _inputs_of(node, inner) if inner is not None else None
        if inner is None or given is None:
            call = Call(node.arguments, tuple(node.input_tensors))
            self.step(node, call, call, scope, told=True)
            return
        within = {id(tensor): scope[id(own)] for tensor, own in zip(inner._inputs, given, strict=True)}
        self.walk(inner, within)
        for tensor, outer in zip(inner._outputs, node.outputs, strict=True):
            scope[id(outer)] = within[id(tensor)]

    def step(self, node: Any, training: Call, inference: Call, scope: dict[int, int], *, told: bool) -> None:
        name = node.operation.name
        self._used[name] = count = self._used.get(name, 0) + 1
        reads = tuple(scope[id(tensor)] for tensor in training.tensors)
        makes = tuple(self.value(tensor.shape) for tensor in node.outputs)
        scope.update(zip(map(id, node.outputs), makes, strict=True))
        title = name if count == 1 else f"{name}#{count}"
        self._steps.append(Step(title, node.operation, training, inference, reads, makes, told))

    def program(self, inputs: int, outputs: tuple[int, ...], structure: Any, *, single: bool) -> Program:
        return Program(tuple(self._steps), inputs, outputs, tuple(self._shapes), structure, single)


def _function(layer: Any) -> Functional | None:
    """Return the graph of a Functional or Sequential model that is called as its class says."""
    if isinstance(layer, keras.Sequential) and type(layer).call is keras.Sequential.call:
        return layer._functional
    return layer if isinstance(layer, Functional) and type(layer).call is Functional.call else None


def _inputs_of(node: Any, inner: Functional) -> list[Any] | None:
    """Return the tensors that a nested model is called with, in the order of its inputs; None where it is called oddly.

    Such a call stays one step: with a mask, a type or a rank that the model would have to convert.
    """
    args, kwargs = node.arguments.args, node.arguments.kwargs
    if len(args) != 1 or any(value is not None for name, value in kwargs.items() if name != "training"):
        return None
    given, wanted = tree.flatten(args[0]), tree.flatten(inner._inputs_struct)
    try:
        tree.assert_same_structure(args[0], inner._inputs_struct)
    except ValueError:
        if len(given) != 1 or len(wanted) != 1:
            return None
    alike = all(
        isinstance(one, keras.KerasTensor) and one.dtype == other.dtype and len(one.shape) == len(other.shape)
        for one, other in zip(given, wanted, strict=True)
    )
    return list(given) if alike else None


def _converted(model: keras.Model, each: Any) -> Any:
    mask = backend.get_keras_mask(each)
    converted = model.dtype_policy.convert_input(each, model.autocast, model.input_dtype)
    if mask is not None:
        backend.set_keras_mask(converted, mask)
    return converted


def _symbolic(model: keras.Model, x: Any) -> Any:
    """Return symbolic tensors like those of a batch, of any number of samples."""

    def like(each: Any) -> Any:
        shape = (None, *each.shape[1:])
        return keras.Input(batch_shape=shape, dtype=backend.standardize_dtype(each.dtype))

    return tree.map_structure(lambda each: None if each is None else like(_converted(model, each)), x)


def _followed(model: keras.Model, x: Any) -> Program:
    """Return the program of a model whose ``call`` is Python: what it calls in training and otherwise, as recorded."""
    symbols = _symbolic(model, x)
    flat = [each for each in tree.flatten(symbols) if each is not None]
    nodes: list[list[Any]] = []
    found: list[Any] = []
    for training in (True, False):
        with inside(model, training=training), _said_plainly(model):
            returned = model.call(symbols, **({"training": training} if model._call_has_training_arg else {}))
        for each in tree.flatten(returned):
            if not isinstance(each, keras.KerasTensor):
                raise InputError(
                    f"{type(model).__name__}.call returns {type(each).__name__} beside tensors, which no pipeline "
                    "hands on; use strategy 'data'"
                )
        nodes.append([node for node in _build_map(flat, tree.flatten(returned))[0] if not node.is_input])
        found.append(returned)
    writer = _Writer()
    scopes = [{id(tensor): number for number, tensor in enumerate(flat)} for _ in nodes]
    for tensor in flat:
        writer.value(tensor.shape)
    for one, other in zip(*nodes, strict=False):
        same = one.operation is other.operation or (
            type(one.operation) is type(other.operation) and not isinstance(one.operation, keras.Layer)
        )
        trained, called = (
            Call(one.arguments, tuple(one.input_tensors)),
            Call(other.arguments, tuple(other.input_tensors)),
        )
        if not same or _values(trained, scopes[0]) != _values(called, scopes[1]):
            raise _two_ways(model, one.operation.name)
        writer.step(one, trained, called, scopes[0], told=False)
        scopes[1].update(zip(map(id, other.outputs), (scopes[0][id(each)] for each in one.outputs), strict=True))
    if len(nodes[0]) != len(nodes[1]):
        longer = max(nodes, key=len)
        raise _two_ways(model, longer[min(map(len, nodes))].operation.name)
    outputs = tuple(scopes[0][id(tensor)] for tensor in tree.flatten(found[0]))
    return writer.program(len(flat), outputs, found[0], single=False)


def _values(call: Call, scope: Mapping[int, int]) -> list[int | None]:
    return [scope.get(id(tensor)) for tensor in call.tensors]


def _two_ways(model: keras.Model, name: str) -> InputError:
    return InputError(
        f"{type(model).__name__}.call does not call the same layers in training and otherwise (they part at {name!r}); "
        "hand `training` to the layers instead of asking for it, or use strategy 'data'"
    )


@contextlib.contextmanager
def _said_plainly(model: keras.Model) -> Iterator[None]:
    try:
        yield
    except (ValueError, TypeError, AttributeError, NotImplementedError, RuntimeError, tf.errors.OpError) as error:
        source = inspect.getsourcefile(type(model)) or ""
        frames = [each for each in traceback.extract_tb(error.__traceback__) if each.filename == source]
        where = f" at `{frames[-1].line}`" if frames and frames[-1].line else ""
        reason = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise InputError(
            f"{type(model).__name__}.call cannot be followed{where} ({reason.strip()[:200]}); use layers and keras.ops "
            "there alone, or strategy 'data'"
        ) from error


# ---- what it costs


def graph_of(program: Program, model: keras.Model, inputs: Sequence[Any], budget_s: float) -> Graph:
    """Return the planner's graph, with times measured here.

    Every step is timed by itself, forward and backward, in rounds over all of them until the budget is spent. The
    shortest time counts, and steps that are alike in all that a time depends on have one time between them.

    Args:
        program: The model's program.
        model: The model.
        inputs: Flat inputs: one microbatch.
        budget_s: Seconds that may be spent, beyond one run of every step.
    """
    deadline, rounds = time.perf_counter() + budget_s, 0
    values: Values = dict(enumerate(inputs))
    best: dict[Any, tuple[float, float]] = {}
    with inside(model, training=False):
        timed = [_Timed(step, values) for step in program.steps]
        while rounds < _ROUNDS and (not rounds or time.perf_counter() < deadline):
            rounds += 1
            for each in timed:
                forward, backward = each.run()
                known = best.get(each.alike, (forward, backward))
                best[each.alike] = min(known[0], forward), min(known[1], backward)
                if rounds > 1 and time.perf_counter() > deadline:
                    break
    samples = next((int(each.shape[0]) for each in inputs if each is not None), 1)
    sizes = {value: _bytes(each) for value, each in values.items()}
    calls: dict[int, int] = {}
    for step in program.steps:
        calls[id(step.operation)] = calls.get(id(step.operation), 0) + 1
    operators, held = [], set[int]()
    for step, each in zip(program.steps, timed, strict=True):
        own = [variable for variable in step.variables if id(variable) not in held]
        held.update(map(id, own))
        parameters = sum(map(_bytes, own))
        operators.append(
            Operator(
                step.name,
                step.kind,
                forward=best[each.alike][0],
                backward=best[each.alike][1],
                moved_bytes=sum(sizes[value] for value in (*step.reads, *step.makes)) + parameters,
                parameter_bytes=parameters,
                state_bytes=parameters + _SLOTS * sum(_bytes(variable) for variable in own if variable.trainable),
                activation_bytes=sum(sizes[value] for value in step.makes),
                mixes_batch=isinstance(step.operation, keras.layers.BatchNormalization),
                group=step.operation.name if calls[id(step.operation)] > 1 and step.keeps_state else None,
            )
        )
    return Graph(tuple(operators), _tensors(program, sizes), name=model.name, samples=samples, source="keras")


def _tensors(program: Program, sizes: Mapping[int, float]) -> tuple[Tensor, ...]:
    made = {value: number for number, step in enumerate(program.steps) for value in step.makes}
    readers: dict[int, set[int]] = {}
    for number, step in enumerate(program.steps):
        for value in step.reads:
            if value in made:
                readers.setdefault(value, set()).add(number)
    return tuple(Tensor(made[value], tuple(sorted(ends)), sizes[value]) for value, ends in sorted(readers.items()))


class _Timed:
    """One step that can be timed.

    Args:
        step: The step.
        values: What it reads, to which is added what it makes.
    """

    def __init__(self, step: Step, values: Values) -> None:
        self._given = {value: values[value] for value in step.reads}
        self._watched = [each for each in self._given.values() if each is not None and each.dtype.is_floating]
        self._sources = [*self._watched, *(each.value for each in step.variables if each.trainable)]
        act = self._act = functools.partial(step.run, self._given, training=False)
        seconds, made = _seconds(act)
        if seconds > _SLOW_S:
            self._act = tf.function(act, autograph=False)
            self.run()  # traces
        values.update(zip(step.makes, made, strict=False))
        shapes = [None if each is None else (each.dtype, *each.shape) for each in (*self._given.values(), *made)]
        self.alike = step.kind, str(shapes), str([tuple(each.shape) for each in step.variables])

    def run(self) -> tuple[float, float]:
        """Return the seconds of a forward and a backward pass."""
        with tf.GradientTape() as tape:
            tape.watch(self._watched)
            forward, made = _seconds(self._act)
        targets = [each for each in made if tf.as_dtype(each.dtype).is_floating]
        if not targets or not self._sources:
            return forward, 0.0
        return forward, _seconds(lambda: tape.gradient(targets, self._sources))[0]


def _seconds(act: Callable[[], Any]) -> tuple[float, Any]:
    began = time.perf_counter()
    made = act()
    return time.perf_counter() - began, made


def _bytes(each: Any) -> float:
    if each is None:
        return 0.0
    return float(np.prod(tuple(each.shape), dtype=np.float64) * tf.as_dtype(each.dtype).size)
