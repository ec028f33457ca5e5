"""What a simulated step is made of: what stages cost, what devices did, and where their time went."""

from __future__ import annotations

from dataclasses import dataclass, field

from nearlinear.units import seconds


@dataclass(frozen=True, slots=True)
class Bucket:
    """Gradients that are combined in one message.

    Args:
        bytes: Their size.
        ready: The share of the last backward pass after which they are complete, from 0 to 1. At 1 they wait for the
            stage's last messages too.
    """

    bytes: float
    ready: float = 1.0


@dataclass(frozen=True, slots=True)
class Work:
    """What one stage costs on one device.

    Args:
        forward: Seconds per microbatch, all chunks together.
        backward: Seconds per microbatch.
        update: Seconds of the optimizer step.
        output_bytes: What goes to the next stage per microbatch (and chunk); its gradient comes back as large.
        buckets: Gradients to combine with the replicas, in the order in which they become ready.
        input_share: The share of ``backward`` that the gradient of the input takes, where the schedule splits it.
    """

    forward: float
    backward: float
    update: float = 0.0
    output_bytes: float = 0.0
    buckets: tuple[Bucket, ...] = ()
    input_share: float = 0.5


@dataclass(frozen=True, slots=True)
class Span:
    """Something a device did: ``what`` is an action, ``"send F0"``, ``"receive B1"``, ``"all-reduce 2"``, ``"update"``.

    Args:
        device: Position in the cluster.
        start: Seconds from the start of the step.
        end: Seconds from the start of the step.
        what: As above.
        computing: Whether it occupies the processor; communication has False.
    """

    device: int
    start: float
    end: float
    what: str
    computing: bool


@dataclass(frozen=True, slots=True)
class Spent:
    """Where a device's step went, in seconds; the three add up to the step.

    Args:
        compute: Computing.
        communication: In a message or an all-reduce while not computing.
        waiting: Neither.
    """

    compute: float
    communication: float
    waiting: float


@dataclass(frozen=True)
class Simulation:
    """One simulated step.

    Args:
        seconds: From the first action to the last device's update.
        timeline: What every device did, by start.
        spent: Where the time of every device went, by position in the cluster.
    """

    seconds: float
    timeline: tuple[Span, ...] = field(repr=False)
    spent: dict[int, Spent]

    def __str__(self) -> str:
        lines = [f"step {seconds(self.seconds)}"]
        for device, spent in sorted(self.spent.items()):
            shares = {"compute": spent.compute, "communication": spent.communication, "waiting": spent.waiting}
            lines.append(
                f"device {device}: "
                + ", ".join(f"{what} {value / max(self.seconds, 1e-30):.0%}" for what, value in shares.items())
            )
        return "\n".join(lines)
