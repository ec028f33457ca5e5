"""Where a pipeline's stages are cut: between blocks where that costs little, and with the script's loss in mind."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from nearlinear.core.graph import Graph, Operator, Tensor
from nearlinear.torch.capture import NON_STRICT, Captured, capture
from nearlinear.torch.capture.batch import Call
from nearlinear.torch.pipeline.cuts import _usual_loss, stages_of, timed


def two_blocks(*seconds: float) -> tuple[Graph, nn.Module, Captured]:
    """Return a chain of two blocks of two layers each that take so long."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)) for _ in range(2)))
    names = [f"{block}.{layer}" for block in range(2) for layer in range(2)]
    operators = tuple(Operator(name, forward=each) for name, each in zip(names, seconds, strict=True))
    graph = Graph(operators, tuple(Tensor(place, (place + 1,), 1.0) for place in range(3)))
    return graph, model, Captured(graph, NON_STRICT, modules=tuple(names))


@pytest.mark.parametrize(
    ("seconds", "stages"),
    [
        ((0.50, 0.46, 0.02, 0.98), [0, 0, 1, 1]),  # 0.98 within the second block, 1.00 between the two
        ((0.50, 0.30, 0.10, 0.90), [0, 0, 0, 1]),  # 0.90 and 1.00
        ((0.10, 0.90, 0.05, 0.01), [0, 1, 1, 1]),  # 0.96 and 1.00
    ],
)
def test_a_block_is_cut_where_that_saves_more_than_times_are_exact(seconds: list[float], stages: list[int]) -> None:
    assert stages_of(*two_blocks(*seconds), 2, 1e9) == stages


def test_every_stage_gets_something_however_slow_the_link_is() -> None:
    graph, model, captured = two_blocks(0.1, 0.1, 0.1, 0.1)
    assert set(stages_of(graph, model, captured, 2, 1e-3)) == {0, 1}


def test_a_loss_counts_for_the_last_stage_where_each_microbatch_has_its_own() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4096))
    x = torch.ones(4, 8, device="meta")
    captured = capture(model, (x,))
    plain, stepwise = (timed(model, Call.of((x,), {}, 0), captured, interleaved=each) for each in (False, True))
    assert [each.name for each in stepwise.operators] == [each.name for each in plain.operators]
    assert stepwise.operators[:-1] == plain.operators[:-1]
    assert stepwise.operators[-1].forward > plain.operators[-1].forward


def test_the_loss_that_is_timed_is_the_models_own_or_a_cross_entropy() -> None:
    small, large = torch.randn(4, 3, requires_grad=True), torch.randn(4, 5, 7, requires_grad=True)
    own = small.sum()
    assert _usual_loss({"loss": own, "logits": large}) is own
    expected = F.cross_entropy(large.reshape(20, 7), torch.zeros(20, dtype=torch.int64))
    assert torch.equal(_usual_loss((small, [large])), expected)
    assert torch.equal(_usual_loss((own,)), own)
