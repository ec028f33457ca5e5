"""Every example and every block of the README runs."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from nearlinear.cli.main import _parser

from conftest import TESTS, run

ROOT = TESTS.parent
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```", README, flags=re.M | re.S)


def of_kind(kind: str) -> list[str]:
    return [text for each, text in BLOCKS if each == kind]


def bin_path() -> dict[str, str]:
    return {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}


COMMANDS = [line for text in of_kind("sh") for line in text.splitlines() if line]


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_of_the_readme_is_understood(command: str) -> None:
    program, *words = shlex.split(command)
    assert program == "nearlinear"
    options = _parser(words).parse_args(words)
    assert not hasattr(options, "script") or (ROOT / options.script[0]).exists()


# The default run takes the longest of them. What the others do, test_check.py and test_plan_script.py run too.
@pytest.mark.parametrize(
    "command", [each if "pipeline" in each else pytest.param(each, marks=pytest.mark.full) for each in COMMANDS]
)
def test_a_command_of_the_readme_succeeds(command: str) -> None:
    result = subprocess.run(
        shlex.split(command), cwd=ROOT, env=bin_path(), capture_output=True, text=True, timeout=280, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("text", of_kind("python"))
def test_the_script_of_the_readme_prints_the_same_on_one_and_two_processes(text: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(text.replace('"checkpoint"', repr(str(tmp_path / "checkpoint"))))
    printed = []
    for n in (1, 2):
        result = run(n, script)
        assert result.returncode == 0, result.stderr
        printed.append(re.sub(r"^\[0\] ", "", result.stdout, flags=re.M))
    assert printed[0] == printed[1] and "epoch 1  loss" in printed[0]


@pytest.mark.parametrize(("number", "script"), [(0, "the README's"), (1, "digits_keras.py")])
def test_the_two_lines_of_a_diff_are_those_of_a_script_that_runs(number: int, script: str) -> None:
    added = [line[1:] for line in of_kind("diff")[number].splitlines() if line.startswith("+") and line != "+"]
    text = of_kind("python")[0] if number == 0 else (ROOT / "examples" / script).read_text()
    lines = [line.split("  # (")[0].strip() for line in text.splitlines()]
    assert all(line in lines for line in added)
    assert len(added) == 2


# test_demo.py holds both to the same on one and two processes.
@pytest.mark.full
@pytest.mark.parametrize("script", ["digits.py", "gpt.py", "digits_keras.py"])
def test_an_example_prints_the_same_on_one_two_and_three_processes(script: str) -> None:
    arguments = {"gpt.py": ["--steps", "6"]}.get(script, ["--epochs", "1"])
    printed = []
    for n in (1, 2, 3):
        result = run(n, ROOT / "examples" / script, *arguments)
        assert result.returncode == 0, result.stderr
        printed.append(re.sub(r"^\[0\] |\d+ windows/s$", "", result.stdout, flags=re.M))
    assert printed[0] and printed[0] == printed[1] == printed[2]
