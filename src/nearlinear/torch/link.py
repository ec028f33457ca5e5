"""Turning a few timed all-reduces into the link that buckets are sized by."""

from __future__ import annotations

import time

import torch

from nearlinear.core.cluster import Link
from nearlinear.measure.link import fit_alpha_beta
from nearlinear.torch.collectives import Group

_WHAT = "measuring the link"
_SLOW_S = 0.05


def measure(group: Group, device: torch.device) -> Link:
    """Return what an all-reduce costs; all ranks call it, and all get rank 0's figures."""
    sizes, times = [], []
    for elements in (1, 1, 1, 16384, 16384, 262144, 262144):
        message = torch.zeros(elements, device=device)
        began = time.perf_counter()
        group.all_reduce(message, _WHAT)
        message[0].item()
        sizes.append(4.0 * elements)
        times.append(time.perf_counter() - began)
        # Where 64 KiB take long, more bytes would tell nothing new and cost seconds.
        if len(times) == 5 and group.all_gather_json(times[-1] > _SLOW_S, _WHAT)[0]:
            break
    link = fit_alpha_beta(sizes[1:], times[1:])  # the first message opens the connections
    latency, bandwidth = group.all_gather_json([link.latency, link.bandwidth], _WHAT)[0]
    return Link(latency, bandwidth)
