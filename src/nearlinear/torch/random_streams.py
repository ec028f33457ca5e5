"""Turning the random streams of this process (Python's, NumPy's, torch's) into JSON, and back."""

from __future__ import annotations

import base64
from collections.abc import Callable

import torch

from nearlinear.checkpoint import streams
from nearlinear.checkpoint.documents import Json


def capture() -> Json:
    """Return where the global generators stand, those of all CUDA devices too."""
    cuda = None
    if torch.cuda.is_available():
        states = [base64.b64encode(state.numpy().tobytes()).decode() for state in torch.cuda.get_rng_state_all()]
        cuda = {"current": torch.cuda.current_device(), "devices": states}
    return {
        **streams.capture(),
        "torch": base64.b64encode(torch.get_rng_state().numpy().tobytes()).decode(),
        "cuda": cuda,
    }


def restore(saved: list[Json], rank: int) -> None:
    """Continue the stream of this rank, or begin the one that a rank without a saved one gets.

    Args:
        saved: What each rank captured, by rank.
        rank: This process's number; it may be beyond those.
    """
    if rank >= len(saved):
        seed = streams.derived_seed(saved[0], rank)
        streams.reseed(seed)
        torch.manual_seed(seed)
        return
    streams.restore(saved[rank])
    torch.set_rng_state(_bytes_tensor(saved[rank]["torch"]))
    cuda = saved[rank]["cuda"]
    if cuda is None or not torch.cuda.is_available():
        return
    if len(cuda["devices"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all([_bytes_tensor(text) for text in cuda["devices"]])
    else:  # other machines: what counts is the device that this rank works on
        torch.cuda.set_rng_state(_bytes_tensor(cuda["devices"][cuda["current"]]))


def remember() -> Callable[[], None]:
    """Note where the generators stand and return what brings them back there."""
    before = capture()
    return lambda: restore([before], 0)


def _bytes_tensor(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
