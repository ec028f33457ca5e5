"""A model whose parameters lie on several ranks reads, clips and steps like a whole one, in float64.

The file is also the script that the processes run: every case once on one process with a plain model, and once on two
and three with a split one. What stands in for the pipeline fetches the parameters, computes the whole model with
them, and keeps the gradients of the rank's own. So the numbers differ in the last bits at most: 1e-12.
"""

from __future__ import annotations

import copy
import io
import resource
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import nearlinear as nl
from nearlinear.errors import InputError
from nearlinear.testing import run_processes
from nearlinear.torch.pipeline.parameters import Parameters
from nearlinear.torch.pipeline.values import Values
from nearlinear.torch.session import Session, start

Found = dict[str, Any]
Case = Callable[["Training"], Found]
CASES: dict[str, Case] = {}
ERRORS: dict[str, tuple[Callable[[Any], None], str]] = {}


def case(function: Case) -> Case:
    CASES[function.__name__] = function
    return function


def refused(words: str) -> Callable[[Callable[[Training], None]], Callable[[Training], None]]:
    def add(function: Callable[[Training], None]) -> Callable[[Training], None]:
        ERRORS[function.__name__] = function, words
        return function

    return add


class Net(nn.Module):
    """Everything that is difficult: a tied weight, a frozen and an unused parameter, statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 5, bias=False)
        self.norm = nn.BatchNorm1d(5)
        self.middle = nn.ModuleList(nn.Linear(5, 5) for _ in range(3))
        self.frozen = nn.Parameter(torch.randn(5), requires_grad=False)
        self.unused = nn.Linear(3, 2)
        self.last = nn.Linear(6, 5, bias=False)
        self.last.weight = self.first.weight
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        h = self.norm(self.first(x))
        for layer in self.middle:
            h = h + torch.tanh(layer(h)) * self.frozen
        return h @ self.last.weight


class Training:
    """A model and a way to run its backward pass."""

    def __init__(self, session: Session, values: Values) -> None:
        torch.manual_seed(7)
        self.model, self.session, self.values = Net().double(), session, values
        self.temperature = nn.Parameter(torch.tensor(1.5, dtype=torch.float64))  # of the loss: the optimizer's alone
        self.parameters: Parameters | None = None
        self.optimizers: list[torch.optim.Optimizer] = []
        if session.size == 1:
            return
        self.names = [n for n, _ in self.model.named_parameters()] + [n for n, _ in self.model.named_buffers()]
        self.owners = {name: (number * session.size // len(self.names),) for number, name in enumerate(self.names)}
        self.owners["first.weight"] = (session.size - 1, 0)
        self.skeleton = copy.deepcopy(self.model)
        assert session.control is not None
        self.owners["temperature"] = (session.size - 1,)
        more = {"temperature": self.temperature}
        self.parameters = Parameters(self.model, self.owners, session, session.control, values, more)
        self.parameters.send_away()

    def trained(self) -> list[nn.Parameter]:
        return [*self.model.parameters(), self.temperature]

    def optimizer(self, make: Any, parameters: Any = None, **options: Any) -> torch.optim.Optimizer:
        made: torch.optim.Optimizer = make(parameters or self.trained(), **options)
        if self.parameters is not None:
            held = self.parameters
            made.register_step_pre_hook(lambda optimizer, *_: held.step_began(optimizer))
            made.register_step_post_hook(lambda optimizer, *_: held.step_ended(optimizer))
        return made

    def backward(self, number: int, scale: float | torch.Tensor = 1.0) -> None:
        """Run the ``number``-th batch."""
        generator = torch.Generator().manual_seed(number)
        x, y = (torch.randn(8, 6, generator=generator, dtype=torch.float64) for _ in range(2))
        if self.parameters is None:
            (F.mse_loss(self.model(x), y) * scale * self.temperature).backward()
            return
        rank, call = self.session.rank, self.values.began + 1
        state = {name: tensor.detach().clone() for name, tensor in self.named()}
        self.values.began_call(call)
        for name, parameter in self.skeleton.named_parameters():
            state[name].requires_grad_(parameter.requires_grad)
        temperature = state.pop("temperature").requires_grad_()
        state["last.weight"] = state["first.weight"].detach().clone().requires_grad_()
        out = torch.func.functional_call(self.skeleton, state, (x,), tie_weights=False)
        for name, buffer in self.model.named_buffers():
            if rank in self.owners[name]:
                with torch.no_grad():
                    buffer.copy_(state[name])
        self.values.ended_call(call)
        loss, state["temperature"] = F.mse_loss(out, y) * scale * temperature, temperature
        trained = [name for name, tensor in state.items() if tensor.requires_grad]
        gradients = torch.autograd.grad(loss, [state[name] for name in trained], allow_unused=True)
        self.session.barrier("a backward pass")  # which in a pipeline no rank can end without the others
        self.parameters.backward_began()
        for name, gradient in zip(trained, gradients, strict=True):
            which = "first.weight" if name == "last.weight" else name
            # Of the tied weight the first use is on rank 0 and the second on the last rank.
            here = rank == {"first.weight": 0, "last.weight": self.session.size - 1}.get(name)
            if gradient is not None and (rank in self.owners[which] if which != "first.weight" else here):
                parameter = self.temperature if which == "temperature" else self.model.get_parameter(which)
                torch.autograd.backward([parameter], [gradient])
        self.parameters.backward_ended()

    def named(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self.model.named_parameters()
        yield from self.model.named_buffers()
        yield "temperature", self.temperature

    def state(self) -> Found:
        return {f"state/{name}": tensor.detach().clone() for name, tensor in self.named()}


def gradients(training: Training) -> list[torch.Tensor]:
    return [p.grad for p in training.trained() if p.grad is not None]


# ---- clipping and steps


def _clipped(training: Training, make: Any, options: Mapping[str, Any], norm: float, **how: Any) -> Found:
    optimizer, found = training.optimizer(make, **options), {}
    for step in range(4):
        optimizer.zero_grad()
        training.backward(step)
        found[f"total/{step}"] = nn.utils.clip_grad_norm_(training.trained(), 0.3, norm, **how)
        found[f"after/{step}"] = nn.utils.get_total_norm(gradients(training), norm)
        optimizer.step()
    return {**found, **training.state()}


@case
def momentum_with_clipping(training: Training) -> Found:
    return _clipped(training, torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}, 2.0)


@case
def adam_with_the_largest_element_clipped(training: Training) -> Found:
    return _clipped(training, torch.optim.Adam, {"lr": 0.01}, float("inf"), error_if_nonfinite=True)


@case
def adamw_fused_with_the_sum_clipped(training: Training) -> Found:
    return _clipped(training, torch.optim.AdamW, {"lr": 0.01, "fused": True}, 1.0, foreach=False)


@case
def adamw_foreach_with_foreach_clipping(training: Training) -> Found:
    return _clipped(training, torch.optim.AdamW, {"lr": 0.01, "foreach": True, "amsgrad": True}, 2.0, foreach=True)


@case
def adagrad_with_an_odd_norm(training: Training) -> Found:
    return _clipped(training, torch.optim.Adagrad, {"lr": 0.05}, 3.0)


@case
def rmsprop(training: Training) -> Found:
    return _clipped(training, torch.optim.RMSprop, {"lr": 0.01, "centered": True, "momentum": 0.5}, 2.0)


class Lion(torch.optim.Optimizer):
    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                momentum = self.state[p].setdefault("m", torch.zeros_like(p))
                p.add_(torch.sign(momentum * 0.9 + p.grad * 0.1), alpha=-group["lr"])
                momentum.mul_(0.99).add_(p.grad, alpha=0.01)


@case
def an_optimizer_written_by_hand(training: Training) -> Found:
    return _clipped(training, Lion, {"lr": 0.01}, 2.0)


@case
def values_clipped(training: Training) -> Found:
    optimizer, found = training.optimizer(torch.optim.SGD, lr=0.1), {}
    for step, foreach in enumerate((None, True, False)):
        optimizer.zero_grad(set_to_none=False)
        training.backward(step)
        nn.utils.clip_grad_value_(training.model.parameters(), 0.01, foreach=foreach)
        found[f"norm/{step}"] = nn.utils.get_total_norm(gradients(training))
        optimizer.step()
    return {**found, **training.state()}


@case
def norms_in_a_loop(training: Training) -> Found:
    optimizer, found = training.optimizer(torch.optim.SGD, lr=0.1), {}
    for step in range(3):
        optimizer.zero_grad()
        training.backward(step)
        total = 0.0
        for p in training.model.parameters():
            if p.grad is not None:
                total += p.grad.data.norm(2).item() ** 2
        found[f"total/{step}"] = total**0.5
        squares = sum((p.grad**2).sum() for p in training.model.parameters() if p.grad is not None)
        found[f"squares/{step}"] = squares
        for p in training.model.parameters():
            if p.grad is not None:
                p.grad.detach().mul_(min(1.0, 0.2 / (total**0.5 + 1e-6)))
                found[f"each/{step}"] = found.get(f"each/{step}", 0.0) + torch.linalg.norm(p.grad.flatten())
        found[f"by absolutes/{step}"] = torch.norm(
            torch.stack([torch.norm(p.grad, p=1) for p in training.model.parameters() if p.grad is not None])
        )
        optimizer.step()
    return {**found, **training.state()}


@case
def parts_clipped_apart(training: Training) -> Found:
    # A part may lie on one rank as a whole, which then clips without having asked anybody.
    optimizer, found = training.optimizer(torch.optim.SGD, lr=0.1, momentum=0.5), {}
    model = training.model
    parts = [[model.first], [model.norm], *([layer] for layer in model.middle), [model.unused]]
    for step in range(4):
        optimizer.zero_grad()
        training.backward(step)
        for number, part in enumerate(parts):
            parameters = [p for module in part for p in module.parameters()]
            found[f"total/{step}/{number}"] = nn.utils.clip_grad_norm_(parameters, 0.05)
        found[f"after/{step}"] = nn.utils.get_total_norm(gradients(training))
        optimizer.step()
    return {**found, **training.state()}


@case
def two_optimizers(training: Training) -> Found:
    everything, found = training.trained(), {}
    first = training.optimizer(torch.optim.Adam, everything[:5], lr=0.01)
    second = training.optimizer(torch.optim.SGD, everything[5:], lr=0.1)
    for step in range(3):
        training.backward(step)
        found[f"first/{step}"] = nn.utils.clip_grad_norm_(everything[:5], 0.2)
        first.step()
        found[f"second/{step}"] = nn.utils.clip_grad_norm_(everything[5:], 0.2)
        second.step()
        first.zero_grad()
        second.zero_grad()
    return {**found, **training.state()}


# ---- windows


@case
def accumulation(training: Training) -> Found:
    optimizer, found = training.optimizer(torch.optim.SGD, lr=0.1, momentum=0.9), {}
    for step in range(3):
        optimizer.zero_grad()
        for number in range(3):
            training.backward(10 * step + number, 1 / 3)
            if step == 1:  # what was summed and read already is added to
                found[f"between/{number}"] = nn.utils.get_total_norm(gradients(training))
        found[f"total/{step}"] = nn.utils.clip_grad_norm_(training.trained(), 0.3)
        optimizer.step()
    return {**found, **training.state()}


@case
def a_window_that_goes_on_after_a_step(training: Training) -> Found:
    optimizer, found = training.optimizer(torch.optim.SGD, lr=0.05), {}
    for step in range(3):  # never zeroed
        training.backward(step)
        optimizer.step()
        found[f"total/{step}"] = nn.utils.get_total_norm(gradients(training))
    return {**found, **training.state()}


@case
def which_have_a_gradient(training: Training) -> Found:
    found = {"before": [p.grad is None for p in training.model.parameters()]}
    training.backward(0)
    found["after"] = [p.grad is None for p in training.model.parameters()]
    training.model.zero_grad(set_to_none=False)
    found["zero"] = nn.utils.get_total_norm(gradients(training))
    training.model.zero_grad()
    found["none"] = [p.grad is None for p in training.model.parameters()]
    training.model.frozen.requires_grad_(True)
    if training.parameters is not None:
        training.skeleton.frozen.requires_grad_(True)
    training.backward(1)
    found["thawed"] = [p.grad is None for p in training.model.parameters()]
    return {**found, "norm": nn.utils.get_total_norm(gradients(training))}


@case
def values_of_gradients(training: Training) -> Found:
    optimizer, found = training.optimizer(torch.optim.SGD, lr=0.1), {}
    for step in range(3):
        optimizer.zero_grad()
        training.backward(step)
        largest = [p.grad.abs().max() for p in training.model.parameters() if p.grad is not None]
        found[f"largest/{step}"] = torch.stack(largest)
        noise = [torch.randn_like(p.grad) for p in training.model.parameters() if p.grad is not None]
        found[f"noise/{step}"] = torch.cat([each.flatten() for each in noise])
        for p in training.model.parameters():
            if p.grad is not None:
                p.grad.add_(0.001)
        found[f"all/{step}"] = torch.cat([g.flatten() for g in gradients(training)])
        optimizer.step()
    return {**found, **training.state()}


def _scaled(training: Training, *, unscale: bool) -> Found:
    optimizer, found = training.optimizer(torch.optim.SGD, lr=0.1, momentum=0.9), {}
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    for step in range(5):
        optimizer.zero_grad()
        training.backward(step, scaler.scale(torch.tensor(1.0, dtype=torch.float64)))
        if step == 2:  # the last rank alone has something infinite
            training.model.middle[2].bias.grad[1] = float("inf")
        if unscale:
            scaler.unscale_(optimizer)
            found[f"total/{step}"] = nn.utils.clip_grad_norm_(training.trained(), 0.3)
        scaler.step(optimizer)
        scaler.update()
        found[f"scale/{step}"] = scaler.get_scale()
    return {**found, **training.state()}


@case
def a_scaler(training: Training) -> Found:
    return _scaled(training, unscale=False)


@case
def a_scaler_and_clipping(training: Training) -> Found:
    return _scaled(training, unscale=True)


# ---- values


@case
def averages_of_the_weights(training: Training) -> Found:
    average = copy.deepcopy(training.model)
    optimizer = training.optimizer(torch.optim.Adam, lr=0.01)
    for step in range(4):
        optimizer.zero_grad()
        training.backward(step)
        optimizer.step()
        with torch.no_grad():
            for ours, theirs in zip(average.parameters(), training.model.parameters(), strict=True):
                ours.lerp_(theirs, 0.1)
            for ours, theirs in zip(average.buffers(), training.model.buffers(), strict=True):
                ours.copy_(theirs)
    assert all(type(p) is nn.Parameter for p in average.parameters())
    found = {name: tensor.detach() for name, tensor in average.state_dict().items()}
    return {**found, "vector": nn.utils.parameters_to_vector(training.model.parameters()).detach()}


@case
def weights_decayed_by_hand(training: Training) -> Found:
    optimizer, found = training.optimizer(torch.optim.SGD, lr=0.1), {}
    parameters = list(training.model.parameters())
    for step in range(3):
        optimizer.zero_grad()
        training.backward(step)
        optimizer.step()
        with torch.no_grad():
            for p in parameters:
                p.mul_(0.9)
            torch._foreach_mul_(parameters, 0.99)
            parameters[0][1:3] -= 0.1
            found[f"norm/{step}"] = torch.stack([p.norm() for p in parameters])
        found[f"sum/{step}"] = sum(float(p.detach().sum()) for p in parameters)
    training.backward(4)
    for p in parameters:
        p.data.clamp_(-0.5, 0.5)
    optimizer.step()
    return {**found, **training.state()}


@case
def weights_drawn_anew(training: Training) -> Found:
    torch.manual_seed(3)
    for module in training.model.modules():
        if isinstance(module, nn.Linear):
            nn.init.xavier_normal_(module.weight)
            module.reset_parameters()
    return {**training.state(), "next": torch.rand(3)}


@case
def a_loaded_state(training: Training) -> Found:
    torch.manual_seed(11)
    other = Net().double()
    found = training.model.load_state_dict(other.state_dict())
    assert not found.missing_keys and not found.unexpected_keys
    again = Net().double()
    again.load_state_dict(training.model.state_dict())
    return {**training.state(), **again.state_dict()}


@case
def statistics_of_a_batchnorm(training: Training) -> Found:
    found = {}
    for step in range(6):
        training.backward(step)
        if step == 3:
            training.model.norm.reset_running_stats()
        reader = step % training.session.size == training.session.rank
        if reader or training.session.size == 1:
            for name, buffer in training.model.named_buffers():
                found[f"{step}/{name}"] = buffer.clone()
    return found


@case
def what_one_rank_reads_alone(training: Training) -> Found:
    """Print, log and save under ``if nl.is_main()``, or on the last rank, at every place of a step."""
    optimizer, found = training.optimizer(torch.optim.Adam, lr=0.01), {}
    size, rank = training.session.size, training.session.rank
    for step in range(4):
        for number in range(2):
            training.backward(10 * step + number)
            if rank == 0 and number == 1:
                found[f"gradients/{step}"] = [p.grad.norm() for p in training.model.parameters() if p.grad is not None]
        if rank == size - 1:
            found[f"parameters/{step}"] = [p.detach().norm() for p in training.model.parameters()]
            found[f"text/{step}"] = repr(training.model.middle[0].weight)
        optimizer.step()
        if rank == 0:
            file = io.BytesIO()
            torch.save(training.model.state_dict(), file)
            file.seek(0)
            saved = torch.load(file, weights_only=True)
            assert all(type(tensor) is torch.Tensor for tensor in saved.values())
            found |= {f"saved/{step}/{name}": tensor for name, tensor in saved.items()}
            found[f"numpy/{step}"] = training.model.middle[1].bias.detach().numpy().sum()
        optimizer.zero_grad()
    return found


@case
def a_copy_of_the_model(training: Training) -> Found:
    training.backward(0)
    copied = copy.deepcopy(training.model)
    x = torch.ones(4, 6, dtype=torch.float64)
    return {"out": copied(x).detach(), "tied": copied.last.weight is copied.first.weight}


@case
def what_stays_as_it_was(training: Training) -> Found:
    model = training.model
    return {
        "shapes": [list(p.shape) for p in model.parameters()],
        "strides": [list(p.stride()) for p in model.parameters()],
        "numbers": sum(p.numel() for p in model.parameters()),
        "parameters": all(isinstance(p, nn.Parameter) and p.is_leaf for p in model.parameters()),
        "trained": [p.requires_grad for p in model.parameters()],
        "dtypes": [str(p.dtype) for p in model.parameters()],
        "names": list(model.state_dict()),
        "same": model.to("cpu") is model and model.last.weight is model.first.weight,
        "views": [p.view(-1)[1:].sum().item() + p.detach().t().flatten()[0].item() for p in model.middle.parameters()],
        "rows": [float(row.detach().sum()) for row in model.middle[0].weight],
    }


# ---- what is refused


@refused("weight_decay")
def a_penalty_in_the_loss(training: Training) -> None:
    sum(p.pow(2).sum() for p in training.model.parameters()).backward()


@refused("LBFGS")
def an_optimizer_that_looks_at_all(training: Training) -> None:
    training.optimizer(torch.optim.LBFGS).step(lambda: None)


@refused("extra.weight became a parameter of the model after distribute")
def a_layer_added_later(training: Training) -> None:
    training.model.extra = nn.Linear(2, 2)
    training.optimizer(torch.optim.SGD, list(training.model.parameters())[:3], lr=0.1).step()


@refused("the optimizer was given parameters after distribute")
def a_parameter_added_to_the_optimizer(training: Training) -> None:
    optimizer = training.optimizer(torch.optim.SGD, list(training.model.parameters())[:3], lr=0.1)
    optimizer.step()
    optimizer.add_param_group({"params": list(training.model.parameters())[4:]})
    optimizer.step()


@refused("edited through .data")
def a_value_read_after_an_edit_that_nothing_counts(training: Training) -> None:
    for p in training.model.parameters():
        p.data.mul_(0.9)
    for p in training.model.parameters():
        p.detach().sum()


@refused("every rank must make the same calls")
def a_backward_pass_on_one_rank_alone(training: Training) -> None:
    assert training.parameters is not None
    if training.session.rank == 0:
        training.parameters.backward_began()
        training.parameters._gradients.shared.clear()  # nothing to wait for, so that the count alone tells
        training.parameters.backward_ended()
    else:
        training.parameters._gradients.shared.clear()
    training.optimizer(torch.optim.SGD, lr=0.1).step()


@refused("has no address here")
def the_address_of_a_value(training: Training) -> None:
    for p in training.model.parameters():
        p.data_ptr()


# ---- the script


def _numbers(found: Any) -> np.ndarray:
    if isinstance(found, torch.Tensor):
        return found.detach().double().numpy()
    if isinstance(found, list) and found and isinstance(found[0], torch.Tensor):
        return np.array([float(each) for each in found])
    if isinstance(found, list) and found and isinstance(found[0], list):
        return np.array([",".join(map(str, each)) for each in found])
    return np.array(found)


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    session = start(torch.device("cpu"))
    values = Values(session)
    for name, function in CASES.items():
        found = function(Training(session, values))
        np.savez(folder / f"{name}.{session.size}.{session.rank}.npz", **{k: _numbers(v) for k, v in found.items()})
        session.barrier(f"the end of {name}")
    if session.size > 1:
        for name, (refuse, _) in ERRORS.items():
            training, said = Training(session, values), ""
            try:
                refuse(training)
            except InputError as error:
                said = str(error)
            (folder / f"{name}.{session.size}.{session.rank}.txt").write_text(said)
            session.barrier(f"the end of {name}")
        np.savez(folder / f"memory.{session.size}.{session.rank}.npz", **_memory(session, values))
    print("done", nl.rank())


def _memory(session: Session, values: Values) -> dict[str, float]:
    """Return by how much the process grows or shrinks, in bytes."""
    model = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(3 * session.size)))
    whole, before = sum(p.nbytes for p in model.parameters()), _resident()
    owners = {f"{n}.weight": (n // 3,) for n in range(3 * session.size)}
    parameters = Parameters(model, owners, session, session.control, values)
    parameters.send_away()
    freed = before - _resident()
    optimizer = torch.optim.Adam(model.parameters())
    parameters.backward_began()
    for name, p in model.named_parameters():
        if session.rank in owners[name]:
            p.grad = torch.ones_like(p)
    parameters.backward_ended()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    parameters.step_began(optimizer)
    optimizer.step()
    parameters.step_ended(optimizer)
    kept = sum(tensor.nbytes for state in optimizer.state.values() for tensor in state.values())
    session.barrier("the end of the memory")
    return {"whole": whole, "freed": freed, "states": len(optimizer.state), "kept": kept}


def _resident() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


# ---- the tests


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _ran(1, tmp_path_factory.mktemp("one"))


@pytest.fixture(scope="module", params=[pytest.param(2, marks=pytest.mark.full), 3])
def split(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[int, Path]:
    return request.param, _ran(request.param, tmp_path_factory.mktemp("several"))


def _ran(n: int, folder: Path) -> Path:
    env = {"OMP_NUM_THREADS": "1", "NEARLINEAR_DEADLINE": "20 s"}
    results = run_processes(__file__, n, [str(folder)], env=env, timeout_s=200)
    log = "\n".join(f"{each}\n{each.stdout[-2000:]}\n{each.stderr[-6000:]}" for each in results)
    (folder / "log").write_text(log if any(each.exit_code for each in results) else "")
    return folder


def _of(folder: Path, name: str, n: int, rank: int) -> dict[str, np.ndarray]:
    file = folder / f"{name}.{n}.{rank}.npz"
    assert file.exists(), f"it ended early:\n{(folder / 'log').read_text()}"
    return dict(np.load(file))


@pytest.mark.parametrize("name", CASES)
def test_a_split_model_has_the_numbers_of_a_whole_one(name: str, alone: Path, split: tuple[int, Path]) -> None:
    n, folder = split
    one, ranks = _of(alone, name, 1, 0), [_of(folder, name, n, rank) for rank in range(n)]
    assert set(one) == set().union(*ranks)
    for found in ranks:
        for key, value in found.items():
            if value.dtype.kind in "fiu":
                np.testing.assert_allclose(value, one[key], rtol=1e-12, atol=1e-14, err_msg=key)
            else:
                np.testing.assert_array_equal(value, one[key], err_msg=key)


@pytest.mark.parametrize("name", CASES)
def test_all_ranks_read_the_same_to_the_last_bit(name: str, split: tuple[int, Path]) -> None:
    n, folder = split
    first, *others = [_of(folder, name, n, rank) for rank in range(n)]
    for other in others:
        for key in first.keys() & other.keys():
            np.testing.assert_array_equal(other[key], first[key], err_msg=key)


@pytest.mark.parametrize("name", ERRORS)
def test_what_would_be_wrong_is_refused(name: str, split: tuple[int, Path]) -> None:
    n, folder = split
    said = [(folder / f"{name}.{n}.{rank}.txt").read_text() for rank in range(n)]
    assert any(ERRORS[name][1] in each for each in said), said


def test_what_lies_elsewhere_holds_no_memory(split: tuple[int, Path]) -> None:
    n, folder = split
    for rank in range(n):
        found = _of(folder, "memory", n, rank)
        share = found["whole"] / n
        # Memory of 4 MiB goes back to the system at once; 10 % for what else the process does meanwhile.
        assert found["freed"] == pytest.approx(found["whole"] - share, rel=0.1)
        assert found["states"] == 3 and found["kept"] == pytest.approx(2 * share, rel=1e-3)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
