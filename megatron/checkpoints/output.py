"""Directories that are either complete or absent."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megatron.atomic_files import temporary_name
from megatron.errors import CheckpointError

__all__ = ["new_directory"]


@contextmanager
def new_directory(path: str | Path, *, overwrite: bool = False) -> Iterator[Path]:
    """A temporary directory that becomes `path` when the block ends without error."""
    target = Path(path)
    if target.exists() and not overwrite and (not target.is_dir() or any(target.iterdir())):
        raise CheckpointError(f"{target}: exists; choose another destination, or --overwrite")
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = temporary_name(target)
    temporary.mkdir()
    try:
        yield temporary
        _sync_tree(temporary)
        _replace(temporary, target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _replace(temporary: Path, target: Path) -> None:
    if not target.exists():
        temporary.rename(target)
    elif target.is_dir() and not any(target.iterdir()):
        target.rmdir()
        temporary.rename(target)
    else:
        old = temporary_name(target)
        target.rename(old)
        temporary.rename(target)
        shutil.rmtree(old, ignore_errors=True)
    _sync(target.parent)


def _sync_tree(directory: Path) -> None:
    for path in directory.rglob("*"):
        _sync(path)
    _sync(directory)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError:
        if path.is_file():  # some filesystems cannot sync a directory
            raise
    finally:
        os.close(descriptor)
