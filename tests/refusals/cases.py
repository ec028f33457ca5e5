"""What cannot be distributed as given, with words of the error it must raise; run on two processes at once."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import ConcatDataset, DataLoader, Dataset, DistributedSampler, TensorDataset

import nearlinear as nl
from nearlinear.torch import session

CASES: dict[str, tuple[str, Callable[[], Any]]] = {}


def refusal(words: str) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    def note(fn: Callable[[], Any]) -> Callable[[], Any]:
        CASES[fn.__name__] = (words, fn)
        return fn

    return note


def parts(samples: int = 16, **kwargs: Any) -> tuple[nn.Module, torch.optim.Optimizer, DataLoader[Any]]:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    data = TensorDataset(torch.randn(samples, 4), torch.randint(0, 2, (samples,)))
    return model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(data, **{"batch_size": 4, **kwargs})


@refusal("not a torch.nn.Module; hand over the model first")
def optimizer_in_place_of_the_model() -> None:
    model, optimizer, loader = parts()
    nl.distribute(optimizer, model, loader)


@refusal("the order is distribute(model, optimizer, *loaders), with None for no optimizer")
def loader_in_place_of_the_optimizer() -> None:
    model, _, loader = parts()
    nl.distribute(model, loader)


@refusal("the optimizer holds 4 parameters and none of them is one of the model's 4")
def optimizer_of_another_model() -> None:
    nl.distribute(parts()[0], parts()[1])


@refusal("0.weight is on the meta device and holds no values")
def parameters_on_the_meta_device() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 4))
    nl.distribute(model, strategy="data")


@refusal("0.weight has no shape yet (a lazy layer)")
def lazy_layers() -> None:
    nl.distribute(nn.Sequential(nn.LazyLinear(4)))


@refusal("Flatten has no parameters")
def nothing_to_train() -> None:
    nl.distribute(nn.Flatten())


@refusal("unknown strategy 'magic'; choose one of: auto, data")
def unknown_strategy() -> None:
    nl.distribute(parts()[0], strategy="magic")


@refusal("weight is 3; give a function of a batch, or 'sum'")
def a_number_as_weight() -> None:
    nl.distribute(parts()[0], weight=3)  # type: ignore[arg-type]


@refusal("loader 0 is a list; nearlinear shares out torch DataLoaders")
def a_list_of_batches() -> None:
    nl.distribute(parts()[0], None, [1, 2, 3])


@refusal("has a DistributedSampler, which would shard the data a second time")
def data_sharded_already() -> None:
    data = TensorDataset(torch.randn(16, 4))
    nl.distribute(parts()[0], None, DataLoader(data, sampler=DistributedSampler(data)))


@refusal("has 1 samples for 2 ranks; start at most 1")
def more_ranks_than_samples() -> None:
    nl.distribute(*parts(samples=1))


@refusal("samples on rank 0 and 17 on rank 1; every rank needs the whole data set")
def data_sets_of_different_lengths() -> None:
    nl.distribute(*parts(samples=16 + nl.rank()))


@refusal("the data set of loader")
def data_split_differently_on_ranks() -> None:
    model, optimizer, loader = parts()
    generator = torch.Generator().manual_seed(nl.rank())
    part, _ = torch.utils.data.random_split(loader.dataset, [12, 4], generator=generator)
    nl.distribute(model, optimizer, DataLoader(part, batch_size=4))


@refusal("has given rank 1 other batches than rank 0; seed it")
def a_sampler_that_is_seeded_by_nobody() -> None:
    class Order(torch.utils.data.Sampler[int]):
        def __iter__(self) -> Any:
            return iter(random.Random(nl.rank()).sample(range(16), 16))

        def __len__(self) -> int:
            return 16

    model, optimizer, loader = nl.distribute(*parts(sampler=Order()))
    for x, y in loader:
        F.cross_entropy(model(x), y).backward()
        optimizer.step()


@refusal("the model differs between ranks: 0.weight (3, 4) torch.float32 on rank 0 and 0.weight (4, 4)")
def models_that_differ_between_ranks() -> None:
    nl.distribute(nn.Sequential(nn.Linear(4, 3 + nl.rank())))


@refusal("weight(batch) is -1 for batch 1 of loader")
def a_negative_weight() -> None:
    model, _, loader = parts()
    current = session()
    assert current is not None
    current.summed = None
    model, loader = nl.distribute(model, None, loader, weight=lambda _: -1)
    next(iter(loader))


@refusal("nl.total got values of different structure on different ranks")
def totals_of_different_things() -> None:
    nl.distribute(*parts())
    nl.total({f"class {nl.rank()}": 1.0})


@refusal("nl.gather takes tensors with one row per sample, not a Tensor without rows")
def a_number_to_gather() -> None:
    model, _, loader = nl.distribute(*parts())
    for _ in loader:
        nl.gather(torch.tensor(1.0))


@refusal("handed over twice in one call")
def one_loader_twice() -> None:
    model, optimizer, loader = parts()
    nl.distribute(model, optimizer, loader, loader)


@refusal("p.grad was read inside the backward pass")
def an_optimizer_within_the_backward_pass() -> None:
    model, _, loader = parts()
    nl.distribute(model, None, loader)
    model[1].weight.register_post_accumulate_grad_hook(lambda p: p.grad.zero_())
    model(torch.ones(2, 4)).sum().backward()


@refusal("convert and move the model before")
def a_model_converted_after_distribute() -> None:
    model, optimizer, _ = parts()
    nl.distribute(model, optimizer)
    model.double()
    optimizer.step()


@refusal("an earlier distribute call took the losses of this run as a mean and this one takes them as 'sum'")
def two_kinds_of_weight() -> None:
    nl.distribute(*parts())
    nl.distribute(parts()[0], weight="sum")


@refusal("handed to distribute before")
def a_loader_handed_over_twice() -> None:
    model, optimizer, loader = nl.distribute(*parts())
    nl.distribute(parts()[0], None, loader)


@refusal("in_order=False")
def batches_in_any_order() -> None:
    nl.distribute(*parts(in_order=False))


@refusal("hand over the model itself (model.module)")
def a_model_that_is_wrapped() -> None:
    nl.distribute(nn.DataParallel(parts()[0]))


@refusal("optimizer.step() was called inside the backward pass")
def a_step_inside_backward() -> None:
    model, optimizer, _ = parts()
    nl.distribute(model, optimizer)
    model[0].weight.register_post_accumulate_grad_hook(lambda _: optimizer.step())
    model(torch.ones(2, 4)).sum().backward()


@refusal("batches were fetched before one backward pass")
def uneven_batches_in_one_backward() -> None:
    model, optimizer, loader = nl.distribute(*parts(samples=7))
    losses = [F.cross_entropy(model(x), y) for x, y in loader]
    sum(losses).backward()  # type: ignore[union-attr]


@refusal("nl.gather got 5 rows on rank")
def rows_that_belong_to_no_batch() -> None:
    model, _, loader = nl.distribute(*parts())
    for _ in loader:
        nl.gather(torch.zeros(5))


@refusal("holds no tensor whose dimension 0 could be shared out")
def batches_without_a_tensor() -> None:
    model = parts()[0]
    loader = DataLoader(["a", "b"], batch_size=None)
    model, loader = nl.distribute(model, None, loader)
    list(loader)


@refusal("became a parameter of the model or the optimizer after distribute")
def parameters_added_after_distribute() -> None:
    model, optimizer, loader = nl.distribute(*parts())
    model.append(nn.Linear(2, 2))
    for x, y in loader:
        F.cross_entropy(model(x), y).backward()
        optimizer.step()


@refusal("got backward(create_graph=True), which cannot be combined; use torch.autograd.grad")
def a_graph_of_gradients() -> None:
    model, optimizer, _ = parts()
    nl.distribute(model, optimizer)
    model(torch.ones(2, 4)).square().sum().backward(create_graph=True)


@refusal("'fast' is not a size")
def a_unit_that_is_none() -> None:
    from nearlinear.units import parse_bytes

    parse_bytes("fast")


@refusal("bucket_bytes is 0; it must be at least 1")
def a_plan_out_of_range() -> None:
    nl.Plan(bucket_bytes=0)


class Files(Dataset[torch.Tensor]):
    def __init__(self, files: list[str]) -> None:
        self.files = files

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(float(self.files[index][-1]))


@refusal("holds other files on rank 1 than on rank 0, or in another order")
def files_in_another_order() -> None:
    files = [f"data/{n}" for n in range(8)]
    nl.distribute(parts()[0], None, DataLoader(Files(files[:: -1 if nl.rank() else 1]), batch_size=4))


@refusal("holds other datasets[0].tensors on rank 1 than on rank 0")
def tensors_drawn_without_a_seed() -> None:
    torch.manual_seed(nl.rank())
    data = TensorDataset(torch.randn(8, 4), torch.zeros(8))
    nl.distribute(parts()[0], None, DataLoader(ConcatDataset([data, data]), batch_size=4))
