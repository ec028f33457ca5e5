"""Turning a model's size and the memory that is left into the way of training it, where nobody has planned one."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from nearlinear.core.plan import Plan
from nearlinear.errors import InputError
from nearlinear.measure.hardware import free_memory
from nearlinear.runtime.environment import world_from
from nearlinear.torch.session import Session
from nearlinear.torch.sharded import Named, require_shardable
from nearlinear.units import size

ROOM = 0.9  # of the memory that is left: activations and messages want some too


def fitting(model: nn.Module, named: Named, optimizer: torch.optim.Optimizer | None, session: Session) -> Plan:
    """Return the plan for strategy ``"auto"``, the same on all ranks, and say so where it is not ``data``.

    Every rank holds the model (``data``), unless gradients and the optimizer's state do not fit beside it on some rank
    (``sharded``), or nobody holds it yet, for it is on the meta device (``pipeline``). Further models of a script are
    trained as its first.

    Args:
        model: The model.
        named: What of it is trained.
        optimizer: What with.
        session: The run.
    """
    if session.auto is None:
        session.auto = _fitting(model, named, optimizer, session)
    return session.auto


def _fitting(model: nn.Module, named: Named, optimizer: torch.optim.Optimizer | None, session: Session) -> Plan:
    if session.size == 1:
        return Plan()
    meta = any(parameter.is_meta for _, parameter in named)
    mine = needed(named, optimizer), _free(named[0][1].device), meta
    ranks = session.all_gather_json(mine, "the memory that training needs")
    if all(meta for _, _, meta in ranks):
        session.notice("auto: the model is on the meta device, so every rank makes one stage of it (strategy pipeline)")
        return Plan("pipeline")
    rank, (need, free, _) = min(enumerate(ranks), key=lambda each: each[1][1] - each[1][0])
    plan = Plan("sharded")
    if need <= ROOM * free or not _shardable(model, optimizer, named, plan):
        return Plan()
    session.notice(
        f"auto: gradients and optimizer state take {size(need)} and rank {rank} has {size(free)} left, so each rank "
        "keeps a part of them and of the parameters (strategy sharded); `nearlinear plan` compares it with a pipeline"
    )
    return plan


def _shardable(model: nn.Module, optimizer: torch.optim.Optimizer | None, named: Named, plan: Plan) -> bool:
    try:
        require_shardable(model, optimizer, named, plan)
    except InputError:
        return False
    return True


def needed(named: Sequence[tuple[str, torch.Tensor]], optimizer: torch.optim.Optimizer | None) -> float:
    """Return the bytes that gradients and the optimizer's state will take, beyond what is there of them already.

    Example:
        >>> layer = torch.nn.Linear(9, 100)  # 4000 bytes of parameters
        >>> needed(list(layer.named_parameters()), torch.optim.Adam(layer.parameters()))
        12000.0
    """
    kept = kept_per_parameter(optimizer)
    total = 0.0
    for _, parameter in named:
        if not parameter.requires_grad:
            continue
        there = [] if parameter.grad is None else [parameter.grad]
        if optimizer is not None:
            there += [each for each in optimizer.state.get(parameter, {}).values() if isinstance(each, torch.Tensor)]
        total += max(0.0, (1 + kept) * parameter.nbytes - sum(each.nbytes for each in there if each.numel() > 1))
    return total


def kept_per_parameter(optimizer: torch.optim.Optimizer | None) -> float:
    """Return how many numbers an optimizer keeps for each one that it steps: 2 where its kind is not known.

    Example:
        >>> weight = [torch.zeros(1)]
        >>> kept_per_parameter(torch.optim.SGD(weight)), kept_per_parameter(torch.optim.SGD(weight, momentum=0.9))
        (0.0, 1.0)
    """
    if optimizer is None:
        return 0.0
    options = optimizer.defaults
    match optimizer:
        case torch.optim.SGD():
            return 1.0 if options["momentum"] else 0.0
        case torch.optim.RMSprop():
            return 1.0 + bool(options["momentum"]) + bool(options["centered"])
        case torch.optim.Adagrad():
            return 1.0
        case _:
            return 2.0 + bool(options.get("amsgrad"))


def _free(device: torch.device) -> float:
    """Return the bytes that this rank can still have where it trains."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return float(free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device))
    return free_memory(world_from().local_size)
