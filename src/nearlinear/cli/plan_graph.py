"""The command `nearlinear plan --graph`: turning a file with a model's graph into a split, its table and its proof."""

from __future__ import annotations

import argparse
import contextlib
import json
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from nearlinear.core.graph import Graph
from nearlinear.errors import InputError
from nearlinear.planning.partition import InfeasibleError, Partition, partition
from nearlinear.planning.partition.table import stages
from nearlinear.planning.workload import Workload, read_workload
from nearlinear.units import bandwidth, parse_bandwidth, parse_bytes, parse_seconds, seconds, size

PATIENCE = 2.0  # seconds that a search may take before it says what it is doing
BUDGET, LARGE = 25.0, 45.0  # seconds after which it returns the best plan so far; of a graph of many operators
MANY = 5000


def add_graph_options(parser: argparse.ArgumentParser) -> None:
    """Add what `plan_graph` reads to a command's parser."""
    parser.add_argument("--graph", metavar="FILE", type=Path, help="a model's graph (nearlinear-workload/1)")
    parser.add_argument("--devices", metavar="K", type=int, help="how many devices it may be split over")
    parser.add_argument("--bandwidth", metavar="B", help="of each link: '10 Gbit/s', or bytes per second")
    parser.add_argument("--memory", metavar="M", help="of each device: '24 GiB', or bytes (default: no limit)")
    parser.add_argument("--budget", metavar="T", type=parse_seconds, help="for the search (default: 25 s)")
    parser.add_argument("--seed", metavar="N", default=0, type=int, help="of the search's random orders")
    parser.add_argument("--json", action="store_true", help="print the plan as JSON")


def plan_graph(options: argparse.Namespace) -> int:
    """Split the graph in ``options.graph``, print the plan, and return the exit code: 3 where nothing fits.

    Raises:
        InputError: The file is not a graph, or a number is out of its range.
        InfeasibleError: Nothing fits the devices' memory, and ``options.json`` is off.
    """
    if options.devices is None or options.bandwidth is None:
        raise InputError("how many devices, and how fast a link? write it like `--devices 4 --bandwidth '10 Gbit/s'`")
    if options.devices < 1:
        raise InputError(f"--devices is {options.devices}; it must be at least 1")
    link = _number(options.bandwidth, parse_bandwidth, "--bandwidth")
    memory = None if options.memory is None else _number(options.memory, parse_bytes, "--memory")
    workload = _read(options.graph)
    # More devices than operators stand idle, and a list of them may be longer than memory.
    options.devices = min(options.devices, max(len(workload.graph.operators), 1))
    began = time.monotonic()
    budget = options.budget or (LARGE if len(workload.graph.operators) > MANY else BUDGET)
    try:
        with watch(began, budget) as (stop, say):
            plan = partition(
                workload.graph, options.devices, link, memory, deadline=stop, seed=options.seed, progress=say
            )
    except InfeasibleError as error:
        if not options.json:
            raise
        found = {"infeasible": True, "least_memory_bytes": error.least_memory, "proven": error.proven}
        print(json.dumps({**found, "seconds": time.monotonic() - began, "error": str(error)}))
        return error.exit_code
    took = time.monotonic() - began
    if options.json:
        print(json.dumps(_as_json(workload, plan, took)))
        return 0
    console = Console()
    console.print(_table(workload.graph, plan, link, console.width))
    print(f"{plan}, found in {seconds(took)}: {plan.method}")
    print(f"no plan takes less than {seconds(plan.bound)}; one device would take {seconds(workload.graph.time)}")
    return 0


def _number(text: str, parse: Callable[[str], float], what: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = parse(text)
    if not 0 < value < float("inf"):
        raise InputError(f"{what} is {text}; it must be above 0")
    return value


def _read(path: Path) -> Workload:
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read the graph {path}: {getattr(error, 'strerror', None) or error}") from error
    return read_workload(text, path.name)


def _as_json(workload: Workload, plan: Partition, took: float) -> dict[str, object]:
    return {
        "assignment": workload.by_node(plan.assignment),
        "objective_ms": plan.objective * 1e3,
        "bound_ms": plan.bound * 1e3,
        "seconds": took,
        "gap": plan.gap,
        "loads_ms": [1e3 * each for each in plan.loads],
        "memory_bytes": list(plan.memory),
        "method": plan.method,
    }


@contextlib.contextmanager
def watch(began: float, budget: float) -> Iterator[tuple[Callable[[], bool], Callable[[float, str], None]]]:
    """Say on a terminal how far a long search is; end it after ``budget`` s or at Ctrl-C, with its best so far."""
    console = Console(stderr=True)
    interrupted = False
    doing = "reading the graph"

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal interrupted
        if interrupted:
            raise KeyboardInterrupt
        interrupted = True
        print("\nstopping: the best plan so far follows (Ctrl-C again to leave at once)", file=sys.stderr)

    def say(load: float, what: str) -> None:
        nonlocal doing
        doing = f"{seconds(load)} per microbatch so far: {what}" if load < float("inf") else what

    with contextlib.ExitStack() as stack:
        with contextlib.suppress(ValueError):  # signals belong to the main thread; elsewhere Ctrl-C is as always
            before = signal.signal(signal.SIGINT, interrupt)
            stack.callback(signal.signal, signal.SIGINT, before)
        status = console.status("") if console.is_terminal else None
        shown = False

        def stop() -> bool:
            nonlocal shown
            now = time.monotonic() - began
            if status is not None and now > PATIENCE:
                if not shown:
                    stack.enter_context(status)
                    shown = True
                status.update(f"{doing} ({now:.0f} of {budget:.0f} s, Ctrl-C keeps the best)")
            return interrupted or now > budget

        yield stop, say


def _table(graph: Graph, plan: Partition, link: float, width: int) -> Table:
    name, devices = escape(graph.name), len(plan.loads)
    title = f"{name}: {len(graph.operators)} operators on {devices} devices, {bandwidth(link)} between"
    table = Table(title=title, box=box.SIMPLE_HEAD, caption="per microbatch; the busiest stage sets the pace")
    table.add_column("stage", justify="right", no_wrap=True)
    table.add_column("operators", no_wrap=True, overflow="ellipsis", max_width=max(12, width - 68))
    for name in ("computes", "reads", "sends", "busy", "memory"):
        table.add_column(name, justify="right", no_wrap=True)
    for number, stage in enumerate(stages(graph, plan.assignment, plan.stages)):
        first, last = (escape(graph.operators[stage.operators[end]].name) for end in (0, -1))
        load = plan.loads[stage.device]
        table.add_row(
            str(number),
            f"{len(stage.operators)}: {first}" + (f" ... {last}" if len(stage.operators) > 1 else ""),
            seconds(stage.compute),
            size(stage.received),
            size(stage.sent),
            f"[bold]{seconds(load)}[/]" if load >= plan.objective * (1 - 1e-9) else seconds(load),
            size(plan.memory[stage.device]),
        )
    return table
