"""Turning layers and devices into stages, each with its own replicas, tensor degree and recomputation.

Source of the recurrence: J. Tarnawski, D. Narayanan, A. Phanishayee, "Piper: Multidimensional Planner for DNN
Parallelization", NeurIPS 2021. Beyond it: one table answers every number of devices up to the largest, the choice of
layers to recompute looks for a better last layer, and a relaxation proves how far off the plan can be.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nearlinear.errors import InputError
from nearlinear.planning.layers import Layers
from nearlinear.units import seconds, size

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]
_NEVER = np.array([np.inf])


@dataclass(frozen=True, slots=True)
class Stage:
    """Layers that run together on ``replicas x degree`` devices.

    Args:
        layers: Positions, ascending.
        replicas: Copies of the stage; each takes an equal share of the microbatches.
        degree: Devices that share the tensors of one copy.
        recomputed: Positions of the layers that make their activations again.
        seconds: Per microbatch in steady state.
        memory: Bytes on each of its devices.
    """

    layers: tuple[int, ...]
    replicas: int
    degree: int
    recomputed: tuple[int, ...]
    seconds: float
    memory: float


@dataclass(frozen=True, slots=True)
class Staged:
    """Stages in the order of the forward pass.

    Args:
        stages: What was chosen.
        seconds: Per microbatch in steady state: the slowest stage's.
        bound: No plan of this kind is faster, in seconds.
    """

    stages: tuple[Stage, ...]
    seconds: float
    bound: float

    @property
    def devices(self) -> int:
        """Devices used; may be fewer than there are."""
        return sum(stage.replicas * stage.degree for stage in self.stages)

    def __str__(self) -> str:
        parts = []
        for stage in self.stages:
            shape = f"{stage.replicas}" + (f" x {stage.degree}" if stage.degree > 1 else "")
            again = f", {len(stage.recomputed)} recomputed" if stage.recomputed else ""
            parts.append(f"[{len(stage.layers)} layers on {shape}{again}]")
        return f"{seconds(self.seconds)} per microbatch on {self.devices} devices: {' '.join(parts)}"


def replicate(model: Layers, devices: int, memory: float, bandwidth: float, microbatches: int) -> Staged:
    """Return the fastest plan on at most ``devices`` devices.

    Example:
        >>> from nearlinear.planning.layers import Layer, Variant
        >>> two = Layers((Layer("a", {1: Variant(1.0)}), Layer("b", {1: Variant(3.0)})))
        >>> print(replicate(two, devices=4, memory=1e9, bandwidth=1e9, microbatches=8))
        1 s per microbatch on 4 devices: [2 layers on 4]

    Args:
        model: What to place.
        devices: At most this many; alike.
        memory: Bytes of each.
        bandwidth: Bytes per second out of and into each.
        microbatches: Per step; a stage's replicas must divide it.

    Raises:
        InputError: Nothing fits; the message says which memory would do.
    """
    plan = Replicas(model, devices, memory, bandwidth, microbatches).plan(devices)
    if plan is None:
        least = least_memory(model, devices, microbatches)
        raise InputError(
            f"{model.name} does not fit on {devices} devices of {size(memory)}; "
            f"it needs {size(least)} on each, or more devices"
        )
    return plan


def least_memory(model: Layers, devices: int, microbatches: int) -> float:
    """Return the bytes per device with which some plan on at most ``devices`` devices fits."""
    return float(_Table(model, devices, np.inf, 1.0, microbatches, None, "memory").best(devices))


class Replicas:
    """Plans for every number of devices up to ``devices``, from one search.

    Seconds of a stage per microbatch, with ``d`` replicas and degree ``t``, bandwidth ``B`` and ``N`` microbatches:
    ``compute(t) / d + 2 * crossing_bytes / (d B) + 4 (d - 1) / d * parameter_bytes / (N B)``. Bytes on each of its
    devices: ``activation_bytes * ceil(s / d) + fixed_bytes``, ``s`` the replicas of this and all later stages.
    The recurrence, over what is still to be placed, the devices and ``s``: the least over the next stage of the larger
    of its seconds and those of the rest. It is exact except for the choice of the recomputed layers, a knapsack: there
    the layers with most bytes saved per second are taken, and the last of them is replaced where a cheaper one does.

    Args:
        model: What to place.
        devices: The most there can be; alike.
        memory: Bytes of each.
        bandwidth: Bytes per second out of and into each.
        microbatches: Per step; a stage's replicas must divide it.
        replicas: The numbers that a stage may have; all that divide the microbatches where it is ``None``.

    Raises:
        InputError: A number is not above 0.
    """

    def __init__(
        self,
        model: Layers,
        devices: int,
        memory: float,
        bandwidth: float,
        microbatches: int,
        replicas: tuple[int, ...] | None = None,
    ) -> None:
        if min(devices, memory, bandwidth, microbatches) <= 0:
            raise InputError(
                f"devices, memory, bandwidth and microbatches must be above 0, got "
                f"{devices}, {memory}, {bandwidth} and {microbatches}"
            )
        self._asked = (model, devices, memory, bandwidth, microbatches, replicas)
        self._table = _Table(*self._asked, "seconds")

    @cached_property
    def _relaxed(self) -> _Table:
        return _Table(*self._asked, "bound")

    def stages(self, devices: int) -> tuple[Stage, ...] | None:
        """Return the stages of ``plan(devices)`` without the proof of how good they are."""
        return self._table.stages(devices)

    def plan(self, devices: int) -> Staged | None:
        """Return the fastest plan on at most ``devices`` devices, or ``None`` where nothing fits."""
        stages = self.stages(devices)
        if stages is None:
            return None
        slowest = max(stage.seconds for stage in stages)
        return Staged(stages, slowest, min(float(self._relaxed.best(devices)), slowest))


class _Table:
    """The recurrence. ``value[rest][k, s]`` is what the layers outside downset ``rest`` cost on at most ``k`` devices
    with at most ``s`` replicas in all; ``goal`` says what is counted: seconds, a lower bound of them, or memory.

        downset J          downset I
        ┌────────────┬─────────────────┬───────────────┐
        │  placed    │  the next stage │     rest      │   value[J] = min over I, t, d of
        └────────────┴─────────────────┴───────────────┘   max(stage(I - J, t, d), value[I][k - t d, s - d])
    """

    def __init__(
        self,
        model: Layers,
        devices: int,
        memory: float,
        bandwidth: float,
        microbatches: int,
        replicas: tuple[int, ...] | None,
        goal: str,
    ) -> None:
        self.costs = _Costs(model, memory, goal)
        self.devices, self.bandwidth, self.microbatches = devices, bandwidth, microbatches
        self.most = min(devices, microbatches)
        self.replicas = [
            count
            for count in range(1, self.most + 1)
            if microbatches % count == 0 and (replicas is None or count in replicas)
        ]
        self.flight = {count: -(-np.arange(self.most + 1) // count) for count in self.replicas}
        downsets = self.costs.downsets
        self.value = [np.full((devices + 1, self.most + 1), np.inf) for _ in downsets]
        self.value[-1][:] = 0.0
        self.shapes = [
            (degree, count) for degree in self.costs.degrees for count in self.replicas if degree * count <= devices
        ]
        self.limit = [-float(each) for each in self._grids()]
        room = np.empty_like(self.value[0])
        for low in range(len(downsets) - 2, -1, -1):
            target = self.value[low]
            for high in self.costs.above(low):
                after = self.value[high]
                if np.isinf(after[-1, -1]):
                    continue
                for degree, count, cost in self._choices(low, high):
                    used = degree * count
                    # More devices than that have no use for so slow a stage; they hold no more replicas than devices.
                    stop = self._useful(cost[count])
                    rows, columns = stop - used, min(len(cost), stop) - count
                    if rows <= 0:
                        continue
                    space = room[:rows, :columns]
                    np.maximum(after[:rows, :columns], cost[count : count + columns], out=space)
                    region = target[used:stop, count : count + columns]
                    np.minimum(region, space, out=region)
            # Where more devices or replicas are allowed than a choice needs, fewer are allowed too.
            np.minimum.accumulate(target, axis=1, out=target)
            np.minimum.accumulate(target, axis=0, out=target)

    def _grids(self) -> Floats:
        """Return what some plan on so many devices or fewer takes; infinite: none is found. No stage need be slower.

        Tried are all grids: stages of about equal time with the same replicas and the same degree.
        """
        found = np.full(self.devices + 1, np.inf)
        if self.costs.goal == "memory":
            return found
        rows = {int(members.sum()): place for place, members in enumerate(self.costs.downsets) if _is_prefix(members)}
        clock = np.cumsum(np.where(self.costs.missing, np.inf, self.costs.seconds).min(axis=0))
        for stages in range(1, min(len(clock), self.devices) + 1):
            ends = np.searchsorted(clock, np.arange(1, stages) * clock[-1] / stages, side="left") + 1
            bounds = [0, *(int(end) for end in ends), len(clock)]
            if len(set(bounds)) < len(bounds):
                continue
            spans = [(rows[start], rows[stop]) for start, stop in pairwise(bounds)]
            for degree, count in self.shapes:
                if stages * degree * count > self.devices:
                    continue
                took = max(self._grid(spans, degree, count))
                found[stages * degree * count] = min(found[stages * degree * count], took)
        # A hair more, so that rounding keeps what is just as good.
        return np.minimum.accumulate(found) * (1 + 1e-9)

    def _grid(self, spans: Sequence[tuple[int, int]], degree: int, count: int) -> Iterator[float]:
        for later, (low, high) in enumerate(reversed(spans), 1):
            parts = self.costs.stage(low, high, degree, self.most)
            if parts is None or later > len(parts[0]) or later * count > self.most:
                yield np.inf
            else:
                yield float(self._cost(parts[0][later - 1], parts[1], parts[2], count))

    def _useful(self, seconds: float) -> int:
        """Return the first number of devices that need no stage of ``seconds``."""
        return bisect_right(self.limit, -seconds)

    def _choices(self, low: int, high: int) -> list[tuple[int, int, Floats]]:
        """Return ``(degree, replicas, cost)`` of a stage; ``cost[s]`` for all ``s`` with which it fits."""
        found = []
        for degree, count in self.shapes:
            parts = self.costs.stage(low, high, degree, self.most)
            if parts is None:
                continue
            compute, crossing, parameters = parts
            if self._useful(float(self._cost(compute[0], crossing, parameters, count))) <= degree * count:
                continue
            fits = min(self.most, count * len(compute))
            per_flight = self._cost(compute, crossing, parameters, count)
            found.append((degree, count, np.concatenate([_NEVER, per_flight])[self.flight[count][: fits + 1]]))
        return found

    def _cost(self, compute: Any, crossing: float, parameters: float, count: int) -> Any:
        if self.costs.goal == "memory":
            return compute
        exchange = 4 * (count - 1) / count * parameters / self.microbatches
        return compute / count + (crossing / count + exchange) / self.bandwidth

    def best(self, devices: int) -> float:
        return float(self.value[0][min(devices, self.devices), -1])

    def stages(self, devices: int) -> tuple[Stage, ...] | None:
        """Return the stages behind ``best(devices)``: among equals, few devices, few replicas and long stages."""
        left, low = min(devices, self.devices), 0
        if np.isinf(self.best(left)):
            return None
        goal, replicas = self.best(left), self.most
        found = []
        while low < len(self.value) - 1:
            fitting = np.argwhere(self.value[low][: left + 1, : replicas + 1] <= goal)
            left, replicas = (int(each) for each in fitting[0])
            high, degree, count = self._behind(low, left, replicas, goal)
            found.append(self._stage(low, high, degree, count, replicas))
            low, left, replicas = high, left - degree * count, replicas - count
        return tuple(found)

    def _behind(self, low: int, left: int, replicas: int, goal: float) -> tuple[int, int, int]:
        for high in reversed(self.costs.above(low)):
            for degree, count, cost in self._choices(low, high):
                if degree * count > left or not count <= replicas < len(cost):
                    continue
                if max(cost[replicas], self.value[high][left - degree * count, replicas - count]) <= goal:
                    return high, degree, count
        raise AssertionError("the table holds a value that no stage gives")

    def _stage(self, low: int, high: int, degree: int, count: int, replicas: int) -> Stage:
        flight = -(-replicas // count)
        members, chosen, compute, memory = self.costs.chosen(low, high, degree, flight)
        crossing = self.costs.crossing(low, high, self.costs.degrees.index(degree))
        parameters = float(self.costs.parameters[self.costs.degrees.index(degree), members].sum())
        took = self._cost(compute, crossing, parameters, count)
        return Stage(
            tuple(int(each) for each in members),
            count,
            degree,
            tuple(int(each) for each in members[chosen]),
            float(took),
            memory,
        )


class _Costs:
    """What any stage costs: sums over the layers between two downsets of the model.

    Of the two ways to run a layer, keeping its activations and making them again, one is the faster. A stage runs all
    its layers the fast way where that fits, else the cheapest of them the slow way.
    """

    def __init__(self, model: Layers, memory: float, goal: str) -> None:
        self.memory, self.goal = memory, goal
        self.degrees = sorted({degree for layer in model.layers for degree in layer.variants})
        self.downsets = _downsets(model)
        self.both_ways = 2.0 if model.training else 1.0
        shape = (len(self.degrees), len(model.layers))
        self.seconds, self.parameters = np.full(shape, np.inf), np.zeros(shape)
        self.kept, self.held = np.zeros((2, *shape)), np.zeros((2, *shape))  # first index: fast, slow
        self.more, self.again = np.zeros(shape), np.zeros(shape, dtype=bool)
        for position, layer in enumerate(model.layers):
            for degree, each in layer.variants.items():
                at = self.degrees.index(degree), position
                ways = [(each.seconds, each.activation_bytes, each.fixed_bytes, False)]
                if each.recomputed is not None:
                    other = each.recomputed
                    ways.append((other.seconds, other.activation_bytes, other.fixed_bytes, True))
                ways.sort(key=lambda way: way[0])
                self.seconds[at], self.parameters[at] = ways[0][0], each.parameter_bytes
                self.again[at], self.more[at] = ways[0][3], ways[-1][0] - ways[0][0]
                for rank, way in enumerate((ways[0], ways[-1])):
                    self.kept[(rank, *at)], self.held[(rank, *at)] = way[1], way[2]
        self.missing = ~np.isfinite(self.seconds)
        self.seconds[self.missing] = 0.0
        summed = (
            self.missing,
            self.seconds,
            self.parameters,
            self.kept[0],
            self.held[0],
            self.kept.min(axis=0),
            self.held.min(axis=0),
        )
        # What each downset holds, shape (downsets, degrees, quantities): a stage's sums are differences.
        self.sums = np.stack([self.downsets.astype(float) @ each.T for each in summed], axis=2)
        made = [each.producer for each in model.crossings]
        self.made = self.downsets[:, made]
        self.read = np.array([self.downsets[:, each.consumers].sum(axis=1) for each in model.crossings]).T
        self.read = self.read.reshape(len(self.downsets), len(made))
        self.readers = np.array([len(each.consumers) for each in model.crossings], dtype=int)
        self.leaving = np.array(
            [[each.bytes + each.leaving.get(degree, 0.0) for each in model.crossings] for degree in self.degrees]
        )
        self.entering = np.array(
            [[each.bytes + each.entering.get(degree, 0.0) for each in model.crossings] for degree in self.degrees]
        )
        self._stages: dict[tuple[int, int, int], tuple[Floats, float, float] | None] = {}
        self._crossings: dict[tuple[int, int], Floats] = {}

    def above(self, low: int) -> list[int]:
        """Return the downsets that hold ``low`` and more, ascending."""
        holds = (self.downsets >= self.downsets[low]).all(axis=1)
        return [int(each) for each in np.flatnonzero(holds) if each != low]

    def stage(self, low: int, high: int, degree: int, most: int) -> tuple[Floats, float, float] | None:
        """Return compute by microbatches in flight (from 1, as long as it fits), crossing and parameter bytes."""
        key = low, high, degree
        if key not in self._stages:
            self._stages[key] = self._stage(low, high, degree, most)
        return self._stages[key]

    def _stage(self, low: int, high: int, degree: int, most: int) -> tuple[Floats, float, float] | None:
        at = self.degrees.index(degree)
        missing, compute, parameters, kept, held, least_kept, least_held = self.sums[high, at] - self.sums[low, at]
        if missing:
            return None
        crossing = self.crossing(low, high, at)
        free = 0 if self.goal == "memory" else _flights(self.memory, kept, held, most)
        end = _flights(self.memory, least_kept, least_held, most)
        if end <= free:
            return (np.full(free, compute), crossing, parameters) if free else None
        memory, saved, more = self._memory(low, high, at, np.arange(free + 1, end + 1))
        least = memory - np.maximum(saved, 0.0).sum(axis=0)
        if self.goal == "memory":
            return least, crossing, parameters
        fits = int((least <= self.memory).sum())
        if free + fits == 0:
            return None
        found = np.full(free + fits, compute)
        if fits:
            found[free:] += _cheapest(more, saved[:, :fits], memory[:fits] - self.memory, self.goal == "bound")[0]
        return found, crossing, parameters

    def _memory(self, low: int, high: int, at: int, flight: NDArray[np.int64]) -> tuple[Floats, Floats, Floats]:
        """Return the fast way's bytes by microbatches in flight, and what each layer's slow way saves and costs."""
        members = self.members(low, high)
        kept, held = self.kept[:, at, members], self.held[:, at, members]
        saved = (kept[0] - kept[1])[:, None] * flight + (held[0] - held[1])[:, None]
        return kept[0].sum() * flight + held[0].sum(), saved, self.more[at, members]

    def members(self, low: int, high: int) -> NDArray[np.int64]:
        """Return the layers of a stage."""
        return np.flatnonzero(self.downsets[high] & ~self.downsets[low])

    def crossing(self, low: int, high: int, at: int) -> float:
        """Return the bytes that enter and leave a stage, both ways in training, at the degree of index ``at``."""
        if (low, high) not in self._crossings:
            leave = self.made[high] & ~self.made[low] & (self.read[high] < self.readers)
            enter = self.made[low] & (self.read[high] > self.read[low])
            self._crossings[low, high] = self.both_ways * (self.leaving @ leave + self.entering @ enter)
        return float(self._crossings[low, high][at])

    def chosen(self, low: int, high: int, degree: int, flight: int) -> tuple[NDArray[np.int64], Flags, float, float]:
        """Return the stage's layers, which of them are recomputed, its seconds and its bytes."""
        members, at = self.members(low, high), self.degrees.index(degree)
        memory, saved, more = self._memory(low, high, at, np.array([flight]))
        slow = np.zeros(len(members), dtype=bool)
        if memory[0] > self.memory:
            _, order, last, cheapest = _cheapest(more, saved, memory - self.memory, False)
            slow[order[: last[0], 0]] = True
            slow[order[cheapest[0], 0]] = True
        compute = float(self.seconds[at, members].sum() + more[slow].sum())
        return members, self.again[at, members] ^ slow, compute, float(memory[0] - saved[slow, 0].sum())


def _flights(memory: float, kept: float, held: float, most: int) -> int:
    """Return how many microbatches in flight fit, at most ``most``."""
    if held > memory:
        return 0
    return most if held + kept * most <= memory else int((memory - held) / kept)


def _cheapest(
    more: Floats, saved: Floats, need: Floats, relax: bool
) -> tuple[Floats, NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Return the least extra seconds that save ``need`` bytes, a knapsack, and which layers pay them.

    Args:
        more: Extra seconds of each layer, shape ``(layers,)``.
        saved: Bytes it saves in each case, shape ``(layers, cases)``; all together save enough.
        need: Bytes to save in each case, above 0, shape ``(cases,)``.
        relax: Return a lower bound: a fraction of the last layer (Dantzig 1957) or, where that is more, as many of the
            cheapest layers as the best savers must be.

    Returns:
        Seconds; layers from the best saver per second on, shape ``(layers, cases)``; how many of these to take; and the
        place in that order of one more.
    """
    useful = saved > 0
    rate = np.where(useful, more[:, None] / np.where(useful, saved, 1.0), np.inf)
    order = np.argsort(rate, axis=0, kind="stable")
    cases = np.arange(len(need))
    saved, more = np.where(useful, saved, 0.0)[order, cases], more[order]
    got = np.cumsum(saved, axis=0)
    last = np.minimum((got < need).sum(axis=0), len(saved) - 1)
    before = np.cumsum(more, axis=0)[last, cases] - more[last, cases]
    missing = need - (got[last, cases] - saved[last, cases])
    if relax:
        part = before + np.minimum(missing / saved[last, cases], 1.0) * more[last, cases]
        # So many layers must pay at least, and no so many layers pay less.
        count = np.minimum((np.cumsum(-np.sort(-saved, axis=0), axis=0) < need).sum(axis=0), len(saved) - 1)
        cheap = np.cumsum(np.sort(np.where(saved > 0, more, np.inf), axis=0), axis=0)
        return np.maximum(part, cheap[count, cases]), order, last, last
    # The last layer need not be the next in order: the cheapest that saves what is missing will do.
    enough = (np.arange(len(saved))[:, None] >= last) & (saved >= missing)
    cheapest = np.argmin(np.where(enough, more, np.inf), axis=0)
    return before + more[cheapest, cases], order, last, cheapest


def _is_prefix(members: Flags) -> bool:
    return bool(members[: int(members.sum())].all())


def _downsets(model: Layers) -> Flags:
    """Return the sets of layers that can be done before all others, by size, shape ``(sets, layers)``.

    Where there are more than a few per layer, only those of the given order.
    """
    count = len(model.layers)
    needs = [0] * count
    for each in model.crossings:
        for consumer in each.consumers:
            needs[consumer] |= 1 << each.producer
    prefixes = {(1 << size) - 1 for size in range(count + 1)}
    known, edge = {0}, [0]
    while edge and len(known) <= 2 * count + 16:
        grown = {each | 1 << node for each in edge for node in range(count) if needs[node] & ~each == 0} - known
        known |= grown
        edge = list(grown)
    if edge:
        known = prefixes
    ordered = sorted(known, key=lambda each: (each.bit_count(), each))
    return np.array([[each >> node & 1 for node in range(count)] for each in ordered], dtype=bool)
