"""Reading what this machine is: its name, its processor, its memory, its GPUs."""

from __future__ import annotations

import contextlib
import os
import platform
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from nearlinear.runtime.environment import usable_cores

NVIDIA_SMI_S = 30.0

_CONTROL_GROUPS = (  # of either version: the most bytes, those in use, and which of them are files' and can be let go
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current", "inactive_file"),
    (
        "/sys/fs/cgroup/memory/memory.limit_in_bytes",
        "/sys/fs/cgroup/memory/memory.usage_in_bytes",
        "total_inactive_file",
    ),
)


@dataclass(frozen=True, slots=True)
class Hardware:
    """What a rank runs on; two probes of equal hardware measure the same.

    Args:
        host: Name of the machine.
        processor: Its processor.
        cores: Cores that this process may use.
        memory: Bytes of the machine's main memory, or of the control group's limit.
        threads: Threads each process computes with, as the environment says; empty: all cores.
        gpus: Names of the GPUs that this process may use, by number.
    """

    host: str
    processor: str
    cores: int
    memory: float
    threads: str = ""
    gpus: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON takes it."""
        return asdict(self)

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> Hardware:
        """Return what ``to_dict`` gave."""
        return cls(**{**raw, "gpus": tuple(raw["gpus"])})


@dataclass(frozen=True, slots=True)
class Place:
    """Where a rank computes, to tell which ranks share cores: those of one machine may do so in several containers.

    Args:
        machine: The running system, whatever its processes call it.
        cores: Numbers of those that this process may use.
        threads: That it computes with.
    """

    machine: str
    cores: Sequence[int]
    threads: int


def place(hardware: Hardware) -> Place:
    """Return where this process computes."""
    machine = hardware.host
    with contextlib.suppress(OSError):
        machine = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    listed = hasattr(os, "sched_getaffinity")
    cores = tuple(sorted(os.sched_getaffinity(0))) if listed else tuple(range(hardware.cores))
    threads = hardware.threads.partition(",")[0]  # "4,2": 4, and 2 in loops within loops
    return Place(machine, cores, int(threads) if threads.isdigit() and int(threads) > 0 else len(cores))


def here(env: Mapping[str, str] = os.environ) -> Hardware:
    """Return what this process runs on."""
    return Hardware(
        host=socket.gethostname(),
        processor=_processor(),
        cores=usable_cores(),
        memory=_memory(),
        threads=env.get("OMP_NUM_THREADS", ""),
        gpus=_gpus(env),
    )


class Others:
    """Tells what share of this machine's processor time other programs take, from its making on.

    Only where the kernel counts it (Linux); the kernel's own work is left out.
    """

    def __init__(self) -> None:
        self._began = time.monotonic(), _program_seconds(), os.times().user

    def share(self) -> float:
        """Return the share, from 0 to 1; 0 where it is not counted."""
        now = time.monotonic(), _program_seconds(), os.times().user
        wall, programs, own = (after - before for before, after in zip(self._began, now, strict=True))
        return min(1.0, max(0.0, programs - own) / max(wall, 1e-9) / (os.cpu_count() or 1))


def _program_seconds() -> float:
    """Return the processor seconds of all programs since the machine started."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        user, nice = Path("/proc/stat").read_text().split(maxsplit=3)[1:3]
        return (int(user) + int(nice)) / os.sysconf("SC_CLK_TCK")
    return 0.0


def _processor() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                return " ".join(line.partition(":")[2].split())
    return platform.processor() or platform.machine()


def _memory() -> float:
    total = float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    for limit, _, _ in _CONTROL_GROUPS:
        with contextlib.suppress(OSError, ValueError):  # no such file, or the word "max"
            total = min(total, float(Path(limit).read_text()))
    return total


def free_memory(processes: int) -> float:
    """Return the bytes of main memory that this process can still have, if as many on this machine want the same.

    Args:
        processes: This one and the others.
    """
    free = float("inf")
    with contextlib.suppress(OSError, ValueError, IndexError):
        found = re.search(r"^MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE)
        free = float(found[1]) * 1024 if found else free
    for limit, used, files in _CONTROL_GROUPS:
        with contextlib.suppress(OSError, ValueError):
            most, taken = float(Path(limit).read_text()), float(Path(used).read_text())
            kept = re.search(rf"^{files} (\d+)", Path(limit).with_name("memory.stat").read_text(), re.MULTILINE)
            free = min(free, most - taken + (float(kept[1]) if kept else 0.0))
    free /= processes
    with contextlib.suppress(ImportError, OSError, ValueError, IndexError):
        import resource  # not on Windows

        most, pages = resource.getrlimit(resource.RLIMIT_AS)[0], Path("/proc/self/statm").read_text().split()[0]
        if most != resource.RLIM_INFINITY:
            free = min(free, most - float(pages) * os.sysconf("SC_PAGE_SIZE"))
    return max(free, 0.0)


def _gpus(env: Mapping[str, str]) -> tuple[str, ...]:
    chosen = env.get("CUDA_VISIBLE_DEVICES")
    program = shutil.which("nvidia-smi", path=env.get("PATH"))
    if program is None or chosen == "":
        return ()
    try:
        listed = subprocess.run([program, "-L"], capture_output=True, text=True, timeout=NVIDIA_SMI_S, check=True)
    except (OSError, subprocess.SubprocessError):  # a broken driver: nothing here can compute on it either
        return ()
    found = {number: name for number, name in re.findall(r"^GPU (\d+): (.*?) \(UUID", listed.stdout, re.MULTILINE)}
    if chosen is None:
        return tuple(found.values())
    # By UUID or as a slice: the names of all are the best that can be said.
    return tuple(found.get(name.strip(), " or ".join(sorted(set(found.values())))) for name in chosen.split(","))
