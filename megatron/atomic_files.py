"""Files and directories that are either complete or absent: temporary name, fsync, rename."""

from __future__ import annotations

import contextlib
import errno
import glob
import hashlib
import json
import os
import re
import secrets
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from megatron.errors import OutputError
from megatron.machine import is_running

# Some file systems refuse to open or sync a directory.
CANNOT_SYNC = (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS, errno.EACCES, errno.EPERM)
CHECKSUMS = "checksums.json"
"""Inside every checkpoint: its files, each with its size and CRC-32."""
OWNER = ".lock.owner"
"""In a run directory: the host and process that train into it."""
TEMPORARY = re.compile(r"\.(.+)\.(\d+)\.[0-9a-f]{8}\.tmp")
"""What `temporary_name` makes: the name that it will have, and the process that writes it."""


def temporary_name(path: Path) -> Path:
    """A name beside ``path`` that no other process uses and no reader mistakes for ``path``."""
    return path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}.tmp")


def remove_leftovers(path: Path, *, older_than_seconds: float = 3600.0) -> None:
    """Delete temporary files for ``path`` whose process was killed.

    Another machine's processes cannot be looked up: files that were written recently are kept.
    """
    for entry in path.parent.glob(f".{glob.escape(path.name)}.*.tmp"):
        match = TEMPORARY.fullmatch(entry.name)
        if match is None or match[1] != path.name or is_running(int(match[2])):
            continue
        with contextlib.suppress(OSError):
            if time.time() - entry.stat().st_mtime > older_than_seconds:
                entry.unlink()


def publish(temporary: Path, path: Path) -> None:
    """Rename a finished, synced file into place and sync the directory entry."""
    temporary.replace(path)
    sync_directory(path.parent)


def sync_directory(directory: Path) -> None:
    """Make renames and new names inside it durable."""
    try:
        descriptor = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        if error.errno not in CANNOT_SYNC:
            raise


def make_directories(directory: Path) -> None:
    """`directory` with its parents; what had to be made is durable."""
    missing = [path for path in (directory, *directory.parents) if not path.exists()]
    directory.mkdir(parents=True, exist_ok=True)
    for path in missing:
        sync_directory(path.parent)


@contextmanager
def atomic_writer(path: Path) -> Iterator[BinaryIO]:
    """Open a binary file that appears under ``path`` only when the block ends without error."""
    temporary = temporary_name(path)
    try:
        with temporary.open("wb") as handle:
            yield handle
            handle.flush()
            os.fsync(handle.fileno())
        publish(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def new_directory(
    path: str | Path,
    *,
    overwrite: bool,
    replaceable: Callable[[str], bool],
    sources: Iterable[str | Path],
) -> Iterator[Path]:
    """A temporary directory that becomes ``path`` when the block ends without error.

    ``overwrite`` replaces a directory that holds nothing but names that ``replaceable`` accepts,
    and none of the ``sources``.
    """
    target = Path(path)
    _check_replaceable(target, overwrite, replaceable, sources)
    make_directories(target.parent)
    temporary = temporary_name(target)
    temporary.mkdir()
    try:
        yield temporary
        _sync_tree(temporary)
        old = temporary_name(target)
        if target.exists():
            target.rename(old)
        temporary.rename(target)
        sync_directory(target.parent)  # else a power cut could delete what still has the name
        shutil.rmtree(old, ignore_errors=True)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _check_replaceable(
    target: Path,
    overwrite: bool,
    replaceable: Callable[[str], bool],
    sources: Iterable[str | Path],
) -> None:
    whole = target.resolve()
    for source in sources:
        if Path(source).resolve().is_relative_to(whole):
            raise OutputError(f"{target}: holds {source}, which is read; choose another place")
    if not target.exists() or (target.is_dir() and not any(target.iterdir())):
        return
    if not overwrite:
        raise OutputError(f"{target}: exists; choose another destination, or --overwrite")
    if not target.is_dir():
        raise OutputError(f"{target}: is a file, which --overwrite does not replace")
    foreign = sorted(entry.name for entry in target.iterdir() if not replaceable(entry.name))
    if foreign:
        raise OutputError(
            f"{target}: holds {', '.join(foreign[:3])}{' ...' if len(foreign) > 3 else ''}, which "
            "is not of a conversion; --overwrite replaces earlier results only. Choose another "
            "place, or delete it yourself."
        )


def _sync_tree(directory: Path) -> None:
    for path in [*directory.rglob("*"), directory]:
        if path.is_dir():
            sync_directory(path)
        else:
            with path.open("rb") as handle:
                os.fsync(handle.fileno())


def check_writable(path: Path, option: str, shown: Path | None = None) -> None:
    """Refuse now what could not be written after the work; makes the folder if need be."""
    probe = temporary_name(path)
    try:
        make_directories(path.parent)
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise OutputError(
            f"{option} {shown or path}: cannot be written ({error.strerror}). Choose another place."
        ) from error


def check_folder_writable(folder: Path, option: str) -> None:
    """The same for a folder that files will be written into."""
    if folder.exists() and not folder.is_dir():
        raise OutputError(f"{option} {folder}: is a file, not a folder. Choose another place.")
    check_writable(folder / "x", option, shown=folder)


def write_text(path: Path, text: str, *, parents: bool = False) -> None:
    """The old content or the new, never a part; with `parents`, in a folder made if need be."""
    if parents:
        make_directories(path.parent)
    with atomic_writer(path) as handle:
        handle.write(text.encode())


def write_json(path: Path, content: Any) -> None:
    write_text(path, json.dumps(content, indent=2, sort_keys=True) + "\n")


def write_json_lines(path: Path, records: Iterable[dict[str, Any]]) -> None:
    """One object a line; written as they come."""
    with atomic_writer(path) as handle:
        for record in records:
            handle.write((json.dumps(record) + "\n").encode())


def read_json(path: Path) -> dict[str, Any] | None:
    """The object in a JSON file; None if it is absent, damaged or something else."""
    try:
        content = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None
    except (OSError, ValueError, RecursionError):
        return None
    return content if isinstance(content, dict) else None


def fingerprint(value: Any) -> str:
    """A short hash of plain data."""
    text = json.dumps(value, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
