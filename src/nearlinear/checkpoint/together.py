"""Acting on every rank or on none: a failure on one is told to all, and what was changed is changed back."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from nearlinear.errors import CheckpointError

T = TypeVar("T")


class Ranks(Protocol):
    """Who saves or loads together."""

    @property
    def rank(self) -> int:
        """This process's number."""

    @property
    def size(self) -> int:
        """Number of processes."""

    def all_gather_json(self, value: Any, what: str) -> list[Any]:
        """Return every rank's ``value``; ``what`` is for the message should a rank be missing."""


@dataclass(frozen=True, slots=True)
class Alone:
    """The one process of a script that no launcher started."""

    rank: int = 0
    size: int = 1

    def all_gather_json(self, value: Any, what: str) -> list[Any]:
        """Return ``[value]``."""
        return [value]


@dataclass(frozen=True, slots=True)
class Change:
    """Something that can be done and undone.

    Args:
        remember: Notes how things are and returns what brings them back.
        apply: Does it.
    """

    remember: Callable[[], Callable[[], None]]
    apply: Callable[[], None]


def on_all(ranks: Ranks, what: str, act: Callable[[], T]) -> T:
    """Return ``act()`` once it is over on every rank; raise on all of them if it failed on one.

    Args:
        ranks: The processes, each of which calls this.
        what: What is being done, for messages.
        act: This rank's part. It must not wait for other ranks.

    Raises:
        CheckpointError: ``act`` failed on another rank; on the rank itself its own exception is raised.
    """
    failure: Exception | None = None
    try:
        result = act()
    except Exception as error:  # noqa: BLE001  whatever it is, the other ranks wait to hear of it
        failure = error
    first_line = next(iter(str(failure).splitlines()), "")
    verdicts = ranks.all_gather_json(failure and f"{type(failure).__name__}: {first_line}", what)
    if failure is not None:
        raise failure
    for rank, verdict in enumerate(verdicts):
        if verdict is not None:
            raise CheckpointError(f"{what} failed on rank {rank}: {verdict}")
    return result


def require_one_checkpoint(ranks: Ranks, what: str, path: object, identity: str) -> None:
    """Compare what the ranks have read.

    Raises:
        CheckpointError: They have read different checkpoints.
    """
    for rank, other in enumerate(ranks.all_gather_json(identity, what)):
        if other != identity:
            raise CheckpointError(
                f"ranks {ranks.rank} and {rank} found different checkpoints at {path}; "
                "copy one to all machines, or use a path that they share"
            )


def change_all(ranks: Ranks, what: str, changes: Iterable[Change]) -> None:
    """Apply ``changes`` in order on every rank, or leave everything as it was on all of them.

    Raises:
        CheckpointError: A change failed on another rank; on the rank itself its own exception is raised.
    """
    undo: list[Callable[[], None]] = []

    def apply() -> None:
        for change in changes:
            undo.append(change.remember())
            change.apply()

    try:
        on_all(ranks, what, apply)
    except BaseException:
        for back in reversed(undo):
            back()
        raise
