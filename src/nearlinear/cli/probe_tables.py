"""Turning what a probe found into tables and sentences for people."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table

from nearlinear.core.cluster import Cluster, Exchange
from nearlinear.measure.islands import typical
from nearlinear.measure.messages import STREAMS, Both
from nearlinear.measure.probe import Measured
from nearlinear.units import bandwidth, seconds, size

MATRIX = 8  # ranks up to which every pair has a cell
BUSY = 0.1  # share of the processors from which other programs spoil a measurement
EXAMPLE = 100e6  # bytes of the all-reduce that the sentence is about: 25 million parameters in float32


def show(measured: Measured, console: Console) -> None:
    """Print the tables and what they mean."""
    cluster = measured.cluster()
    console.print(_devices(measured, cluster))
    if len(cluster.devices) > 1:
        console.print(_matrix(measured) if len(cluster.devices) <= MATRIX else _by_island(cluster))
        if cluster.exchanges:
            console.print(_exchanges(cluster.exchanges))
    for sentence in meaning(measured, cluster):
        console.print(sentence, soft_wrap=True)


def _devices(measured: Measured, cluster: Cluster) -> Table:
    dtypes = list(dict.fromkeys(dtype for device in cluster.devices for dtype in device.flops))
    fastest = max(flops for device in cluster.devices for flops in device.flops.values())
    unit, factor = ("TFLOP/s", 1e12) if fastest >= 1e12 else ("GFLOP/s", 1e9)
    table = Table(title=f"Devices: {unit} of a large matrix product, GB/s of a large copy", title_justify="left")
    for heading in ("ranks", "device", "host"):
        table.add_column(heading)
    for heading in ("memory", *dtypes, "copy"):
        table.add_column(heading, justify="right")
    for device, alike in itertools.groupby(enumerate(cluster.devices), key=lambda row: row[1]):
        ranks = [rank for rank, _ in alike]
        name = f"{device.name} ({measured.hardware[ranks[0]].processor})" if device.name == "cpu" else device.name
        speeds = [f"{device.flops[dtype] / factor:,.3g}" if dtype in device.flops else "" for dtype in dtypes]
        copy = f"{device.memory_bandwidth / 1e9:,.3g}"
        table.add_row(_ranks(ranks), name, device.host, size(device.memory), *speeds, copy)
    return table


def _matrix(measured: Measured) -> Table:
    table = Table(title="Links: from the rank at the left to the rank above", title_justify="left")
    table.add_column("", justify="right")
    count = len(measured.hardware)
    for rank in range(count):
        table.add_column(str(rank), justify="right")
    for source in range(count):
        cells = []
        for target in range(count):
            both = measured.pairs.get((min(source, target), max(source, target)))
            if both is None:
                cells.append("-" if source == target else "")
            else:
                link = (both.there if source < target else both.back).link
                cells.append(f"{seconds(link.latency)}\n{bandwidth(link.bandwidth)}\n±{100 * link.spread:.0f} %")
        table.add_row(str(source), *cells)
    return table


def _by_island(cluster: Cluster) -> Table:
    table = Table(title="Links", title_justify="left")
    for heading in ("between", "latency", "bandwidth", "residual"):
        table.add_column(heading, justify="left" if heading == "between" else "right")
    links = [(f"the ranks of {_ranks(i.devices)}", i.link) for i in cluster.islands if len(i.devices) > 1]
    if len(cluster.islands) > 1:
        links.append(("islands", cluster.between))
    links += [
        (f"{_ranks(cluster.islands[a].devices)} and {_ranks(cluster.islands[b].devices)}", link)
        for a, b, link in cluster.pairs
    ]
    for what, link in links:
        table.add_row(what, seconds(link.latency), bandwidth(link.bandwidth), f"±{100 * link.spread:.0f} %")
    return table


def _exchanges(exchanges: Iterable[Exchange]) -> Table:
    table = Table(title="Collective operations, as data parallel runs them", title_justify="left")
    table.add_column("operation")
    for heading in ("ranks", "latency", "bandwidth", "residual", size(EXAMPLE), "processor"):
        table.add_column(heading, justify="right")
    for each in exchanges:
        table.add_row(
            f"{each.kind.replace('_', '-')} ({each.algorithm})",
            str(each.ranks),
            seconds(each.link.latency),
            bandwidth(each.link.bandwidth),
            f"±{100 * each.link.spread:.0f} %",
            seconds(each.time(EXAMPLE)),
            seconds(each.processor_time(EXAMPLE)) if each.processor is not None else "",
        )
    return table


def meaning(measured: Measured, cluster: Cluster) -> list[str]:
    """Return what the figures mean, in sentences."""
    said = [f"The cluster: {cluster}."]
    count = len(cluster.devices)
    if count > 1:
        many = len(cluster.islands)
        names = "; ".join(f"ranks {_ranks(island.devices)}" for island in cluster.islands[:6])
        more = f"; and {many - 6} more" if many > 6 else ""
        said.append(f"{many} island{'s' if many > 1 else ''}: {names}{more}.")
    whole = cluster.exchange("all_reduce", count)
    if whole is not None:
        said.append(
            f"An all-reduce of {size(EXAMPLE)} (25 million parameters in float32) among all {count} takes "
            f"{seconds(whole.time(EXAMPLE))}; a step must compute for that long to hide it."
        )
    crowd = cluster.crowd(count)
    if min(crowd.compute, crowd.memory) < 0.95:
        said.append(
            f"While all {count} work, each multiplies at {_share(crowd.compute)} of its speed alone "
            f"and copies at {_share(crowd.memory)}."
        )
    if measured.others > BUSY:
        said.append(
            f"Other programs took {_share(measured.others)} of the processors meanwhile, so the figures are too low; "
            "measure again with --fresh when the machine is quiet."
        )
    across = [both for pair, both in measured.pairs.items() if cluster.island_of[pair[0]] != cluster.island_of[pair[1]]]
    said += _sharing(measured, cluster, across)
    return said


def _sharing(measured: Measured, cluster: Cluster, across: Sequence[Both]) -> list[str]:
    said = []
    if across:
        slowest = min(across, key=lambda both: both.duplex)
        if slowest.duplex < 0.75:
            said.append(f"Both directions at once: each has {_share(slowest.duplex)} of its bandwidth alone.")
        gains = [both.streams for both in across if both.streams is not None]
        if gains and max(gains) >= 1.25:
            said.append(
                f"{STREAMS} connections at once carry up to {max(gains):.1f} times as much as one: "
                "the link loses packets or is long; several streams pay."
            )
        both_ways = typical([both.there.link for both in across]), typical([both.back.link for both in across])
        if max(link.bandwidth for link in both_ways) > 1.25 * min(link.bandwidth for link in both_ways):
            said.append("The directions differ: " + " and ".join(bandwidth(link.bandwidth) for link in both_ways) + ".")
    share = measured.at_once_share
    if share is not None and share < 0.8:
        several = len(measured.at_once)
        shared = "share a link" if cluster.uplinks < 0.8 * several else "disturb each other"
        said.append(
            f"{several} pairs of islands' devices at once: each has {_share(share)} of its bandwidth; they {shared}."
        )
    return said


def _share(value: float) -> str:
    return f"{100 * value:.0f} %"


def _ranks(ranks: Sequence[int]) -> str:
    """Return ranks as people write them.

    Example:
        >>> _ranks([0, 1, 2, 5])
        '0-2, 5'
    """
    parts = []
    for _, run in itertools.groupby(enumerate(sorted(ranks)), key=lambda each: each[1] - each[0]):
        numbers = [rank for _, rank in run]
        parts.append(str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]}-{numbers[-1]}")
    return ", ".join(parts)
