"""Forecasting the step time of data parallel training on this machine, and measuring it: three models, five links.

    python benchmarks/forecast/here.py             all of it, about 25 minutes; emulated links need root
    python benchmarks/forecast/here.py --quick     two links and short blocks, for a look
    python benchmarks/forecast/here.py --links loopback "1 Gbit/s" --models mlp gpt          some of it

Every process has one thread; rank r runs on core r modulo the number of cores. For each link, in this order:

    profile     one process trains on the shares (below)
    probe       `nearlinear probe` on four processes writes its cluster file
    forecast    from these two: seconds per step on 1, 2, 4 processes
    measure     the same steps, by torch's DistributedDataParallel and by nearlinear

The profile is one process that trains on the shares (a whole batch, half, a quarter): seconds of the forward pass, of
the optimizer, and in the backward pass the moment at which each gradient is ready. No exchange, no second process.
Everything is measured per link, one process too, since a machine's speed drifts: in 17 minutes the products of one idle
core went from 45 to 72 GFLOP/s, and what lies minutes apart cannot be compared.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import functools
import json
import math
import os
import platform
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "data_parallel"))

from nearlinear.core.cluster import Cluster, Exchange
from nearlinear.measure.link import fit_alpha_beta
from nearlinear.planning.buckets import bucket_bytes, fill_buckets
from nearlinear.planning.overlap import Message, beside
from nearlinear.testing.links import Network, can_emulate
from nearlinear.units import seconds

LOOPBACK = "loopback"
LINKS = {
    LOOPBACK: None,
    "1 Gbit/s": {"rate": "1 Gbit/s"},
    "100 Mbit/s": {"rate": "100 Mbit/s"},
    "10 Mbit/s": {"rate": "10 Mbit/s"},
    "50 ms": {"rate": "100 Mbit/s", "delay": "50 ms"},
}
MODELS = ("mlp", "gpt", "cnn")
RIVALS = ("ddp", "nearlinear")
ALONE = "one process"
PROCESSES = (1, 2, 4)
PAYS = 0.03  # share of the speed that more processes must bring to be worth it
DEADLINE_S = 400.0
ALLOCATOR = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**40)}  # why: see benchmarks/data_parallel

MIB = 2.0**20
DDP_FIRST, DDP_LATER = MIB, 25 * MIB  # torch's kDefaultFirstBucketBytes and bucket_cap_mb
NEARLINEAR_IN_PLACE = 256 * 1024  # torch/reducer.py's IN_PLACE_BYTES


# ---- the forecast


@dataclass(frozen=True, slots=True)
class Profile:
    """What one process showed of one model on one share of the batch.

    Args:
        forward: Seconds of clearing the gradients, the forward pass and the loss.
        backward: Seconds of the backward pass.
        update: Seconds of the optimizer.
        ready: Seconds after the start of the backward pass at which each gradient is ready, ascending.
        sizes: Bytes of these gradients.
        flop: Floating-point operations of both passes.
        buffers: Bytes of the buffers (running statistics).
    """

    forward: float
    backward: float
    update: float
    ready: tuple[float, ...]
    sizes: tuple[int, ...]
    flop: float
    buffers: int


def forecast(profiles: Mapping[int, Profile], cluster: Cluster, processes: int, rival: str) -> float:
    """Return the seconds of a step.

    Args:
        profiles: Of the model, by the number of processes among which its batch is shared.
        cluster: As `nearlinear probe` wrote it.
        processes: Ranks that train, the first of the cluster.
        rival: ``"ddp"``, ``"nearlinear"``, or ``"plain"``: nothing is exchanged.
    """
    profile = profiles[processes]
    if processes == 1:
        return profile.forward + profile.backward + profile.update
    device, crowd = cluster.devices[0], cluster.crowd(processes)
    all_reduce, broadcast = (cluster.exchange(kind, processes) for kind in ("all_reduce", "broadcast"))
    if all_reduce is None or broadcast is None:
        raise SystemExit(f"the cluster file has no all-reduce among {processes}; probe with so many processes")
    slow = _passes(profiles, cluster, processes) / (profile.forward + profile.backward)
    copy = 2.0 / (device.memory_bandwidth * crowd.memory)  # seconds per byte read and written
    if rival == "plain":
        return (profile.forward + profile.backward) * slow + profile.update / crowd.memory
    messages = _messages(profile, all_reduce, rival)
    step = profile.forward * slow
    if rival == "ddp" and profile.buffers:
        step += broadcast.time(profile.buffers)  # rank 0's statistics, before every forward pass
    if rival == "nearlinear" and profile.buffers:
        messages.append(Message(profile.buffers, profile.backward, profile.buffers))  # everyone's statistics
    step += beside(profile.backward, messages, all_reduce, slow, copy)
    if rival == "ddp":
        step += sum(message.bytes for message in messages) * copy  # from the buckets back into the gradients
    return step + profile.update / crowd.memory


def _passes(profiles: Mapping[int, Profile], cluster: Cluster, processes: int) -> float:
    """Return the seconds of both passes while all processes work, without any exchange.

    A process alone keeps more of a small share in the cache than it can beside others, who want the cache for theirs.
    So its profile flatters processes that share cores; they are not faster than as many as have a core each, whose
    caches hold the same samples.
    """

    def crowded(number: int) -> float:
        profile, device, crowd = profiles[number], cluster.devices[0], cluster.crowd(number)
        alone = profile.forward + profile.backward
        # What part of the passes is multiplying, and what part moves memory: each suffers its own crowd.
        multiplying = min(alone, profile.flop / device.flops["float32"])
        return multiplying / crowd.compute + (alone - multiplying) / crowd.memory

    together = {number: number * cluster.crowd(number).compute for number in profiles if number <= processes}
    return max(crowded(number) for number in together if together[number] >= together[processes])


def _messages(profile: Profile, all_reduce: Exchange, rival: str) -> list[Message]:
    """Return the buckets in the order in which they are sent."""
    order = list(range(len(profile.sizes)))
    if rival == "ddp":
        buckets = _ddp_buckets(profile.sizes)
    else:
        # As torch/link.py measures and planning/buckets.py decides.
        tried = [4.0, 65536.0] + ([] if all_reduce.time(65536.0) > 0.05 else [1048576.0])
        link = fit_alpha_beta(tried, [all_reduce.time(each) for each in tried])
        limit = bucket_bytes(sum(profile.sizes), link.latency, link.bandwidth, shared=True)
        buckets = fill_buckets(order, profile.sizes, [0] * len(order), limit)
    messages = []
    for number, bucket in enumerate(buckets):
        size = float(sum(profile.sizes[each] for each in bucket))
        last = number == len(buckets) - 1
        in_place = rival == "nearlinear" and len(bucket) == 1 and size >= NEARLINEAR_IN_PLACE and not last
        # Multiplied where it lies, or copied: both read and write every byte once.
        messages.append(Message(size, max(profile.ready[each] for each in bucket), 0.5 * size if in_place else size))
    return messages


def _ddp_buckets(sizes: Sequence[int]) -> list[list[int]]:
    """Return the buckets of DistributedDataParallel after its first step: one small, then large ones."""
    buckets: list[list[int]] = []
    open_: list[int] = []
    for each in range(len(sizes)):
        open_.append(each)
        if sum(sizes[one] for one in open_) >= (DDP_FIRST if not buckets else DDP_LATER):
            buckets.append(open_)
            open_ = []
    return [*buckets, open_] if open_ else buckets


# ---- what runs in the processes that this script starts


def train_task(name: str) -> Any:
    """Return the task: those of benchmarks/data_parallel, but smaller, or a step over 10 Mbit/s would take a minute."""
    import models
    import torch
    from torch import nn

    torch.manual_seed(0)
    if name == "mlp":
        widths = [784, 512, 512, 512]
        layers: list[nn.Module] = []
        for place in range(3):
            layers += [nn.Linear(widths[place], widths[place + 1]), nn.ReLU()]
        model = nn.Sequential(*layers, nn.Linear(512, 10))
        return models.Task(model, torch.randn(1024, 784), torch.randint(10, (1024,)))
    if name == "gpt":
        data = torch.randint(models.BYTES, (16, models.CONTEXT + 1))
        model = models.Decoder(width=128, layers=4, heads=4)
        return models.Task(model, data[:, :-1].contiguous(), data[:, 1:].contiguous())
    return models.cnn()


def profile_role(options: dict[str, Any]) -> None:
    """Print a profile per model and share as JSON lines."""
    from models import loss_of
    from rivals import start
    from torch.utils.flop_counter import FlopCounterMode

    for name in options["models"]:
        task = train_task(name)
        training = start("plain", task)
        parameters = [p for p in training.model.parameters() if p.requires_grad]
        moments: dict[int, float] = {}
        for index, parameter in enumerate(parameters):
            parameter.register_post_accumulate_grad_hook(functools.partial(_note, moments, index))
        buffers = sum(b.numel() * b.element_size() for b in training.model.buffers())
        for processes in PROCESSES:
            count = task.batch // processes
            x, y = task.x[:count].clone(), task.y[:count].clone()
            with FlopCounterMode(display=False) as counter:
                training.step(x, y)
            for _ in range(3):
                training.step(x, y)
            rows, ready = [], []
            until = time.perf_counter() + options["seconds"]
            while time.perf_counter() < until or len(rows) < 5:
                began = time.perf_counter()
                training.optimizer.zero_grad()
                loss = loss_of(training.model(x), y)
                passed = time.perf_counter()
                loss.backward()
                computed = time.perf_counter()
                training.optimizer.step()
                ended = time.perf_counter()
                rows.append((passed - began, computed - passed, ended - computed))
                ready.append([moments[index] - passed for index in range(len(parameters))])
            times = [median(column) for column in zip(*ready, strict=True)]
            order = sorted(range(len(parameters)), key=lambda index: times[index])
            forward, backward, update = (median(column) for column in zip(*rows, strict=True))
            print(
                json.dumps(
                    {
                        "model": name,
                        "processes": processes,
                        "batch": task.batch,
                        "profile": {
                            "forward": forward,
                            "backward": backward,
                            "update": update,
                            "ready": [min(times[index], backward) for index in order],
                            "sizes": [parameters[index].numel() * 4 for index in order],
                            "flop": counter.get_total_flops(),
                            "buffers": buffers,
                        },
                    }
                ),
                flush=True,
            )


def _note(moments: dict[int, float], index: int, _: Any) -> None:
    moments[index] = time.perf_counter()


def measure_role(options: dict[str, Any]) -> None:
    """Print the seconds per step of every model and rival, block by block, as JSON lines of rank 0."""
    import torch
    import torch.distributed as dist
    from rivals import as_if_alone, start

    torch.set_num_threads(1)
    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if size > 1:
        dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=DEADLINE_S))
    for name in options["models"]:
        task = train_task(name)
        share = task.batch // size
        x, y = (each[rank * share : (rank + 1) * share].clone() for each in (task.x, task.y))
        blocks: dict[str, list[float]] = {}
        others: list[float] = []
        trainings = [start(rival, task) for rival in (options["rivals"] if size > 1 else ["plain"])]
        steps: dict[str, int] = {}
        for training in trainings:
            with as_if_alone(training.name):
                training.step(x, y)  # buckets are laid out in the first step
                step = functools.partial(training.step, x, y)
                taken, _ = _block(step, 1, size, options["cores"])
                if taken < 1.0:
                    taken, _ = _block(step, 2, size, options["cores"])
                steps[training.name] = max(1, min(200, round(options["seconds"] / taken)))
        # Where a step takes seconds, every block is one, and noise of milliseconds does not count.
        slow = max(steps.values()) <= 2 and taken > 0.5
        for turn in range(min(2, options["blocks"]) if slow else options["blocks"]):
            for training in trainings[turn % 2 :] + trainings[: turn % 2]:
                with as_if_alone(training.name):
                    step = functools.partial(training.step, x, y)
                    if steps[training.name] > 2:
                        step()
                    taken, by_others = _block(step, steps[training.name], size, options["cores"])
                    blocks.setdefault(training.name, []).append(taken)
                    others.append(by_others)
        if rank == 0:
            found = {"model": name, "processes": size, "blocks": blocks, "steps": steps, "others": max(others)}
            print(json.dumps(found), flush=True)
    if size > 1:
        dist.barrier()
        dist.destroy_process_group()


def _block(step: Callable[[], Any], steps: int, size: int, all_cores: Sequence[int]) -> tuple[float, float]:
    """Return the seconds per step of the slowest rank, and the share of the cores that other programs took."""
    import cores
    import torch
    import torch.distributed as dist

    if size > 1:
        dist.barrier()
    programs, own = cores.program_seconds(all_cores), os.times().user
    began = time.perf_counter()
    for _ in range(steps):
        step()
    wall = time.perf_counter() - began
    slowest = torch.tensor([wall / steps], dtype=torch.float64)
    ours = torch.tensor([os.times().user - own], dtype=torch.float64)
    if size > 1:
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        dist.all_reduce(ours)
    others = cores.program_seconds(all_cores) - programs - float(ours)
    return float(slowest), max(0.0, others / wall / len(all_cores))


ROLES = {"profile": profile_role, "measure": measure_role}


# ---- starting them


def _run(command: Sequence[str], count: int, network: Network | None) -> str:
    """Run a command as ``count`` ranks, each on its host and core, and return what rank 0 wrote."""
    cores, port = sorted(os.sched_getaffinity(0)), _free_port()
    with contextlib.ExitStack() as stack:
        out = stack.enter_context(tempfile.TemporaryFile("w+"))
        processes = []
        for rank in range(count):
            environment = {**os.environ, **ALLOCATOR, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
            if count > 1:
                environment |= {
                    "RANK": str(rank), "WORLD_SIZE": str(count), "MASTER_PORT": str(port),
                    "LOCAL_RANK": str(rank if network is None else 0),
                    "LOCAL_WORLD_SIZE": str(count if network is None else 1),
                    "MASTER_ADDR": "127.0.0.1" if network is None else network[0].address,
                    "GLOO_SOCKET_IFNAME": "lo" if network is None else "eth0",
                    "NEARLINEAR_DEADLINE": f"{DEADLINE_S:.0f} s",
                }  # fmt: skip
            start = subprocess.Popen if network is None else network[rank].popen
            words = ["taskset", "-c", str(cores[rank % len(cores)]), *command]
            process = start(words, env=environment, stdout=out if rank == 0 else subprocess.DEVNULL)
            stack.callback(_end, process)
            processes.append(process)
        until = time.monotonic() + DEADLINE_S
        while any(process.poll() is None for process in processes):
            failed = [rank for rank, process in enumerate(processes) if process.poll()]
            if failed:
                raise SystemExit(f"rank {failed[0]} of `{command[1]}` ended with {processes[failed[0]].returncode}")
            if time.monotonic() > until:
                raise SystemExit(f"`{' '.join(command[:4])}` was not done after {DEADLINE_S:.0f} s")
            time.sleep(0.05)
        out.seek(0)
        return out.read()


def _role(role: str, options: dict[str, Any], count: int, network: Network | None) -> list[dict[str, Any]]:
    """Return what rank 0 of a role printed, started when other programs leave the cores alone, or patience is over."""
    _wait_until_quiet(options["patience"])
    text = _run([sys.executable, str(Path(__file__)), "--role", role, json.dumps(options)], count, network)
    return [json.loads(line) for line in text.splitlines()]


def _wait_until_quiet(patience_s: float) -> None:
    import cores

    cores.wait_until_quiet(os.sched_getaffinity(0), time.monotonic() + patience_s)


def _probe(count: int, network: Network | None, patience_s: float) -> dict[str, Any]:
    """Return the cluster file that `nearlinear probe` writes."""
    _wait_until_quiet(patience_s)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "cluster.json"
        _run([sys.executable, "-m", "nearlinear.cli.probe_rank", str(path)], count, network)
        found: dict[str, Any] = json.loads(path.read_text())
        return found


def _end(process: subprocess.Popen[Any]) -> None:
    if process.poll() is None:
        process.kill()
    process.wait(30)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def _network(link: str) -> Iterator[Network | None]:
    arguments = LINKS[link]
    if arguments is None:
        yield None
        return
    with Network(hosts=max(PROCESSES), **arguments) as network:
        yield network


# ---- the experiment


def main() -> None:
    """Profile, probe, forecast, measure, and print the comparison."""
    if sys.argv[1:2] == ["--role"]:
        ROLES[sys.argv[2]](json.loads(sys.argv[3]))
        return
    args = _arguments()
    if args.again is not None:
        print(report(forecast_again(json.loads(args.again.read_text()))))
        return
    began = time.monotonic()
    options = {"models": args.models, "seconds": args.seconds, "blocks": args.blocks, "patience": args.patience}
    options["rivals"] = [*RIVALS, "plain"] if args.plain else list(RIVALS)
    options["cores"] = sorted(os.sched_getaffinity(0))
    reason = can_emulate()
    links = [link for link in args.links if link == LOOPBACK or reason is None]
    if links != args.links:
        _say(f"NOT MEASURED: {', '.join(set(args.links) - set(links))}: {reason}")
    record: dict[str, Any] = {"machine": _machine(), "rows": [], "clusters": {}, "profiles": []}
    for link in links:
        with _network(link) as network:
            _say(f"{link}: profile of {', '.join(args.models)} in one process ({time.monotonic() - began:.0f} s)")
            for found in _role("profile", options, 1, None):
                known = {"link": link, "model": found["model"], "processes": found["processes"]}
                record["profiles"].append(known | found["profile"])
            _say(f"{link}: probe ({time.monotonic() - began:.0f} s)")
            record["clusters"][link] = _probe(max(PROCESSES), network, args.patience)
            profiles, cluster = _known(record, link)
            predicted = {
                (model, processes, rival): forecast(profiles[model], cluster, processes, rival)
                for model in args.models
                for processes in PROCESSES
                for rival in (options["rivals"] if processes > 1 else ["plain"])
            }
            for processes in PROCESSES:
                _say(f"{link}: measuring {processes} processes ({time.monotonic() - began:.0f} s)")
                for found in _role("measure", options, processes, network if processes > 1 else None):
                    for rival, blocks in found["blocks"].items():
                        record["rows"].append(
                            {
                                "model": found["model"], "link": link, "processes": processes,
                                "rival": rival if processes > 1 else ALONE, "blocks": blocks, "others": found["others"],
                                "forecast": predicted[found["model"], processes, rival],
                            }
                        )  # fmt: skip
    record["seconds"] = round(time.monotonic() - began)
    if args.out is not None:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(record, indent=1))
        _say(f"everything measured is in {args.out}")
    print(report(record))


def _known(record: dict[str, Any], link: str) -> tuple[dict[str, dict[int, Profile]], Cluster]:
    """Return what is known of a link before anything runs over it: the profiles of every model, and the cluster."""
    profiles: dict[str, dict[int, Profile]] = {}
    for raw in record["profiles"]:
        if raw["link"] == link:
            made: dict[str, Any] = {name: raw[name] for name in Profile.__slots__}
            made |= {"ready": tuple(raw["ready"]), "sizes": tuple(raw["sizes"])}
            profiles.setdefault(raw["model"], {})[raw["processes"]] = Profile(**made)
    return profiles, Cluster.from_json(json.dumps(record["clusters"][link]))


def forecast_again(record: dict[str, Any]) -> dict[str, Any]:
    """Return the record with the forecasts that this code makes from its profiles and cluster files."""
    known = {link: _known(record, link) for link in record["clusters"]}
    for row in record["rows"]:
        profiles, cluster = known[row["link"]]
        row["forecast"] = forecast(profiles[row["model"]], cluster, row["processes"], row["rival"])
    return record


def report(record: dict[str, Any]) -> str:
    """Return the tables."""
    rows = record["rows"]
    lines = [
        record["machine"],
        "",
        "| model | link | processes | by | forecast | measured | error | spread of blocks | others |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    errors = []
    for row in rows:
        measured = median(row["blocks"])
        error = row["forecast"] / measured - 1
        errors.append(abs(error))
        spread = (max(row["blocks"]) - min(row["blocks"])) / measured
        lines.append(
            f"| {row['model']} | {row['link']} | {row['processes']} | {row['rival']} | {seconds(row['forecast'])} | "
            f"{seconds(measured)} | {100 * error:+.1f} % | {100 * spread:.0f} % | {100 * row['others']:.0f} % |"
        )
    ordered = sorted(errors)
    lines += [
        "",
        f"{len(errors)} cells: median error {100 * median(errors):.1f} %, "
        f"90 % within {100 * ordered[math.ceil(0.9 * len(ordered)) - 1]:.1f} %, worst {100 * ordered[-1]:.1f} %.",
        "Spread: of the blocks, largest less smallest. Others: what other programs took of the cores, at most.",
        "",
        "| model | link | by | forecast: stop at | measured: fastest | lost by stopping |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    right = 0
    cells = best_numbers(rows)
    for cell in cells:
        right += cell["lost"] <= 0.03
        lines.append(
            f"| {cell['model']} | {cell['link']} | {cell['rival']} | {cell['stop']} | {cell['fastest']} | "
            f"{100 * cell['lost']:.1f} % |"
        )
    lines += ["", f"The forecast's number is the fastest, or within 3 % of it, in {right} of {len(cells)} cells."]
    return "\n".join(lines)


def best_numbers(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return, per model, link and rival, the number of processes the forecast stops at and what that loses."""
    one = {(row["model"], row["link"]): row for row in rows if row["rival"] == ALONE}
    cells: dict[tuple[str, str, str], dict[int, dict[str, Any]]] = {}
    for row in rows:
        if row["processes"] > 1:
            key = (row["model"], row["link"], row["rival"])
            cells.setdefault(key, {1: one[row["model"], row["link"]]})[row["processes"]] = row
    found = []
    for (model, link, rival), each in cells.items():
        quickest = min(row["forecast"] for row in each.values())
        stop = min(n for n, row in each.items() if row["forecast"] <= (1 + PAYS) * quickest)
        fastest = min(each, key=lambda n: median(each[n]["blocks"]))
        lost = 1 - median(each[fastest]["blocks"]) / median(each[stop]["blocks"])
        found.append({"model": model, "link": link, "rival": rival, "stop": stop, "fastest": fastest, "lost": lost})
    return found


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two links and short blocks: a look, not a result")
    parser.add_argument("--links", nargs="+", choices=list(LINKS), metavar="LINK", help=f"of: {', '.join(LINKS)}")
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS, metavar="MODEL")
    parser.add_argument("--seconds", type=float, help="length of a block (0.8; with --quick 0.3)")
    parser.add_argument("--blocks", type=int, default=3, help="blocks per cell (3)")
    parser.add_argument("--patience", type=float, help="seconds to wait for other programs, per start (20; quick: 0)")
    parser.add_argument("--plain", action="store_true", help="measure the steps without any exchange, too")
    parser.add_argument("--again", type=Path, help="forecast once more from a file that --out wrote; measure nothing")
    parser.add_argument("--out", type=Path, help="file for all that was measured, as JSON")
    args = parser.parse_args()
    args.links = args.links or ([LOOPBACK, "100 Mbit/s"] if args.quick else list(LINKS))
    args.patience = (0.0 if args.quick else 20.0) if args.patience is None else args.patience
    args.seconds = args.seconds or (0.3 if args.quick else 0.8)
    return args


def _machine() -> str:
    names = []
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    from importlib.metadata import version

    return (
        f"{datetime.date.today().isoformat()}: {names[0] if names else platform.machine()}, "
        f"{len(os.sched_getaffinity(0))} cores (load before {os.getloadavg()[2]:.1f}), Python "
        f"{platform.python_version()}, torch {version('torch')}. One thread per process."
    )


def _say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
