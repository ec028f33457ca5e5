"""Reading from the environment who this process is, whatever started it: nearlinear run, torchrun, srun."""

from __future__ import annotations

import dataclasses
import json
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nearlinear.core.plan import STRATEGIES, Plan
from nearlinear.errors import InputError
from nearlinear.units import parse_seconds


def deadline_s() -> float:
    """Return how long a wait for a living peer may take, in seconds (``NEARLINEAR_DEADLINE``)."""
    return parse_seconds(os.environ.get("NEARLINEAR_DEADLINE", "300 s"))


def silence_s() -> float:
    """Return after how long a silent peer is given up, in seconds (``NEARLINEAR_SILENCE``)."""
    return parse_seconds(os.environ.get("NEARLINEAR_SILENCE", "5 s"))


@dataclass(frozen=True, slots=True)
class World:
    """Which process this is among how many.

    Args:
        rank: This process's number, 0 to ``size - 1``.
        size: Number of processes.
        local_rank: This process's number on its machine.
        local_size: Number of processes on its machine.
        address: Host of rank 0.
        port: Port of the rendezvous store on that host.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    address: str = "127.0.0.1"
    port: int = 0

    @property
    def host(self) -> str:
        """Name of this machine, for messages."""
        return socket.gethostname()


def usable_cores() -> int:
    """Return how many cores this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _number(env: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = env.get(name)
    if text is None and default is not None:
        return default
    try:
        return int(text or "")
    except ValueError:
        raise InputError(
            f"the environment has {name}={text!r}, not a number; start with `nearlinear run -n N script.py`"
        ) from None


def _first_host(nodelist: str) -> str:
    """Return the first host of Slurm's ``node[3-5,9],other`` notation."""
    head, bracket, rest = nodelist.partition("[")
    if not bracket or "," in head:
        return nodelist.split(",")[0]
    first = rest.split("]")[0].split(",")[0].split("-")[0]
    return head + first


def world_from(env: Mapping[str, str] = os.environ) -> World:
    """Return who this process is.

    ``RANK`` and ``WORLD_SIZE`` (torchrun, Kubeflow, Ray, nearlinear run) come first, then Slurm's ``SLURM_PROCID`` and
    ``SLURM_NTASKS`` inside a job step of several tasks; without either it is the only process.

    Raises:
        InputError: A variable is missing or out of range.

    Example:
        >>> world_from({"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}).rank
        1
    """
    if "RANK" in env and "WORLD_SIZE" in env:
        rank, size = _number(env, "RANK"), _number(env, "WORLD_SIZE")
        local_rank, local_size = _number(env, "LOCAL_RANK", rank), _number(env, "LOCAL_WORLD_SIZE", size)
        address, port = env.get("MASTER_ADDR", ""), _number(env, "MASTER_PORT", 0)
    elif int(env.get("SLURM_NTASKS", "1")) > 1 and "SLURM_PROCID" in env and "SLURM_STEP_ID" in env:
        rank, size = _number(env, "SLURM_PROCID"), _number(env, "SLURM_NTASKS")
        local_rank = _number(env, "SLURM_LOCALID", 0)
        local_size = int(env.get("SLURM_NTASKS_PER_NODE", env.get("SLURM_TASKS_PER_NODE", "1")).split("(")[0])
        address = env.get("MASTER_ADDR") or _first_host(env.get("SLURM_STEP_NODELIST", env.get("SLURM_NODELIST", "")))
        # Every job step of one user on one machine needs a port of its own, and all its tasks the same one.
        port = _number(env, "MASTER_PORT", 20000 + int(env.get("SLURM_JOB_ID", "0")) % 20000)
    else:
        return World()
    if size < 1 or not 0 <= rank < size:
        raise InputError(f"the environment says rank {rank} of {size}; ranks run from 0 to WORLD_SIZE - 1")
    if size > 1 and (not address or not port):
        raise InputError(
            f"rank {rank} of {size} does not know where rank 0 is: set MASTER_ADDR and MASTER_PORT, "
            "or start with `nearlinear run -n N script.py`"
        )
    return World(rank, size, local_rank, local_size, address, port)


def plan_asked_for(strategy: str | Plan) -> Plan | None:
    """Return what a script's ``strategy=`` and the command line ask for together; the command line wins.

    Where `nearlinear plan` was asked before, the launcher tells the best plan of each strategy, the best of all
    first (``NEARLINEAR_PLANNED``): ``"auto"`` is that one, and ``"pipeline"`` has the stages and microbatches planned.

    Returns:
        The plan; ``None`` where the way is left open and nobody has planned it.

    Raises:
        InputError: There is no such strategy, or it has not what is asked of it.
    """
    asked = os.environ.get("NEARLINEAR_STRATEGY")
    given = {name: _count(name) for name in ("stages", "microbatches", "shards")}
    counts: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    if isinstance(strategy, Plan) and (asked is None or asked == strategy.strategy):
        return dataclasses.replace(strategy, **counts)
    name = asked or strategy
    if name != "auto" and name not in STRATEGIES:
        raise InputError(f"unknown strategy {name!r}; choose one of: auto, {', '.join(STRATEGIES)}, or a Plan")
    if counts:
        if name == "auto":
            name = "sharded" if "shards" in counts else "pipeline"
        return Plan(str(name), **counts)
    planned = [Plan(**each) for each in json.loads(os.environ.get("NEARLINEAR_PLANNED", "[]"))]
    found = next((each for each in planned if name in ("auto", each.strategy)), None)
    return found if found is not None or name == "auto" else Plan(str(name))


def _count(name: str) -> int | None:
    text = os.environ.get(f"NEARLINEAR_{name.upper()}")
    if text is None:
        return None
    if not text.isdigit():
        raise InputError(f"NEARLINEAR_{name.upper()} is {text!r}; give a number from 1 on")
    return int(text)
