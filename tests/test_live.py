"""The live line and the summary, as text and on a terminal."""

from __future__ import annotations

import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest

import nearlinear.errors
from nearlinear.observe.live import KEPT, Live, Step, live_text, summary_text


@pytest.mark.parametrize(
    ("step", "text"),
    [
        (Step(120, 1234.4, 0.071), "step 120 · 1,234 samples/s · 7 % communicating"),
        (
            Step(120, 1234.4, 0.071, predicted_samples_per_s=1300.0),
            "step 120 · 1,234 samples/s · 7 % communicating · (predicted 1,300)",
        ),
        (Step(12345, 4.5678, 0.999), "step 12,345 · 4.57 samples/s · 100 % communicating"),
        (Step(1, 100.0, 0.0, loss=2.30259), "step 1 · loss 2.303 · 100 samples/s · 0 % communicating"),
        (Step(1, float("nan"), 0.0, loss=float("inf")), "step 1 · loss inf · nan samples/s · 0 % communicating"),
    ],
)
def test_the_live_line_says_step_speed_and_communication(step: Step, text: str) -> None:
    assert live_text(step) == text


@pytest.mark.parametrize(
    ("steps", "text"),
    [
        ([], ""),
        ([Step(1, 50.0)], "1 step in 12.3 s · median 50 samples/s · 0 % of the time communicating"),
        (
            [Step(10, 10.0, 0.2), Step(20, 400.0, 0.1), Step(30, 300.0, 0.3)],
            "30 steps in 12.3 s · median 300 samples/s · 20 % of the time communicating",
        ),
        (
            [Step(1, 90.0, predicted_samples_per_s=100.0), Step(2, 90.0)],
            "2 steps in 12.3 s · median 90 samples/s · 0 % of the time communicating\n"
            "predicted 100 samples/s, measured 90 (10 % slower)",
        ),
        (
            [Step(1, 150.0, predicted_samples_per_s=100.0)],
            "1 step in 12.3 s · median 150 samples/s · 0 % of the time communicating\n"
            "predicted 100 samples/s, measured 150 (50 % faster)",
        ),
    ],
)
def test_the_summary_gives_median_share_and_forecast(steps: list[Step], text: str) -> None:
    assert summary_text(steps, 12.34) == text


@pytest.mark.parametrize(
    ("event", "step"),
    [
        ({"kind": "step", "rank": 0, "step": 3, "samples_per_s": 9.0, "waiting": 0.5}, Step(3, 9.0, 0.5)),
        ({"kind": "step", "rank": 0, "step": 3, "samples_per_s": 9.0, "loss": None, "new": 1}, Step(3, 9.0)),
        ({"kind": "step", "rank": 1, "step": 3, "samples_per_s": 9.0, "waiting": 0.5}, None),
        ({"kind": "step", "rank": 0, "model": 1, "step": 3, "samples_per_s": 9.0}, None),
        ({"kind": "step", "rank": 0, "step": 3}, None),
        ({"kind": "distributed", "rank": 0, "world_size": 2}, None),
    ],
)
def test_only_the_steps_of_rank_0_and_its_first_model_count(event: dict[str, object], step: Step | None) -> None:
    assert Step.from_event(event) == step


def test_a_long_run_is_summed_up_from_a_bounded_number_of_steps() -> None:
    """Speeds rise from 1 to 100,000, so that a sample of one part of the run would miss the median."""
    with open(os.devnull, "w") as nowhere:  # noqa: PTH123
        live = Live(nowhere)
        for step in range(1, 100_001):
            live.event({"kind": "step", "step": step, "samples_per_s": float(step), "waiting": 0.5})
    assert len(live._steps) <= KEPT
    count, _, rest = live.summary().partition(" steps in ")
    assert count == "100,000"
    median = float(rest.split("median ")[1].split(" ")[0].replace(",", ""))
    assert abs(median - 50_000) < 50  # one of every sixteen steps is kept
    assert rest.endswith("50 % of the time communicating")


STEPS = """
import os
from nearlinear.events import send_to_launcher
rank = int(os.environ["RANK"])
send_to_launcher("distributed", rank=rank, world_size=2)
send_to_launcher("step", rank=rank, step=7, samples_per_s=1234.0, waiting=0.07, predicted_samples_per_s=1300.0)
"""


def run_two(tmp_path: Path, stderr: int) -> subprocess.Popen[bytes]:
    script = tmp_path / "train.py"
    script.write_text(STEPS)
    env = {**os.environ, "PYTHONPATH": str(Path(nearlinear.errors.__file__).parents[1]), "TERM": "xterm"}
    command = [sys.executable, "-m", "nearlinear", "run", "-n", "2", str(script)]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=stderr, env=env)


def read_terminal(master: int) -> str:
    """Return what was written until the last writer closed it, which Linux reports as an error."""
    seen = b""
    try:
        while data := os.read(master, 4096):
            seen += data
    except OSError:
        pass
    return seen.decode()


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("columns", "line"),
    [
        (100, "step 7 · 1,234 samples/s · 7 % communicating · (predicted 1,300)"),
        (30, "step 7 · 1,234 samples/s · 7 "),  # one column less than there are: a full line would wrap
    ],
)
def test_a_terminal_shows_the_live_line_and_then_the_summary(tmp_path: Path, columns: int, line: str) -> None:
    master, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    process = run_two(tmp_path, terminal)
    os.close(terminal)
    drawn, _, summary = read_terminal(master).rpartition("\r\x1b[2K")
    os.close(master)
    assert process.wait() == 0
    assert drawn == "\r\x1b[2K" + line
    assert "7 steps in" in summary
    assert "predicted 1,300 samples/s, measured 1,234 (5 % slower)" in summary


@pytest.mark.timeout(60)
def test_without_a_terminal_only_the_summary_is_shown(tmp_path: Path) -> None:
    process = run_two(tmp_path, subprocess.PIPE)
    said = process.communicate()[1].decode().splitlines()
    assert process.returncode == 0
    assert said[2].startswith("nearlinear: hint: nearlinear report ")
    assert [line.partition(" in ")[0] for line in said[:2]] == [
        "nearlinear: 7 steps",
        "nearlinear: predicted 1,300 samples/s, measured 1,234 (5 % slower)",
    ]
