"""Letting the processes of tests start without ``torch._dynamo``, which takes seconds to import.

Every optimizer imports it when it is made and when it steps, only to tell ``torch.compile`` to keep out. Where nobody
has imported it, nothing is compiled and nobody need be told. Python imports a module of this name when it starts;
``conftest.py`` puts this folder on the path of all processes.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the modules of torch that tell ``torch.compile``, and alters them once they are loaded."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in _ALTERED:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is not None and spec.loader is not None:
            execute, (attribute, alter) = spec.loader.exec_module, _ALTERED[name]

            def exec_module(module: ModuleType) -> None:
                execute(module)
                setattr(module, attribute, alter(getattr(module, attribute)))

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _disabling(disable: Callable[..., Any]) -> Callable[..., Any]:
    def decorate(fn: Callable[..., Any] | None = None, recursive: bool = True) -> Any:
        if fn is None:
            return functools.partial(decorate, recursive=recursive)
        disabled = disable(fn, recursive)

        @functools.wraps(fn)
        def run(*args: Any, **kwargs: Any) -> Any:
            return (disabled if "torch._dynamo" in sys.modules else fn)(*args, **kwargs)

        return run

    return decorate


def _stepping(with_breaks: Callable[..., Any]) -> Callable[..., Any]:
    def decorate(step: Callable[..., Any]) -> Callable[..., Any]:
        broken = with_breaks(step)

        @functools.wraps(step)
        def run(self: Any, *args: Any, **kwargs: Any) -> Any:
            import torch

            if "torch._dynamo" in sys.modules:
                return broken(self, *args, **kwargs)
            with torch.set_grad_enabled(self.defaults["differentiable"]):
                return step(self, *args, **kwargs)

        return run

    return decorate


_ALTERED = {
    "torch._compile": ("_disable_dynamo", _disabling),
    "torch.optim.optimizer": ("_use_grad_for_differentiable", _stepping),
}
sys.meta_path.insert(0, _Finder())
