"""Claims about the two example scripts and the command that compares them on one process and on two."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree

import pytest

import nearlinear
from nearlinear.cli.comparison import Comparison, Example, Limits, compare, seconds_per_step
from nearlinear.cli.demo import EXAMPLES, limit_text
from nearlinear.cli.main import main
from nearlinear.errors import NearlinearError

PACKAGE = Path(nearlinear.__file__).parent
DEADLINE_S = 240


def python(*args: str | Path, **env: str) -> subprocess.CompletedProcess[str]:
    """Run Python with one thread and return what it printed; the exit code is the caller's to check."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **env}
    command = [sys.executable, *map(str, args)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=DEADLINE_S)


def losses(record: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in record.read_text().splitlines()]


# ---- the scripts


def test_the_root_folder_examples_is_the_packages() -> None:
    root = PACKAGE.parent.parent
    if not (root / "pyproject.toml").exists():
        pytest.skip("nearlinear is installed, not run from its checkout")
    assert (root / "examples").resolve() == PACKAGE / "examples"


# ---- the command, once


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> tuple[subprocess.CompletedProcess[str], Path]:
    """Run the quick demo."""
    out = tmp_path_factory.mktemp("demo") / "new" / "folder"
    run = python("-m", "nearlinear", "demo", "--quick", "--out", out, COLUMNS="100")
    assert run.returncode == 0, run.stderr
    return run, out


@pytest.mark.parametrize("name", ["digits", "gpt"])
def test_two_processes_have_the_losses_of_one(quick: tuple[subprocess.CompletedProcess[str], Path], name: str) -> None:
    _, out = quick
    # float32: the sums of two shares round otherwise than the sum of the whole.
    assert losses(out / f"{name}-many.jsonl") == pytest.approx(losses(out / f"{name}-one.jsonl"), rel=1e-5)


@pytest.mark.parametrize("name", ["digits", "gpt"])
def test_both_curves_are_a_picture_with_both_names(
    quick: tuple[subprocess.CompletedProcess[str], Path], name: str
) -> None:
    _, out = quick
    texts = [element.text for element in ElementTree.parse(out / f"{name}.svg").iter()]
    assert "1 process" in texts
    assert "2 processes" in texts


def test_an_example_prints_the_same_on_one_and_two_processes(
    quick: tuple[subprocess.CompletedProcess[str], Path],
) -> None:
    run, _ = quick
    lines = r"^((?:\[0\] )?)((?:epoch|step) \d+  loss \d\.\d{4}(?:  accuracy .*)?)"
    printed = re.findall(lines, run.stderr, flags=re.M)
    one, two = ([line for rank, line in printed if bool(rank) == many] for many in (False, True))
    assert one == two
    assert [line.split("  ")[0] for line in one] == ["epoch 1", "step 1", "step 8"]
    assert re.fullmatch(r"epoch 1  loss \d\.\d{4}  accuracy \d+\.\d %", one[0])


def test_the_printed_difference_and_speeds_are_those_of_the_records(
    quick: tuple[subprocess.CompletedProcess[str], Path],
) -> None:
    run, out = quick
    for each in EXAMPLES:
        one, many = (losses(out / f"{each.name}-{which}.jsonl") for which in ("one", "many"))
        difference = max(abs(a - b) for a, b in zip(one, many, strict=True))
        assert f"in {len(one)} steps: {difference:.1e}" in run.stdout
        speeds = []
        for which in ("one", "many"):
            rows = [json.loads(line) for line in (out / f"{each.name}-{which}.jsonl").read_text().splitlines()]
            speeds.append(each.batch / seconds_per_step(rows, each.batch))
        cells = "".join(rf"│ *{speed:,.4g} *" for speed in (*speeds,))
        assert re.search(rf"│ {each.name} *{cells}│ *{speeds[1] / speeds[0]:.2f} *│", run.stdout)


def test_results_go_to_stdout_and_progress_with_a_hint_at_the_end_to_stderr(
    quick: tuple[subprocess.CompletedProcess[str], Path],
) -> None:
    run, _ = quick
    assert "●─● 1 process   ×─× 2 processes" in run.stdout
    assert "epoch 1  loss" in run.stderr
    assert "epoch 1  loss" not in run.stdout
    assert run.stderr.splitlines()[-1] == "hint: nearlinear run -n 2 your_script.py"


# ---- refusals and failures


def bare_site(folder: Path, packages: Sequence[str]) -> Path:
    """Make a folder to import from that has nearlinear and these packages alone."""
    for package in packages:
        spec = importlib.util.find_spec(package)
        assert spec is not None and spec.submodule_search_locations
        (folder / package).symlink_to(spec.submodule_search_locations[0])
    (folder / "nearlinear").symlink_to(PACKAGE)
    return folder


def test_without_torch_and_scikit_learn_one_line_says_what_to_install(tmp_path: Path) -> None:
    site = bare_site(tmp_path, ["rich", "pygments", "markdown_it", "mdurl", "numpy"])
    run = python("-S", "-m", "nearlinear", "demo", "--out", tmp_path / "out", PYTHONPATH=str(site))
    assert run.returncode == 2
    assert run.stderr == ("nearlinear: error: the demo needs torch and scikit-learn: pip install 'nearlinear[demo]'\n")


@pytest.mark.parametrize("n", ["1", "9"])
def test_a_number_of_processes_that_compares_nothing_is_refused(
    n: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["demo", "--processes", n, "--out", str(tmp_path)]) == 2
    assert f"--processes is {n}; the demo compares one process with 2 to 8" in capsys.readouterr().err


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    assert main(["demo", "--out", str(tmp_path / "file" / "out")]) == 2
    assert "choose another --out" in capsys.readouterr().err


def example(folder: Path, text: str) -> Example:
    """Make an example of a script of 12 steps."""
    script = folder / "line.py"
    script.write_text(text)
    return Example("line", "A line", script, batch=8, whole=("--steps", "12"), quick=(), timed=("--steps", "8"))


def test_a_training_that_fails_is_named_with_its_exit_code(tmp_path: Path) -> None:
    with pytest.raises(NearlinearError, match="line on 1 process ended with exit code 3"):
        compare(example(tmp_path, "raise SystemExit(3)"), 2, tmp_path, quick=True)


# It trains nothing: the examples do that in the quick demo. A sample takes a tenth of a millisecond of the processor.
LINE = """
import argparse, json, os, time
from pathlib import Path
from nearlinear.events import send_to_launcher
parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int)
parser.add_argument("--batch-size", type=int, default=8)
parser.add_argument("--record", type=Path)
args = parser.parse_args()
share = args.batch_size // int(os.environ.get("WORLD_SIZE", 1))
send_to_launcher("distributed", rank=0, world_size=2)  # as nl.distribute does
rows = []
for step in range(1, args.steps + 1):
    until = time.process_time() + 1e-4 * share
    while time.process_time() < until:
        pass
    row = {"step": step, "loss": 1 / step, "samples": step * args.batch_size}
    rows.append(json.dumps({**row, "seconds": time.perf_counter()}))
if os.environ.get("RANK", "0") == "0":
    args.record.write_text("\\n".join(rows))
"""


def test_the_parts_of_a_step_are_measured_and_add_up_to_the_step(tmp_path: Path) -> None:
    compared = compare(example(tmp_path, LINE), 2, tmp_path, quick=False)
    assert len(compared.steps) == 12
    assert compared.limits is not None
    assert compared.limits.step == pytest.approx(compared.step_many)
    assert compared.limits.ideal == pytest.approx(compared.step_one / 2)
    assert {path.stem for path in tmp_path.glob("*.jsonl")} == {
        f"line-{s}" for s in ("one", "many", "alone", "crowd0", "crowd1")
    }


# ---- numbers


def test_the_parts_of_a_step_add_up_to_the_measured_step() -> None:
    limits = Limits.of(2, one=8.0, alone=4.5, crowded=5.0, many=5.25)
    assert limits == Limits(ideal=4.0, fixed=0.5, crowding=0.5, exchange=0.25)
    assert limits.step == 5.25


@pytest.mark.parametrize(
    ("limits", "says"),
    [
        (Limits(0.040, 0.006, 0.002, 0.002), "compute that does not shrink with the batch (12 % of a step)"),
        (Limits(0.040, 0.002, 0.006, 0.002), "processes side by side on one machine"),
        (Limits(0.040, 0.002, 0.002, 0.006), "exchange and waiting (12 % of a step)"),
        (Limits(0.040, 0.0002, 0.0001, 0.0), "no part beyond the ideal takes 2 % of a step"),
        (Limits(0.040, 0.030, 0.010, -0.030), "these parts do not add up (exchange and waiting: -30 ms)"),
    ],
    ids=["fixed", "crowding", "exchange", "nothing", "noise"],
)
def test_the_largest_part_is_what_limits(limits: Limits, says: str) -> None:
    assert says in limit_text(limits)


def test_a_step_is_the_median_without_the_first_steps_and_short_batches() -> None:
    ends = [(9.0, 64), (18.0, 128), (19.0, 192), (20.0, 256), (20.1, 260), (21.1, 324), (23.1, 388)]
    rows = [{"seconds": seconds, "samples": float(samples)} for seconds, samples in ends]
    assert seconds_per_step(rows, 64) == pytest.approx(1.0)


def test_the_difference_is_the_largest_of_all_steps() -> None:
    compared = Comparison(EXAMPLES[0], 2, (1, 2, 3), (3.0, 2.0, 1.0), (3.0, 2.5, 0.75), 2.0, 1.0)
    assert compared.difference == 0.5
