"""Making replicas equal at the start, and noticing when they no longer are."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from nearlinear.errors import DriftError, InputError
from nearlinear.torch import random_streams
from nearlinear.torch.collectives import Group
from nearlinear.torch.session import Session, derived_seed

_CHUNK_BYTES = 64 * 1024 * 1024
_ROUNDING = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 1e-2}

Named = Sequence[tuple[str, torch.Tensor]]


def require_same_model(named: Named, session: Session) -> None:
    """Check that every rank has tensors of the same names, shapes and dtypes.

    Raises:
        InputError: They differ; the first difference is named.
    """
    mine = [f"{name} {tuple(tensor.shape)} {tensor.dtype}" for name, tensor in named]
    everyones = session.all_gather_json(mine, "comparing the models")
    for rank, other in enumerate(everyones):
        if other == everyones[0]:
            continue
        first = next((i for i, (a, b) in enumerate(zip(everyones[0], other, strict=False)) if a != b), None)
        if first is None:
            what = f"{len(everyones[0])} tensors on rank 0 and {len(other)} on rank {rank}"
        else:
            what = f"{everyones[0][first]} on rank 0 and {other[first]} on rank {rank}"
        raise InputError(f"the model differs between ranks: {what}; build the same model on every rank")


@torch.no_grad()
def broadcast_state(tensors: Sequence[torch.Tensor], group: Group | None) -> None:
    """Overwrite the tensors, in place, by rank 0's; small ones travel together."""
    if group is None:
        return
    what = "sending rank 0's initial weights"
    kinds: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for tensor in {id(t): t for t in tensors}.values():
        kinds.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    for same_kind in kinds.values():
        chunk: list[torch.Tensor] = []
        for tensor in same_kind:
            if sum(t.nbytes for t in chunk) + tensor.nbytes > _CHUNK_BYTES:
                _broadcast_together(chunk, group, what)
                chunk = []
            chunk.append(tensor)
        _broadcast_together(chunk, group, what)


def _broadcast_together(tensors: list[torch.Tensor], group: Group, what: str) -> None:
    if not tensors:
        return
    device = tensors[0].device
    flat = torch.cat([_bits(tensor) for tensor in tensors]).cpu()
    group.broadcast(flat, what)
    for tensor, part in zip(tensors, torch.split(flat, [t.nbytes for t in tensors]), strict=True):
        tensor.copy_(part.clone().view(tensor.dtype).view(tensor.shape).to(device))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def separate_streams(session: Session) -> None:
    """Give ranks random streams by the share of the batch that they work on, derived from rank 0's.

    Dropout and augmentation then differ between shares, as they do between the samples of one batch, and a run
    repeats itself.
    """
    numpys: Any = np.random.get_state()
    mine = [torch.initial_seed(), hash(random.getstate()) % 2**63, int(numpys[1][:4].sum())]
    seeds = session.all_gather_json(mine, "the random streams")[0]
    if session.parts < session.size:  # ranks that work on one share draw its augmentation alike
        streams = session.all_gather_json(random_streams.capture(), "the random streams")
        if session.part == 0 and session.rank > 0:
            random_streams.restore(streams[:1], 0)
    if session.part == 0:
        return
    seed = derived_seed(*seeds, "rank", session.part)
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


@torch.no_grad()
def require_equal(named: Named, session: Session, step: int, among: Group | None = None) -> None:
    """Compare the replicas by a checksum of each tensor's bits: those of all ranks, or of the ranks of a group.

    Processors of different makes may round differently; replicas that differ by no more than rounding are given the
    first one's values, and that is said.

    Raises:
        DriftError: A tensor differs by more; the first one is named.
    """
    group = among or session.control
    if group is None or not named:
        return
    sums = torch.stack([_checksum(tensor).cpu() for _, tensor in named])
    everyones = group.all_gather(sums, f"comparing the replicas after step {step}")
    different = [i for i in range(len(named)) if any(other[i] != everyones[0][i] for other in everyones)]
    ranks = group.ranks
    for index in different:
        name, tensor = named[index]
        reference = tensor.detach().cpu().clone()
        what = "comparing the replicas"
        group.wait(group.start_broadcast(reference, ranks[0], what), what)
        off = float((tensor.detach().cpu() - reference).abs().max()) if tensor.dtype != torch.bool else 1.0
        largest = float(reference.abs().max()) if tensor.dtype != torch.bool else 1.0
        everyones_off = group.all_gather_json(off if off == off else 1e300, what)
        worst = max(range(len(ranks)), key=lambda rank: everyones_off[rank])
        if everyones_off[worst] > _ROUNDING.get(tensor.dtype, 0.0) * max(largest, 1e-30):
            raise DriftError(
                f"after step {step} rank {ranks[worst]}'s {name} differs from rank {ranks[0]}'s by "
                f"{everyones_off[worst]:.3g} (largest value {largest:.3g}; {len(different)} of {len(named)} tensors "
                "differ); was it changed on one rank only? change parameters on all ranks alike, or hand them to "
                "distribute"
            )
        tensor.copy_(reference)
    if different:
        session.notice(
            f"replicas differed by rounding in {named[different[0]][0]} after step {step} (processors of different "
            f"makes?); all continue with rank {ranks[0]}'s values"
        )


def _checksum(tensor: torch.Tensor) -> torch.Tensor:
    bits = tensor.detach().contiguous().view(-1)
    if bits.is_complex():
        bits = torch.view_as_real(bits).view(-1)
    integers: dict[int, Any] = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return bits.view(integers[bits.dtype.itemsize]).sum(dtype=torch.int64)
