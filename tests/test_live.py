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
from nearlinear.observe.live import KEPT, Apart, Live, Step, live_text, summary_text


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
    ("apart", "text"),
    [
        (
            Apart(12, 2, 4_000, 5_000, alone_samples_per_s=650.0),
            "round 12 · 2 members · step 120 · 1,200 samples/s = 1.85 x alone · 7 % waiting · sent 4 KB, received 5 KB",
        ),
        (
            Apart(1200, 3, 999, 0),  # never alone
            "round 1,200 · 3 members · step 120 · 1,200 samples/s · 7 % waiting · sent 999 B, received 0 B",
        ),
        (
            Apart(1, 1, 2_000, 10, alone_samples_per_s=650.0),  # alone it is one machine
            "round 1 · 1 member · step 120 · 1,200 samples/s · 7 % waiting · sent 2 KB, received 10 B",
        ),
    ],
)
def test_the_live_line_of_machines_far_apart_says_what_the_others_bring_and_cost(apart: Apart, text: str) -> None:
    assert live_text(Step(120, 1200.0, 0.07), apart) == text


@pytest.mark.parametrize(
    ("apart", "text"),
    [
        (Apart(12, 2, 4_000, 5_000, 650.0, 1200.0), "with others 1,200 samples/s, alone 650: 1.85 x one machine"),
        (
            Apart(12, 2, 4_000, 5_000, None, 1200.0),
            "with others 1,200 samples/s; this machine alone was not measured, for others were always here",
        ),
        (Apart(12, 1, 4_000, 5_000, 650.0), "no time with other members was measured"),
    ],
)
def test_the_summary_of_machines_far_apart_says_what_was_measured_and_what_was_not(apart: Apart, text: str) -> None:
    assert summary_text([Step(30, 900.0, 0.25)], 12.34, apart) == (
        "30 steps in 12.3 s · median 900 samples/s · 25 % of the time waiting for other members\n"
        f"12 rounds · sent 4 KB, received 5 KB · {text}"
    )


def test_a_member_tells_how_it_stands_beside_its_steps() -> None:
    event = {"kind": "apart", "round": 3, "members": 2, "sent": 10, "received": 20, "alone_samples_per_s": None}
    assert Apart.from_event({**event, "new": 1}) == Apart(3, 2, 10, 20)
    assert Apart.from_event({"kind": "apart", "round": 3}) is None
    assert Apart.from_event({**event, "kind": "step"}) is None


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


APART = """
from nearlinear.events import send_to_launcher
send_to_launcher("distributed", rank=0, world_size=1)
send_to_launcher("apart", round=4, members=2, sent=1000, received=2000, alone_samples_per_s=500.0)
send_to_launcher("step", rank=0, step=7, samples_per_s=1000.0, waiting=0.07)
send_to_launcher(
    "apart", round=5, members=2, sent=3000, received=4000, alone_samples_per_s=500.0, together_samples_per_s=900.0
)
"""


@pytest.mark.timeout(60)
def test_a_terminal_shows_how_a_member_stands(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(APART)
    master, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 120, 0, 0))
    env = {**os.environ, "PYTHONPATH": str(Path(nearlinear.errors.__file__).parents[1]), "TERM": "xterm"}
    command = [sys.executable, "-m", "nearlinear", "run", "--record", str(tmp_path / "record.jsonl"), str(script)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=terminal, env=env)
    os.close(terminal)
    said = read_terminal(master)
    os.close(master)
    assert process.wait() == 0
    line = "round 4 · 2 members · step 7 · 1,000 samples/s = 2 x alone · 7 % waiting · sent 1 KB, received 2 KB"
    assert "\r\x1b[2K" + line in said
    assert "5 rounds · sent 3 KB, received 4 KB · with others 900 samples/s, alone 500: 1.8 x one machine" in said


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
