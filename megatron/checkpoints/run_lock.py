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
WAIT_SECONDS = 120  # an NFS 4 lease is 90
_held: dict[Path, FileLock] = {}


def hold(directory: Path) -> None:
    """Take `directory` for this process until it ends; an error if another has it.

    The kernel releases the lock of a process that is gone, killed or not. Where the file system
    has no locks, that is said, and two trainings are not told apart.
    """
    place = directory.resolve()
    if place in _held:
        return
    lock = FileLock(str(directory / LOCK))
    try:
        _acquire(lock, directory)
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


def _acquire(lock: FileLock, directory: Path) -> None:
    """At once, unless another machine has it: a server may keep a dead client's lock a while."""
    try:
        lock.acquire(timeout=0)
    except Timeout:
        owner = _read_owner(directory)
        if owner is None or owner[0] == socket.gethostname():
            raise
        print(
            f"{directory}: locked by {_owner(directory)}; waiting up to {WAIT_SECONDS} s for it "
            "to end",
            flush=True,
        )
        lock.acquire(timeout=WAIT_SECONDS, poll_interval=1)


def release(directory: Path) -> None:
    """Let another training have the directory."""
    lock = _held.pop(directory.resolve(), None)
    if lock is not None:
        (directory / OWNER).unlink(missing_ok=True)
        lock.release()


def _owner(directory: Path) -> str:
    owner = _read_owner(directory)
    return "another process" if owner is None else f"process {owner[1]} on {owner[0]}"


def _read_owner(directory: Path) -> tuple[str, int] | None:
    """Host and process that hold the directory."""
    try:
        about: Any = json.loads((directory / OWNER).read_text(encoding="utf-8"))
        return str(about["host"])[:80], int(about["process"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
