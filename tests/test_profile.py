"""What a profile measures, and that it leaves no trace; and what a device that is not here would take."""

from __future__ import annotations

import copy
import math
import random
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from nearlinear.core.cluster import Device
from nearlinear.core.graph import Graph, Operator
from nearlinear.errors import InputError
from nearlinear.planning.roofline import roofline
from nearlinear.torch.capture import capture
from nearlinear.torch.profile import profile


class Net(nn.Module):
    """Dropout, running statistics, a counter, a list, and a layer that is ten times the other's work."""

    def __init__(self) -> None:
        super().__init__()
        self.small, self.norm, self.drop = nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Dropout(0.5)
        self.large, self.head = nn.Sequential(nn.Linear(64, 1024), nn.ReLU(), nn.Linear(1024, 64)), nn.Linear(64, 4)
        self.register_buffer("count", torch.zeros(()))
        self.log: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        self.log.append(x.mean())
        return self.head(self.large(self.drop(self.norm(self.small(x)))))


BATCH = (torch.randn(256, 64, generator=torch.Generator().manual_seed(0)),)
LABELS = torch.arange(256) % 4


def loss(output: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output, LABELS)


def test_operators_sum_to_the_whole_step() -> None:
    model = Net()
    measured = profile(model, BATCH, loss=loss, optimizer=torch.optim.Adam(model.parameters()), budget=0.3)
    operators = measured.graph.operators
    for phase in ("forward", "backward", "update"):
        assert math.isclose(sum(getattr(each, phase) for each in operators), getattr(measured, phase), rel_tol=1e-9)
    assert math.isclose(measured.forward + measured.backward + measured.update, measured.step, rel_tol=1e-9)
    assert math.isclose(measured.graph.time + measured.update, measured.step, rel_tol=1e-9)
    assert measured.steps >= 5 and measured.spread >= 0 and measured.residue < 1
    assert "per step of 256 samples" in str(measured)


def test_the_layer_with_most_work_has_most_of_the_time() -> None:
    model = Net()
    measured = profile(model, BATCH, loss=loss, budget=0.3)
    time = {each.name: each.forward + each.backward for each in measured.graph.operators}
    assert time["large.0"] + time["large.2"] > 3 * time["small"]
    assert all(each.update == 0 for each in measured.graph.operators)


def test_a_loss_of_the_scripts_own_is_an_operator_that_mixes_the_batch() -> None:
    graph = profile(Net(), BATCH, loss=loss, budget=0).graph
    last = graph.operators[-1]
    assert (last.name, last.mixes_batch) == ("loss", True) and last.forward > 0 and last.backward > 0
    assert graph.operators[graph.tensors[-1].producer].name == "head"


def test_the_optimizers_state_is_counted_as_it_is_found() -> None:
    model = nn.Sequential(nn.Linear(8, 8, bias=False))
    states = {}
    for name, optimizer in {
        "adam": torch.optim.Adam(model.parameters()),
        "momentum": torch.optim.SGD(model.parameters(), 0.1, momentum=0.9),
        "sgd": torch.optim.SGD(model.parameters(), 0.1),
    }.items():
        (only,) = profile(model, (torch.randn(4, 8),), optimizer=optimizer, budget=0).graph.operators
        states[name] = only.state_bytes / (8 * 8 * 4)
    assert states == {"adam": pytest.approx(4, abs=0.1), "momentum": 3, "sgd": 2}


def _picture(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    numpy_state: Any = np.random.get_state()
    return copy.deepcopy(
        {
            "model": model.state_dict(),
            "gradients": [each.grad for each in model.parameters()],
            "attributes": {path: sorted(vars(module)) for path, module in model.named_modules()},
            "log": model.log,
            "training": model.training,
            "hooks": [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()],
            "optimizer": optimizer.state_dict(),
            "optimizer attributes": sorted(vars(optimizer)),
            "streams": [torch.get_rng_state(), random.getstate(), numpy_state[1]],
        }
    )


def _assert_same(one: Any, other: Any, where: str = "") -> None:
    if isinstance(one, dict):
        assert one.keys() == other.keys(), where
        for key in one:
            _assert_same(one[key], other[key], f"{where}.{key}")
    elif isinstance(one, list | tuple):
        assert len(one) == len(other), where
        for number, (a, b) in enumerate(zip(one, other, strict=True)):
            _assert_same(a, b, f"{where}[{number}]")
    elif isinstance(one, torch.Tensor):
        assert torch.equal(one, other), where
    elif isinstance(one, np.ndarray):
        assert (one == other).all(), where
    else:
        assert one == other, where


@pytest.mark.parametrize("stepped", [False, True])
@pytest.mark.parametrize("kind", ["adam", "momentum"])
def test_a_profile_leaves_no_trace_bit_for_bit(kind: str, stepped: bool) -> None:
    model = Net()
    parameters = list(model.parameters())
    optimizer: torch.optim.Optimizer = (
        torch.optim.AdamW(parameters, 1e-2) if kind == "adam" else torch.optim.SGD(parameters, 0.1, momentum=0.9)
    )
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    if stepped:
        loss(model(*BATCH)).backward()
        optimizer.step()
        schedule.step()
        model.log.clear()
    gradients = [each.grad for each in parameters]
    before = _picture(model, optimizer)
    profile(model, BATCH, loss=loss, optimizer=optimizer, budget=0)
    _assert_same(before, _picture(model, optimizer))
    assert all(each.grad is gradient for each, gradient in zip(parameters, gradients, strict=True))


def test_training_goes_on_as_if_there_had_been_no_profile() -> None:
    def train(profiled: bool) -> list[float]:
        torch.manual_seed(3)
        model = Net()
        optimizer = torch.optim.Adam(model.parameters())
        losses = []
        for step in range(4):
            if profiled and step == 2:
                profile(model, BATCH, loss=loss, optimizer=optimizer, budget=0)
            optimizer.zero_grad()
            value = loss(model(*BATCH))
            value.backward()
            optimizer.step()
            losses.append(value.item())
        return losses

    assert train(profiled=True) == train(profiled=False)


def test_a_failing_model_is_left_as_it_was_too() -> None:
    class Fails(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out = super().forward(x)
            if len(self.log) > 3:
                raise ValueError("worn out")
            return out

    model = Fails()
    optimizer = torch.optim.Adam(model.parameters())
    captured = capture(model, BATCH)
    before = _picture(model, optimizer)
    with pytest.raises(ValueError, match="worn out"):
        profile(model, BATCH, loss=loss, optimizer=optimizer, captured=captured)
    _assert_same(before, _picture(model, optimizer))


def test_a_model_that_evaluates_has_no_backward_pass() -> None:
    measured = profile(Net().eval(), BATCH, budget=0)
    assert measured.backward == measured.update == 0 and not measured.graph.training
    assert math.isclose(sum(each.forward for each in measured.graph.operators), measured.step, rel_tol=1e-9)


def test_a_graph_of_another_batch_is_refused() -> None:
    captured = capture(Net(), (torch.randn(8, 64),))
    with pytest.raises(InputError, match="captured with 8 samples and is profiled with 256"):
        profile(Net(), BATCH, captured=captured)


def test_a_model_whose_modules_are_called_in_a_loop_is_profiled() -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell, self.head = nn.Linear(16, 16), nn.Linear(16, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(3):
                x = torch.tanh(self.cell(x))
            return self.head(x)

    measured = profile(Recurrent(), (torch.randn(4, 16),), budget=0)
    assert all(each.forward > 0 and each.backward > 0 for each in measured.graph.operators)


GPU = Device("gpu", 80e9, {"float32": 10e12, "bfloat16": 100e12}, 1e12)


def test_a_roofline_is_bound_by_flop_or_by_bytes() -> None:
    graph = Graph((Operator("product", flop=7e12, moved_bytes=7e9), Operator("sum", flop=0, moved_bytes=7e11)))
    one, two = roofline(graph, GPU, efficiency=0.7).operators
    assert one.forward == pytest.approx(1.0) and two.forward == pytest.approx(1.0)
    assert roofline(graph, GPU, "bfloat16", efficiency=0.7).operators[0].forward == pytest.approx(0.1)
    assert "70%" in roofline(graph, GPU, efficiency=0.7).source


def test_a_frozen_layer_has_no_update_and_half_the_backward() -> None:
    frozen = Operator("frozen", flop=7e12, parameter_bytes=1e9, state_bytes=1e9)
    trained = Operator("trained", flop=7e12, parameter_bytes=1e9, state_bytes=4e9)
    one, two = roofline(Graph((frozen, trained)), GPU, efficiency=0.7).operators
    assert one.update == 0 and two.update == pytest.approx(7e9 / 0.7e12)
    assert one.backward == one.forward and two.backward == 2 * two.forward


def test_what_multiplies_nothing_takes_as_long_backward_as_forward_and_nothing_where_the_graph_only_infers() -> None:
    graph = Graph((Operator("gelu", moved_bytes=1e9),))
    (only,) = roofline(graph, GPU).operators
    assert only.backward == only.forward > 0
    (only,) = roofline(Graph(graph.operators, training=False), GPU).operators
    assert only.backward == 0 < only.forward


def test_a_dtype_whose_speed_is_unknown_is_refused() -> None:
    with pytest.raises(InputError, match=r"float16 is not known .known: float32, bfloat16."):
        roofline(Graph((Operator("a"),)), GPU, "float16")
