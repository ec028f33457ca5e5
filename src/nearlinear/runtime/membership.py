"""Turning beats, hang-ups and silences into who is lost: the decision alone, told the time and touching no socket."""

from __future__ import annotations

from dataclasses import dataclass, replace

from nearlinear.errors import InputError


@dataclass(frozen=True, slots=True)
class Loss:
    """The first rank of a run that stopped answering.

    Args:
        rank: Its number.
        host: Its machine's name.
        why: What was seen of it.
        silent_s: Seconds since it was last heard, 0 if it did not fall silent but hung up.

    Example:
        >>> print(Loss(2, "host-b", "its process ended"))
        rank 2 on host-b: its process ended
    """

    rank: int
    host: str
    why: str
    silent_s: float = 0.0

    def __str__(self) -> str:
        return f"rank {self.rank} on {self.host}: {self.why}"


@dataclass(frozen=True, slots=True)
class Progress:
    """Where a rank is, as far as is known.

    Args:
        rank: Its number.
        host: Its machine's name.
        step: The step it is in.
        at: What it does there, in its own words.
        age_s: Seconds since it was first heard to be there, good to one beat.
        left: It has said goodbye and will not come back.

    Example:
        >>> print(Progress(2, "host-b", 12, "gradient exchange", 31.2))
        rank 2 on host-b: gradient exchange, step 12, for 31 s
    """

    rank: int
    host: str
    step: int = 0
    at: str = ""
    age_s: float = 0.0
    left: bool = False

    def __str__(self) -> str:
        if self.left:
            return f"rank {self.rank} on {self.host}: left the run after step {self.step}"
        return f"rank {self.rank} on {self.host}: {self.at or 'started'}, step {self.step}, for {self.age_s:.0f} s"


class Membership:
    """What one rank knows of the others: whom it watches, where each is, and who was lost first.

    Rank 0 watches all that joined; every other rank watches rank 0. Time is whatever clock the caller reads to ``now``.

    Silence is counted in time that this process was awake. When it was itself stopped (a signal, a closed lid, a
    lock held for seconds), the others' beats may have had no one to hear them, or the others were stopped too:

        turns of the loop     |  |  |  |  |          stopped          |  |  |
        counts as silence      ──────────────                       ─  ─────      (1) at most one beat of it
        longer than the limit                                       0  ─────      (2) everyone begins anew

    Args:
        rank: This process's number.
        host: This machine's name.
        size: Number of processes.
        beat_s: Seconds between two beats, and the longest time between two calls of ``wake``.
        silence_s: Seconds without a beat after which a rank is lost.
        now: The time.

    Raises:
        InputError: The limit leaves no room for a late beat, or the rank is not one of ``size``.
    """

    def __init__(self, rank: int, host: str, size: int, *, beat_s: float, silence_s: float, now: float) -> None:
        if not 0 < 2 * beat_s <= silence_s:
            raise InputError(
                f"a rank that beats every {beat_s:g} s cannot be called silent after {silence_s:g} s; "
                "allow two beats at least"
            )
        if not 0 <= rank < size:
            raise InputError(f"there is no rank {rank} among {size}; ranks run from 0 to {size - 1}")
        self.rank, self.size = rank, size
        self.loss: Loss | None = None  # the first one; what follows from it (others giving up, exiting) is not news
        self._beat_s, self._silence_s = beat_s, silence_s
        self._woke, self._slept = now, 0.0
        self._heard: dict[int, float] = {}  # whom we watch, and when each was last heard, in awake time
        self._places = {rank: Progress(rank, host)}
        self._since = {rank: now}

    def wake(self, now: float) -> None:
        """Note that this process runs; to be called before and after every wait, with the time."""
        gap = now - self._woke
        self._woke = now
        self._slept += max(0.0, gap - self._beat_s)  # (1)
        if gap > self._silence_s:
            self._heard = dict.fromkeys(self._heard, now - self._slept)  # (2)

    def joined(self, rank: int, host: str, now: float) -> None:
        """Watch ``rank`` from now on.

        Raises:
            InputError: There is no such rank, or it has joined before.
        """
        if not 0 <= rank < self.size:
            raise InputError(f"there is no rank {rank} among {self.size}; ranks run from 0 to {self.size - 1}")
        if rank in self._places:
            raise InputError(
                f"rank {rank} is already in the run, on {self._places[rank].host}; give every process a RANK of its own"
            )
        self._places[rank], self._since[rank] = Progress(rank, host), now
        self.heard(rank, now, first=True)

    def heard(self, rank: int, now: float, *, first: bool = False) -> None:
        """Note a sign of life."""
        if first or rank in self._heard:
            self._heard[rank] = now - self._slept

    def moved(self, rank: int, step: int, at: str, now: float) -> None:
        """Note where a rank is, by its own word."""
        self._place(Progress(rank, self._places[rank].host, step, at), now)

    def placed(self, place: Progress, now: float) -> None:
        """Note where another rank is, by a row of rank 0's table."""
        if place.rank != self.rank:
            self._place(place, now)

    def _place(self, place: Progress, now: float) -> None:
        known, since = self._places.get(place.rank), now - place.age_s
        if known is not None and (known.step, known.at) == (place.step, place.at):
            since = min(since, self._since[place.rank])
        self._places[place.rank], self._since[place.rank] = place, since

    def left(self, rank: int) -> None:
        """Note a goodbye, which is not a loss."""
        self._heard.pop(rank, None)
        self._places[rank] = replace(self._places[rank], left=True)

    def ended(self, rank: int, why: str) -> None:
        """Note that a rank hung up without a goodbye."""
        if self._heard.pop(rank, None) is not None:
            self._lose(Loss(rank, self._places[rank].host, why))

    def judge(self, now: float) -> None:
        """Call the rank that has been silent longest lost, if that is longer than the limit.

        Args:
            now: A moment *before* the last look at the sockets: whatever had come by then has been heard, so that a
                beat which waited unread (this thread was late) is not taken for silence.
        """
        if self._heard:
            rank = min(self._heard, key=self._heard.__getitem__)
            silent_s = now - self._slept - self._heard[rank]
            if silent_s > self._silence_s:
                del self._heard[rank]
                self._lose(Loss(rank, self._places[rank].host, f"silent for {silent_s:.1f} s", silent_s))

    def told(self, by: int, loss: Loss) -> None:
        """Note a loss seen by another rank: rank 0 tells of all; the others tell only rank 0 of itself."""
        if loss.rank == self.rank:
            why = f"gave rank {self.rank} up, which was {loss.why}"
            self._lose(Loss(by, self._places[by].host, why, loss.silent_s))
        elif by == 0:
            self._lose(loss)

    def missing(self) -> list[int]:
        """Return the ranks that have never joined."""
        return [rank for rank in range(self.size) if rank not in self._places]

    def table(self, now: float) -> dict[int, Progress]:
        """Return where every known rank is."""
        return {
            rank: replace(place, age_s=max(0.0, now - self._since[rank]))
            for rank, place in sorted(self._places.items())
        }

    def _lose(self, loss: Loss) -> None:
        if self.loss is None:
            self.loss = loss
