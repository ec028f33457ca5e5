"""Bad input to Keras's front end gets one line that says what to do, the same on all ranks, and the run can go on."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from conftest import TESTS, run

pytest.importorskip("keras")
_SOURCE = (TESTS / "keras_refusals/cases.py").read_text()
WORDS = dict(
    zip(
        re.findall(r"^@refused.*\ndef (\w+)", _SOURCE, re.MULTILINE),
        re.findall(r'^@refused\(r?"(.*)"\)$', _SOURCE, re.MULTILINE),
        strict=True,
    )
)


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("refused")
    ran = run(2, TESTS / "keras_refusals/driver.py", str(folder))
    assert ran.returncode == 0, (ran.stdout + ran.stderr)[-4000:]
    return folder


@pytest.mark.parametrize("name", WORDS)
def test_it_is_refused_in_one_line_on_all_ranks(name: str, said: Path) -> None:
    for rank in range(2):
        message = json.loads((said / f"{name}.{rank}.json").read_text())
        assert re.search(WORDS[name], message), message
        assert "\n" not in message


def test_the_run_trains_after_all_that(said: Path) -> None:
    losses = [json.loads((said / f"loss.{rank}.json").read_text()) for rank in range(2)]
    assert losses[0] == losses[1]
    assert len(losses[0]) == 1
