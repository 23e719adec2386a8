"""Checkpoint directories: a checkpoint is complete or invisible.

save/.incomplete/global_step20/...    written and synced here by all ranks,
save/global_step20/                   renamed when complete, with checksums.json inside,
save/latest                           replaced last.

Beside it: the checksums.
"""

from __future__ import annotations

import json
import shutil
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

from megatron.atomic_files import CHECKSUMS, TEMPORARY, read_json, sync_directory, write_text
from megatron.errors import CheckpointError
from megatron.neox_arguments.allowed_code import TAG

MAX_LATEST = 4096


def tag_of(step: int) -> str:
    return f"global_step{step}"


class CheckpointStore:
    """The checkpoints of one run directory. One rank writes, all ranks may read."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    @property
    def staging(self) -> Path:
        return self.directory / ".incomplete"

    def path(self, step: int) -> Path:
        return self.directory / tag_of(step)

    def steps(self) -> list[int]:
        """Steps of the complete checkpoints, oldest first."""
        if not self.directory.is_dir():
            return []
        found = (TAG.fullmatch(entry.name) for entry in self.directory.iterdir() if entry.is_dir())
        return sorted(int(match.group(1)) for match in found if match)

    def newest(self) -> int | None:
        """The step that `latest` names, or the newest complete one if there is no `latest`."""
        latest = self.directory / "latest"
        steps = self.steps()
        if not latest.is_file():
            return steps[-1] if steps else None
        tag = latest.read_bytes()[:MAX_LATEST].decode("utf-8", errors="replace").strip()
        match = TAG.fullmatch(tag)
        if match and int(match.group(1)) in steps:
            return int(match.group(1))
        raise CheckpointError(
            f"{latest}: names {tag[:80]!r}, which is not there ({self._listing(steps)}). Give "
            "the step (--iteration N), or delete the file to take the newest."
        )

    def find(self, iteration: int | None) -> int | None:
        """The step to load: the one given, else the newest; None if there is nothing yet."""
        if iteration is None:
            return self.newest()
        if not self.path(iteration).is_dir():
            raise CheckpointError(
                f"iteration = {iteration}: {self.path(iteration)} does not exist "
                f"({self._listing(self.steps())})"
            )
        return iteration

    @staticmethod
    def _listing(steps: list[int]) -> str:
        return f"complete checkpoints: {', '.join(map(str, steps)) or 'none'}"

    def prepare(self, step: int) -> None:
        """An empty place to write checkpoint `step` to."""
        self.discard(step)
        (self.staging / tag_of(step)).mkdir(parents=True)

    def commit(self, step: int, sums: Sums | None = None) -> Path:
        """Make the staged directory a complete checkpoint, then update `latest`.

        `sums`: of files whose checksums the ranks have computed as they wrote them.
        """
        staged, final = self.staging / tag_of(step), self.path(step)
        write_checksums(staged, sums)
        for path in [staged, *staged.rglob("*")]:
            if path.is_dir() and not path.is_symlink():
                sync_directory(path)
        replaced = self._set_aside(step) if final.exists() else None
        staged.rename(final)
        sync_directory(self.directory)
        write_text(self.directory / "latest", tag_of(step))
        if replaced is not None:
            shutil.rmtree(replaced, ignore_errors=True)
        return final

    def discard(self, step: int) -> None:
        """Delete the staged files of a checkpoint that could not be written."""
        shutil.rmtree(self.staging / tag_of(step), ignore_errors=True)

    def prune(self, keep: int | None) -> list[int]:
        """Delete all but `keep` checkpoints, never the one `latest` names; returns their steps."""
        if not keep:
            return []
        newest = self.newest()
        others = [step for step in self.steps() if step != newest]
        removed = others[: max(len(others) + 1 - keep, 0)]
        for step in removed:
            shutil.rmtree(self._set_aside(step), ignore_errors=True)
        return removed

    def clean(self) -> None:
        """Remove what a killed run left half-written or half-deleted."""
        shutil.rmtree(self.staging, ignore_errors=True)
        for leftover in self.directory.glob(".deleted_global_step*"):
            match = TAG.fullmatch(leftover.name.removeprefix(".deleted_"))
            whole = (leftover / CHECKSUMS).is_file() and not problems_of(leftover)
            if match and whole and not (former := self.path(int(match[1]))).exists():
                leftover.rename(former)  # killed before its successor had the name
                sync_directory(self.directory)
            shutil.rmtree(leftover, ignore_errors=True)
        for leftover in self.directory.glob(".*.tmp"):
            if TEMPORARY.fullmatch(leftover.name):
                leftover.unlink(missing_ok=True)

    def _set_aside(self, step: int) -> Path:
        """Rename before deleting: a deletion cut short leaves nothing like a checkpoint."""
        renamed = self.directory / f".deleted_{tag_of(step)}"
        shutil.rmtree(renamed, ignore_errors=True)
        self.path(step).rename(renamed)
        sync_directory(self.directory)
        return renamed

    def verify(self, step: int, needed: Iterable[Path] | None = None) -> bool:
        """Compare files (all, or those `needed`) with their checksums; the error names the damage.

        False: there are no checksums, and there need be none, because the checkpoint is another
        program's or an older conversion.
        """
        root = self.path(step)
        problems = self._problems(step, needed)
        if not problems:
            return (root / CHECKSUMS).is_file()
        complete = [other for other in self.steps() if other != step and not self._problems(other)]
        earlier = [other for other in complete if other < step]
        offer = "No other complete checkpoint is there."
        if complete:
            offered, which = (earlier[-1], " before it") if earlier else (complete[-1], "")
            offer = (
                f"The newest complete checkpoint{which} is {tag_of(offered)}: "
                f"add --set iteration={offered} to resume from it."
            )
        raise CheckpointError(f"{root} is damaged: {'; '.join(problems)}. {offer}")

    def _problems(self, step: int, needed: Iterable[Path] | None = None) -> list[str]:
        root = self.path(step)
        if not root.is_dir():
            return [f"{root.name} does not exist"]
        if is_training_checkpoint(root) and not (root / CHECKSUMS).is_file():
            return [f"{CHECKSUMS} is missing, so its files cannot be verified"]
        return problems_of(root, needed)


# checksums.json: the files of a checkpoint, with their sizes and CRC-32.
#
# CRC-32 detects damage, not forgery: `safe_files` decides what a file may contain.
# Every rank computes its files' checksums while it writes them.

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
    if unseen := sorted(known.keys() - sums.keys()):
        raise CheckpointError(
            f"{directory}: {len(unseen)} files that ranks have written are not here "
            f"({', '.join(unseen)[:200]}). `save` must be a directory that every host shares."
        )
    write_text(directory / CHECKSUMS, json.dumps(sums, indent=1))


def read_checksums(directory: Path) -> Sums | None:
    """The listed files; None if there is no list, an error if it cannot be used."""
    path = directory / CHECKSUMS
    if not path.is_file():
        return None
    content = read_json(path) if path.stat().st_size <= MAX_BYTES else None
    if not content:
        raise CheckpointError(f"{CHECKSUMS} is not readable, or lists no files")
    sums: Sums = {}
    for name, entry in content.items():
        match entry:
            case [int(size), str(crc)] if _stays_inside(name):
                sums[name] = (size, crc)
            case _:
                raise CheckpointError(f"{CHECKSUMS} is not readable (entry {name!r:.80})")
    return sums


def _stays_inside(name: str) -> bool:
    path = PurePosixPath(name)
    return bool(name) and "\0" not in name and not path.is_absolute() and ".." not in path.parts


def problems_of(directory: Path, needed: Iterable[Path] | None = None) -> list[str]:
    """What is wrong with a checkpoint that has checksums; [] also if it has none.

    `needed`: only these files, each of which must be listed.
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
        elif checksum(file) != expected:
            problems.append(f"{name} does not match its checksum")
    return problems


# Files that only our own training writes: beside them, checksums.json cannot be missing.
_OURS = ("layout.json", "universal.json", "rng_rank_*.pt")


def is_training_checkpoint(directory: Path) -> bool:
    """Whether train.py or the reshard tool wrote this global_stepN."""
    return any(file.is_file() for pattern in _OURS for file in directory.glob(pattern))
