"""Turning a model and a batch into the planner's graph, by the best route that works for this model.

The ladder, best rung first:

    rung                    sees                         a plan may
    torch.export            operators, any batch size    cut anywhere: the graph is what is executed
    torch.export, strict    the same
    draft_export            operators                    plan alone: what depended on values is baked in
    modules                 modules, as they are called  cut between modules

A graph is also for planning alone where the forward pass does what no graph does: assigns attributes, draws Python's
random numbers.
"""

from __future__ import annotations

import contextlib
import os
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram

from nearlinear.core.graph import Graph
from nearlinear.errors import InputError
from nearlinear.torch.capture.batch import Call
from nearlinear.torch.capture.exported import DRAFT, NON_STRICT, STRICT, exported
from nearlinear.torch.capture.interpret import groups_of, names_of, record_exported
from nearlinear.torch.capture.modules import nodes_of, run_modules
from nearlinear.torch.capture.steps import Steps, operators_of, owned, steps_of, tensors_of, tied
from nearlinear.torch.capture.untouched import Traces, untouched

MODULES = "modules"
RUNGS = (NON_STRICT, STRICT, DRAFT, MODULES)


@dataclass(frozen=True)
class Captured:
    """A model's graph and how it was come by.

    Args:
        graph: The graph, without times; its costs are those of ``graph.samples`` samples.
        rung: Which rung of the ladder was used; one of ``RUNGS``.
        notes: Why the higher ones were not, and what else a person should know; a line each.
        program: The graph that may be executed, of the first two rungs; its nodes are named in ``nodes``.
        modules: The module that each operator belongs to, by position.
        nodes: The nodes of the program that each operator is, by position; empty on the last rung.
        tied: Names of the operators that share a parameter though they lie in different modules, a tuple for each such
            parameter. Its bytes are counted with the first of them.
        anywhere: Names of the operators that need the batch alone: every device may compute them for itself.
        parameters: Names of the parameters that count as each operator's own, by position.
        outputs: Positions of the operators that make what the model returns, and its bytes.
        batch_dim: The dimension along which the samples were found.
        optimizer_state: Numbers per parameter that the optimizer was taken to keep.
    """

    graph: Graph
    rung: str
    notes: tuple[str, ...] = ()
    program: ExportedProgram | None = field(default=None, compare=False, repr=False)
    modules: tuple[str, ...] = ()
    nodes: tuple[tuple[str, ...], ...] = ()
    tied: tuple[tuple[str, ...], ...] = ()
    anywhere: tuple[str, ...] = ()
    parameters: tuple[tuple[str, ...], ...] = ()
    outputs: tuple[tuple[int, float], ...] = ()
    batch_dim: int = 0
    optimizer_state: float = 2.0

    def __str__(self) -> str:
        return "\n".join([f"{self.graph} (by {self.rung})", *(f"  {note}" for note in self.notes)])


def capture(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None = None,
    *,
    batch_dim: int = 0,
    optimizer_state: float = 2.0,
    rungs: Sequence[str] = RUNGS,
    name: str | None = None,
) -> Captured:
    """Return the graph of the model's forward pass, in the mode (training or not) in which the model is.

    The model is left as it was: buffers, gradients, attributes, random streams. On the first two rungs nothing is
    computed, tensors have shapes without values; a model on the meta device can be captured. The other two run the
    model on the batch.

    Args:
        model: What to capture.
        args: What it is called with; a batch of the size that the costs are for.
        kwargs: The named arguments.
        batch_dim: The dimension along which tensors hold the samples.
        optimizer_state: Numbers that the optimizer keeps per parameter: 2 for Adam, 1 for momentum, 0 for plain SGD.
        rungs: Which rungs to try, best first.
        name: What to call the graph; the model's class by default.

    Raises:
        InputError: No rung works; the message has the reason of each.
    """
    call = Call.of(args, kwargs, batch_dim)
    lazy = [path for path, each in model.named_parameters() if nn.parameter.is_lazy(each)]
    if lazy:
        raise InputError(f"{_few(lazy)} have no shape yet; call the model once before it is captured")
    if any(parameter.is_meta for parameter in model.parameters()):
        call = call.on(torch.device("meta"))
    notes: list[str] = []
    for rung in rungs:
        with untouched(model) as traces, _without_cache(model) as quieted:
            try:
                captured = _climb(rung, model, call)
            except Exception as error:  # noqa: BLE001  a model under a tracer may raise anything; the next rung is tried
                notes.append(f"not by {rung}: {_reason(error)}")
                continue
        return _finished(captured, model, call, rung, [*notes, *quieted], traces, optimizer_state, name)
    raise InputError(f"{type(model).__name__} cannot be captured; {'; '.join(notes)}")


def _unused(model: nn.Module, steps: Steps) -> list[str]:
    used = {each for step in steps.steps for each in step.parameters}
    return [name for name, _ in model.named_parameters() if name not in used]


@dataclass(frozen=True)
class _Found:
    steps: Steps
    program: ExportedProgram | None
    nodes: tuple[tuple[str, ...], ...]
    notes: list[str]
    samples: int


def _climb(rung: str, model: nn.Module, call: Call) -> _Found:
    if rung == MODULES:
        return _by_modules(model, call)
    if rung == DRAFT and any(each.is_meta for each in model.parameters()):
        raise InputError("it needs values, and the model is on the meta device")
    two = call.with_samples(max(call.samples, 2))
    program, notes = exported(model, two, rung)
    samples = call.samples
    try:
        recorded = record_exported(program, model, call, real=False)
    except Exception as error:
        if any(each.is_meta for each in model.parameters()):
            raise
        notes.append(f"costs are those of this batch's values ({_reason(error)})")
        samples = two.samples
        recorded = record_exported(program, model, two, real=True)
    groups, labels = groups_of(program, model, recorded.ops)
    steps = steps_of(recorded, groups, labels)
    left_out = _unused(model, steps)
    if rung == DRAFT and left_out:
        # It takes branches and picks rows by values that may be none that the model has: a run of the model shows.
        raise InputError(f"it leaves out {_few(left_out)}")
    names = names_of(program)
    nodes = tuple(tuple(dict.fromkeys(names[op.tag] for op in step.ops)) for step in steps.steps)
    return _Found(steps, program if rung != DRAFT else None, nodes, notes, samples)


def _by_modules(model: nn.Module, call: Call) -> _Found:
    run = run_modules(model, call)
    other, notes = None, []
    try:
        other = run_modules(model, call.with_samples(call.samples // 2 if call.samples >= 4 else 2 * call.samples))
    except Exception as error:  # noqa: BLE001  the model's own code; what it needs the second run for is said
        notes = [f"which operators mix the batch is not known: it runs on no other batch size ({_reason(error)})"]
    groups, labels = nodes_of(run, other)
    return _Found(steps_of(run.recorded, groups, labels), None, (), notes, call.samples)


def _finished(
    found: _Found,
    model: nn.Module,
    call: Call,
    rung: str,
    notes: list[str],
    traces: Traces,
    optimizer_state: float,
    name: str | None,
) -> Captured:
    steps = found.steps
    parameters = dict(model.named_parameters())
    operators = operators_of(
        steps,
        {each: float(value.numel() * value.element_size()) for each, value in parameters.items()},
        {each for each, value in parameters.items() if value.requires_grad},
        {each: float(value.numel() * value.element_size()) for each, value in model.named_buffers()},
        optimizer_state,
    )
    graph = Graph(
        operators,
        tensors_of(steps),
        name=name or type(model).__name__,
        training=model.training,
        samples=found.samples,
        source=rung,
    )
    across = [
        tuple(operators[number].name for number in users)
        for users in tied(steps.steps).values()
        if len({steps.steps[number].label.path for number in users}) > 1
    ]
    notes += found.notes
    program = found.program
    if program is not None and traces.assigned:
        program = None
        assigned = _few(traces.assigned)
        notes.append(f"for planning alone: its forward pass assigns {assigned}, which the captured graph would not do")
    if traces.drew and rung != MODULES:
        program = None
        notes.append("for planning alone: it draws Python's or NumPy's random numbers, and the graph has what it drew")
    notes += [f"one parameter is shared by {' and '.join(users)}" for users in across]
    unused = _unused(model, steps)
    if unused:
        notes.append(f"used by no operator: {_few(unused)}")
    return Captured(
        graph,
        rung,
        tuple(notes),
        program,
        tuple(step.label.path for step in steps.steps),
        found.nodes,
        tuple(across),
        tuple(operators[number].name for number in sorted(steps.anywhere)),
        owned(steps.steps),
        tuple(sorted(steps.outputs.items())),
        call.dim,
        optimizer_state,
    )


@contextlib.contextmanager
def _without_cache(model: nn.Module) -> Iterator[list[str]]:
    """Keep decoders of transformers from giving their cache of keys back: training has no use for it."""
    configs = {
        id(config): config for module in model.modules() if (config := getattr(module, "config", None)) is not None
    }
    caching = [config for config in configs.values() if getattr(config, "use_cache", False) is True]
    for config in caching:
        config.use_cache = False
    try:
        yield ["config.use_cache was off while capturing"] if caching else []
    finally:
        for config in caching:
            config.use_cache = True


def _reason(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = lines[0] if lines else "no message"
    where = _line_of(error)
    return f"{type(error).__name__}: {text[:200]}{f' at {where}' if where else ''}"


def _line_of(error: Exception) -> str:
    """Return the line of the model's own code where ``error`` comes from, as far as the traceback shows it."""
    found = ""
    for frame in traceback.extract_tb(error.__traceback__):
        if not any(part in frame.filename for part in _NOT_THE_MODELS):
            found = f"{Path(frame.filename).name}:{frame.lineno}: {frame.line}"
    return found


_NOT_THE_MODELS = (f"{os.sep}torch{os.sep}", f"{os.sep}nearlinear{os.sep}torch{os.sep}", "<")


def _few(names: Sequence[str], most: int = 3) -> str:
    rest = len(names) - most
    return ", ".join(names[:most]) + (f" and {rest} more" if rest > 0 else "")
