"""Where checkpoints live: complete or invisible.

save/.incomplete/global_step20/...    written and synced here by all ranks,
save/global_step20/                   renamed when complete, with checksums.json inside,
save/latest                           replaced last.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable
from pathlib import Path

from megatron.atomic_files import sync_directory, write_text
from megatron.checkpoints.checksums import (
    CHECKSUMS,
    Sums,
    is_training_checkpoint,
    problems_of,
    write_checksums,
)
from megatron.errors import CheckpointError

__all__ = ["CheckpointStore", "tag_of"]

TAG = re.compile(r"global_step(0|[1-9]\d{0,17})")
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
        """The step to load: the one asked for, else the newest; None if there is nothing yet."""
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

    def prepare(self, step: int) -> Path:
        """An empty place to write checkpoint `step` to; returns the staging directory."""
        shutil.rmtree(self.staging / tag_of(step), ignore_errors=True)
        (self.staging / tag_of(step)).mkdir(parents=True)
        return self.staging

    def commit(self, step: int, sums: Sums | None = None) -> Path:
        """Turn what was staged into a checkpoint, then move `latest`.

        `sums`: of files whose checksums the ranks have computed as they wrote them.
        """
        staged, final = self.staging / tag_of(step), self.path(step)
        write_checksums(staged, sums)
        for directory in {p.parent for p in staged.rglob("*") if p.is_file()}:
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

    def verify(self, step: int, needed: Iterable[Path] | None = None) -> bool:
        """Compare files (all, or those `needed`) with their checksums; the error names the damage.

        False: there are no checksums, and there need be none, because the checkpoint is another
        program's or an older conversion.
        """
        root = self.path(step)
        problems = self._problems(step, needed)
        if not problems:
            return (root / CHECKSUMS).is_file()
        others = [other for other in self.steps() if other != step and not self._problems(other)]
        offer = (
            f"The newest complete checkpoint before it is {tag_of(others[-1])}: "
            f"add --set iteration={others[-1]} to resume from it."
            if others
            else "No other complete checkpoint is there."
        )
        raise CheckpointError(f"{root} is damaged: {'; '.join(problems)}. {offer}")

    def _problems(self, step: int, needed: Iterable[Path] | None = None) -> list[str]:
        root = self.path(step)
        if not root.is_dir():
            return [f"{root.name} does not exist"]
        if is_training_checkpoint(root) and not (root / CHECKSUMS).is_file():
            return [f"{CHECKSUMS} is missing, so that nothing in it can be proven"]
        return problems_of(root, needed)
