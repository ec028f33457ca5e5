"""What holds on two processes beyond the numbers: each claim asserts it, on both ranks at once."""

from __future__ import annotations

import copy
import gc
import io
import random
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import nearlinear as nl
from nearlinear import events
from nearlinear.errors import DriftError, InputError
from nearlinear.torch import session
from nearlinear.torch.distribute import _combining

CLAIMS: dict[str, Callable[[], None]] = {}


def claim(fn: Callable[[], None]) -> Callable[[], None]:
    CLAIMS[fn.__name__] = fn
    return fn


def everyones(value: Any) -> list[Any]:
    current = session()
    assert current is not None
    return current.all_gather_json(value)


def bits(model: nn.Module) -> str:
    return "".join(t.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes().hex() for t in state(model))


def state(model: nn.Module) -> list[torch.Tensor]:
    return [*model.parameters(), *model.buffers()]


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3))


def data(samples: int = 37) -> TensorDataset:
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(samples, 6, generator=generator)
    return TensorDataset(x, torch.randint(0, 3, (samples,), generator=generator))


def distributed(model: nn.Module | None = None, lr: float = 0.1, **options: Any) -> tuple[Any, Any, Any]:
    model = model or mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    loader = DataLoader(data(), batch_size=8, shuffle=True)
    return nl.distribute(model, optimizer, loader, **options)


def train(model: Any, optimizer: Any, loader: Any) -> None:
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()


@claim
def the_objects_that_come_back_are_the_users_own() -> None:
    model, optimizer, loader = mlp(), None, DataLoader(data(), batch_size=8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    parameters, kind = list(model.parameters()), type(model)
    back = nl.distribute(model, optimizer, loader)
    assert back[0] is model and back[1] is optimizer and back[2] is loader
    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True)) and type(model) is kind
    assert isinstance(loader, DataLoader) and loader.batch_size == 8
    lone = mlp()
    assert nl.distribute(lone) is lone


@claim
def initial_weights_are_rank_0s() -> None:
    torch.manual_seed(nl.rank())
    model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4))
    model[1].running_mean += nl.rank()
    mine = bits(model)
    nl.distribute(model)
    assert len(set(everyones(bits(model)))) == 1
    assert everyones(mine)[0] == bits(model)


@claim
def running_statistics_agree_after_every_step() -> None:
    model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    whole = copy.deepcopy(model)
    model, optimizer, loader = distributed(model, lr=0.0)
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        assert len(set(everyones(bits(model)))) == 1
        whole(nl.gather(x))
        # The mean of the shares' means is that of the whole batch; of the variances it is not, which is said.
        torch.testing.assert_close(model[1].running_mean, whole[1].running_mean, rtol=1e-5, atol=1e-6)


@claim
def dropout_differs_between_ranks_and_repeats_itself() -> None:
    drawn = [everyones(F.dropout(torch.ones(64), 0.5).tolist()) for _ in range(2)]
    assert drawn[0][0] != drawn[0][1]
    from nearlinear.torch.state import separate_streams

    def draw() -> list[Any]:
        torch.manual_seed(3)
        random.seed(3)
        np.random.seed(3)
        current = session()
        assert current is not None
        separate_streams(current)
        return [torch.rand(3).tolist(), random.random(), float(np.random.rand())]

    first, second = draw(), draw()
    assert first == second
    a, b = everyones(first)
    assert a[0] != b[0] and a[1] != b[1] and a[2] != b[2]


class Augmented(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.rand(4)


@claim
def augmentation_in_workers_differs_between_ranks_and_repeats_itself() -> None:
    def seen() -> list[Any]:
        torch.manual_seed(5)
        loader = DataLoader(Augmented(), batch_size=8, num_workers=1, generator=torch.Generator().manual_seed(1))
        model, loader = nl.distribute(mlp(), None, loader)
        current = session()
        assert current is not None
        loader._nearlinear.seed = 11  # what the number of the loader in the run would make different
        return [batch.tolist() for batch in loader]

    first, second = seen(), seen()
    assert first == second
    a, b = everyones(first)
    assert a != b


@claim
def accumulation_communicates_once_per_window() -> None:
    counts: list[int] = []
    end = events.subscribe("gradients", lambda _: counts.append(1))
    model, optimizer, _ = distributed()
    for cycle in range(4):
        counts.clear()
        for _ in range(3):
            model(torch.ones(2, 6)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        assert len(counts) == (3 if cycle == 0 else 1), (cycle, len(counts))
    end()


@claim
def gradients_travel_while_backward_goes_on() -> None:
    model, optimizer, _ = distributed(strategy=nl.Plan(bucket_bytes=64))
    reducer = _combining[-1]
    sent = []
    for _ in range(2):
        optimizer.zero_grad()
        out = model(torch.ones(2, 6)).sum()
        out.register_hook(lambda _: sent.append(reducer._launched))
        model[0].weight.register_post_accumulate_grad_hook(lambda _: sent.append(reducer._launched))
        out.backward()
        optimizer.step()
    assert len(reducer._layout.buckets) >= 4
    assert sent[-1] >= 3, sent


@claim
def a_gradient_read_on_one_rank_alone_does_not_hang() -> None:
    model, optimizer, loader = distributed()
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        if nl.is_main():
            assert model[0].weight.grad.norm() > 0
        optimizer.step()


@claim
def bf16_on_the_wire_keeps_replicas_equal_and_near() -> None:
    torch.manual_seed(0)
    plain, narrow = mlp(), mlp()
    narrow.load_state_dict(plain.state_dict())
    optimizers = []
    for model, plan in ((plain, nl.Plan()), (narrow, nl.Plan(compress="bf16"))):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        nl.distribute(model, optimizer, strategy=plan)
        optimizers.append(optimizer)
    for _ in range(4):
        for model, optimizer in zip((plain, narrow), optimizers, strict=True):
            optimizer.zero_grad()
            F.cross_entropy(model(data().tensors[0][nl.rank() :: 2]), data().tensors[1][nl.rank() :: 2]).backward()
            optimizer.step()
    assert _combining[-1]._layout.buckets[0].dtype == torch.bfloat16
    assert len(set(everyones(bits(narrow)))) == 1
    for a, b in zip(plain.parameters(), narrow.parameters(), strict=True):
        assert not torch.equal(a, b)
        torch.testing.assert_close(a, b, rtol=0, atol=2e-3)


@claim
def autocast_keeps_replicas_equal() -> None:
    model, optimizer, loader = distributed()
    for x, y in loader:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
    assert len(set(everyones(bits(model)))) == 1


@claim
def parameters_of_16_bits_are_trained() -> None:
    model, optimizer, loader = distributed(mlp().to(torch.bfloat16))
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(x.to(torch.bfloat16)).float(), y).backward()
        assert model[0].weight.grad.dtype == torch.bfloat16
        optimizer.step()
    assert len(set(everyones(bits(model)))) == 1


@claim
def drift_stops_the_run_and_names_the_first_tensor() -> None:
    model, optimizer, loader = distributed(strategy=nl.Plan(check_every=2))
    try:
        for i, (x, y) in enumerate(loader):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            if i == 0 and nl.rank() == 1:
                with torch.no_grad():
                    model[2].bias[3] += 0.01
        raise AssertionError("drift was not noticed")
    except DriftError as error:
        assert "after step 2 rank 1's 2.bias differs from rank 0's by 0.01" in str(error), error


@claim
def drift_by_rounding_is_mended() -> None:
    model, optimizer, loader = distributed(strategy=nl.Plan(check_every=2))
    for i, (x, y) in enumerate(loader):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        if i == 0 and nl.rank() == 1:
            with torch.no_grad():
                model[2].bias[3] *= 1 + 2e-7
    assert len(set(everyones(bits(model)))) == 1


@claim
def a_model_can_be_pickled_and_copied_after_distribute() -> None:
    model, optimizer, loader = distributed()
    train(model, optimizer, loader)
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    again = torch.load(buffer, weights_only=False)
    assert bits(again) == bits(model) == bits(copy.deepcopy(model))


@claim
def a_model_that_the_script_drops_is_let_go() -> None:
    model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    model, optimizer, loader = distributed(model)
    train(model, optimizer, loader)
    held, parameter = len(_combining), weakref.ref(model[0].weight)
    del model, optimizer, loader
    gc.collect()
    assert parameter() is None
    assert len(_combining) == held - 1


@claim
def a_weight_is_not_asked_of_a_filler() -> None:
    asked: list[int] = []

    def weight(batch: Any) -> float:
        asked.append(len(batch[0]))
        return float(len(batch[0]))

    model = mlp()
    loader = DataLoader(data(17), batch_size=8)
    model, loader = nl.distribute(model, None, loader, weight=weight)
    for x, y in loader:
        F.cross_entropy(model(x), y).backward()
    assert asked == ([4, 4, 1] if nl.is_main() else [4, 4])


@claim
def the_mean_after_a_pass_is_weighted_by_the_pass() -> None:
    model = mlp()
    loader = DataLoader(data(17), batch_size=8)
    model, loader = nl.distribute(model, None, loader)
    seen = 0.0
    for number, (x, _) in enumerate(loader):
        if nl.is_main() or number < 2:  # what rank 1 holds of the last batch is a filler
            seen += float(x.sum())
    mine = 9 if nl.is_main() else 8
    expected = float(data(17).tensors[0].sum()) / 17
    assert abs(nl.mean(seen / mine) - expected) < 1e-5


@claim
def an_error_in_backward_does_not_confuse_the_next_one() -> None:
    model, optimizer, loader = distributed()
    fail = [False]

    def hook(gradient: torch.Tensor) -> None:
        if fail[0]:
            raise ValueError("a passing fault, on all ranks")

    for i, (x, y) in enumerate(loader):
        if i == 0:  # before the first exchange nothing has been sent
            fail[0] = True
            hidden = model[0](x)
            hidden.register_hook(hook)
            try:
                F.cross_entropy(model[4](torch.tanh(model[2](torch.tanh(hidden)))), y).backward()
                raise AssertionError("no error")
            except ValueError:
                fail[0] = False
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    assert len(set(everyones(bits(model)))) == 1


@claim
def what_is_not_the_same_is_said_once() -> None:
    said: list[str] = []
    end = events.subscribe("notice", lambda event: said.append(event["message"]))
    for _ in range(2):
        nl.distribute(nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Dropout(0.3), nn.Linear(4, 1)))
    end()
    assert sum("BatchNorm (1) normalises over each rank's share" in text for text in said) <= 1
    assert sum("dropout (2) draws other random numbers" in text for text in said) == 1, said


@claim
def a_batch_that_one_rank_skips_is_noticed_at_once() -> None:
    model, optimizer, loader = distributed()
    try:
        for number, (x, y) in enumerate(loader):
            if number == 1 and nl.rank() == 0:
                continue
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
        raise AssertionError("other batches were summed")
    except InputError as error:
        assert "rank 0 trains on batch 3 and rank 1 on batch 2" in str(error), error
