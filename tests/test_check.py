"""`nearlinear check`: that runs which agree are called equal, and that others are told where they part, and why."""

from __future__ import annotations

import argparse
import math
import os
import shutil
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nearlinear.cli import check
from nearlinear.errors import InputError, NearlinearError
from nearlinear.testing import Comparison, Record, Recorder, RunError, Step, compare, run_processes

pytestmark = pytest.mark.timeout(240)


# ---- values


def record(ranks: int = 1, losses: float | list[float] = 0.5, steps: int = 2, **others: Any) -> Record:
    """A run whose ranks have these losses, weighted alike, and that changes nothing."""
    each = [losses] * ranks if isinstance(losses, float) else losses
    step = Step(
        losses=tuple(((loss, 1 / ranks),) for loss in each),
        gradients={"a": np.array([1.0, -2.0]), "b": np.array([[0.5]])},
        parameters={"a": np.array([3.0, 4.0]), "b": np.array([[5.0]])},
        samples=8,
    )
    return Record((step,) * steps, ranks, dtype="float64", **others)


def changed(run: Record, step: int, **fields: Any) -> Record:
    steps = list(run.steps)
    steps[step - 1] = replace(steps[step - 1], **fields)
    return replace(run, steps=tuple(steps))


def tensors(**values: Any) -> dict[str, Any]:
    return {name: np.array(value) for name, value in values.items()}


def only(comparison: Comparison) -> str:
    (reason,) = comparison.reasons
    return str(reason)


def test_equal_runs_are_called_equal_with_what_was_compared() -> None:
    verdict = compare(record(), record(2))
    assert verdict.equal and verdict.worst == 0
    assert str(verdict) == "equal: 2 steps, 2 parameters, worst relative error 0 (tolerance 1e-10)"


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"losses": (((0.6, 0.5),), ((0.5, 0.5),))}, "different at step 2: loss by 1.0e-01"),
        ({"gradients": tensors(a=[1.0, -2.1], b=[[0.5]])}, "different at step 2: gradient of a by 5.0e-02"),
        ({"gradients": tensors(a=[1.0, -2.0])}, "different at step 2: gradient of b exists on one process only"),
        ({"parameters": tensors(a=[3.0, 4.0], b=[[6.0]])}, "different at step 2: parameter b by 2.0e-01"),
        ({"parameters": tensors(a=[3.0, 4.0], b=[6.0])}, "parameter b has shape (1, 1) on one process and (1,) on 2"),
        ({"losses": (((0.5, 0.5),), ())}, "loss comes from 1 backward passes on one process and 0 on rank 1"),
    ],
)
def test_a_parting_is_named_with_its_step_kind_tensor_and_error(fields: Mapping[str, Any], words: str) -> None:
    verdict = compare(record(), changed(record(2), 2, **fields))
    assert words in str(verdict).splitlines()[0]
    assert not verdict.equal and verdict.reasons


def test_a_loss_that_parts_comes_before_the_gradients_of_the_same_step() -> None:
    other = changed(record(2), 1, gradients=tensors(a=[9.0, 9.0], b=[[9.0]]), losses=(((1.0, 0.5),), ((0.2, 0.5),)))
    parting = compare(record(), other).parting
    assert parting is not None and (parting.step, parting.kind) == (1, "loss")


def test_of_several_tensors_the_one_that_differs_most_is_named() -> None:
    other = changed(record(2), 1, gradients=tensors(a=[1.0, -2.2], b=[[0.9]]))
    parting = compare(record(), other).parting
    assert parting is not None and parting.name == "b" and parting.error == pytest.approx(0.8)


def test_a_gradient_that_is_zero_but_for_rounding_is_not_judged_against_itself() -> None:
    one = changed(record(), 1, gradients=tensors(a=[1.0], b=[1e-17]))
    many = changed(record(2), 1, gradients=tensors(a=[1.0], b=[-3e-17]))
    assert compare(one, many).equal
    assert compare(one, many).rows[0].gradients == pytest.approx(4e-17 / 1e-3)


def test_nan_equals_nan_and_the_verdict_says_that_there_was_one() -> None:
    losses = (((math.nan, 0.5),), ((1.0, 0.5),))
    one = changed(record(), 2, losses=(((math.nan, 1.0),),), parameters=tensors(a=[math.nan, math.inf]))
    many = changed(record(2), 2, losses=losses, parameters=tensors(a=[math.nan, math.inf]))
    assert str(compare(one, many)).startswith("equal") and "but the loss is NaN at step 2" in str(compare(one, many))
    alone = changed(record(2), 2, losses=losses, parameters=tensors(a=[1.0, math.inf]))
    parting = compare(one, alone).parting
    assert parting is not None and parting.kind == "parameter" and parting.error == math.inf


def test_a_share_of_weight_zero_may_have_a_loss_that_is_nan() -> None:
    assert compare(record(), changed(record(2), 1, losses=(((0.5, 1.0),), ((math.nan, 0.0),)))).equal


@pytest.mark.parametrize(
    ("one", "many", "tolerance"),
    [
        ("float64", "float64", 1e-10),
        ("float64", "float32", 1e-5),
        ("float32", "float32", 1e-5),
        ("float32", "bfloat16", 1e-2),
        ("float16", "float16", 1e-2),
    ],
)
def test_the_tolerance_is_that_of_the_narrowest_type(one: str, many: str, tolerance: float) -> None:
    assert compare(replace(record(), dtype=one), replace(record(2), dtype=many)).tolerance == tolerance


@given(
    st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=4),
    st.integers(0, 3),
    st.sampled_from([1e-12, 1e-9, 1e-3, 10.0]),
    st.sampled_from(["gradients", "parameters"]),
)
def test_a_change_parts_the_runs_if_and_only_if_it_exceeds_the_tolerance(
    values: list[float], place: int, change: float, kind: str
) -> None:
    largest = max(map(abs, values))
    one = np.array([*values, 1.0])
    many = one.copy()
    many[place % len(one)] += change * max(largest, 1.0)
    verdict = compare(changed(record(), 1, **{kind: {"x": one}}), changed(record(2), 1, **{kind: {"x": many}}))
    assert verdict.equal == (change < 1e-10)


# ---- reasons


def test_weights_that_differ_at_the_start_are_told_from_a_run_that_parts() -> None:
    one = replace(record(), start=tensors(a=[1.0]))
    verdict = compare(
        one, changed(replace(record(2), start=tensors(a=[2.0])), 1, losses=(((9.0, 1.0),), ((9.0, 0.0),)))
    )
    assert str(verdict).startswith("different at the start: parameter a by 1.0e+00")
    assert "torch.manual_seed(0)" in only(verdict)


def test_a_model_that_depends_on_the_number_of_processes_is_suspected_of_it() -> None:
    verdict = compare(replace(record(), start=tensors(a=[1.0])), replace(record(2), start=tensors(a=[1.0, 2.0])))
    assert "another model" in only(verdict) and "nl.world_size()" in only(verdict)


def test_a_different_number_of_steps_is_a_difference() -> None:
    verdict = compare(record(steps=5), record(2, steps=3))
    assert str(verdict).startswith("different at step 4: one process took 5 steps, 2 processes 3 (tolerance")
    assert "length of the loop" in only(verdict)


def test_a_batch_size_divided_by_the_number_of_processes_is_seen() -> None:
    many = replace(record(2, [0.4, 0.1]), steps=tuple(replace(s, samples=4) for s in record(2, [0.4, 0.1]).steps))
    assert "step 1 takes 8 samples on one process and 4 on 2" in only(compare(record(), many))


def test_an_accumulation_divided_by_the_number_of_processes_is_seen() -> None:
    many = changed(record(2), 2, losses=(((0.5, 0.5),) * 2, ((0.5, 0.5),) * 2))
    assert "the number of backward passes in a step depends on" in only(compare(record(), many))


def test_a_learning_rate_that_depends_on_the_number_of_processes_is_seen() -> None:
    one = changed(record(), 1, options={"lr": 0.1, "momentum": 0.9})
    many = changed(record(2), 1, options={"lr": 0.2, "momentum": 0.9}, parameters=tensors(a=[3.0, 5.0], b=[[5.0]]))
    assert "the optimizer's lr is 0.1 on one process and 0.2 on 2 at step 1" in only(compare(one, many))


@pytest.mark.parametrize(
    ("losses", "weight", "words"),
    [
        ([0.2, 0.9], "samples", "weight=lambda batch"),
        ([0.2, 0.9], "function", "weight(batch) is not what the loss divides by"),
        ([0.2, 0.9], "sum", 'the loss is a mean, and weight="sum" adds'),
        ([0.2, 0.3], "samples", 'weight="sum"'),
        ([0.2, 0.3], "function", 'weight="sum"'),
        ([0.1, 0.2], "samples", "nl.gather"),
        ([0.6, 0.7], "function", "nl.gather"),
    ],
)
def test_a_loss_that_parts_is_explained_by_the_losses_of_the_ranks(
    losses: list[float], weight: str, words: str
) -> None:
    assert words in only(compare(record(), record(2, losses, weight=weight)))


def test_layers_and_draws_that_explain_a_loss_are_all_named() -> None:
    one = record(batchnorm=("bn1", "bn2", "bn3"), dropout=("drop",))
    one = changed(one, 1, drawn=("torch", "numpy"))
    reasons = list(map(str, compare(one, record(2, [0.2, 0.3001])).reasons))
    assert len(reasons) == 3
    assert "BatchNorm (bn1, bn2 and 1 more)" in reasons[0] and "convert_sync_batchnorm" in reasons[0]
    assert "dropout (drop)" in reasons[1]
    assert "(numpy)" in reasons[2]


def test_gradients_that_part_alone_are_blamed_on_the_backward_pass() -> None:
    verdict = compare(record(), changed(record(2), 1, gradients=tensors(a=[1.0, 2.0], b=[[0.5]])))
    assert "the losses agree and their gradients do not" in only(verdict)


def test_parameters_that_part_alone_are_blamed_on_the_step_even_with_batch_norm() -> None:
    many = changed(record(2), 1, parameters=tensors(a=[3.0, 5.0], b=[[5.0]]))
    assert "clip_grad_norm_" in only(compare(record(batchnorm=("bn",)), many))


def test_a_small_parting_in_float32_may_be_rounding() -> None:
    one, many = (replace(run, dtype="float32") for run in (record(), record(2, [0.5, 0.5001])))
    assert "rounding" in str(compare(one, many).reasons[0]) and len(compare(one, many).reasons) == 2
    assert "rounding" not in str(compare(one, replace(record(2, [0.5, 0.9]), dtype="float32")).reasons[0])


def test_rounding_that_adam_scales_up_is_told_from_another_step() -> None:
    one, many = (replace(run, dtype="float32") for run in (record(), record(2)))
    noise = tensors(a=[1e-9, 1.0], b=[[0.5]])
    one = changed(one, 1, gradients=noise)
    where_it_is_zero = changed(many, 1, gradients=noise, parameters=tensors(a=[3.1, 4.0], b=[[5.0]]))
    where_it_is_not = changed(many, 1, gradients=noise, parameters=tensors(a=[3.0, 4.1], b=[[5.0]]))
    assert "where a parts, its gradient is zero" in only(compare(one, where_it_is_zero))
    assert "depends on the rank" in only(compare(one, where_it_is_not))


# ---- real runs: all cases in one process each, since to start torch is what takes the time

CASES = """
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import nearlinear as nl
from nearlinear.testing import Recorder
from nearlinear.torch import session

torch.set_default_dtype(torch.float64)
N = nl.world_size()
CLASSES = 3


def mlp(*between):
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 12), *between, nn.Tanh(), nn.Linear(12, CLASSES))


def loader(batch_size=8):
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(30, 6, generator=generator)
    y = torch.randint(0, CLASSES, (30,), generator=generator)
    y[:9] = -100
    return DataLoader(TensorDataset(x, y), batch_size=batch_size, shuffle=True)


def ignoring(output, y):  # the mean over what is not ignored: as over tokens
    return F.cross_entropy(output, y)


def plain(output, y):
    return F.cross_entropy(output, y.clamp(min=0))


def summed(output, y):
    return F.cross_entropy(output, y.clamp(min=0), reduction="sum")


def contrasting(output, y):
    return F.cross_entropy(output @ output.T, torch.arange(len(output)))


def train(model, loss=plain, batches=None, lr=0.1, noise=False, clip=False, accumulate=1, weight=None):
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    model, optimizer, batches = nl.distribute(model, optimizer, batches or loader(), weight=weight)
    while True:
        for number, (x, y) in enumerate(batches, start=1):
            if noise:
                x = x + 0.1 * torch.randn(x.shape)
            (loss(model(x), y) / accumulate).backward()
            if number % accumulate == 0:
                if clip:
                    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                optimizer.step()
                optimizer.zero_grad()


class Half(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = mlp().to(torch.float32)

    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            return self.inner(x.to(torch.float32)).to(torch.float32)


def adversaries():
    generator, critic = mlp(), nn.Linear(CLASSES, 1)
    g = torch.optim.SGD(generator.parameters(), lr=0.1)
    c = torch.optim.SGD(critic.parameters(), lr=0.1)
    generator, g, batches = nl.distribute(generator, g, loader())
    critic, c = nl.distribute(critic, c)
    while True:
        for x, _ in batches:
            c.zero_grad()
            (critic(generator(x).detach()) - 1).square().mean().backward()
            c.step()
            g.zero_grad()
            critic(generator(x)).mean().backward()
            g.step()


CASES = {
    "plain": lambda: train(mlp()),
    "clipped accumulation": lambda: train(mlp(), accumulate=2, clip=True),
    "two models": adversaries,
    "weighted": lambda: train(mlp(), ignoring, weight=lambda batch: (batch[1] != -100).sum()),
    "synced": lambda: train(nn.SyncBatchNorm.convert_sync_batchnorm(mlp(nn.BatchNorm1d(12)))),
    "half": lambda: train(Half()),
    "unweighted": lambda: train(mlp(), ignoring),
    "batchnorm": lambda: train(mlp(nn.BatchNorm1d(12))),
    "dropout": lambda: train(mlp(nn.Dropout(0.5))),
    "noise": lambda: train(mlp(), noise=True),
    "contrast": lambda: train(mlp(), contrasting),
    "lr": lambda: train(mlp(), lr=0.25 * N),
    "small batches": lambda: train(mlp(), batches=loader(8 // N)),
    "sum without weight": lambda: train(mlp(), summed),
    "sum": lambda: train(mlp(), summed, weight="sum"),
}

for name, case in CASES.items():
    with Recorder(Path(sys.argv[1]) / name / str(N), steps=6):
        case()
    session().summed = None  # a run settles once how losses add up; the cases are runs of their own
print("done", flush=True)
"""


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recorded")
    script = folder / "cases.py"
    script.write_text(CASES)
    for n in (1, 3):
        results = run_processes(script, n, [str(folder)], env={"OMP_NUM_THREADS": "1"}, timeout_s=120)
        assert [result.stdout for result in results] == ["done\n"] * n, [result.stderr for result in results]
    return folder


def compared(folder: Path, case: str) -> Comparison:
    return compare(Record.read(folder / case / "1"), Record.read(folder / case / "3"))


@pytest.mark.parametrize("case", ["plain", "clipped accumulation", "two models", "weighted", "synced", "sum"])
def test_three_processes_have_the_numbers_of_one(recorded: Path, case: str) -> None:
    verdict = compared(recorded, case)
    assert verdict.equal, str(verdict)
    assert len(verdict.rows) == 6 and 0 < verdict.worst < verdict.tolerance == 1e-10
    losses = [row.loss_of_one for row in verdict.rows]
    assert all(loss is not None and loss != 0 for loss in losses) and len(set(losses)) > 1


@pytest.mark.parametrize(
    ("case", "kind", "words"),
    [
        ("unweighted", "loss", "weight=lambda batch"),
        ("batchnorm", "loss", "BatchNorm (1) normalises over each rank's share"),
        ("dropout", "loss", "dropout (1) draws other random numbers"),
        ("noise", "loss", "draws random numbers as it trains (torch)"),
        ("contrast", "loss", "nl.gather"),
        ("lr", "parameter", "the optimizer's lr is 0.25 on one process and 0.75 on 3"),
        ("small batches", "loss", "step 1 takes 8 samples on one process and 2 on 3"),
        ("sum without weight", "loss", 'weight="sum"'),
    ],
)
def test_the_reason_for_a_parting_is_found(recorded: Path, case: str, kind: str, words: str) -> None:
    verdict = compared(recorded, case)
    assert verdict.parting is not None and verdict.parting.kind == kind, str(verdict)
    assert words in only(verdict)


def test_sixteen_bits_have_a_tolerance_of_their_own(recorded: Path) -> None:
    verdict = compared(recorded, "half")
    assert verdict.tolerance == 1e-2 and 0 < verdict.worst < 0.1


def test_gradients_are_recorded_as_they_were_before_clipping(recorded: Path) -> None:
    step = Record.read(recorded / "clipped accumulation" / "3").steps[0]
    squares = sum(float(np.square(gradient).sum()) for gradient in step.gradients.values())
    assert math.sqrt(squares) > 0.11


def test_the_tensors_of_two_models_have_the_numbers_of_the_models(recorded: Path) -> None:
    critic, generator = Record.read(recorded / "two models" / "1").steps[:2]
    assert set(critic.parameters) == {"model 0 weight", "model 0 bias"}
    assert "model 1 0.weight" in generator.parameters
    assert {"model 0 weight", "model 1 0.weight"} <= set(generator.gradients)


def test_a_block_is_recorded_once_and_leaves_nothing_behind(tmp_path: Path) -> None:
    import torch

    backward, enter = torch.Tensor.backward, torch.autocast.__enter__
    with pytest.raises(ZeroDivisionError), Recorder(tmp_path, steps=3):
        assert torch.Tensor.backward is not backward
        raise ZeroDivisionError
    assert (torch.Tensor.backward, torch.autocast.__enter__) == (backward, enter)
    assert Record.read(tmp_path) == Record((), distributed=False)


def test_a_rank_that_left_no_record_is_named(recorded: Path, tmp_path: Path) -> None:
    left = tmp_path / "left"
    shutil.copytree(recorded / "plain" / "3", left)
    (left / "rank-2.json").unlink()
    with pytest.raises(NearlinearError, match="rank 2 left no record"):
        Record.read(left)


# ---- the command


def nearlinear_check(*args: str) -> int:
    parser = argparse.ArgumentParser()
    check.register(parser.add_subparsers())
    options = parser.parse_args(["check", *args])
    return int(options.call(options))


def written(tmp_path: Path, text: str) -> str:
    path = tmp_path / "train.py"
    path.write_text(text)
    return str(path)


MODEL = """
import os, sys
import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader
import nearlinear as nl

from squares import square  # beside the script


class Data(torch.utils.data.Dataset):
    x = np.random.standard_normal((40, 5)).astype(np.float32)  # no seed is set

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        with open(sys.argv[1], "a") as file:
            file.write(f"{os.getpid()} ")
        return self.x[index], float(self.x[index].sum())


def main():
    model = nn.Linear(5, 1)
    optimizer = torch.optim.Adam(model.parameters())
    loader = DataLoader(Data(), batch_size=8, num_workers=1)
    model, optimizer, loader = nl.distribute(model, optimizer, loader)
    print("this is not for stdout")
    for epoch in range(int(sys.argv[2])):
        for x, y in loader:
            optimizer.zero_grad()
            try:
                LOSS.backward()
                optimizer.step()
            except Exception:
                print("swallowed")


if __name__ == "__main__":
    main()
"""


def test_a_script_is_compared_in_float64_and_its_workers_end_with_it(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "squares.py").write_text("square = lambda a, b: (a - b.float()).square().mean()")
    script = written(tmp_path, MODEL.replace("LOSS", "square(model(x)[:, 0], y)"))
    assert nearlinear_check("-n", "2", "--steps", "7", "--float64", script, str(tmp_path / "pids"), "1000") == 0
    out, err = capfd.readouterr()
    assert out.splitlines()[-1].startswith("equal: 7 steps, 2 parameters, worst relative error ")
    assert out.splitlines()[-1].endswith("(tolerance 1e-10)")
    assert err == f"hint: nearlinear run -n 2 {script} {tmp_path / 'pids'} 1000\n"
    workers = set(map(int, (tmp_path / "pids").read_text().split()))
    assert len(workers) >= 3
    for pid in workers:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_a_script_that_parts_exits_with_1_and_says_where_and_why(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "squares.py").write_text("square = lambda a, b: (a - b.float()).square().sum()")
    script = written(tmp_path, MODEL.replace("LOSS", "square(model(x)[:, 0], y)"))
    assert nearlinear_check("--steps", "8", script, str(tmp_path / "pids"), "1") == 1
    out, err = capfd.readouterr()
    assert "the script ended after 5 of 8 steps" in out
    assert "different at step 1: loss by 5.0e-01 (tolerance 1e-05)" in out
    assert "likely: the loss is a sum over the batch" in out.splitlines()[-1]
    assert " !" in out
    again = f"nearlinear check -n 2 --steps 8 --float64 {script} {tmp_path / 'pids'} 1"
    assert err == f"hint: to rule out rounding, {again}\n"


def test_a_script_that_fails_shows_the_end_of_what_it_wrote(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    script = written(tmp_path, "import sys; print('first', file=sys.stderr); 1 / 0")
    with pytest.raises(RunError, match=r"train.py failed on one process: rank 0 exited with code 1") as caught:
        nearlinear_check(script)
    out, err = capfd.readouterr()
    assert caught.value.exit_code == 1 and out == ""
    assert err.startswith("first\n") and "ZeroDivisionError" in err


def test_a_script_that_never_calls_distribute_is_ended_and_told_so(tmp_path: Path) -> None:
    script = written(
        tmp_path,
        "import torch\n"
        "weight = torch.nn.Parameter(torch.ones(()))\n"
        "optimizer = torch.optim.SGD([weight])\n"
        "while True:\n    weight.square().backward()\n    optimizer.step()\n",
    )
    with pytest.raises(InputError, match=r"took 3 optimizer steps, without calling nl\.distribute; add the two lines"):
        nearlinear_check("--steps", "3", script)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ([], "which script"),
        (["nowhere.py"], r"there is no script 'nowhere\.py'"),
        (["-n", "1", "nowhere.py"], "1 processes and 5 steps"),
        (["--steps", "0", "nowhere.py"], "2 processes and 0 steps"),
    ],
)
def test_bad_input_is_said_before_anything_runs(args: list[str], words: str) -> None:
    with pytest.raises(InputError, match=words):
        nearlinear_check(*args)


def test_the_public_names_are_there() -> None:
    import nearlinear.testing

    assert all(getattr(nearlinear.testing, name).__name__ == name for name in nearlinear.testing.__all__)
    with pytest.raises(AttributeError, match="no attribute 'missing'"):
        _ = nearlinear.testing.missing
    assert "nearlinear.testing.faults" in sys.modules
