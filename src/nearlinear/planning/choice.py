"""Turning work and a cluster into the ways of training, the fastest of them, and what would change the choice."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from nearlinear.core.cluster import Cluster
from nearlinear.errors import InputError
from nearlinear.planning.exchange import Network, links, scaled
from nearlinear.planning.pipelines import Pipelines
from nearlinear.planning.strategies import predict, with_band
from nearlinear.planning.ways import Candidate, Way, Work
from nearlinear.units import bandwidth, seconds, size

LEVEL = 1.02
"""Step times closer than this are level: no forecast of ours tells them apart."""

SURE = 1.3
"""A run is not asked to train in a less simple way that the forecast finds less than this much faster: the worst of our
forecasts of the runtime were off by as much."""

SIMPLEST = ("data", "sharded", "pipeline", "local")

_FARTHEST = 1024.0


@dataclass(frozen=True, slots=True)
class Choice:
    """The way that was chosen, the one that came next, and what would change that.

    Args:
        winner: The fastest that fits, or the one that needs least memory where none does.
        runner_up: The fastest of another kind; ``None`` where there is none.
        reasons: Sentences: why it won, and what would have to change for the runner-up.
    """

    winner: Candidate
    runner_up: Candidate | None
    reasons: tuple[str, ...]

    def __str__(self) -> str:
        return "\n".join([f"{self.winner.way}: {seconds(self.winner.seconds)} a step", *self.reasons])


class Planner:
    """The ways of training ``work`` on the first devices of ``cluster``; searches for stages once for all numbers.

    Args:
        work: What is trained.
        cluster: On what.
        strategies: Which to consider; ``"local"`` changes the numbers and is only considered when named.
        optimize: ``"speed"``, or ``"memory"``: what needs least on the fullest device comes first.
        variants: Whether a pipeline may have several copies, or make its activations again.
    """

    def __init__(
        self,
        work: Work,
        cluster: Cluster,
        strategies: Sequence[str] = ("data", "sharded", "pipeline"),
        optimize: str = "speed",
        *,
        variants: bool = True,
    ) -> None:
        unknown = [each for each in strategies if each not in ("data", "sharded", "pipeline", "local")]
        if unknown or not strategies:
            raise InputError(f"unknown strategies {unknown}; choose among data, sharded, pipeline and local")
        self.work, self.cluster, self.strategies = work, cluster, tuple(strategies)
        self._optimize = optimize
        self._pipelines = Pipelines(work, cluster, variants=variants)
        self._all: dict[int, list[Candidate]] = {}
        self._ranked: dict[int, list[Candidate]] = {}

    def rank(self, devices: int) -> list[Candidate]:
        """Return the best of each kind: what fits first, the fastest first, and first of all the simplest of those.

        Ways that differ by less than ``LEVEL`` are level, for no forecast tells them apart; of level ways the simplest
        comes first.

        Raises:
            InputError: ``devices`` is below 1 or above the number of devices.
        """
        if devices not in self._ranked:
            self._ranked[devices] = self._rank(self._found(devices), devices)
        return self._ranked[devices]

    def runnable(self, devices: int) -> list[Candidate]:
        """Return the best of each strategy that ``distribute`` can be asked for (``Way.plan``), in a similar order.

        First comes the simplest that is not slower than the fastest by more than ``SURE``.

        Raises:
            InputError: As of ``rank``.
        """
        best: dict[str, Candidate] = {}
        runnable = [each for each in self._found(devices) if each.way.plan() is not None]
        for each in self._rank(runnable, devices, SURE):
            best.setdefault(each.way.strategy, each)
        return list(best.values())

    def _found(self, devices: int) -> list[Candidate]:
        """Return all candidates."""
        if devices not in self._all:
            network = Network(self.cluster.first(devices))
            found = self._plain(devices, network)
            if devices > 1 and "pipeline" in self.strategies:
                found += [predict(way, self.work, network) for way in self._pipelines.ways(devices)]
            self._all[devices] = found
        return self._all[devices]

    def _rank(self, found: Sequence[Candidate], devices: int, level: float = LEVEL) -> list[Candidate]:
        best: dict[tuple[str, int, bool], Candidate] = {}
        for each in sorted(found, key=_order):
            best.setdefault((each.way.strategy, len(each.way.groups), each.way.along), each)
        cluster = self.cluster.first(devices)
        return [with_band(each, self.work, cluster) for each in self._sorted(best.values(), level)]

    def _sorted(self, found: Iterable[Candidate], level: float = LEVEL) -> list[Candidate]:
        """Return the candidates, the one to choose first."""
        if self._optimize == "memory":
            return sorted(found, key=lambda each: (not each.fits, each.memory, each.seconds))
        ranked = sorted(found, key=_order)
        alike = [each for each in ranked if each.fits and each.seconds <= level * ranked[0].seconds]
        if alike:
            simplest = min(alike, key=lambda each: (SIMPLEST.index(each.way.strategy), each.seconds))
            ranked.remove(simplest)
            ranked.insert(0, simplest)
        return ranked

    def _plain(self, devices: int, network: Network) -> list[Candidate]:
        """Return what strategies without stages bring, in as few microbatches as fit."""
        if self.work.samples(devices) < devices:
            return []
        share = math.ceil(self.work.samples(devices) / devices)
        found = []
        for strategy in ("data",) if devices == 1 else self.strategies:
            if strategy == "pipeline":
                continue
            for power in range(share.bit_length()):
                candidate = predict(Way(strategy, devices, microbatches=2**power), self.work, network)
                if candidate.fits:
                    break
            found.append(candidate)
        return found

    def choose(self, devices: int, deadline: Callable[[], bool] | None = None) -> Choice:
        """Return the best way for ``devices`` devices, and why.

        Args:
            devices: The first of the cluster.
            deadline: Whether to stop searching: given, the stages of a pipeline are searched for operator by operator
                too (``planning.partition``), which may take half a minute; else among blocks of operators alone.

        Raises:
            InputError: There is no way: the batch has fewer samples than there are devices, and no stage can be formed.
        """
        ranked = self.rank(devices)
        if not ranked:
            raise InputError(
                f"{self.work.graph.name}: {self.work.samples(devices)} samples a step cannot be shared by {devices} "
                f"devices under {', '.join(self.strategies)}; use at most {self.work.samples(devices)} devices"
            )
        if deadline is not None:
            ranked = self._refined(ranked, deadline)
        winner = ranked[0]
        others = [each for each in ranked[1:] if _kind(each) != _kind(winner) and each.fits]
        runner_up = others[0] if others else None
        return Choice(winner, runner_up, tuple(self._reasons(winner, runner_up, ranked)))

    def _refined(self, ranked: Sequence[Candidate], deadline: Callable[[], bool]) -> list[Candidate]:
        """Return ``ranked`` with a better cut for the best pipeline, where there is one."""
        found = list(ranked)
        for place, each in enumerate(found):
            if each.way.groups:
                way = self._pipelines.refined(each.way, deadline)
                if way is not None:
                    better = with_band(predict(way, self.work, self.cluster), self.work, self.cluster)
                    found[place] = min(each, better, key=_order)
                break
        return self._sorted(found)

    def _reasons(self, winner: Candidate, runner_up: Candidate | None, ranked: Sequence[Candidate]) -> list[str]:
        lines = [f"{winner.way} takes {seconds(winner.seconds)} a step: {_parts(winner)}"]
        if not winner.fits:
            lines.append(f"nothing fits: this needs the least memory, {size(winner.memory)} on the fullest device")
        blocked = [each for each in ranked if not each.fits and each.seconds < winner.seconds and winner.fits]
        if blocked:
            lines.append(
                f"{blocked[0].way} would take {seconds(blocked[0].seconds)} and needs {size(blocked[0].memory)} "
                "on a device"
            )
        if runner_up is None:
            return lines
        more = runner_up.seconds / winner.seconds - 1
        pace = f"{100 * abs(more):.0f} % {'slower' if more >= 0 else 'faster'}" if abs(more) >= 0.005 else "as fast"
        lines.append(f"next comes {runner_up.way}, {pace}: {_parts(runner_up)}")
        lines.append(self._turn(winner, runner_up))
        return lines

    def _turn(self, winner: Candidate, runner_up: Candidate) -> str:
        """Return the sentence on the link speed and the batch at which the runner-up would win."""

        cluster = self.cluster.first(winner.way.devices)

        simpler = SIMPLEST.index(winner.way.strategy) < SIMPLEST.index(runner_up.way.strategy)
        level = 1 / LEVEL if simpler else LEVEL

        def ahead(work: Work, cluster: Cluster) -> bool:
            first, second = predict(winner.way, work, cluster), predict(runner_up.way, work, cluster)
            return second.seconds < level * first.seconds and (second.fits or not first.fits)

        pace = min(links(cluster), key=lambda link: link.bandwidth, default=None)
        found = []
        if pace is not None:
            for way, word in ((1.0, "faster"), (-1.0, "slower")):

                def quicker(factor: float, way: float = way) -> bool:
                    return ahead(self.work, scaled(cluster, factor**way))

                factor = _turning(quicker)
                if factor is not None:
                    speed = bandwidth(pace.bandwidth * factor**way)
                    found.append(f"over links {factor:.3g} times {word} ({speed} for the slowest)")
        for way, word in ((1.0, "more"), (-1.0, "fewer")):

            def larger(factor: float, way: float = way) -> bool:
                batch = max(round(self.work.batch * factor**way), 1)
                return ahead(dataclasses.replace(self.work, batch=batch), cluster)

            factor = _turning(larger)
            if factor is not None:
                batch = max(round(self.work.batch * factor**way), 1)
                found.append(f"with {word} samples a step ({batch} for {self.work.batch})")
        if not found:
            return f"no link {_FARTHEST:.0f} times faster or slower, and no such batch, would make {runner_up.way} win"
        return f"{runner_up.way} would win {' or '.join(found)}"


def _kind(candidate: Candidate) -> tuple[str, bool]:
    return candidate.way.strategy, len(candidate.way.groups) > 0 and candidate.way.copies > 1


def _order(candidate: Candidate) -> tuple[bool, float, float, int, float]:
    # Among ways that do not fit, the one that needs least; among equals, the one with fewer pieces or less need.
    need = 0.0 if candidate.fits else candidate.memory
    return not candidate.fits, need, candidate.seconds, candidate.way.microbatches, candidate.memory


def _parts(candidate: Candidate) -> str:
    named = {
        "computing": candidate.compute,
        "on the network": candidate.exposed,
        "waiting for other stages": candidate.bubble,
        "updating": candidate.update,
    }
    said = [f"{seconds(each)} {name}" for name, each in named.items() if each > 0.001 * candidate.seconds]
    return ", ".join(said) or "nothing to do"


def _turning(ahead: Callable[[float], bool]) -> float | None:
    """Return the smallest factor from 1 on at which ``ahead`` turns true, to 1 %; ``None`` up to ``_FARTHEST``."""
    grid = [2.0**power for power in range(1, int(math.log2(_FARTHEST)) + 1)]
    above = next((factor for factor in grid if ahead(factor)), None)
    if above is None:
        return None
    below = above / 2
    while above / below > 1.01:
        middle = math.sqrt(above * below)
        below, above = (below, middle) if ahead(middle) else (middle, above)
    return above
