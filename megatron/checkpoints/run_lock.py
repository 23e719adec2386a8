"""One training per directory: a lock released when its process ends, and a file with its owner.

On some network file systems a lock is visible on its own host only (sshfs, NFS and Lustre by mount
option), and some have no locks. So the owner also rewrites `.lock.owner` every few seconds, and a
training on another host that sees it change is refused.
"""

from __future__ import annotations

import atexit
import json
import os
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from megatron.atomic_files import OWNER, read_json, write_text
from megatron.errors import CheckpointError

LOCK = ".lock"
WAIT_SECONDS = 120  # for another host's lock; an NFS 4 lease is 90
REFRESH_SECONDS = 5.0
WATCH_SECONDS = 20.0  # four refreshes; another host's clock is not trusted
_held: dict[Path, FileLock] = {}


def lock_directory(directory: Path) -> None:
    """Lock `directory` for this process until it ends; an error if another process holds it.

    The kernel releases the lock of a process that has ended, killed or not.
    """
    place = directory.resolve()
    if place in _held:
        return
    lock = FileLock(str(directory / LOCK))
    try:
        _acquire(lock, directory)
    except Timeout:
        raise _taken(directory) from None
    except (NotImplementedError, OSError) as error:
        print(
            f"warning: {directory}: cannot be locked ({error}); make sure that only one training "
            "writes there",
            file=sys.stderr,
        )
    if _is_refreshed(directory):
        lock.release()
        raise _taken(directory)
    _held[place] = lock
    _keep_owner(directory)


def _taken(directory: Path) -> CheckpointError:
    return CheckpointError(
        f"save = {directory}: {_owner(directory)} is training into it. Wait for it, stop it, "
        "or set `save` to another directory."
    )


def _acquire(lock: FileLock, directory: Path) -> None:
    """At once, unless another host holds it: an NFS server keeps a dead client's lock a while."""
    try:
        lock.acquire(timeout=0)
    except Timeout:
        if not _is_elsewhere(read_json(directory / OWNER)):
            raise
        print(
            f"{directory}: locked by {_owner(directory)}; waiting up to {WAIT_SECONDS} s for it "
            "to end",
            flush=True,
        )
        lock.acquire(timeout=WAIT_SECONDS, poll_interval=1)


def _is_elsewhere(owner: dict[str, Any] | None) -> bool:
    here = socket.gethostname()
    return (owner or {}).get("host", here) != here


def _is_refreshed(directory: Path) -> bool:
    """Whether an owner on another host rewrites its file while we watch."""
    first = read_json(directory / OWNER)
    if not _is_elsewhere(first) or "refreshed" not in (first or {}):
        return False
    print(
        f"{directory}: {_owner(directory)} holds it; watching for up to "
        f"{WATCH_SECONDS:.0f} s whether it still trains",
        flush=True,
    )
    end = time.monotonic() + WATCH_SECONDS
    while time.monotonic() < end:
        time.sleep(min(1.0, WATCH_SECONDS / 4))
        now = read_json(directory / OWNER)
        if now != first:
            return now is not None  # None: it has ended in this moment
    return False


def _keep_owner(directory: Path) -> None:
    """Rewrite the owner's file periodically until the process ends."""
    about = {"host": socket.gethostname(), "process": os.getpid()}
    ended = threading.Event()

    def write(count: int) -> None:
        write_text(directory / OWNER, json.dumps({**about, "refreshed": f"{count:09d}"}))

    def refresh() -> None:
        count = 1
        while not ended.wait(REFRESH_SECONDS):
            count += 1
            try:
                write(count)
            except OSError:
                continue  # a full disk or an unreachable server: training reports it itself

    def leave() -> None:
        if os.getpid() != about["process"]:
            return  # a forked child
        ended.set()
        thread.join()
        (directory / OWNER).unlink(missing_ok=True)

    write(1)
    thread = threading.Thread(target=refresh, name="lock owner", daemon=True)
    thread.start()
    atexit.register(leave)


def _owner(directory: Path) -> str:
    match read_json(directory / OWNER):
        case {"host": str(host), "process": int(process)}:
            return f"process {process} on {host:.80}"
    return "another process"
