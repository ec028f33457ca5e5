"""The one call: hooking a model, its optimizer and its loaders into the run."""

from __future__ import annotations

import atexit
import time
import weakref
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from nearlinear import events
from nearlinear.core.cluster import Link
from nearlinear.core.plan import Plan
from nearlinear.errors import InputError
from nearlinear.runtime.ending import install_excepthook
from nearlinear.runtime.environment import plan_asked_for, world_from
from nearlinear.runtime.local.island import apart
from nearlinear.torch import batchnorm
from nearlinear.torch.collectives import Group
from nearlinear.torch.data import require_same_batches, require_shareable, share_out
from nearlinear.torch.fitting import fitting
from nearlinear.torch.local import IslandSession
from nearlinear.torch.metrics import mean, total
from nearlinear.torch.reducer import Reducer
from nearlinear.torch.session import Session, Weight, start
from nearlinear.torch.sharded import renew, require_shardable, shard
from nearlinear.torch.sharded_tensors import is_sharded
from nearlinear.torch.state import broadcast_state, require_same_model, separate_streams


class Combining(Protocol):
    """What makes the gradients of one ``distribute`` call those of one process."""

    names: list[str]
    parameters: list[torch.Tensor]
    number: int
    samples: int
    waited_s: float
    link: Link | None

    def before_step(self, optimizer: torch.optim.Optimizer, *, first: bool) -> None: ...

    def after_step(self, optimizer: torch.optim.Optimizer) -> None: ...

    def compare(self, step: int) -> None: ...


_combining: list[Combining] = []


def distribute(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    loaders: Sequence[Any],
    strategy: str | Plan,
    weight: Weight | str | None,
) -> None:
    """Hook the objects into the run, in place. ``nearlinear.distribute`` documents the arguments."""
    install_excepthook()
    asked = plan_asked_for(strategy)
    if isinstance(optimizer, torch.optim.Optimizer):
        renew(optimizer)  # it may be the second one of a model that is sharded already
    meta = asked is None or asked.strategy == "pipeline"
    _check(model, optimizer, weight, meta=meta and world_from().size > 1)
    named = _named_parameters(model, optimizer)
    device = next((each.device for _, each in named if not each.is_meta), torch.device("cpu"))
    session = start(device, IslandSession) if asked is not None and apart(asked) else start(device)
    plan = fitting(model, named, optimizer, session) if asked is None else asked
    if plan.strategy != "pipeline":
        _check(model, optimizer, weight, meta=False)  # another model's way may not be for this one
    # The processes of one member of a run over the Internet train among themselves as under strategy `data`.
    within = Plan("data", check_every=plan.check_every) if isinstance(session, IslandSession) else plan
    number = session.models
    session.models += 1
    pipelined = plan.strategy == "pipeline" and session.size > 1
    session.arrange(plan.stages_on(session.size))
    buffers = list(model.named_buffers())
    if isinstance(session, IslandSession):
        session.enter(model, named, loaders, weight, plan)
    require_same_model([*named, *buffers], session)
    if plan.strategy == "sharded" and session.size > 1:
        taken = {id(parameter) for each in _combining for parameter in each.parameters}
        require_shardable(model, optimizer, [(name, p) for name, p in named if id(p) not in taken], plan)
    for which, loader in enumerate(loaders, session.loaders):
        require_shareable(loader, session, which)
    if len(set(map(id, loaders))) < len(loaders):
        raise InputError("a loader was handed over twice in one call; hand each loader over once")
    _weigh(session, loaders, weight)
    for which, loader in enumerate(loaders, session.loaders):
        share_out(loader, session, weight if callable(weight) else None, which)
    session.weight = weight if callable(weight) else session.weight
    session.loaders += len(loaders)
    session.states += [loader._nearlinear for loader in loaders]
    plain = [tensor for _, tensor in [*named, *buffers] if not (tensor.is_meta or is_sharded(tensor))]
    broadcast_state(plain, session.control)
    if batchnorm.synchronise(model):
        batchnorm.open_group(named[0][1].device)
    if session.size > 1:
        if number == 0:
            separate_streams(session)
        _name_differences(model, session, pipelined)
        if within.compress:
            session.notice(f"{plan.compress} on the wire rounds gradients: the numbers are not those of one process")
    notes = _hook(named, model, optimizer, session, within, number)
    if isinstance(session, IslandSession):
        session.attach(model, optimizer)
    facts = {"rank": session.rank, "world_size": session.size}
    what = {"front_end": "torch", "model": model, "optimizer": optimizer, "notes": notes, "plan": plan}
    events.publish("distributed", **facts, **what)
    events.send_to_launcher("distributed", strategy=plan.strategy, **facts)


def _check(model: Any, optimizer: Any, weight: Any, *, meta: bool) -> None:
    if not isinstance(model, nn.Module):
        raise InputError(f"the model is a {type(model).__name__}, not a torch.nn.Module; hand over the model first")
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        raise InputError(
            f"the optimizer is a {type(optimizer).__name__}, not a torch.optim.Optimizer; the order is "
            "distribute(model, optimizer, *loaders), with None for no optimizer"
        )
    if weight is not None and weight != "sum" and not callable(weight):
        raise InputError(f"weight is {weight!r}; give a function of a batch, or 'sum'")
    if isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
        raise InputError(f"the model is wrapped in {type(model).__name__}; hand over the model itself (model.module)")
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if isinstance(tensor, nn.UninitializedParameter | nn.UninitializedBuffer):
            raise InputError(f"{name} has no shape yet (a lazy layer); run the model once on one sample first")
        if tensor.is_meta and not meta:
            raise InputError(
                f"{name} is on the meta device and holds no values; call model.to_empty(device='cpu') and initialise "
                "it before distribute, or ask for strategy 'pipeline' on several ranks, which does that stage by stage"
            )
    own = {id(parameter) for parameter in model.parameters()}
    if not own:
        raise InputError(f"{type(model).__name__} has no parameters, so there is nothing to train")
    if optimizer is not None:
        held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        if not any(id(parameter) in own for parameter in held):
            raise InputError(
                f"the optimizer holds {len(held)} parameters and none of them is one of the model's {len(own)}; make "
                "it from this model's parameters() (after moving the model to its device)"
            )


def _named_parameters(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> list[tuple[str, torch.Tensor]]:
    """Return the model's parameters and those that only the optimizer holds (a loss's temperature, say)."""
    named: list[tuple[str, torch.Tensor]] = list(model.named_parameters())
    known = {id(parameter) for _, parameter in named}
    for g, group in enumerate(optimizer.param_groups if optimizer else ()):
        for p, parameter in enumerate(group["params"]):
            if id(parameter) not in known:
                known.add(id(parameter))
                named.append((f"optimizer group {g} parameter {p}", parameter))
    return named


def _weigh(session: Session, loaders: Sequence[Any], weight: Weight | str | None) -> None:
    """Settle whether the run's losses are means or parts of a sum; a second model without loaders follows the first.

    Raises:
        InputError: An earlier call settled it otherwise.
    """
    if weight is None and not loaders and session.summed is not None:
        return
    summed = weight == "sum"
    if session.summed is not None and session.summed != summed:
        first, now = ("'sum'", "a mean") if session.summed else ("a mean", "'sum'")
        raise InputError(
            f"an earlier distribute call took the losses of this run as {first} and this one takes them as {now}; "
            "give both calls the same kind of weight"
        )
    session.summed = summed


def _name_differences(model: nn.Module, session: Session, pipelined: bool) -> None:
    """Say, once, what cannot be the same as in one process."""
    layers = [
        name
        for name, module in model.named_modules()
        if isinstance(module, _BatchNorm) and not isinstance(module, nn.SyncBatchNorm)
    ]
    if layers:
        session.notice(
            f"BatchNorm ({_some(layers)}) normalises over each microbatch; --microbatches 1 gives the numbers of one "
            "process"
            if pipelined
            else f"BatchNorm ({_some(layers)}) normalises over each rank's share of the batch (and cannot train on a "
            "share of one sample); nn.SyncBatchNorm.convert_sync_batchnorm(model) before distribute gives the numbers "
            "of one process"
        )
    dropouts = [
        name
        for name, module in model.named_modules()
        if (isinstance(module, _DropoutNd) and module.p > 0)
        or (isinstance(module, nn.MultiheadAttention | nn.RNNBase) and module.dropout > 0)
    ]
    if dropouts:
        session.notice(f"dropout ({_some(dropouts)}) draws other random numbers on N processes than on one")


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - 2} more" if len(names) > 2 else ""
    return ", ".join(name or "the model" for name in names[:2]) + more


def _hook(
    named: list[tuple[str, torch.Tensor]],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    session: Session,
    plan: Plan,
    number: int,
) -> list[str]:
    owned = {id(parameter): reducer for reducer in _combining for parameter in reducer.parameters}
    fresh = [(name, p) for name, p in named if id(p) not in owned]
    # In one process there is nothing to combine; a recorder wants to see the gradients all the same.
    if session.size == 1 and not events.listened_to("gradients"):
        return []
    first = bool(fresh)
    made: list[Combining] = []
    if fresh and plan.strategy == "pipeline" and session.size > 1:
        from nearlinear.torch.pipeline.train import Pipeline  # the tracer takes a second to import

        made = [Pipeline(fresh, model, session, plan, number)]
    elif fresh and plan.strategy == "sharded" and session.size > 1:
        made += shard(model, optimizer, fresh, session, plan, number)
    elif fresh:
        made = [Reducer(fresh, model, session, session.new_group(fresh[0][1].device), plan, number)]
    for each in made:
        _combining.append(each)
        weakref.finalize(model, _forget, weakref.ref(each))
    if optimizer is not None:
        served = list(made)
        served += list({id(r): r for _, p in named if (r := owned.get(id(p))) is not None}.values())
        _Steps(served, model, optimizer, session, plan, first=first).attach()
    return [str(reducer.link) for reducer in _combining[-1:] if reducer.link]


def _forget(reference: weakref.ref[Any]) -> None:
    """Let go of the reducer of a model that is gone."""
    reducer = reference()
    if reducer is not None and reducer in _combining:
        _combining.remove(reducer)


class _Steps:
    """What happens around the steps of one optimizer."""

    def __init__(
        self,
        reducers: Sequence[Combining],
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        session: Session,
        plan: Plan,
        *,
        first: bool,
    ) -> None:
        self._combining, self._session, self._plan, self._first = reducers, session, plan, first
        self._model = weakref.ref(model)
        self._optimizer = optimizer
        self._groups = len(optimizer.param_groups)
        self._known = {id(parameter) for reducer in reducers for parameter in reducer.parameters}
        self._step = 0
        self._last = time.perf_counter()
        self._sent = 0.0
        self._tally: list[float] = [0, 0.0, 0.0]  # samples, seconds, seconds waited since the last report

    def attach(self) -> None:
        """Put the hooks on the optimizer."""
        last_words = weakref.WeakMethod(self._send)
        atexit.register(lambda: send() if (send := last_words()) is not None else None)
        self._optimizer.register_step_pre_hook(self._before)
        self._optimizer.register_step_post_hook(self._after)

    def _before(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # torch hands over the optimizer within args when it calls the hook of a wrapped step.
        closure = kwargs.get("closure") or next((a for a in args if callable(a)), None)
        if closure is None:
            for reducer in self._combining:
                reducer.before_step(optimizer, first=self._first)
            return None

        def whole_batch() -> Any:
            loss = closure()
            for reducer in self._combining:
                reducer.before_step(optimizer, first=self._first)
            # A line search compares losses: all ranks must see the same one.
            combine = total if self._session.summed else mean
            return loss if loss is None else combine(loss, self._session)

        args = tuple(whole_batch if a is closure else a for a in args)
        return args, {key: whole_batch if value is closure else value for key, value in kwargs.items()}

    def _after(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self._step += 1
        for reducer in self._combining:
            reducer.after_step(optimizer)
        Group.step = self._step
        grown = len(optimizer.param_groups) != self._groups
        if self._step == 1 or self._step % self._plan.check_every == 0 or grown:
            self._compare()
        self._report()

    def _compare(self) -> None:
        if self._session.size == 1:
            return
        model = self._model()
        named = list(model.named_parameters()) if model is not None else []
        groups = self._optimizer.param_groups
        named += [(f"a parameter of group {g}", p) for g, group in enumerate(groups) for p in group["params"]]
        for name, parameter in named:
            if id(parameter) not in self._known:
                raise InputError(
                    f"{name} became a parameter of the model or the optimizer after distribute, so its gradient is not "
                    "combined; build both first"
                )
        require_same_batches(self._session, self._step)
        for reducer in self._combining:
            reducer.compare(self._step)

    def _report(self) -> None:
        now = time.perf_counter()
        elapsed, self._last = now - self._last, now
        samples = sum(reducer.samples for reducer in self._combining)
        waited = sum(reducer.waited_s for reducer in self._combining)
        for reducer in self._combining:
            reducer.samples, reducer.waited_s = 0, 0.0
        for place, amount in enumerate((samples, elapsed, waited)):
            self._tally[place] += amount
        if events.listened_to("step"):
            events.publish(
                "step",
                model=self._combining[0].number,
                step=self._step,
                seconds=elapsed,
                waited=waited,
                samples=samples,
                parameters=self._parameters,
            )
        if self._step == 1:
            self._tally = [0, 0.0, 0.0]  # the first step measures and agrees; it would not be representative
        elif now - self._sent > 0.2:
            self._sent = now
            self._send()

    def _send(self) -> None:
        """Tell the launcher how far and how fast the run is."""
        samples, spent, waited = self._tally
        if not spent or isinstance(self._session, IslandSession):  # which tells of the whole batch itself
            return
        self._tally = [0, 0.0, 0.0]
        events.send_to_launcher(
            "step",
            rank=self._session.rank,
            model=self._combining[0].number,
            step=self._step,
            samples_per_s=samples / spent,
            waiting=waited / spent,
        )

    def _parameters(self) -> list[tuple[str, torch.Tensor]]:
        return [pair for r in self._combining for pair in zip(r.names, r.parameters, strict=True)]
