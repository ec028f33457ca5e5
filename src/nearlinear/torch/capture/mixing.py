"""Telling whether an operator mixes the samples of a batch, from which dimensions of its tensors the batch carries.

A dimension *carries* the batch when its size changes with the number of samples. An operator mixes samples when

- something it reads carries the batch and nothing it makes does (a mean over the batch, cross entropy, ``histc``), or
- what it makes carries the batch twice (every sample against every other), or
- it keeps the shape and works along a dimension that carries the batch (BatchNorm in training, softmax over samples).

Gathering rows by an index tensor may or may not mix (experts of a MoE do not, MixUp does); it is not reported.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Carried = tuple[bool, ...]  # by dimension

_PICKS = {"index", "index_select", "gather", "take", "nonzero", "masked_select"}  # rows, and leaves each as it is
_ALONG = {"softmax", "log_softmax", "cumsum", "cumprod", "cummax", "cummin", "logcumsumexp", "flip", "roll"}
_ALONG |= {"sort", "argsort", "msort", "logsumexp", "unique_dim", "renorm"}


def mixes(
    name: str,
    arguments: Mapping[str, Any],
    inputs: Sequence[Carried],
    outputs: Sequence[Carried],
    *,
    numbers: bool = True,
) -> bool:
    """Return whether the operator mixes samples.

    Args:
        name: The operator's name (``"linear"``, ``"_softmax"``, ``"native_batch_norm"``).
        arguments: Its arguments by name, those that are no tensors.
        inputs: Which dimensions carry the batch, for every tensor it reads; its main input first.
        outputs: The same for every tensor that it makes.
        numbers: Whether its main input holds floating-point numbers; sorting integers is taken for bookkeeping.

    Example:
        >>> mixes("cross_entropy_loss", {}, [(True, False), (True,)], [()])
        True
        >>> mixes("linear", {}, [(True, False), (False, False)], [(True, False)])
        False
        >>> mixes("softmax", {"dim": 0}, [(True, False)], [(True, False)])
        True
    """
    if not any(map(any, inputs)) or not outputs or name in _PICKS or name.startswith("new_") or name.endswith("_like"):
        return False
    if not any(map(any, outputs)):
        return True
    if any(sum(carried) > 1 for carried in outputs) and not any(sum(carried) > 1 for carried in inputs):
        return True
    main = inputs[0]
    if "batch_norm" in name:
        # Instance norm is a batch norm of one sample whose channels are those of all samples: it carries dimension 1.
        return bool(arguments.get("training", arguments.get("train"))) and any(
            carried for dim, carried in enumerate(main) if dim != 1
        )
    if name.strip("_") in _ALONG and (numbers or "sort" not in name):
        dims = arguments.get("dim", arguments.get("dims", -1))
        return any(main[dim] for dim in ([dims] if isinstance(dims, int) else dims or range(len(main))) if main)
    return False
