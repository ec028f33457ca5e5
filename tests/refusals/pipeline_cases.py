"""What a pipeline cannot train, with words of the error it must raise; run on two processes at once."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import nearlinear as nl

CASES: dict[str, Any] = {}


def refusal(words: str) -> Any:
    def note(fn: Any) -> Any:
        CASES[fn.__name__] = (words, fn)
        return fn

    return note


def parts(model: nn.Module | None = None, **plan: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = model or nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return nl.distribute(model, optimizer, strategy=nl.Plan("pipeline", **plan))  # type: ignore[no-any-return]


@refusal("3 stages on 2 ranks leave some over; start a multiple of 3 processes")
def stages_that_do_not_divide_the_ranks() -> None:
    parts(stages=3)


@refusal("2 stages for a model of 1 operators; ask for at most that many")
def more_stages_than_operators() -> None:
    model, _ = parts(nn.Linear(4, 2))
    model(torch.ones(4, 4))


@refusal("the first batch holds one sample, and a pipeline needs at least 2")
def a_batch_of_one_sample() -> None:
    model, _ = parts()
    model(torch.ones(1, 4))


@refusal("the batch holds no samples")
def an_empty_batch() -> None:
    model, _ = parts()
    model(torch.ones(0, 4))


@refusal("rank 1 calls the model with another batch than rank 0")
def another_batch_on_each_rank() -> None:
    model, _ = parts()
    model(torch.full((4, 4), float(nl.rank())))


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.one(x).sum() > 0:  # the line that stands in the way
            return self.two(self.one(x))  # type: ignore[no-any-return]
        return self.one(x)  # type: ignore[no-any-return]


@refusal(": if self.one(x).sum() > 0:")
def a_branch_on_a_value() -> None:
    model, _ = parts(Branching())
    model(torch.ones(4, 4))


@refusal("where this part of its gradient would be missing")
def a_penalty_on_parameters_outside_the_model() -> None:
    model, _ = parts()
    loss = model(torch.ones(4, 4)).sum() + sum(p.square().sum() for p in model.parameters())
    loss.backward()


@refusal("became a parameter of the model after distribute; build the model first")
def a_parameter_added_after_distribute() -> None:
    model, optimizer = parts()
    F.mse_loss(model(torch.ones(4, 4)), torch.zeros(4, 2)).backward()
    model.later = nn.Parameter(torch.ones(2))  # type: ignore[assignment]
    optimizer.step()


@refusal("LBFGS looks at all gradients at once")
def an_optimizer_that_needs_all_gradients() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    optimizer = torch.optim.LBFGS(model.parameters())
    model, optimizer = nl.distribute(model, optimizer, strategy="pipeline")

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(torch.ones(4, 4)).square().sum()
        loss.backward()
        return loss  # type: ignore[no-any-return]

    closure()
    optimizer.step(closure)


@refusal("backward was called twice over one call of the model")
def a_second_backward_pass() -> None:
    model, _ = parts()
    loss = model(torch.ones(4, 4)).sum()
    loss.backward(retain_graph=True)
    loss.backward()


@refusal("the function given to nl.step returned a tensor of shape (2, 2); return the loss")
def a_step_without_a_loss() -> None:
    model, _ = parts()
    nl.step(lambda x: model(x))(torch.ones(4, 4))


@refusal("stages is 2, and strategy 'data' has none; ask for 'pipeline'")
def stages_without_a_pipeline() -> None:
    nl.Plan("data", stages=2)


@refusal("microbatches is 0; it must be at least 1")
def no_microbatches() -> None:
    nl.Plan("pipeline", microbatches=0)


@refusal("that requires a gradient, and none flows out of a pipeline's first stage")
def an_input_that_wants_a_gradient() -> None:
    model, _ = parts()
    model(torch.ones(4, 4, requires_grad=True))


@refusal("have called the model with different batches since the last optimizer step")
def another_batch_later_on() -> None:
    model, optimizer = parts()
    for step in range(2):
        model(torch.full((4, 4), float(step * nl.rank()))).sum().backward()
        optimizer.step()
