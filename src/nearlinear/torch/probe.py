"""What `nearlinear probe` measures by PyTorch: products and copies, messages between GPUs, collective operations."""

from __future__ import annotations

import json
import math
import resource
import time
from collections.abc import Callable, Sequence
from statistics import mean, median
from typing import Any

import torch
import torch.distributed as dist

from nearlinear.core.cluster import Exchange, Link
from nearlinear.measure.link import fit_alpha_beta
from nearlinear.measure.messages import LARGEST
from nearlinear.runtime.environment import world_from
from nearlinear.runtime.waiting import explain
from nearlinear.torch.collectives import Group
from nearlinear.torch.session import Session

SIZES = (4, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 2 << 20, 4 << 20, 8 << 20, 16 << 20, 32 << 20, 64 << 20)
MIDDLE = 64 << 10
BETWEEN, BETWEEN_S = SIZES[1::2], 0.05  # sizes that are left out where the shortest operation takes so many seconds
LONG_S = {"all_reduce": 0.3, "broadcast": 0.1}  # an operation this long is the last of its kind,
LONG_TIMES = 1.4  # if it is also so many times as long as one of 64 KiB: then the bandwidth shows, not the latency
SHORT_S = 0.2  # seconds to spend on a size, with at least LEAST operations and at most MOST
LEAST, MOST = 3, 15
BESIDE_ROWS = 160  # of matrices whose product takes a fraction of a millisecond: how often one looks whether it is done
BESIDE_S, BESIDE_MOST_S = 0.3, 30.0  # seconds to spend on an operation beside computing, and to wait for one
BESIDE_LONG_S = 1.0  # an operation this long is tried twice, and not beside computing
_WHAT = "measuring collective operations"


class TorchComputer:
    """This process's device by PyTorch.

    Args:
        device: The device.
        memory: Bytes that are this process's where the device is a CPU.
    """

    def __init__(self, device: torch.device, memory: float) -> None:
        self._device = device
        self._cuda = device.type == "cuda"
        self.name = torch.cuda.get_device_name(device) if self._cuda else "cpu"
        self.memory = float(torch.cuda.get_device_properties(device).total_memory) if self._cuda else memory

    @property
    def dtypes(self) -> Sequence[str]:
        """Names of the number formats; ``tf32`` is float32 with products in TensorFloat-32."""
        gpu = ("tf32", "float16") if self._cuda else ()
        return ("float32", "float64", "bfloat16", *gpu)

    def product(self, dtype: str, n: int) -> Callable[[], None]:
        """Return what multiplies two matrices."""
        kind = torch.float32 if dtype == "tf32" else getattr(torch, dtype)
        one, other = (torch.rand(n, n, device=self._device).to(kind) for _ in range(2))
        into = torch.empty_like(one)

        def multiply() -> None:
            before = torch.backends.cuda.matmul.allow_tf32
            torch.backends.cuda.matmul.allow_tf32 = dtype == "tf32"
            try:
                torch.matmul(one, other, out=into)
                self._finish()
            finally:
                torch.backends.cuda.matmul.allow_tf32 = before

        return multiply

    def copy(self, size: int) -> Callable[[], None]:
        """Return what copies ``size`` bytes."""
        source = torch.ones(size // 4, device=self._device)
        target = torch.zeros(size // 4, device=self._device)

        def copy() -> None:
            target.copy_(source)
            self._finish()

        return copy

    def _finish(self) -> None:
        if self._cuda:
            torch.cuda.synchronize(self._device)


class DeviceWires:
    """Makes wires between this rank and others over what training uses between GPUs (NCCL).

    Args:
        session: The run.
        device: Where the messages lie.
    """

    def __init__(self, session: Session, device: torch.device) -> None:
        self._session, self._device = session, device
        self._told = _Channel(session, torch.device("cpu"), session.size)
        self._sent = _Channel(session, device, session.size)

    def __call__(self, peer: int) -> DeviceWire:
        """Return the wire to ``peer``."""
        return DeviceWire(self._told, self._sent, self._device, peer)


class DeviceWire:
    """A wire between two ranks whose messages lie on devices.

    Args:
        told: Carries what is told.
        sent: Carries the messages.
        device: Where they lie.
        peer: The other rank.
    """

    def __init__(self, told: _Channel, sent: _Channel, device: torch.device, peer: int) -> None:
        self._told, self._sent, self._device, self._peer = told, sent, device, peer
        self._out, self._into = (torch.zeros(LARGEST, dtype=torch.uint8, device=device) for _ in range(2))

    def tell(self, value: Any) -> None:
        """Send a value as JSON."""
        body = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        for part in (torch.tensor([body.numel()]), body):
            self._told.run([dist.P2POp(dist.isend, part, self._peer, self._told.waits.process_group)])

    def told(self) -> Any:
        """Return the value that the peer tells."""
        length = torch.zeros(1, dtype=torch.int64)
        self._told.run([dist.P2POp(dist.irecv, length, self._peer, self._told.waits.process_group)])
        body = torch.zeros(int(length), dtype=torch.uint8)
        self._told.run([dist.P2POp(dist.irecv, body, self._peer, self._told.waits.process_group)])
        return json.loads(bytes(body.tolist()))

    def send(self, size: int) -> None:
        """Send ``size`` bytes."""
        self._run(dist.P2POp(dist.isend, self._out[:size], self._peer, self._sent.waits.process_group))

    def receive(self, size: int) -> None:
        """Return when ``size`` bytes have come."""
        self._run(dist.P2POp(dist.irecv, self._into[:size], self._peer, self._sent.waits.process_group))

    def exchange(self, size: int) -> None:
        """Send and receive ``size`` bytes at once."""
        self._run(
            dist.P2POp(dist.isend, self._out[:size], self._peer, self._sent.waits.process_group),
            dist.P2POp(dist.irecv, self._into[:size], self._peer, self._sent.waits.process_group),
        )

    def _run(self, *operations: dist.P2POp) -> None:
        self._sent.run(operations)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


class _Channel:
    """A process group of its own whose waits have deadlines and name who is missing.

    All ranks make it, members or not.

    Args:
        session: The run.
        device: Of the tensors that it carries.
        members: The first so many ranks.
    """

    def __init__(self, session: Session, device: torch.device, members: int) -> None:
        made = session.new_group(device, range(members))
        assert made is not None and session.liveness is not None
        self.waits, self._liveness, self._silence_s = made, session.liveness, session.silence_s

    def run(self, operations: Sequence[dist.P2POp]) -> None:
        """Carry out sends and receives, all at once."""
        try:
            pending = dist.batch_isend_irecv(list(operations))
        except RuntimeError as error:
            raise explain(error, _WHAT, self._liveness, self._silence_s) from None
        for each in pending:
            self.waits.wait(each, _WHAT)


class TorchCollectives:
    """The collective operations that data parallel runs over.

    Args:
        session: The run.
        device: Where the gradients lie.
    """

    def __init__(self, session: Session, device: torch.device) -> None:
        self._session, self._device = session, device

    def measure(self, ranks: int) -> list[Exchange]:
        """Return what all-reduce and broadcast cost among the first ``ranks``; all ranks call it."""
        channel = _Channel(self._session, self._device, ranks)
        group = channel.waits if self._session.rank < ranks else None
        name = backend(self._device)
        return [
            self._measure("all_reduce", "gloo ring" if name == "gloo" else name, ranks, group),
            self._measure("broadcast", "gloo tree" if name == "gloo" else name, ranks, group),
        ]

    def _measure(self, kind: str, algorithm: str, ranks: int, group: Group | None) -> Exchange:
        points: list[tuple[float, float]] = []
        processor: list[tuple[float, float]] = []
        for size in SIZES:
            # Over a long link every message takes long, and fewer sizes tell as much.
            if size in BETWEEN and points[0][1] > BETWEEN_S:
                continue
            mine = None if group is None else self._time(kind, size, group)
            everyones = [each for each in self._session.all_gather_json(mine, _WHAT) if each is not None]
            points.append((float(size), max(each[0] for each in everyones)))
            processor.append((float(size), sum(each[1] for each in everyones) / len(everyones)))
            middle = next((seconds for each, seconds in points if each >= MIDDLE), math.inf)
            if points[-1][1] > max(LONG_S[kind], LONG_TIMES * middle):
                break
        link = fit_alpha_beta(*zip(*points, strict=True))
        beside = self._beside(points, group) if kind == "all_reduce" and self._device.type == "cpu" else ()
        return Exchange(kind, algorithm, ranks, link, _processor(processor), tuple(points), beside)

    def _beside(
        self, points: Sequence[tuple[float, float]], group: Group | None
    ) -> tuple[tuple[float, float, float], ...]:
        """Measure all-reduces while the ranks multiply matrices: on a CPU each takes from the other."""
        found = []
        # A small message, a middle one, a large one; but the small one alone where the others take seconds.
        small, *others = points[min(2, len(points) - 1)], points[(len(points) + 1) // 2], points[-1]
        chosen = dict.fromkeys([small, *(each for each in others if each[1] < BESIDE_LONG_S)])
        for size, alone in chosen:
            mine = None if group is None else _one_beside(int(size), group)
            everyones = [each for each in self._session.all_gather_json(mine, _WHAT) if each is not None]
            longer = max(each[0] for each in everyones) / max(alone, 1e-9)
            left = mean(each[1] for each in everyones)
            found.append((size, round(max(longer, 0.5), 3), round(min(left, 1.0), 3)))
        return tuple(found)

    def _time(self, kind: str, size: int, group: Group) -> list[float]:
        """Return the seconds and the processor seconds of one operation on this rank."""
        tensor = torch.zeros(max(1, size // 4), device=self._device)
        operate = group.all_reduce if kind == "all_reduce" else group.broadcast

        def one() -> float:
            began = time.perf_counter()
            operate(tensor, _WHAT)
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
            return time.perf_counter() - began

        first = torch.tensor([one()], device=self._device)
        group.broadcast(first, _WHAT)  # all do as many as rank 0 finds right
        count = max(LEAST, min(MOST, round(SHORT_S / max(float(first), 1e-6)))) if float(first) < BESIDE_LONG_S else 2
        before = _processor_seconds()
        taken = [one() for _ in range(count)]
        used = (_processor_seconds() - before) / count
        if kind == "broadcast":
            group.all_reduce(torch.zeros(1, device=self._device), _WHAT)  # its root is done when the others are not
        # The lower quartile: the first ones find a connection that has not reached its speed, others a busy processor.
        return [sorted(taken)[count // 4], used]


def _one_beside(size: int, group: Group) -> list[float]:
    """Return the seconds of an all-reduce while all ranks compute, and the share of their computing that goes on."""
    tensor = torch.zeros(max(1, size // 4))
    one, other = (torch.rand(BESIDE_ROWS, BESIDE_ROWS) for _ in range(2))
    into = torch.empty_like(one)

    def compute(seconds: float) -> float:
        """Return the products per second of the next ``seconds``."""
        began, done = time.perf_counter(), 0
        while time.perf_counter() - began < seconds:
            torch.matmul(one, other, out=into)
            done += 1
        return done / (time.perf_counter() - began)

    compute(0.02)
    group.barrier(_WHAT)
    without = compute(BESIDE_S)
    group.barrier(_WHAT)
    products, times = 0, []
    until = time.perf_counter() + BESIDE_S
    more = torch.ones(1)
    while bool(more):
        began = time.perf_counter()
        pending = group.start_all_reduce(tensor, _WHAT)
        while not pending.is_completed() and time.perf_counter() - began < BESIDE_MOST_S:
            torch.matmul(one, other, out=into)
            products += 1
        group.wait(pending, _WHAT)
        times.append(time.perf_counter() - began)
        more = torch.tensor([float(time.perf_counter() < until)])
        group.broadcast(more, _WHAT)  # rank 0 says when it is enough
    return [median(times), products / sum(times) / without]


def backend(device: torch.device) -> str:
    """Return what carries messages between devices of this kind."""
    return "nccl" if device.type == "cuda" and dist.is_nccl_available() else "gloo"


def _processor_seconds() -> float:
    """Return the processor time of this process, of all its threads."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _processor(points: Sequence[tuple[float, float]]) -> Link | None:
    """Return the processor seconds per operation and per byte; None where the clock shows none (on a GPU)."""
    seen = [(size, used) for size, used in points if used > 0]
    if len({size for size, _ in seen}) < 2:
        return None
    return fit_alpha_beta(*zip(*seen, strict=True))


def own_device() -> torch.device:
    """Return this rank's device: its GPU where there is one."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    # One GPU per process is what the launcher shows; where all are shown (torchrun), the local rank chooses.
    index = world_from().local_rank if torch.cuda.device_count() > 1 else 0
    torch.cuda.set_device(index)
    return torch.device("cuda", index)
