"""What can go wrong, as one line each: what, the numbers, the remedy."""

from __future__ import annotations


class NearlinearError(Exception):
    """Root of the errors; ``exit_code`` is what a command or script that ends with it returns."""

    exit_code = 1


class InputError(NearlinearError):
    """What was asked for cannot be done as asked; nothing was changed on disk or in the run."""

    exit_code = 2


class CheckpointError(InputError):
    """A checkpoint is incomplete, damaged, or belongs to another model."""


class PeerLostError(NearlinearError):
    """Another rank died, stalled or was cut off; ``rank`` is its number."""

    def __init__(self, message: str, rank: int | None = None) -> None:
        super().__init__(message)
        self.rank = rank


class DriftError(NearlinearError):
    """Replicas that must be equal are not; the message names the first tensor that differs."""
