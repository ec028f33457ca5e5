"""The command `nearlinear plan`: turning a script's first steps and a cluster into a plan and a forecast."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from nearlinear.cli.plan_graph import add_graph_options, plan_graph
from nearlinear.cli.probe import measured_here
from nearlinear.cli.probe_tables import BUSY
from nearlinear.cli.status import status
from nearlinear.core.catalogue import DEVICES, load_cluster
from nearlinear.core.cluster import Cluster, Device, Island, Link
from nearlinear.core.forecast import Forecast, Point
from nearlinear.core.graph import Graph
from nearlinear.core.plan import EXACT
from nearlinear.errors import InputError, NearlinearError
from nearlinear.launch.local import run_local
from nearlinear.measure import cache
from nearlinear.measure.study import Study
from nearlinear.observe.kept import keep_plan
from nearlinear.observe.page import Bar, Content, Figure, Split, Stage, Timeline, page
from nearlinear.planning.batch import NoiseScale, noise_scale
from nearlinear.planning.choice import Choice, Planner
from nearlinear.planning.roofline import roofline
from nearlinear.planning.scaling import SHARE, forecast, runnable
from nearlinear.planning.timeline import timeline
from nearlinear.planning.ways import Way, Work
from nearlinear.runtime.environment import usable_cores
from nearlinear.units import parse_bandwidth, parse_seconds, seconds, size

ROOFLINE_SPREAD = 0.3
"""Spread of times that were not measured but follow from data sheets and a share of them; ours, at one sigma."""

LAUNCH_S = 5e-6
"""Seconds to start one operator on an accelerator, which no smaller batch saves: of 9.6 us per kernel in a loop of
launches 2.9 were the kernel's (A. Gray, "Getting started with CUDA graphs", NVIDIA, 2019); starts overlap in part."""

TIMELINE_NOTE = (
    "The timeline is one step by events, with messages beside computing. The forecast is by formulae, in which "
    "messages and computing on one processor also hold each other up: the two may differ by a tenth or two."
)

FAR, MOST_FAR = 8, 1024
"""Machines that --link plans for, and at most."""

LOCAL_NOTE = (
    "to a loss: the time, as a share of one machine's. Machines that train apart need more samples for the same loss: "
    "published are 1.13 times as many for every doubling (arXiv 2503.09799), our worst was 1.67. The exchange is int8 "
    "and beside the steps"
)

LEAST_STEPS = 8  # whose gradients say how noisy a batch is
OWN_ERROR = "nearlinear: error: "
LINES_SHOWN = 25  # of what a failing script wrote last
LOOP = "loop"  # what a study calls the time that the script takes beyond the model
CLIPPED = 1e-4  # norms of gradients this close to each other were clipped, and say nothing of the noise


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the parser."""
    parser = subparsers.add_parser(
        "plan",
        help="forecast N machines, and say where to stop",
        description="Run a script's first steps as one process, capture and time its model, and say how best to train "
        "it on the devices of a cluster, how fast that will be on 1, 2, 4, ... of them, and where to stop. Nothing but "
        "this process is needed. With --graph FILE, split a graph that is in a file.",
        usage="nearlinear plan [--cluster C] [options] script.py [args ...]\n"
        "       nearlinear plan --graph FILE --devices K --bandwidth B [options]",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--cluster",
        metavar="C",
        help="a file of `nearlinear probe`, or '64 x H100 80GB, NVLink within 8, 400 Gbit/s between' (default: here)",
    )
    parser.add_argument(
        "--link", metavar="L", help="-n machines like this one, far apart: '100 Mbit/s, 80 ms' (bandwidth, round trip)"
    )
    parser.add_argument("-n", type=int, metavar="N", help="plan for N devices (default: the stop point's)")
    parser.add_argument("--optimize", choices=("speed", "memory"), default="speed", help="(default: speed)")
    parser.add_argument("--grow", action="store_true", help="let the batch grow with the devices, each its own")
    parser.add_argument("--strategy", choices=(*EXACT, "local"), help="consider no other (default: all but local)")
    parser.add_argument("--local", action="store_true", help="consider local updates too, which change the numbers")
    parser.add_argument(
        "--share", type=float, default=SHARE, metavar="S", help="what one more device must add, of one (default: 0.5)"
    )
    parser.add_argument("--dtype", metavar="D", help="of the matrix products on devices that are not here")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write it as a page, too")
    parser.add_argument("--timeout", type=parse_seconds, default=600.0, metavar="T", help="for the script's steps")
    add_graph_options(parser)
    parser.add_argument("script", nargs=argparse.REMAINDER, metavar="script.py [args ...]", help="passed on as it is")
    parser.set_defaults(call=plan)


def plan(options: argparse.Namespace) -> int:
    """Plan, print, and return the exit code.

    Raises:
        InputError: There is no such script, it never calls ``nl.distribute``, or the cluster is not understood.
        NearlinearError: The script failed; what it wrote last is on stderr.
    """
    script: list[str] = options.script[1:] if options.script[:1] == ["--"] else options.script
    if options.graph is not None:
        if script:
            raise InputError(f"--graph plans the graph in a file and {script[0]!r} is a script; give one of them")
        given = {
            "--cluster": options.cluster,
            "--link": options.link,
            "--strategy": options.strategy,
            "-n": options.n,
            "--html": options.html,
        }
        for name, value in given.items():
            if value is not None:
                raise InputError(f"{name} is for scripts; --graph takes --devices, --bandwidth and --memory")
        return plan_graph(options)
    if not script:
        raise InputError("which script? write it like `nearlinear plan train.py`")
    if not Path(script[0]).is_file():
        raise InputError(f"there is no script {script[0]!r} in {Path.cwd()}")
    if options.link is not None:
        if options.cluster is not None:
            raise InputError("--link plans for machines like this one and --cluster says which; give one of them")
        _parse_link(options.link)
    if not 0 < options.share <= 1:
        raise InputError(f"--share is {options.share}; it must be above 0 and at most 1")
    with status() as say:
        cluster, here = _cluster(options.cluster, say)
        if options.link is not None:
            assert here is not None
            cluster = _apart(here.devices[0], options.link, FAR if options.n is None else options.n)
        if options.n is not None and not 1 <= options.n <= len(cluster.devices):
            raise InputError(f"-n is {options.n}; the cluster has {len(cluster.devices)} devices")
        study = _study(script, here, options.timeout, say)
        say("comparing ways to train it")
        found = _planned(script, study, cluster, here, options)
    content = _content(found)
    if cluster is here:
        keep_plan(script, content, lambda what: print(f"nearlinear: {what}", file=sys.stderr))
    if options.html is not None:
        cache.write(options.html, page(content), "name another file with --html")
    if options.json:
        print(json.dumps(_as_json(found)))
    else:
        _show(found, Console(highlight=False))
    sys.stdout.flush()
    if options.html is not None:
        print(f"nearlinear: the page is {options.html}", file=sys.stderr)
    if cluster is here and found.forecast.stop > 1:
        print(f"hint: nearlinear run -n {found.forecast.stop} {' '.join(script)}", file=sys.stderr)
    return 0


@dataclass(frozen=True)
class _Found:
    script: list[str]
    study: Study
    cluster: Cluster
    work: Work
    choice: Choice
    forecast: Forecast
    noise: NoiseScale | str
    ways: tuple[Point, ...]  # that a run here may be asked for


def _cluster(text: str | None, say: Callable[[str], None]) -> tuple[Cluster, Cluster | None]:
    """Return the cluster to plan for, and this machine; ``None`` where data sheets say all there is to know."""
    described = None if text is None else load_cluster(text, cache.known_devices())
    if described is not None and all(device.name in DEVICES for device in described.devices):
        return described, None
    say("measuring this machine")
    measured, kept = measured_here()
    if not kept:
        cache.keep(measured)
    if measured.others > BUSY:
        print(
            f"nearlinear: other programs took {100 * measured.others:.0f} % of the processors while this machine was "
            "measured, so forecasts will be off; `nearlinear probe --fresh` measures again",
            file=sys.stderr,
        )
    here = measured.cluster()
    return described or here, here


def _parse_link(text: str) -> Link:
    """Return the link that ``"100 Mbit/s, 80 ms"`` describes, which is the bandwidth and the round trip.

    Raises:
        InputError: It is not understood.
    """
    speed, comma, round_trip = text.partition(",")
    if not comma:
        raise InputError(f"--link {text!r} has one part; write the bandwidth and the round trip: '100 Mbit/s, 80 ms'")
    bandwidth = parse_bandwidth(speed.strip())
    if not bandwidth:
        raise InputError(f"--link {text!r} carries nothing; give its bandwidth, like 100 Mbit/s")
    return Link(parse_seconds(round_trip.strip()) / 2, bandwidth)


def _apart(device: Device, link: str, count: int) -> Cluster:
    """Return ``count`` such devices, each with a link of its own to all others.

    Raises:
        InputError: ``count`` is below 1 or above ``MOST_FAR``.
    """
    if not 1 <= count <= MOST_FAR:
        raise InputError(f"-n is {count}; --link plans for 1 to {MOST_FAR} machines")
    between = _parse_link(link)
    return Cluster((device,) * count, tuple(Island((each,), between) for each in range(count)), between)


def _study(script: Sequence[str], here: Cluster | None, timeout_s: float, say: Callable[[str], None]) -> Study:
    """Run the script's first steps in a process of their own, on as many cores as a device of this machine has."""
    threads = str(max(1, usable_cores() // (len(here.devices) if here is not None else 1)))
    name = Path(script[0]).name
    with tempfile.TemporaryDirectory(prefix="nearlinear-plan-") as folder:
        out = Path(folder) / "study.json"
        written: list[tuple[int, str, bytes]] = []
        say(f"{name}: its first steps")
        outcome = run_local(
            [sys.executable, "-m", "nearlinear.cli.plan_study", str(out), "3", *script],
            1,
            env={"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads},
            on_line=lambda rank, stream, line: written.append((rank, stream, line)),
            on_event=lambda event: say(f"{name}: {event['what']}") if event["kind"] == "plan" else None,
            limit_s=timeout_s,
        )
        if outcome.stopped_by is not None:
            raise KeyboardInterrupt
        if outcome.message is not None or not out.exists():
            lines = [line.decode(errors="replace").rstrip() for _, _, line in written]
            own = [line for line in lines if line.startswith(OWN_ERROR)]
            if own and outcome.exit_code == InputError.exit_code:
                raise InputError(own[-1].removeprefix(OWN_ERROR).replace("the script", name, 1))
            for line in lines[-LINES_SHOWN:]:
                print(line, file=sys.stderr)
            if outcome.overdue:
                raise NearlinearError(
                    f"{name} took more than {seconds(timeout_s)} for its first steps; give a longer --timeout"
                )
            how = outcome.message or "it ended without an error, before it had trained a step"
            raise NearlinearError(f"{name} failed in its first steps: {how}" + (" (see above)" if lines else ""))
        return Study.from_json(out.read_text())


def _planned(
    script: list[str], study: Study, cluster: Cluster, here: Cluster | None, options: argparse.Namespace
) -> _Found:
    local = here.devices[0] if here is not None else None
    work = Work(
        _less(study.graph, study.launch),
        study.batch,
        launch=study.launch,
        grows=options.grow,
        reference=local,
        dtype=options.dtype or study.dtype,
        spread=study.spread / math.sqrt(max(len(study.steps), 1)),
    )
    if local is None or all(device.name != local.name for device in cluster.devices):
        device = cluster.devices[0]
        # What the loop takes beyond the model is this machine's; of another nothing is known of it.
        own = tuple(operator for operator in study.graph.operators if operator.kind != LOOP)
        graph = roofline(dataclasses.replace(study.graph, operators=own), device, work.dtype)
        started = sum(operator.moved_bytes > 0 for operator in own) * (3 if graph.training else 1)
        work = dataclasses.replace(
            work, graph=graph, reference=device, launch=started * LAUNCH_S, spread=ROOFLINE_SPREAD
        )
    able = (*study.strategies, "local")
    strategies = able if options.local else study.strategies
    if options.strategy is not None:
        if options.strategy not in able:
            raise InputError(f"{Path(script[0]).name} cannot train by {options.strategy!r}, only by {', '.join(able)}")
        strategies = (options.strategy,)
    planner = Planner(work, cluster, strategies, options.optimize, variants=study.variants)
    noise = _noise(study)
    expected = forecast(planner, noise=None if isinstance(noise, str) else noise, share=options.share)
    # Where one device is best, what two would bring is what there is to be seen.
    second = expected.points[min(1, len(expected.points) - 1)].devices
    devices = options.n or (expected.stop if expected.stop > 1 else second)
    choice = planner.choose(devices)
    numbers = sorted({*(point.devices for point in expected.points), devices})
    ways: tuple[Point, ...] = ()
    if cluster is here:  # what a run does by itself is not for --strategy to narrow
        if planner.strategies != study.strategies:
            planner = Planner(work, cluster, study.strategies, options.optimize, variants=study.variants)
        ways = runnable(planner, numbers)
    return _Found(script, study, cluster, work, choice, expected, noise, ways)


def _less(graph: Graph, launch: float) -> Graph:
    """Return the graph without the seconds that a smaller batch does not save; they are counted apart."""
    rest = 1 - launch / graph.time if graph.time else 1.0
    operators = (
        dataclasses.replace(each, forward=each.forward * rest, backward=each.backward * rest)
        for each in graph.operators
    )
    return dataclasses.replace(graph, operators=tuple(operators))


def _noise(study: Study) -> NoiseScale | str:
    """Return the gradients' noise scale, or why it is not known."""
    norms = study.norms
    if len(norms) < LEAST_STEPS:
        return f"{len(norms)} gradients were seen, too few to tell how noisy a batch is"
    if max(norms) - min(norms) < CLIPPED * max(norms):
        return "the gradients are clipped, so how noisy a batch is cannot be told"
    try:
        return noise_scale(study.batch, study.batch * len(norms), [sum(norms) / len(norms)], [study.mean_norm])
    except InputError:
        return f"the gradients of {len(norms)} steps are all noise, so what a larger batch is worth cannot be told"


def _show(found: _Found, console: Console) -> None:
    study, choice, expected = found.study, found.choice, found.forecast
    name = escape(Path(found.script[0]).name)
    console.print(f"[bold]{name}[/]: {escape(str(study.graph))}, batch {study.batch}, captured by {study.rung}")
    for note in study.notes:
        console.print(f"  [dim]{escape(note)}[/]")
    console.print(f"[bold]on[/] {escape(str(found.cluster))}\n\nOn {_devices(choice.winner.way.devices)}:")
    if choice.winner.way.groups:
        console.print(_stages(found))
    for line in choice.reasons:
        console.print(f"- {line}", markup=False)
    apart = any(point.way.startswith("local") for point in expected.points)
    console.print(_curve(expected, loss=apart or (found.work.grows and isinstance(found.noise, NoiseScale))))
    console.print(f"[bold]stop at {expected.stop}[/]: {expected.reason}")
    if apart:
        console.print(f"[dim]{LOCAL_NOTE}[/]")
    strategy = choice.winner.way.strategy
    if choice.winner.way.devices > 1 and strategy == "local":
        console.print("[dim]ask for it: nearlinear run --listen ADDRESS:PORT, and on the others what it prints[/]")
    elif taken := _taken(found):
        console.print(f"[dim]{taken}[/]")
    elif choice.winner.way.devices > 1 and strategy != "data":
        console.print(f"[dim]ask for it: {_asked(choice.winner.way)}[/]")
    if isinstance(found.noise, NoiseScale):
        console.print(_batch(found.noise, study.batch))
    else:
        console.print(f"[dim]time to a loss: {found.noise}[/]")


def _asked(way: Way) -> str:
    """Return the options that ask for a way, as far as there are such."""
    plan = way.plan()
    counts = (
        "" if plan is None or plan.stages is None else f" --stages {plan.stages} --microbatches {plan.microbatches}"
    )
    return f"--strategy {way.strategy}{counts}"


def _taken(found: _Found) -> str:
    """Return what a run here will do without being asked for a strategy, in a sentence; empty where that is plain."""
    devices = found.choice.winner.way.devices
    best = next((point for point in found.ways if point.devices == devices > 1), None)
    if best is None or best.way == "data":
        return ""
    return f"nearlinear run -n {devices} takes {best.way} by itself, {seconds(best.seconds)} a step"


def _batch(noise: NoiseScale, batch: int) -> str:
    high = f"{noise.high:,.0f}" if math.isfinite(noise.high) else "unknown"
    return (
        f"[dim]gradient noise scale at the start: {noise.value:,.0f} samples ({noise.low:,.0f} to {high}); a batch of "
        f"{batch} needs {noise.steps(batch):.2f} times the fewest steps. It grows as training goes on[/]"
    )


def _stages(found: _Found) -> Table:
    way = found.choice.winner.way
    table = Table(title=str(way), box=box.SIMPLE_HEAD)
    for name in ("stage", "what", "devices", "computes", "state", "kept per microbatch", "sends on"):
        table.add_column(name, justify="left" if name == "what" else "right")
    for number, group in enumerate(way.groups):
        table.add_row(
            str(number),
            escape(group.label),
            str(group.replicas * way.copies),
            seconds(group.compute),
            size(group.state_bytes),
            size(group.activation_bytes),
            size(group.leaving) if group.leaving else "-",
        )
    return table


def _curve(expected: Forecast, *, loss: bool) -> Table:
    """Return the forecast as a table, with the time to a loss where that is not the step's time alone."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("devices", "step", "samples/s", "speedup", "waits", "memory"):
        table.add_column(name, justify="right", no_wrap=True)
    if loss:
        table.add_column("to a loss", justify="right", no_wrap=True)
    table.add_column("way", min_width=8)
    for point in expected.points:
        table.add_row(
            str(point.devices),
            _step(point),
            f"{point.rate:,.0f}" if point.rate >= 1000 else f"{point.rate:,.3g}",
            f"{expected.speedup(point):.2f} ({100 * expected.efficiency(point):.0f} %)",
            f"{100 * (point.exposed + point.bubble) / point.seconds:.0f} %",
            size(point.memory) + ("" if point.fits else " !"),
            *([f"{point.to_loss:.3g}" if point.to_loss is not None else "-"] if loss else []),
            ", ".join(point.way.split(", ")[:2]),
            style="bold" if point.devices == expected.stop else "",
        )
    return table


def _step(point: Point) -> str:
    return f"{seconds(point.seconds)} ±{50 * (point.high - point.low) / point.seconds:.0f} %"


def _as_json(found: _Found) -> dict[str, Any]:
    return {
        "script": found.script,
        "graph": json.loads(found.study.graph.to_json()),
        "rung": found.study.rung,
        "notes": found.study.notes,
        "batch": found.study.batch,
        "cluster": json.loads(found.cluster.to_json()),
        "plan": dataclasses.asdict(found.choice.winner),
        "runner_up": None if found.choice.runner_up is None else dataclasses.asdict(found.choice.runner_up),
        "reasons": found.choice.reasons,
        "forecast": json.loads(found.forecast.to_json()),
        "noise": found.noise if isinstance(found.noise, str) else dataclasses.asdict(found.noise),
    }


def _devices(count: int) -> str:
    return "1 device" if count == 1 else f"{count} devices"


def _split(way: Way, graph: Graph) -> Split:
    """Return the graph with the stage of every operator; one stage where all devices hold all of it."""
    stage = {operator: number for number, group in enumerate(way.groups) for operator in group.operators}
    return Split(graph, tuple(stage.get(operator, 0) for operator in range(len(graph.operators))))


def _content(found: _Found) -> Content:
    choice, expected, study, work = found.choice, found.forecast, found.study, found.work
    best = expected.at(expected.stop)
    step = timeline(choice.winner.way, work, found.cluster)
    return Content(
        title=f"{Path(found.script[0]).name} on {_devices(len(found.cluster.devices))}",
        about=f"On {found.cluster}. {study.graph}, batch {study.batch}, captured by {study.rung}.",
        figures=(
            Figure("stop at", _devices(expected.stop), expected.reason),
            Figure(
                "speedup there", f"{expected.speedup(best):.2f}", f"{100 * expected.efficiency(best):.0f} % of ideal"
            ),
            Figure("step", seconds(best.seconds), f"{seconds(best.low)} to {seconds(best.high)}"),
        ),
        forecast=expected,
        split=_split(choice.winner.way, work.graph),
        stages=Stage.of_way(choice.winner.way),
        timelines=() if step is None else (Timeline.of(step),),
        spent=tuple(Bar.of(point, _devices(point.devices)) for point in expected.points),
        reasons=choice.reasons,
        notes=(*study.notes, *([TIMELINE_NOTE] if step is not None else [])),
        ways=found.ways,
    )
