"""`nearlinear plan --graph`: what it prints, and how it says no."""

from __future__ import annotations

import argparse
import json
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from nearlinear.cli.plan_graph import add_graph_options, plan_graph, watch
from nearlinear.errors import InputError
from nearlinear.planning.partition import InfeasibleError


def chain(path: Path, **changes: Any) -> Path:
    """A file with four layers of 1 ms and 100 bytes in a row, their nodes listed from the last to the first."""
    nodes = [{"id": n, "name": "layer", "fwd_ms": 1.0, "bwd_ms": 2.0, "mem_bytes": 100} for n in range(4)]
    edges = [{"src": n + 1, "dst": n, "bytes": 1000} for n in range(3)]
    raw = {"format": "nearlinear-workload/1", "name": "chain", "mode": "inference", "nodes": nodes, "edges": edges}
    path.write_text(json.dumps({**raw, **changes}))
    return path


def run(*arguments: str | Path) -> int:
    parser = argparse.ArgumentParser()
    add_graph_options(parser)
    return plan_graph(parser.parse_args([str(each) for each in arguments]))


def test_json_gives_the_device_of_every_node_in_the_files_order(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = chain(tmp_path / "chain.json")
    assert run("--graph", file, "--devices", "2", "--bandwidth", "1e9", "--json") == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["assignment"] == [1, 1, 0, 0]
    assert printed["objective_ms"] == pytest.approx(2 + 1000 / 1e9 * 1e3)
    assert printed["bound_ms"] == pytest.approx(printed["objective_ms"])
    assert printed["seconds"] > 0


def test_training_counts_the_backward_pass_and_the_gradients_that_come_back(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = chain(tmp_path / "chain.json", mode="training")
    assert run("--graph", file, "--devices", "2", "--bandwidth", "8 kbit/s", "--json") == 0
    assert json.loads(capsys.readouterr().out)["objective_ms"] == 12.0  # one device: the link would take 2 s
    assert run("--graph", file, "--devices", "2", "--bandwidth", "8 Gbit/s", "--json") == 0
    assert json.loads(capsys.readouterr().out)["objective_ms"] == pytest.approx(6 + 2 * 1000 / 1e9 * 1e3)


def test_the_table_names_the_stages_and_the_proof(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = chain(tmp_path / "chain.json")
    assert run("--graph", file, "--devices", "2", "--bandwidth", "8 Gbit/s") == 0
    printed = capsys.readouterr().out
    for words in (
        "chain: 4 operators on 2 devices",
        "1 KB",
        "200 B",
        "the least there is",
        "one device would take 4 ms",
    ):
        assert words in printed


def test_what_does_not_fit_names_the_least_memory_that_would_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = chain(tmp_path / "chain.json")
    arguments = ("--graph", file, "--devices", "2", "--bandwidth", "1e9", "--memory", "150 B")
    with pytest.raises(InfeasibleError, match=r"at least 200 B \(200 bytes\) each") as caught:
        run(*arguments)
    assert caught.value.exit_code == 3
    assert run(*arguments, "--json") == 3
    printed = json.loads(capsys.readouterr().out)
    assert printed["infeasible"] is True and printed["least_memory_bytes"] == 200


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--devices", "0", "--bandwidth", "1e9"), "must be at least 1"),
        (("--devices", "2"), "how fast a link"),
        (("--devices", "2", "--bandwidth", "fast"), "'fast' is not a bandwidth"),
        (("--devices", "2", "--bandwidth", "-1"), "must be above 0"),
        (("--devices", "2", "--bandwidth", "1e9", "--memory", "0"), "must be above 0"),
    ],
)
def test_a_number_out_of_its_range_is_refused(tmp_path: Path, arguments: tuple[str, ...], words: str) -> None:
    with pytest.raises(InputError, match=words) as caught:
        run("--graph", chain(tmp_path / "chain.json"), *arguments)
    assert caught.value.exit_code == 2 and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "not a graph"),
        ("[]", "its format is not"),
        ('{"format": "nearlinear-workload/1"}', "has no 'mode'"),
        ('{"format": "nearlinear-workload/1", "mode": "training", "nodes": 3, "edges": []}', "not a graph"),
        ('{"format": "nearlinear-workload/1", "mode": "training", "nodes": [], "edges": []}', "no operators"),
    ],
)
def test_a_file_that_is_no_graph_is_refused(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "bad.json"
    file.write_text(text)
    with pytest.raises(InputError, match=words):
        run("--graph", file, "--devices", "2", "--bandwidth", "1e9")


def test_ctrl_c_ends_the_search_with_its_best_plan_and_a_second_one_leaves_at_once() -> None:
    before = signal.getsignal(signal.SIGINT)
    with watch(time.monotonic(), 60.0) as (stop, _):
        assert not stop()
        signal.raise_signal(signal.SIGINT)
        assert stop()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


def test_a_search_ends_when_its_budget_is_spent() -> None:
    with watch(time.monotonic() - 61.0, 60.0) as (stop, _):
        assert stop()


def test_an_edge_to_nowhere_a_circle_and_a_missing_file_are_refused(tmp_path: Path) -> None:
    numbers = ("--devices", "2", "--bandwidth", "1e9")
    nowhere = chain(tmp_path / "nowhere.json", edges=[{"src": 0, "dst": 9, "bytes": 1}])
    with pytest.raises(InputError, match="the nodes are 0 to 3"):
        run("--graph", nowhere, *numbers)
    circle = chain(tmp_path / "circle.json", edges=[{"src": 0, "dst": 1, "bytes": 1}, {"src": 1, "dst": 0, "bytes": 1}])
    with pytest.raises(InputError, match="waits for its own output"):
        run("--graph", circle, *numbers)
    with pytest.raises(InputError, match="cannot read the graph"):
        run("--graph", tmp_path / "missing.json", *numbers)


@pytest.mark.parametrize("text", ["[" * 200_000, '{"format": "nearlinear-workload/1", "nodes": ' + "[" * 200_000])
def test_a_file_nested_too_deeply_is_no_graph(text: str, tmp_path: Path) -> None:
    (tmp_path / "deep.json").write_text(text)
    with pytest.raises(InputError, match=r"deep\.json"):
        run("--graph", tmp_path / "deep.json", "--devices", "2", "--bandwidth", "1e9")


@pytest.mark.parametrize("cost", ["fwd_ms", "mem_bytes", "param_bytes"])
def test_a_cost_beyond_all_numbers_is_refused(cost: str, tmp_path: Path) -> None:
    nodes = [{"id": 0, "name": "layer", "fwd_ms": 1.0, "bwd_ms": 2.0, "mem_bytes": 100, cost: 10**400}]
    with pytest.raises(InputError, match="huge"):
        run("--graph", chain(tmp_path / "huge.json", nodes=nodes, edges=[]), "--devices", "2", "--bandwidth", "1e9")


def test_names_are_shown_as_they_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--graph", chain(tmp_path / "c.json", name="a[/]b"), "--devices", "2", "--bandwidth", "1e9") == 0
    assert "a[/]b" in capsys.readouterr().out


def test_more_devices_than_operators_stand_idle(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = chain(tmp_path / "chain.json")
    assert run("--graph", file, "--devices", str(10**30), "--bandwidth", "1e12", "--json") == 0
    assert sorted(json.loads(capsys.readouterr().out)["assignment"]) == [0, 1, 2, 3]
