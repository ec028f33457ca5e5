"""What the hooks of one process share: its rank, the group it talks to, and the weight of the batch in hand."""

from __future__ import annotations

import atexit
import datetime
import hashlib
import math
import os
import secrets
import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from nearlinear import events
from nearlinear.core.plan import Plan
from nearlinear.core.shares import share
from nearlinear.errors import InputError, PeerLostError
from nearlinear.runtime.ending import end_if_stuck, failed, install_excepthook, read_errors_by
from nearlinear.runtime.environment import World, deadline_s, silence_s, usable_cores, world_from
from nearlinear.runtime.interface import address_to, interface_to
from nearlinear.runtime.liveness import Liveness
from nearlinear.runtime.waiting import explain
from nearlinear.torch.collectives import Group
from nearlinear.units import seconds

Weight = Callable[[Any], Any]


@dataclass(slots=True)
class Batch:
    """What this rank holds of one batch.

    Args:
        samples: Samples in the batch, as far as the ranks of this run share it out among themselves.
        mine: Samples of it that this rank holds, fillers left out.
        weight: What this rank's share counts for in the loss's mean, in the user's measure; None: its samples.
        everyones: Samples in the whole batch, where others train apart on the rest of it.
    """

    samples: int
    mine: int
    weight: float | None = None
    total: float | None = field(default=None, repr=False)
    everyones: int = 0

    @property
    def filler(self) -> bool:
        """Whether this rank holds only a copy of a sample that another rank counts."""
        return self.mine == 0


@dataclass(slots=True, eq=False)
class Passage:
    """One pass over a loader.

    Args:
        loader: Number of the loader.
        batches: What it has handed out.
        over: The loader is exhausted, or the loop over it was left.
    """

    loader: int
    batches: list[Batch] = field(default_factory=list)
    over: bool = False


class Session:
    """One process's part in the run.

    Args:
        world: Who this process is.
        liveness: Who still answers; None in a run of one process.
    """

    def __init__(self, world: World, liveness: Liveness | None = None) -> None:
        self.rank, self.size = world.rank, world.size
        self.liveness = liveness
        self.deadline_s, self.silence_s = deadline_s(), silence_s()
        self._opened: list[Group] = []
        self.owns_default = False  # torch's default group was opened here, not by the script
        self.control = self.new_group(torch.device("cpu"))
        self.part, self.parts = world.rank, world.size  # which share of each batch this rank works on, of how many
        self.peers = self.control  # the ranks that hold the other parts of what this one holds
        self.auto: Plan | None = None  # what strategy "auto" was taken to be, for all models alike
        self.summed: bool | None = None  # weight="sum": gradients are added, not averaged; None: not said yet
        self.weight: Weight | None = None  # what a batch counts for, where the script says so
        self.states: list[Any] = []  # of the loaders
        self.loaders = self.models = 0  # how many were handed to distribute
        self.batch: Batch | None = None
        self.passage: Passage | None = None  # the pass that the latest batch or end of data came from
        self.pass_over = False
        self._running: list[Passage] = []  # the passes that are being iterated, the innermost last
        self._training: list[tuple[Passage, Batch, int]] = []  # fetched since the latest backward pass began
        self._backward: Batch | None = None
        self.place: tuple[int, int] | None = None  # loader and number of the batch of the backward pass in hand
        self._ahead = False  # batches are fetched before the backward pass of the one before them
        self._said: set[str] = set()

    # ---- what is said

    def notice(self, message: str) -> None:
        """Say something a person should know: once, on rank 0."""
        if message in self._said:
            return
        self._said.add(message)
        events.publish("notice", message=message)
        if self.rank == 0:
            print(f"nearlinear: {message}", file=sys.stderr, flush=True)

    # ---- groups

    def new_group(
        self, device: torch.device, ranks: Sequence[int] | None = None, deadline_s: float | None = None
    ) -> Group | None:
        """Return a group of its own, so that its exchanges cannot be mistaken for others'; None for one process.

        Args:
            device: Of the tensors that it will carry.
            ranks: Its members; every rank must call this for every group. All by default.
            deadline_s: Seconds that a wait for a living peer may take; the run's by default.
        """
        if self.liveness is None:
            return None
        backend = "nccl" if device.type == "cuda" and dist.is_nccl_available() else "gloo"
        what = "opening connections to all ranks"
        limit_s = self.deadline_s if deadline_s is None else deadline_s
        try:
            timeout = datetime.timedelta(seconds=limit_s + 60)
            group = dist.new_group(None if ranks is None else list(ranks), backend=backend, timeout=timeout)
        except RuntimeError as error:
            raise explain(error, what, self.liveness, self.silence_s) from None
        assert group is not None
        made = Group(group, self.liveness, deadline_s=limit_s, silence_s=self.silence_s)
        self._opened.append(made)
        return made

    def arrange(self, stages: int) -> None:
        """Let ``stages`` consecutive ranks work on one share of each batch together; all ranks call it.

        Raises:
            InputError: An earlier call arranged them otherwise.
        """
        arranged = self.size // self.parts
        if arranged == stages:
            return
        if arranged != 1 or self.loaders:
            raise InputError(
                f"an earlier distribute call put {arranged} ranks to each share of the batch and this one wants "
                f"{stages}; use one strategy for all models of a script"
            )
        self.part, self.parts = self.rank // stages, self.size // stages
        groups = [self.new_group(torch.device("cpu"), range(stage, self.size, stages)) for stage in range(stages)]
        self.peers = groups[self.rank % stages] if self.parts > 1 else None

    def all_gather_json(self, value: Any, what: str = "a message") -> list[Any]:
        """Return every rank's ``value``."""
        return [value] if self.control is None else self.control.all_gather_json(value, what)

    def barrier(self, what: str = "a meeting of all ranks") -> None:
        """Return when every rank is here."""
        if self.control is not None:
            self.control.barrier(what)

    def share(self, samples: int) -> range:
        """Return the positions in a batch that this rank takes."""
        return share(samples, self.part, self.parts)

    def batch_of(self, samples: int) -> Batch:
        """Return what this rank holds of a batch."""
        return Batch(samples, len(self.share(samples)))

    def is_past(self, loader: int, number: int, batch: int | None = None) -> bool:
        """Return whether the run has left this pass of a loader behind, or this batch of it: where one comes late."""
        return False

    def settle(self, what: str) -> None:
        """Return when the parameters are those of the run; they always are, but where replicas train apart."""

    # ---- the weight of the batch in hand

    def fetching(self) -> None:
        """Note that the next batch of a loader is about to be drawn, on all ranks."""

    def fetched(self, passage: Passage, batch: Batch) -> None:
        """Note the batch that a loader has just handed out."""
        if batch.weight is None and passage.batches and passage.batches[-1] == batch:
            batch = passage.batches[-1]  # a long pass of equal batches holds one
        self.batch, self.passage, self.pass_over = batch, passage, False
        passage.batches.append(batch)
        if torch.is_grad_enabled():
            self._training.append((passage, batch, len(passage.batches)))

    def began_pass(self, loader: int) -> Passage:
        """Note that a loader starts over: what an earlier pass handed out and nobody used is forgotten."""
        self._training = [fetched for fetched in self._training if fetched[0].loader != loader]
        self._running.append(Passage(loader))
        return self._running[-1]

    def ended_pass(self, passage: Passage) -> None:
        """Note that a loader is exhausted."""
        if not passage.over:
            self._running.remove(passage)
        self.passage, self.pass_over, passage.over = passage, True, True
        if self.parts > 1 and self.place is None and passage.batches and torch.is_grad_enabled():
            self.notice(
                f"a pass over loader {passage.loader} ended without loss.backward(); gradients taken by "
                "torch.autograd.grad are those of this rank's share (put them into p.grad and step an optimizer); an "
                "evaluation belongs under torch.no_grad()"
            )

    def left_pass(self, passage: Passage) -> None:
        """Note that nobody iterates any more: after an evaluation broken off, the batch around it is in hand again."""
        if passage.over:
            return
        self._running.remove(passage)
        passage.over = True
        if self.passage is passage and self._running and self._running[-1].batches:
            self.passage = self._running[-1]
            self.batch = self.passage.batches[-1]

    def fraction(self, batch: Batch) -> float:
        """Return the part of the batch's mean that this rank's share stands for; the ranks' parts sum to one."""
        if batch.weight is None:
            return batch.mine / batch.samples if batch.samples else math.nan
        if batch.total is None:
            batch.total = self._sum(batch.weight, "the weights of a batch")
        if not batch.total:
            self.notice("weight(batch) is 0 on all ranks for a batch: its mean is 0 / 0, NaN, as on one process")
            return math.nan
        return batch.weight / batch.total

    def backward_fraction(self) -> float:
        """Return the fraction of the backward pass in hand.

        Raises:
            InputError: The pass covers batches of different fractions, so that no single one is right.
        """
        if self._training:
            # A pass that ended while another goes on was an evaluation within it.
            running = [fetched for fetched in self._training if not fetched[0].over]
            last, _, number = (running or self._training)[-1]
            self.place = (last.loader, number)
            pending, self._training = [batch for _, batch, _ in running or self._training], []
            if self._backward is None and len({id(passage) for passage, _, _ in running}) < len(running):
                self._ahead = True
            among = [*pending, self._backward] if self._ahead and self._backward else pending
            fractions = [self.fraction(batch) for batch in among]
            if max(fractions) - min(fractions) > 1e-12:
                raise InputError(
                    f"{len(pending)} batches were fetched before one backward pass, and rank {self.rank}'s parts of "
                    f"them differ ({min(fractions):.4f} to {max(fractions):.4f}), so no weight is right for their "
                    "sum; use drop_last=True, or fetch one batch per backward pass"
                )
            self._backward = pending[-1]
        if self._backward is None:
            return 1.0 / self.parts
        return self.fraction(self._backward)

    def gradient_scale(self) -> float:
        """Return the factor of this rank's gradients in their sum, for the backward pass in hand."""
        fraction = self.backward_fraction()
        if self.summed:
            return 0.0 if self._backward is not None and self._backward.filler else 1.0
        return fraction

    def sample_fraction(self) -> float:
        """Return the part of the samples of the backward pass in hand that are this rank's."""
        batch = self._backward
        return batch.mine / batch.samples if batch is not None and batch.samples else 1.0 / self.parts

    def training_batch(self) -> Batch | None:
        """Return the batch that a loss which can still be differentiated is of."""
        running = [batch for passage, batch, _ in self._training if not passage.over]
        return running[-1] if running else self._backward

    def mean_fraction(self, *, training: bool) -> float:
        """Return this rank's part in a mean over the batch in hand, or over the whole pass once it has ended.

        Args:
            training: The mean is of a loss that can still be differentiated: it is of one batch, whatever was
                evaluated meanwhile.
        """
        batch = self.training_batch() if training else None
        if batch is not None:
            return self.fraction(batch)
        if self.pass_over and self.passage is not None:
            batches = self.passage.batches
            mine = sum(b.mine if b.weight is None else b.weight for b in batches)
            if all(b.weight is None for b in batches):
                total = float(sum(b.samples for b in batches))
            else:
                total = self._sum(mine, "the weights of a pass")
            return mine / total if total else math.nan
        return 1.0 / self.parts if self.batch is None else self.fraction(self.batch)

    def _sum(self, value: float, what: str) -> float:
        if self.peers is None:
            return value
        return float(self.peers.all_reduce(torch.tensor([value], dtype=torch.float64), what))

    def close(self) -> None:
        """Say goodbye to the peers, unless the script failed: then they are to notice, and at once."""
        if self.liveness is None:
            return
        if failed():
            self.liveness.hang_up()
            return
        self.liveness.leave()
        # gloo's threads let go of the last tensors after whoever waited for them has gone on. One that does so while
        # the interpreter ends aborts the process; closing a group joins its threads.
        for group in self._opened:
            group.close()
        if self.owns_default and dist.is_initialized():
            dist.destroy_process_group()


_current: Session | None = None


def current() -> Session | None:
    """Return this process's session, if ``distribute`` was called."""
    return _current


def start(device: torch.device, kind: type[Session] = Session) -> Session:
    """Return this process's session, which the first call makes, joining the run.

    Raises:
        InputError: The environment is incomplete, or the port of rank 0 is taken.
        PeerLostError: A rank did not arrive within the deadline.
    """
    global _current
    if _current is None:
        _current = _join(world_from(), device, kind)
        read_errors_by(_hint)
        install_excepthook(again=True)  # torch.distributed's would swallow what is printed on the way out
    return _current


def _join(world: World, device: torch.device, kind: type[Session]) -> Session:
    if dist.is_available() and dist.is_initialized():
        rank, size = dist.get_rank(), dist.get_world_size()
        world = replace(world, rank=rank, size=size, address=world.address or "127.0.0.1")
    if world.size == 1:
        return kind(world)
    # Every rank computes with its part of the cores; two ranks with all of them would only take turns.
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, usable_cores() // world.local_size))
    owns_default = not dist.is_initialized()
    if not owns_default:
        store = dist.distributed_c10d._get_default_store()
    else:
        interface = interface_to(world.address)
        for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            # NCCL refuses the loopback interface by name and finds it by itself.
            if interface is not None and not (interface.startswith("lo") and variable.startswith("NCCL")):
                os.environ.setdefault(variable, interface)
        store = _rendezvous(world)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if device.type == "cuda" and dist.is_nccl_available() else "gloo",
            store=PrefixStore("default", store),
            rank=world.rank,
            world_size=world.size,
            timeout=datetime.timedelta(seconds=deadline_s() + 60),
        )
    session = kind(world, _watch(world, PrefixStore("nearlinear", store)))
    session.owns_default = owns_default
    atexit.register(session.close)
    return session


def _rendezvous(world: World) -> Store:
    """Return the store all ranks share, once all have arrived."""
    limit = deadline_s()
    # torchrun keeps the store in its agent; otherwise rank 0 opens it.
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    timeout = datetime.timedelta(seconds=limit)
    try:
        store: Store = TCPStore(
            world.address, world.port, world.size, world.rank == 0 and not agent, timeout, wait_for_workers=False
        )
    except RuntimeError as error:
        if "EADDRINUSE" in str(error) or "address already in use" in str(error).lower():
            raise InputError(
                f"port {world.port} on {world.address} is taken; choose another with `nearlinear run --port P` "
                "or MASTER_PORT"
            ) from None
        raise PeerLostError(
            f"rank {world.rank} found no rank 0 at {world.address}:{world.port} within {seconds(limit)}; "
            "is it running, and does MASTER_ADDR name its machine?",
            0,
        ) from None
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store = PrefixStore(f"nearlinear/{attempt}", store)
    store.set(f"here/{world.rank}", world.host)
    for rank in range(world.size):
        try:
            store.wait([f"here/{rank}"], timeout)
        except RuntimeError:
            missing = [r for r in range(world.size) if not store.check([f"here/{r}"])]
            raise PeerLostError(
                f"rank{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing))} of {world.size} did not arrive "
                f"within {seconds(limit)}; start all of them, or set NEARLINEAR_DEADLINE='10 min'",
                missing[0] if missing else None,
            ) from None
    return store


def _watch(world: World, store: Store) -> Liveness:
    host = socket.gethostname()
    if world.rank == 0:
        token = secrets.token_hex(16)
        # Where the others find rank 0 there they find its liveness too: the same interface, another port.
        liveness = Liveness.listen(
            world.size,
            token,
            host=host,
            bind=address_to(world.address),
            silence_s=silence_s(),
            on_lost=end_if_stuck,
        )
        store.set("liveness", f"{token} {liveness.port}")
        return liveness
    token, port = store.get("liveness").decode().split()
    return Liveness.connect(
        (world.address, int(port)),
        world.rank,
        token,
        host=host,
        deadline_s=deadline_s(),
        silence_s=silence_s(),
        on_lost=end_if_stuck,
    )


def _hint(error: BaseException) -> str | None:
    if "mixed torch.Tensor and DTensor" not in str(error):  # raised within torch, where it cannot be reworded
        return None
    return (
        "under strategy 'sharded' a parameter is whole within its module's forward alone; "
        "for a penalty use the optimizer's weight_decay, or strategy 'data'"
    )


def derived_seed(*parts: int | str) -> int:
    """Return 63 bits that depend on all parts, the same on every machine."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
