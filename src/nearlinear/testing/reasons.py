"""Turning two records and where they part into why, probably, and what would help."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from nearlinear.testing.comparison import Parting, Reason
from nearlinear.testing.gaps import distance, loss_by_pass, magnitude
from nearlinear.testing.record import Record


def find_reasons(one: Record, many: Record, parting: Parting, tolerance: float) -> tuple[Reason, ...]:
    """Return why they part, probably: what is certain from the numbers alone, else what the model and script hold."""
    if parting.detail and parting.kind in ("parameter", "gradient"):
        return (
            Reason(
                "the script builds another model on N processes than on one",
                "let nothing in the model depend on nl.rank() or nl.world_size()",
            ),
        )
    if parting.step == 0:
        return (
            Reason(
                "the script starts from other weights in each run",
                f"seed before the model is built ({_remedy(one, 'seed')}, not from the clock), or load one checkpoint",
            ),
        )
    certain = _from_sizes(one, many, parting) or _from_options(one, many, parting) or _from_sum(one, many, parting)
    if certain:
        return (certain,)
    if many.compress is not None and parting.kind != "loss":
        return (
            Reason(
                f"gradients are rounded to {many.compress} on the wire, as the script's Plan asks",
                "the plan without compress for the check",
            ),
        )
    if parting.detail:
        return (
            Reason(
                "the number of backward passes in a step depends on the number of processes",
                "accumulate over as many batches on any number of processes; each is the whole batch's",
            ),
        )
    if parting.kind == "parameter":
        return (_from_rounding(one, many, parting, tolerance) or _LOCAL_STEP,)
    layers = _from_layers(one, many, parting)
    if layers:
        return tuple(layers)
    reasons = [_from_losses(one, many, parting) if parting.kind == "loss" else _LOCAL_GRADIENT]
    if parting.error < 100 * tolerance and one.dtype != "float64":
        reasons.insert(0, Reason(f"rounding, for the computation is in {one.dtype}", "--float64, which tells it apart"))
    return tuple(reasons)


# What helps, in the words of the framework that the script is written for.
_REMEDIES = {
    "torch": {
        "seed": "torch.manual_seed(0)",
        "batchnorm": "nn.SyncBatchNorm.convert_sync_batchnorm(model) before nl.distribute",
    },
    "tensorflow": {
        "seed": "keras.utils.set_random_seed(0)",
        "batchnorm": "BatchNormalization(synchronized=True)",
    },
}


def _remedy(record: Record, of: str) -> str:
    return _REMEDIES[record.front_end][of]


_LOCAL_STEP = Reason(
    "the gradients agree, so the step itself depends on the rank or on N: clipping by a norm that the script takes "
    "otherwise, or a learning rate or condition taken from a local loss",
    "decide by what all ranks share: torch.nn.utils.clip_grad_norm_ or a Keras optimizer's clipnorm, nl.mean(loss)",
)
_LOCAL_GRADIENT = Reason(
    "the losses agree and their gradients do not: something in the backward pass depends on the share (a tensor hook, "
    "an autograd function, part of the loss under no_grad or detached)",
    "let it depend on single samples alone, or on nl.gather of the whole batch",
)


def _from_sizes(one: Record, many: Record, parting: Parting) -> Reason | None:
    for step, (a, b) in enumerate(zip(one.steps, many.steps, strict=False), start=1):
        if a.samples != b.samples and step <= parting.step:
            return Reason(
                f"step {step} takes {a.samples} samples on one process and {b.samples} on {many.ranks}",
                "leave batch_size that of the whole batch; nearlinear gives each rank its share",
            )
    if parting.kind != "steps":
        return None
    return Reason(
        "the length of the loop depends on the number of processes",
        "hand the loader to nl.distribute whole, and divide no length by nl.world_size()",
    )


def _from_options(one: Record, many: Record, parting: Parting) -> Reason | None:
    until = parting.step if parting.kind == "parameter" else parting.step - 1
    for step, (a, b) in enumerate(zip(one.steps[:until], many.steps, strict=False), start=1):
        for name in a.options:
            if name in b.options and a.options[name] != b.options[name]:
                return Reason(
                    f"the optimizer's {name} is {a.options[name]} on one process and {b.options[name]} on "
                    f"{many.ranks} at step {step}",
                    f"the same {name} on any number of processes, for the batch is the same too; where it follows "
                    "from the loss, from nl.mean(loss)",
                )
    return None


def _from_sum(one: Record, many: Record, parting: Parting) -> Reason | None:
    whole, shares = _loss_at(one, many, parting)
    if len(shares) < 2 or many.weight == "sum" or not math.isclose(sum(shares), whole, rel_tol=1e-5):
        return None
    return Reason(
        "the loss is a sum over the batch, for on one process it is the sum of the ranks' losses",
        'nl.distribute(..., weight="sum")',
    )


def _from_rounding(one: Record, many: Record, parting: Parting, tolerance: float) -> Reason | None:
    """Explain a parameter that moved by rounding: its gradient is zero there, and Adam divides it by itself."""
    step, name = one.steps[parting.step - 1], parting.name
    if name not in step.gradients or one.dtype == "float64":
        return None
    a, b = step.parameters[name], many.steps[parting.step - 1].parameters[name]
    noise = np.abs(step.gradients[name]) <= tolerance * max(map(magnitude, step.gradients.values()))
    apart = ~(np.abs(a - b) <= tolerance * magnitude(a))
    if not noise[apart].all():
        return None
    return Reason(
        f"rounding: where {name} parts, its gradient is zero but for rounding, and the optimizer makes a full step of "
        "it, as Adam does",
        "--float64, which tells it apart",
    )


def _from_layers(one: Record, many: Record, parting: Parting) -> list[Reason]:
    reasons = []
    if one.batchnorm:
        reasons.append(
            Reason(
                f"BatchNorm ({_some(one.batchnorm)}) normalises over each rank's share of the batch",
                _remedy(one, "batchnorm"),
            )
        )
    if one.dropout:
        reasons.append(
            Reason(
                f"dropout ({_some(one.dropout)}) draws other random numbers on N processes than on one",
                "a dropout of 0 for the check; in training the difference is one of chance alone",
            )
        )
    steps = [*one.steps[: parting.step], *many.steps[: parting.step]]
    drawn = {stream for step in steps for stream in step.drawn}
    if one.dropout:
        drawn -= {"torch", "cuda"}
    if drawn:
        reasons.append(
            Reason(
                f"the script draws random numbers as it trains ({', '.join(sorted(drawn))}), each rank its own",
                "no noise or augmentation for the check; or draw for each sample from a generator seeded by its index",
            )
        )
    return reasons


def _from_losses(one: Record, many: Record, parting: Parting) -> Reason:
    whole, shares = _loss_at(one, many, parting)
    if not shares or not min(shares) <= whole <= max(shares):
        return Reason(
            "the loss mixes samples (a contrastive or ranking loss, a statistic of the batch): no weights make that of "
            "the batch out of those of the shares",
            "take it over the whole batch: loss(nl.gather(features), nl.gather(labels))",
        )
    if many.weight == "sum":
        return Reason(
            'the loss is a mean, and weight="sum" adds those of the ranks',
            "leave weight out, or divide the loss by a count of the whole batch: nl.total(count)",
        )
    if many.weight == "function":
        return Reason(
            "weight(batch) is not what the loss divides by: it lies between the ranks' losses and is not their mean by "
            "weight=",
            "return the number of the samples or tokens that count in this loss",
        )
    return Reason(
        "the loss is a mean in which samples do not weigh alike (a mean over tokens, class weights): it lies between "
        "the ranks' losses and is not their mean by samples",
        "nl.distribute(..., weight=lambda batch: ...) with what the mean divides by, such as (batch[1] != -100).sum(); "
        "or, if the loss compares samples with each other, nl.gather",
    )


def _loss_at(one: Record, many: Record, parting: Parting) -> tuple[float, list[float]]:
    """Return the loss of one process and those of the ranks that count, in the backward pass that differs most."""
    if parting.kind != "loss" or parting.detail:
        return math.nan, []
    a, b = one.steps[parting.step - 1], many.steps[parting.step - 1]
    gaps = [distance(x, y) for x, y in zip(loss_by_pass(a), loss_by_pass(b), strict=True)]
    place = gaps.index(max(gaps))
    return a.losses[0][place][0], [rank[place][0] for rank in b.losses if rank[place][1] != 0.0]


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:2]) + (f" and {len(names) - 2} more" if len(names) > 2 else "")
