"""Running a split model: microbatches forward through the stages, the tail on the whole batch, gradients back.

One call of the model, four stages, three microbatches, all ranks at once; `T` is the tail:

    rank 0  F0 F1 F2                        B0 B1 B2
    rank 1     F0 F1 F2                  B0 B1 B2
    rank 2        F0 F1 F2            B0 B1 B2
    rank 3           F0 F1 F2 T   T  B0 B1 B2

Between the two halves the script's own loss runs. Where a function of a batch is handed over (``nl.step``) each call is
one microbatch and the halves interleave. What a microbatch waits for is received while earlier ones are computed
(``ahead.py``).

What one segment hands to another is cut from its autograd graph: the reader holds a leaf, and the leaf's gradient goes
back as the gradient of what was sent.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

from nearlinear.torch.capture.batch import Call
from nearlinear.torch.pipeline.again import Again
from nearlinear.torch.pipeline.ahead import Ahead, Direction, Promise
from nearlinear.torch.pipeline.draws import drawing
from nearlinear.torch.pipeline.stages import Crossing, Split
from nearlinear.torch.pipeline.transfer import Links


class Executor:
    """One rank's part of a split model.

    Args:
        split: The model.
        ranks: The rank of each stage, ascending.
        rank: This one.
        state: The model's parameters, buffers and constants.
        batch_dims: For every leaf of the batch the dimension that holds the samples; ``None``: all get the whole leaf.
        device: Where this rank computes.
    """

    def __init__(
        self,
        split: Split,
        ranks: Sequence[int],
        rank: int,
        state: State,
        batch_dims: Sequence[int | None],
        device: torch.device,
    ) -> None:
        self.split, self.rank, self.ranks = split, rank, tuple(ranks)
        self.state, self.batch_dims, self.device = state, tuple(batch_dims), device
        self.links: Links | None = None
        self.mine = [number for number, holder in enumerate(ranks) if holder == rank]
        # In the order in which they are made, so that both ends of a link name the same one next.
        ordered = [split.crossings[name] for segment in split.segments[:-1] for name in segment.outputs]
        self.entering = [each for each in ordered if rank in self.readers(each)]
        self.leaving = [each for each in ordered if self.rank_of(each.producer) == rank and self.readers(each)]
        here, there = (self.entering, self._maker), (self.leaving, self.readers)
        self.forwards = Promise(Direction(self, "forward pass", *here), Direction(self, "forward pass", *there))
        self.backwards = Promise(Direction(self, "backward pass", *there), Direction(self, "backward pass", *here))

    @property
    def last(self) -> bool:
        """Whether the model's outputs are here."""
        return self.rank == self.ranks[-1]

    def rank_of(self, segment: int) -> int:
        """Return the rank that runs a segment."""
        return self.ranks[min(segment, self.split.stages - 1)]

    def readers(self, crossing: Crossing) -> list[int]:
        """Return the other ranks that read what ``crossing`` is, ascending."""
        return sorted({self.rank_of(each) for each in crossing.consumers} - {self.rank_of(crossing.producer)})

    def _maker(self, crossing: Crossing) -> list[int]:
        return [self.rank_of(crossing.producer)]

    def pairs(self) -> list[tuple[int, int]]:
        """Return every direction in which tensors go, between any two ranks."""
        found: set[tuple[int, int]] = set()
        for each in self.split.crossings.values():
            source = self.rank_of(each.producer)
            for reader in self.readers(each):
                found |= {(source, reader), (reader, source)}
        return sorted(found)

    def flush(self) -> None:
        """Wait until the other ranks have taken all that was sent."""
        if self.links is not None:
            self.links.flush("handing over what earlier passes made")

    def settle(self) -> None:
        """Pass what was promised of a microbatch that does not follow; all ranks do so at the same line."""
        self.forwards.settle()
        self.backwards.settle()

    def empty(self, crossing: Crossing, samples: int) -> torch.Tensor:
        """Return room for what ``crossing`` is of so many samples."""
        shape = [size(each, samples) for each in crossing.shape]
        return torch.empty(shape, dtype=crossing.dtype, device=self.device)

    def begin(
        self,
        leaves: Sequence[Any],
        samples: int,
        microbatches: int,
        *,
        training: bool,
        following: int = 0,
        recompute: bool = False,
    ) -> Run:
        """Return a run over one batch; at most one microbatch for every two samples.

        Args:
            leaves: The batch, in the program's order.
            samples: Samples in it.
            microbatches: Into how many it is cut.
            training: Whether a backward pass follows.
            following: Samples of the run that will come after it, as far as can be told; 0: none.
            recompute: Whether a backward pass begins with the forward pass once more.
        """
        count = max(1, min(microbatches, samples // 2)) if self.split.microbatches else 1
        return Run(self, leaves, parts(samples, count), training=training, following=following, recompute=recompute)


def parts(samples: int, microbatches: int) -> list[tuple[int, int]]:
    """Return the beginning and the end of each microbatch: sizes differ by at most one."""
    ends = [samples * (number + 1) // microbatches for number in range(microbatches)]
    return list(zip([0, *ends[:-1]], ends, strict=True))


class State:
    """Finds a parameter, buffer or constant of the model by its name in the program."""

    def __init__(self, model: nn.Module, program: ExportedProgram) -> None:
        self._model = weakref.ref(model)
        self._constants = dict(program.constants)
        self._owner: dict[str, tuple[nn.Module, str]] = {}
        self._named: list[tuple[str, nn.Parameter]] | None = None  # the model keeps its parameters once it is split

    def __call__(self, name: str) -> Any:
        place = self._owner.get(name)
        if place is None:
            model = self._model()
            assert model is not None
            path, _, attribute = name.rpartition(".")
            try:
                module = model.get_submodule(path)
            except AttributeError:
                module = None
            if module is None or not hasattr(module, attribute):
                return self._constants[name]
            place = self._owner[name] = (module, attribute)
        return getattr(*place)

    def trainable(self) -> frozenset[str]:
        """Return the names of the parameters that take gradients now."""
        if self._named is None:
            model = self._model()
            assert model is not None
            self._named = list(model.named_parameters(remove_duplicate=False))
        with torch._C.DisableTorchFunctionSubclass():  # those of other stages would each ask Python
            return frozenset(name for name, each in self._named if each.requires_grad)


def in_order(call: Call, spec: pytree.TreeSpec) -> list[Any]:
    """Return the leaves of the call in the program's order: it names the arguments in an order of its own."""
    names = spec.child(1).context
    return pytree.tree_leaves((call.args, {name: call.kwargs[name] for name in names}))


@dataclass(frozen=True)
class _Pass:
    """What a pass through one segment leaves for its backward pass.

    Args:
        inputs: What it read from other segments.
        outputs: What it made that has gradients; of one that is to be run again, nothing.
        again: What running it again needs.
    """

    inputs: dict[str, torch.Tensor]
    outputs: dict[str, torch.Tensor]
    again: Again | None = None


class Run:
    """One batch on its way through the pipeline."""

    def __init__(
        self,
        executor: Executor,
        leaves: Sequence[Any],
        bounds: list[tuple[int, int]],
        *,
        training: bool,
        following: int,
        recompute: bool,
    ) -> None:
        self._executor, self._split, self._leaves, self._bounds = executor, executor.split, leaves, bounds
        self._following = following
        trainable = executor.state.trainable() if training else frozenset[str]()
        self.trainable = trainable
        self._training = training and bool(trainable)
        self._recompute = recompute and self._training
        self._drawn_by: tuple[int, ...] = ()
        # The same objects for all microbatches: optimizers and buffers are written in place.
        self._state = {
            number: [*map(executor.state, self._split.segments[number].parameters)] for number in executor.mine
        }
        self._differentiable = {
            name for name, each in self._split.crossings.items() if not each.parameters.isdisjoint(trainable)
        }
        self._values: dict[tuple[str, int], torch.Tensor] = {}  # made or received here, and to be read here
        self._passes: dict[tuple[int, int], _Pass] = {}
        self._tail: tuple[_Pass, list[Any]] | None = None
        self._owed: dict[tuple[str, int], torch.Tensor] = {}  # gradients of crossings, as far as they are known here

    @property
    def samples(self) -> int:
        """Samples in the batch."""
        return self._bounds[-1][1]

    @property
    def _sizes(self) -> list[int]:
        """Samples in each microbatch."""
        return [end - begin for begin, end in self._bounds]

    # ---- forward

    def forward(self, *drawn_by: int) -> list[Any]:
        """Run this rank's stages; return the model's outputs, one per leaf, where the last stage is.

        Args:
            drawn_by: Numbers that random operators draw by (``draws.py``); none: from torch's streams.
        """
        executor, self._drawn_by = self._executor, drawn_by
        entering = Ahead(executor.forwards, self._sizes, executor.split.crossings, self._following)
        returned: list[Any] = []
        with torch.set_grad_enabled(self._training):
            for number in executor.mine:
                segment = self._split.segments[number]
                if segment.once is not None:
                    with torch.no_grad():
                        segment.once(*map(executor.state, segment.changed))
            for microbatch in range(len(self._bounds)):
                for crossing, [value] in entering.take(microbatch):
                    self._values[crossing.name, microbatch] = value
                with self._drawing(microbatch):
                    for number in executor.mine:
                        self._stage_forward(number, microbatch)
            if executor.last:
                with self._drawing(-1):
                    returned = self._tail_forward()
        self._values.clear()
        return returned

    def _drawing(self, microbatch: int) -> contextlib.AbstractContextManager[None]:
        """Let random operators draw what they draw for a microbatch, however often it is run."""
        return drawing(*self._drawn_by, microbatch) if self._drawn_by else contextlib.nullcontext()

    def _stage_forward(self, number: int, microbatch: int) -> None:
        executor, segment = self._executor, self._split.segments[number]
        inputs = {name: self._leaf(name, self._values[name, microbatch]) for name in segment.inputs}
        if self._recompute:
            buffers = [
                place
                for place, name in enumerate(segment.parameters)
                if number in self._split.writers.get(name, ()) and isinstance(self._state[number][place], torch.Tensor)
            ]
            again = Again(
                self._state[number], buffers, [segment.parameters[each] in segment.changed for each in buffers]
            )
            with torch.no_grad():
                outputs = self._made(number, microbatch, inputs)
            again.ran()
            self._passes[number, microbatch] = _Pass(inputs, {}, again)
        else:
            outputs = self._made(number, microbatch, inputs)
        if self._training and not self._recompute:
            kept = {name: each for name, each in outputs.items() if each.requires_grad}
            self._passes[number, microbatch] = _Pass(inputs, kept)
        for name, tensor in outputs.items():
            crossing = self._split.crossings[name]
            if any(executor.rank_of(each) == executor.rank for each in crossing.consumers):
                self._values[name, microbatch] = tensor.detach()
            for reader in executor.readers(crossing):
                assert executor.links is not None
                executor.links.send(tensor.detach(), reader, f"the forward pass of microbatch {microbatch}")

    def _made(self, number: int, microbatch: int, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Run one stage on one microbatch and return what it makes for others."""
        segment, (begin, end) = self._split.segments[number], self._bounds[microbatch]
        batch = [self._slice(position, begin, end) for position in segment.batch]
        sizes = [size(each, end - begin) for each in segment.sizes]
        made = segment.run(*self._state[number], *inputs.values(), *batch, *sizes)
        return dict(zip(segment.outputs, made, strict=True))

    def _tail_forward(self) -> list[Any]:
        executor, segment = self._executor, self._split.segments[-1]
        inputs = {name: self._leaf(name, self._joined(name)) for name in segment.inputs}
        batch = [self._leaves[position] for position in segment.batch]
        sizes = [size(each, self.samples) for each in segment.sizes]
        made = iter(segment.run(*map(executor.state, segment.parameters), *inputs.values(), *batch, *sizes))
        returned = [next(made) if each.constant is None else each.constant[0] for each in self._split.returned]
        self._tail = (_Pass(inputs, {}), returned)
        return returned

    def _joined(self, name: str) -> torch.Tensor:
        """Return a value of all microbatches."""
        dim = self._split.crossings[name].batch_dim
        found = [self._values[name, microbatch] for microbatch in range(len(self._bounds))]
        return found[0] if dim is None or len(found) == 1 else torch.cat(found, dim)

    def _leaf(self, name: str, value: torch.Tensor) -> torch.Tensor:
        return value.detach().requires_grad_(self._training and name in self._differentiable)

    def _slice(self, position: int, begin: int, end: int) -> Any:
        leaf, dim = self._leaves[position], self._executor.batch_dims[position]
        if dim is None or end - begin == self.samples:
            return leaf
        return leaf.narrow(dim, begin, end - begin)

    # ---- backward

    def backward(self, gradients: Sequence[torch.Tensor | None], live: Collection[int]) -> None:
        """Run the backward passes of this rank's stages.

        Args:
            gradients: Of the model's outputs, one per leaf; looked at where the last stage is.
            live: Positions of the outputs that have a gradient, the same on all ranks.
        """
        executor = self._executor
        flowing = {name for name in self._differentiable if not self._split.crossings[name].reaches.isdisjoint(live)}
        if executor.last:
            self._tail_backward(gradients, flowing)
        coming = Ahead(executor.backwards, self._sizes, flowing, self._following)
        for microbatch in range(len(self._bounds)):
            for crossing, values in coming.take(microbatch):
                for value in values:
                    self._owe(crossing.name, microbatch, value)
            for number in reversed(executor.mine):
                self._stage_backward(number, microbatch)
            for crossing in executor.entering:
                if crossing.name in flowing:
                    self._send_back(crossing, microbatch)

    def _tail_backward(self, gradients: Sequence[torch.Tensor | None], flowing: set[str]) -> None:
        assert self._tail is not None
        done, returned = self._tail
        pairs = [
            (output, gradient)
            for output, gradient in zip(returned, gradients, strict=True)
            if gradient is not None and isinstance(output, torch.Tensor) and output.requires_grad
        ]
        _differentiate(pairs)
        for name in done.inputs.keys() & flowing:
            gradient, dim = done.inputs[name].grad, self._split.crossings[name].batch_dim
            if gradient is None:
                continue
            for microbatch, (begin, end) in enumerate(self._bounds):
                if dim is not None and len(self._bounds) > 1:
                    per_sample = gradient.shape[dim] // self.samples
                    self._owe(name, microbatch, gradient.narrow(dim, begin * per_sample, (end - begin) * per_sample))
                elif microbatch == 0:
                    self._owe(name, microbatch, gradient)
        self._tail = None

    def _stage_backward(self, number: int, microbatch: int) -> None:
        done = self._passes.pop((number, microbatch))
        with contextlib.nullcontext() if done.again is None else done.again.restored():
            outputs = done.outputs
            if done.again is not None:
                with done.again.as_then(), self._drawing(microbatch):
                    outputs = self._made(number, microbatch, done.inputs)
            pairs = [
                (output, gradient)
                for name, output in outputs.items()
                if output.requires_grad and (gradient := self._owed.pop((name, microbatch), None)) is not None
            ]
            _differentiate(pairs)
        for name, leaf in done.inputs.items():
            if leaf.grad is not None:
                self._owe(name, microbatch, leaf.grad)

    def _owe(self, name: str, microbatch: int, gradient: torch.Tensor) -> None:
        known = self._owed.get((name, microbatch))
        self._owed[name, microbatch] = gradient if known is None else known + gradient

    def _send_back(self, crossing: Crossing, microbatch: int) -> None:
        links = self._executor.links
        assert links is not None
        gradient = self._owed.pop((crossing.name, microbatch), None)
        if gradient is None:
            gradient = self._executor.empty(crossing, self._sizes[microbatch]).zero_()
        sender = self._executor.rank_of(crossing.producer)
        links.send(gradient, sender, f"the backward pass of microbatch {microbatch}")


def size(expression: Any, samples: int) -> Any:
    """Return the value of an expression in the number of samples."""
    return expression if isinstance(expression, int) else _evaluated(expression, samples)


@functools.lru_cache(maxsize=4096)
def _evaluated(expression: Any, samples: int) -> Any:
    value = expression.subs(dict.fromkeys(expression.free_symbols, samples))
    return int(value) if value.is_integer else bool(value) if value.is_Boolean else float(value)


def _differentiate(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    if pairs:
        torch.autograd.backward([output for output, _ in pairs], [gradient for _, gradient in pairs])
