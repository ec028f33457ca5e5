"""Training apart from the others for many steps, and together with them at the end of every round.

    steps of round 7        round 8                                  round 9
    ...──────────────┤ capture: what was learnt goes its way ...
                     ├──────────────────┤ news: the outer parameters with everybody's round 7
                       learnt meanwhile                              put on top of them; it belongs to round 8

A member's parameters are always the outer ones plus what it has learnt and nobody counted yet. So whatever happens to
a round (this member was late, cut off, stopped), news moves the ground and leaves what was learnt on it.

Every member works on its share of every batch, as in strategy ``data``: the batch size, the number of steps and the
learning rate's schedule are those of the script, and with one step per round and SGD so are the numbers.

Source: S. U. Stich, "Local SGD Converges Fast and Communicates Little", 2018, arXiv 1805.09767; A. Douillard et al.,
"DiLoCo", 2023, arXiv 2311.08105; exchange beside the next steps: "Streaming DiLoCo", 2025, arXiv 2501.18512.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import json
import os
import queue
import random
import socket
import sys
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import IterableDataset

from nearlinear import events
from nearlinear.core.plan import Plan
from nearlinear.core.shares import share_between
from nearlinear.errors import InputError, NearlinearError, PeerLostError
from nearlinear.runtime.ending import failed
from nearlinear.runtime.environment import World, deadline_s, silence_s, world_from
from nearlinear.runtime.local.codecs import Floats
from nearlinear.runtime.local.member import Member, News, Update
from nearlinear.runtime.local.ticket import Ticket
from nearlinear.runtime.local.update import Sizes
from nearlinear.torch.session import Passage, Session, derived_seed
from nearlinear.units import seconds

ATTEMPTS = 5  # rounds in which a member that must be counted tries to be
REPORT_S = 0.2

Named = Sequence[tuple[str, torch.Tensor]]


def ticket() -> Ticket | None:
    """Return the ticket that ``nearlinear run --listen`` or ``nearlinear join`` gave this process, if one did."""
    text = os.environ.get("NEARLINEAR_TICKET")
    return None if text is None else Ticket.parse(text)


def apart(plan: Plan) -> bool:
    """Return whether this process trains apart from others, as a member of a run over the Internet.

    Raises:
        InputError: It cannot as it was started.
    """
    if plan.strategy != "local":
        return False
    size = world_from().size
    if size > 1:
        raise InputError(
            f"strategy 'local' trains machines that are far apart, and these are {size} processes of one run; start "
            "one on each machine: `nearlinear run --listen HOST:PORT script.py`, and `nearlinear join TICKET script.py`"
        )
    return ticket() is not None  # else the only one of its run, which is the plain script


@dataclass(slots=True)
class Tally:
    """What was done since the last capture.

    Args:
        samples: What it counts for in the mean.
        steps: Optimizer steps.
        seconds: Their time, waiting left out.
    """

    samples: float = 0.0
    steps: int = 0
    seconds: float = 0.0

    def __add__(self, other: Tally) -> Tally:
        return Tally(self.samples + other.samples, self.steps + other.steps, self.seconds + other.seconds)


@dataclass(slots=True)
class _UnderWay:
    after: News
    values: Floats  # the parameters at the capture
    tally: Tally


@dataclass(slots=True)
class _Report:
    samples: float = 0.0
    waited: float = 0.0
    since: float = field(default_factory=time.perf_counter)


class Island(Session):
    """One process's part in a run over the Internet: a session of one rank, whose batches are shared with the others.

    Args:
        world: Who this process is: the only one of its island.
    """

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self._member: Member | None = None
        self._tensors: list[torch.Tensor] = []
        self._news: News
        self._base: Floats  # what the parameters would be without what was learnt and not counted
        self._under_way: _UnderWay | None = None
        self._tally = Tally()
        self._every = 1
        self._share = (0.0, 1.0)
        self._began = time.perf_counter()
        self._steps = 0
        self._groups: list[dict[str, Any]] = []  # of the optimizer
        self._behind = 0  # steps of the run that this member was not there for
        self._own_rates: list[Any] = []
        self._questions = 0
        self._agreeing = False
        self._report = _Report()

    # ---- entering

    def enter(self, model: nn.Module, named: Named, loaders: Sequence[Any], plan: Plan) -> None:
        """Join the run that the ticket names, and take over its outer parameters.

        Raises:
            InputError: There is a model in it already, or it holds what cannot be averaged.
            PeerLostError: The run does not answer.
        """
        if self._member is not None:
            raise InputError("strategy 'local' trains one model, and distribute was called for a second one")
        word = ticket()
        assert word is not None
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
        self._tensors = list({id(tensor): tensor for _, tensor in (*named, *buffers)}.values())
        parameters = sum(tensor.numel() for _, tensor in named)
        sizes = Sizes(parameters, sum(tensor.numel() for tensor in self._tensors) - parameters)
        shapes = [[name, list(tensor.shape)] for name, tensor in (*named, *buffers)]
        self._member = Member.join(
            word,
            socket.gethostname(),
            sizes,
            hashlib.blake2b(json.dumps(shapes).encode(), digest_size=16).hexdigest(),
            self._read,
            codec=plan.compress or "int8",
            every=plan.every or 0,
            say=self._say,
            deadline_s=deadline_s(),
            silence_s=silence_s(),
            identity=os.environ.get("NEARLINEAR_IDENTITY"),
        )
        self._news = self._member.news(deadline_s())
        self._behind = self._news.at
        self._begin_steps()
        self._write(self._news.outer)
        self._base = self._read()
        number = self._member.number
        if number:
            # Dropout and augmentation differ between members, as they do between the samples of one batch.
            seed = derived_seed(torch.initial_seed(), "member", number)
            torch.manual_seed(seed)
            random.seed(seed)
            np.random.seed(seed % 2**32)
        self._say(f"member {number} of the run at {word.host}:{word.port}, round {self._news.round}")
        self._agreeing = True
        atexit.register(self.close)

    def attach(self, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
        """Begin to count the optimizer's steps; ``distribute`` is over.

        Raises:
            InputError: There is no optimizer.
        """
        if optimizer is None:
            raise InputError("strategy 'local' counts the optimizer's steps; hand the optimizer over too")
        self.notice("members train apart between two rounds: the numbers are not those of one process")
        self._agreeing = False
        self._groups = optimizer.param_groups
        optimizer.register_step_pre_hook(lambda *_: self._take_rates())
        optimizer.register_step_post_hook(lambda *_: self._stepped())
        _islands[model] = self
        model.register_forward_pre_hook(_before_forward)
        self._began = time.perf_counter()

    def all_gather_json(self, value: Any, what: str = "a message") -> list[Any]:
        """Return, while ``distribute`` goes on, what the run's first member had there, and this one's value."""
        if not self._agreeing:
            return [value]
        assert self._member is not None
        self._questions += 1
        return [self._member.agree(f"{self._questions} {what}", value), value]

    def _say(self, line: str) -> None:
        events.publish("notice", message=line)
        print(f"nearlinear: {line}", file=sys.stderr, flush=True)

    # ---- this member's part of the data

    def share(self, samples: int) -> range:
        """Return the positions in a batch that this member takes: of one to be trained on its part, else all."""
        return share_between(samples, *self._share) if torch.is_grad_enabled() else range(samples)

    def is_past(self, loader: int, number: int, batch: int | None = None) -> bool:
        """Return whether the run has left this pass of a loader behind, or this batch of it."""
        if self._member is None or loader >= len(self._news.place) or not torch.is_grad_enabled():
            return False
        there = self._news.place[loader]
        past = there[0] > number or (there[0] == number and batch is not None and batch < there[1])
        if past:
            self._behind = max(self._behind, self._news.at - self._steps)
        return past

    def ended_pass(self, passage: Passage) -> None:
        """Note that a loader is exhausted: what follows is to see the outer parameters, with all that was learnt."""
        super().ended_pass(passage)
        if torch.is_grad_enabled():
            self.settle("the end of a pass over the data")

    # ---- steps

    def _take_rates(self) -> None:
        """Step at the run's learning rates where this member's own schedule, having missed steps, is behind."""
        if self._behind > self._news.behind and len(self._news.rates) == len(self._groups):
            self._own_rates = [group["lr"] for group in self._groups]
            for group, rate in zip(self._groups, self._news.rates, strict=True):
                group["lr"] = rate

    def _stepped(self) -> None:
        assert self._member is not None
        for group, rate in zip(self._groups, self._own_rates, strict=False):
            group["lr"] = rate
        self._own_rates = []
        self._steps += 1
        batch = self.batch
        weight = 1.0 if batch is None else batch.mine if batch.weight is None else batch.weight
        self._tally += Tally(float(weight), 1)
        self._report.samples += 1 if batch is None else batch.samples
        with contextlib.suppress(queue.Empty):
            while True:
                self._hear(self._member.news())
        called = self._member.called == self._news.round and self._under_way is None
        if self._tally.steps >= self._every or called:
            self._await_news("the exchange of a round")
            self._capture()
        self._send_report()

    def settle(self, what: str) -> None:
        """Return when the parameters are the outer ones, with all that this member has learnt.

        Args:
            what: For what, in messages.
        """
        if self._member is None or self._agreeing:
            return
        for _ in range(ATTEMPTS):
            self._await_news(what)
            if not self._tally.steps:
                return
            self._capture()
        self._say(f"{what}: the last {self._tally.steps} steps of this member reached no round; they are kept here")

    def _capture(self) -> None:
        """Begin to tell the others what was learnt since the last time."""
        assert self._member is not None
        values = self._read()
        change = self._base - values
        if not np.isfinite(change).all():
            broken = int(change.size - np.isfinite(change).sum())
            raise NearlinearError(
                f"after step {self._steps} {broken} of {change.size} parameters are not finite on this member; the "
                "others go on without it. Lower the learning rate, or clip gradients"
            )
        tally = self._tally
        tally.seconds += time.perf_counter() - self._began
        place = [(each["pass"], each["batch"]) for each in (state.state_dict() for state in self.states)]
        rates = [float(group["lr"]) for group in self._groups]
        at = self._steps + self._behind
        self._under_way = _UnderWay(self._news, values, tally)
        update = Update(self._news, change, tally.samples, tally.steps, tally.seconds, at, self._behind, place, rates)
        self._member.deliver(update)
        self._begin_steps()

    def _begin_steps(self) -> None:
        """Let the steps from here on be of the newest round that every member has heard of by its capture."""
        self._tally, self._began = Tally(), time.perf_counter()
        self._every, self._share = self._news.every, self._news.share

    def _await_news(self, what: str) -> None:
        """Return when nothing is under way."""
        assert self._member is not None
        while self._under_way is not None:
            # The centre waits for the slowest as long again as the first took, and then goes on without it.
            limit_s = deadline_s() + 2 * self._under_way.tally.seconds
            began = time.perf_counter()
            try:
                news = self._member.news(limit_s)
            except queue.Empty:
                raise PeerLostError(
                    f"round {self._news.round} was not over within {seconds(limit_s)}, in {what}, though its centre "
                    "answers; NEARLINEAR_DEADLINE='1 h' waits longer"
                ) from None
            waited = time.perf_counter() - began
            self._report.waited += waited
            self._began += waited
            self._hear(news)

    def _hear(self, news: News) -> None:
        """Put what was learnt and not counted on top of the new outer parameters."""
        values, under_way = self._read(), self._under_way
        anchor = under_way.values if under_way is not None and news.counted else self._base
        if under_way is not None and not news.counted:
            self._tally += under_way.tally
        self._news, self._under_way = news, None
        learnt = values - anchor
        self._write(news.outer + learnt)
        # What a narrower type rounds away is not taken for something learnt.
        self._base = self._read() - learnt

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

    # ---- the end

    def close(self) -> None:
        """Bring in what is left, unless the script failed, and leave."""
        if self._member is None:
            return
        if not failed():
            try:
                self.settle("the end of the script")
            except NearlinearError as error:
                self._say(str(error))
        self._member.leave()
        self._member = None

    def _send_report(self) -> None:
        now = time.perf_counter()
        spent = now - self._report.since
        if spent < REPORT_S:
            return
        report, self._report = self._report, _Report()
        events.send_to_launcher(
            "step",
            rank=0,
            model=0,
            step=self._steps,
            samples_per_s=report.samples / spent,
            waiting=min(1.0, report.waited / spent),
        )


_islands: weakref.WeakKeyDictionary[nn.Module, Island] = weakref.WeakKeyDictionary()


def _before_forward(model: nn.Module, args: Any) -> None:
    """Let an evaluation see the outer parameters. (A plain function: a model that is pickled takes its hooks along.)"""
    island = _islands.get(model)
    if island is not None and not model.training and not torch.is_grad_enabled():
        island.settle("an evaluation")
