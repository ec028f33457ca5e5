"""What cannot be sharded as given, with words of the error it must raise; run on several processes at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

import nearlinear as nl

from cases import Block, Net, data, start

REFUSALS: dict[str, tuple[str, Callable[[], Any]]] = {}


def refusal(words: str) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    def note(fn: Callable[[], Any]) -> Callable[[], Any]:
        REFUSALS[fn.__name__] = (words, fn)
        return fn

    return note


def shard(model: nn.Module, optimizer: Any = None) -> None:
    nl.distribute(model, optimizer, strategy="sharded")


@refusal("LBFGS works on whole parameters, which no rank has")
def optimizers_of_whole_parameters() -> None:
    model = Net()
    shard(model, torch.optim.LBFGS(model.parameters()))


@refusal("0 has sparse gradients, which cannot be sharded; use sparse=False")
def sparse_gradients() -> None:
    shard(nn.Sequential(nn.Embedding(4, 4, sparse=True), nn.Linear(4, 2)))


@refusal("0.weight is torch.float32 and 1.weight is torch.float64; parameters that travel together have one type")
def types_that_differ() -> None:
    shard(nn.Sequential(nn.Linear(4, 4).to(torch.float32), nn.Linear(4, 2)))


@refusal("phase is torch.complex128 and head.weight is torch.float64")
def complex_numbers_among_real_ones() -> None:
    model = nn.Module()
    model.phase, model.head = nn.Parameter(torch.randn(6, dtype=torch.complex128)), nn.Linear(6, 3)
    shard(model)


@refusal("the model is compiled")
def compiled_models() -> None:
    shard(torch.compile(Net()))


@refusal("1.weight has a hook that its shard would not call")
def parameters_with_hooks() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    model[1].weight.register_hook(lambda gradient: gradient.clamp(-1, 1))
    shard(model)


@refusal("the gradient of 0.weight is part of a larger tensor, which its shard would not fill")
def a_gradient_buffer_of_the_script() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    flat = torch.zeros(20)
    model[0].weight.grad = flat[:16].view(4, 4)
    shard(model)


@refusal("first.weight was handed to an earlier distribute call with another model")
def a_part_of_another_model() -> None:
    model = Net()
    nl.distribute(model.first)
    shard(model)


@refusal("its state 'rows' of 0.weight has another shape than the parameter")
def state_of_another_shape() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.state[model[0].weight]["rows"] = torch.zeros(4)
    shard(model, optimizer)


@refusal("the model's parameters are single numbers, so there is nothing to shard")
def nothing_to_shard() -> None:
    model = nn.Module()
    model.scale = nn.Parameter(torch.tensor(1.0))
    shard(model)


@refusal("this blocks.0.norm.weight is from before distribute, which put its shard in its place")
def a_list_of_parameters_from_before() -> None:
    model = Net()
    kept = list(model.blocks.parameters())
    start(model, torch.optim.SGD(model.parameters(), lr=0.1))
    nn.utils.clip_grad_norm_(kept, 1.0)


@refusal("some ranks skipped a batch that others did not")
def ranks_at_different_batches() -> None:
    model = Net()
    loader = start(model, torch.optim.SGD(model.parameters(), lr=0.1), samples=24)
    for i, (x, y) in enumerate(loader):
        if i == 1 and nl.rank() == 0:
            continue
        F.cross_entropy(model(x), y).backward()


@refusal("ran other blocks of the model, or in another order")
def ranks_that_run_different_blocks() -> None:
    class Choosing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.blocks = nn.Linear(6, 5), nn.ModuleList([Block(), Block()])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.blocks[nl.rank() % 2](self.first(x))

    model = Choosing()
    loader: Any = DataLoader(data(), batch_size=8)
    model, loader = nl.distribute(model, None, loader, strategy="sharded")
    for x, _ in loader:
        model(x).sum().backward()
