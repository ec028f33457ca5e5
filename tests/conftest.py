"""What all tests share: starting a script on N processes, as a user does."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pytest

TESTS = Path(__file__).parent

# Runs leave records and probes leave cluster files; not among the user's own.
for _folder in ("XDG_STATE_HOME", "XDG_CACHE_HOME"):
    os.environ[_folder] = tempfile.mkdtemp(prefix="nearlinear-tests-")

# Half of the time of a small run is the import of a compiler that it never uses; `make test-full` runs torch as it is.
if "UNALTERED_TORCH" not in os.environ:
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(TESTS / "startup"), os.environ.get("PYTHONPATH")]))


def run(n: int, script: Path, *arguments: str, timeout_s: float = 280, **env: str) -> subprocess.CompletedProcess[str]:
    """Run ``nearlinear run -n N script`` with one thread per process, so that sums come out alike."""
    command = [sys.executable, "-m", "nearlinear", "run", "-n", str(n), str(script), *arguments]
    return subprocess.run(
        command,
        env={**os.environ, "OMP_NUM_THREADS": "1", "NEARLINEAR_DEADLINE": "60 s", **env},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


@pytest.fixture(scope="session")
def probed(tmp_path_factory: pytest.TempPathFactory) -> tuple[subprocess.CompletedProcess[str], Path]:
    """Measure this machine once; return what that wrote, and the folder in which it is kept."""
    folder = tmp_path_factory.mktemp("probed")
    done = subprocess.run(
        [sys.executable, "-m", "nearlinear", "probe", "-n", "2", "--json"],
        env={**os.environ, "OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(folder)},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done, folder


def names_in(source: str, kind: str) -> Sequence[str]:
    """Return the functions that carry the decorator ``@kind``, without importing what they need."""
    lines = (TESTS / source).read_text().splitlines()
    return [
        following.split("def ")[1].split("(")[0] for line, following in itertools.pairwise(lines) if line == f"@{kind}"
    ]
