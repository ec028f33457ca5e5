"""Keeping what a probe found in the user's cache folder, one file per set of machines, and finding it again.

The file's name follows from what was measured: host names, processors, GPUs, threads, the number of processes. Other
hardware is another file; the same hardware is measured again when the file is old, since networks change unseen.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from nearlinear.core.cluster import Cluster, Device
from nearlinear.errors import InputError
from nearlinear.measure.hardware import Hardware
from nearlinear.measure.probe import Measured

OLD = datetime.timedelta(days=7)


def folder(env: Mapping[str, str] = os.environ) -> Path:
    """Return where cluster files are kept: ``$XDG_CACHE_HOME/nearlinear``, by default ``~/.cache/nearlinear``."""
    base = env.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "nearlinear" / "clusters"


def path_for(hardware: Sequence[Hardware], env: Mapping[str, str] = os.environ) -> Path:
    """Return the file of ranks on this hardware, in rank order."""
    key = json.dumps([[each.host, each.processor, each.cores, each.threads, each.gpus] for each in hardware])
    return folder(env) / f"{hashlib.blake2b(key.encode(), digest_size=10).hexdigest()}.json"


def find(hardware: Sequence[Hardware], env: Mapping[str, str] = os.environ) -> Measured | None:
    """Return what was measured on this hardware, or ``None`` if nothing was, or too long ago."""
    try:
        measured = Measured.from_json(path_for(hardware, env).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, InputError):  # not there, or of another version: measured anew
        return None
    return measured if age(measured) <= OLD else None


def age(measured: Measured) -> datetime.timedelta:
    """Return how long ago it was measured."""
    return datetime.datetime.now(datetime.UTC) - datetime.datetime.fromisoformat(measured.began)


def keep(measured: Measured, env: Mapping[str, str] = os.environ) -> Path:
    """Write it to its file, whole or not at all, and return the path.

    Raises:
        InputError: The folder cannot be written to.
    """
    path = path_for(measured.hardware, env)
    write(path, measured.to_json(), "set XDG_CACHE_HOME to a folder that can be written to")
    return path


def write(path: Path, text: str, remedy: str = "name another file with --out") -> None:
    """Write a file, whole or not at all.

    Args:
        path: Where to.
        text: What.
        remedy: What a person can do where that fails.

    Raises:
        InputError: It cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(text)
            Path(name).chmod(0o644)
            Path(name).replace(path)
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                Path(name).unlink()
            raise
    except OSError as error:
        raise InputError(f"cannot write {path} ({error.strerror}); {remedy}") from None


def known_devices(env: Mapping[str, str] = os.environ) -> list[Device]:
    """Return the devices of all cluster files here, the latest first: what a described cluster may name beside presets.

    Example:
        parse_cluster("2 x cpu, 100 Mbit/s between", known_devices())
    """
    found: list[tuple[float, Device]] = []
    with contextlib.suppress(OSError):
        for path in folder(env).glob("*.json"):
            with contextlib.suppress(OSError, UnicodeDecodeError, InputError):
                cluster = Cluster.from_json(path.read_text(encoding="utf-8"))
                found += [(path.stat().st_mtime, device) for device in cluster.devices]
    latest: dict[str, Device] = {}
    for _, device in sorted(found, key=lambda each: each[0], reverse=True):
        latest.setdefault(device.name, device)
    return list(latest.values())
