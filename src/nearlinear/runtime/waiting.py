"""Turning a wait for other ranks into an end: what was waited for, or an error that says who is missing.

A wait looks at the transport once a second and at liveness in between. So it ends in seconds when a peer died, is
patient with a peer that is alive and busy elsewhere, and in the end says where that peer was last seen.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Mapping

from nearlinear import events
from nearlinear.errors import InputError, NearlinearError, PeerLostError
from nearlinear.runtime.liveness import Liveness, Loss
from nearlinear.runtime.membership import Progress
from nearlinear.units import seconds

POLL_S = 1.0
OWN_CODE = "its own code"
_NOTICE_AFTER_S = 15.0

noticed = threading.Event()  # a wait has ended with the news that a peer is gone


class Waiting:
    """The patience of one process with its peers.

    Args:
        liveness: Who still answers.
        rank: This process's number.
        size: Number of processes.
        deadline_s: Seconds that a wait for a living peer may take.
        silence_s: Seconds within which liveness notices a peer that is gone.
        step: Returns the step the run is in, for messages.
    """

    def __init__(
        self,
        liveness: Liveness,
        rank: int,
        size: int,
        *,
        deadline_s: float,
        silence_s: float,
        step: Callable[[], int],
    ) -> None:
        self._liveness, self._rank, self._size = liveness, rank, size
        self._deadline_s, self._silence_s, self._step = deadline_s, silence_s, step

    def until(self, done: Callable[[float], bool], what: str) -> None:
        """Return when ``done(seconds)``, which looks for at most so long, is true.

        Args:
            done: Waits up to the given seconds; returns whether it is over.
            what: What is waited for, in words: peers and messages name it.

        Raises:
            PeerLostError: A peer died, stalled or was cut off, or the deadline passed.
            InputError: All ranks wait, but not for the same.
        """
        began, told = time.monotonic(), False
        patience, before = min(_NOTICE_AFTER_S, self._deadline_s / 4), dict[int, Progress]()
        self._liveness.where(self._step(), what)
        while not done(POLL_S):
            loss = self._liveness.lost()
            waited = time.monotonic() - began
            if loss is not None:
                raise lost(loss, what)
            if waited > self._deadline_s:
                rank, where = self._elsewhere(what)
                raise PeerLostError(
                    f"waited {seconds(waited)} in {what} for {where}; do all ranks call the same steps? "
                    "NEARLINEAR_DEADLINE='1 h' waits longer",
                    rank,
                )
            if waited > patience and not told:
                told = True
                before = self._liveness.progress()
                message = f"waiting in {what} for {self._elsewhere(what)[1]}, up to {seconds(self._deadline_s)}"
                events.publish("notice", message=message)
                print(f"nearlinear: {message}", file=sys.stderr, flush=True)
            if waited > 2 * patience and before:
                self._require_one_exchange(before)
                before = {}
        self._liveness.where(self._step(), OWN_CODE)

    def explain(self, error: Exception, what: str) -> NearlinearError:
        """Return who is missing after the transport failed."""
        return explain(error, what, self._liveness, self._silence_s)

    def _require_one_exchange(self, before: Mapping[int, Progress]) -> None:
        """Raise if all ranks have stood since ``before``, each in an exchange, but not in the same one."""
        now = self._liveness.progress()
        places = {rank: (place.step, place.at) for rank, place in now.items()}
        stood = places == {rank: (place.step, place.at) for rank, place in before.items()}
        exchanges = {at for _, at in places.values()}
        if not stood or len(places) < self._size or exchanges & {OWN_CODE, ""} or len(exchanges) == 1:
            return
        other = next(rank for rank, (_, at) in places.items() if at != places[0][1])
        raise InputError(
            f"{now[0]}, while {now[other]}: each waits for the other; every rank must make the same calls "
            "(guard what prints and writes with nl.is_main(), never what all ranks take part in, such as nl.save)"
        )

    def _elsewhere(self, what: str) -> tuple[int | None, str]:
        """Return the first rank that is not in this exchange, and a description of all such ranks."""
        away = [place for place in self._liveness.progress().values() if place.rank != self._rank and place.at != what]
        if not away:
            return None, "the other ranks, which are in it too"
        more = f" and {len(away) - 3} more" if len(away) > 3 else ""
        return away[0].rank, "; ".join(map(str, away[:3])) + more


def explain(error: Exception, what: str, liveness: Liveness, silence_s: float) -> NearlinearError:
    """Return who is missing after the transport failed; liveness may learn it a moment later."""
    until = time.monotonic() + silence_s + 2.0
    while time.monotonic() < until:
        loss = liveness.wait_lost(0.5)
        if loss is not None:
            return lost(loss, what)
        for place in liveness.progress(timeout_s=0.5).values():
            if place.left:
                return PeerLostError(f"{place}, while others wait for it in {what}", place.rank)
    first_line = str(error).strip().splitlines()[0]
    return NearlinearError(f"{what} failed although every rank still answers: {first_line}")


def lost(loss: Loss, what: str) -> PeerLostError:
    """Return the error for a peer that is gone; from here on its wait has ended by itself."""
    noticed.set()
    return PeerLostError(f"{loss}; it was missing in {what}", loss.rank)
