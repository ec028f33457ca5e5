"""Counting the floating-point operations of one operator from the shapes it is called with.

Products are counted as two operations (multiply and add); elementwise work is not counted, for its time is that of
the bytes it moves. Formulae are torch's own (``torch.utils.flop_counter``) where it has one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry, sdpa_flop_count

_ATTENTION = {
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_fused_attention_overrideable",
    "_scaled_dot_product_attention_math",
}


def flop(operator: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], output: Any) -> float:
    """Return the floating-point operations of ``operator(*args, **kwargs)``, which gave ``output``."""
    packet = operator.overloadpacket
    if packet in flop_registry:
        return float(flop_registry[packet](*args, **kwargs, out_val=output))
    name, shapes = packet.__name__, [list(map(int, arg.shape)) for arg in args if isinstance(arg, torch.Tensor)]
    if name in _ATTENTION:
        return float(sdpa_flop_count(*shapes[:3]))  # type: ignore[no-untyped-call]
    if name in ("mv", "dot", "vdot"):
        return 2.0 * math.prod(shapes[0])
    if name == "addmv":
        return 2.0 * math.prod(shapes[1])
    if name == "_addmm_activation":
        return 2.0 * math.prod(shapes[1]) * shapes[2][-1]
    if name == "mkldnn_rnn_layer":  # the input (time, batch, features), the weights of input and state, ...
        return 2.0 * shapes[0][0] * shapes[0][1] * (math.prod(shapes[1]) + math.prod(shapes[2]))
    if name in ("_cudnn_rnn", "miopen_rnn"):  # its weights are one list
        return 2.0 * shapes[0][0] * shapes[0][1] * sum(int(weight.numel()) for weight in args[1] if weight.ndim > 1)
    return 0.0
