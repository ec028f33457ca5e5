"""Difficulties of models whose parameters are divided; each must leave N processes with the numbers of one.

The ranks' shares differ in every one of them (21 samples in batches of 8), and blocks are gathered one by one.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import nearlinear as nl
from nearlinear.runtime.environment import plan_asked_for

Note = Callable[[str, Any], None]
CASES: dict[str, Callable[[Note], None]] = {}


def case(fn: Callable[[Note], None]) -> Callable[[Note], None]:
    CASES[fn.__name__] = fn
    return fn


def data(samples: int = 21) -> TensorDataset:
    generator = torch.Generator().manual_seed(7)
    return TensorDataset(
        torch.randn(samples, 6, generator=generator), torch.randint(0, 3, (samples,), generator=generator)
    )


class Block(nn.Module):
    def __init__(self, width: int = 5) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 7), nn.Linear(7, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    """Three blocks, more parameters around them, and a single number."""

    def __init__(self, blocks: int = 3) -> None:
        super().__init__()
        self.first = nn.Linear(6, 5)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.last = nn.Linear(5, 3)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.encode(x)) * self.scale


def start(model: nn.Module, optimizer: Any, samples: int = 21, **options: Any) -> DataLoader[Any]:
    loader = DataLoader(data(samples), batch_size=8, shuffle=True)
    return nl.distribute(model, optimizer, loader, strategy="sharded", **options)[2]


def state(note: Note, model: nn.Module, label: str = "") -> None:
    for name, parameter in model.named_parameters():
        note(f"{label}parameter {name}", parameter)


def train(
    note: Note,
    model: nn.Module,
    optimizer: Any,
    loader: Any,
    loss_of: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None,
    clip: float | None = None,
    label: str = "",
) -> None:
    for i, (x, y) in enumerate(loader):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y) if loss_of is None else loss_of(x, y)
        loss.backward()
        note(f"{label}{i} loss", nl.mean(loss))
        for name, parameter in model.named_parameters():
            note(f"{label}{i} gradient {name}", torch.zeros(()) if parameter.grad is None else parameter.grad)
        if clip is not None:
            norm = nn.utils.clip_grad_norm_(model.parameters(), clip, foreach=i % 2 == 0 or None)
            assert f"{norm:.3f}"
            note(f"{label}{i} norm", norm)
        optimizer.step()
    state(note, model, label)


@case
def weights_clipping_and_adam(note: Note) -> None:
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    loader = start(model, optimizer, weight=lambda batch: (batch[1] != 2).sum())
    train(note, model, optimizer, loader, lambda x, y: F.cross_entropy(model(x), y, ignore_index=2), clip=0.3)


@case
def a_sum_over_several_passes(note: Note) -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loader = start(model, optimizer, weight="sum", samples=17)
    for i, (x, y) in enumerate(loader, 1):
        count = nl.total(len(x))
        (F.cross_entropy(model(x), y, reduction="sum") / count).backward()
        if i % 2 == 0 or i == len(loader):
            note(f"{i} norm", nn.utils.clip_grad_norm_(model.parameters(), 0.2))
            optimizer.step()
            optimizer.zero_grad()
    state(note, model)


@case
def optimizers_of_every_kind(note: Note) -> None:
    kinds: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
        "amsgrad": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True, foreach=True),
        "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, centered=True, momentum=0.5),
        "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01),
    }
    for kind, make in kinds.items():
        model = Net(2)
        model.scale = nn.Parameter(torch.ones(1))
        optimizer = make(model.parameters())
        train(note, model, optimizer, start(model, optimizer), label=f"{kind} ", clip=0.3)


@case
def an_optimizer_that_has_stepped(note: Note) -> None:
    model = Net()
    optimizer = torch.optim.Adam(
        [{"params": model.blocks.parameters()}, {"params": [*model.first.parameters(), model.scale], "lr": 0.02}],
        lr=0.01,
    )
    x, y = data().tensors
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    loader = start(model, optimizer)
    assert [len(group["params"]) for group in optimizer.param_groups] == [18, 3]
    train(note, model, optimizer, loader)


@case
def a_scaler_that_skips_a_step(note: Note) -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = start(model, optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0, growth_interval=2)
    for i, (x, y) in enumerate(loader):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        if i == 1:  # overflows on the last rank alone
            loss = loss + (float("inf") if nl.rank() == nl.world_size() - 1 else 0.0) * model(x).sum()
        scaler.scale(loss).backward()
        if i != 1:
            scaler.unscale_(optimizer)
            note(f"{i} norm", nn.utils.clip_grad_norm_(model.parameters(), 0.3))
        scaler.step(optimizer)
        scaler.update()
        note(f"{i} scale", scaler.get_scale())
    state(note, model)


@case
def two_optimizers_of_one_model(note: Note) -> None:
    model = Net()
    blocks = torch.optim.Adam(model.blocks.parameters(), lr=0.01)
    rest = torch.optim.SGD([*model.first.parameters(), *model.last.parameters(), model.scale], lr=0.1, momentum=0.9)
    loader = start(model, blocks)
    nl.distribute(model, rest, strategy="sharded")
    for i, (x, y) in enumerate(loader):
        blocks.zero_grad()
        rest.zero_grad()
        F.cross_entropy(model(x), y).backward()
        note(f"{i} norm", nn.utils.clip_grad_norm_(model.parameters(), 0.3))
        blocks.step()
        rest.step()
    state(note, model)


@case
def forwards_of_every_kind_before_one_backward(note: Note) -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = start(model, optimizer)

    def loss_of(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        first = model(x)
        model.eval()
        with torch.no_grad():
            target = model(x + 0.1).softmax(1)
        model.train()
        moved = x.clone().requires_grad_(True)
        second = model(moved)
        (slope,) = torch.autograd.grad(model(moved).sum(), moved)
        return F.cross_entropy(first, y) + F.mse_loss(second, target) + (slope.detach() * second[:, :1]).mean()

    train(note, model, optimizer, loader, loss_of)


@case
def parts_called_by_themselves(note: Note) -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = start(model, optimizer)

    def loss_of(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        inner = model.blocks[1].up(model.first(x))  # within a block, before any whole forward
        return F.cross_entropy(model.last(model.encode(x)), y) + inner.square().mean()

    train(note, model, optimizer, loader, loss_of)


class Experts(nn.Module):
    """Which expert runs depends on the samples, so some ranks have no gradient for some; one never runs."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(5, 5)) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = x
        for expert, chosen in zip(self.experts, (x[:, 0] > 0.5, x[:, 0] <= 0.5), strict=False):
            if chosen.any():
                out = out.index_add(0, chosen.nonzero()[:, 0], expert(x[chosen]))
        return out


@case
def experts_without_samples_on_some_ranks(note: Note) -> None:
    model = nn.Sequential(nn.Linear(6, 5), nn.ModuleList([Experts(), Experts()])[0], Experts(), nn.Linear(5, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.5)
    loader = start(model, optimizer)
    train(note, model, optimizer, loader)
    assert model[1].experts[2][0].weight.grad is None


@case
def one_block_run_many_times(note: Note) -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(6, 5), nn.Linear(5, 3)
            self.blocks = nn.ModuleList([Block(), Block()])
            self.blocks.append(self.blocks[0])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.first(x)
            for block in self.blocks:
                x = block(block(x))
            return self.last(x)

    model = Recurrent()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train(note, model, optimizer, start(model, optimizer))


@case
def weights_tied_across_blocks(note: Note) -> None:
    model = Net()
    model.blocks[2].up.weight = model.blocks[0].up.weight
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    train(note, model, optimizer, start(model, optimizer), clip=0.3)
    assert model.blocks[2].up.weight is model.blocks[0].up.weight


@case
def recomputed_blocks(note: Note) -> None:
    class Recomputed(Net):
        def encode(self, x: torch.Tensor) -> torch.Tensor:
            x = checkpoint(self.first, x, use_reentrant=False)
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=False)
            return x

    model = Recomputed()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train(note, model, optimizer, start(model, optimizer))


@case
def recurrent_attending_and_normalised_weights(note: Note) -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = nn.LSTM(3, 4, batch_first=True)
            self.layers = nn.TransformerEncoder(
                nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True), 2, enable_nested_tensor=False
            )
            self.last = parametrizations.weight_norm(nn.Linear(4, 3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(self.layers(self.rnn(x.view(len(x), 2, 3))[0]).mean(1))

    model = Mixed()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train(note, model, optimizer, start(model, optimizer))


@case
def a_frozen_trunk_thawed_later(note: Note) -> None:
    model = Net()
    model.first.requires_grad_(False)
    model.blocks.requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    loader = start(model, optimizer)
    train(note, model, optimizer, loader, label="frozen ")
    model.blocks.requires_grad_(True)
    train(note, model, optimizer, loader, label="thawed ")


@case
def one_chunk_of_rows_and_none(note: Note) -> None:
    """Parameters of one row: all ranks but the first have none of it."""
    model = nn.Sequential(nn.Linear(6, 1), nn.Tanh(), nn.Linear(1, 3, bias=False))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    train(note, model, optimizer, start(model, optimizer), clip=0.1)


@case
def each_rank_holds_its_part_alone(note: Note) -> None:
    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(6, 64)
            self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(64, 256), nn.Linear(256, 64)) for _ in range(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.first(x)
            for block in self.blocks:
                x = block(x).tanh()
            return x

    model = Wide()
    whole = 3 * sum(p.nbytes for p in model.parameters())  # parameters and Adam's two moments
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    loader = start(model, optimizer)
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    optimizer.zero_grad()
    model(x)
    gc.collect()
    everything = [t for t in gc.get_objects() if issubclass(type(t), torch.Tensor) and type(t).__name__ != "DTensor"]
    held = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in everything}
    parts = plan_asked_for("sharded").shards_on(nl.world_size())
    assert sum(held.values()) < 1.15 * whole / parts + 50_000, f"{sum(held.values())} bytes of {whole}"
    note("whole", float(whole))
