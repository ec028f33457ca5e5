"""Turning named arrays and JSON documents into a folder that is whole or absent, and such a folder back.

    ckpt/checkpoint.json        the manifest: format, version, and each file's size and sha256
    ckpt/model.safetensors      one file per group of arrays
    ckpt/state.json             one file per document

The manifest decides what the checkpoint is, and it changes in one rename. A save over an older checkpoint goes

    1  write model.safetensors.<id>.part, ..., checkpoint.json.<id>.part, and flush them to the disk
    2  rename checkpoint.json.<id>.part to checkpoint.json           before: the old checkpoint; from here on: the new
    3  rename model.safetensors.<id>.part to model.safetensors, ...
    4  remove what no manifest speaks of

and a reader takes ``<name>.<id>.part`` where it is still there and ``<name>`` where it is not, <id> being the
manifest's. So a writer killed anywhere leaves one whole checkpoint, and the next writer tidies up. Where nothing is at
the path yet, all this happens in a hidden folder next to it, which is then renamed, so that a path that exists can be
loaded. (Swapping two folders with ``renameat2`` was the other way: it needs Linux, a file system that can, and it
takes away with the old folder whatever else a user keeps in it.) Two writers at one place take turns, and what the
last of them wrote stays.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import mmap
import os
import re
import secrets
import shutil
import socket
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from nearlinear.checkpoint.documents import Json
from nearlinear.checkpoint.tensors import Array, Buffer, chunks, parse
from nearlinear.errors import CheckpointError, InputError
from nearlinear.units import size

FORMAT = "nearlinear checkpoint"
VERSION = 1
MANIFEST = "checkpoint.json"
_ARRAYS, _DOCUMENT = ".safetensors", ".json"
_PART = r"\.[0-9a-f]{8}\.part"
PATIENCE_S = 600.0  # that a save waits for another one at the same place
_OTHER = "; copy the folder again, or load another checkpoint"


@dataclass(frozen=True, slots=True)
class Contents:
    """What a checkpoint holds.

    Args:
        arrays: Arrays by group and name. Their bytes lie in the file until they are asked for.
        documents: JSON by name.
        identity: Equal for two readers exactly if they read the same checkpoint.
    """

    arrays: Mapping[str, Mapping[str, Array]]
    documents: Mapping[str, Json]
    identity: str


def write(
    path: str | os.PathLike[str],
    arrays: Mapping[str, Mapping[str, Array]],
    documents: Mapping[str, Json],
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Make ``path`` the folder of this checkpoint; what else is in the folder stays.

    Args:
        path: The folder. It may hold an older checkpoint, which is replaced.
        arrays: Arrays by group and name; a group becomes ``<group>.safetensors``.
        documents: JSON by name; each becomes ``<name>.json``.
        metadata: Texts for the head of every safetensors file.

    Raises:
        InputError: ``path`` is a file, or a folder whose files would be overwritten and are no checkpoint.
        CheckpointError: The disk is full or refuses; what was there before is unchanged.
    """
    folder = Path(os.path.abspath(path))  # noqa: PTH100  Path.resolve would follow a link that the user may move later
    contents: dict[str, Iterable[Buffer]] = {
        **{group + _ARRAYS: chunks(named, metadata or {}) for group, named in arrays.items()},
        **{name + _DOCUMENT: [json.dumps(value, allow_nan=False).encode()] for name, value in documents.items()},
    }
    try:
        if folder.exists() and not folder.is_dir():
            raise InputError(f"cannot save to {folder}: it is a file and a checkpoint is a folder; choose another path")
        if not folder.is_dir():
            folder.parent.mkdir(parents=True, exist_ok=True)
            with _alone(folder.parent):
                if not folder.is_dir():  # another process may have been faster
                    _write_new(folder, contents)
                    return
        with _alone(folder):
            _write_into(folder, contents)
    except OSError as error:
        reason = f"{error.strerror}: {error.filename}" if error.filename else error.strerror
        free = ""
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            needed = sum(array.nbytes for named in arrays.values() for array in named.values())
            free = f" (it needs {size(needed)}, {size(shutil.disk_usage(_nearest(folder)).free)} are free)"
        raise CheckpointError(
            f"cannot save to {folder}: {reason}{free}; a checkpoint that was there is still whole; "
            "make room or choose another path"
        ) from error


def read(path: str | os.PathLike[str]) -> Contents:
    """Return what the checkpoint at ``path`` holds, every byte of it checked.

    Raises:
        CheckpointError: There is no checkpoint, it is incomplete or damaged, or it has another format version.
    """
    folder = Path(path)
    while True:
        text = _manifest_text(folder)
        try:
            return _read(folder, text)
        except CheckpointError:
            # Another process may have saved anew between our look at the manifest and at the files: look again.
            if _manifest_text(folder) == text:
                raise


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Wait until no other process of this machine writes in a folder; where locks are not to be had, go on.

    Raises:
        CheckpointError: One went on writing for ``PATIENCE_S``.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        until = time.monotonic() + PATIENCE_S
        while _lock(descriptor, "LOCK_EX"):
            if time.monotonic() > until:
                raise CheckpointError(
                    f"cannot save to {folder}: another process has been saving there for {PATIENCE_S:.0f} s; choose "
                    "another path"
                )
            time.sleep(0.05)
        yield
    finally:
        _lock(descriptor, "LOCK_UN")  # closing is not enough: a process that was forked meanwhile has it open too
        os.close(descriptor)


def _lock(descriptor: int, how: str) -> bool:
    """Lock or unlock a file, where the system can; return whether another process is in the way."""
    try:
        import fcntl  # not on Windows

        fcntl.flock(descriptor, getattr(fcntl, how) | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except (ImportError, OSError):  # a network's file system may lock no folders
        return False
    return False


def _write_new(folder: Path, contents: Mapping[str, Iterable[Buffer]]) -> None:
    for sibling in folder.parent.iterdir():
        if re.fullmatch(r"\." + re.escape(folder.name) + _PART, sibling.name):
            shutil.rmtree(sibling, ignore_errors=True)  # of a writer that was killed
    hidden = folder.parent / f".{folder.name}.{secrets.token_hex(4)}.part"
    hidden.mkdir()
    try:
        _write_into(hidden, contents)
        hidden.rename(folder)
    except BaseException:
        shutil.rmtree(hidden, ignore_errors=True)
        raise
    _flush(folder.parent)


def _write_into(folder: Path, contents: Mapping[str, Iterable[Buffer]]) -> None:
    old = _manifest_to_replace(folder, contents)
    _settle(folder, old)  # what a killed writer left takes room
    ident = secrets.token_hex(4)
    try:
        files = {name: _stage(_part(folder, name, ident), pieces) for name, pieces in contents.items()}  # 1
        new = {"format": FORMAT, "version": VERSION, "id": ident, "files": files}
        _stage(_part(folder, MANIFEST, ident), [json.dumps(new, indent=1).encode()])
        _flush(folder)
        _part(folder, MANIFEST, ident).replace(folder / MANIFEST)  # 2
    except BaseException:
        # Asked anew which checkpoint is there: an interrupt may have come just after (2). What cannot be removed now,
        # the next writer removes.
        with contextlib.suppress(OSError, InputError):
            _settle(folder, _manifest_to_replace(folder, ()))
        raise
    _flush(folder)
    _settle(folder, new, retired=[name for name in (old or {}).get("files", {}) if name not in files])


def _settle(folder: Path, manifest: Json, retired: Iterable[str] = ()) -> None:
    """Give the manifest's files their names (3) and remove what it does not speak of (4)."""
    if manifest is not None:
        for name in manifest["files"]:
            part = _part(folder, name, manifest["id"])
            if part.exists():
                part.replace(folder / name)
        _flush(folder)
    for name in retired:
        (folder / name).unlink(missing_ok=True)
    for left_over in folder.iterdir():
        if re.fullmatch(r".+" + _PART, left_over.name):
            left_over.unlink()


def _stage(file: Path, pieces: Iterable[Buffer]) -> Json:
    """Write ``pieces`` to ``file`` and to the disk, and return its size and hash."""
    digest = hashlib.sha256()
    with file.open("xb") as out:
        for piece in pieces:
            digest.update(piece)
            out.write(piece)
        out.flush()
        os.fsync(out.fileno())
        return {"bytes": out.tell(), "sha256": digest.hexdigest()}


def _flush(folder: Path) -> None:
    """Bring the names in ``folder`` to the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # file systems that write names through have no flush
            raise
    finally:
        os.close(descriptor)


def _part(folder: Path, name: str, ident: str) -> Path:
    return folder / f"{name}.{ident}.part"


def _manifest_to_replace(folder: Path, contents: Iterable[str]) -> Json:
    """Return the manifest of the checkpoint that a save replaces, None where there is none.

    Raises:
        InputError: The save would overwrite a file that belongs to no checkpoint.
    """
    if (folder / MANIFEST).exists():
        try:
            return _manifest(folder, _manifest_text(folder))
        except CheckpointError as error:
            raise InputError(f"cannot save over it: {error}; or choose another path") from error
    for name in contents:
        if (folder / name).exists():
            raise InputError(f"cannot save to {folder}: its {name} belongs to no checkpoint; choose another path")
    return None


def _manifest_text(folder: Path) -> bytes:
    try:
        return (folder / MANIFEST).read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        if not folder.exists():
            raise CheckpointError(f"no checkpoint at {folder}: it does not exist on {socket.gethostname()}") from None
        what = f"the folder has no {MANIFEST}" if folder.is_dir() else "it is a file and a checkpoint is a folder"
        raise CheckpointError(f"no checkpoint at {folder}: {what}; give the folder that was saved to") from None
    except OSError as error:
        raise CheckpointError(f"cannot read {folder / MANIFEST}: {error.strerror}") from error


def _manifest(folder: Path, text: bytes) -> Json:
    where = folder / MANIFEST
    try:
        manifest = json.loads(text)
        if manifest["format"] != FORMAT:
            raise CheckpointError(f"{where} is {manifest['format']!r}, not a {FORMAT}; load another folder")
        if manifest["version"] != VERSION:
            raise CheckpointError(
                f"{where} has format version {manifest['version']} and this nearlinear reads {VERSION}; "
                "use the nearlinear that wrote it"
            )
        files = manifest["files"]
        if not re.fullmatch("[0-9a-f]{8}", manifest["id"]) or any(
            Path(name).name != name or type(entry["bytes"]) is not int or type(entry["sha256"]) is not str
            for name, entry in files.items()
        ):
            raise ValueError("it has entries of another kind")
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(f"{where} is damaged ({error}){_OTHER}") from error
    return manifest


def _read(folder: Path, text: bytes) -> Contents:
    manifest = _manifest(folder, text)
    arrays: dict[str, Mapping[str, Array]] = {}
    documents: dict[str, Json] = {}
    for name, entry in manifest["files"].items():
        view = _checked(folder, name, manifest["id"], entry)
        if name.endswith(_ARRAYS):
            arrays[name.removesuffix(_ARRAYS)] = parse(view, str(folder / name))
        elif name.endswith(_DOCUMENT):
            documents[name.removesuffix(_DOCUMENT)] = json.loads(bytes(view))
    return Contents(arrays, documents, hashlib.sha256(text).hexdigest())


def _checked(folder: Path, name: str, ident: str, entry: Json) -> memoryview:
    """Return the bytes of one file after comparing them with what the manifest says of them."""
    where = folder / name
    try:
        try:
            file = _part(folder, name, ident).open("rb")
        except FileNotFoundError:
            file = where.open("rb")
        with file:
            there = os.fstat(file.fileno()).st_size
            if there != entry["bytes"]:
                raise CheckpointError(f"{where} has {there} bytes and was written with {entry['bytes']}{_OTHER}")
            # Mapped, not read: a tensor's bytes are fetched when it is copied. Private, so that writing to such a
            # tensor cannot change the file.
            view = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)) if there else memoryview(b"")
    except FileNotFoundError:
        raise CheckpointError(f"{where} is missing{_OTHER}") from None
    except OSError as error:
        raise CheckpointError(f"cannot read {where}: {error.strerror}{_OTHER}") from error
    if hashlib.sha256(view).hexdigest() != entry["sha256"]:
        raise CheckpointError(f"{where} is damaged: its bytes are not those that were written (sha256){_OTHER}")
    return view


def _nearest(folder: Path) -> Path:
    """Return the folder itself or the closest one above it that exists."""
    return next(p for p in (folder, *folder.parents) if p.is_dir())
