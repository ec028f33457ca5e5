"""What all tests share: starting a script on N processes, as a user does."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

TESTS = Path(__file__).parent

# Runs leave records and probes leave cluster files; not among the user's own.
for _folder in ("XDG_STATE_HOME", "XDG_CACHE_HOME"):
    os.environ[_folder] = tempfile.mkdtemp(prefix="nearlinear-tests-")


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


def names_in(source: str, kind: str) -> Sequence[str]:
    """Return the functions that carry the decorator ``@kind``, without importing what they need."""
    lines = (TESTS / source).read_text().splitlines()
    return [
        following.split("def ")[1].split("(")[0] for line, following in itertools.pairwise(lines) if line == f"@{kind}"
    ]
