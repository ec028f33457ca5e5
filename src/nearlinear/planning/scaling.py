"""Turning step times into the curve over 1, 2, 4, ... devices, and the number after which more do not pay."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from nearlinear.core.cluster import Cluster
from nearlinear.core.forecast import Forecast, Point
from nearlinear.errors import InputError
from nearlinear.planning.batch import NoiseScale, local_penalty
from nearlinear.planning.choice import Planner
from nearlinear.planning.ways import Candidate
from nearlinear.units import seconds

SHARE = 0.5
"""What one more device must add, of what the first alone does: below a half, more of its time goes into being one more
than into training, and a sample on it costs more than twice as much as on the first. Whoever is in a hurry may ask for
less, whoever pays per device for more."""


def forecast(planner: Planner, *, noise: NoiseScale | None = None, share: float = SHARE) -> Forecast:
    """Return what to expect of 1, 2, 4, ... devices, each with its best way, and where to stop.

    Time to a loss, where ``noise`` is known or the batch does not grow: steps times step time, over that of one device;
    it then decides where to stop, else samples per second do. Local updates need more samples; their published penalty
    (``local_penalty``) is in both.

    Args:
        planner: Knows what is trained and on what; its first devices are taken first. ``planner.choose(devices)`` says
            more of the way behind a point.
        noise: The gradients' noise scale.
        share: What one more device must add, of what the first alone does.

    Raises:
        InputError: ``share`` is not above 0 and at most 1.
    """
    ranked = {devices: planner.rank(devices) for devices in counts(planner.cluster)}
    winners = {devices: found[0] for devices, found in ranked.items() if found}
    points = tuple(_point(each, winners[1], noise) for each in winners.values())
    gains = [
        1 / point.to_loss if point.to_loss else _worth(point, each) / points[0].rate
        for point, each in zip(points, winners.values(), strict=True)
    ]
    stop = stopping_point(list(winners), gains, share, [point.fits for point in points])
    reason = _reason(points, gains, stop, share, planner.cluster)
    return Forecast(points, stop, reason, f"{planner.work.graph.name} on {planner.cluster}")


def runnable(planner: Planner, devices: Iterable[int]) -> tuple[Point, ...]:
    """Return what to expect of every strategy that ``distribute`` can be asked for, the best first for each number.

    Args:
        planner: Knows what is trained and on what.
        devices: Numbers of devices.
    """
    one = planner.rank(1)[0]
    return tuple(_point(each, one, None) for number in devices for each in planner.runnable(number))


def counts(cluster: Cluster) -> list[int]:
    """Return the numbers of devices to look at: powers of two within the first island, then whole islands.

    Islands are doubled too, and all of them come last; up to four are taken one by one.

    Example:
        >>> from nearlinear.core.catalogue import parse_cluster
        >>> counts(parse_cluster("40 x H100 80GB, NVLink within 8, 400 Gbit/s between"))
        [1, 2, 4, 8, 16, 24, 32, 40]
    """
    sizes = [len(island.devices) for island in sorted(cluster.islands, key=lambda each: each.devices[0])]
    found = {1, sizes[0]} | {2**power for power in range(sizes[0].bit_length()) if 2**power <= sizes[0]}
    doubled = [2**power for power in range(3, len(sizes).bit_length())]
    islands = [*range(1, min(len(sizes), 4) + 1), *doubled, len(sizes)]
    return sorted(found | {sum(sizes[:number]) for number in islands if number <= len(sizes)})


def stopping_point(
    devices: Sequence[int], gains: Sequence[float], share: float = SHARE, fits: Sequence[bool] | None = None
) -> int:
    """Return the number of devices after which one more adds less than ``share`` of one.

    Where the curve dips and rises again (the first step out of an island often costs more than it brings), a larger
    number counts if all that was added on the way to it brings ``share`` each. That is the number where
    ``gain - share x devices`` is largest; it is never beyond the top of the curve.

    Args:
        devices: Numbers looked at, ascending.
        gains: Samples per second at each, in units of one device.
        share: Above 0, at most 1.
        fits: Which numbers have the memory; all where it is ``None``.

    Raises:
        InputError: The lists do not match, or ``share`` is out of its range.

    Example:
        >>> stopping_point([1, 2, 4, 8, 16], [1.0, 1.9, 3.6, 6.4, 7.0])
        8
        >>> stopping_point([1, 8, 16, 24], [1.0, 7.6, 3.0, 3.4])
        8
    """
    if not len(devices) == len(gains) > 0 or not 0 < share <= 1:
        raise InputError(
            f"a stopping point needs a gain per number of devices and a share above 0 and at most 1, got "
            f"{len(devices)} numbers, {len(gains)} gains and {share}"
        )
    able = [place for place in range(len(devices)) if fits is None or fits[place]] or list(range(len(devices)))
    return devices[max(able, key=lambda place: (gains[place] - share * devices[place], -devices[place]))]


def _point(found: Candidate, one: Candidate, noise: NoiseScale | None) -> Point:
    to_loss = None
    if noise is not None or found.samples == one.samples:
        penalty = 1.0 if found.exact else local_penalty(found.way.devices)[0]
        # Local updates: each device takes steps of its own share, and the penalty is for what that loses.
        steps = 1.0 if noise is None else noise.steps(found.samples) / noise.steps(one.samples)
        to_loss = steps * penalty * found.seconds / one.seconds
    way = str(found.way) + (f", exchange every {found.every} steps" if not found.exact else "")
    return Point(
        found.way.devices,
        way,
        found.samples,
        found.seconds,
        found.low,
        found.high,
        found.memory,
        found.compute,
        found.exposed,
        found.bubble,
        found.update,
        found.fits,
        to_loss,
        found.way.plan(),
    )


def _worth(point: Point, found: Candidate) -> float:
    """Return the samples per second, less those that local updates need more of."""
    return point.rate / (1.0 if found.exact else local_penalty(point.devices)[0])


def _reason(points: Sequence[Point], gains: Sequence[float], stop: int, share: float, cluster: Cluster) -> str:
    place = next(number for number, point in enumerate(points) if point.devices == stop)
    if place == len(points) - 1:
        if len(points) == 1:
            return "there is no second device, or nothing for it to do"
        return f"it is all there is, and each device still adds at least {share:g} of one"
    here, after = points[place], points[place + 1]
    added = (gains[place + 1] - gains[place]) / (after.devices - here.devices)
    parts = {"the network": after.exposed, "waiting for other stages": after.bubble}
    most = max(parts, key=lambda each: parts[each])
    why = (
        f"{seconds(parts[most])} of each step of {seconds(after.seconds)} go into {most}"
        if parts[most] > 0.1 * after.seconds
        else f"a step of {seconds(after.seconds)} has little left to share"
    )
    change = "would make it slower" if added < 0 else f"would add {added:.2f} of one each, less than {share:g}"
    first = points[0].fits
    needs = "" if first else ", and fewer do not have the memory"
    return f"{after.devices} devices {change}: {why}{needs}" + _where(here.devices, cluster)


def _where(devices: int, cluster: Cluster) -> str:
    sizes = [len(island.devices) for island in sorted(cluster.islands, key=lambda each: each.devices[0])]
    total = 0
    for number, each in enumerate(sizes, 1):
        total += each
        if total == devices and len(sizes) > 1 and each > 1:
            return f" ({devices} devices are {number} of {len(sizes)} islands)"
    return ""
