"""A value that lies on one rank of a pipeline looks the same on all: losses, gradients, and every way to read it."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest
import torch

from nearlinear.runtime.environment import World
from nearlinear.testing import Result, run_processes
from nearlinear.torch.pipeline.placed import PlacedTensor, placed, real, value_of
from nearlinear.torch.pipeline.recipe import pack_path, unpack_path
from nearlinear.torch.pipeline.values import Values
from nearlinear.torch.session import Session

from conftest import TESTS, names_in

ENV = {"OMP_NUM_THREADS": "1", "NEARLINEAR_DEADLINE": "60 s"}


@pytest.fixture(scope="module")
def two() -> list[Result]:
    return run_processes(TESTS / "placed/driver.py", 2, env=ENV, timeout_s=250)


@pytest.fixture(scope="module")
def three() -> list[Result]:
    names = [
        "cross_entropy",
        "placed_mask",
        "dropout",
        "only_rank_0_computes_and_reads",
        "losses_are_kept_and_read_later",
    ]
    return run_processes(TESTS / "placed/driver.py", 3, names, env=ENV, timeout_s=250)


def assert_held(name: str, results: list[Result]) -> None:
    for result in results:
        assert f"{name}: held\n" in result.stdout, f"{result}\n{result.stdout[-6000:]}\n{result.stderr[-3000:]}"


@pytest.mark.parametrize("name", names_in("placed/cases.py", "loss"))
def test_a_loss_and_its_gradient_are_those_of_plain_tensors(name: str, two: list[Result]) -> None:
    assert_held(name, two)


@pytest.mark.parametrize("name", names_in("placed/cases.py", "claim"))
def test_on_two_processes(name: str, two: list[Result]) -> None:
    assert_held(name, two)


def test_a_rank_at_its_end_serves_the_last_line_of_another(two: list[Result], three: list[Result]) -> None:
    for results in (two, three):
        assert "the last line: held" in results[0].stdout, results[0].stdout[-3000:] + results[0].stderr[-3000:]
        assert [result.exit_code for result in results] == [0] * len(results)


def test_two_ranks_may_read_from_the_third(three: list[Result]) -> None:
    assert_held("cross_entropy", three)
    assert_held("dropout", three)
    assert_held("only_rank_0_computes_and_reads", three)


HEAD = """
import os, signal, sys, time
sys.path.insert(0, {folder!r})
from cases import *
out = model(X)
"""


def script(folder: Path, body: str) -> Path:
    path = folder / "train.py"
    path.write_text(HEAD.format(folder=str(TESTS / "placed")) + body)
    return path


def test_a_reader_names_the_rank_that_died_with_its_value(tmp_path: Path) -> None:
    path = script(
        tmp_path, "if MAIN: values.fetch(1, 'never')\nelse: time.sleep(1); os.kill(os.getpid(), signal.SIGKILL)"
    )
    results = run_processes(path, 2, env=ENV, timeout_s=100, grace_s=15)
    assert results[1].signal == signal.SIGKILL
    assert re.search(
        r"error: rank 1 on \S+: its process ended; it was missing in reading never of rank 1", results[0].stderr
    )
    assert results[0].seconds - results[1].seconds < 10


def test_a_rank_that_fails_does_not_wait_to_serve(tmp_path: Path) -> None:
    path = script(tmp_path, "if MAIN: raise ValueError('a bug')\nelse: values.fetch(0, 'never')")
    results = run_processes(path, 2, env=ENV, timeout_s=100, grace_s=15)
    assert "ValueError: a bug" in results[0].stderr and "error: rank 0 on" in results[1].stderr
    assert all(result.exit_code for result in results)


def test_a_call_of_the_model_on_one_rank_alone_is_named(tmp_path: Path) -> None:
    results = run_processes(script(tmp_path, "if MAIN: model(X).tolist()"), 2, env=ENV, timeout_s=100, grace_s=15)
    assert "it has ended after call 1 of the model, and call 2 was made elsewhere" in results[0].stderr
    assert [result.exit_code for result in results] == [1, 0]


# ---- without other processes


def test_in_one_process_a_placed_tensor_computes_at_once() -> None:
    values = Values(Session(World()))
    values.began_call(1)
    out = placed(torch.arange(3.0), values=values, owner=0, call=1, index=0)
    values.ended_call(1)
    assert isinstance(out * 2, PlacedTensor) and (out * 2).tolist() == [0, 2, 4]
    assert type(real(out)) is type(value_of(out)) is torch.Tensor
    values.offer("mean", lambda: torch.ones(()))
    assert values.fetch(0, "mean").item() == 1


def test_elsewhere_no_memory_is_taken() -> None:
    values = Values(Session(World()))
    out = placed(torch.empty(2**20, 2**20, device="meta"), values=values, owner=1, call=1, index=0)
    result = (out @ out).softmax(1).sum(0)  # 4 TB each, if they had values
    assert result.shape == (2**20,) and result.device.type == "cpu" and result.dtype == torch.float32


def test_a_path_that_does_more_than_view_is_no_path() -> None:
    view = torch.ops.aten.select.int
    for name in ("aten::add.Tensor", "aten::fill_.Scalar", "os::system", "aten::nothing", "aten::set_.source_Storage"):
        with pytest.raises(ValueError):
            unpack_path([[name, [0, 1], {}, None, None]])
    with pytest.raises(ValueError):
        unpack_path([["aten::select.int", ["0", 1], {}, None, None]])
    assert unpack_path(pack_path(unpack_path([["aten::select.int", [0, 1], {}, None, None]])))[0].func is view
