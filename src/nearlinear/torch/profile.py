"""Turning a captured graph and a batch into seconds per operator, measured on the device that is here.

Whole steps and steps with hooks take turns. The whole ones say how long a step takes; the hooked ones say how much of
it each module has:

    forward    between two calls or returns of modules, time belongs to the innermost that is running
    backward   every autograd node is timed, and belongs to the module whose call made it (by sequence number)
    update     by the bytes that the optimizer moves

A module's time is spread over its operators by FLOP and bytes. Layers timed one by one sum to less than the step; the
difference, the *residue*, is spread over all operators, so that their sum is the step that was measured.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import inspect
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from nearlinear.core.graph import Graph, Operator, Tensor
from nearlinear.errors import InputError
from nearlinear.torch.capture import Captured, capture
from nearlinear.torch.capture.batch import Call
from nearlinear.torch.capture.untouched import parameters_of, undone
from nearlinear.torch.capture.watch import LOSS_PATH, Clock, Parts, Watch

Loss = Callable[[Any], torch.Tensor]

FLOP_PER_BYTE = 10.0  # at which an operator's FLOP take as long as its bytes: between a CPU core's 5 and a GPU's 20
LOSS = "loss"
_MOST_STEPS = 50


@dataclass(frozen=True)
class Profile:
    """A graph with measured times.

    Args:
        graph: Its operators' forward, backward and update times sum to ``step``.
        step: Seconds of a whole step: the median.
        forward: Seconds of it in the forward pass and the loss.
        backward: Seconds of it in the backward pass.
        update: Seconds of it in the optimizer.
        spread: One sigma of a step's time over the step, from the median absolute deviation.
        residue: The share of a step with hooks that lies in no module's forward or backward: the median.
        steps: Whole steps measured.
    """

    graph: Graph
    step: float
    forward: float
    backward: float
    update: float
    spread: float
    residue: float
    steps: int

    def __str__(self) -> str:
        return (
            f"{self.step * 1e3:.3g} ms per step of {self.graph.samples} samples ±{self.spread:.1%} "
            f"(forward {self.forward * 1e3:.3g}, backward {self.backward * 1e3:.3g}, update {self.update * 1e3:.3g}; "
            f"{self.residue:.0%} in no module), {self.steps} steps"
        )


def profile(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None = None,
    *,
    loss: Loss | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    captured: Captured | None = None,
    warmup: int = 2,
    least: int = 5,
    budget: float = 3.0,
) -> Profile:
    """Return the model's graph with the seconds that its operators take here, for this batch.

    Steps are really taken: forward, backward, optimizer. Afterwards parameters, buffers, gradients, the optimizer's
    state and the random streams are what they were, bit for bit. Models that exchange gradients with other ranks are
    to be profiled before ``distribute`` is called.

    Args:
        model: What to profile; in training mode with a backward pass, in evaluation mode without.
        args: What it is called with.
        kwargs: The named arguments.
        loss: Turns what the model returns into one number. By default that is the output's ``loss`` where it has one,
            and the mean of its floating-point tensors. One that is given becomes an operator of its own.
        optimizer: Its ``step`` is timed; ``None``: a step without update.
        captured: What ``capture`` gave for this batch; captured here where it is ``None``.
        warmup: Steps of either kind before the clock counts.
        least: Steps of either kind that are measured at least.
        budget: Seconds after which no further step is begun once ``least`` are done.

    Raises:
        InputError: ``captured`` is of another number of samples, or the optimizer's step needs a closure.
    """
    captured = captured or capture(model, args, kwargs)
    samples = _samples(captured, args, kwargs)
    if samples is not None and samples != captured.graph.samples:
        raise InputError(
            f"the graph was captured with {captured.graph.samples} samples and is profiled with {samples}; "
            "capture it with the same batch"
        )
    # A learning-rate schedule wraps `step`, and then what it wraps takes `self`.
    if optimizer is not None and any(
        each.name != "self" and each.kind is each.POSITIONAL_OR_KEYWORD and each.default is each.empty
        for each in inspect.signature(optimizer.step).parameters.values()
    ):
        raise InputError(f"{type(optimizer).__name__}.step needs a closure; profile the model without this optimizer")
    step = _Step(model, args, dict(kwargs or {}), loss or default_loss, optimizer)
    with undone(model, optimizer), _no_collection():
        whole, parts = _measure(step, warmup, least, budget)
        state = _state_bytes(model, optimizer) if optimizer is not None and model.training else None
    return _profiled(captured, whole, parts, model, state, loss is not None)


def time_passes(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None, steps: int = 5
) -> float:
    """Return the seconds of a forward and backward pass on this batch, the median of ``steps``; nothing is changed."""
    step = _Step(model, args, dict(kwargs or {}), default_loss, None)
    with undone(model, None), _no_collection():
        step.whole()
        return statistics.median(step.whole().whole for _ in range(steps))


def default_loss(output: Any) -> torch.Tensor:
    """Return the output's own loss, or the mean of its floating-point tensors where it has none."""
    own = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(own, torch.Tensor):
        return own
    if dataclasses.is_dataclass(output) and not isinstance(output, Mapping):
        output = [getattr(output, each.name) for each in dataclasses.fields(output)]
    tensors = [each for each in pytree.tree_leaves(output) if isinstance(each, torch.Tensor) and each.requires_grad]
    if not tensors:
        raise InputError(
            "the model returns no tensor that has a gradient; profile(..., loss=...) says what its loss is"
        )
    return torch.stack([each.float().mean() for each in tensors]).sum()


# One step, and the clock -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Phases:
    forward: float
    backward: float
    update: float

    @property
    def whole(self) -> float:
        return self.forward + self.backward + self.update


class _Step:
    def __init__(
        self,
        model: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        loss: Loss,
        optimizer: torch.optim.Optimizer | None,
    ) -> None:
        self.model, self.args, self.kwargs, self.loss = model, args, kwargs, loss
        self.optimizer = optimizer if model.training else None
        parameters = list(model.parameters())
        self._parameters = parameters + ([] if optimizer is None else parameters_of(optimizer))
        self.clock = Clock(parameters[0].device if parameters else torch.device("cpu"))

    def whole(self) -> _Phases:
        return self._run(lambda: contextlib.nullcontext(), lambda _: None)

    def _run(self, watching: Callable[[], contextlib.AbstractContextManager[Any]], before_backward: Any) -> _Phases:
        clock, training = self.clock, self.model.training
        clock.wait()
        start = clock.mark()
        for parameter in self._parameters:
            parameter.grad = None
        with torch.set_grad_enabled(training), watching():
            output = self.model(*self.args, **self.kwargs)
        value = self.loss(output) if training else None
        del output
        forward = clock.mark()
        if value is not None:
            before_backward(value)
            forward_over = clock.mark()
            value.backward()  # type: ignore[no-untyped-call]
        else:
            forward_over = forward
        backward = clock.mark()
        if self.optimizer is not None:
            self.optimizer.step()
        update = clock.mark()
        clock.wait()
        return _Phases(
            clock.between(start, forward),
            clock.between(forward_over, backward) if training else 0.0,
            clock.between(backward, update) if self.optimizer is not None else 0.0,
        )

    def hooked(self) -> tuple[_Phases, Parts, Parts]:
        """Take one step with hooks; return also the seconds of each module's forward and backward."""
        watch = Watch(self.model, self.clock)
        try:
            phases = self._run(watch.forward, watch.watch_backward)
        finally:
            watch.end()
        return phases, watch.forward_parts(), watch.backward_parts()


def _measure(
    step: _Step, warmup: int, least: int, budget: float
) -> tuple[list[_Phases], list[tuple[_Phases, Parts, Parts]]]:
    for _ in range(warmup):
        step.whole()
        step.hooked()
    whole: list[_Phases] = []
    hooked: list[tuple[_Phases, Parts, Parts]] = []
    end = time.perf_counter() + budget
    while len(whole) < least or (time.perf_counter() < end and len(whole) < _MOST_STEPS):
        whole.append(step.whole())
        hooked.append(step.hooked())
    return whole, hooked


# From modules to operators -----------------------------------------------------------------------------------------


def _profiled(
    captured: Captured,
    whole: list[_Phases],
    hooked: list[tuple[_Phases, Parts, Parts]],
    model: nn.Module,
    state: Mapping[str, float] | None,
    own_loss: bool,
) -> Profile:
    seconds = [each.whole for each in whole]
    step = statistics.median(seconds)
    spread = 1.4826 * statistics.median(abs(each - step) for each in seconds) / step
    medians = [statistics.median(getattr(each, phase) for each in whole) for phase in ("forward", "backward", "update")]
    forward, backward, update = (each * step / sum(medians) for each in medians)
    forward_parts = _median_parts([_shares(parts, phases.forward) for phases, parts, _ in hooked])
    backward_parts = _median_parts([_shares(parts, phases.backward) for phases, _, parts in hooked])

    graph = _with_loss(captured) if own_loss and captured.outputs else captured.graph
    modules = [*captured.modules, *([LOSS_PATH] if len(graph.operators) > len(captured.modules) else [])]
    anywhere = set(captured.anywhere)
    weights = [operator.flop / FLOP_PER_BYTE + operator.moved_bytes for operator in graph.operators]
    backward_weights = [
        0.0 if operator.name in anywhere else weight for operator, weight in zip(graph.operators, weights, strict=True)
    ]
    moved = [
        operator.parameter_bytes * (operator.state_bytes > operator.parameter_bytes) for operator in graph.operators
    ]
    forwards = _scaled(_over_operators(forward_parts, modules, weights), forward, weights)
    backwards = _scaled(_over_operators(backward_parts, modules, backward_weights), backward, backward_weights)
    updates = _scaled(moved, update, weights)
    held = _held(captured, model, state, graph)
    operators = tuple(
        dataclasses.replace(operator, forward=f, backward=b, update=u, state_bytes=s)
        for operator, f, b, u, s in zip(graph.operators, forwards, backwards, updates, held, strict=True)
    )
    source = f"{captured.graph.source}; {len(whole)} steps measured"
    return Profile(
        dataclasses.replace(graph, operators=operators, source=source),
        step,
        forward,
        backward,
        update,
        spread,
        statistics.median(_residue(*each) for each in hooked),
        len(whole),
    )


def _residue(phases: _Phases, ahead: Parts, back: Parts) -> float:
    return 1 - (sum(ahead.values()) + sum(back.values()) + phases.update) / phases.whole


def _shares(parts: Parts, phase: float) -> Parts:
    """Return the parts as shares of their step's phase: a step that the machine slowed down counts as any other."""
    return {path: seconds / phase for path, seconds in parts.items()}


def _median_parts(runs: Sequence[Parts]) -> Parts:
    paths = dict.fromkeys(path for run in runs for path in run)
    return {path: statistics.median(run.get(path, 0.0) for run in runs) for path in paths}


def _over_operators(parts: Parts, modules: Sequence[str], weights: Sequence[float]) -> list[float]:
    """Give each module's seconds to its operators by weight.

    A module without operators (all it does are views, or it was merged into one above it) gives to the nearest above.
    """
    members: dict[str, list[int]] = {}
    for number, path in enumerate(modules):
        if weights[number] > 0:
            members.setdefault(path, []).append(number)
    seconds = [0.0] * len(modules)
    for path, part in parts.items():
        while path not in members and path not in ("", LOSS_PATH):
            path = path.rpartition(".")[0]
        own = members.get(path, [])
        total = sum(weights[number] for number in own)
        for number in own:
            seconds[number] += part * weights[number] / total
    return seconds


def _scaled(seconds: Sequence[float], whole: float, weights: Sequence[float]) -> list[float]:
    """Return the seconds scaled to the sum ``whole``; spread by weight where there are none."""
    if sum(seconds) <= 0:
        seconds = weights if sum(weights) > 0 else [1.0] * len(seconds)
    total = sum(seconds)
    return [each * whole / total for each in seconds]


def _with_loss(captured: Captured) -> Graph:
    graph = captured.graph
    sent = sum(size for _, size in captured.outputs)
    name = LOSS if all(each.name != LOSS for each in graph.operators) else LOSS_PATH
    operator = Operator(name, kind=LOSS, moved_bytes=2 * sent, activation_bytes=sent, mixes_batch=True)
    place = len(graph.operators)
    tensors = tuple(Tensor(producer, (place,), size) for producer, size in captured.outputs)
    return dataclasses.replace(graph, operators=(*graph.operators, operator), tensors=(*graph.tensors, *tensors))


def _held(captured: Captured, model: nn.Module, state: Mapping[str, float] | None, graph: Graph) -> list[float]:
    """Return every operator's ``state_bytes``, with the optimizer's state as it was found where there was one."""
    if state is None:
        return [operator.state_bytes for operator in graph.operators]
    sizes = {name: each.numel() * each.element_size() for name, each in model.named_parameters()}
    trained = {name for name, each in model.named_parameters() if each.requires_grad}
    held = []
    for operator, names in zip(captured.graph.operators, captured.parameters, strict=True):
        change = sum(state.get(name, 0.0) - captured.optimizer_state * sizes[name] for name in names if name in trained)
        held.append(max(operator.state_bytes + change, 0.0))
    return held + [0.0] * (len(graph.operators) - len(held))


def _samples(captured: Captured, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None) -> int | None:
    return Call.of(args, kwargs, captured.batch_dim).samples


def _state_bytes(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, float]:
    """Return the bytes that the optimizer holds for each parameter, after a step."""
    return {
        name: float(
            sum(v.numel() * v.element_size() for v in optimizer.state.get(p, {}).values() if torch.is_tensor(v))
        )
        for name, p in model.named_parameters()
    }


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Keep the garbage collector from running inside a measured step."""
    enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
