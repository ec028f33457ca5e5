"""What a captured graph says: which rung, which operators, what they cost, what passes between them, what mixes."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from nearlinear.core.graph import Graph, Operator
from nearlinear.errors import InputError
from nearlinear.torch.capture import DRAFT, MODULES, NON_STRICT, STRICT, capture


def operator(graph: Graph, name: str) -> Operator:
    return next(each for each in graph.operators if each.name == name)


def mixing(graph: Graph) -> list[str]:
    return [each.name for each in graph.operators if each.mixes_batch]


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Chain(nn.Module):
    def __init__(self, width: int = 8, depth: int = 2, classes: int = 5) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Block(width) for _ in range(depth)))
        self.head = nn.Linear(width, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(x))


def test_operators_are_named_as_the_model_names_its_modules() -> None:
    graph = capture(Chain(), (torch.randn(4, 8),)).graph
    assert [each.name for each in graph.operators[:5]] == [
        "blocks.0.norm",
        "blocks.0.up",
        "blocks.0.gelu",
        "blocks.0.down",
        "blocks.0.add",
    ]
    assert graph.operators[-1].name == "head"
    assert operator(graph, "head").kind == "linear"


def test_a_residual_connection_is_one_tensor_with_two_consumers() -> None:
    graph = capture(Chain(depth=2), (torch.randn(4, 8),)).graph
    names = [each.name for each in graph.operators]
    carried = next(each for each in graph.tensors if names[each.producer] == "blocks.0.add")
    assert [names[each] for each in carried.consumers] == ["blocks.1.norm", "blocks.1.add"]
    assert carried.bytes == 4 * 8 * 4


@pytest.mark.parametrize("rung", [NON_STRICT, STRICT, DRAFT, MODULES])
def test_every_rung_finds_the_same_costs(rung: str) -> None:
    captured = capture(Chain(), (torch.randn(4, 8),), rungs=[rung])
    graph = captured.graph
    assert captured.rung == rung
    assert graph.parameter_bytes == 4 * sum(each.numel() for each in Chain().parameters())
    assert sum(each.flop for each in graph.operators) == 2 * 4 * (2 * 2 * 8 * 32 + 8 * 5)
    assert len(graph.operators) == 11


def test_a_run_on_values_finds_the_costs_that_shapes_alone_gave() -> None:
    batch = (torch.randn(4, 3, 8, 8), torch.randint(5, (4,)))
    by_shapes, by_values = (capture(Normed(), batch, rungs=[rung]).graph for rung in (NON_STRICT, MODULES))
    for cost in ("flop", "moved_bytes", "parameter_bytes", "state_bytes", "activation_bytes"):
        one, two = (sum(getattr(each, cost) for each in graph.operators) for graph in (by_shapes, by_values))
        assert one == two > 0, cost


def test_every_operator_knows_its_nodes_in_the_program_and_the_parameters_it_owns() -> None:
    captured = capture(Chain(), (torch.randn(4, 8),))
    assert captured.program is not None
    nodes = [each.name for each in captured.program.graph.nodes if each.op == "call_function"]
    assert [name for names in captured.nodes for name in names] == nodes
    owned = [name for names in captured.parameters for name in names]
    assert sorted(owned) == sorted(name for name, _ in Chain().named_parameters())
    assert captured.modules[0] == "blocks.0.norm"
    assert captured.outputs == ((len(captured.graph.operators) - 1, 4 * 5 * 4),)


@pytest.mark.parametrize("which", ["chain", "normed", "experts", "lstm"])
def test_no_edge_of_the_program_is_missing_in_the_graph(which: str) -> None:
    model, batch = {
        "chain": (Chain(), (torch.randn(4, 8),)),
        "normed": (Normed(), (torch.randn(4, 3, 8, 8), torch.randint(5, (4,)))),
        "experts": (Experts(dense=True), (torch.randn(6, 8),)),
        "lstm": (nn.LSTM(6, 10, batch_first=True), (torch.randn(3, 5, 6),)),
    }[which]
    captured = capture(model, batch)
    assert captured.program is not None
    edges = {(tensor.producer, consumer) for tensor in captured.graph.tensors for consumer in tensor.consumers}
    free = {n for n, each in enumerate(captured.graph.operators) if each.name in captured.anywhere}
    step = {name: number for number, names in enumerate(captured.nodes) for name in names}
    made: dict[Any, set[int]] = {}  # by node: the operators whose results it holds, through views
    for node in captured.program.graph.nodes:
        read = {source for each in node.all_input_nodes for source in made[each]}
        here = step.get(node.name)
        made[node] = read if here is None else {here}
        assert here is None or {(source, here) for source in read - free - {here}} <= edges, node


def test_the_flop_of_a_convolution_are_those_counted_by_hand() -> None:
    model = nn.Conv2d(3, 6, 5, padding=2, bias=False)
    (only,) = capture(model, (torch.randn(2, 3, 10, 12),)).graph.operators
    assert only.flop == 2 * 2 * 6 * 10 * 12 * 3 * 5 * 5
    assert only.moved_bytes == 4 * (2 * 3 * 10 * 12 + 6 * 3 * 25 + 2 * 6 * 10 * 12)
    assert only.activation_bytes == 4 * 2 * 3 * 10 * 12  # its input, for the gradient of the weight


def test_a_norm_written_out_in_six_operators_is_one() -> None:
    class Rms(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)

    graph = capture(nn.Sequential(Rms(), nn.Linear(8, 8)), (torch.randn(4, 8),)).graph
    assert [(each.name, each.kind) for each in graph.operators] == [("0", "rms"), ("1", "linear")]


class Attention(nn.Module):
    def forward(self, q: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, q, q)


def test_the_flop_of_attention_are_those_of_its_two_products() -> None:
    graph = capture(Attention(), (torch.randn(2, 3, 7, 4),)).graph
    assert sum(each.flop for each in graph.operators) == 2 * 2 * (2 * 3) * 7 * 7 * 4


@pytest.mark.parametrize("rung", [NON_STRICT, MODULES])
def test_an_lstm_costs_its_eight_products_per_step(rung: str) -> None:
    graph = capture(nn.LSTM(6, 10, batch_first=True), (torch.randn(3, 5, 6),), rungs=[rung]).graph
    assert sum(each.flop for each in graph.operators) == 2 * 3 * 5 * 4 * 10 * (6 + 10)
    assert graph.parameter_bytes == 4 * 4 * 10 * (6 + 10 + 2)


def test_what_autograd_keeps_is_counted_once() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = torch.relu(self.one(x))  # relu keeps its output, which `two` keeps as its input
            return self.two(y) * y

    graph = capture(Twice(), (torch.randn(16, 8),)).graph
    kept = {each.name: each.activation_bytes for each in graph.operators}
    one = 16 * 8 * 4
    assert kept == {"one": one, "relu": one, "two": 0, "mul": one}


def test_state_is_parameters_gradients_and_moments_and_a_frozen_layer_has_only_parameters() -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    model[0].requires_grad_(False)
    one, two = capture(model, (torch.randn(2, 4),)).graph.operators
    assert (one.state_bytes, two.state_bytes) == (64, 4 * 64)
    assert capture(model, (torch.randn(2, 4),), optimizer_state=0).graph.operators[1].state_bytes == 2 * 64


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mid, self.head = nn.Embedding(11, 8), nn.Linear(8, 8), nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.mid(self.embed(tokens)))


@pytest.mark.parametrize("rung", [NON_STRICT, STRICT, DRAFT, MODULES])
def test_a_tied_weight_is_one_object_counted_with_its_first_user_and_named(rung: str) -> None:
    captured = capture(Tied(), (torch.randint(11, (4, 3)),), rungs=[rung])
    sizes = {each.name: each.parameter_bytes for each in captured.graph.operators}
    assert sizes == {"embed": 11 * 8 * 4, "mid": 8 * 9 * 4, "head": 0}
    assert captured.tied == (("embed", "head"),)
    assert all(each.group is None for each in captured.graph.operators)


def test_the_calls_of_one_module_must_lie_together() -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell, self.head = nn.Linear(4, 4), nn.Linear(4, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(3):
                x = torch.tanh(self.cell(x))
            return self.head(x)

    captured = capture(Recurrent(), (torch.randn(4, 4),))
    groups = {each.name: each.group for each in captured.graph.operators}
    assert groups["cell.linear"] == groups["cell.linear #2"] == groups["cell.linear #3"] is not None
    assert groups["head"] is None
    by_modules = capture(Recurrent(), (torch.randn(4, 4),), rungs=[MODULES]).graph
    assert [each.name for each in by_modules.operators] == ["addmm", "head"]  # the loop belongs to the model itself


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Linear(4, 5)
        self.instance = nn.InstanceNorm2d(4)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        features = self.instance(torch.relu(self.norm(self.conv(x)))).mean((2, 3))
        return F.cross_entropy(self.head(features), y)


@pytest.mark.parametrize("rung", [NON_STRICT, STRICT, DRAFT, MODULES])
def test_batch_norm_and_cross_entropy_mix_the_batch_and_instance_norm_does_not(rung: str) -> None:
    batch = (torch.randn(4, 3, 8, 8), torch.randint(5, (4,)))
    training, evaluating = (capture(Normed().train(mode), batch, rungs=[rung]).graph for mode in (True, False))
    loss = training.operators[-1].name
    assert mixing(training) == ["norm", loss]
    assert mixing(evaluating) == [loss]
    assert training.training and not evaluating.training


class Experts(nn.Module):
    def __init__(self, dense: bool) -> None:
        super().__init__()
        self.router = nn.Linear(8, 4)
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.dense = dense

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        gates = self.router(x).softmax(-1)
        balance = (gates.mean(0) ** 2).sum()
        if self.dense:
            return sum(gates[:, n, None] * expert(x) for n, expert in enumerate(self.experts)), balance
        best, out = gates.argmax(-1), torch.zeros_like(x)
        for n, expert in enumerate(self.experts):
            rows = (best == n).nonzero()[:, 0]
            if len(rows):
                out = out.index_add(0, rows, expert(x[rows]))
        return out, balance


def test_the_balance_of_a_mixture_of_experts_mixes_the_batch() -> None:
    assert mixing(capture(Experts(dense=True), (torch.randn(6, 8),)).graph) == ["mean"]


def test_a_mixture_that_picks_rows_by_value_is_still_captured_whole() -> None:
    captured = capture(Experts(dense=False), (torch.randn(64, 8),))
    assert captured.program is None
    assert captured.graph.parameter_bytes == 4 * (8 * 4 + 4 + 4 * (8 * 8 + 8))
    assert any(note.startswith("not by torch.export:") for note in captured.notes)


def test_all_pairs_of_samples_mix_the_batch() -> None:
    class Contrast(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ x.T

    assert mixing(capture(Contrast(), (torch.randn(4, 8),)).graph) == ["matmul"]


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.head = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.one(x) if x.sum() > 0 else self.two(x)
        return self.head(x)


def test_a_branch_on_values_is_captured_as_this_batch_takes_it_and_says_why() -> None:
    captured = capture(Branching(), (torch.ones(4, 4),))
    assert captured.rung == MODULES and captured.program is None
    assert [note.partition(": ")[0] for note in captured.notes] == [
        "not by torch.export",
        "not by torch.export, strict",
        "not by draft_export",
        "used by no operator",
    ]


class ThroughNumpy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.one(x)
        scale = np.abs(x.detach().numpy()).max(-1, keepdims=True)
        return self.two(x / torch.from_numpy(scale.copy()))


def test_a_model_that_leaves_torch_is_captured_by_its_modules() -> None:
    captured = capture(ThroughNumpy(), (torch.randn(4, 4),), rungs=[NON_STRICT, MODULES])
    assert captured.rung == MODULES
    assert [each.name for each in captured.graph.operators] == ["one", "div", "two"]
    assert [(each.producer, each.consumers) for each in captured.graph.tensors] == [(0, (1,)), (0, (1,)), (1, (2,))]


def test_dropout_is_random_and_stays_on_one_device() -> None:
    model = nn.Sequential(nn.Dropout(0.5), nn.Linear(4, 4))
    captured = capture(model, (torch.randn(4, 4),))
    assert captured.anywhere == ()
    assert [each.kind for each in captured.graph.operators] == ["dropout", "linear"]


def test_a_mask_that_all_layers_need_does_not_pass_between_them() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

        def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
            mask = (torch.arange(x.shape[1])[None] < lengths[:, None]).float()
            for layer in self.layers:
                x = layer(x) * mask[..., None]
            return x

    captured = capture(Masked(), (torch.randn(2, 5, 4), torch.tensor([3, 5])))
    names = [each.name for each in captured.graph.operators]
    maker = names.index(captured.anywhere[-1])
    assert all(each.producer != maker for each in captured.graph.tensors)


def test_a_cut_after_a_slice_sends_the_slice_alone() -> None:
    class First(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.Linear(4, 4), nn.Linear(4, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.body(x)[:, 0])

    (only,) = capture(First(), (torch.randn(2, 10, 4),)).graph.tensors
    assert only.bytes == 2 * 4 * 4


def test_a_write_in_place_comes_before_what_reads_it() -> None:
    class Places(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out = torch.zeros_like(x)
            out[:, :2] += self.one(x)[:, 2:]
            return out * 2

    graph = capture(Places(), (torch.randn(3, 4),)).graph
    names = [each.name for each in graph.operators]
    pairs = {(names[each.producer], names[consumer]) for each in graph.tensors for consumer in each.consumers}
    assert ("one", "add") in pairs and any(one != "zeros_like" and two == "mul" for one, two in pairs)


def test_dictionaries_go_in_and_dataclasses_come_out() -> None:
    @dataclass
    class Output:
        logits: torch.Tensor

    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = nn.Linear(4, 4)

        def forward(self, batch: dict[str, torch.Tensor]) -> Output:
            return Output(self.one(batch["x"]))

    captured = capture(Named(), ({"x": torch.randn(4, 4)},))
    assert [each.name for each in captured.graph.operators] == ["one"]
    assert captured.rung == NON_STRICT and captured.program is not None
    assert captured.notes == ("the graph returns a dictionary where the model returns Output",)
    out = captured.program.module()({"x": torch.ones(3, 4)})
    assert list(out) == ["logits"] and out["logits"].shape == (3, 4)


@pytest.mark.parametrize("rung", [NON_STRICT, DRAFT, MODULES])
def test_what_is_computed_again_in_the_backward_pass_is_not_kept(rung: str) -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.two(checkpoint(lambda y: torch.tanh(y).exp().sin(), self.one(x), use_reentrant=False))

    graph = capture(Checkpointed(), (torch.randn(16, 8),), rungs=[rung]).graph
    # The inputs of both layers and that of the region, which is `one`'s output.
    assert sum(each.activation_bytes for each in graph.operators) == 3 * 16 * 8 * 4


def test_a_graph_with_one_outcome_of_pythons_random_numbers_is_for_planning_alone() -> None:
    class Depth(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.two(self.one(x) if random.random() < 2 else x)

    captured = capture(Depth(), (torch.randn(4, 8),))
    assert captured.program is None and "random numbers" in captured.notes[-1]


def test_a_batch_along_the_second_dimension_is_found() -> None:
    class Sequence(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm, self.head = nn.LSTM(6, 4), nn.Linear(4, 3)

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return F.cross_entropy(self.head(self.lstm(x)[0][-1]), y)

    captured = capture(Sequence(), (torch.randn(5, 3, 6), torch.randint(3, (3,))), batch_dim=1)
    assert captured.graph.samples == 3
    assert captured.rung == NON_STRICT and captured.program is not None
    assert mixing(captured.graph) == ["cross_entropy_loss"]


def test_one_sample_can_be_captured_and_costs_half_of_two() -> None:
    one, two = (capture(Chain(), (torch.randn(n, 8),)) for n in (1, 2))
    assert one.rung == two.rung == NON_STRICT
    assert sum(each.flop for each in two.graph.operators) == 2 * sum(each.flop for each in one.graph.operators)


def test_the_program_runs_with_other_batch_sizes_as_the_model_does() -> None:
    model = Chain()
    program = capture(model, (torch.randn(4, 8),)).program
    assert program is not None
    x = torch.randn(7, 8)
    torch.testing.assert_close(program.module()(x), model(x))


def test_a_model_on_the_meta_device_needs_no_memory() -> None:
    with torch.device("meta"):
        model = Chain(width=4096, depth=12)
    captured = capture(model, (torch.randn(4, 4096),))
    assert captured.rung == NON_STRICT
    assert captured.graph.parameter_bytes == 4 * sum(each.numel() for each in model.parameters()) > 6e9
    assert all(each.is_meta for each in model.parameters())


class Assigning(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(4, 4)
        self.log: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.aux = self.one(x)
        self.log.append(self.aux)
        return self.aux * 2


def test_what_a_forward_pass_assigns_is_said_and_the_program_is_not_offered() -> None:
    captured = capture(Assigning(), (torch.randn(4, 4),))
    assert captured.program is None
    assert any("assigns" in note and "aux" in note and "log" in note for note in captured.notes)


class Everything(nn.Module):
    """All that a forward pass can leave behind."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.drop = nn.Conv1d(2, 4, 3), nn.BatchNorm1d(4), nn.Dropout(0.5)
        self.register_buffer("count", torch.zeros(()))
        self.log: list[Any] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        self.aux = x.mean()
        self.log.append(self.aux)
        return self.drop(self.norm(self.conv(x))) * random.random() * float(np.random.rand())


@pytest.mark.parametrize("rung", [NON_STRICT, STRICT, DRAFT, MODULES])
def test_the_model_and_the_random_streams_are_left_as_they_were(rung: str) -> None:
    model = Everything()
    model.conv.weight.grad = torch.full_like(model.conv.weight, 3.0)
    calls: list[int] = []
    model.register_forward_hook(lambda *_: calls.append(1))
    parameters = dict(model.named_parameters())
    gradient = model.conv.weight.grad
    before = {name: each.clone() for name, each in model.state_dict().items()}
    attributes = {path: set(vars(module)) for path, module in model.named_modules()}
    hooks = {
        path: len(module._forward_hooks) + len(module._forward_pre_hooks) for path, module in model.named_modules()
    }
    batch = (torch.randn(4, 2, 9),)
    streams = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[union-attr]
    try:
        capture(model, batch, rungs=[rung])
    except InputError:
        assert rung == STRICT  # dynamo does not follow Python's random numbers; it must leave no trace either
    assert dict(model.named_parameters()) == parameters
    assert model.conv.weight.grad is gradient and bool((gradient == 3).all())
    for name, each in model.state_dict().items():
        assert torch.equal(each, before[name]), name
    assert {path: set(vars(module)) for path, module in model.named_modules()} == attributes
    assert model.log == [] and model.training
    assert {path: len(m._forward_hooks) + len(m._forward_pre_hooks) for path, m in model.named_modules()} == hooks
    assert torch.equal(torch.get_rng_state(), streams[0])
    assert random.getstate() == streams[1]
    assert np.random.get_state()[1].tolist() == streams[2]  # type: ignore[union-attr]


def test_what_a_with_statement_holds_is_captured_operator_by_operator() -> None:
    class Teacher(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.teacher, self.one = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                target = torch.relu(self.teacher(x))
            with torch.autocast("cpu", torch.bfloat16):
                own = self.one(x)
            return F.mse_loss(own.float(), target)

    captured = capture(Teacher(), (torch.randn(4, 8),))
    assert captured.rung == NON_STRICT
    names = [each.name for each in captured.graph.operators]
    assert {"teacher", "relu", "mse_loss"} <= set(names)
    kept = {each.name: each.activation_bytes for each in captured.graph.operators}
    assert kept["teacher"] == kept["relu"] == 0
    assert mixing(captured.graph) == ["mse_loss"]


def test_a_scripted_part_belongs_to_the_module_around_it() -> None:
    class Scripted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = torch.jit.script(nn.Linear(8, 8)), nn.Linear(8, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.two(self.one(x))

    captured = capture(Scripted(), (torch.randn(4, 8),))
    assert captured.rung == MODULES
    assert [each.name for each in captured.graph.operators] == ["addmm", "two"]


def test_a_model_without_shapes_yet_is_refused() -> None:
    with pytest.raises(InputError, match=r"0\.weight, 0\.bias have no shape yet; call the model once"):
        capture(nn.Sequential(nn.LazyLinear(4)), (torch.randn(2, 3),))


def test_a_model_that_no_rung_captures_says_what_each_met() -> None:
    class Broken(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise ValueError("seven dwarfs")

    with pytest.raises(InputError, match=r"Broken cannot be captured.*torch\.export.*modules.*seven dwarfs"):
        capture(Broken(), (torch.randn(2, 2),))


def test_a_batch_without_tensors_is_refused() -> None:
    with pytest.raises(InputError, match="batch_dim"):
        capture(Chain(), (3,))


def test_capturing_twice_gives_the_same_graph_and_json_brings_it_back() -> None:
    model, batch = Chain(), (torch.randn(4, 8),)
    one, two = capture(model, batch).graph, capture(model, batch).graph
    assert one == two == Graph.from_json(one.to_json())
