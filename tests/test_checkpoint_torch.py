"""Checkpoints of PyTorch runs: a resumed run is the uninterrupted one, and a load that fails changes nothing."""

from __future__ import annotations

import copy
import itertools
import json
import multiprocessing as mp
import random
import resource
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn, optim
from torch.distributed import FileStore
from torch.optim import lr_scheduler as lrs
from torch.optim.swa_utils import SWALR, AveragedModel

from nearlinear.checkpoint import folder
from nearlinear.errors import CheckpointError, InputError, NearlinearError
from nearlinear.torch.checkpoint import load, save


class Net(nn.Module):
    """Dropout, BatchNorm, a frozen and a tied parameter: 8 numbers in, 8 out."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.first = nn.Linear(8, width)
        self.norm = nn.BatchNorm1d(width)
        self.last = nn.Linear(width, 8)
        self.tied = nn.Linear(8, width, bias=False)
        self.tied.weight = self.first.weight
        self.frozen = nn.Parameter(torch.randn(3), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = F.dropout(self.norm(self.first(x) + self.tied(x)), 0.2, self.training)
        return self.last(hidden)


def equal(a: Any, b: Any) -> bool:
    """Return whether two nested values are equal, tensors in every bit, type and place of the dimension."""
    if isinstance(a, torch.Tensor):
        if not isinstance(b, torch.Tensor) or a.dtype != b.dtype or a.shape != b.shape:
            return False
        flat = [t.detach().resolve_conj().contiguous().reshape(-1).view(torch.uint8) for t in (a, b)]
        return torch.equal(*flat)
    if type(a) is not type(b) and not (isinstance(a, dict) and isinstance(b, dict)):
        return False
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(equal, a, b))
    return bool(a == b)


def train(model: nn.Module, optimizer: Any, steps: int, scheduler: Any = None) -> list[float]:
    """Train on random batches; return the losses. Every draw comes from torch's global stream."""
    losses = []
    for _ in range(steps):
        x = torch.randn(16, 8)

        def closure(x: torch.Tensor = x) -> torch.Tensor:
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), x)
            loss.backward()
            return loss

        losses.append(float(optimizer.step(closure).detach()))
        if isinstance(scheduler, lrs.ReduceLROnPlateau):
            scheduler.step(1.0)
        elif scheduler is not None:
            scheduler.step()
    return losses


def everything(*objects: Any) -> Any:
    """Return a copy of all that a load may change: the objects' states and the random streams."""
    streams = (torch.get_rng_state(), random.getstate(), np.random.get_state(legacy=False))
    states = [each.state_dict() for each in objects]
    return copy.deepcopy((states, streams[0], list(streams[1]), json.dumps(streams[2], default=lambda a: a.tolist())))


class Loader:
    """A place in the data, and nothing else."""

    def __init__(self, batch: int = 0) -> None:
        self.batch = batch

    def state_dict(self) -> dict[str, int]:
        return {"epoch": 2, "batch": self.batch, "seed": 7}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.batch = state["batch"]


# ---- a resumed run is the uninterrupted one ----

OPTIMIZERS: dict[str, Callable[[Any], optim.Optimizer]] = {
    "Adafactor": optim.Adafactor,
    "Adadelta": optim.Adadelta,
    "Adagrad": optim.Adagrad,
    "Adam": lambda p: optim.Adam(p, amsgrad=True),
    "AdamW": lambda p: optim.AdamW(p, lr=torch.tensor(0.01)),
    "Adamax": optim.Adamax,
    "ASGD": optim.ASGD,
    "LBFGS": lambda p: optim.LBFGS(p, max_iter=4),
    "NAdam": optim.NAdam,
    "RAdam": optim.RAdam,
    "RMSprop": lambda p: optim.RMSprop(p, momentum=0.9, centered=True),
    "Rprop": optim.Rprop,
    "SGD": lambda p: optim.SGD(p, lr=0.01, momentum=0.9, nesterov=True),
    "plain SGD": lambda p: optim.SGD(p, lr=0.01),
}
if hasattr(optim, "Muon"):
    OPTIMIZERS["Muon"] = lambda p: optim.Muon(q for q in p if q.ndim == 2)


def test_every_optimizer_of_torch_is_tried() -> None:
    names = {n for n in optim.__all__ if isinstance(getattr(optim, n), type)} - {"Optimizer", "SparseAdam"}
    assert names <= set(OPTIMIZERS)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_resumed_run_is_the_uninterrupted_one(tmp_path: Path, name: str) -> None:
    torch.manual_seed(0)
    model = Net()
    optimizer = OPTIMIZERS[name](model.parameters())
    train(model, optimizer, 3)
    save(tmp_path / "c", model, optimizer)
    expected = train(model, optimizer, 3)

    torch.manual_seed(1)  # another start, so that nothing is right by chance
    resumed = Net()
    resumed_optimizer = OPTIMIZERS[name](resumed.parameters())
    train(resumed, resumed_optimizer, 1)
    load(tmp_path / "c", resumed, resumed_optimizer)
    assert train(resumed, resumed_optimizer, 3) == expected
    assert equal(resumed.state_dict(), model.state_dict())
    assert equal(resumed_optimizer.state_dict(), optimizer.state_dict())


def test_sparse_adam_resumes(tmp_path: Path) -> None:
    def make() -> tuple[nn.Module, optim.Optimizer]:
        model = nn.Embedding(10, 4, sparse=True)
        return model, optim.SparseAdam(list(model.parameters()))

    def step(model: nn.Module, optimizer: optim.Optimizer) -> None:
        optimizer.zero_grad()
        model(torch.randint(0, 10, (3,))).pow(2).sum().backward()
        optimizer.step()

    model, optimizer = make()
    step(model, optimizer)
    save(tmp_path / "c", model, optimizer)
    step(model, optimizer)
    resumed, resumed_optimizer = make()
    load(tmp_path / "c", resumed, resumed_optimizer)
    step(resumed, resumed_optimizer)
    assert equal(resumed.state_dict(), model.state_dict())


class Halving:
    """A schedule with a state of its own, as LambdaLR saves objects (and not functions)."""

    def __init__(self) -> None:
        self.every = 2

    def __call__(self, epoch: int) -> float:
        return float(0.5 ** (epoch // self.every))


SCHEDULERS: dict[str, Callable[[optim.Optimizer], Any]] = {
    "LambdaLR": lambda o: lrs.LambdaLR(o, lambda epoch: 0.9**epoch),
    "LambdaLR of an object": lambda o: lrs.LambdaLR(o, Halving()),
    "MultiplicativeLR": lambda o: lrs.MultiplicativeLR(o, lambda epoch: 0.9),
    "StepLR": lambda o: lrs.StepLR(o, 2),
    "MultiStepLR": lambda o: lrs.MultiStepLR(o, [2, 4, 4, 7]),
    "ConstantLR": lambda o: lrs.ConstantLR(o, total_iters=6),
    "LinearLR": lambda o: lrs.LinearLR(o, total_iters=8),
    "ExponentialLR": lambda o: lrs.ExponentialLR(o, 0.9),
    "SequentialLR": lambda o: lrs.SequentialLR(o, [lrs.ConstantLR(o), lrs.MultiStepLR(o, [1, 3])], [4]),
    "CosineAnnealingLR": lambda o: lrs.CosineAnnealingLR(o, 9),
    "ChainedScheduler": lambda o: lrs.ChainedScheduler([lrs.ConstantLR(o), lrs.ExponentialLR(o, 0.9)]),
    "ReduceLROnPlateau": lambda o: lrs.ReduceLROnPlateau(o, patience=1),
    "CyclicLR": lambda o: lrs.CyclicLR(o, 0.001, 0.1, step_size_up=3),
    "CyclicLR with a function": lambda o: lrs.CyclicLR(o, 0.001, 0.1, step_size_up=3, scale_fn=lambda x: 0.5),
    "CosineAnnealingWarmRestarts": lambda o: lrs.CosineAnnealingWarmRestarts(o, 4),
    "OneCycleLR": lambda o: lrs.OneCycleLR(o, 0.1, total_steps=20),
    "PolynomialLR": lambda o: lrs.PolynomialLR(o, 9, 2.0),
    "SWALR": lambda o: SWALR(o, 0.01, 8),
}


def test_every_scheduler_of_torch_is_tried() -> None:
    assert set(lrs.__all__) - {"LRScheduler"} <= set(SCHEDULERS)


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_resumed_schedule_is_the_uninterrupted_one(tmp_path: Path, name: str) -> None:
    def make() -> tuple[nn.Module, optim.Optimizer, Any]:
        model = nn.Linear(8, 8)
        optimizer = optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        return model, optimizer, SCHEDULERS[name](optimizer)

    def rates(model: nn.Module, optimizer: optim.Optimizer, scheduler: Any) -> list[Any]:
        out = []
        for _ in range(6):
            train(model, optimizer, 1, scheduler)
            group = optimizer.param_groups[0]
            out.append((group["lr"], group["momentum"]))
        return out

    model, optimizer, scheduler = make()
    train(model, optimizer, 3, scheduler)
    save(tmp_path / "c", model, optimizer, extra={"scheduler": scheduler})
    saved = copy.deepcopy(scheduler.state_dict())
    expected = rates(model, optimizer, scheduler)
    assert len(set(expected)) > 1  # it does something

    model, optimizer, scheduler = make()
    assert load(tmp_path / "c", model, optimizer, extra={"scheduler": scheduler}) == {}
    assert equal(scheduler.state_dict(), saved)
    assert rates(model, optimizer, scheduler) == expected


def test_extras_come_back_in_place_or_by_value(tmp_path: Path) -> None:
    model = Net()
    ema = AveragedModel(model)
    ema.update_parameters(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(torch.ones(()))  # a scaler that was never used has no state
    plain = {"epoch": 3, "best": float("inf"), "history": [(1, 0.5), (2, float("nan"))], "by step": {10: "a"}}
    mean = torch.randn(3, dtype=torch.bfloat16)
    state = {"ema": ema, "scaler": scaler}
    save(tmp_path / "c", model, extra={**state, "plain": plain, "mean": mean, "rows": np.eye(2, dtype="f2")})

    other = AveragedModel(Net())
    other_scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    other_scaler.scale(torch.ones(()))
    extras = load(tmp_path / "c", Net(), extra={"ema": other, "scaler": other_scaler})
    assert equal(other.state_dict(), ema.state_dict())
    assert other_scaler.get_scale() == 1024.0
    assert repr(extras["plain"]) == repr(plain)
    assert equal(extras["mean"], mean)
    assert extras["rows"].dtype == np.float16
    assert set(extras) == {"plain", "mean", "rows"}


def test_the_loader_goes_to_its_place(tmp_path: Path) -> None:
    save(tmp_path / "c", Net(), loader=Loader(5))
    loader = Loader()
    load(tmp_path / "c", Net(), loader=loader)
    assert loader.batch == 5
    save(tmp_path / "c", Net(), loader=[Loader(5), Loader(6)])
    pair = Loader(), Loader()
    load(tmp_path / "c", Net(), loader=pair)
    assert [each.batch for each in pair] == [5, 6]
    with pytest.raises(CheckpointError, match=r"holds loader\['0'\], loader\['1'\], and loader is to be loaded"):
        load(tmp_path / "c", Net(), loader=loader)


def test_all_random_streams_go_on(tmp_path: Path) -> None:
    def draw() -> list[float]:
        return [random.random(), float(np.random.rand()), float(torch.rand(())), random.gauss(0, 1)]

    draw()
    save(tmp_path / "c", Net())
    expected = draw()
    draw()
    load(tmp_path / "c", Net())
    assert draw() == expected


def test_saving_draws_no_random_number_and_changes_nothing(tmp_path: Path) -> None:
    model = Net()
    optimizer = optim.Adam(model.parameters())
    train(model, optimizer, 1)
    before = everything(model, optimizer)
    save(tmp_path / "c", model, optimizer, Loader())
    assert equal(everything(model, optimizer), before)


def test_several_models_and_optimizers_make_one_checkpoint(tmp_path: Path) -> None:
    def make() -> tuple[dict[str, nn.Module], dict[str, optim.Optimizer]]:
        models: dict[str, nn.Module] = {"gen": nn.Linear(8, 8), "critic": nn.Linear(8, 8)}
        return models, {name: optim.Adam(model.parameters()) for name, model in models.items()}

    models, optimizers = make()
    for name in models:
        train(models[name], optimizers[name], 2)
    save(tmp_path / "c", models, optimizers)
    assert set(folder.read(tmp_path / "c").arrays["model"]) == {
        "gen.weight", "gen.bias", "critic.weight", "critic.bias",
    }  # fmt: skip
    others, other_optimizers = make()
    load(tmp_path / "c", others, other_optimizers)
    for name in models:
        assert equal(others[name].state_dict(), models[name].state_dict())
        assert equal(other_optimizers[name].state_dict(), optimizers[name].state_dict())

    pair = list(models.values())
    save(tmp_path / "pair", pair, list(optimizers.values()))
    assert "0.weight" in folder.read(tmp_path / "pair").arrays["model"]
    load(tmp_path / "pair", [nn.Linear(8, 8), nn.Linear(8, 8)])


# ---- what a file holds ----


class Zoo(nn.Module):
    """A buffer of every kind."""

    KINDS = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2,
             torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32, torch.uint64,
             torch.bool, torch.complex64, torch.complex128)  # fmt: skip

    def __init__(self) -> None:
        super().__init__()
        for dtype in self.KINDS:
            name = str(dtype).replace("torch.", "as_")
            numbers = torch.randn(4, 3, dtype=torch.complex128).mul(3)
            plain = numbers.to(dtype) if dtype.is_complex else numbers.real.abs().to(torch.float32).to(dtype)
            self.register_buffer(name, plain)
            self.register_buffer(name + "_0d", plain[0, 0].clone())
        self.register_buffer("empty", torch.empty(0, 3))
        self.register_buffer("transposed", torch.randn(3, 4).t())
        self.register_buffer("conjugate", torch.randn(3, dtype=torch.complex64).conj())
        self.register_buffer("part", torch.randn(10)[3:5])
        self.register_buffer("none", None)


def test_every_type_of_tensor_comes_back_bit_by_bit(tmp_path: Path) -> None:
    zoo, other = Zoo(), Zoo()
    assert not equal(zoo.state_dict(), other.state_dict())
    save(tmp_path / "c", zoo, extra={"all": dict(zoo.state_dict())})
    extras = load(tmp_path / "c", other)
    assert equal(other.state_dict(), zoo.state_dict())
    assert equal(extras["all"], dict(zoo.state_dict()))


def test_loading_keeps_the_models_own_tensors(tmp_path: Path) -> None:
    model = Net()
    save(tmp_path / "c", model)
    other = Net()
    before = {name: (id(p), p.data_ptr()) for name, p in other.named_parameters()}
    load(tmp_path / "c", other)
    assert {name: (id(p), p.data_ptr()) for name, p in other.named_parameters()} == before
    assert not other.frozen.requires_grad


def test_training_after_a_load_leaves_the_checkpoint_alone(tmp_path: Path) -> None:
    model = Net()
    optimizer = optim.Adam(model.parameters())
    train(model, optimizer, 1)
    save(tmp_path / "c", model, optimizer)
    extras = load(tmp_path / "c", model, optimizer)
    assert extras == {}
    train(model, optimizer, 2)
    load(tmp_path / "c", Net())  # its hashes are still right


def test_a_tied_weight_is_stored_once_and_any_tool_opens_the_file(tmp_path: Path) -> None:
    library = pytest.importorskip("safetensors.torch")
    model = Net()
    save(tmp_path / "c", model)
    stored = library.load_file(tmp_path / "c" / "model.safetensors")
    assert set(model.state_dict()) - set(stored) == {"tied.weight"}
    other = Net()
    library.load_model(other, tmp_path / "c" / "model.safetensors")
    assert equal(other.state_dict(), model.state_dict())


def test_a_tied_weight_may_be_loaded_into_two_but_not_two_into_one(tmp_path: Path) -> None:
    untied = Net()
    untied.tied.weight = nn.Parameter(torch.randn(6, 8))
    save(tmp_path / "tied", Net())
    load(tmp_path / "tied", untied)
    assert equal(untied.first.weight, untied.tied.weight)
    untied.tied.weight = nn.Parameter(torch.randn(6, 8))
    save(tmp_path / "untied", untied)
    with pytest.raises(CheckpointError, match=r"'tied\.weight' and 'first\.weight' are one tensor here and two in"):
        load(tmp_path / "untied", Net())


def test_compiled_and_plain_models_share_checkpoints(tmp_path: Path) -> None:
    plain = Net()
    compiled = torch.compile(Net(), backend="eager")
    inside = Net()
    inside.first = torch.compile(inside.first, backend="eager")  # type: ignore[assignment]
    parallel = nn.DataParallel(Net())
    models = [plain, compiled, inside, parallel]
    for i, (source, target) in enumerate(itertools.permutations(models, 2)):
        optimizer = optim.Adam(source.parameters())
        with torch.no_grad():
            source.get_parameter(next(n for n, _ in source.named_parameters() if n.endswith("last.bias"))).fill_(i)
        save(tmp_path / "c", source, optimizer)
        load(tmp_path / "c", target, optim.Adam(target.parameters()))
        assert all(equal(a, b) for a, b in zip(source.parameters(), target.parameters(), strict=True))
        assert set(folder.read(tmp_path / "c").arrays["model"]) == set(plain.state_dict()) - {"tied.weight"}


class Counting(nn.Linear):
    """A module with a state that is no tensor."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.seen: dict[str, Any] = {"calls": 0}
        self.refuses = False

    def get_extra_state(self) -> Any:
        return self.seen

    def set_extra_state(self, state: Any) -> None:
        if self.refuses and state != self.seen:
            raise RuntimeError("no, thank you")
        self.seen = state


def test_extra_state_of_modules_is_kept(tmp_path: Path) -> None:
    model = nn.Sequential(Counting(), Counting())
    model[0].seen = {"calls": 3, "at": (1, 2), "sum": torch.ones(2), "raw": b"\x00\x01"}
    model[1].seen = torch.ones(3)  # type: ignore[assignment]  # another shape than the other model's is no difference
    save(tmp_path / "c", model)
    other = nn.Sequential(Counting(), Counting())
    other[1].seen = torch.zeros(5)  # type: ignore[assignment]
    load(tmp_path / "c", other)
    assert equal(other[0].seen, model[0].seen)
    assert equal(other[1].seen, model[1].seen)


# ---- optimizers go by names ----


def test_groups_may_list_parameters_and_come_in_another_order(tmp_path: Path) -> None:
    def make(order: int) -> tuple[Net, optim.Optimizer]:
        model = Net()
        first = {"params": [model.first.weight, model.first.bias], "lr": 0.1}
        second = {"params": [model.last.weight, model.last.bias, model.norm.weight], "lr": 0.2}
        groups = [first, second] if order > 0 else [second, first]
        for group in groups:
            group["params"] = group["params"][::order]  # type: ignore[index]
        return model, optim.Adam(groups)

    model, optimizer = make(1)
    train(model, optimizer, 2)
    save(tmp_path / "c", model, optimizer)
    other, other_optimizer = make(-1)
    load(tmp_path / "c", other, other_optimizer)
    for name, parameter in model.named_parameters():
        if parameter in optimizer.state:
            assert equal(other_optimizer.state[other.get_parameter(name)], optimizer.state[parameter]), name
    assert [group["lr"] for group in other_optimizer.param_groups] == [0.2, 0.1]
    torch.manual_seed(3)
    expected = train(model, optimizer, 2)
    torch.manual_seed(3)
    assert train(other, other_optimizer, 2) == expected


def test_optimizer_tensors_are_named_after_their_parameters(tmp_path: Path) -> None:
    model = Net()
    temperature = nn.Parameter(torch.zeros(2))
    optimizer = optim.SGD(
        [{"params": list(model.parameters())}, {"params": [temperature], "lr": torch.tensor(0.5)}], 0.1, 0.9
    )
    temperature.grad = torch.ones(2)
    optimizer.step()
    save(tmp_path / "c", model, optimizer)
    arrays = folder.read(tmp_path / "c").arrays["optimizer"]
    assert set(arrays) == {"group.1.0/momentum_buffer", "group.1/lr"}
    fresh = nn.Parameter(torch.zeros(2))
    other = optim.SGD([{"params": list(model.parameters())}, {"params": [fresh], "lr": torch.tensor(0.1)}], 0.1, 0.9)
    load(tmp_path / "c", model, other)
    assert equal(other.state[fresh]["momentum_buffer"], torch.ones(2))
    assert equal(other.param_groups[1]["lr"], torch.tensor(0.5))


def test_named_parameters_keep_the_optimizers_own_order_of_names(tmp_path: Path) -> None:
    model = Net()
    optimizer = optim.Adam(model.named_parameters())
    train(model, optimizer, 1)
    save(tmp_path / "c", model, optimizer)
    other = Net()
    reverse = list(other.named_parameters())[::-1]
    other_optimizer = optim.Adam(reverse)
    load(tmp_path / "c", other, other_optimizer)
    assert other_optimizer.param_groups[0]["param_names"] == [name for name, _ in reverse]
    assert equal(other_optimizer.state[other.last.bias], optimizer.state[model.last.bias])


def test_an_optimizer_without_state_yet_empties_one_with_state(tmp_path: Path) -> None:
    model = Net()
    save(tmp_path / "c", model, optim.Adam(model.parameters(), lr=0.5))
    optimizer = optim.Adam(model.parameters())
    train(model, optimizer, 1)
    load(tmp_path / "c", model, optimizer)
    assert optimizer.state_dict()["state"] == {}
    assert optimizer.param_groups[0]["lr"] == 0.5


def test_state_keeps_its_type_where_torch_would_cast_it(tmp_path: Path) -> None:
    # torch's load_state_dict casts state to the parameter's type: NAdam's mu_product would be rounded to bfloat16.
    model = nn.Linear(8, 8).to(torch.bfloat16)
    optimizer = optim.NAdam(model.parameters())
    for _ in range(3):
        model(torch.randn(4, 8, dtype=torch.bfloat16)).sum().backward()
        optimizer.step()
    save(tmp_path / "c", model, optimizer)
    other = optim.NAdam(model.parameters())
    load(tmp_path / "c", model, other)
    assert optimizer.state[model.weight]["mu_product"].dtype == torch.float32
    assert equal(other.state_dict(), optimizer.state_dict())


# ---- a load that fails changes nothing ----


class Refusing(Loader):
    def load_state_dict(self, state: dict[str, int]) -> None:
        self.batch = -1
        if state["batch"] != 4:
            raise ValueError("this place is taken")
        super().load_state_dict(state)


def saved_run(path: Path) -> None:
    torch.manual_seed(0)
    model = Net()
    optimizer = optim.Adam(model.parameters())
    train(model, optimizer, 2)
    scheduler = lrs.StepLR(optimizer, 1)
    save(path, model, optimizer, Loader(9), {"scheduler": scheduler, "epoch": 1, "ema": AveragedModel(model)})


def other_width(target: dict[str, Any]) -> None:
    target["model"] = Net(7)
    target["optimizer"] = optim.Adam(target["model"].parameters())


def other_type(target: dict[str, Any]) -> None:
    target["model"].double()


def more_layers(target: dict[str, Any]) -> None:
    target["model"].more = nn.Linear(2, 2)


def other_optimizer(target: dict[str, Any]) -> None:
    target["optimizer"] = optim.SGD(target["model"].parameters())


def other_groups(target: dict[str, Any]) -> None:
    first, *rest = target["model"].parameters()
    target["optimizer"] = optim.Adam([{"params": [first]}, {"params": rest}])


def fewer_parameters(target: dict[str, Any]) -> None:
    target["optimizer"] = optim.Adam(target["model"].first.parameters())


def refusing_loader(target: dict[str, Any]) -> None:
    target["loader"] = Refusing(4)


def unknown_extra(target: dict[str, Any]) -> None:
    target["extra"]["swa"] = AveragedModel(target["model"])


def plain_extra(target: dict[str, Any]) -> None:
    target["extra"]["epoch"] = Loader()


def value_to_load_into(target: dict[str, Any]) -> None:
    target["extra"]["epoch"] = 0


def other_ema(target: dict[str, Any]) -> None:
    target["extra"]["ema"] = AveragedModel(Net(7))


@pytest.mark.parametrize(
    ("spoil", "error", "message"),
    [
        (other_width, CheckpointError, r"another model: 'first\.weight' is \(6, 8\) torch\.float32 in it and \(7, 8\)"),
        (other_type, CheckpointError, r"'frozen' is \(3,\) torch\.float32 in it and \(3,\) torch\.float64"),
        (more_layers, CheckpointError, r"it has no 'more\.weight', 'more\.bias'; build the model as it was when saved"),
        (other_optimizer, CheckpointError, r"the optimizer in .* is Adam and this one SGD"),
        (other_groups, CheckpointError, r"no group like group 0 here: it divides .*; build the groups as saved"),
        (fewer_parameters, CheckpointError, r"no group like group 0 here"),
        (refusing_loader, ValueError, "this place is taken"),
        (unknown_extra, CheckpointError, r"has no extra 'swa'; it has 'scheduler', 'epoch', 'ema'"),
        (plain_extra, CheckpointError, r"has a plain value as 'epoch', here it is an object with a state_dict"),
        (value_to_load_into, InputError, r"epoch is of type int and nothing to load into; leave it out"),
        (other_ema, CheckpointError, r"another extra\['ema'\]: 'module\.first\.weight' is \(6, 8\)"),
    ],
)
def test_a_load_that_fails_changes_nothing(
    tmp_path: Path, spoil: Callable[[dict[str, Any]], None], error: type[Exception], message: str
) -> None:
    saved_run(tmp_path / "c")
    torch.manual_seed(1)
    model = Net()
    optimizer = optim.Adam(model.parameters(), lr=0.3)
    target = {"model": model, "optimizer": optimizer, "loader": Loader(4), "extra": {"ema": AveragedModel(model)}}
    spoil(target)
    train(target["model"], target["optimizer"], 0 if spoil is other_type else 2)
    objects = [target["model"], target["optimizer"], target["loader"]]
    before = everything(*objects)
    with pytest.raises(error, match=message) as caught:
        load(tmp_path / "c", **target)
    assert "\n" not in str(caught.value)
    assert equal(everything(*objects), before)
    if spoil is not other_type:
        train(target["model"], target["optimizer"], 1)


def test_a_model_that_refuses_its_state_takes_the_rest_back_too(tmp_path: Path) -> None:
    source = Counting()
    source.seen = {"calls": 5}
    save(tmp_path / "c", source, optim.Adam(source.parameters(), lr=0.7), Loader(9))
    model = Counting()
    model.refuses = True
    optimizer, loader = optim.Adam(model.parameters()), Loader(1)
    before = everything(model, optimizer, loader)
    with pytest.raises(RuntimeError, match="no, thank you"):
        load(tmp_path / "c", model, optimizer, loader)
    assert equal(everything(model, optimizer, loader), before)


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors", "extra.safetensors", "state.json"])
def test_a_damaged_checkpoint_changes_nothing(tmp_path: Path, name: str) -> None:
    saved_run(tmp_path / "c")
    file = tmp_path / "c" / name
    content = bytearray(file.read_bytes())
    content[-2] ^= 4
    file.write_bytes(content)
    model = Net()
    optimizer = optim.Adam(model.parameters())
    before = everything(model, optimizer)
    with pytest.raises(CheckpointError, match=f"{name} is damaged"):
        load(tmp_path / "c", model, optimizer)
    assert equal(everything(model, optimizer), before)


def test_what_was_not_saved_cannot_be_loaded(tmp_path: Path) -> None:
    model = Net()
    save(tmp_path / "c", model)
    with pytest.raises(CheckpointError, match="holds no optimizer, and optimizer is to be loaded; give what was saved"):
        load(tmp_path / "c", model, optim.Adam(model.parameters()))
    with pytest.raises(CheckpointError, match="holds no loader"):
        load(tmp_path / "c", model, loader=Loader())
    folder.write(tmp_path / "other", {"model": {}}, {})
    with pytest.raises(CheckpointError, match="was not saved by nearlinear's PyTorch side"):
        load(tmp_path / "other", model)


# ---- a save that fails changes nothing ----


def sparse() -> nn.Module:
    model = nn.Linear(2, 2)
    model.register_buffer("mask", torch.eye(2).to_sparse())
    return model


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (sparse, r"model\['mask'\] is sparse \(torch\.sparse_coo\); a checkpoint holds dense tensors"),
        (lambda: nn.Linear(2, 2, device="meta"), r"model\['weight'\] is on the meta device and has no values"),
        (lambda: nn.LazyLinear(2), r"model\['weight'\] has no shape yet; run the model on a batch first"),
        (lambda: None, r"model is of type NoneType; give a torch\.nn\.Module"),
        (lambda: 3, r"model is of type int; give a torch\.nn\.Module"),
    ],
)
def test_a_model_that_cannot_be_saved_is_named(tmp_path: Path, make: Callable[[], Any], message: str) -> None:
    save(tmp_path / "c", nn.Linear(2, 2), extra={"epoch": 1})
    with pytest.raises(InputError, match=message):
        save(tmp_path / "c", make())
    assert load(tmp_path / "c", nn.Linear(2, 2)) == {"epoch": 1}


def test_what_cannot_be_saved_is_named_with_its_place(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(InputError, match=r"extra\['callback'\] is a function; save its numbers"):
        save(tmp_path / "c", model, extra={"callback": lambda: 0})
    with pytest.raises(InputError, match=r"extra\['schedulers'\]\[0\] is a StepLR; give it a keyword of its own"):
        save(tmp_path / "c", model, extra={"schedulers": [lrs.StepLR(optim.SGD(model.parameters()), 1)]})
    optimizer = optim.SGD([{"params": model.parameters(), "policy": print}])
    with pytest.raises(InputError, match=r"optimizer\.param_groups\[0\]\['policy'\] is a builtin_function"):
        save(tmp_path / "c", model, optimizer)
    with pytest.raises(InputError, match="optimizer is of type StepLR"):
        save(tmp_path / "c", model, lrs.StepLR(optim.SGD(model.parameters()), 1))
    with pytest.raises(InputError, match=r"loader is of type range and has no state_dict\(\)"):
        save(tmp_path / "c", model, loader=range(3))
    assert not (tmp_path / "c").exists()


# ---- several processes ----


class StoreRanks:
    """Processes that talk through a file, so that a test needs no port."""

    def __init__(self, file: Path, rank: int, size: int) -> None:
        self.store = FileStore(str(file), size)
        self.rank, self.size, self.calls = rank, size, 0

    def all_gather_json(self, value: Any, what: str) -> list[Any]:
        self.calls += 1
        self.store.set(f"{self.calls}.{self.rank}", json.dumps(value))
        return [json.loads(self.store.get(f"{self.calls}.{rank}")) for rank in range(self.size)]


def _entry(act: Callable[..., Any], file: Path, rank: int, size: int, arguments: tuple[Any, ...], answer: Any) -> None:
    torch.set_num_threads(1)
    answer.send(act(StoreRanks(file, rank, size), *arguments))


def on_ranks(tmp_path: Path, size: int, act: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Return what ``act`` returns in each of ``size`` processes."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["torch._dynamo", "pytest", "nearlinear.torch.checkpoint"])  # once for all
    file = tmp_path / f"store.{len(list(tmp_path.iterdir()))}"
    pipes, processes = [], []
    for rank in range(size):
        here, there = context.Pipe(duplex=False)
        process = context.Process(target=_entry, args=(act, file, rank, size, arguments, there), daemon=True)
        process.start()
        there.close()
        pipes.append(here)
        processes.append(process)
    answers = []
    for rank, (pipe, process) in enumerate(zip(pipes, processes, strict=True)):
        assert pipe.poll(60), f"rank {rank} of {size} did not answer within 60 s"
        answers.append(pipe.recv())
        process.join(10)
    return answers


def draws() -> list[float]:
    return [random.random(), float(np.random.rand()), float(torch.rand(()))]


def save_on_ranks(ranks: StoreRanks, path: Path) -> list[float]:
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(100 + ranks.rank)
    save(path, nn.Linear(2, 2), extra={"from rank": ranks.rank}, ranks=ranks)
    folder.read(path)  # it is whole before any rank goes on
    return draws()


def load_on_ranks(ranks: StoreRanks, path: Path) -> tuple[Any, list[float], float]:
    model = nn.Linear(2, 2)
    extras = load(path, model, ranks=ranks)
    return extras["from rank"], draws(), float(model.weight.detach().sum())


def test_a_checkpoint_of_two_ranks_goes_on_with_one_two_or_three(tmp_path: Path) -> None:
    saved = on_ranks(tmp_path, 2, save_on_ranks, tmp_path / "c")
    one, two, three, again = (on_ranks(tmp_path, n, load_on_ranks, tmp_path / "c") for n in (1, 2, 3, 3))
    assert [random for _, random, _ in one] == saved[:1]
    assert [random for _, random, _ in two] == saved
    assert [random for _, random, _ in three[:2]] == saved
    assert three == again
    assert len({number for _, random, _ in three for number in random}) == 9  # every rank has a stream of its own
    assert {(extra, weight) for extra, _, weight in one + two + three} == {(0, one[0][2])}


def failing(ranks: StoreRanks, act: str, path: Path, other: Path) -> tuple[str, str, bool]:
    """Fail on one rank; return what was raised here and whether nothing changed."""
    model = nn.Linear(2, 2)
    optimizer = optim.SGD(model.parameters(), lr=0.25)
    loader: Any = Loader(4)
    if act == "model on rank 1" and ranks.rank == 1:
        model = nn.Linear(3, 2)
        optimizer = optim.SGD(model.parameters(), lr=0.25)
    if act == "loader on rank 1" and ranks.rank == 1:
        loader = Refusing(4)
    if act == "folder on rank 1" and ranks.rank == 1:
        path = other
    before = everything(model, optimizer, loader)
    try:
        if act.startswith("save"):
            extra = {"f": print} if act == "save, extra on rank 0" and ranks.rank == 0 else {}
            save(path, model, optimizer, loader, extra, ranks=ranks)
        else:
            load(path, model, optimizer, loader, ranks=ranks)
    except (NearlinearError, ValueError) as error:
        return type(error).__name__, str(error), equal(everything(model, optimizer, loader), before)
    return "nothing", "", False


@pytest.mark.parametrize(
    ("act", "names", "messages"),
    [
        ("save", ["CheckpointError"] * 2, ["cannot save to", "failed on rank 0: CheckpointError: cannot save to"]),
        (
            "save, extra on rank 0",
            ["InputError", "CheckpointError"],
            ["extra['f'] is a builtin", "failed on rank 0: InputError: extra['f'] is a builtin"],
        ),
        (
            "model on rank 1",
            ["CheckpointError"] * 2,
            ["failed on rank 1: CheckpointError: ", "'weight' is (2, 2) torch.float32 in it and (2, 3)"],
        ),
        ("loader on rank 1", ["CheckpointError", "ValueError"], ["failed on rank 1: ValueError: this", "this place"]),
        (
            "folder on rank 1",
            ["CheckpointError"] * 2,
            ["ranks 0 and 1 found different checkpoints", "ranks 1 and 0 found different checkpoints"],
        ),
    ],
)
def test_a_failure_on_one_rank_is_raised_on_all_and_changes_nothing(
    tmp_path: Path, act: str, names: list[str], messages: list[str]
) -> None:
    path, other = tmp_path / "c", tmp_path / "d"
    for each in (path, other):
        model = nn.Linear(2, 2)
        save(each, model, optim.SGD(model.parameters()), Loader(9))
    if act == "save":
        (tmp_path / "file").write_text("")
        path = tmp_path / "file" / "c"
    answers = on_ranks(tmp_path, 2, failing, act, path, other)
    assert [name for name, _, _ in answers] == names
    for (_, said, unchanged), message in zip(answers, messages, strict=True):
        assert message in said
        assert unchanged


# ---- memory ----


def peak_mib(ranks: StoreRanks, path: Path, mib: int) -> tuple[float, float]:
    """Return by how many MiB saving and then loading a model of ``mib`` raised this process's peak."""

    def peak() -> float:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

    save(path.with_name("small"), nn.Linear(2, 2))  # what is needed once is not counted
    model = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(mib // 4)))
    start = peak()
    save(path, model)
    saved = peak()
    load(path, model)
    return saved - start, peak() - saved


@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss is in KiB on Linux")
def test_saving_copies_nothing_and_loading_once(tmp_path: Path) -> None:
    mib = 128
    [(saving, loading)] = on_ranks(tmp_path, 1, peak_mib, tmp_path / "c", mib)
    assert saving < 0.2 * mib
    # What the model was before, should the load fail; and the file's pages, which the kernel may drop at any time.
    assert loading < 2.2 * mib
