"""Turning a script's loop in PyTorch into one member's part of a run over the Internet.

What an island does is in ``runtime/local/island.py``; here are its tensors, its loaders and the hooks on its optimizer.

A member may be several processes with fast links among them. They share out the member's part of every batch and
combine gradients at every step, as under strategy ``data``, so their parameters are always the same. The first alone
talks to the run. After every step, and whenever a loader is to give a batch (it may have heard more in an evaluation),
it tells the others what it has heard, and all go on from there:

    rank 0   step │ hears of round 8, parameters move │ tells           │ batch, step ...
    rank 1   step │                                   │ is told, copies │ batch, step ...
"""

from __future__ import annotations

import random
import weakref
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import IterableDataset

from nearlinear.core.plan import Plan
from nearlinear.core.shares import share, share_between
from nearlinear.errors import InputError
from nearlinear.planning.rounds import LOOK_STEPS, adaptive_rate, noise_left, signal_share
from nearlinear.runtime.environment import World
from nearlinear.runtime.liveness import Liveness
from nearlinear.runtime.local.codecs import Floats
from nearlinear.runtime.local.island import Island, Place, Trained, lies_behind
from nearlinear.torch.collectives import Group
from nearlinear.torch.session import Batch, Passage, Session, derived_seed

Named = Sequence[tuple[str, torch.Tensor]]


PATIENCE = 10  # deadlines that the other processes of a member wait for its first, which may wait for a round


@dataclass(frozen=True, slots=True)
class _View:
    """What the processes of a member know of the run, all the same.

    Args:
        share: Where the member's part of every batch begins and ends.
        place: Pass and batch to which the run has come, in every loader.
        rates: The run's learning rates, where the member's own schedule is behind.
    """

    share: tuple[float, float] = (0.0, 1.0)
    place: Place = field(default_factory=list)
    rates: list[float] | None = None


class IslandSession(Session):
    """One process's part in a run over the Internet: others, in which the parameters differ, share its batches.

    Args:
        world: Who this process is among those of its member.
        liveness: Who of them still answers; None if it is the only one.
    """

    def __init__(self, world: World, liveness: Liveness | None = None) -> None:
        super().__init__(world, liveness)
        self._entered = self._agreeing = False
        self._island: Island | None = None  # in the member's first process
        self._number = 0  # of the member in the run
        self._told: Group | None = None  # by which it tells the others
        self._view = _View()
        self._moved = False  # the run has moved the parameters since the others were told
        self._tensors: list[torch.Tensor] = []
        self._groups: list[dict[str, Any]] = []  # of the optimizer
        self._optimizer: torch.optim.Optimizer
        self._own_rates: list[tuple[Any, Any]] = []  # and weight decays, while a step is taken at others
        self._signal: float | None = None
        self._seen = 0  # steps on a part of the batch

    # ---- entering

    def enter(self, model: nn.Module, named: Named, loaders: Sequence[Any], weight: Any, plan: Plan) -> None:
        """Join the run that the ticket names, and take over its outer parameters.

        Raises:
            InputError: There is a model in it already, or what it trains cannot be averaged.
            PeerLostError: The run does not answer.
        """
        if self._entered:
            raise InputError("strategy 'local' trains one model, and distribute was called for a second one")
        if weight == "sum":
            raise InputError(
                "weight='sum': the loss is a sum over the batch, of which every member sees its part, and the mean of "
                "what members learn would be too little; under strategy 'local' let the loss be a mean"
            )
        for loader in loaders:
            if isinstance(getattr(loader, "dataset", None), IterableDataset) and loader.batch_size is not None:
                raise InputError(
                    "strategy 'local' shares out data sets with an index, and a loader's is an IterableDataset; let it "
                    "yield whole batches (batch_size=None), or keep it out of distribute and draw differently on each "
                    "machine"
                )
        buffers = [(name, buffer) for name, buffer in model.named_buffers() if buffer.is_floating_point()]
        for name, tensor in (*named, *buffers):
            if not tensor.is_floating_point():
                raise InputError(f"{name} is of type {tensor.dtype}; strategy 'local' averages real numbers")
            if tensor.dtype == torch.float64:
                self.notice("strategy 'local' exchanges float32: float64 parameters are rounded to it every round")
        tensors = {id(tensor): (name, tensor) for name, tensor in (*named, *buffers)}
        self._tensors = [tensor for _, tensor in tensors.values()]
        trained = Trained(
            [(name, tuple(tensor.shape)) for name, tensor in tensors.values()],
            len({id(tensor) for _, tensor in named}),
            self._read,
            self._write,
            lambda: [(each["pass"], each["batch"]) for each in (state.state_dict() for state in self.states)],
            lambda: [float(group["lr"]) for group in self._groups],
        )
        self._told = self.new_group(torch.device("cpu"), deadline_s=PATIENCE * self.deadline_s)
        if self.rank == 0:
            self._island = Island.enter(trained, plan)
        self._number = 0 if self._island is None else self._island.number
        if self._told is not None:
            self._number = self._told.broadcast_json(self._number, "entering the run")
        self._entered = self._agreeing = True
        self._tell()

    def attach(self, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
        """Begin to count the optimizer's steps; ``distribute`` is over.

        Raises:
            InputError: There is no optimizer.
        """
        if optimizer is None:
            raise InputError("strategy 'local' counts the optimizer's steps; hand the optimizer over too")
        self.notice("members train apart between two rounds: the numbers are not those of one process")
        self._agreeing = False
        if self._number:
            # Dropout and augmentation differ between members, as they do between the samples of one batch. Not before
            # the order of the data is agreed on: it is what the script's own seed makes it.
            seed = derived_seed(torch.initial_seed(), "member", self._number)
            torch.manual_seed(seed)
            random.seed(seed)
            np.random.seed(seed % 2**32)
        self._optimizer, self._groups = optimizer, optimizer.param_groups
        optimizer.register_step_pre_hook(lambda *_: self._take_rates())
        optimizer.register_step_post_hook(lambda *_: self._stepped())
        _sessions[model] = self
        model.register_forward_pre_hook(_before_forward)
        if self._island is not None:
            self._island.begin()

    def all_gather_json(self, value: Any, what: str = "a message") -> list[Any]:
        """Return every process's value; while ``distribute`` goes on, what the run's first member had before them."""
        if not self._agreeing:
            return super().all_gather_json(value, what)
        if self._told is None:
            assert self._island is not None
            return [self._island.agree(value, what), value]
        agreed = self._told.broadcast_json(None if self._island is None else self._island.agree(value, what), what)
        return [agreed, *super().all_gather_json(value, what)]

    # ---- telling the member's other processes

    def _tell(self) -> None:
        """Let all processes of this member know what its first has heard; all of them call it."""
        view, island = self._view, self._island
        if island is not None:
            view = _View(island.share, island.places, island.rates(len(self._groups)))
        if self._told is not None:
            what = "hearing of the run from rank 0"
            flags = torch.tensor([view != self._view, self._moved], dtype=torch.uint8)
            self._told.broadcast(flags, what)
            if flags[0]:
                told = self._told.broadcast_json(asdict(view), what)
                view = _View(tuple(told["share"]), [(each[0], each[1]) for each in told["place"]], told["rates"])
            if flags[1]:
                values = torch.from_numpy(self._read())
                self._told.broadcast(values, what)
                if island is None:
                    self._write(values.numpy())
        self._view, self._moved = view, False

    # ---- this member's part of the data

    def _part(self, samples: int) -> range:
        """Return the positions in a batch that this member takes: of one to be trained on its part, else all."""
        trains = self._entered and torch.is_grad_enabled()
        return share_between(samples, *self._view.share) if trains else range(samples)

    def share(self, samples: int) -> range:
        """Return the positions in a batch that this process takes."""
        part = self._part(samples)
        mine = share(len(part), self.part, self.parts)
        return part[mine.start : mine.stop]

    def batch_of(self, samples: int) -> Batch:
        """Return what this process holds of a batch, of which its member has a part."""
        return Batch(len(self._part(samples)), len(self.share(samples)), everyones=samples)

    def fraction(self, batch: Batch) -> float:
        """Return the part of the mean over the member's part that this process's share stands for."""
        if batch.weight is not None and batch.total is None:
            batch.total = self._sum(batch.weight, "the weights of a batch")
        if not (batch.samples if batch.weight is None else batch.total):
            return 1.0 / self.parts  # nobody counts what is learnt from this; others may have what counts of the batch
        return super().fraction(batch)

    def is_past(self, loader: int, number: int, batch: int | None = None) -> bool:
        """Return whether the run has left this pass of a loader behind, or this batch of it."""
        if not self._entered or not torch.is_grad_enabled():
            return False
        place = self._view.place
        past = lies_behind(place[loader] if loader < len(place) else (0, 0), number, batch)
        if past and self._island is not None:
            self._island.leave_out()
        if past and batch is None:
            self.notice(
                f"the run is in pass {place[loader][0]} over the data; loops over the passes before it are empty here"
            )
        return past

    def began_pass(self, loader: int) -> Passage:
        """Note that a loader starts over; an evaluation is to see the outer parameters."""
        if self._told is not None and not torch.is_grad_enabled():
            self.settle("an evaluation")
            self._tell()
        return super().began_pass(loader)

    def fetching(self) -> None:
        """Let the next step of all processes begin with what the first knows, whatever it has heard since the last."""
        if self._told is not None and torch.is_grad_enabled():
            self._tell()

    def ended_pass(self, passage: Passage) -> None:
        """Note that a loader is exhausted: what follows is to see the outer parameters, with all that was learnt."""
        super().ended_pass(passage)
        if torch.is_grad_enabled() and self._entered:
            self.settle("the end of a pass over the data")
            self._tell()

    # ---- steps

    def _take_rates(self) -> None:
        """Step at the run's learning rates where this member's own schedule, having missed steps, is behind.

        And at those that make up for what an optimizer like Adam loses on a part of the batch.
        """
        self._own_rates = [(group["lr"], group.get("weight_decay")) for group in self._groups]
        for group, rate in zip(self._groups, self._view.rates or [], strict=False):
            group["lr"] = rate
        begin, end = self._view.share
        if end - begin >= 1:  # alone: the batch is whole
            return
        if self._seen % LOOK_STEPS == 0:
            self._signal = gradient_signal(self._optimizer)
        self._seen += 1
        if self._signal is None:
            return
        factor = adaptive_rate(end - begin, self._signal)
        for group in self._groups:
            group["lr"] = group["lr"] * factor
            if group.get("decoupled_weight_decay"):  # weights shrink by rate times decay
                group["weight_decay"] /= factor

    def _stepped(self) -> None:
        for group, (rate, decay) in zip(self._groups, self._own_rates, strict=True):
            group["lr"] = rate
            if decay is not None:
                group["weight_decay"] = decay
        self._own_rates = []
        batch = self.batch
        weight, samples = 1.0, 1
        if batch is not None:
            samples, weight = batch.everyones, float(batch.samples)
            if batch.weight is not None:
                weight = self._sum(batch.weight, "the weights of a batch") if batch.total is None else batch.total
        if self._island is not None:
            self._island.stepped(weight, samples)
        self._tell()

    def settle(self, what: str) -> None:
        """Return when the parameters are the outer ones, with all that this member has learnt.

        In the member's first process: its others have them when a loader next begins, gives a batch or ends.

        Args:
            what: For what, in messages.
        """
        if self._island is not None:
            self._island.settle(what)

    def settle_for_evaluation(self) -> None:
        """Settle, and say so where the member's other processes evaluate other parameters than its first."""
        self.settle("an evaluation")
        if self._told is not None and self._moved:
            self.notice(
                "an evaluation in the midst of a pass, over data that were not handed to distribute, is of the run's "
                "parameters in this member's first process alone; hand its loader over, or evaluate after the pass"
            )

    @torch.no_grad()
    def _read(self) -> Floats:
        flat = torch.empty(sum(tensor.numel() for tensor in self._tensors), dtype=torch.float32)
        parts = torch.split(flat, [tensor.numel() for tensor in self._tensors])
        for tensor, part in zip(self._tensors, parts, strict=True):
            part.view(tensor.shape).copy_(tensor)
        return flat.numpy()

    @torch.no_grad()
    def _write(self, values: Floats) -> None:
        self._moved = True
        flat = torch.tensor(values)
        parts = torch.split(flat, [tensor.numel() for tensor in self._tensors])
        for tensor, part in zip(self._tensors, parts, strict=True):
            tensor.copy_(part.view(tensor.shape))


@torch.no_grad()
def gradient_signal(optimizer: torch.optim.Optimizer) -> float | None:
    """Return the share of the squared mean gradient in the mean squared gradient; None where no moments are kept.

    Adam keeps running means of the gradient and of its square. What noise alone leaves in the square of the first, the
    sum of its squared weights, is taken off.
    """
    shares, count = 0.0, 0
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state = optimizer.state.get(parameter, {})
            if "betas" not in group or not {"step", "exp_avg", "exp_avg_sq"} <= state.keys():
                continue
            step, (one, two) = float(state["step"]), group["betas"]
            left = noise_left(one, step)
            square = state["exp_avg_sq"] / (1 - two**step)
            ratio = (state["exp_avg"] / (1 - one**step)).square()[square > 0] / square[square > 0]
            shares += signal_share(float(ratio.sum()), ratio.numel(), left)
            count += ratio.numel()
    return min(max(shares / count, 0.0), 1.0) if count else None


_sessions: weakref.WeakKeyDictionary[nn.Module, IslandSession] = weakref.WeakKeyDictionary()


def _before_forward(model: nn.Module, args: Any) -> None:
    """Let an evaluation see the outer parameters. (A plain function: a model that is pickled takes its hooks along.)"""
    session = _sessions.get(model)
    if session is not None and not model.training and not torch.is_grad_enabled():
        session.settle_for_evaluation()
