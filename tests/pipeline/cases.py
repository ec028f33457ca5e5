"""Models and loops with one difficulty each; a pipeline must leave them with the numbers of one process.

A case is a function of ``note(name, value)``: it trains and notes what must agree. ``train`` goes through all numbers
of microbatches, with SGD first and Adam then. A ``@case`` holds under data x pipeline too; a ``@whole`` one only where
one pipeline sees the whole batch, because its loss is no mean over samples; a ``@drawn`` one draws random numbers.
"""

from __future__ import annotations

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

Note = Callable[[str, Any], None]
CASES: dict[str, Callable[[Note], None]] = {}
MICROBATCHES = (4, 1, 2, 5)
steps_each = 5  # with each optimizer and number of microbatches; the driver may say otherwise

plan = nl.Plan("pipeline")  # the driver says how many stages


def case(fn: Callable[[Note], None]) -> Callable[[Note], None]:
    CASES[fn.__name__] = fn
    return fn


whole = drawn = case  # what is drawn differs from one process, and only there


# ---- what the cases share


def sgd(model: nn.Module, lr: float = 0.05) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)


def adam(model: nn.Module, lr: float = 0.005) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=lr)


def distribute(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, *loaders: Any, count: int = 4, **more: Any
) -> Any:
    return nl.distribute(model, optimizer, *loaders, strategy=dataclasses.replace(plan, microbatches=count), **more)


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
    steps: int | None = None,
    weight: Any = None,
) -> None:
    """Distribute and run the plain loop: each optimizer with each number of microbatches."""
    first, *others = (make(model) for make in optimizers)
    model, first, loader = distribute(model, first, loader, count=counts[0], weight=weight)
    others = [distribute(model, other)[1] for other in others]
    batches = endless(loader)
    for number, optimizer in enumerate((first, *others)):
        for count in counts:
            use_microbatches(model, count)
            for step in range(steps or steps_each):
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
        self.middle = nn.Sequential(
            nn.Conv2d(2 * width, 2 * width, 3, padding=1), nn.GroupNorm(2, 2 * width), nn.SiLU()
        )
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


@case
def a_mean_over_tokens_outside(note: Note) -> None:
    def loss_of(model: nn.Module, batch: Any) -> torch.Tensor:
        x, y = batch
        return F.cross_entropy(model(x)["logits"].flatten(0, 1), y.flatten(), ignore_index=-100)

    x, y = labels(20, 7, classes=11), labels(20, 7, classes=11, seed=9)
    y[2:4] = -100
    y[13:, 2:] = -100
    train(note, Tagger(), loader_of(x, y), loss_of, weight=lambda batch: (batch[1] != -100).sum())


@whole
def contrastive_loss_inside(note: Note) -> None:
    train(note, Pairs(inside=True), loader_of(rows(), rows(seed=9)), its_own)


@case
def contrastive_loss_outside(note: Note) -> None:
    def loss_of(model: nn.Module, batch: Any) -> torch.Tensor:
        left, right, scale = model(*batch)
        return contrast(nl.gather(left), nl.gather(right), scale.log())

    train(note, Pairs(inside=False), loader_of(rows(), rows(seed=9)), loss_of)


# ---- batches


@case
def batches_of_ten_seven_three_and_one(note: Note) -> None:
    ends = list(itertools.accumulate((10, 7, 3, 1, 10, 2), initial=0))
    batches = [list(range(begin, end)) for begin, end in itertools.pairwise(ends)]
    loader = DataLoader(TensorDataset(rows(), labels()), batch_sampler=batches)
    train(note, Skips(depth=2), loader, steps=6)


class Reader(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True, norm_first=True) for _ in range(2)
        )
        self.head = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(x)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden.mean(1))


@case
def sequences_of_changing_length(note: Note) -> None:
    x, y = labels(40, 9, classes=11), labels(40)
    batches = [
        (x[begin : begin + 10, :length], y[begin : begin + 10]) for begin, length in ((0, 9), (10, 5), (20, 9), (30, 7))
    ]
    train(note, Reader(), DataLoader(batches, batch_size=None), counts=(4, 5))


class Mixed(nn.Module):
    """Takes numbers, words, a table without samples, and names with defaults."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(
        self,
        x: torch.Tensor,
        table: torch.Tensor,
        power: float = 1.0,
        *,
        kind: str = "tanh",
        repeats: int = 1,
        shift: torch.Tensor | None = None,
        mirrored: bool = False,
    ) -> torch.Tensor:
        hidden = self.first(-x if mirrored else x)
        for _ in range(repeats):
            hidden = self.second(torch.tanh(hidden) if kind == "tanh" else torch.relu(hidden)) + table
        if shift is not None:
            hidden = hidden + shift
        return self.third(hidden * power)


@case
def arguments_that_are_no_samples(note: Note) -> None:
    table, calls = torch.linspace(-1, 1, 8), itertools.count()

    def loss_of(model: nn.Module, batch: Any) -> torch.Tensor:
        x, y = batch
        call = next(calls)
        if call % 3 == 0:
            return F.cross_entropy(model(x, table), y)
        if call % 3 == 1:
            return F.cross_entropy(model(x, table, 0.5, kind="relu", repeats=2), y)
        return F.cross_entropy(model(x=x, mirrored=True, shift=x.sum(1, keepdim=True), table=table * 2), y)

    train(note, Mixed(), loader_of(rows(40), labels(40)), loss_of)


# ---- the loop


@case
def accumulation_clipping_and_a_scheduler(note: Note) -> None:
    model = Skips()
    optimizer = sgd(model, 0.5)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 12)
    model, optimizer, loader = distribute(model, optimizer, loader_of(rows(), labels(), shuffle=True))
    for step, (x, y) in enumerate(itertools.islice(endless(loader), 20), 1):
        (F.cross_entropy(model(x), y) / 2).backward()
        if step % 2 == 0 or step == 19:
            note(f"{step} norm", nn.utils.clip_grad_norm_(model.parameters(), 0.3))
            gradients(note, model, str(step))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad(set_to_none=step % 4 == 0)
            note(f"{step} rate", scheduler.get_last_lr()[0])
    state(note, model, "end")


@case
def two_forward_passes_before_one_backward(note: Note) -> None:
    def loss_of(model: nn.Module, batch: Any) -> torch.Tensor:
        first, second = model(batch[0]), model(batch[0] * 2)
        return F.cross_entropy(first, batch[1]) + F.mse_loss(first, second)

    train(note, Skips(), loader_of(rows(), labels()), loss_of)


@case
def two_losses_of_one_output(note: Note) -> None:
    def loss_of(model: nn.Module, batch: Any) -> torch.Tensor:
        out = model(batch[0])
        return F.cross_entropy(out, batch[1]) + 0.1 * out.square().mean() + out[:, 0].mean()

    train(note, Skips(), loader_of(rows(), labels()), loss_of)


@case
def a_loss_function_run_forward_and_backward_in_turn(note: Note) -> None:
    model = Skips()
    optimizer = adam(model)
    model, optimizer, loader = distribute(model, optimizer, loader_of(rows(), labels(), shuffle=True))

    @nl.step
    def loss_of(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(model(x), y)

    for step, (x, y) in enumerate(itertools.islice(endless(loader), 16)):
        use_microbatches(model, MICROBATCHES[step // 4])
        optimizer.zero_grad()
        note(f"{step} loss", nl.mean(loss_of(x, y)))
        gradients(note, model, str(step))
        optimizer.step()
    state(note, model, "end")


@case
def evaluation_between_steps(note: Note) -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Dropout(0.0), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))
    optimizer = adam(model)
    loader, held_out = loader_of(rows(), labels(), shuffle=True), loader_of(rows(23, seed=3), labels(23), batch_size=8)
    model, optimizer, loader, held_out = distribute(model, optimizer, loader, held_out)
    for step, (x, y) in enumerate(itertools.islice(endless(loader), 10)):
        model.train()
        optimizer.zero_grad()
        loss = cross_entropy(model, (x, y))
        loss.backward()
        gradients(note, model, str(step))
        optimizer.step()
        note(f"{step} loss", nl.mean(loss))
        if step % 3:
            continue
        model.eval()
        right, seen, summed = 0.0, 0.0, 0.0
        with torch.no_grad():
            for u, v in held_out:
                out = model(u)
                right += float(nl.total((out.argmax(1) == v).sum()))
                seen += float(nl.total(len(v)))
                summed += float(nl.total(F.cross_entropy(out, v, reduction="sum")))
        note(f"{step} accuracy", right / seen)
        note(f"{step} held out", summed / seen)


@whole
def what_rank_0_alone_reads(note: Note) -> None:
    model = Skips()
    optimizer = adam(model)
    model, optimizer, loader = distribute(model, optimizer, loader_of(rows(), labels(), shuffle=True))
    right = 0
    for step, (x, y) in enumerate(itertools.islice(endless(loader), 8)):
        optimizer.zero_grad()
        out = model(x)
        loss = F.cross_entropy(out, y)
        if nl.is_main() and step % 2:
            note(f"{step} loss", loss.item())
            note(f"{step} large", bool(loss > 1))
        loss.backward()
        if nl.is_main():
            norms = [float(p.grad.norm()) for p in model.parameters() if p.grad is not None]
            note(f"{step} norms", norms)
        optimizer.step()
        correct = (out.argmax(1) == y).sum()
        if nl.is_main():
            right += int(correct)
            note(f"{step} right", right)
            note(f"{step} first", out[0])
    if nl.is_main():
        for name, value in model.state_dict().items():
            note(f"state/{name}", value)


@case
def the_state_is_that_of_one_process(note: Note) -> None:
    model = nn.Sequential(Skips(outputs=6), nn.Tanh(), nn.Linear(6, 3))
    keys = list(model.state_dict())
    optimizer = adam(model)
    model, optimizer, loader = distribute(model, optimizer, loader_of(rows(), labels()))
    for batch in itertools.islice(endless(loader), 5):
        optimizer.zero_grad()
        cross_entropy(model, batch).backward()
        optimizer.step()
    assert list(model.state_dict()) == keys
    if nl.is_main():
        for name, value in model.state_dict().items():
            note(f"state/{name}", value)
    held = {name: value.clone() for name, value in model.state_dict().items()}
    for batch in itertools.islice(endless(loader), 3):
        optimizer.zero_grad()
        cross_entropy(model, batch).backward()
        optimizer.step()
    model.load_state_dict(held)
    state(note, model, "loaded")


# ---- parameters and buffers


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(6, 8).requires_grad_(False)
        self.body = nn.Linear(8, 8)
        self.used, self.second, self.never = nn.Linear(8, 3), nn.Linear(8, 2), nn.Linear(8, 2)
        self.late = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> Any:
        hidden = torch.tanh(self.body(torch.tanh(self.frozen(x))))
        hidden = torch.tanh(self.late(hidden))
        return {"out": self.used(hidden), "second": self.second(hidden), "none": None, "size": 3}


@case
def frozen_unused_and_ignored(note: Note) -> None:
    train(note, Heads(), loader_of(rows(), labels()), lambda m, batch: F.cross_entropy(m(batch[0])["out"], batch[1]))


@case
def frozen_and_thawed(note: Note) -> None:
    model = Skips()
    model.first.requires_grad_(False)
    optimizer = sgd(model)
    model, optimizer, loader = distribute(model, optimizer, loader_of(rows(), labels()))
    for step, batch in enumerate(itertools.islice(endless(loader), 12)):
        model.first.requires_grad_(step // 3 % 2 == 1)
        model.head.requires_grad_(step // 3 != 1)
        optimizer.zero_grad()
        loss = cross_entropy(model, batch)
        loss.backward()
        note(f"{step} loss", nl.mean(loss))
        gradients(note, model, str(step))
        optimizer.step()
    state(note, model, "end")


class Counting(nn.Module):
    """Counts its calls, on different stages."""

    calls: torch.Tensor
    scale: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("late", torch.zeros((), dtype=torch.long))
        self.register_buffer("scale", torch.ones(8) / 2, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        hidden = torch.tanh(self.first(x)) * self.scale
        hidden = torch.tanh(self.second(hidden)) / self.calls.sqrt()
        if self.training:
            self.late.add_(2)
        return self.third(hidden)


@case
def buffers_that_count(note: Note) -> None:
    train(note, Counting(), loader_of(rows(), labels()))


class Normalised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(1 if i == 0 else 4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(inplace=True))
            for i in range(3)
        )
        self.last, self.head = nn.BatchNorm1d(4), nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(self.last(x.mean((2, 3))))


@whole
def batch_norm_with_one_microbatch(note: Note) -> None:
    model = Normalised()
    train(note, model, loader_of(rows(35, 1, 6, 6), labels(35)), counts=(1,))
    model.eval()
    with torch.no_grad():
        note("evaluated", model(rows(9, 1, 6, 6, seed=2)))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.body = nn.Linear(6, 6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(x)
        for _ in range(3):  # one module, called three times
            hidden = hidden + torch.tanh(self.body(hidden))
        return self.head(hidden)


@case
def tied_weights_and_a_module_called_thrice(note: Note) -> None:
    x = labels(37, 5, classes=11)
    train(
        note,
        Tied(),
        loader_of(x, x.roll(1, 1), shuffle=True),
        lambda m, batch: F.cross_entropy(m(batch[0]).flatten(0, 1), batch[1].flatten()),
    )


@case
def tied_weights_with_clipping_and_accumulation(note: Note) -> None:
    model = Tied()
    optimizer = adam(model)
    x = labels(37, 5, classes=11)
    model, optimizer, loader = distribute(model, optimizer, loader_of(x, x.roll(1, 1)))
    for step, (x, y) in enumerate(itertools.islice(endless(loader), 12), 1):
        F.cross_entropy(model(x).flatten(0, 1), y.flatten()).backward()
        if step % 2 == 0:
            note(f"{step} norm", nn.utils.clip_grad_norm_(model.parameters(), 0.5))
            gradients(note, model, str(step))
            optimizer.step()
            optimizer.zero_grad()
    state(note, model, "end")


# ---- outputs


@dataclass
class Output:
    logits: torch.Tensor
    hidden: list[torch.Tensor]
    loss: torch.Tensor | None = None


torch.export.register_dataclass(Output, serialized_type_name="tests.Output")


class Structured(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.head = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> Output:
        hidden = []
        for layer in self.layers:
            x = torch.tanh(layer(x))
            hidden.append(x)
        return Output(self.head(x), hidden[::2])


@case
def a_dataclass_with_inner_activations(note: Note) -> None:
    def loss_of(model: nn.Module, batch: Any) -> torch.Tensor:
        out = model(batch[0])
        assert isinstance(out, Output) and out.loss is None
        return F.cross_entropy(out.logits, batch[1]) + sum(each.square().mean() for each in out.hidden)

    train(note, Structured(), loader_of(rows(), labels()), loss_of)


@case
def a_loss_function_whose_calls_are_unlike(note: Note) -> None:
    """Each call of the model is other than the one before let expect: in its samples, and in what is used of it."""
    model = Structured()
    optimizer = sgd(model)
    model, optimizer, loader = distribute(model, optimizer, loader_of(rows(), labels(), shuffle=True))
    calls = itertools.count()

    @nl.step
    def loss_of(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        out, twice = model(x), model(torch.cat([x, x.flip(1)]))
        loss = F.cross_entropy(out.logits, y) + twice.logits.square().mean()
        return loss + 0.0 * sum(each.sum() for each in out.hidden) if next(calls) % 2 else loss

    for step, (x, y) in enumerate(itertools.islice(endless(loader), 16)):
        use_microbatches(model, MICROBATCHES[step // 4])
        optimizer.zero_grad()
        note(f"{step} loss", nl.mean(loss_of(x, y)))
        gradients(note, model, str(step))
        optimizer.step()
    state(note, model, "end")


class Sizes(nn.Module):
    """Returns what it was given, a number, a view, and what shares memory with another output."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> Any:
        out = self.third(torch.tanh(self.second(torch.tanh(self.first(x)))))
        return out, x, x.shape[0], (out[:, :1], out.T), self.first.weight, None


@case
def outputs_of_every_kind(note: Note) -> None:
    def loss_of(model: nn.Module, batch: Any) -> torch.Tensor:
        out, x, count, (left, turned), weight, nothing = model(batch[0])
        assert count == len(batch[0]) and nothing is None and turned.shape == (3, count)
        return F.cross_entropy(out, batch[1]) + left.mean() + turned.square().mean() + (x.mean() * weight).mean()

    train(note, Sizes(), loader_of(rows(), labels()), loss_of)


# ---- inside the model


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(6, 8), nn.Linear(8, 3)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=False)
        return self.head(x)


@case
def activation_checkpoints(note: Note) -> None:
    train(note, Checkpointed(), loader_of(rows(), labels()))


class Writing(nn.Module):
    """Edits in place, masks, and computes a part without gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        hidden[:, 0] = 0
        with torch.no_grad():
            weight = torch.softmax(hidden, 1)
        hidden += self.second(torch.relu_(hidden * weight))
        hidden = torch.where(x[:, :1] > 0, hidden, hidden.detach() * 2)
        return self.head(hidden).clamp_(-3, 3)


@case
def edits_in_place_and_parts_without_gradient(note: Note) -> None:
    train(note, Writing(), loader_of(rows(), labels()))


class BatchMean(nn.Module):
    """Mixes the samples half way."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.first(x))
        hidden = torch.tanh(self.second(hidden - hidden.mean(0)))
        return self.head(hidden)


@whole
def a_mean_over_the_batch_half_way(note: Note) -> None:
    train(note, BatchMean(), loader_of(rows(), labels()))


@drawn
def dropout(note: Note) -> None:
    layers = [nn.Linear(6, 16), nn.Dropout(0.5), nn.Tanh(), nn.Linear(16, 16), nn.Dropout(0.5)]
    model = nn.Sequential(*layers, nn.Linear(16, 16), nn.Tanh(), nn.Dropout(0.2), nn.Linear(16, 3))
    optimizer = sgd(model)
    model, optimizer, loader = distribute(model, optimizer, loader_of(rows(40), labels(40)))
    for step, batch in enumerate(itertools.islice(endless(loader), 5)):
        optimizer.zero_grad()
        loss = cross_entropy(model, batch)
        loss.backward()
        optimizer.step()
        note(f"{step} loss", nl.mean(loss))
        note(f"{step} draw of the script", torch.rand(3))  # the same on all ranks, wherever the layers lie
    state(note, model, "end")


@case
def autocast_to_bfloat16(note: Note) -> None:
    def loss_of(model: nn.Module, batch: Any) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            out = model(batch[0])
            assert out.dtype == torch.bfloat16
        return F.cross_entropy(out.float(), batch[1])

    train(note, Skips(width=16).float(), loader_of(rows().float(), labels()), loss_of, counts=(4,), optimizers=(sgd,))
