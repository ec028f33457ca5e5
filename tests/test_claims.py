"""What holds on two processes beyond the numbers."""

from __future__ import annotations

import pytest

from conftest import TESTS, names_in, run


@pytest.fixture(scope="module")
def said() -> str:
    result = run(2, TESTS / "claims/driver.py")
    return result.stdout + result.stderr


@pytest.mark.parametrize("name", names_in("claims/cases.py", "claim"))
def test_on_two_processes(name: str, said: str) -> None:
    for rank in range(2):
        assert f"[{rank}] {name}: held" in said, said[-5000:]
