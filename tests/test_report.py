"""The record of a run and the report drawn from it: what is in them, and what happens when something goes wrong."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
import select
import signal
import stat
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import nearlinear.errors
from browser import CHROMIUM, browser
from nearlinear.cli import report
from nearlinear.core.forecast import Forecast, Point
from nearlinear.core.graph import Graph, Operator
from nearlinear.core.plan import Plan
from nearlinear.errors import InputError
from nearlinear.observe import kept
from nearlinear.observe.live import KEPT, Apart
from nearlinear.observe.page import Content, Split, Stage, Timeline
from nearlinear.observe.page.recorded import median_rate
from nearlinear.observe.page.recorded import report as content_of
from nearlinear.observe.record import Recorder, comparable, read_run
from nearlinear.planning.simulate import Span

pytestmark = pytest.mark.timeout(120)

DEADLINE_S = 60.0


@pytest.fixture(autouse=True)
def own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("PYTHONPATH", str(Path(nearlinear.errors.__file__).parents[1]))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("print('training')\n")


def planned() -> Content:
    points = (
        Point(1, "alone", 64, 0.5, 0.45, 0.55, compute=0.48, update=0.02),
        Point(2, "data", 64, 0.32, 0.29, 0.36, compute=0.24, exposed=0.06, update=0.02),
        Point(4, "pipeline, 4 stages", 64, 0.2, 0.19, 0.25, compute=0.12, bubble=0.08),
    )
    staged = Plan("pipeline", stages=4, microbatches=16)
    ways = (
        dataclasses.replace(points[0], plan=Plan()),
        dataclasses.replace(points[1], plan=Plan()),
        Point(2, "sharded", 64, 0.4, 0.39, 0.45, compute=0.3, exposed=0.1, plan=Plan("sharded")),
        dataclasses.replace(points[2], plan=staged),
        Point(4, "data", 64, 0.3, 0.29, 0.35, compute=0.12, exposed=0.18, plan=Plan()),
    )
    graph = Graph((Operator("a", forward=0.2), Operator("b", forward=0.2)))
    return Content(
        "train.py: plan",
        forecast=Forecast(points, 2, "the network", "train.py on 4 x cpu"),
        split=Split(graph, (0, 1)),
        stages=(Stage("a", 0.2, devices="0"), Stage("b", 0.2, devices="1")),
        timelines=(Timeline("predicted", 0.32, (Span(0, 0.0, 0.1, "F0", True),)),),
        reasons=("data takes 320 ms a step",),
        notes=("captured by torch.export",),
        ways=ways,
    )


def step(number: int, rate: float = 180.0, waiting: float = 0.25, **more: Any) -> dict[str, Any]:
    return {"kind": "step", "rank": 0, "step": number, "samples_per_s": rate, "waiting": waiting, **more}


def recorded(path: Path | None = None, steps: int = 30, plan: Content | None = None, processes: int = 2) -> Path:
    """Record a run that ends well, and return its record."""
    with Recorder(path, ["train.py", "--lr", "0.1"], processes, None, plan, pytest.fail) as record:
        record.event({"kind": "distributed", "rank": 0, "world_size": processes})
        record.notice("dropout draws other numbers")
        for number in range(1, steps + 1):
            record.event(step(number, 180.0 + number % 3))
        record.end(0, None)
    assert record.path is not None
    return record.path


def nearlinear_run(*args: str, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "nearlinear", "run", *args]
    return subprocess.run(
        command, env={**os.environ, **env}, capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )


def reported(run: str, out: Path | None = None) -> int:
    return report.report(argparse.Namespace(run=run, out=out))


TRAINS = """
import os
from nearlinear.events import send_to_launcher
rank = int(os.environ["RANK"])
send_to_launcher("distributed", rank=rank, world_size=2)
if rank == 0:
    import sys
    print("nearlinear: BatchNorm is over a share", file=sys.stderr, flush=True)
for step in range(1, 6):
    send_to_launcher("step", rank=rank, step=step, samples_per_s=100.0 + step, waiting=0.1)
"""


# ---- writing and reading


def test_a_run_is_read_as_it_was_recorded(tmp_path: Path) -> None:
    run = read_run(recorded(plan=planned()))
    assert (run.script, run.arguments) == (str(tmp_path / "train.py"), ("--lr", "0.1"))
    assert (run.processes, run.steps, run.exit_code, run.message) == (2, 30, 0, None)
    assert [each.step for each in run.reports] == list(range(1, 31))
    assert {each.samples_per_s for each in run.reports} == {180.0, 181.0, 182.0}
    assert {each.waiting for each in run.reports} == {0.25}
    assert [each.at for each in run.reports] == sorted(each.at for each in run.reports)
    assert run.notices == ("dropout draws other numbers",)
    assert run.plan == planned()
    assert run.same == kept.identity(["train.py", "--lr", "0.1"])
    assert run.versions.keys() >= {"python", "numpy"}
    assert len(run.hosts) == 1


def test_a_record_lies_in_the_state_folder_by_date_and_name_and_others_cannot_read_it(tmp_path: Path) -> None:
    path = recorded()
    assert path.parent == tmp_path / "state" / "nearlinear" / "runs"
    assert re.fullmatch(r"\d{8}-\d{6}-train-[0-9a-f]{6}\.jsonl", path.name)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert kept.last_run() == path


def test_the_last_fifty_are_kept() -> None:
    folder = kept.folder("runs")
    folder.mkdir(parents=True)
    old = [folder / f"20200101-{n:06}-old-abcdef.jsonl" for n in range(60)]
    for path in (*old, folder / "mine.jsonl"):
        path.write_text("{}\n")
    new = recorded()
    assert sorted(folder.iterdir()) == sorted([*old[-49:], folder / "mine.jsonl", new])


def test_of_a_long_run_ever_fewer_steps_are_written_and_the_last_is_among_them() -> None:
    with Recorder(None, ["train.py"], 2, None, None, pytest.fail) as record:
        for number in range(1, 100_001):
            record.event(step(number, float(number)))
        record.end(0, None)
    assert record.path is not None
    run = read_run(record.path)
    assert KEPT < len(run.reports) < 4 * KEPT
    assert run.reports[-1].step == run.steps == 100_000
    gaps = {b.step - a.step for a, b in zip(run.reports, run.reports[1:], strict=False)}
    assert gaps >= {1, 2, 4, 8}


def test_other_ranks_and_models_are_not_the_run(tmp_path: Path) -> None:
    with Recorder(tmp_path / "r.jsonl", ["train.py"], 2, None, None, pytest.fail) as record:
        record.event(step(1) | {"rank": 1})
        record.event(step(2) | {"model": 1})
        record.event({"kind": "probe"})
        record.end(0, None)
    assert read_run(tmp_path / "r.jsonl").reports == ()


def test_an_error_that_leaves_the_run_is_its_end(tmp_path: Path) -> None:
    with (
        pytest.raises(InputError),
        Recorder(tmp_path / "r.jsonl", ["train.py"], 2, None, None, pytest.fail) as record,
    ):
        record.notice("hello")
        raise InputError("train.py never called nl.distribute")
    run = read_run(tmp_path / "r.jsonl")
    assert (run.exit_code, run.message) == (2, "train.py never called nl.distribute")


def test_a_run_that_never_began_leaves_no_record(tmp_path: Path) -> None:
    with pytest.raises(InputError), Recorder(None, ["train.py"], 2, None, None, pytest.fail):
        raise InputError("port 80 is in use")
    assert kept.kept_runs() == []


def test_an_older_record_gives_way_and_another_file_does_not(tmp_path: Path) -> None:
    path, said = tmp_path / "r.jsonl", list[str]()
    recorded(path, steps=3)
    recorded(path, steps=5)
    assert read_run(path).steps == 5
    with Recorder(tmp_path / "train.py", ["train.py"], 2, None, None, said.append) as record:
        record.event(step(1))
        record.end(0, None)
    assert record.path is None
    assert len(said) == 1 and said[0].startswith("this run is not recorded: ") and "exists" in said[0]
    assert (tmp_path / "train.py").read_text() == "print('training')\n"


FULL = """
import resource, sys
from nearlinear.observe.record import Recorder
from pathlib import Path
resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))
with Recorder(Path("r.jsonl"), ["train.py"], 2, None, None, print) as record:
    for number in range(1, 200):
        record.event({"kind": "step", "step": number, "samples_per_s": 1.0, "waiting": 0.0})
    record.end(0, None)
"""


def test_a_disk_that_fills_up_is_said_once_and_leaves_what_was_written(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", FULL], capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("this run is recorded up to here, not on: ") == 1
    run = read_run(tmp_path / "r.jsonl")
    assert 5 < len(run.reports) < 40
    assert run.exit_code is None


# ---- damaged and foreign files


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (b"not json\n", "line 5 of this record is damaged"),
        (b'{"kind": "step", "at": 1.0}\n', "line 5 of this record is damaged: it has no 'step'"),
        (b'{"kind": "step", "at": "soon", "step": 1, "samples_per_s": 1, "waiting": 0}\n', "line 5 .*'soon'"),
        (b'{"kind": "spans", "at": 1, "seconds": 1, "spans": [[0, 1]]}\n', "line 5 .*not enough values"),
        (b'{"kind": "apart", "at": 1, "round": -1, "members": 2, "sent": 0, "received": 0}\n', "line 5 .*damaged"),
        (b"[]\n", "line 5 of this record is damaged"),
        (b"\xff\xfe\n", "line 5 of this record is damaged"),
    ],
)
def test_a_damaged_line_is_named(tmp_path: Path, line: bytes, why: str) -> None:
    lines = recorded().read_bytes().splitlines(keepends=True)
    path = tmp_path / "damaged.jsonl"
    path.write_bytes(b"".join([*lines[:4], line, *lines[5:]]))
    with pytest.raises(InputError, match=why) as caught:
        reported(str(path))
    assert caught.value.exit_code == 2
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("written", "why"),
    [
        (b"", "is not the record of a run"),
        (b"print('training')\n", "is not the record of a run"),
        (b'{"format": "other/1"}\n', "is not the record of a run"),
        (b'{"format": ["nearlinear-run/1"]}\n', "is not the record of a run"),
        (b"[1]\n", "is not the record of a run"),
        (b"\x00\xff" * 1000, "is not the record of a run"),
        (b"[" * 200_000 + b"\n", "is not the record of a run"),
        (b'{"format": "nearlinear-run/2"}\n', "in the format 'nearlinear-run/2', this version reads"),
        (b'{"format": "nearlinear-run/1"}\n', "line 1 of this record is damaged: it has no 'script'"),
    ],
)
def test_a_file_that_is_no_record_is_refused(tmp_path: Path, written: bytes, why: str) -> None:
    path = tmp_path / "foreign.jsonl"
    path.write_bytes(written)
    with pytest.raises(InputError, match=why):
        reported(str(path))


def test_a_record_that_is_not_there_is_an_error_that_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"cannot read the record .*: No such file"):
        reported(str(tmp_path / "nowhere.jsonl"))
    with pytest.raises(InputError, match=r"no run is recorded in .*; make one with `nearlinear run -n 2 train.py`"):
        reported("last")
    with pytest.raises(InputError, match=r"cannot read the record .*: Is a directory"):
        reported(str(tmp_path))


def test_a_last_line_that_is_cut_in_two_is_left_out(tmp_path: Path) -> None:
    whole = recorded().read_bytes()
    path = tmp_path / "cut.jsonl"
    path.write_bytes(whole[: whole.rindex(b'{"kind": "step"') + 30])
    run = read_run(path)
    assert len(run.reports) == 29
    assert run.exit_code is None
    assert any("killed, or it goes on" in note for note in content_of(run).notes)


# ---- `nearlinear run`


def test_a_run_leaves_a_record_and_hints_at_its_report(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAINS)
    done = nearlinear_run("-n", "2", "train.py", "--lr", "0.1")
    assert done.returncode == 0, done.stderr
    path = kept.last_run()
    assert done.stderr.splitlines()[-1] == f"nearlinear: hint: nearlinear report {path}"
    run = read_run(path)
    assert (run.processes, run.steps, run.exit_code) == (2, 5, 0)
    assert run.arguments == ("--lr", "0.1")
    assert run.notices == ("BatchNorm is over a share",)
    assert median_rate(run) == 103.0


def test_a_forecast_is_said_before_the_run_and_held_against_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "train.py").write_text(TRAINS)
    kept.keep_plan(["train.py"], planned(), pytest.fail)
    done = nearlinear_run("-n", "2", "train.py")
    lines = done.stderr.splitlines()
    assert lines[0] == "nearlinear: forecast: data, 200 samples/s (177.8 to 220.7), 19 % of the time communicating"
    assert "nearlinear: predicted 200 samples/s, measured 103 (48 % slower)" in lines
    assert reported("last") == 0
    said = capsys.readouterr()
    assert "samples/s: predicted 200 (178 to 221), measured 103, 48 % slower, outside the band" in said.err
    html = Path(said.out.strip()).read_text()
    for heading in ("Forecast against measurement", "Scaling", "The graph by stage", "Timeline of a step"):
        assert f"<h2>{heading}</h2>" in html


def test_a_changed_script_or_other_arguments_have_no_forecast(tmp_path: Path) -> None:
    kept.keep_plan(["train.py", "--lr", "0.1"], planned(), pytest.fail)
    assert kept.planned(["train.py", "--lr", "0.1"]) == planned()
    assert kept.planned(["train.py"]) is None
    (tmp_path / "train.py").write_text("print('changed')\n")
    assert kept.planned(["train.py", "--lr", "0.1"]) is None
    assert kept.planned(["gone.py"]) is None


def test_a_run_is_held_against_a_forecast_of_what_it_does_alone() -> None:
    plan = planned()
    found = {
        (processes, strategy): None if (point := comparable(plan, processes, strategy)) is None else point.way
        for processes in (1, 2, 4, 8)
        for strategy in (None, "data", "sharded", "pipeline")
    }
    assert found == {
        **dict.fromkeys([(1, None), (1, "data"), (1, "sharded"), (1, "pipeline")], "alone"),
        **{(2, None): "data", (2, "data"): "data", (2, "sharded"): "sharded", (2, "pipeline"): None},
        **{(4, None): "pipeline, 4 stages", (4, "data"): "data", (4, "sharded"): None},
        (4, "pipeline"): "pipeline, 4 stages",
        **dict.fromkeys([(8, None), (8, "data"), (8, "sharded"), (8, "pipeline")]),
    }
    assert comparable(None, 2, None) is None


ASKS = """
import os
from nearlinear.events import send_to_launcher
from nearlinear.runtime.environment import plan_asked_for
plan = plan_asked_for(os.environ.get("SCRIPT", "auto"))
send_to_launcher("distributed", strategy="data" if plan is None else plan.strategy, rank=0, world_size=4)
if os.environ["RANK"] == "0":
    print(plan, flush=True)
if "FAIL" in os.environ:
    raise SystemExit(3)
"""


def test_auto_is_what_was_planned_for_the_script(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(ASKS)
    nothing = nearlinear_run("-n", "4", "train.py")
    assert nothing.stdout == "[0] None\n"
    kept.keep_plan(["train.py"], planned(), pytest.fail)
    planned_for = nearlinear_run("-n", "4", "train.py")
    assert planned_for.stdout == "[0] pipeline, 4 stages, 16 microbatches, replicas compared every 100 steps\n"
    assert "nearlinear: forecast: pipeline, 4 stages, 320 samples/s" in planned_for.stderr
    assert read_run(kept.last_run()).strategy == "pipeline"
    assert nearlinear_run("-n", "3", "train.py").stdout == "[0] None\n"  # nothing was planned for three
    for asked in (("--strategy", "data"), ()):  # whoever asks for something gets it
        run = nearlinear_run("-n", "4", *asked, "train.py", SCRIPT="auto" if asked else "data")
        assert run.stdout.startswith("[0] data parallel")
        assert "nearlinear: forecast: data, 213.3 samples/s" in run.stderr
    counted = nearlinear_run("-n", "4", "--stages", "2", "train.py")
    assert counted.stdout.startswith("[0] pipeline, 2 stages, four microbatches per stage")
    failed = nearlinear_run("-n", "4", "train.py", FAIL="1")
    assert failed.stderr.splitlines()[-1] == (
        "nearlinear: hint: it trained by pipeline, 4 stages, as planned; --strategy data has the whole model "
        "on every rank"
    )


@pytest.mark.parametrize(
    ("option", "left"),
    [(("--record", "none"), set[str]()), (("--record", "mine.jsonl"), {"mine.jsonl"})],
    ids=["none", "a file"],
)
def test_the_record_goes_where_it_is_told(tmp_path: Path, option: Sequence[str], left: set[str]) -> None:
    (tmp_path / "train.py").write_text(TRAINS)
    done = nearlinear_run("-n", "2", *option, "train.py")
    assert done.returncode == 0, done.stderr
    assert {path.name for path in tmp_path.iterdir()} - {"train.py"} == left
    assert ("hint: nearlinear report mine.jsonl" in done.stderr) is bool(left)


def test_one_process_is_recorded_where_that_is_asked_for(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAINS)
    done = nearlinear_run("--record", "one.jsonl", "train.py")
    assert done.returncode == 0, done.stderr
    run = read_run(tmp_path / "one.jsonl")
    assert (run.processes, run.steps) == (1, 5)


def test_a_folder_that_cannot_be_made_is_said_in_a_line_and_the_run_goes_on(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAINS)
    (tmp_path / "state").write_text("not a folder")
    done = nearlinear_run("-n", "2", "train.py")
    assert done.returncode == 0
    said = [line for line in done.stderr.splitlines() if "not recorded" in line]
    assert len(said) == 1 and said[0].startswith("nearlinear: this run is not recorded: ")
    assert "5 steps in" in done.stderr
    assert "hint" not in done.stderr


def test_a_failing_run_is_recorded_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        TRAINS + "\nif rank == 1:\n    sys.exit(7)\n".replace("sys.", "__import__('sys').")
    )
    done = nearlinear_run("-n", "2", "train.py")
    assert done.returncode == 7
    run = read_run(kept.last_run())
    assert run.exit_code == 7
    assert run.message is not None and run.message.startswith("rank 1 exited with code 7")
    assert run.message in content_of(run).notes


WAITS = TRAINS + "open('fifo', 'w').write('x')\nimport signal\nsignal.pause()\n"


def test_a_killed_run_leaves_a_record_of_all_until_then(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(WAITS.replace("open('fifo'", "if rank == 0: open('fifo'"))
    os.mkfifo("fifo")
    command = [sys.executable, "-m", "nearlinear", "run", "-n", "2", "--record", "r.jsonl", "train.py"]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        with open("fifo") as fifo:  # noqa: PTH123
            assert fifo.read(1) == "x"
        _until_said("r.jsonl", b'"step": 5')
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    run = read_run(tmp_path / "r.jsonl")
    assert (run.steps, run.exit_code) == (5, None)
    assert reported("r.jsonl", tmp_path / "out.html") == 0
    assert "killed, or it goes on" in (tmp_path / "out.html").read_text()


def _until_said(path: str, wanted: bytes) -> None:
    """Wait until a file that another process writes holds something."""
    process = subprocess.Popen(["tail", "-c", "+1", "-f", path], stdout=subprocess.PIPE)
    assert process.stdout is not None
    held = b""
    try:
        while wanted not in held:
            assert select.select([process.stdout], [], [], DEADLINE_S)[0], held
            held += os.read(process.stdout.fileno(), 1 << 16)
    finally:
        process.kill()
        process.wait()


# ---- the report


def test_a_report_holds_the_forecast_against_the_run() -> None:
    content = content_of(read_run(recorded(plan=planned())))
    assert content.title == "train.py on 2 processes"
    assert content.expected is not None and content.expected.devices == 2
    rows = {each.what: each for each in content.compared}
    assert rows["samples/s"].predicted == "200 (178 to 221)"
    assert rows["samples/s"].measured == "181"
    assert rows["samples/s"].remark == "9 % slower, within the band"
    assert (rows["communicating"].predicted, rows["communicating"].measured) == ("19 %", "25 %")
    assert rows["communicating"].remark == "6 points more"
    assert [bar.name for bar in content.spent] == ["predicted", "measured"]
    assert content.measured[0].devices == 2
    assert content.reasons == planned().reasons
    assert content.split == planned().split


def test_a_member_far_from_others_is_reported_among_them(tmp_path: Path) -> None:
    path = tmp_path / "apart.jsonl"
    with Recorder(path, ["train.py"], 1, "local", None, pytest.fail) as record:
        for round_ in range(1, 4):
            there = {"round": round_, "members": 2, "sent": 1e6 * round_, "received": 2e6, "alone_samples_per_s": 50.0}
            record.event({"kind": "apart", **there, "together_samples_per_s": 90.0})
            record.event(step(round_, waiting=0.1))
        record.notice("the update of member 1 in round 2 is not admitted: 3 values are not finite")
        record.end(0, None)
    run = read_run(path)
    assert run.apart == Apart(3, 2, 3_000_000, 2_000_000, 50.0, 90.0)
    page = content_of(run)
    shown = {figure.label: (figure.value, figure.remark) for figure in page.figures}
    assert shown["rounds"] == ("3", "2 members at the end")
    assert shown["sent"] == ("3 MB", "received 2 MB")
    assert shown["over this machine alone"] == ("1.8 x", "50 samples/s alone")
    assert "waiting for other members" in shown and "communicating" not in shown
    assert any("is not admitted" in note for note in page.notes)


def test_a_report_without_a_plan_shows_what_was_measured() -> None:
    content = content_of(read_run(recorded()))
    assert (content.compared, content.expected, content.forecast, content.split) == ((), None, None, None)
    assert len(content.pace) == 30
    assert [bar.name for bar in content.spent] == ["measured"]


def test_the_speed_of_other_runs_of_the_script_is_drawn_beside_the_forecast(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recorded(processes=4, plan=planned())
    (tmp_path / "other.py").write_text("print('other')")
    with Recorder(None, ["other.py"], 3, None, None, pytest.fail) as record:
        record.event(step(1))
        record.end(0, None)
    run = recorded(processes=2, plan=planned())
    assert reported(str(run)) == 0
    html = Path(capsys.readouterr().out.strip()).read_text()
    assert html.count("devices, measured") == 4  # two points, in each of two widths
    assert "4 devices, measured" in html and "3 devices, measured" not in html


def test_what_devices_did_is_drawn_beside_the_forecast_of_it(tmp_path: Path) -> None:
    with Recorder(tmp_path / "r.jsonl", ["train.py"], 2, None, planned(), pytest.fail) as record:
        for device in range(2):
            spans = [
                [device, 0.0, 0.11, "F0", True],
                [device, 0.11, 0.3, "B0", True],
                [device, 0.3, 0.33, "send B0", False],
            ]
            record.event({"kind": "spans", "rank": device, "seconds": 0.33, "spans": spans})
        record.end(0, None)
    content = content_of(read_run(tmp_path / "r.jsonl"))
    assert [each.name for each in content.timelines] == ["predicted", "measured"]
    assert {span.device for span in content.timelines[1].spans} == {0, 1}
    assert [stage.measured for stage in content.stages] == pytest.approx([0.3, 0.3])


def test_the_page_goes_beside_the_reader_or_where_it_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = recorded()
    assert reported("last") == 0
    assert capsys.readouterr().out == f"{path.stem}.html\n"
    assert (tmp_path / f"{path.stem}.html").exists()
    assert reported(str(path), tmp_path / "out.html") == 0
    assert capsys.readouterr().out == f"{tmp_path / 'out.html'}\n"
    with pytest.raises(InputError, match="is the record itself"):
        reported(str(path), path)
    with pytest.raises(InputError, match=r"cannot write the page .*: No such file"):
        reported(str(path), tmp_path / "no" / "out.html")
    assert read_run(path).steps == 30


def test_a_record_with_hostile_names_gives_a_page_without_markup_of_theirs(tmp_path: Path) -> None:
    attack = "<script>hacked=1</script>"
    path = recorded()
    lines = path.read_text().splitlines()
    first = json.loads(lines[0]) | {"arguments": [attack], "hosts": [attack], "versions": {attack: attack}}
    notice = json.dumps({"kind": "notice", "at": 1.0, "message": attack})
    (tmp_path / "hostile.jsonl").write_text("\n".join([json.dumps(first), notice, *lines[1:]]) + "\n")
    assert reported("hostile.jsonl") == 0
    html = (tmp_path / "hostile.html").read_text()
    assert html.count("<script>") == 1
    assert html.count("&lt;script&gt;hacked=1&lt;/script&gt;") >= 4


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium on the path (apt-get install chromium)")
def test_a_report_opens_in_a_browser_without_complaint(tmp_path: Path) -> None:
    recorded(plan=planned(), steps=500)
    assert reported("last", tmp_path / "out.html") == 0
    with browser(tmp_path / "profile") as page:
        page.open(tmp_path / "out.html")
        assert page.complaints() == []
        assert page.value("document.querySelectorAll('h2').length") == 8
        page.move_to("#pace-w-t, .wide .tip")
        assert "samples/s" in page.value("document.getElementById('tip').textContent")


@pytest.mark.parametrize("written", [b"\x85\xff" * 100, b"[" * 200_000, b""])
def test_a_kept_plan_that_is_damaged_is_none(written: bytes, tmp_path: Path) -> None:
    script = [str(tmp_path / "train.py")]
    kept.keep_plan(script, planned(), pytest.fail)
    (path,) = kept.folder("plans").glob("*.json")
    path.write_bytes(written)
    assert kept.planned(script) is None


def test_a_page_that_cannot_be_written_leaves_the_earlier_one(tmp_path: Path) -> None:
    path = recorded(tmp_path / "run.jsonl")
    (tmp_path / "old.html").write_text("OLD")
    limited = f"ulimit -f 4; exec {sys.executable} -m nearlinear report {path} --out {tmp_path}/old.html"
    done = subprocess.run(["bash", "-c", limited], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2 and "cannot write" in done.stderr
    assert (tmp_path / "old.html").read_text() == "OLD"
