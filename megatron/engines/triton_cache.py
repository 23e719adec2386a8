"""Triton's compiled kernels where many ranks share a node: a directory of its own, one at a time.

Triton keeps what it compiles below the home directory. On a cluster that is often one network file
system for all nodes, and hundreds of ranks that compile the same kernels into it at once crash or
wait. In a job of several ranks `use_node_local_cache` moves the cache to the node's own disk before
the first launch; from then on the first launch of each kernel takes its turn behind a lock on that
disk: the first rank of the node compiles, the others wait for it and load what it made.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
from collections.abc import Hashable, Iterator
from pathlib import Path

__all__ = ["compile_turn", "use_node_local_cache"]

_VARIABLE = "TRITON_CACHE_DIR"
_folder: Path | None = None
_launched: set[Hashable] = set()


def use_node_local_cache() -> Path:
    """Set TRITON_CACHE_DIR to a private directory on this node, unless it is set; return it."""
    global _folder
    chosen = os.environ.get(_VARIABLE)
    folder = Path(chosen) if chosen else _private_folder()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    os.environ[_VARIABLE] = str(folder)
    _folder = folder
    return folder


def _private_folder() -> Path:
    base = Path(os.environ.get("SLURM_TMPDIR") or tempfile.gettempdir())
    folder = base / f"kerple-triton-{os.getuid()}"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = folder.lstat()
    if folder.is_symlink() or found.st_uid != os.getuid() or found.st_mode & 0o022:
        # code is loaded from here: not from a directory that somebody else can write to
        return Path(tempfile.mkdtemp(prefix="kerple-triton-", dir=base))
    return folder


@contextlib.contextmanager
def compile_turn(kernel: Hashable) -> Iterator[None]:
    """Around a launch: the first one of a kernel waits until no other process compiles here."""
    if _folder is None or kernel in _launched:
        yield
        return
    with (_folder / "compiling.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # let go when the file closes, also if the process dies
        yield
    _launched.add(kernel)
