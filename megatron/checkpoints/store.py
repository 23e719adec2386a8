"""Where checkpoints live: complete or invisible.

save/.incomplete/global_step20/...    written and synced here by all ranks,
save/global_step20/                   renamed when complete, with checksums.json inside,
save/latest                           replaced last.
"""

from __future__ import annotations

import json
import re
import shutil
import zlib
from pathlib import Path

from megatron.atomic_files import sync_directory, write_text
from megatron.errors import CheckpointError

TAG = re.compile(r"global_step(\d+)$")
CHECKSUMS = "checksums.json"


def tag_of(step: int) -> str:
    return f"global_step{step}"


def checksum(path: Path) -> str:
    """CRC-32 of a file's content: it guards against damage, not against forgery."""
    value = 0
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            value = zlib.crc32(block, value)
    return f"{value:08x}"


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
        """The step that `latest` names, or the newest complete one if `latest` is missing."""
        latest = self.directory / "latest"
        if latest.is_file():
            match = TAG.fullmatch(latest.read_text(encoding="utf-8").strip())
            if match and self.path(int(match.group(1))).is_dir():
                return int(match.group(1))
        steps = self.steps()
        return steps[-1] if steps else None

    def prepare(self, step: int) -> Path:
        """An empty place to write checkpoint `step` to; returns the staging directory."""
        shutil.rmtree(self.staging / tag_of(step), ignore_errors=True)
        (self.staging / tag_of(step)).mkdir(parents=True)
        return self.staging

    def commit(self, step: int) -> Path:
        """Turn what was staged into a checkpoint, then move `latest`."""
        staged, final = self.staging / tag_of(step), self.path(step)
        files = sorted(p for p in staged.rglob("*") if p.is_file() and p.name != CHECKSUMS)
        sums = {str(p.relative_to(staged)): [p.stat().st_size, checksum(p)] for p in files}
        write_text(staged / CHECKSUMS, json.dumps(sums, indent=1))
        for directory in {p.parent for p in files}:
            sync_directory(directory)
        replaced = self._set_aside(step) if final.exists() else None
        staged.rename(final)
        sync_directory(self.directory)
        write_text(self.directory / "latest", tag_of(step))
        if replaced is not None:
            shutil.rmtree(replaced, ignore_errors=True)
        return final

    def discard(self, step: int) -> None:
        """Forget a checkpoint that could not be written."""
        shutil.rmtree(self.staging / tag_of(step), ignore_errors=True)

    def prune(self, keep: int | None) -> list[int]:
        """Delete all but `keep` checkpoints, never the one `latest` names; returns their steps."""
        if not keep:
            return []
        newest = self.newest()
        others = [step for step in self.steps() if step != newest]
        doomed = others[: max(len(others) + 1 - keep, 0)]
        for step in doomed:
            shutil.rmtree(self._set_aside(step), ignore_errors=True)
        return doomed

    def clean(self) -> None:
        """Remove what a killed run left half-written or half-deleted."""
        shutil.rmtree(self.staging, ignore_errors=True)
        for leftover in self.directory.glob(".deleted_global_step*"):
            shutil.rmtree(leftover, ignore_errors=True)
        for leftover in self.directory.glob(".*.tmp*"):
            leftover.unlink(missing_ok=True)

    def _set_aside(self, step: int) -> Path:
        """Rename before deleting: a deletion cut short leaves nothing like a checkpoint."""
        trash = self.directory / f".deleted_{tag_of(step)}"
        shutil.rmtree(trash, ignore_errors=True)
        self.path(step).rename(trash)
        return trash

    def verify(self, step: int) -> None:
        """Compare every file with its checksum; the error names the damage and what is left."""
        problems = self._problems(step)
        if not problems:
            return
        others = [other for other in self.steps() if other != step and not self._problems(other)]
        offer = (
            f"The newest complete checkpoint before it is {tag_of(others[-1])}: "
            f"add --set iteration={others[-1]} to resume from it."
            if others
            else "No other complete checkpoint is there."
        )
        listing = "; ".join(problems)
        raise CheckpointError(f"{self.path(step)} is damaged: {listing}. {offer}")

    def _problems(self, step: int) -> list[str]:
        root = self.path(step)
        if not root.is_dir():
            return [f"{root.name} does not exist"]
        sums_file = root / CHECKSUMS
        if not sums_file.is_file():
            return []  # written by GPT-NeoX or the official code
        try:
            sums = json.loads(sums_file.read_text(encoding="utf-8"))
        except ValueError:
            return [f"{CHECKSUMS} is not readable"]
        problems = []
        for name, (size, expected) in sums.items():
            file = root / name
            if not file.is_file():
                problems.append(f"{name} is missing")
            elif file.stat().st_size != size:
                problems.append(f"{name} has {file.stat().st_size} bytes instead of {size}")
            elif checksum(file) != expected:
                problems.append(f"{name} does not match its checksum")
        return problems
