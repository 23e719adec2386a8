"""Files that are either complete or absent: temporary name, fsync, rename."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from megatron.errors import OutputError

__all__ = [
    "atomic_writer",
    "check_folder_writable",
    "check_writable",
    "fingerprint",
    "publish",
    "sync_directory",
    "temporary_name",
    "write_json",
    "write_text",
]

# Some file systems refuse to open or sync a directory.
CANNOT_SYNC = (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS, errno.EACCES, errno.EPERM)


def temporary_name(path: Path) -> Path:
    """A name beside ``path`` that no other process uses and no reader mistakes for ``path``."""
    return path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}.tmp")


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


def check_writable(path: Path, option: str, shown: Path | None = None) -> None:
    """Refuse now what could not be written after the work; makes the folder if need be."""
    probe = temporary_name(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
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
        path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_writer(path) as handle:
        handle.write(text.encode())


def write_json(path: Path, content: Any) -> None:
    write_text(path, json.dumps(content, indent=2, sort_keys=True) + "\n")


def fingerprint(value: Any) -> str:
    """A short hash of plain data."""
    text = json.dumps(value, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
