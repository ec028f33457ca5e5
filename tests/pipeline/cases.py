"""Models and loops with one difficulty each; a pipeline must leave them with the numbers of one process.

A case is a function of ``note(name, value)``: it trains and notes what must agree. ``train`` goes through all numbers of
microbatches, with SGD first and Adam then. A ``@case`` holds under data x pipeline too; a ``@whole`` one only where one
pipeline sees the whole batch, because its loss is no mean over samples.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import nearlinear as nl
from nearlinear.torch.session import derived_seed

Note = Callable[[str, Any], None]
CASES: dict[str, Callable[[Note], None]] = {}
MICROBATCHES = (4, 1, 2, 5)
STEPS = 5  # with each optimizer and number of microbatches

plan = nl.Plan("pipeline")  # the driver says how many stages


def case(fn: Callable[[Note], None]) -> Callable[[Note], None]:
    CASES[fn.__name__] = fn
    return fn


whole = case


# ---- what the cases share


def sgd(model: nn.Module, lr: float = 0.05) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)


def adam(model: nn.Module, lr: float = 0.005) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=lr)


def distribute(model: nn.Module, optimizer: torch.optim.Optimizer | None, *loaders: Any, count: int = 4, **more: Any) -> Any:
    return nl.distribute(
        model, optimizer, *loaders, strategy=dataclasses.replace(plan, microbatches=count), **more
    )


def use_microbatches(model: nn.Module, count: int) -> None:
    """Cut the batches of the next calls into so many microbatches, as another ``Plan`` would from the start."""
    pipeline = getattr(model.forward, "_pipeline", None)
    if pipeline is not None:
        pipeline.plan = dataclasses.replace(pipeline.plan, microbatches=count)


def loader_of(*tensors: torch.Tensor, batch_size: int = 10, shuffle: bool = False) -> DataLoader[Any]:
    return DataLoader(TensorDataset(*tensors), batch_size=batch_size, shuffle=shuffle)


def rows(samples: int = 37, *shape: int, seed: int = 7) -> torch.Tensor:
    return torch.randn(samples, *(shape or (6,)), generator=torch.Generator().manual_seed(seed))


def labels(samples: int = 37, *shape: int, classes: int = 3, seed: int = 8) -> torch.Tensor:
    return torch.randint(0, classes, (samples, *shape), generator=torch.Generator().manual_seed(seed))


def gradients(note: Note, model: nn.Module, label: str) -> None:
    for name, parameter in model.named_parameters():
        note(f"{label} gradient/{name}", torch.empty(0) if parameter.grad is None else parameter.grad)


def state(note: Note, model: nn.Module, label: str) -> None:
    for name, parameter in model.named_parameters():
        note(f"{label} parameter/{name}", parameter.detach())
    for name, buffer in model.named_buffers():
        note(f"{label} buffer/{name}", buffer)


def endless(loader: Iterable[Any]) -> Iterator[Any]:
    while True:
        yield from loader


Loss = Callable[[nn.Module, Any], torch.Tensor]


def cross_entropy(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def its_own(model: nn.Module, batch: Any) -> torch.Tensor:
    """Return the loss that the model itself computes."""
    found = model(*batch)
    assert isinstance(found, torch.Tensor)
    return found


def train(
    note: Note,
    model: nn.Module,
    loader: Any,
    loss_of: Loss = cross_entropy,
    *,
    counts: Sequence[int] = MICROBATCHES,
    optimizers: Sequence[Callable[[nn.Module], torch.optim.Optimizer]] = (sgd, adam),
    steps: int = STEPS,
    **more: Any,
) -> None:
    """Distribute and run the plain loop: each optimizer with each number of microbatches."""
    first, *others = (make(model) for make in optimizers)
    model, first, loader = distribute(model, first, loader, **more)
    others = [distribute(model, other)[1] for other in others]
    batches = endless(loader)
    for number, optimizer in enumerate((first, *others)):
        for count in counts:
            use_microbatches(model, count)
            for step in range(steps):
                label = f"{type(optimizer).__name__} {count} microbatches step {step}"
                optimizer.zero_grad()
                loss = loss_of(model, next(batches))
                loss.backward()
                note(f"{label} loss", nl.mean(loss))
                gradients(note, model, label)
                optimizer.step()
        state(note, model, f"optimizer {number}")


# ---- models


class Skips(nn.Module):
    """Every block reads the first one's output too, and the head the input."""

    def __init__(self, inputs: int = 6, width: int = 12, outputs: int = 3, depth: int = 4) -> None:
        super().__init__()
        self.first = nn.Linear(inputs, width)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(depth))
        self.head = nn.Linear(width + inputs, outputs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = start = self.first(x)
        for block in self.blocks:
            hidden = hidden + block(hidden) * torch.sigmoid(start)
        return self.head(torch.cat([hidden, x], 1))


class Seq2Seq(nn.Module):
    """One embedding reads the source, reads the target and writes the output."""

    def __init__(self, words: int = 13, width: int = 8) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        options: dict[str, Any] = {"dim_feedforward": 16, "dropout": 0.0, "batch_first": True}
        self.encoder = nn.ModuleList(nn.TransformerEncoderLayer(width, 2, **options) for _ in range(2))
        self.decoder = nn.ModuleList(nn.TransformerDecoderLayer(width, 2, **options) for _ in range(2))

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        memory = self.embedding(source)
        for layer in self.encoder:
            memory = layer(memory)
        length = target.shape[1]
        mask = torch.ones(length, length, dtype=torch.bool, device=target.device).triu(1)
        hidden = self.embedding(target)
        for layer in self.decoder:
            hidden = layer(hidden, memory, tgt_mask=mask)
        return hidden @ self.embedding.weight.T


class UNet(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.down1 = nn.Conv2d(1, width, 3, padding=1)
        self.down2 = nn.Conv2d(width, 2 * width, 3, padding=1)
        self.middle = nn.Sequential(nn.Conv2d(2 * width, 2 * width, 3, padding=1), nn.GroupNorm(2, 2 * width), nn.SiLU())
        self.up2 = nn.ConvTranspose2d(2 * width, width, 2, stride=2)
        self.join2 = nn.Conv2d(3 * width, width, 3, padding=1)
        self.up1 = nn.ConvTranspose2d(width, width, 2, stride=2)
        self.join1 = nn.Conv2d(2 * width, 1, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        one = F.relu(self.down1(x), inplace=True)
        two = F.relu(self.down2(F.max_pool2d(one, 2)))
        low = self.middle(F.avg_pool2d(two, 2))
        two = F.relu(self.join2(torch.cat([self.up2(low), two], 1)))
        return self.join1(torch.cat([self.up1(two), one], 1))


class Tagger(nn.Module):
    """Computes its own loss: a mean over the tokens whose label is not -100."""

    def __init__(self, words: int = 11, width: int = 6) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.rnn = nn.LSTM(width, 8, 2, batch_first=True)
        self.head = nn.Linear(8, width)

    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> dict[str, torch.Tensor | None]:
        logits = self.head(self.rnn(self.embedding(x))[0]) @ self.embedding.weight.T
        loss = None if y is None else F.cross_entropy(logits.flatten(0, 1), y.flatten(), ignore_index=-100)
        return {"loss": loss, "logits": logits, "nothing": None}


class Pairs(nn.Module):
    """A contrastive model: every sample is compared with every other."""

    def __init__(self, *, inside: bool) -> None:
        super().__init__()
        self.left = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5))
        self.right = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5))
        self.temperature = nn.Parameter(torch.zeros(()))
        self.inside = inside

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> Any:
        left, right = F.normalize(self.left(a), dim=-1), F.normalize(self.right(b), dim=-1)
        return contrast(left, right, self.temperature) if self.inside else (left, right, self.temperature.exp())


def contrast(left: torch.Tensor, right: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    logits = left @ right.T * temperature.exp()
    place = torch.arange(len(logits))
    return (F.cross_entropy(logits, place) + F.cross_entropy(logits.T, place)) / 2


# ---- architectures


@case
def mlp_with_skips(note: Note) -> None:
    train(note, Skips(), loader_of(rows(), labels(), shuffle=True))


@case
def encoder_decoder_with_one_embedding_used_thrice(note: Note) -> None:
    def loss_of(model: nn.Module, batch: Any) -> torch.Tensor:
        source, target = batch
        return F.cross_entropy(model(source, target[:, :-1]).flatten(0, 1), target[:, 1:].flatten())

    words = labels(30, 7, classes=13), labels(30, 6, classes=13, seed=9)
    train(note, Seq2Seq(), loader_of(*words, shuffle=True), loss_of)


@case
def u_net(note: Note) -> None:
    images = rows(30, 1, 8, 8)
    train(note, UNet(), loader_of(images, images.roll(1, 2)), lambda m, batch: F.mse_loss(m(batch[0]), batch[1]))


@whole
def lstm_with_a_mean_over_tokens_inside(note: Note) -> None:
    x, y = labels(20, 7, classes=11), labels(20, 7, classes=11, seed=9)
    y[2:4] = -100  # a microbatch without one token to learn from, at 4 and 5 microbatches of 10 samples
    y[15:, 2:] = -100
    train(note, Tagger(), loader_of(x, y), lambda m, batch: m(*batch)["loss"])


@whole
def contrastive_loss_inside(note: Note) -> None:
    train(note, Pairs(inside=True), loader_of(rows(), rows(seed=9)), its_own)


@whole
def contrastive_loss_outside(note: Note) -> None:
    def loss_of(model: nn.Module, batch: Any) -> torch.Tensor:
        left, right, scale = model(*batch)
        return contrast(left, right, scale.log())

    train(note, Pairs(inside=False), loader_of(rows(), rows(seed=9)), loss_of)
