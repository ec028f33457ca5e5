"""Strategy `sharded`: a rank keeps its rows of every parameter, and N processes have the numbers of one, in float64.

How equal, and why not more: the sums of a batch are added in another order, a few units in the last place (1e-16) per
addition; a few dozen steps carry that to 1e-14 or so. 1e-10 leaves room for an ill-conditioned step and none for a
wrong weight.
"""

from __future__ import annotations

import re
import signal
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import nn

from nearlinear.checkpoint.folder import read
from nearlinear.testing import run_processes
from nearlinear.testing.equivalence import compare
from nearlinear.testing.record import Record
from nearlinear.torch.sharded_blocks import blocks_of

from conftest import TESTS, names_in, run

DRIVER = TESTS / "sharded/driver.py"
REFUSALS = re.findall(r"@refusal\(.*\)\ndef (\w+)", (TESTS / "sharded/refusals.py").read_text())
IN_COPIES = ("weights_clipping_and_adam", "a_scaler_that_skips_a_step", "each_rank_holds_its_part_alone")
LOADS = (
    "two-from-one",
    "two-from-copies",
    "data-from-three",
    "three-from-three",
    "two-from-three",
    "copies-from-three",
)

SCRIPT = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import nearlinear as nl

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.Sequential(*[nn.Sequential(nn.Linear(16, 16)) for _ in range(2)]))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
loader = DataLoader(TensorDataset(torch.randn(310, 8)), batch_size=10)
model, optimizer, loader = nl.distribute(model, optimizer, loader)
for (x,) in loader:
    optimizer.zero_grad()
    model(x).square().mean().backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
"""


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Everything that takes a run, in six runs, two at once; and what they wrote."""
    folder = tmp_path_factory.mktemp("sharded")

    def once(n: int, *parts: str, **env: str) -> str:
        result: subprocess.CompletedProcess[str] = run(n, DRIVER, str(folder), *parts, **env)
        return result.stdout + result.stderr

    saved = ("one", "three", "copies")
    with ThreadPoolExecutor(2) as pool:
        one = pool.submit(once, 1, "record", "cases", "save:data:one")
        three = ["save:sharded:three", "save:data:copies", "load:sharded:three:three-from-three"]
        log = once(3, "record", "cases", *three) + one.result()
        one = pool.submit(once, 1, *(f"load:data:{name}:one-from-{name}" for name in saved))
        two = [f"load:sharded:{name}:two-from-{name}" for name in saved]
        log += once(2, *two, "load:data:three:data-from-three", "refusals") + one.result()
        copies = [f"cases:{','.join(IN_COPIES)}", "load:sharded:three:copies-from-three", "save:sharded:in-copies"]
        log += once(4, *copies, NEARLINEAR_SHARDS="2")
        log += once(1, "load:data:in-copies:one-from-in-copies")
    return folder, log


@pytest.mark.parametrize("name", names_in("sharded/cases.py", "case"))
def test_three_sharded_processes_have_the_numbers_of_one(name: str, ran: tuple[Path, str]) -> None:
    require_equal(name, 3, ran)


@pytest.mark.parametrize("name", IN_COPIES)
def test_two_copies_on_two_processes_each_have_the_numbers_of_one(name: str, ran: tuple[Path, str]) -> None:
    require_equal(name, 4, ran)


@pytest.fixture(scope="module")
def ran_in_copies(ran: tuple[Path, str]) -> tuple[Path, str]:
    result: subprocess.CompletedProcess[str] = run(4, DRIVER, str(ran[0]), "cases", NEARLINEAR_SHARDS="2")
    return ran[0], result.stdout + result.stderr


@pytest.mark.full
@pytest.mark.parametrize("name", names_in("sharded/cases.py", "case"))
def test_in_any_case_copies_have_the_numbers_of_one(name: str, ran_in_copies: tuple[Path, str]) -> None:
    require_equal(name, 4, ran_in_copies)


def test_copies_save_what_any_number_of_processes_loads(ran: tuple[Path, str]) -> None:
    folder, log = ran
    assert (folder / "one-from-in-copies").exists(), log[-6000:]
    ours, theirs = (arrays(folder / f"one-from-{name}") for name in ("in-copies", "three"))
    assert set(ours) == set(theirs)
    for key, expected in theirs.items():
        np.testing.assert_allclose(ours[key], expected, rtol=0, atol=1e-12, err_msg=key)


def require_equal(name: str, processes: int, ran: tuple[Path, str]) -> None:
    folder, log = ran
    one, many = (np.load(folder / f"{name}.{n}.npz") for n in (1, processes))
    assert set(one) == set(many), f"the case ended early:\n{log[-6000:]}"
    for key in one:
        a, b = one[key], many[key]
        assert a.shape == b.shape, key
        scale = max(np.nanmax(np.abs(a), initial=0.0), 1e-3)
        np.testing.assert_allclose(b, a, rtol=0, atol=1e-10 * scale, err_msg=key)


@pytest.mark.parametrize("name", LOADS)
def test_a_checkpoint_goes_on_under_any_strategy_and_number_of_processes(name: str, ran: tuple[Path, str]) -> None:
    folder, log = ran
    assert (folder / name).exists(), log[-6000:]
    ours, theirs = (arrays(folder / each) for each in (name, f"one-from-{name.split('-from-')[1]}"))
    assert set(ours) == set(theirs)
    assert {f"optimizer blocks.1.up.weight/{key}" for key in ("exp_avg", "exp_avg_sq", "step")} <= set(ours)
    for key, expected in theirs.items():
        np.testing.assert_allclose(ours[key], expected, rtol=0, atol=1e-12, err_msg=key)


def arrays(folder: Path) -> dict[str, Any]:
    dtypes = {"F64": np.float64, "F32": np.float32}
    return {
        f"{group} {name}": np.frombuffer(array.data(), dtypes[array.dtype]).reshape(array.shape)
        for group, named in read(folder).arrays.items()
        for name, array in named.items()
    }


def test_a_sharded_checkpoint_has_the_plain_keys_and_each_tied_weight_once(ran: tuple[Path, str]) -> None:
    named = read(ran[0] / "three").arrays["model"]
    assert {"first.weight", "blocks.0.up.weight", "row", "scale", "seen"} <= set(named)
    assert ("last.weight" in named) != ("again.weight" in named)
    assert named["blocks.0.up.weight"].shape == (7, 5)


@pytest.mark.parametrize("name", REFUSALS)
def test_what_cannot_be_sharded_is_refused_on_every_rank(name: str, ran: tuple[Path, str]) -> None:
    said = [line.partition("] ")[2] for line in ran[1].splitlines() if f"] {name}: " in line]
    assert said == [f"{name}: refused"] * 2, said or ran[1][-3000:]


@pytest.mark.parametrize(("n", "when"), [(2, "2b"), pytest.param(3, "3", marks=pytest.mark.full)])
def test_a_killed_rank_ends_the_others_with_its_number(tmp_path: Path, n: int, when: str) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    results = run_processes(
        script, n, fault=f"kill:1@{when}", env={"NEARLINEAR_STRATEGY": "sharded"}, timeout_s=120, grace_s=10
    )
    assert results[1].signal == signal.SIGKILL
    for result in (*results[:1], *results[2:]):
        assert re.search(r"nearlinear: error: rank 1 on \S+: its process ended", result.stderr), result
        assert result.seconds - results[1].seconds < 10


def test_check_sees_whole_gradients_and_parameters(ran: tuple[Path, str]) -> None:
    one, many = (Record.read(ran[0] / f"record-{n}") for n in (1, 3))
    assert many.steps[0].gradients["blocks.0.up.weight"].shape == (7, 5)
    comparison = compare(one, many)
    assert comparison.equal, comparison
    assert comparison.parameters == len(many.start) == 23
    assert [row.step for row in comparison.rows] == [1, 2]


# ---- which modules are blocks


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(2, 2), nn.Linear(2, 2)


def tree(**children: nn.Module) -> nn.Module:
    module = nn.Module()
    for name, child in children.items():
        setattr(module, name, child)
    return module


def names_of(model: nn.Module, **options: int) -> list[str]:
    names = {module: name for name, module in model.named_modules()}
    return [names[block] for block in blocks_of(model, **options)]


def layers(count: int, make: Callable[[], nn.Module] = Layer) -> nn.ModuleList:
    return nn.ModuleList(make() for _ in range(count))


def test_blocks_are_what_a_container_holds_several_of() -> None:
    assert names_of(tree(embedding=nn.Embedding(2, 2), layers=layers(3), head=Layer())) == [
        "layers.0",
        "layers.1",
        "layers.2",
    ]


def test_lone_modules_and_plain_attributes_are_no_blocks() -> None:
    assert names_of(tree(layers=layers(1), a=Layer(), b=Layer())) == []


def test_blocks_within_blocks_are_left_to_the_outer_ones() -> None:
    assert names_of(tree(stages=layers(2, lambda: tree(inner=layers(2))))) == ["stages.0", "stages.1"]


def test_lists_in_lists_are_looked_into() -> None:
    assert names_of(nn.ModuleList([layers(2), layers(2)])) == ["0.0", "0.1", "1.0", "1.1"]


def test_a_small_lone_layer_is_no_block() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 600_000))
    assert names_of(model) == ["2"]
    assert names_of(model, leaf_bytes=1) == ["0", "2"]


def test_a_block_that_shares_a_weight_with_another_is_no_block() -> None:
    model = tree(layers=layers(4), head=nn.Linear(2, 2))
    model.layers[0].a.weight = model.layers[1].a.weight
    model.layers[2].b = model.head
    assert names_of(model) == ["layers.3"]


def test_a_block_in_two_places_is_one_block() -> None:
    model = tree(layers=layers(2))
    model.layers.append(model.layers[0])
    assert names_of(model) == ["layers.0", "layers.1"]


APART = """
import sys, torch
from torch import nn
import nearlinear as nl

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 16))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
plan = nl.Plan("sharded", shards=int(sys.argv[1]), check_every=1)
model, optimizer = nl.distribute(model, optimizer, strategy=plan)
for step in range(4):
    optimizer.zero_grad()
    model(torch.ones(4, 8)).square().mean().backward()
    optimizer.step()
    if step == 1 and nl.rank() == 2:
        model[1].weight._local_tensor.add_(0.5)
"""


@pytest.mark.parametrize(
    ("shards", "code", "said"),
    [
        (2, 1, r"after step 3 rank 2's 1\.weight differs from rank 0's by 0\.[45]"),
        (3, 2, "4 ranks cannot hold copies of 3 ranks each; start a multiple of a number of shards above 1"),
        (1, 2, "4 ranks cannot hold copies of 1 ranks each"),
    ],
)
def test_copies_that_part_are_named_and_so_are_ranks_left_over(
    tmp_path: Path, shards: int, code: int, said: str
) -> None:
    script = tmp_path / "train.py"
    script.write_text(APART)
    result = run(4, script, str(shards))
    assert result.returncode == code and re.search(said, result.stderr), result.stderr
