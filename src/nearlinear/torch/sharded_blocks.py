"""Turning a model's tree of modules into the blocks whose parameters travel together.

the model ─┬─ embedding            ┐
           ├─ blocks ─┬─ Block 0   │ 1     each block is gathered when it runs, and let go after it
           │          ├─ Block 1   │ 2
           │          └─ Block 2   │ 3
           ├─ norm                 │
           └─ head                 ┘ what is in no block: gathered for the time of the model's own forward
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator

from torch import nn

LEAF_BYTES = 1024 * 1024  # a lone layer with fewer bytes is not worth messages of its own

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


def blocks_of(model: nn.Module, leaf_bytes: int = LEAF_BYTES) -> list[nn.Module]:
    """Return the outermost modules that a container holds several of one class of, in the model's order.

    A block that shares a parameter with the rest of the model is left to the whole: one parameter belongs to one
    block. So are blocks within blocks: the experts of a layer do not all run on every rank, the layer does.

    Args:
        model: The model; it is no block of itself.
        leaf_bytes: A block that is one layer, without sub-modules, is one from so many bytes on.
    """
    blocks = list(dict.fromkeys(_repeated(model, leaf_bytes)))
    owners: dict[int, set[int]] = {}
    for number, block in enumerate(blocks):
        for parameter in block.parameters():
            owners.setdefault(id(parameter), set()).add(number)
    for module in members(model, frozenset(blocks)):
        for parameter in module.parameters(recurse=False):
            owners.setdefault(id(parameter), set()).add(-1)
    return [block for block in blocks if all(len(owners[id(p)]) == 1 for p in block.parameters())]


def members(module: nn.Module, blocks: Collection[nn.Module]) -> Iterator[nn.Module]:
    """Yield ``module`` and what is below it, but not ``blocks`` below it and what is in them."""
    yield module
    for child in module.children():
        if child not in blocks:
            yield from members(child, blocks)


def _repeated(module: nn.Module, leaf_bytes: int) -> Iterator[nn.Module]:
    children = [child for child in module.children() if any(True for _ in child.parameters())]
    kinds = Counter(type(child) for child in children)
    for child in children:
        if isinstance(module, _CONTAINERS) and kinds[type(child)] > 1 and _is_worth_it(child, leaf_bytes):
            yield child
        else:
            yield from _repeated(child, leaf_bytes)


def _is_worth_it(module: nn.Module, leaf_bytes: int) -> bool:
    if isinstance(module, nn.ModuleList | nn.ModuleDict):
        return False  # it has no forward that could gather its parameters
    composite = any(True for child in module.children() for _ in child.parameters())
    return composite or sum(parameter.nbytes for parameter in module.parameters()) >= leaf_bytes
