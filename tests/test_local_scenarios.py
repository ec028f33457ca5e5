"""Whatever happens to the members and the centre, in any order: all end with the same bits, and what was learnt by one
that lives has counted exactly once."""

from __future__ import annotations

import contextlib
import queue
import random
import socket
from typing import Any

import numpy as np
import pytest

from local_runs import PATIENCE_S, SIZES, Ledger, Run, cut, die
from nearlinear.runtime.local.centre import Centre
from nearlinear.runtime.local.member import News

pytest.importorskip("cryptography")

MOST_MEMBERS = 4
EVENTS = {
    "learn": 6,
    "deliver": 6,
    "hear": 6,
    "a round": 3,
    "cut": 2,  # the connection breaks; it calls again
    "lose": 1,  # its link with another member breaks
    "silence": 1,  # it says nothing for longer than it may
    "death": 1,
    "join": 2,
    "centre": 1,  # the centre dies, and another takes its place
}
QUICK = {"beat_s": 0.05, "silence_s": 0.4, "patience_s": 0.2}


class Scenario:
    def __init__(self, seed: int, *, direct: bool) -> None:
        self.random = random.Random(seed)
        self.numbers = np.random.default_rng(seed)
        self.options: dict[str, Any] = {**QUICK, "direct": lambda *known: direct}
        self.run = Run(**self.options)
        self.alive: list[Ledger] = []
        self.told: list[str] = []
        for _ in range(3):
            self.join()

    def join(self) -> None:
        trainer = Ledger(self.run.ticket, codec="fp32", beat_s=0.05, silence_s=0.4, deadline_s=20.0)
        self.run.trainers.append(trainer)
        self.alive.append(trainer)

    def step(self) -> None:
        what = self.random.choices(list(EVENTS), list(EVENTS.values()))[0]
        one = self.random.choice(self.alive)
        self.told.append(f"{what} {self.alive.index(one)}")
        if what == "learn":
            one.learn(self.numbers.normal(size=SIZES.total).astype(np.float32))
        elif what == "deliver" and one.under_way is None:
            one.deliver(samples=self.random.choice([1.0, 2.0]))
        elif what == "hear":
            self.drain(one)
        elif what == "a round":
            self.settle(rounds=1)
        elif what == "cut":
            cut(one)
        elif what == "silence":
            one.member._beat_s = 1.0
        elif what == "lose":
            self.lose(one)
        elif what == "death" and len(self.alive) > 2:
            self.alive.remove(one)
            die(one)
        elif what == "join" and len(self.alive) < MOST_MEMBERS:
            self.join()
        elif what == "centre":
            port = self.run.centre.port
            self.run.centre.stop()
            self.run.centre = Centre.listen(
                "127.0.0.1", port, self.run.key, say=self.run.said.append, gather_s=1.5, **self.options
            )
        if what != "silence":
            one.member._beat_s = 0.05

    def lose(self, one: Ledger) -> None:
        direct = one.member._direct
        links = [] if direct is None else list(direct._peers._links.values())
        for stream in links[0].streams if links else []:
            with contextlib.suppress(OSError):
                socket.socket.shutdown(stream.connection.sock, socket.SHUT_RDWR)

    def drain(self, one: Ledger) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                one.hear(0.0)

    def settle(self, rounds: int) -> list[News]:
        """Let all deliver and hear, so many times."""
        news: list[News] = []
        for _ in range(rounds):
            for one in self.alive:
                self.drain(one)
                if one.under_way is None:
                    one.deliver()
            news = [one.hear(PATIENCE_S) for one in self.alive]
        return news

    def end(self) -> None:
        for one in self.alive:
            one.member._beat_s = 0.05
        for _ in range(20):
            news = self.settle(rounds=1)
            if all(each.counted and each.members == len(self.alive) for each in news) and all(
                (one.values == one.news.outer).all() for one in self.alive
            ):
                break
        # All are at the same round now, or one of them has one more to hear of.
        last = max(one.news.round for one in self.alive)
        for one in self.alive:
            while one.news.round < last:
                one.hear(PATIENCE_S)


MANY = [pytest.param(seed, marks=pytest.mark.full) for seed in range(8, 50)]


@pytest.mark.parametrize("direct", [False, True], ids=["star", "direct"])
@pytest.mark.parametrize("seed", [*range(8), *MANY])
def test_members_end_with_the_same_bits_and_nothing_learnt_is_lost_or_counted_twice(seed: int, direct: bool) -> None:
    scenario = Scenario(seed, direct=direct)
    try:
        for _ in range(30):
            scenario.step()
        scenario.end()
        told = (seed, scenario.told, scenario.run.said)
        first = scenario.alive[0]
        for one in scenario.alive:
            assert one.news.outer.tobytes() == first.news.outer.tobytes(), told
            # Everything was counted but what float32 rounds away in sums of some hundreds.
            still_here = one.values - one.news.outer
            np.testing.assert_allclose(one.counted + still_here, one.learnt, atol=1e-3, err_msg=str(told))
            np.testing.assert_allclose(still_here, 0, atol=1e-6, err_msg=str(told))
    finally:
        for trainer in scenario.run.trainers:
            trainer.member.leave()
        scenario.run.centre.stop()
