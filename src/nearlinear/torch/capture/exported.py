"""Turning a model and a call into an exported program: the graph of its forward pass, for any number of samples."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import itertools
import logging
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.export import Dim, ExportedProgram, ShapesCollection
from torch.fx import traceback
from torch.utils import _pytree as pytree
from torch.utils import checkpoint

from nearlinear.torch.capture.batch import Call

STRICT = "torch.export, strict"
NON_STRICT = "torch.export"
DRAFT = "draft_export"


RECOMPUTED = "nearlinear.recomputed"  # in a node's custom metadata: which checkpointed region it lies in


def exported(model: nn.Module, call: Call, route: str) -> tuple[ExportedProgram, list[str]]:
    """Return the exported program, and what a person should know of it; the number of samples is a symbol in it.

    A dataclass that the model returns and torch has not been told of becomes a dictionary.

    Args:
        model: What to export, in the mode (training or not) in which it is.
        call: What it is called with; at least two samples, for torch takes one for a constant.
        route: One of ``NON_STRICT``, ``STRICT`` and ``DRAFT``. The last runs the model on the values of the call.

    Raises:
        Exception: Whatever torch or the model's own code raises when it cannot be traced.
    """
    shapes: Any = ShapesCollection()  # type: ignore[no-untyped-call]
    for leaf in pytree.tree_leaves((call.args, dict(call.kwargs))):
        dim = call.along(leaf)
        if dim is not None:
            shapes[leaf] = {dim: Dim.DYNAMIC}
    kwargs = dict(call.kwargs)
    opened: list[str] = []
    hook = model.register_forward_hook(lambda _module, _args, output: _opened(output, opened))
    try:
        with _quiet(), _regions_marked(), traceback.preserve_node_meta():
            if route == DRAFT:
                program = torch.export.draft_export(model, call.args, kwargs, dynamic_shapes=shapes)
            else:
                strict = route == STRICT
                program = torch.export.export(model, call.args, kwargs, dynamic_shapes=shapes, strict=strict)
    finally:
        hook.remove()
    return program, [f"the graph returns a dictionary where the model returns {name}" for name in dict.fromkeys(opened)]


def _opened(output: Any, opened: list[str]) -> Any:
    """Turn dataclasses that torch does not know, alone or within lists and tuples, into dictionaries."""
    if dataclasses.is_dataclass(output) and type(output) not in pytree.SUPPORTED_NODES:
        opened.append(type(output).__name__)
        return {each.name: _opened(getattr(output, each.name), opened) for each in dataclasses.fields(output)}
    if type(output) in (list, tuple):
        return type(output)(_opened(each, opened) for each in output)
    return output


@contextlib.contextmanager
def _regions_marked() -> Iterator[None]:
    """Mark the nodes that are traced within ``torch.utils.checkpoint``: what they keep is computed again instead."""
    if not hasattr(traceback, "annotate"):  # an older torch, whose graphs bear no marks: all is taken for kept
        yield
        return
    original = checkpoint._checkpoint_without_reentrant_generator
    numbers = itertools.count()

    def marked(*args: Any, **kwargs: Any) -> Iterator[Any]:
        with traceback.annotate({RECOMPUTED: next(numbers)}):
            yield from original(*args, **kwargs)

    checkpoint._checkpoint_without_reentrant_generator = marked
    try:
        yield
    finally:
        checkpoint._checkpoint_without_reentrant_generator = original


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep torch's own account of a failed attempt off the screen; the ladder says what a person needs of it."""
    loggers = [logging.getLogger(name) for name in ("torch", *logging.root.manager.loggerDict) if name[:5] == "torch"]
    before = [each.disabled for each in loggers]
    for each in loggers:
        each.disabled = True
    try:
        with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        for each, disabled in zip(loggers, before, strict=True):
            each.disabled = disabled
