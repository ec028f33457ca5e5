"""Running a split model over a batch: microbatches forward through the stages, the loss on all of it, gradients back.

One step of three stages and three microbatches, all ranks at once; L is the loss, S the optimizer's step:

    rank 0  F0 F1 F2               B0 B1 B2 S
    rank 1     F0 F1 F2         B0 B1 B2    S
    rank 2        F0 F1 F2 L B0 B1 B2       S

What one stage hands to another leaves in the background, and what comes is read in the background, so both overlap with
computing.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from nearlinear.core.schedule import Kind, gpipe
from nearlinear.tensorflow.pipeline.gradients import Sum
from nearlinear.tensorflow.pipeline.penalties import Penalties
from nearlinear.tensorflow.pipeline.split import Split
from nearlinear.tensorflow.pipeline.stages import Pass, Stage
from nearlinear.tensorflow.pipeline.tail import Outputs
from nearlinear.tensorflow.pipeline.transfer import Links

_schedule = functools.lru_cache(gpipe)
_PENALTIES = "what regularizers add to the loss"
_ADDED = "what layers add to the loss"


@dataclass
class Run:
    """One batch on its way through the stages.

    Args:
        inputs: Flat inputs of the whole batch.
        bounds: The beginning and the end of each microbatch.
        training: Whether gradients will be asked for.
        key: What the types and shapes of all that is computed depend on, beside the samples of a microbatch.
        passes: This rank's forward passes.
        arrived: What came from other stages, tensor and mask, for each microbatch.
        added: What the layers of each stage add to the loss, for each microbatch.
    """

    inputs: Sequence[Any]
    bounds: list[tuple[int, int]]
    training: bool
    key: Any
    passes: list[Pass] = field(default_factory=list)
    arrived: list[dict[int, tuple[Any, Any]]] = field(default_factory=list)
    added: dict[int, list[Any]] = field(default_factory=dict)


@dataclass(frozen=True)
class FromLoss:
    """The gradients of the loss, where it is.

    Args:
        outputs: Of the model's outputs.
        added: Of what the layers of each stage add, by stage, shape ``(microbatches, losses)``.
        penalties: Of what each rank's regularizers add, by rank.
    """

    outputs: Sequence[Any]
    added: dict[int, Any]
    penalties: dict[int, Any]


class Executor:
    """One rank's part of a split model; stage s is with rank s.

    Args:
        split: The model in stages.
        stage: This rank's stage.
        links: To the other ranks.
        penalties: Of this rank's variables.
        penalized: The ranks that have any, ascending.
        own: The rank's variables that take gradients.
    """

    def __init__(
        self,
        split: Split,
        stage: Stage,
        links: Links,
        penalties: Penalties,
        penalized: Sequence[int],
        own: Sequence[keras.Variable],
    ) -> None:
        self._split, self._stage, self._links, self._own = split, stage, links, list(own)
        self._penalties, self._penalized = penalties, list(penalized)
        self._program, self._part, self._here = stage.program, stage.part, links.mesh.rank
        arriving = split.arriving(self._here)
        self._sources = sorted({split.producer[value] for value in arriving})
        self._targets = sorted({reader for value in self._part.made for reader in split.readers[value]})
        # The last stage hears from all what their layers add to the loss.
        if self.last:
            self._sources = list(range(split.last))
        elif split.last not in self._targets:
            self._targets.append(split.last)

    @property
    def last(self) -> bool:
        """Whether the model's outputs are here."""
        return self._here == self._split.last

    # ---- forward

    def forward(self, inputs: Sequence[Any], microbatches: int, *, training: bool) -> tuple[Run, Outputs | None]:
        """Run this rank's stage over a batch; return the model's outputs where the last stage is.

        Args:
            inputs: Flat inputs of the whole batch.
            microbatches: Into how many to cut it, if it has twice as many samples.
            training: Whether gradients will be asked for.
        """
        samples = next(int(each.shape[0]) for each in inputs if each is not None)
        bounds = parts(samples, max(1, min(microbatches, samples // 2)))
        key = tuple(None if each is None else (each.dtype.name, *each.shape[1:]) for each in inputs)
        run = Run(inputs, bounds, training, (key, training))
        penalty = self._penalties.forward(differentiate=training) if self._penalties else None
        if penalty is not None and not self.last:
            self._links.send_described(self._split.last, "penalties", (), [penalty], [_PENALTIES], _PENALTIES)
        for action in _schedule(len(self._split.parts), len(bounds)).stages[self._here]:
            if action.kind is Kind.FORWARD:
                self._forward(run, action.microbatch)
        return run, self._joined(run, penalty) if self.last else None

    def _forward(self, run: Run, microbatch: int) -> None:
        begin, end = run.bounds[microbatch]
        what, key = f"the forward pass of microbatch {microbatch}", (run.key, end - begin)
        arrived: dict[int, tuple[Any, Any]] = {}
        for source in self._sources:
            values = self._split.between(source, self._here)
            found = self._links.receive_described(source, "forward", key, what)
            tensors, masks = found[: len(values)], found[len(values) : 2 * len(values)]
            arrived.update(zip(values, zip(tensors, masks, strict=True), strict=True))
            if self.last:
                run.added.setdefault(source, []).append(found[-1])
        given = {value: (self._slice(run, value, begin, end), None) for value in self._part.inputs}
        given.update((value, arrived[value]) for value in self._part.entering)
        asked = [value for value in self._part.entering if self._flows(value, arrived[value][0])]
        differentiate = asked if run.training and (asked or self._own) else None
        whole = len(run.bounds) == 1
        done = self._stage.forward(given, training=run.training, differentiate=differentiate, whole=whole)
        run.passes.append(done)
        run.arrived.append(arrived)
        if self.last:
            run.added.setdefault(self._here, []).append(done.losses)
        for target in self._targets:
            values = self._split.between(self._here, target)
            tensors = [*(done.made[value][0] for value in values), *(done.made[value][1] for value in values)]
            names = [self._program.maker(value) for value in values] * 2
            if target == self._split.last:
                tensors, names = [*tensors, done.losses], [*names, _ADDED]
            self._links.send_described(target, "forward", key, tensors, names, what)

    def _slice(self, run: Run, value: int, begin: int, end: int) -> Any:
        tensor = run.inputs[value]
        return tensor if tensor is None or len(run.bounds) == 1 else tensor[begin:end]

    def _flows(self, value: int, tensor: Any) -> bool:
        """Return whether the gradient of a value goes back to where it was made."""
        return value in self._split.wanted and bool(tensor.dtype.is_floating)

    def _joined(self, run: Run, penalty: Any) -> Outputs:
        """Return what the stages made of the whole batch."""
        tensors, masks = [], []
        for value in self._program.outputs:
            pieces = self._pieces(run, value)
            tensors.append(_together([tensor for tensor, _ in pieces]))
            masks.append(None if pieces[0][1] is None else _together([mask for _, mask in pieces]))
        penalties = {
            rank: penalty if rank == self._here else self._links.receive_described(rank, "penalties", (), _PENALTIES)[0]
            for rank in self._penalized
        }
        added = {stage: tf.stack(found) for stage, found in sorted(run.added.items()) if found[0] is not None}
        sizes = np.array([end - begin for begin, end in run.bounds])
        return Outputs(tensors, masks, added, tf.constant(sizes / sizes.sum(), keras.config.floatx()), penalties)

    def _pieces(self, run: Run, value: int) -> list[tuple[Any, Any]]:
        """Return a value of every microbatch with its mask."""
        if value < self._program.inputs:
            return [(run.inputs[value], None)]
        if self._split.producer[value] == self._here:
            return [each.made[value] for each in run.passes]
        return [each[value] for each in run.arrived]

    # ---- backward

    def backward(self, run: Run, loss: FromLoss | None) -> list[Any]:
        """Return the gradients of this rank's own variables, None where there is none.

        Args:
            run: The batch.
            loss: What the loss says, where the last stage is.
        """
        owed, added = self._from_loss(run, loss) if loss is not None else ({}, {})
        sums = [Sum() for _ in self._own]
        for action in _schedule(len(self._split.parts), len(run.bounds)).stages[self._here]:
            if action.kind is Kind.BACKWARD:
                found = self._backward(run, action.microbatch, owed, added)
                for total, gradient in zip(sums, found, strict=True):
                    total.add(gradient)
        if self._penalties:
            if loss is None:
                gradient = self._links.receive(self._split.last, "penalty", self._penalties.like(), _PENALTIES)
            else:
                gradient = loss.penalties[self._here]
            place = {id(each): number for number, each in enumerate(self._own)}
            for variable, one in self._penalties.backward(gradient):
                sums[place[id(variable)]].add(one)
        return [total.value for total in sums]

    def _from_loss(self, run: Run, loss: FromLoss) -> tuple[dict[tuple[int, int], Any], dict[int, Any]]:
        """Send the other ranks what concerns them, and return the gradients of outputs and losses, by microbatch."""
        for rank, gradient in loss.penalties.items():
            if rank != self._here:
                self._links.send(rank, "penalty", gradient, _PENALTIES)
        for stage, gradient in loss.added.items():
            for microbatch in range(len(run.bounds) if stage != self._here else 0):
                row = None if gradient is None else gradient[microbatch]
                self._links.send(stage, "added", row, _ADDED)
        owed: dict[tuple[int, int], Any] = {}
        for value, gradient in zip(self._program.outputs, loss.outputs, strict=True):
            if value < self._program.inputs or gradient is None:
                continue
            begin = 0
            for microbatch, (tensor, _) in enumerate(self._pieces(run, value)):
                piece, begin = gradient, begin + int(tensor.shape[0] if len(run.bounds) > 1 else 0)
                if len(run.bounds) > 1:
                    piece = gradient[begin - int(tensor.shape[0]) : begin]
                known = owed.get((value, microbatch))
                owed[value, microbatch] = piece if known is None else known + piece
        mine = loss.added.get(self._here)
        return owed, {} if mine is None else {number: mine[number] for number in range(len(run.bounds))}

    def _backward(
        self, run: Run, microbatch: int, owed: dict[tuple[int, int], Any], added: dict[int, Any]
    ) -> list[Any]:
        what, done = f"the backward pass of microbatch {microbatch}", run.passes[microbatch]
        gradients: dict[int, Any] = {}
        for value in self._part.made:
            tensor = done.made[value][0]
            if tensor.dtype.is_floating:
                gradients[value] = owed.get((value, microbatch))
            for reader in self._split.readers[value] if self._flows(value, tensor) else ():
                like = tensor.dtype.name, tensor.shape
                coming = self._links.receive(reader, f"backward:{value}", like, what)
                gradients[value] = _sum(gradients[value], coming)
        losses = added.get(microbatch)
        if done.losses is not None and not self.last:
            like = done.losses.dtype.name, done.losses.shape
            losses = self._links.receive(self._split.last, "added", like, _ADDED)
        entered, own = self._stage.backward(done, gradients, losses)
        for value, (tensor, _) in run.arrived[microbatch].items():
            if self._flows(value, tensor):
                gradient = _sum(entered.get(value), owed.get((value, microbatch)))
                self._links.send(self._split.producer[value], f"backward:{value}", gradient, what)
        return own


def parts(samples: int, microbatches: int) -> list[tuple[int, int]]:
    """Return the beginning and the end of each microbatch: sizes differ by at most one."""
    ends = [samples * (number + 1) // microbatches for number in range(microbatches)]
    return list(zip([0, *ends[:-1]], ends, strict=True))


def _together(pieces: Sequence[Any]) -> Any:
    return pieces[0] if len(pieces) == 1 else tf.concat(list(pieces), 0)


def _sum(one: Any, other: Any) -> Any:
    return other if one is None else one if other is None else one + other
