"""Training loops with one difficulty each; each must leave N processes with the numbers of one.

A case is a function of ``note(name, value)``: it trains and notes what must agree. Values are those of the whole batch
(``nl.mean``, ``p.grad``, parameters), so that the same code runs on one process and on many.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    Sampler,
    TensorDataset,
    WeightedRandomSampler,
)

import nearlinear as nl

Note = Callable[[str, Any], None]
CASES: dict[str, Callable[[Note], None]] = {}


def case(fn: Callable[[Note], None]) -> Callable[[Note], None]:
    CASES[fn.__name__] = fn
    return fn


def mlp(inputs: int = 6, outputs: int = 3) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, 12), nn.Tanh(), nn.Linear(12, 8), nn.Tanh(), nn.Linear(8, outputs))


def data(samples: int = 37, inputs: int = 6, classes: int = 3) -> TensorDataset:
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(samples, inputs, generator=generator)
    return TensorDataset(x, torch.randint(0, classes, (samples,), generator=generator))


def state(note: Note, model: nn.Module, label: str = "") -> None:
    for name, parameter in model.named_parameters():
        note(f"{label}parameter {name}", parameter.detach())


def gradients(note: Note, model: nn.Module, label: str = "") -> None:
    for name, parameter in model.named_parameters():
        note(f"{label}gradient {name}", torch.zeros(()) if parameter.grad is None else parameter.grad)


def train(
    note: Note,
    model: nn.Module,
    optimizer: Any,
    loader: Any,
    *,
    epochs: int = 2,
    loss_of: Callable[[nn.Module, Any], torch.Tensor] | None = None,
    clip: float | None = None,
    scheduler: Any = None,
    set_to_none: bool = True,
) -> None:
    """The plain loop."""
    loss_of = loss_of or (lambda m, batch: F.cross_entropy(m(batch[0]), batch[1]))
    step = 0
    for _ in range(epochs):
        for batch in loader:
            optimizer.zero_grad(set_to_none=set_to_none)
            loss = loss_of(model, batch)
            loss.backward()
            note(f"{step} loss", nl.mean(loss))
            gradients(note, model, f"{step} ")
            if clip is not None:
                note(f"{step} norm", nn.utils.clip_grad_norm_(model.parameters(), clip))
            optimizer.step()
            if scheduler is not None:
                scheduler.step()
            step += 1
    note("steps", float(step))
    state(note, model)


# ---- the loop and the optimizer


@case
def last_batch_does_not_divide(note: Note) -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
    loader = DataLoader(data(), batch_size=8, shuffle=True)
    length = len(loader)
    model, optimizer, loader = nl.distribute(model, optimizer, loader)
    assert len(loader) == length
    train(note, model, optimizer, loader, clip=0.3, scheduler=scheduler)


@case
def last_batch_smaller_than_the_ranks(note: Note) -> None:
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    loader = DataLoader(data(33), batch_size=8)
    model, optimizer, loader = nl.distribute(model, optimizer, loader)
    train(note, model, optimizer, loader)


@case
def adam_with_cosine_schedule(note: Note) -> None:
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    loader = DataLoader(data(), batch_size=8, shuffle=True, drop_last=True)
    model, optimizer, loader = nl.distribute(model, optimizer, loader)
    train(note, model, optimizer, loader, scheduler=scheduler)


@case
def gradient_accumulation(note: Note) -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loader = DataLoader(data(61), batch_size=6, shuffle=True)
    model, optimizer, loader = nl.distribute(model, optimizer, loader)
    for epoch in range(3):
        for i, (x, y) in enumerate(loader, 1):
            (F.cross_entropy(model(x), y) / 4).backward()
            if i % 4 == 0 or i == len(loader):
                gradients(note, model, f"{epoch} {i} ")
                note(f"{epoch} {i} norm", nn.utils.clip_grad_norm_(model.parameters(), 0.2))
                optimizer.step()
                optimizer.zero_grad()
    state(note, model)


@case
def accumulation_windows_of_changing_length(note: Note) -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(data(60), batch_size=4)
    model, optimizer, loader = nl.distribute(model, optimizer, loader)
    ends = {1, 2, 5, 6, 10, 14, 15}
    for epoch in range(2):
        for i, (x, y) in enumerate(loader, 1):
            F.cross_entropy(model(x), y).backward()
            if i in ends:
                note(f"{epoch} {i} norm", nn.utils.clip_grad_norm_(model.parameters(), 0.2))
                optimizer.step()
                optimizer.zero_grad()
    state(note, model)


@case
def gradients_read_within_a_window(note: Note) -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(data(48), batch_size=6)
    model, optimizer, loader = nl.distribute(model, optimizer, loader)
    for i, (x, y) in enumerate(itertools.chain(loader, loader), 1):
        F.cross_entropy(model(x), y).backward()
        if i > 8:
            gradients(note, model, f"{i} ")
        if i % 4 == 0:
            optimizer.step()
            optimizer.zero_grad()
    state(note, model)


@case
def zero_grad_in_place(note: Note) -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loader = DataLoader(data(), batch_size=8, shuffle=True)
    model, optimizer, loader = nl.distribute(model, optimizer, loader)
    train(note, model, optimizer, loader, set_to_none=False)


@case
def gradients_never_zeroed(note: Note) -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = DataLoader(data(), batch_size=8)
    model, optimizer, loader = nl.distribute(model, optimizer, loader)
    for i, (x, y) in enumerate(loader):
        F.cross_entropy(model(x), y).backward()
        gradients(note, model, f"{i} ")
        optimizer.step()
    state(note, model)


class Wide(nn.Module):
    """Weights of 0.4 MB and more: each is a message of its own, summed where it lies."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(6, 8000), nn.Linear(8000, 8), nn.Linear(8, 3)
        self.rare, self.never = nn.Linear(6, 8000, bias=False), nn.Linear(6, 8000, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.first(x))
        chosen = x[:, 0] > 0.9
        if chosen.any():
            hidden = hidden.index_add(0, chosen.nonzero()[:, 0], self.rare(x[chosen]))
        return self.last(torch.tanh(self.second(hidden)))


@case
def large_gradients_summed_in_place(note: Note) -> None:
    model = Wide()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.5)
    loader = DataLoader(data(49), batch_size=4)
    model, optimizer, loader = nl.distribute(model, optimizer, loader)
    for i, (x, y) in enumerate(itertools.chain(loader, loader), 1):
        F.cross_entropy(model(x), y).backward()
        if i % 3 == 0:
            gradients(note, model, f"{i} ")
            optimizer.step()
            optimizer.zero_grad(set_to_none=i % 2 == 0)
    state(note, model)


@case
def gradients_kept_by_the_script(note: Note) -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(data(), batch_size=8)
    model, optimizer, loader = nl.distribute(model, optimizer, loader)
    kept = []
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        kept.append([p.grad for p in model.parameters()])
        optimizer.step()
    for i, each in enumerate(kept):
        for j, gradient in enumerate(each):
            note(f"{i} {j}", gradient)


@case
def flat_gradient_buffer_of_the_script(note: Note) -> None:
    model = mlp()
    flat = torch.zeros(sum(p.numel() for p in model.parameters()))
    offset = 0
    for p in model.parameters():
        p.grad = flat[offset : offset + p.numel()].view_as(p)
        offset += p.numel()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(data(), batch_size=8)
    model, optimizer, loader = nl.distribute(model, optimizer, loader)
    for i, (x, y) in enumerate(loader):
        flat.zero_()
        F.cross_entropy(model(x), y).backward()
        note(f"{i} flat", flat)
        optimizer.step()
    state(note, model)


@case
def two_forwards_before_one_backward(note: Note) -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(data(), batch_size=8, shuffle=True)
    model, optimizer, loader = nl.distribute(model, optimizer, loader)

    def loss_of(m: nn.Module, batch: Any) -> torch.Tensor:
        first, second = m(batch[0]), m(batch[0] * 2)
        return F.cross_entropy(first, batch[1]) + F.mse_loss(first, second)

    train(note, model, optimizer, loader, loss_of=loss_of)


@case
def two_backwards_on_one_batch(note: Note) -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(data(), batch_size=8)
    model, optimizer, loader = nl.distribute(model, optimizer, loader)
    for i, (x, y) in enumerate(itertools.chain(loader, loader)):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        model(x).square().mean().backward()
        gradients(note, model, f"{i} ")
        optimizer.step()
    state(note, model)


@case
def sharpness_aware_minimisation(note: Note) -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(data(), batch_size=8)
    model, optimizer, loader = nl.distribute(model, optimizer, loader)
    for i, (x, y) in enumerate(itertools.chain(loader, loader)):
        F.cross_entropy(model(x), y).backward()
        moves = [0.05 * p.grad for p in model.parameters()]
        with torch.no_grad():
            for p, move in zip(model.parameters(), moves, strict=True):
                p.add_(move)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        with torch.no_grad():
            for p, move in zip(model.parameters(), moves, strict=True):
                p.sub_(move)
        gradients(note, model, f"{i} ")
        optimizer.step()
        optimizer.zero_grad()
    state(note, model)


@case
def lbfgs_with_line_search(note: Note) -> None:
    model = mlp()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4, line_search_fn="strong_wolfe")
    loader = DataLoader(data(), batch_size=16)
    model, optimizer, loader = nl.distribute(model, optimizer, loader)
    for i, (x, y) in enumerate(loader):

        def closure(x: Any = x, y: Any = y) -> torch.Tensor:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            return loss

        note(f"{i} loss", nl.mean(optimizer.step(closure)))
    state(note, model)


@case
def optimizer_made_by_hand(note: Note) -> None:
    model = mlp()
    loader = DataLoader(data(), batch_size=8)
    model, loader = nl.distribute(model, None, loader)
    for i, (x, y) in enumerate(loader):
        model.zero_grad()
        F.cross_entropy(model(x), y).backward()
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.1 * p.grad
        gradients(note, model, f"{i} ")
    state(note, model)


@case
def optimizer_steps_before_the_first_backward(note: Note) -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.1)
    loader = DataLoader(data(), batch_size=8)
    model, optimizer, loader = nl.distribute(model, optimizer, loader)
    optimizer.step()
    train(note, model, optimizer, loader, epochs=1)


@case
def grad_scaler_that_skips_a_step(note: Note) -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(data(40), batch_size=8)
    model, optimizer, loader = nl.distribute(model, optimizer, loader)
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0, growth_interval=2)
    for i, (x, y) in enumerate(itertools.chain(loader, loader)):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        if i == 3:  # overflows on the last rank alone
            loss = loss + (float("inf") if nl.rank() == nl.world_size() - 1 else 0.0) * model(x).sum()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        note(f"{i} norm", nn.utils.clip_grad_norm_(model.parameters(), 0.3) if i != 3 else torch.zeros(()))
        scaler.step(optimizer)
        scaler.update()
        note(f"{i} scale", scaler.get_scale())
    state(note, model)


@case
def gradient_penalty(note: Note) -> None:
    model = mlp(outputs=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    loader = DataLoader(data(), batch_size=8)
    model, optimizer, loader = nl.distribute(model, optimizer, loader)

    def loss_of(m: nn.Module, batch: Any) -> torch.Tensor:
        x = batch[0].clone().requires_grad_(True)
        out = m(x)
        (gradient,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        per_parameter = torch.autograd.grad(out.mean(), list(m.parameters()), retain_graph=True)
        assert all(g is not None for g in per_parameter)
        return out.mean() + (gradient.norm(dim=1) - 1).square().mean()

    train(note, model, optimizer, loader, loss_of=loss_of)


# ---- the model


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.never = nn.Linear(6, 3)
        self.first, self.second = nn.Linear(6, 3), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = x.new_zeros(len(x), 3)
        for layer, chosen in ((self.first, x[:, 0] > 0.9), (self.second, x[:, 0] <= 0.9)):
            if chosen.any():  # on some ranks no sample comes this way
                out = out.index_put((chosen.nonzero()[:, 0],), layer(x[chosen]))
        return out


@case
def unused_and_sometimes_used_parameters(note: Note) -> None:
    model = Branches()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.5)
    loader = DataLoader(data(), batch_size=4)
    model, optimizer, loader = nl.distribute(model, optimizer, loader)
    train(note, model, optimizer, loader)
    assert model.never.weight.grad is None


@case
def parameters_frozen_and_thawed(note: Note) -> None:
    model = mlp()
    model[0].requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loader = DataLoader(data(), batch_size=8)
    model, optimizer, loader = nl.distribute(model, optimizer, loader)
    for epoch in range(4):
        model[0].requires_grad_(epoch % 2 == 1)
        for i, (x, y) in enumerate(loader):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            gradients(note, model, f"{epoch} {i} ")
            optimizer.step()
    state(note, model)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 5)
        self.body = nn.Linear(5, 5)
        self.head = nn.Linear(5, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.body(self.embedding(x))))


def tokens(samples: int = 26, length: int = 7) -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    x = torch.randint(0, 11, (samples, length), generator=generator)
    y = torch.randint(0, 11, (samples, length), generator=generator)
    keep = torch.rand(samples, length, generator=generator) < torch.linspace(0, 1, samples)[:, None]
    y[~keep] = -100
    y[4:6] = -100
    return TensorDataset(x, y)


def token_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten(), ignore_index=-100)


@case
def tied_weights_and_a_mean_over_tokens(note: Note) -> None:
    model = Tied()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    loader = DataLoader(tokens(), batch_size=6, shuffle=True)
    model, optimizer, loader = nl.distribute(model, optimizer, loader, weight=lambda batch: (batch[1] != -100).sum())
    train(note, model, optimizer, loader, loss_of=token_loss)


@case
def accumulation_of_means_over_tokens(note: Note) -> None:
    model = Tied()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(tokens(), batch_size=4, shuffle=True)
    model, optimizer, loader = nl.distribute(model, optimizer, loader, weight=lambda batch: (batch[1] != -100).sum())
    for epoch in range(2):
        for i, batch in enumerate(loader, 1):
            if (nl.total((batch[1] != -100).sum())) > 0:
                token_loss(model, batch).backward()
            if i % 3 == 0:
                gradients(note, model, f"{epoch} {i} ")
                optimizer.step()
                optimizer.zero_grad()
    state(note, model)


@case
def a_sum_normalised_by_global_counts(note: Note) -> None:
    model = Tied()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(tokens(25), batch_size=6)
    model, optimizer, loader = nl.distribute(model, optimizer, loader, weight="sum")
    for i, (x, y) in enumerate(itertools.chain(loader, loader)):
        count = nl.total((y != -100).sum())
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten(), ignore_index=-100, reduction="sum")
        (loss / count.clamp(min=1)).backward()
        gradients(note, model, f"{i} ")
        note(f"{i} loss", nl.total(loss))
        optimizer.step()
        optimizer.zero_grad()
    state(note, model)


@case
def sparse_gradients(note: Note) -> None:
    class Bag(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(11, 5, sparse=True)
            self.head = nn.Linear(5, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.embedding(x).mean(1))

    generator = torch.Generator().manual_seed(3)
    pairs = TensorDataset(
        torch.randint(0, 11, (26, 4), generator=generator), torch.randint(0, 3, (26,), generator=generator)
    )
    model = Bag()
    dense = torch.optim.SGD(model.head.parameters(), lr=0.1)
    sparse = torch.optim.SparseAdam(list(model.embedding.parameters()), lr=0.01)
    loader = DataLoader(pairs, batch_size=7, shuffle=True)
    model, dense, loader = nl.distribute(model, dense, loader)
    nl.distribute(model, sparse)
    for i, (x, y) in enumerate(itertools.chain(loader, loader)):
        dense.zero_grad()
        sparse.zero_grad()
        F.cross_entropy(model(x), y).backward()
        note(f"{i} sparse", model.embedding.weight.grad.to_dense())
        dense.step()
        sparse.step()
    state(note, model)


@case
def complex_parameters(note: Note) -> None:
    class Waves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.phase = nn.Parameter(torch.randn(6, dtype=torch.complex128))
            self.head = nn.Linear(6, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head((x * self.phase).abs())

    model = Waves()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loader = DataLoader(data(), batch_size=8)
    model, optimizer, loader = nl.distribute(model, optimizer, loader)
    train(note, model, optimizer, loader)


@case
def submodules_and_methods_called_directly(note: Note) -> None:
    class Parts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.decoder = nn.Linear(6, 4), nn.Linear(4, 3)

        def encode(self, x: torch.Tensor) -> torch.Tensor:
            return torch.tanh(self.encoder(x))

    model = Parts()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(data(), batch_size=8)
    model, optimizer, loader = nl.distribute(model, optimizer, loader)

    def loss_of(m: nn.Module, batch: Any) -> torch.Tensor:
        return F.cross_entropy(m.decoder(m.encode(batch[0])), batch[1]) + m.encoder(batch[0]).square().mean()

    train(note, model, optimizer, loader, loss_of=loss_of)


@case
def compiled_model(note: Note) -> None:
    model = torch.compile(mlp(), backend="aot_eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(data(), batch_size=8)
    model, optimizer, loader = nl.distribute(model, optimizer, loader)
    train(note, model, optimizer, loader)


@case
def reentrant_activation_checkpoints(note: Note) -> None:
    class Blocks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.shared, self.last = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.first(x)
            for _ in range(2):
                x = checkpoint(lambda v: torch.tanh(self.shared(v)), x, use_reentrant=True)
            return self.last(x)

    model = Blocks()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(data(), batch_size=8)
    model, optimizer, loader = nl.distribute(model, optimizer, loader)
    train(note, model, optimizer, loader)


@case
def synchronised_batch_norm(note: Note) -> None:
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3))
    model.append(nn.BatchNorm1d(3, momentum=None))
    model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    images = TensorDataset(data().tensors[0].repeat(1, 6).view(37, 1, 6, 6), data().tensors[1])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(images, batch_size=8, shuffle=True)
    model, optimizer, loader = nl.distribute(model, optimizer, loader)
    train(note, model, optimizer, loader)
    for name, buffer in model.named_buffers():
        note(f"buffer {name}", buffer)
    model.eval()
    note("eval", model(images.tensors[0]))


@case
def channels_last_convolutions(note: Note) -> None:
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 2), nn.Flatten(), nn.Linear(4, 3))
    model = model.to(memory_format=torch.channels_last)
    images = TensorDataset(torch.cat([data().tensors[0]] * 6, 1)[:, :32].view(37, 2, 4, 4), data().tensors[1])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(images, batch_size=8)
    model, optimizer, loader = nl.distribute(model, optimizer, loader)
    train(note, model, optimizer, loader)
    assert model[0].weight.grad is None or model[0].weight.grad.stride() == model[0].weight.stride()


@case
def buffers_that_training_changes(note: Note) -> None:
    class Average(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(6, 3)
            self.register_buffer("centre", torch.ones(6) / 3)
            self.register_buffer("fixed", torch.ones(6) / 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out = self.head(x - self.centre)
            with torch.no_grad():
                self.centre = 0.9 * self.centre + 0.1 * x.mean(0)
            return out * self.fixed[0]

    model = Average()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(data(), batch_size=8)
    model, optimizer, loader = nl.distribute(model, optimizer, loader)
    train(note, model, optimizer, loader)
    note("centre", model.centre)
    assert torch.equal(model.fixed, torch.ones(6) / 3)


@case
def a_parameter_outside_the_model(note: Note) -> None:
    model, temperature = mlp(), nn.Parameter(torch.tensor(0.5))
    optimizer = torch.optim.SGD([{"params": model.parameters()}, {"params": [temperature], "lr": 0.01}], lr=0.1)
    loader = DataLoader(data(), batch_size=8)
    model, optimizer, loader = nl.distribute(model, optimizer, loader)
    train(
        note,
        model,
        optimizer,
        loader,
        loss_of=lambda m, batch: F.cross_entropy(m(batch[0]) * temperature.exp(), batch[1]),
    )
    note("temperature", temperature)


@case
def adversarial_pair(note: Note) -> None:
    generator, judge = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 6)), mlp(outputs=1)
    g_step = torch.optim.Adam(generator.parameters(), lr=0.01, betas=(0.5, 0.999))
    j_step = torch.optim.Adam(judge.parameters(), lr=0.01, betas=(0.5, 0.999))
    loader = DataLoader(data(), batch_size=8, shuffle=True)
    generator, g_step, loader = nl.distribute(generator, g_step, loader)
    judge, j_step = nl.distribute(judge, j_step)
    for i, (real, _) in enumerate(itertools.chain(loader, loader)):
        ones, zeros = torch.ones(len(real), 1), torch.zeros(len(real), 1)
        noise = real[:, :2].sin()  # stands for draws that one and N processes share
        j_step.zero_grad()
        F.binary_cross_entropy_with_logits(judge(real), ones).backward()
        F.binary_cross_entropy_with_logits(judge(generator(noise).detach()), zeros).backward()
        gradients(note, judge, f"{i} judge ")
        j_step.step()
        g_step.zero_grad()
        F.binary_cross_entropy_with_logits(judge(generator(noise)), ones).backward()
        gradients(note, generator, f"{i} generator ")
        g_step.step()
    state(note, generator, "generator ")
    state(note, judge, "judge ")


@case
def contrastive_loss_over_the_gathered_batch(note: Note) -> None:
    model = mlp(outputs=4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(data(33), batch_size=8)
    model, optimizer, loader = nl.distribute(model, optimizer, loader)

    def loss_of(m: nn.Module, batch: Any) -> torch.Tensor:
        x = batch[0]
        first, second = nl.gather(F.normalize(m(x), dim=1)), nl.gather(F.normalize(m(x + 0.1), dim=1))
        return F.cross_entropy(first @ second.T, torch.arange(len(first)))

    train(note, model, optimizer, loader, loss_of=loss_of)


@case
def copies_of_the_model_are_plain(note: Note) -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(data(), batch_size=8)
    keys = list(model.state_dict())
    model, optimizer, loader = nl.distribute(model, optimizer, loader)
    average = copy.deepcopy(model)
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        with torch.no_grad():
            for slow, fast in zip(average.parameters(), model.parameters(), strict=True):
                slow.lerp_(fast, 0.1)
    average(torch.ones(1, 6)).sum().backward()  # exchanges nothing
    assert list(model.state_dict()) == keys
    state(note, average)


# ---- the data


class Scans(Dataset[dict[str, Any]]):
    def __len__(self) -> int:
        return 37

    def __getitem__(self, index: int) -> dict[str, Any]:
        x, y = data()[index]
        return {"x": x, "y": y, "name": f"scan {index}", "pair": (x * 2, [x, x + 1])}


@case
def batches_that_are_dicts_read_by_workers(note: Note) -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(Scans(), batch_size=8, shuffle=True, num_workers=2, persistent_workers=True)
    model, optimizer, loader = nl.distribute(model, optimizer, loader)
    train(note, model, optimizer, loader, loss_of=lambda m, b: F.cross_entropy(m(b["pair"][1][1]), b["y"]))


@dataclasses.dataclass
class Sample:
    x: torch.Tensor
    y: torch.Tensor
    scale: torch.Tensor
    label: str = "some"


@case
def ready_made_batches_that_are_dataclasses(note: Note) -> None:
    whole = data().tensors
    batches = [Sample(x, y, torch.tensor(2.0)) for x, y in zip(whole[0].split(8), whole[1].split(8), strict=True)]
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(batches, batch_size=None, shuffle=True)
    model, optimizer, loader = nl.distribute(model, optimizer, loader)
    train(note, model, optimizer, loader, loss_of=lambda m, b: F.cross_entropy(m(b.x) * b.scale, b.y))


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        whole = data()
        order = list(range(len(whole)))
        random.shuffle(order)  # draws from the global stream
        for i in order:
            if torch.rand(()) < 0.9 and np.random.rand() < 0.95:
                yield whole[i]


@case
def a_stream_that_draws_from_the_global_generators(note: Note) -> None:
    model = nn.Sequential(mlp(), nn.Dropout(0.0))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(Stream(), batch_size=8)
    model, optimizer, loader = nl.distribute(model, optimizer, loader)
    torch.rand(nl.rank() + 1)  # other draws of the script do not matter
    train(note, model, optimizer, loader, epochs=3)


class Counting(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        info = torch.utils.data.get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        yield from (data()[i] for i in range(first, 37, step))


@case
def a_stream_read_by_workers(note: Note) -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(Counting(), batch_size=8, num_workers=2)
    model, optimizer, loader = nl.distribute(model, optimizer, loader)
    train(note, model, optimizer, loader)


@case
def a_stream_of_ready_made_batches(note: Note) -> None:
    class Ready(IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            whole = data().tensors
            yield from zip(whole[0].split(8), whole[1].split(8), strict=True)

    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(Ready(), batch_size=None)
    model, optimizer, loader = nl.distribute(model, optimizer, loader)
    train(note, model, optimizer, loader)


class Shuffled(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        yield from torch.randperm(20).tolist()
        yield from random.sample(range(20, 37), 13)

    def __len__(self) -> int:
        return 33


@case
def samplers_of_every_kind(note: Note) -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loaders = [
        DataLoader(data(), batch_size=8, sampler=WeightedRandomSampler([1.0, 2.0] * 18 + [1.0], 30)),
        DataLoader(data(), batch_size=5, sampler=Shuffled()),
        DataLoader(data(), batch_sampler=[[0, 1, 2], [3, 4, 5, 6, 7], [8], [9, 10, 11, 12]]),
        DataLoader(data(), batch_size=7, shuffle=True, generator=torch.Generator().manual_seed(5)),
    ]
    model, optimizer, *loaders = nl.distribute(model, optimizer, *loaders)
    for number, loader in enumerate(loaders):
        train(lambda name, value, n=number: note(f"{n} {name}", value), model, optimizer, loader)


@case
def shuffling_is_new_in_each_epoch(note: Note) -> None:
    model = mlp()
    loader = DataLoader(TensorDataset(torch.arange(20.0)), batch_size=6, shuffle=True)
    model, loader = nl.distribute(model, None, loader)
    orders = []
    for _ in range(3):
        seen = []
        for (x,) in loader:
            torch.rand(3)
            seen.append(nl.gather(x))
        orders.append(torch.cat(seen))
        assert sorted(orders[-1].tolist()) == list(range(20))
    assert not torch.equal(orders[0], orders[1])
    note("orders", torch.stack(orders))


@case
def evaluation_within_training(note: Note) -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(data(), batch_size=8, shuffle=True)
    held_out = DataLoader(data(21), batch_size=5)
    model, optimizer, loader, held_out = nl.distribute(model, optimizer, loader, held_out)
    for i, (x, y) in enumerate(loader):
        predicted, right, seen = [], 0.0, 0.0
        for u, v in held_out:  # not under no_grad: what it fetches must not weigh the training batch
            out = model(u).argmax(1)
            predicted.append(out)
            correct = nl.gather(out == v)
            right, seen = right + float(correct.sum()), seen + len(correct)
        note(f"{i} predictions", nl.gather(torch.cat(predicted)))
        note(f"{i} accuracy", right / seen)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        gradients(note, model, f"{i} ")
        optimizer.step()
    assert seen == 21
    state(note, model)


@case
def evaluation_broken_off_within_training(note: Note) -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(data(33), batch_size=8, shuffle=True)
    held_out = DataLoader(data(21), batch_size=5)
    model, optimizer, loader, held_out = nl.distribute(model, optimizer, loader, held_out)
    next(iter(loader))  # a look at the shapes
    for i, (x, y) in enumerate(loader):
        for u, _ in held_out:
            model(u)
            break
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        with torch.no_grad():
            for u, _ in held_out:
                model(u)
        note(f"{i} loss", nl.mean(loss))
        gradients(note, model, f"{i} ")
        optimizer.step()
    note("last loss", nl.mean(loss))
    state(note, model)


@case
def gradients_put_in_place_by_the_script(note: Note) -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(data(33), batch_size=8)
    model, optimizer, loader = nl.distribute(model, optimizer, loader)
    for i, (x, y) in enumerate(itertools.chain(loader, loader)):
        optimizer.zero_grad()
        if i % 3 == 0:
            F.cross_entropy(model(x), y).backward()
        else:
            found = torch.autograd.grad(F.cross_entropy(model(x), y), list(model.parameters()))
            for p, gradient in zip(model.parameters(), found, strict=True):
                p.grad = gradient
        optimizer.step()
        gradients(note, model, f"{i} ")
    state(note, model)


@case
def batch_norm_synchronised_around_an_evaluation(note: Note) -> None:
    model = nn.Sequential(nn.Linear(6, 5), nn.SyncBatchNorm(5), nn.Tanh(), nn.Linear(5, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader, held_out = DataLoader(data(40), batch_size=8), DataLoader(data(5), batch_size=2)
    model, optimizer, loader, held_out = nl.distribute(model, optimizer, loader, held_out)
    for i, (x, y) in enumerate(loader):
        model.eval()
        with torch.no_grad():
            for u, _ in held_out:
                model(u)
        model.train()
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        gradients(note, model, f"{i} ")
        optimizer.step()
    state(note, model)


@case
def line_search_over_a_sum(note: Note) -> None:
    model = mlp()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3, line_search_fn="strong_wolfe")
    loader = DataLoader(data(33), batch_size=16)
    model, optimizer, loader = nl.distribute(model, optimizer, loader, weight="sum")
    for i, (x, y) in enumerate(loader):
        count = nl.total(len(x))

        def closure(x: Any = x, y: Any = y, count: int = count) -> torch.Tensor:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y, reduction="sum") / count
            loss.backward()
            return loss

        note(f"{i} loss", optimizer.step(closure))
    state(note, model)


@case
def passes_over_one_loader_at_once(note: Note) -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(data(37), batch_size=8, num_workers=2, persistent_workers=True)
    seen = sum(len(x) for x, _ in loader)  # before distribute: its workers persist
    model, optimizer, loader = nl.distribute(model, optimizer, loader)
    plain = DataLoader(data(37), batch_size=8)
    plain = nl.distribute(nn.Linear(1, 1), None, plain)[1]
    for i, ((x, y), (u, v)) in enumerate(zip(plain, plain, strict=True)):
        optimizer.zero_grad()
        (F.cross_entropy(model(x), y) + F.cross_entropy(model(u), v)).backward()
        gradients(note, model, f"{i} ")
        optimizer.step()
    train(note, model, optimizer, loader)
    note("seen", seen)


@case
def totals_of_dicts_filled_in_any_order(note: Note) -> None:
    model = mlp()
    loader = DataLoader(data(36), batch_size=12)
    model, loader = nl.distribute(model, None, loader)
    for i, (_, y) in enumerate(loader):
        counts = {int(c): int((y == c).sum()) for c in sorted(range(3), key=lambda c: (c + nl.rank()) % 3)}
        summed = nl.total(counts)
        for c in range(3):
            note(f"{i} {c}", summed[c])


@case
def means_and_totals_of_nested_values(note: Note) -> None:
    model = mlp()
    loader = DataLoader(data(35), batch_size=8)
    model, loader = nl.distribute(model, None, loader)
    for i, (x, y) in enumerate(loader):
        result = nl.mean({"a": x.mean(), "b": [float(y.double().mean()), x.mean(0)]})
        note(f"{i} a", result["a"])
        note(f"{i} b", result["b"][0])
        note(f"{i} c", result["b"][1])
        counts = nl.total({"n": (y == 1).sum()})
        note(f"{i} n", counts["n"])
        assert counts["n"].dtype == torch.int64
