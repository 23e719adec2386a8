"""checksums.json: what was written into a checkpoint, and whether it still lies there.

CRC-32 guards against damage, not against forgery: what a file may do is `safe_files`' business.
Every rank computes its files' checksums while it writes them.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

from megatron.atomic_files import write_text
from megatron.errors import CheckpointError

__all__ = [
    "CHECKSUMS",
    "ChecksummedFile",
    "checksum",
    "is_training_checkpoint",
    "problems_of",
    "read_checksums",
    "write_checksums",
]

CHECKSUMS = "checksums.json"
MAX_BYTES = 1 << 26
Sums = dict[str, tuple[int, str]]
"""File name relative to the checkpoint -> its size and CRC-32."""


class ChecksummedFile:
    """A file that is written from front to back, and the checksum of what was."""

    def __init__(self, handle: BinaryIO) -> None:
        self._handle = handle
        self.size, self._crc = 0, 0

    def write(self, data: bytes) -> int:
        written = self._handle.write(data)
        self._crc = zlib.crc32(data, self._crc)
        self.size += len(data)
        return written

    def flush(self) -> None:
        self._handle.flush()

    @property
    def checksum(self) -> str:
        return f"{self._crc:08x}"


def checksum(path: Path) -> str:
    """CRC-32 of a file's content."""
    value = 0
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            value = zlib.crc32(block, value)
    return f"{value:08x}"


def write_checksums(
    directory: Path, known: Sums | None = None, only: Sequence[str] = ("*",)
) -> None:
    """Record the files below `directory`; those in `known` were summed as they were written."""
    known = known or {}
    found = {p for pattern in only for p in directory.rglob(pattern)}
    files = sorted(p for p in found if p.is_file() and p.name != CHECKSUMS)
    sums: dict[str, list[Any]] = {}
    for path in files:
        name = path.relative_to(directory).as_posix()
        size = path.stat().st_size
        if name in known and known[name][0] != size:
            raise CheckpointError(
                f"{path}: has {size} bytes, but {known[name][0]} were written; is another program "
                "writing there, or is the file system full?"
            )
        sums[name] = [size, known[name][1] if name in known else checksum(path)]
    write_text(directory / CHECKSUMS, json.dumps(sums, indent=1))


def read_checksums(directory: Path) -> Sums | None:
    """What the file says; None if there is none, an error if it cannot be used."""
    path = directory / CHECKSUMS
    try:
        if path.stat().st_size > MAX_BYTES:
            raise CheckpointError(f"{CHECKSUMS} is too large to be one")
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError):
        raise CheckpointError(f"{CHECKSUMS} is not readable") from None
    if not isinstance(content, dict) or not content:
        raise CheckpointError(f"{CHECKSUMS} lists no files")
    sums: Sums = {}
    for name, entry in content.items():
        if not _is_entry(entry) or not _stays_inside(name):
            raise CheckpointError(f"{CHECKSUMS} is not readable (entry {name!r:.80})")
        sums[name] = (entry[0], entry[1])
    return sums


def _is_entry(entry: Any) -> bool:
    return (
        isinstance(entry, list)
        and len(entry) == 2
        and type(entry[0]) is int
        and isinstance(entry[1], str)
    )


def _stays_inside(name: str) -> bool:
    path = PurePosixPath(name)
    return bool(name) and "\0" not in name and not path.is_absolute() and ".." not in path.parts


def problems_of(
    directory: Path, needed: Iterable[Path] | None = None, *, quick: bool = False
) -> list[str]:
    """What is wrong with a checkpoint that has checksums; [] also if it has none.

    `needed`: only these files, each of which must be listed. `quick` compares sizes alone.
    """
    try:
        sums = read_checksums(directory)
    except CheckpointError as error:
        return [str(error)]
    if sums is None:
        return []
    if needed is None:
        names = list(sums)
    else:
        names = [path.relative_to(directory).as_posix() for path in needed]
    problems = []
    for name in names:
        file = directory / name
        if name not in sums:
            problems.append(f"{name} is not listed in {CHECKSUMS}")
            continue
        size, expected = sums[name]
        if not file.is_file():
            problems.append(f"{name} is missing")
        elif file.stat().st_size != size:
            problems.append(f"{name} has {file.stat().st_size} bytes instead of {size}")
        elif not quick and checksum(file) != expected:
            problems.append(f"{name} does not match its checksum")
    return problems


# Files that only our own training writes: beside them, checksums.json cannot be missing.
_OURS = ("layout.json", "universal.json")


def is_training_checkpoint(directory: Path) -> bool:
    """Whether train.py or the reshard tool wrote this global_stepN."""
    if any((directory / name).is_file() for name in _OURS):
        return True
    return any(directory.glob("rng_rank_*.pt"))
