"""Saving a run through DeepSpeed: all ranks write, one makes it visible."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch.distributed as dist

from megatron.atomic_files import write_text
from megatron.checkpoints.resuming import rng_file, rng_state, write_layout
from megatron.checkpoints.safe_files import SafeCheckpointEngine
from megatron.checkpoints.saved_config import RESOLVED
from megatron.checkpoints.store import CheckpointStore, Sums, checksum, tag_of
from megatron.errors import CheckpointError

if TYPE_CHECKING:
    from megatron.neox_arguments import NeoXArgs

T = TypeVar("T")


class Save:
    """One checkpoint, written by all ranks, that is none until all of them `complete` it.

    Making it calls `hand_over` on every rank, which saves through `files`. With `background`
    (`async_save`) that takes copies, and a thread of each rank writes them while training goes on.
    `keep`: how many checkpoints stay; those that go are deleted when all of this one was read back.
    """

    def __init__(
        self,
        files: SafeCheckpointEngine,
        store: CheckpointStore,
        step: int,
        hand_over: Callable[[], None],
        *,
        background: bool = False,
        keep: int | None = None,
    ) -> None:
        self.store, self.step = store, step
        self._files, self._keep = files, keep
        self._staged = store.staging / tag_of(step)
        self._sums: Sums = {}
        self._problem: Exception | None = None
        self._abandoned = False
        self._thread = threading.Thread(target=self._write, name="checkpoint", daemon=True)

        def take() -> None:
            files.begin(later=background)
            hand_over()
            files.finish(self._staged)

        self._together(lambda: store.prepare(step) if _is_main() else None)
        self._together(take)
        self._thread.start()

    @property
    def is_written(self) -> bool:
        """Whether this rank has nothing left to write."""
        return not self._thread.is_alive()

    def complete(self) -> Path:
        """Wait for all ranks, then make the checkpoint visible and delete older ones."""
        shares = self._together(self._share)
        sums = {name: entry for share in shares for name, entry in share.items()}
        self._together(lambda: self.store.commit(self.step, sums) if _is_main() else None)
        if _is_main():  # only now that the newer one is complete, and proven
            self.store.prune(self._keep)
        dist.barrier()
        return self.store.path(self.step)

    def abandon(self) -> None:
        """Stop writing; what is there is removed when the run is started again."""
        self._abandoned = True
        self._thread.join()

    def _write(self) -> None:
        try:
            self._files.write_kept(lambda: not self._abandoned)
            self._sums = self._files.finish(self._staged)
            for name, (_, expected) in self._sums.items() if self._keep else ():
                if checksum(self._staged / name) != expected:
                    raise CheckpointError(f"{name} reads back differently from what was written")
        except Exception as error:  # for the step that comes to `complete`
            self._problem = error

    def _share(self) -> Sums:
        self._thread.join()
        if self._problem is not None:
            raise self._problem
        return self._sums

    def _together(self, action: Callable[[], T]) -> list[T]:
        """Run `action` on every rank; the results of all.

        If it fails on some, all raise the same error, none waits, and nothing is left.
        """
        problem: str | None = None
        cause: Exception | None = None
        result: T | None = None
        try:
            result = action()
        except (OSError, RuntimeError, CheckpointError) as error:
            problem, cause = f"{type(error).__name__}: {error}", error
        answers: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(answers, (problem, result))
        failed = [f"rank {rank}: {text}" for rank, (text, _) in enumerate(answers) if text]
        if failed:
            if _is_main():
                self.store.discard(self.step)
            raise CheckpointError(
                f"writing checkpoint {tag_of(self.step)} to {self.store.directory} failed "
                f"({'; '.join(failed)}). Earlier checkpoints are untouched: free disk space or "
                "choose another directory (`save` in the config), then run the same again."
            ) from cause
        return [value for _, value in answers]


def _is_main() -> bool:
    return dist.get_rank() == 0


def save_run(
    engine: Any,
    store: CheckpointStore,
    args: NeoXArgs,
    step: int,
    progress: dict[str, int],
    *,
    background: bool = False,
) -> Save:
    """Checkpoint `step` of a training, to be completed by all ranks after the same steps."""
    tag = tag_of(step)
    staged = store.staging / tag

    def hand_over() -> None:
        engine.save_checkpoint(
            str(store.staging), tag=tag, client_state=dict(progress), save_latest=False
        )
        if not args.checkpoint.no_save_rng:
            engine.checkpoint_engine.save(rng_state(), str(rng_file(staged)))
        if _is_main():
            write_configs(staged / "configs", args)
            write_layout(staged, args)

    keep = args.checkpoint.keep_last_n_checkpoints
    files = engine.checkpoint_engine
    return Save(files, store, step, hand_over, background=background, keep=keep)


def write_configs(directory: Path, args: NeoXArgs) -> None:
    """The user's files as they are, and what they came to."""
    directory.mkdir(parents=True, exist_ok=True)
    for name, text in args.sources.items():
        write_text(directory / Path(name).name, text)
    write_text(directory / RESOLVED, args.to_yaml())
