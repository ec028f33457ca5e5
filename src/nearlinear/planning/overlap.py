"""Turning buckets that fill up during a backward pass into the seconds until the last of them is exchanged."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from nearlinear.core.cluster import Exchange

AT_ONCE = 2  # operations that a process group of torch's gloo carries out at once


@dataclass(frozen=True, slots=True)
class Message:
    """A bucket of gradients.

    Args:
        bytes: Its size.
        ready: When it is full, in seconds of the backward pass alone.
        copied: Bytes that are copied into it; all of them where it is ``None``.
    """

    bytes: float
    ready: float
    copied: float | None = None


def in_turn(when: NDArray[np.float64], takes: float) -> float:
    """Return when the last of equal messages is through that travel one at a time beside the computing.

    Message ``i`` leaves once it is full and message ``i - 1`` has gone: the last ends at the largest, over ``i``, of
    ``when[i]`` and the messages from ``i`` on.

    Args:
        when: Seconds at which each is full, ascending.
        takes: Seconds of each.
    """
    return float((when + takes * np.arange(len(when), 0, -1)).max())


def beside(
    backward: float, messages: Sequence[Message], all_reduce: Exchange, slow: float = 1.0, copy: float = 0.0
) -> float:
    """Return when the pass and all messages are through, where computing and messages hold each other up as measured.

    Messages travel as soon as they are full, ``AT_ONCE`` at a time: latency first, then bytes; the bytes of two share
    the link, their latencies do not. While the pass goes on a message takes longer, and the pass gets on more slowly.

    Args:
        backward: Seconds of the pass alone.
        messages: In the order in which they become full.
        all_reduce: As measured.
        slow: How many times longer the pass takes because other devices of the machine work.
        copy: Seconds per byte of copying gradients into a bucket, for which the pass waits.
    """
    now = done = 0.0  # seconds, and seconds of the pass alone that are done
    waiting, flying = list(messages), list[_Flight]()
    while waiting or flying or done < backward:
        while waiting and waiting[0].ready <= done + 1e-12 and len(flying) < AT_ONCE:
            flying.append(_Flight.of(waiting.pop(0), all_reduce))
        computing = done < backward
        speed = min((each.left for each in flying), default=1.0) / slow
        moving = sum(each.latency <= 0 for each in flying)
        paces = [(1.0 if each.latency > 0 else 1.0 / moving) / (each.longer if computing else 1.0) for each in flying]
        # Until the next thing happens: a latency or the bytes of a message end, a bucket is full, the pass ends.
        steps = [each.next / pace for each, pace in zip(flying, paces, strict=True)]
        if computing:
            full = [message.ready - done for message in waiting if message.ready > done + 1e-12]
            steps.append(min([backward - done, *full]) / speed)
        step = max(min(steps), 1e-9)
        now += step
        if computing:
            before, done = done, min(backward, done + step * speed)
            copied = (
                each.bytes if each.copied is None else each.copied
                for each in messages
                if before < each.ready <= done + 1e-12
            )
            now += copy / (speed * slow) * sum(copied)
        for each, pace in zip(flying, paces, strict=True):
            each.go_on(step * pace)
        flying = [each for each in flying if each.latency > 1e-9 or each.rest > 1e-9]
    return now


@dataclass(slots=True)
class _Flight:
    """A message under way: seconds of latency and bytes to go, and what it and the computing do to each other."""

    latency: float
    rest: float
    longer: float
    left: float

    @classmethod
    def of(cls, message: Message, all_reduce: Exchange) -> _Flight:
        return cls(*all_reduce.split(message.bytes), *all_reduce.beside_computing(message.bytes))

    @property
    def next(self) -> float:
        return self.latency if self.latency > 0 else self.rest

    def go_on(self, seconds: float) -> None:
        if self.latency > 0:
            self.latency -= seconds
        else:
            self.rest -= seconds
