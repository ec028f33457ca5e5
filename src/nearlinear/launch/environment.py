"""Turning a machine's cores, GPUs and ports into what each rank finds in its environment."""

from __future__ import annotations

import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence

from nearlinear.errors import InputError

NVIDIA_SMI_S = 30.0  # a sleeping driver takes seconds to wake; a broken one never answers


def rank_environment(
    rank: int, n: int, port: int, gpus: Sequence[str], cores: int, inherited: Mapping[str, str]
) -> dict[str, str]:
    """Return the variables that make a process rank ``rank`` of ``n`` on this machine.

    Args:
        rank: Its number.
        n: Number of processes.
        port: Where rank 0 opens the rendezvous.
        gpus: Names of the GPUs as ``CUDA_VISIBLE_DEVICES`` takes them; rank r sees the r-th alone, as its "cuda".
        cores: Cores that all ranks share.
        inherited: The environment they are added to. A number of threads set there is the user's and stays.

    Example:
        >>> rank_environment(1, 2, 29500, ["0", "1"], 8, {"OMP_NUM_THREADS": "1"})["CUDA_VISIBLE_DEVICES"]
        '1'
    """
    added = {
        "RANK": str(rank),
        "WORLD_SIZE": str(n),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(n),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "PYTHONUNBUFFERED": "1",
        # Sets of strings come in the same order on all ranks: a data set listed from one is then the same.
        "PYTHONHASHSEED": inherited.get("PYTHONHASHSEED", str(port)),
        **threads(n, cores, inherited),
    }
    if gpus:
        added["CUDA_VISIBLE_DEVICES"] = gpus[rank]
    return added


def threads(n: int, cores: int, inherited: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that give each of ``n`` processes its part of the cores; left to itself each takes all."""
    said = inherited.get("OMP_NUM_THREADS", "")  # the user's; MKL follows it
    each = int(said) if said.isdigit() else max(1, cores // n)
    # TensorFlow's own pools: of the second, one thread may wait for a peer while the other goes on computing.
    wanted = {"TF_NUM_INTRAOP_THREADS": each, "TF_NUM_INTEROP_THREADS": max(2, each)}
    if not said:
        wanted |= {"OMP_NUM_THREADS": each, "MKL_NUM_THREADS": each}
    return {name: str(count) for name, count in wanted.items() if name not in inherited}


def gpus_for(n: int, env: Mapping[str, str]) -> list[str]:
    """Return one GPU per process, or none where the machine has none.

    Raises:
        InputError: There are GPUs, but fewer than processes.
    """
    gpus = visible_gpus(env)
    if gpus and n > len(gpus):
        raise InputError(
            f"{n} processes need a GPU each and there are {len(gpus)} ({', '.join(gpus)}); "
            f"use -n {len(gpus)}, or CUDA_VISIBLE_DEVICES= to run on the CPU"
        )
    return gpus


def visible_gpus(env: Mapping[str, str]) -> list[str]:
    """Return the GPUs a CUDA program would see here, as ``CUDA_VISIBLE_DEVICES`` names them."""
    chosen = env.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        names = [name.strip() for name in chosen.split(",")]
        # CUDA itself reads up to the first name that is none.
        invalid = next((i for i, name in enumerate(names) if not name or name.startswith("-")), len(names))
        return names[:invalid]
    program = shutil.which("nvidia-smi", path=env.get("PATH"))
    if program is None:
        return []
    try:
        listed = subprocess.run([program, "-L"], capture_output=True, text=True, timeout=NVIDIA_SMI_S, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        print(f"nearlinear: no GPUs are used: {error}", file=sys.stderr)
        return []
    return parse_gpus(listed.stdout)


def parse_gpus(listed: str) -> list[str]:
    """Return the devices in the output of ``nvidia-smi -L``: a whole GPU by number, a slice (MIG) by its UUID.

    Example:
        >>> parse_gpus("GPU 0: H200 (UUID: GPU-aa)\\n  MIG 1g Device 0: (UUID: MIG-bb)\\nGPU 1: H200 (UUID: GPU-cc)")
        ['MIG-bb', '1']
    """
    devices: list[str] = []
    whole = False
    for line in listed.splitlines():
        if gpu := re.match(r"GPU (\d+):", line):
            devices.append(gpu[1])
            whole = True
        elif slice_ := re.search(r"UUID: (MIG-[^)]+)\)", line):
            if whole:
                devices.pop()
            devices.append(slice_[1])
            whole = False
    return devices


def free_port() -> int:
    """Return a port that is free now."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def checked_port(port: int) -> int:
    """Return ``port``.

    Raises:
        InputError: It is in use, or not ours to use.
    """
    with socket.socket() as probe:
        # Without this the connections of a run that has just ended would keep its port for a minute.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except (OSError, OverflowError) as error:
            reason = error.strerror if isinstance(error, OSError) else "ports run from 1 to 65535"
            raise InputError(
                f"port {port} cannot be used ({reason}); choose another --port, or leave it out for a free one"
            ) from None
    return port
