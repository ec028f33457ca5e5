"""A plan: which way a model is trained on how many processes."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass

from nearlinear.errors import InputError
from nearlinear.units import size

STRATEGIES = ("data",)
COMPRESSIONS = (None, "bf16")


@dataclass(frozen=True, slots=True)
class Plan:
    """How a model is trained.

    Args:
        strategy: ``"data"``: every rank holds the model and takes a share of each batch.
        compress: ``"bf16"`` halves a float32 gradient's bytes on the wire and changes the numbers; ``None`` sends
            gradients as they are.
        bucket_bytes: Bytes of gradient per message; ``None`` chooses them from the measured link.
        check_every: Optimizer steps between two comparisons of the replicas' parameters.

    Raises:
        InputError: A field has a value outside its range.

    Example:
        >>> print(Plan(compress="bf16"))
        data parallel, bf16 on the wire, bucket size from the measured link, replicas compared every 100 steps
    """

    strategy: str = "data"
    compress: str | None = None
    bucket_bytes: int | None = None
    check_every: int = 100

    def __post_init__(self) -> None:
        if self.strategy not in STRATEGIES:
            raise InputError(f"unknown strategy {self.strategy!r}; choose one of: auto, {', '.join(STRATEGIES)}")
        if self.compress not in COMPRESSIONS:
            raise InputError(f"unknown compression {self.compress!r}; choose None or 'bf16'")
        if self.bucket_bytes is not None and self.bucket_bytes < 1:
            raise InputError(f"bucket_bytes is {self.bucket_bytes}; it must be at least 1, or None to measure")
        if self.check_every < 1:
            raise InputError(f"check_every is {self.check_every}; it must be at least 1 step")

    def __str__(self) -> str:
        wire = "bf16 on the wire, " if self.compress else ""
        buckets = size(self.bucket_bytes) + " buckets" if self.bucket_bytes else "bucket size from the measured link"
        return f"{self.strategy} parallel, {wire}{buckets}, replicas compared every {self.check_every} steps"

    def to_json(self) -> str:
        """Return the plan as a JSON object."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Return the plan that ``to_json`` wrote.

        Raises:
            InputError: ``text`` is not such an object.
        """
        try:
            return cls(**json.loads(text))
        except (ValueError, TypeError) as error:
            raise InputError(f"not a plan: {error}") from error
