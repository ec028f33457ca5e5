"""Turning a script's first steps into a graph with measured times.

At the first batch that the model sees in training it is captured and profiled. Then the script goes on for some steps:
their time says what the loop adds to the model (data, loss, metrics), and their gradients how noisy a batch is. Then
it is ended.
"""

from __future__ import annotations

import contextlib
import statistics
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from nearlinear import events
from nearlinear.errors import InputError
from nearlinear.measure.study import LEAST, NOISE_PARAMETERS, Pace, Study, spread, with_loop
from nearlinear.torch.capture import Captured, capture
from nearlinear.torch.capture.batch import Call
from nearlinear.torch.fitting import kept_per_parameter
from nearlinear.torch.profile import Profile, profile, time_passes
from nearlinear.torch.session import current


class Watch:
    """What happens at the model's calls and the optimizer's steps, while it is entered.

    Args:
        budget_s: Seconds that the timing of the parts may take, and that of the script's steps.
    """

    def __init__(self, budget_s: float) -> None:
        self._undo = contextlib.ExitStack()
        self._budget_s = budget_s
        self._model: nn.Module | None = None
        self._optimizer: torch.optim.Optimizer | None = None
        self._captured: Captured | None = None
        self._profile: Profile | None = None
        self._samples = self._calls = 0
        self._launch = 0.0
        self._calls_per_step: list[int] = []
        self._pace = Pace(budget_s)
        self._norms: list[float] = []
        self._sum: list[torch.Tensor] | None = None
        self._busy = False

    def __enter__(self) -> Watch:
        self._undo.callback(events.subscribe("distributed", self._on_distributed))
        self._undo.callback(register_optimizer_step_pre_hook(self._before_step).remove)
        self._undo.callback(register_optimizer_step_post_hook(self._after_step).remove)
        return self

    def __exit__(self, *_: object) -> None:
        self._undo.close()

    @property
    def has_model(self) -> bool:
        """Whether the script has called ``distribute``."""
        return self._model is not None

    def study(self) -> Study:
        """Return what was seen.

        Raises:
            InputError: The script never trained its model.
        """
        assert self._model is not None
        if self._captured is None or self._profile is None:
            raise InputError("the script ended without calling its model in training mode; there is nothing to plan")
        steps = self._pace.steps
        calls = max(self._calls_per_step, default=1) or 1
        graph = self._profile.graph
        if steps:
            graph = with_loop(graph, statistics.median(steps) / calls - self._profile.step)
        mean_norm = 0.0
        if self._sum is not None and self._norms:
            mean_norm = sum(float(each.double().square().sum()) for each in self._sum) / len(self._norms) ** 2
        parameters = list(self._model.parameters())
        return Study(
            graph=graph,
            rung=self._captured.rung,
            notes=self._captured.notes,
            tied=self._captured.tied,
            batch=(self._samples or graph.samples) * calls,
            calls=calls,
            launch=self._launch,
            steps=steps,
            spread=spread(steps) if len(steps) >= LEAST else self._profile.spread,
            dtype=str(parameters[0].dtype)[6:],
            optimizer=type(self._optimizer).__name__ if self._optimizer is not None else "",
            norms=tuple(self._norms),
            mean_norm=mean_norm,
        )

    # ---- hooks

    def _on_distributed(self, event: dict[str, Any]) -> None:
        if self._model is None:  # of several models the first is planned
            model: nn.Module = event["model"]
            self._model, self._optimizer = model, event["optimizer"]
            model.register_forward_pre_hook(self._before_call, with_kwargs=True)

    def _before_call(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._busy or not model.training or not torch.is_grad_enabled():
            return
        self._calls += 1
        if self._captured is not None:
            return
        self._busy = True
        session = current()
        self._samples = session.batch.samples if session is not None and session.batch is not None else 0
        _say("capturing the model")
        self._captured = capture(model, args, kwargs, optimizer_state=kept_per_parameter(self._optimizer))
        _say(f"captured by {self._captured.rung}; timing its parts")
        self._profile = profile(
            model, args, kwargs, optimizer=self._optimizer, captured=self._captured, budget=self._budget_s
        )
        self._launch = _launch(model, Call.of(args, kwargs, self._captured.batch_dim), self._profile)
        _say("timing the script's own steps")
        self._busy = False

    def _before_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if self._busy or optimizer is not self._optimizer or self._captured is None:
            return
        with self._pace.aside():
            self._note_gradients(optimizer)

    def _note_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        if any(each.is_sparse for each in gradients) or sum(each.numel() for each in gradients) > NOISE_PARAMETERS:
            return
        if self._sum is not None and [each.shape for each in self._sum] != [each.shape for each in gradients]:
            return
        self._norms.append(sum(float(each.detach().double().square().sum()) for each in gradients))
        if self._sum is None:
            self._sum = [each.detach().clone() for each in gradients]
        else:
            torch._foreach_add_(self._sum, [each.detach() for each in gradients])

    def _after_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if self._busy or self._captured is None or (self._optimizer is not None and optimizer is not self._optimizer):
            return
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.synchronize()
        self._calls_per_step.append(self._calls)
        self._calls = 0
        self._pace.mark()


def _launch(model: nn.Module, call: Call, whole: Profile) -> float:
    """Return what a pass costs however small its batch is, from a quarter of the batch beside the whole."""
    few = call.samples // 4
    if few < 1:
        return 0.0
    small = call.with_samples(few)
    time_of_few, time_of_all = time_passes(model, small.args, small.kwargs), whole.forward + whole.backward
    fixed = (time_of_few * call.samples - time_of_all * few) / (call.samples - few)
    return min(max(fixed, 0.0), time_of_few)


def _say(what: str) -> None:
    events.send_to_launcher("plan", what=what)
