"""Training apart from the others for many steps, and together with them at the end of every round.

    steps of round 7        round 8                                  round 9
    ...──────────────┤ capture: what was learnt goes its way ...
                     ├──────────────────┤ news: the outer parameters with everybody's round 7
                       learnt meanwhile                              put on top of them; it belongs to round 8

A member's parameters are always the outer ones plus what it has learnt and nobody counted yet. So whatever happens to
a round (this member was late, cut off, stopped), news moves the ground and leaves what was learnt on it.

Every member works on its share of every batch, as in strategy ``data``: the batch size, the number of steps and the
learning rate's schedule are those of the script, and with one step per round and SGD so are the numbers.

No framework is known here: parameters and buffers are one vector that a front end gives and takes.

Source: S. U. Stich, "Local SGD Converges Fast and Communicates Little", 2018, arXiv 1805.09767; A. Douillard et al.,
"DiLoCo", 2023, arXiv 2311.08105; exchange beside the next steps: "Streaming DiLoCo", 2025, arXiv 2501.18512.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import json
import os
import queue
import socket
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np

from nearlinear import events
from nearlinear.core.plan import Plan
from nearlinear.errors import InputError, NearlinearError, PeerLostError
from nearlinear.runtime.ending import failed
from nearlinear.runtime.environment import deadline_s, silence_s, world_from
from nearlinear.runtime.local.codecs import Floats
from nearlinear.runtime.local.member import Member, News, Update
from nearlinear.runtime.local.ticket import Ticket
from nearlinear.runtime.local.update import Sizes
from nearlinear.units import seconds

ATTEMPTS = 5  # rounds in which a member that must be counted tries to be
REPORT_S = 0.2
REPORTS = 101  # of a member that is alone, of which the median is its speed

Place = list[tuple[int, int]]


def ticket() -> Ticket | None:
    """Return the ticket that ``nearlinear run --listen`` or ``nearlinear join`` gave this process, if one did."""
    text = os.environ.get("NEARLINEAR_TICKET")
    return None if text is None else Ticket.parse(text)


def apart(plan: Plan) -> bool:
    """Return whether this process trains apart from others, as a member of a run over the Internet.

    Raises:
        InputError: It cannot as it was started.
    """
    if plan.strategy != "local":
        return False
    size = world_from().size
    if size > 1 and ticket() is None:
        raise InputError(
            f"strategy 'local' trains machines that are far apart, and these are {size} processes of one run; start "
            f"them with `nearlinear run --listen HOST:PORT -n {size} script.py`, and on the other machines `nearlinear "
            "join TICKET script.py`"
        )
    return ticket() is not None  # else the only one of its run, which is the plain script


@dataclass(frozen=True, slots=True)
class Trained:
    """What an island trains, as its front end gives and takes it.

    Args:
        shapes: Name and shape of every tensor, parameters first.
        parameters: How many of them are parameters; the rest are buffers.
        read: Returns all of them end to end, as float32.
        write: Puts such a vector in their place.
        place: Returns pass and batch of every loader.
        rates: Returns the learning rates of every group of the optimizer, by its own schedule.
    """

    shapes: Sequence[tuple[str, Sequence[int]]]
    parameters: int
    read: Callable[[], Floats]
    write: Callable[[Floats], None]
    place: Callable[[], Place]
    rates: Callable[[], list[float]]

    @property
    def sizes(self) -> Sizes:
        """How many values that are."""
        counts = [int(np.prod(shape, dtype=np.int64)) for _, shape in self.shapes]
        return Sizes(sum(counts[: self.parameters]), sum(counts[self.parameters :]))

    @property
    def layout(self) -> str:
        """A digest of names and shapes."""
        shapes = [[name, list(shape)] for name, shape in self.shapes]
        return hashlib.blake2b(json.dumps(shapes).encode(), digest_size=16).hexdigest()


@dataclass(slots=True)
class Tally:
    """What was done since the last capture.

    Args:
        samples: What it counts for in the mean.
        steps: Optimizer steps.
        seconds: Their time, waiting left out.
    """

    samples: float = 0.0
    steps: int = 0
    seconds: float = 0.0

    def __add__(self, other: Tally) -> Tally:
        return Tally(self.samples + other.samples, self.steps + other.steps, self.seconds + other.seconds)


@dataclass(slots=True)
class _UnderWay:
    after: News
    values: Floats  # the parameters at the capture
    tally: Tally


@dataclass(slots=True)
class _Report:
    """What was done since the launcher was last told.

    Args:
        fewest: Members that were here meanwhile, at the least.
        most: And at the most.
        samples: Of whole batches, so of all members together.
        waited: Seconds.
        since: When it begins.
    """

    fewest: int
    most: int
    samples: float = 0.0
    waited: float = 0.0
    since: float = field(default_factory=time.perf_counter)


class Island:
    """An island's part in a run over the Internet; ``enter`` makes one, in one process of the island.

    Attributes:
        number: Which member of the run it is.
        behind: Steps of the run that it was not there for.
    """

    @classmethod
    def enter(cls, trained: Trained, plan: Plan) -> Self:
        """Join the run that the ticket names, and take over its outer parameters.

        Args:
            trained: What this process trains; the run's first member gives its values to the others.
            plan: How, if this is the first.

        Raises:
            InputError: The run refuses this member: it trains something else, or the key is another's.
            PeerLostError: The run does not answer.
        """
        word = ticket()
        assert word is not None
        member = Member.join(
            word,
            socket.gethostname(),
            trained.sizes,
            trained.layout,
            trained.read,
            codec=plan.compress or "int8",
            every=plan.every or 0,
            say=say,
            deadline_s=deadline_s(),
            silence_s=silence_s(),
            identity=os.environ.get("NEARLINEAR_IDENTITY"),
        )
        island = cls(member, trained)
        say(f"member {member.number} of the run at {word.host}:{word.port}, round {island._news.round}")
        atexit.register(island.close)
        return island

    def __init__(self, member: Member, trained: Trained) -> None:
        self.number = member.number
        self._member: Member | None = member
        self._trained = trained
        self._news = member.news(deadline_s())
        self.behind = self._news.at
        self._under_way: _UnderWay | None = None
        self._steps = 0
        self._questions = 0
        self._begun = False
        self._work = 0.0  # seconds of the processor in this thread since the last update, that were no steps
        self._marks = 0.0, 0.0  # what the process and the member's thread had taken then
        self._report = self._new_report()
        # Samples per second of the latest reports, where no other member was here and where others were.
        self._alone, self._together = deque[float](maxlen=REPORTS), deque[float](maxlen=REPORTS)
        self._told = False
        self._begin_steps()
        trained.write(self._news.outer)
        self._base = trained.read()  # what the parameters would be without what was learnt and not counted

    def agree(self, value: Any, what: str) -> Any:
        """Return what the run's first member had here; its members ask the same questions in the same order.

        Args:
            value: What this one has: JSON.
            what: In a word, for messages.
        """
        assert self._member is not None
        self._questions += 1
        return self._member.agree(f"{self._questions} {what}", value)

    def agree_now(self, name: str, value: Any) -> Any:
        """Return what the oldest member of those that asked so far under this name has; it is not known for long."""
        assert self._member is not None
        return self._member.agree(name, value, lasts=False)

    def begin(self) -> None:
        """Note that all is agreed, and that steps follow."""
        self._begun, self._marks = True, self._clocks()
        self._began = time.perf_counter()
        self._report = self._new_report()

    # ---- this member's part of the data

    @property
    def share(self) -> tuple[float, float]:
        """Where this member's part of every batch begins and ends, as fractions."""
        return self._share

    @property
    def places(self) -> Place:
        """The pass and batch to which the run has come, in every loader."""
        return self._news.place

    def place(self, loader: int) -> tuple[int, int]:
        """Return the pass and batch to which the run has come in a loader."""
        return self.places[loader] if loader < len(self.places) else (0, 0)

    def is_past(self, loader: int, number: int, batch: int | None = None) -> bool:
        """Return whether the run has left this pass of a loader behind, or this batch of it."""
        past = lies_behind(self.place(loader), number, batch)
        if past:
            self.leave_out()
        return past

    def leave_out(self) -> None:
        """Note that steps which the run has made are not made here any more."""
        self.behind = max(self.behind, self._news.at - self._steps)

    # ---- steps

    def rates(self, groups: int) -> list[float] | None:
        """Return the run's learning rates, where this member's own schedule, having missed steps, is behind."""
        truer = self.behind > self._news.behind and len(self._news.rates) == groups
        return self._news.rates if truer else None

    def stepped(self, weight: float, samples: float, steps: int = 1) -> None:
        """Count a step or several, and take part in the rounds.

        Args:
            weight: What this member's share counts for in the mean.
            samples: In the whole batch, or batches.
            steps: Of the optimizer.
        """
        assert self._member is not None
        self._steps += steps
        self._tally += Tally(weight, steps)
        self._report.samples += samples
        with contextlib.suppress(queue.Empty):
            while True:
                self._hear(self._member.news())
        called = self._member.called == self._news.round and self._under_way is None
        if self._tally.steps >= self._every or called:
            self._await_news("the exchange of a round")
            self._capture()
        if time.perf_counter() - self._report.since >= REPORT_S:
            self._tell()

    def settle(self, what: str) -> None:
        """Return when the parameters are the outer ones, with all that this member has learnt.

        Args:
            what: For what, in messages.
        """
        if self._member is None or not self._begun:
            return
        for _ in range(ATTEMPTS):
            self._await_news(what)
            if not self._tally.steps:
                return
            self._capture()
        say(f"{what}: the last {self._tally.steps} steps of this member reached no round; they are kept here")

    def _capture(self) -> None:
        """Begin to tell the others what was learnt since the last time."""
        assert self._member is not None
        began = time.thread_time()
        values = self._trained.read()
        change = self._base - values
        if not np.isfinite(change).all():
            broken = int(change.size - np.isfinite(change).sum())
            raise NearlinearError(
                f"after step {self._steps} {broken} of {change.size} parameters are not finite on this member; the "
                "others go on without it. Lower the learning rate, or clip gradients"
            )
        tally = self._tally
        tally.seconds += time.perf_counter() - self._began
        self._under_way = _UnderWay(self._news, values, tally)
        self._work += time.thread_time() - began
        spent, member = (now - then for now, then in zip(self._clocks(), self._marks, strict=True))
        work, self._work, self._marks = self._work + member, 0.0, self._clocks()
        update = Update(
            self._news,
            change,
            tally.samples,
            tally.steps,
            tally.seconds,
            work=work,
            step_work=max(0.0, spent - work) / max(tally.steps, 1),
            at=self._steps + self.behind,
            behind=self.behind,
            place=self._trained.place(),
            rates=self._trained.rates(),
        )
        self._member.deliver(update)
        self._begin_steps()

    def _clocks(self) -> tuple[float, float]:
        """Return the seconds of the processor that this process has taken, and the member's thread in it."""
        assert self._member is not None
        return time.process_time(), self._member.worked

    def _begin_steps(self) -> None:
        """Let the steps from here on be of the newest round that every member has heard of by its capture."""
        self._tally, self._began = Tally(), time.perf_counter()
        self._every, self._share = self._news.every, self._news.share

    def _await_news(self, what: str) -> None:
        """Return when nothing is under way."""
        assert self._member is not None
        while self._under_way is not None:
            # The centre waits for the slowest as long again as the first took, and then goes on without it.
            limit_s = deadline_s() + 2 * self._under_way.tally.seconds
            began = time.perf_counter()
            try:
                news = self._member.news(limit_s)
            except queue.Empty:
                raise PeerLostError(
                    f"round {self._news.round} was not over within {seconds(limit_s)}, in {what}, though its centre "
                    "answers; NEARLINEAR_DEADLINE='1 h' waits longer"
                ) from None
            waited = time.perf_counter() - began
            self._report.waited += waited
            self._began += waited
            self._hear(news)

    def _hear(self, news: News) -> None:
        """Put what was learnt and not counted on top of the new outer parameters."""
        began = time.thread_time()
        values, under_way = self._trained.read(), self._under_way
        anchor = under_way.values if under_way is not None and news.counted else self._base
        if under_way is not None and not news.counted:
            self._tally += under_way.tally
        self._news, self._under_way = news, None
        report = self._report
        report.fewest, report.most = min(report.fewest, news.members), max(report.most, news.members)
        learnt = values - anchor
        self._trained.write(news.outer + learnt)
        # What a narrower type rounds away is not taken for something learnt.
        self._base = self._trained.read() - learnt
        self._work += time.thread_time() - began

    # ---- telling

    def _new_report(self) -> _Report:
        return _Report(self._news.members, self._news.members)

    def _tell(self) -> None:
        """Tell the launcher how far and how fast the run is."""
        report, self._report = self._report, self._new_report()
        spent = self._report.since - report.since
        rate = report.samples / spent
        if not self._told:
            self._told = True  # the first steps take longer than any later ones
        elif report.most == 1:
            self._alone.append(rate)
        elif report.fewest > 1:
            self._together.append(rate)
        self._tell_standing()
        waiting = min(1.0, report.waited / spent)
        events.send_to_launcher("step", rank=0, model=0, step=self._steps, samples_per_s=rate, waiting=waiting)

    def _tell_standing(self) -> None:
        """Tell the launcher how this member stands among the others."""
        assert self._member is not None
        received, sent = self._member.traffic
        events.send_to_launcher(
            "apart",
            round=self._news.round,
            members=self._news.members,
            sent=sent,
            received=received,
            alone_samples_per_s=statistics.median(self._alone) if self._alone else None,
            together_samples_per_s=statistics.median(self._together) if self._together else None,
        )

    # ---- the end

    def close(self) -> None:
        """Bring in what is left, unless the script failed, and leave."""
        if self._member is None:
            return
        if self._report.samples:
            self._tell()
        if not failed():
            try:
                self.settle("the end of the script")
            except NearlinearError as error:
                say(str(error))
        self._tell_standing()
        self._member.leave()
        self._member = None


def lies_behind(there: tuple[int, int], number: int, batch: int | None = None) -> bool:
    """Return whether a pass, or a batch of it, lies behind the place to which a run has come.

    Example:
        >>> lies_behind((3, 5), 2), lies_behind((3, 5), 3), lies_behind((3, 5), 3, 4)
        (True, False, True)
    """
    return there[0] > number or (there[0] == number and batch is not None and batch < there[1])


def say(line: str) -> None:
    """Tell a person, on this member's screen."""
    events.publish("notice", message=line)
    print(f"nearlinear: {line}", file=sys.stderr, flush=True)
