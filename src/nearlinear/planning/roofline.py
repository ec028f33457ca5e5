"""Turning a graph's FLOP and bytes into seconds on a device that is not here."""

from __future__ import annotations

import dataclasses

from nearlinear.core.cluster import Device
from nearlinear.core.graph import Graph, Operator
from nearlinear.errors import InputError

EFFICIENCY = 0.6  # six models on one CPU core: 0.51 to 0.65 (benchmarks/capture)


def roofline(
    graph: Graph, device: Device, dtype: str = "float32", *, efficiency: float = EFFICIENCY, launch: float = 0.0
) -> Graph:
    """Return the graph with the seconds that its operators take on ``device``.

        forward  = max(flop / (efficiency * flops), moved_bytes / (efficiency * memory_bandwidth)) + launch
        backward = 2 forward        products: the gradients of input and parameters; 1 where these are frozen
        backward = 1 forward        the rest: it reads a gradient and what was kept, and writes a gradient
        update   = bytes of parameters, gradients and moments, read and written / (efficiency * memory_bandwidth)

    Args:
        graph: Captured, with ``flop`` and ``moved_bytes``.
        device: Its ``flops`` are what a large matrix product reaches.
        dtype: In which the model computes; one of those whose speed the device has.
        efficiency: The share of the device's two speeds that an operator of ordinary size reaches.
        launch: Seconds that starting an operator costs, where the device waits for it.

    Raises:
        InputError: The device's speed in ``dtype`` is not known, or ``efficiency`` is not above 0 and at most 1.

    Source:
        S. Williams, A. Waterman, D. Patterson, "Roofline: an insightful visual performance model for multicore
        architectures", CACM 52(4), 2009.

    Example:
        >>> g = Graph((Operator("up", flop=6e9, moved_bytes=7e6, parameter_bytes=1e6, state_bytes=4e6),))
        >>> roofline(g, Device("cpu", 8e9, {"float32": 100e9}, 10e9)).operators[0].forward
        0.1
    """
    if dtype not in device.flops:
        known = ", ".join(device.flops) or "none"
        raise InputError(f"the speed of {device.name!r} in {dtype} is not known (known: {known}); choose one of those")
    if not 0 < efficiency <= 1:
        raise InputError(f"efficiency is {efficiency}; it must be above 0 and at most 1")
    flops, bandwidth = efficiency * device.flops[dtype], efficiency * device.memory_bandwidth

    def timed(operator: Operator) -> Operator:
        if operator.flop == operator.moved_bytes == 0:
            return dataclasses.replace(operator, forward=0.0, backward=0.0, update=0.0)
        forward = max(operator.flop / flops, operator.moved_bytes / bandwidth) + launch
        trained = operator.parameter_bytes == 0 or operator.state_bytes > operator.parameter_bytes
        backward = (2.0 if trained and operator.flop > 0 else 1.0) * forward
        # Adam reads 4 and writes 3 numbers of the 4 it holds (parameter, gradient, two moments): 2 * 4 - 1.
        update = (2 * operator.state_bytes - operator.parameter_bytes) / bandwidth if operator.parameter_bytes else 0.0
        return dataclasses.replace(
            operator,
            forward=forward,
            backward=backward if graph.training else 0.0,
            update=update if graph.training and trained else 0.0,
        )

    stated = f"roofline of {device.name} in {dtype} at {efficiency:.0%}"
    return dataclasses.replace(
        graph,
        operators=tuple(map(timed, graph.operators)),
        source=f"{graph.source}; {stated}" if graph.source else stated,
    )
