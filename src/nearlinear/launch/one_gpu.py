"""Becoming a script that sees one GPU: what the elastic agent starts in place of the script itself.

The agent shows every process all GPUs of the machine, so that the script's ``"cuda"`` would be the first for each.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

from nearlinear.launch.environment import visible_gpus


def own_gpu(env: Mapping[str, str]) -> dict[str, str]:
    """Return the variable that leaves a process the GPU of its ``LOCAL_RANK``, or nothing where there are none.

    Example:
        >>> own_gpu({"LOCAL_RANK": "1", "CUDA_VISIBLE_DEVICES": "4,5"})
        {'CUDA_VISIBLE_DEVICES': '5'}
    """
    gpus = visible_gpus(env)
    return {"CUDA_VISIBLE_DEVICES": gpus[int(env["LOCAL_RANK"])]} if gpus else {}


if __name__ == "__main__":
    os.execve(sys.executable, [sys.executable, *sys.argv[1:]], {**os.environ, **own_gpu(os.environ)})
