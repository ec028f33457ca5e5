"""The examples in docstrings print what they say."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import pytest

import nearlinear

# Scripts, and what imports TensorFlow into the process of all tests.
LEFT_OUT = ("nearlinear.examples", "nearlinear.tensorflow", "nearlinear.launch.one_gpu", "nearlinear.__main__")
MODULES = sorted(
    module.name
    for module in pkgutil.walk_packages(nearlinear.__path__, "nearlinear.", onerror=lambda name: None)
    if not module.name.startswith(LEFT_OUT)
)


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_in_the_docstrings_run(name: str) -> None:
    module = importlib.import_module(name)
    assert doctest.testmod(module, optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE).failed == 0


def test_there_are_examples() -> None:
    found = [doctest.DocTestFinder(exclude_empty=True).find(importlib.import_module(name)) for name in MODULES]
    assert sum(len(test.examples) for tests in found for test in tests) > 100
