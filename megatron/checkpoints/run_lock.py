"""One training per directory: a lock that dies with its process."""

from __future__ import annotations

import json
import os
import socket
import sys
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from megatron.atomic_files import write_text
from megatron.errors import CheckpointError

__all__ = ["hold", "release"]

LOCK = ".lock"
OWNER = ".lock.owner"
_held: dict[Path, FileLock] = {}


def hold(directory: Path) -> None:
    """Take `directory` for this process until it ends; an error if another has it.

    The kernel releases the lock of a process that is gone, killed or not. Where the file system
    has no locks, that is said, and two trainings are not told apart.
    """
    place = directory.resolve()
    if place in _held:
        return
    lock = FileLock(str(directory / LOCK), timeout=0)
    try:
        lock.acquire()
    except Timeout:
        raise CheckpointError(
            f"save = {directory}: {_owner(directory)} is training into it. Wait for it, stop it, "
            "or set `save` to another directory."
        ) from None
    except (NotImplementedError, OSError) as error:
        print(
            f"warning: {directory}: cannot be locked ({error}); make sure that only one training "
            "writes there",
            file=sys.stderr,
        )
        return
    _held[place] = lock
    about = {"host": socket.gethostname(), "process": os.getpid()}
    write_text(directory / OWNER, json.dumps(about))


def release(directory: Path) -> None:
    """Let another training have the directory."""
    lock = _held.pop(directory.resolve(), None)
    if lock is not None:
        (directory / OWNER).unlink(missing_ok=True)
        lock.release()


def _owner(directory: Path) -> str:
    try:
        about: Any = json.loads((directory / OWNER).read_text(encoding="utf-8"))
        return f"process {int(about['process'])} on {str(about['host'])[:80]}"
    except (OSError, ValueError, KeyError, TypeError):
        return "another process"
