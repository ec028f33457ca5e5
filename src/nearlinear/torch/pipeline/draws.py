"""Turning a model's random operators into ones whose numbers do not depend on where the model is cut.

Stages are cut by measured times, so the same script may be cut elsewhere the next time. Each random operator of the
captured graph therefore draws from a stream of its own: of the run's seed, the call of the model, the microbatch and
its name. The script's own streams stay where they are, the same on all ranks of a pipeline.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from nearlinear.torch.session import derived_seed

_place: list[tuple[int, ...]] = []  # seed, call and microbatch of the pass that runs


@contextlib.contextmanager
def drawing(*place: int) -> Iterator[None]:
    """Let ``seeded`` operators draw for this seed, call and microbatch; outside they draw from torch's streams."""
    _place.append(place)
    try:
        yield
    finally:
        _place.pop()


def seeded(target: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Return ``target``, drawing from the stream of the operator called ``name``."""

    def run(*args: Any, **kwargs: Any) -> Any:
        if not _place:
            return target(*args, **kwargs)
        cuda = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        states = torch.get_rng_state(), torch.cuda.get_rng_state() if cuda else None
        seed = derived_seed(*_place[-1], name)
        torch.default_generator.manual_seed(seed)
        if cuda:
            torch.cuda.manual_seed(seed)
        try:
            return target(*args, **kwargs)
        finally:
            torch.set_rng_state(states[0])
            if states[1] is not None:
                torch.cuda.set_rng_state(states[1])

    run.__name__ = run.__qualname__ = f"drawn_by_{name}"
    return run
