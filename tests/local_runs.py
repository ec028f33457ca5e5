"""What tests of the rounds share: a run with its centre, and members that learn numbers in place of a model."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from nearlinear.runtime.local.centre import Centre
from nearlinear.runtime.local.codecs import Floats
from nearlinear.runtime.local.member import Member, News, Update
from nearlinear.runtime.local.ticket import Ticket, new_key
from nearlinear.runtime.local.update import Sizes

SIZES = Sizes(1000, 8)
PATIENCE_S = 20.0


class Run:
    """A centre and what it said."""

    def __init__(self, **options: Any) -> None:
        self.key, self.said = new_key(), list[str]()
        options = {"beat_s": 0.1, "silence_s": 2.0, "patience_s": 1.0, **options}
        self.centre = Centre.listen("127.0.0.1", 0, self.key, say=self.said.append, **options)
        self.ticket = Ticket("127.0.0.1", self.centre.port, self.key)
        self.trainers: list[Trainer] = []

    def join(self, **options: Any) -> Trainer:
        self.trainers.append(Trainer(self.ticket, **options))
        return self.trainers[-1]


@contextlib.contextmanager
def starting(kind: Callable[..., Any]) -> Iterator[Callable[..., Any]]:
    """Give what starts runs of a kind; all of them end with the block."""
    runs: list[Any] = []

    def start(**options: Any) -> Any:
        runs.append(kind(**options))
        return runs[-1]

    yield start
    for run in runs:
        for trainer in run.trainers:
            trainer.member.leave()
        run.centre.stop()


class Trainer:
    """What a front end does, in NumPy: parameters are the outer ones plus what was learnt and not counted."""

    def __init__(self, ticket: Ticket, start: float = 0.0, sizes: Sizes = SIZES, **options: Any) -> None:
        self.said: list[str] = []
        options = {"beat_s": 0.1, "silence_s": 2.0, "deadline_s": 10.0, "layout": "x", "codec": "int8", **options}
        self.member = Member.join(
            ticket,
            "host",
            sizes,
            initial=lambda: np.full(sizes.total, start, np.float32),
            say=self.said.append,
            **options,
        )
        self.news: News = self.member.news()
        self.values = self.news.outer.copy()
        self.base = self.values
        self.under_way: Floats | None = None
        self.learnt = np.zeros(sizes.total)  # all that was ever learnt here

    def learn(self, by: float | Floats) -> None:
        self.values = (self.values + np.float32(by)).astype(np.float32)
        self.learnt += by

    def deliver(self, samples: float = 1.0) -> None:
        self.under_way = self.values.copy()
        self.member.deliver(Update(self.news, self.base - self.values, samples, 1, 0.1))

    def hear(self, timeout_s: float = PATIENCE_S) -> News:
        news = self.member.news(timeout_s)
        anchor = self.under_way if self.under_way is not None and news.counted else self.base
        learnt = self.values - anchor
        self.news, self.under_way, self.base = news, None, news.outer
        self.values = news.outer + learnt
        return news


def until(what: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE_S
    while not what():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.01)


def outer_hash(run: Run) -> str:
    assert run.centre._outer is not None
    return run.centre._outer.hash


def cut(trainer: Trainer) -> None:
    """Break the connection, as a lost link does."""
    connection = trainer.member._connection
    if connection is not None:
        with contextlib.suppress(OSError):  # it is broken already
            # Not SSLSocket's own: that would leave a plain socket to the thread that reads.
            socket.socket.shutdown(connection.sock, socket.SHUT_RDWR)


def die(trainer: Trainer) -> None:
    """Break the connection as a killed process does, and never call again."""
    trainer.member._deadline_s = 0.0
    trainer.member._ticket = Ticket("127.0.0.1", 1, new_key())
    cut(trainer)


def together(*trainers: Trainer) -> list[News]:
    """One round in which all these deliver."""
    for trainer in trainers:
        trainer.deliver()
    return [trainer.hear() for trainer in trainers]


class Ledger(Trainer):
    """A trainer that keeps account of what it has learnt: all of it must have counted once, or be here still."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.counted = np.zeros(SIZES.total)

    def hear(self, timeout_s: float = PATIENCE_S) -> News:
        under_way, base = self.under_way, self.base
        news = super().hear(timeout_s)
        if news.counted and under_way is not None:
            self.counted += (under_way - base).astype(np.float64)
        return news
