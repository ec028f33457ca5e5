"""Bad input gets one line that says what to do."""

from __future__ import annotations

import pytest

from conftest import TESTS, run

NAMES = [
    line.split("def ")[1].split("(")[0]
    for previous, line in zip(
        (TESTS / "refusals/cases.py").read_text().splitlines(),
        (TESTS / "refusals/cases.py").read_text().splitlines()[1:],
        strict=False,
    )
    if previous.startswith("@refusal(")
]


@pytest.fixture(scope="module")
def verdicts() -> list[str]:
    result = run(2, TESTS / "refusals/driver.py")
    return [line.partition("] ")[2] for line in result.stdout.splitlines()] or [result.stderr]


@pytest.mark.parametrize("name", NAMES)
def test_what_cannot_be_distributed_is_refused_on_every_rank(name: str, verdicts: list[str]) -> None:
    said = [line for line in verdicts if line.startswith(f"{name}: ")]
    assert said == [f"{name}: refused"] * 2, said or verdicts[-20:]
