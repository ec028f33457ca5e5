"""A plan: which way a model is trained on how many processes."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass

from nearlinear.errors import InputError
from nearlinear.units import size

EXACT = ("data", "sharded", "pipeline")  # those that give the numbers of one process
STRATEGIES = (*EXACT, "local")
COMPRESSIONS = (None, "bf16")
_OWNERS = {"stages": "pipeline", "microbatches": "pipeline", "shards": "sharded", "every": "local"}
LOCAL_COMPRESSIONS = (None, "fp32", "bf16", "int8", "int4", "topk")


@dataclass(frozen=True, slots=True)
class Plan:
    """How a model is trained.

    Args:
        strategy: ``"data"``: every rank holds the model and takes a share of each batch. ``"sharded"``: it holds a part
            of every parameter. ``"pipeline"``: it holds one stage of the model, through which the batch passes in
            microbatches. ``"local"``: every member of a run over the Internet trains on its share of each batch, and
            their parameters are averaged once a round.
        compress: ``"bf16"`` halves a float32 gradient's bytes on the wire and changes the numbers; ``None`` sends
            gradients as they are. Of ``"local"``: how updates travel, ``"fp32"``, ``"bf16"``, ``"int8"`` (the default),
            ``"int4"`` or ``"topk"``.
        bucket_bytes: Bytes of gradient per message; ``None`` chooses them from the measured link.
        check_every: Optimizer steps between two comparisons of the replicas' parameters.
        stages: Stages of a pipeline; S stages on N ranks are N / S replicas of it. ``None``: as many as ranks.
        microbatches: Pieces of a batch in a pipeline; ``None``: four per stage, of two samples at least.
        recompute: A pipeline keeps of a microbatch only what enters its stages, and runs them again before the backward
            pass: about a third more computing, for the activations of one microbatch instead of all.
        shards: Ranks that share one copy of the parameters under ``"sharded"``; N ranks hold N / shards copies, and
            gradients are summed over them. ``None``: all ranks share one.
        every: Steps per round of ``"local"``; ``None`` chooses them from the measured link.

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
    stages: int | None = None
    microbatches: int | None = None
    recompute: bool = False
    shards: int | None = None
    every: int | None = None

    def __post_init__(self) -> None:
        if self.strategy not in STRATEGIES:
            raise InputError(f"unknown strategy {self.strategy!r}; choose one of: auto, {', '.join(STRATEGIES)}")
        known = LOCAL_COMPRESSIONS if self.strategy == "local" else COMPRESSIONS
        if self.compress not in known:
            others = " or ".join(map(repr, known[1:]))
            raise InputError(f"unknown compression {self.compress!r}; choose None or {others}")
        if self.bucket_bytes is not None and self.bucket_bytes < 1:
            raise InputError(f"bucket_bytes is {self.bucket_bytes}; it must be at least 1, or None to measure")
        if self.check_every < 1:
            raise InputError(f"check_every is {self.check_every}; it must be at least 1 step")
        for name, owner in _OWNERS.items():
            value = getattr(self, name)
            if value is not None and self.strategy != owner:
                raise InputError(f"{name} is {value}, and strategy {self.strategy!r} has none; ask for {owner!r}")
            if value is not None and value < 1:
                raise InputError(f"{name} is {value}; it must be at least 1")
        if self.recompute and self.strategy != "pipeline":
            raise InputError(
                f"recompute is for pipelines, and the strategy is {self.strategy!r}; use torch.utils.checkpoint in "
                "the model"
            )

    def __str__(self) -> str:
        if self.strategy == "local":
            rounds = f"rounds of {self.every} steps" if self.every else "rounds as long as the measured link asks for"
            return f"local updates, {rounds}, {self.compress or 'int8'} on the wire"
        compared = f"replicas compared every {self.check_every} steps"
        if self.strategy == "pipeline":
            stages = f"{self.stages} stages" if self.stages else "one stage per rank"
            micro = f"{self.microbatches} microbatches" if self.microbatches else "four microbatches per stage"
            again = "activations made again, " if self.recompute else ""
            return f"pipeline, {stages}, {micro}, {again}{compared}"
        if self.strategy == "sharded":
            among = f" among {self.shards} ranks" if self.shards else ""
            return f"sharded parameters{among}, {compared}"
        wire = "bf16 on the wire, " if self.compress else ""
        buckets = size(self.bucket_bytes) + " buckets" if self.bucket_bytes else "bucket size from the measured link"
        return f"{self.strategy} parallel, {wire}{buckets}, {compared}"

    def shards_on(self, ranks: int) -> int:
        """Return how many of ``ranks`` ranks share one copy of the parameters.

        Raises:
            InputError: The ranks do not divide into whole copies.
        """
        shards = self.shards or ranks
        if ranks % shards or (shards == 1 < ranks):
            raise InputError(
                f"{ranks} ranks cannot hold copies of {shards} ranks each; start a multiple of a number of shards "
                "above 1, or use strategy='data'"
            )
        return shards

    def stages_on(self, ranks: int) -> int:
        """Return how many of ``ranks`` ranks share one copy of the model: 1 but for pipelines on several ranks.

        Raises:
            InputError: The ranks do not divide into whole pipelines.
        """
        if self.strategy != "pipeline" or ranks == 1:
            return 1
        stages = self.stages or ranks
        if ranks % stages:
            raise InputError(
                f"{stages} stages on {ranks} ranks leave some over; start a multiple of {stages} processes"
            )
        return stages

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
