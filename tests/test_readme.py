"""Every example and every block of the README runs."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import TESTS, run

ROOT = TESTS.parent
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```", README, flags=re.M | re.S)


def of_kind(kind: str) -> list[str]:
    return [text for each, text in BLOCKS if each == kind]


def bin_path() -> dict[str, str]:
    return {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}


@pytest.mark.parametrize("command", [line for text in of_kind("sh") for line in text.splitlines() if line])
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


def test_the_two_lines_of_the_diff_are_those_of_the_script() -> None:
    (diff,) = of_kind("diff")
    added = [line[1:] for line in diff.splitlines() if line.startswith("+") and line != "+"]
    assert all(line in of_kind("python")[0].splitlines() for line in added)
    assert len(added) == 2


# test_demo.py holds digits.py to the same on one and three processes.
@pytest.mark.parametrize("script", [pytest.param("digits.py", marks=pytest.mark.full), "gpt.py"])
def test_an_example_prints_the_same_on_one_two_and_three_processes(script: str) -> None:
    arguments = {"digits.py": ["--epochs", "1"], "gpt.py": ["--steps", "6"]}[script]
    printed = []
    for n in (1, 2, 3):
        result = run(n, ROOT / "examples" / script, *arguments)
        assert result.returncode == 0, result.stderr
        printed.append(re.sub(r"^\[0\] |\d+ windows/s$", "", result.stdout, flags=re.M))
    assert printed[0] and printed[0] == printed[1] == printed[2]
