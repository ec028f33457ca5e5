"""Turning a script's loop in PyTorch into one member's part of a run over the Internet.

What an island does is in ``runtime/local/island.py``; here are its tensors, its loaders and the hooks on its optimizer.
"""

from __future__ import annotations

import random
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import IterableDataset

from nearlinear.core.plan import Plan
from nearlinear.errors import InputError
from nearlinear.planning.rounds import LOOK_STEPS, adaptive_rate, noise_left, signal_share
from nearlinear.runtime.environment import World
from nearlinear.runtime.local.codecs import Floats
from nearlinear.runtime.local.island import Island, Trained
from nearlinear.torch.session import Passage, Session, derived_seed

Named = Sequence[tuple[str, torch.Tensor]]


class IslandSession(Session):
    """One process's part in a run over the Internet: a session of one rank, whose batches are shared with the others.

    Args:
        world: Who this process is: the only one of its island.
    """

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self._island: Island | None = None
        self._tensors: list[torch.Tensor] = []
        self._groups: list[dict[str, Any]] = []  # of the optimizer
        self._optimizer: torch.optim.Optimizer
        self._own_rates: list[tuple[Any, Any]] = []  # and weight decays, while a step is taken at others
        self._signal: float | None = None
        self._seen = 0  # steps on a part of the batch
        self._agreeing = False

    # ---- entering

    def enter(self, model: nn.Module, named: Named, loaders: Sequence[Any], weight: Any, plan: Plan) -> None:
        """Join the run that the ticket names, and take over its outer parameters.

        Raises:
            InputError: There is a model in it already, or what it trains cannot be averaged.
            PeerLostError: The run does not answer.
        """
        if self._island is not None:
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
        self._island = Island.enter(trained, plan)
        number = self._island.number
        if number:
            # Dropout and augmentation differ between members, as they do between the samples of one batch.
            seed = derived_seed(torch.initial_seed(), "member", number)
            torch.manual_seed(seed)
            random.seed(seed)
            np.random.seed(seed % 2**32)
        self._agreeing = True

    def attach(self, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
        """Begin to count the optimizer's steps; ``distribute`` is over.

        Raises:
            InputError: There is no optimizer.
        """
        assert self._island is not None
        if optimizer is None:
            raise InputError("strategy 'local' counts the optimizer's steps; hand the optimizer over too")
        self.notice("members train apart between two rounds: the numbers are not those of one process")
        self._agreeing = False
        self._optimizer, self._groups = optimizer, optimizer.param_groups
        optimizer.register_step_pre_hook(lambda *_: self._take_rates())
        optimizer.register_step_post_hook(lambda *_: self._stepped())
        _sessions[model] = self
        model.register_forward_pre_hook(_before_forward)
        self._island.begin()

    def all_gather_json(self, value: Any, what: str = "a message") -> list[Any]:
        """Return, while ``distribute`` goes on, what the run's first member had there, and this one's value."""
        if not self._agreeing:
            return [value]
        assert self._island is not None
        return [self._island.agree(value, what), value]

    # ---- this member's part of the data

    def share(self, samples: int) -> range:
        """Return the positions in a batch that this member takes: of one to be trained on its part, else all."""
        if self._island is None or not torch.is_grad_enabled():
            return range(samples)
        return self._island.positions(samples)

    def is_past(self, loader: int, number: int, batch: int | None = None) -> bool:
        """Return whether the run has left this pass of a loader behind, or this batch of it."""
        return self._island is not None and torch.is_grad_enabled() and self._island.is_past(loader, number, batch)

    def ended_pass(self, passage: Passage) -> None:
        """Note that a loader is exhausted: what follows is to see the outer parameters, with all that was learnt."""
        super().ended_pass(passage)
        if torch.is_grad_enabled():
            self.settle("the end of a pass over the data")

    # ---- steps

    def _take_rates(self) -> None:
        """Step at the run's learning rates where this member's own schedule, having missed steps, is behind.

        And at those that make up for what an optimizer like Adam loses on a part of the batch.
        """
        assert self._island is not None
        self._own_rates = [(group["lr"], group.get("weight_decay")) for group in self._groups]
        rates = self._island.rates(len(self._groups))
        for group, rate in zip(self._groups, rates or [], strict=False):
            group["lr"] = rate
        begin, end = self._island.share
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
        assert self._island is not None
        for group, (rate, decay) in zip(self._groups, self._own_rates, strict=True):
            group["lr"] = rate
            if decay is not None:
                group["weight_decay"] = decay
        self._own_rates = []
        batch = self.batch
        weight = 1.0 if batch is None else batch.mine if batch.weight is None else batch.weight
        self._island.stepped(float(weight), 1 if batch is None else batch.samples)

    def settle(self, what: str) -> None:
        """Return when the parameters are the outer ones, with all that this member has learnt.

        Args:
            what: For what, in messages.
        """
        if self._island is not None:
            self._island.settle(what)

    @torch.no_grad()
    def _read(self) -> Floats:
        flat = torch.empty(sum(tensor.numel() for tensor in self._tensors), dtype=torch.float32)
        parts = torch.split(flat, [tensor.numel() for tensor in self._tensors])
        for tensor, part in zip(self._tensors, parts, strict=True):
            part.view(tensor.shape).copy_(tensor)
        return flat.numpy()

    @torch.no_grad()
    def _write(self, values: Floats) -> None:
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
        session.settle("an evaluation")
