"""Turning one step of a model into the seconds of each module's forward and backward pass, by hooks."""

from __future__ import annotations

import bisect
import contextlib
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch._C._autograd import _get_sequence_nr

Parts = dict[str, float]  # seconds by module path
LOSS_PATH = "<loss>"  # what runs after the model has returned


class Clock:
    """Marks in time, on the processor or in the stream of a GPU.

    Args:
        device: Where the work is done that is timed.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"

    def mark(self) -> Any:
        """Return this moment; on a GPU, the one at which the work given to it so far is done."""
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def wait(self) -> None:
        """Wait until the work given so far is done; only then may marks on a GPU be compared."""
        if self._cuda:
            torch.cuda.synchronize()

    def between(self, one: Any, other: Any) -> float:
        """Return the seconds from one mark to another."""
        return float(one.elapsed_time(other) / 1e3 if self._cuda else other - one)


class Watch:
    """Hooks on modules and on autograd nodes, for one step.

    Args:
        model: Whose modules are timed.
        clock: What times them.
    """

    def __init__(self, model: nn.Module, clock: Clock) -> None:
        self._model, self._clock = model, clock
        self._marks: list[tuple[Any, str, int]] = []  # mark, the module that runs from here, next sequence number
        self._spans: list[tuple[str, Any, Any]] = []
        self._hooks: list[Any] = []
        self._owner = {id(p): path for path, m in model.named_modules() for p in m.parameters(recurse=False)}

    @contextlib.contextmanager
    def forward(self) -> Iterator[None]:
        """Watch the modules while a forward pass runs; the hooks are gone afterwards."""
        stack: list[str] = []

        def changed(path: str) -> None:
            self._marks.append((self._clock.mark(), path, _get_sequence_nr()))

        def entering(path: str) -> Any:
            def hook(*_: object) -> None:
                stack.append(path)
                changed(path)

            return hook

        def leaving(*_: object) -> None:
            stack.pop()
            changed(stack[-1] if stack else LOSS_PATH)

        hooks = []
        for path, module in self._model.named_modules():
            if isinstance(module, torch.jit.ScriptModule):
                continue  # it takes no hooks; what it does belongs to the module around it
            hooks.append(module.register_forward_pre_hook(entering(path), prepend=True))
            hooks.append(module.register_forward_hook(leaving))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def watch_backward(self, value: torch.Tensor) -> None:
        """Watch the autograd nodes that ``value.backward()`` will run."""
        firsts = [number for _, _, number in self._marks]
        self._marks.append((self._clock.mark(), "", 0))
        todo, seen = [value.grad_fn], set[Any]()
        while todo:
            node = todo.pop()
            if node in seen or node is None:
                continue
            seen.add(node)
            todo += [following for following, _ in node.next_functions]
            self._watch_node(node, firsts)

    def _watch_node(self, node: Any, firsts: Sequence[int]) -> None:
        variable = getattr(node, "variable", None)  # of a leaf, whose node has no place in the sequence
        if variable is not None:
            path = self._owner.get(id(variable), "")
        else:
            path = self._marks[max(bisect.bisect_right(firsts, node._sequence_nr()) - 1, 0)][1]
        begun: list[Any] = []
        self._hooks += [
            node.register_prehook(lambda _: begun.append(self._clock.mark())),
            node.register_hook(lambda *_: self._spans.append((path, begun.pop(), self._clock.mark()))),
        ]

    def end(self) -> None:
        """Remove the hooks: the nodes of leaves live on."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def forward_parts(self) -> Parts:
        """Return the seconds that each module itself ran, without its children."""
        parts: Parts = {}
        for (start, path, _), (end, _, _) in zip(self._marks, self._marks[1:], strict=False):
            parts[path] = parts.get(path, 0.0) + self._clock.between(start, end)
        return parts

    def backward_parts(self) -> Parts:
        """Return the seconds of the autograd nodes that each module made."""
        parts: Parts = {}
        for path, start, end in self._spans:
            parts[path] = parts.get(path, 0.0) + self._clock.between(start, end)
        return parts
