"""Bad input gets one line that says what to do."""

from __future__ import annotations

import itertools

import pytest

from conftest import TESTS, run


def names(file: str) -> list[str]:
    lines = (TESTS / "refusals" / file).read_text().splitlines()
    return [
        line.split("def ")[1].split("(")[0]
        for previous, line in itertools.pairwise(lines)
        if previous.startswith("@refusal(")
    ]


@pytest.fixture(scope="module")
def verdicts() -> list[str]:
    result = run(2, TESTS / "refusals/driver.py")
    return [line.partition("] ")[2] for line in result.stdout.splitlines()] or [result.stderr]


@pytest.mark.parametrize("name", names("cases.py"))
def test_what_cannot_be_distributed_is_refused_on_every_rank(name: str, verdicts: list[str]) -> None:
    said = [line for line in verdicts if line.startswith(f"{name}: ")]
    assert said == [f"{name}: refused"] * 2, said or verdicts[-20:]


@pytest.fixture(scope="module")
def verdicts_of_pipelines() -> list[str]:
    result = run(2, TESTS / "refusals/driver.py", "pipeline_cases", "pipeline")
    return [line.partition("] ")[2] for line in result.stdout.splitlines()] or [result.stderr]


@pytest.mark.parametrize("name", names("pipeline_cases.py"))
def test_what_cannot_run_in_stages_is_refused_on_every_rank(name: str, verdicts_of_pipelines: list[str]) -> None:
    said = [line for line in verdicts_of_pipelines if line.startswith(f"{name}: ")]
    assert said == [f"{name}: refused"] * 2, said or verdicts_of_pipelines[-20:]
