"""Saving a run, by all ranks at once.

`save_run` writes the engine's files, which fit the layout that wrote them; `save_universal` writes
whole tensors, which fit any.
"""

from __future__ import annotations

import errno
import json
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.atomic_files import write_text
from megatron.backends.interface import STEP, TrainingEngine
from megatron.checkpoints.resuming import Resumed
from megatron.checkpoints.run_state import rng_file, rng_state, write_configs, write_layout
from megatron.checkpoints.safe_files import TrainingFiles
from megatron.checkpoints.sharding import Sharding, canonical_names
from megatron.checkpoints.store import CheckpointStore, Sums, checksum, tag_of
from megatron.checkpoints.universal import (
    INDEX,
    LATEST,
    MODEL_STATES,
    OPTIMIZER,
    PARAMETERS,
    described,
    model_states,
    optimizer_state,
    other_names,
)
from megatron.errors import CheckpointError
from megatron.mpu.collectives import ParallelState, TensorParallel, gather_objects
from megatron.neox_arguments import NeoXArgs
from megatron.neox_arguments.model_keys import ModelArgs

T = TypeVar("T")
NO_LINKS_HERE = (errno.EPERM, errno.ENOTSUP, errno.ENOSYS)  # some file systems


def save_run(
    engine: TrainingEngine,
    store: CheckpointStore,
    args: NeoXArgs,
    step: int,
    progress: dict[str, int],
    *,
    background: bool = False,
    data: dict[str, Any] | None = None,
) -> Save:
    """Checkpoint `step` of a training, to be completed by all ranks after the same steps.

    `data`: sizes and hashes of what it was trained on, as rank 0 found them at the start.
    """
    tag, files = tag_of(step), _files_of(engine)
    staged = store.staging / tag

    def write_files() -> None:
        engine.save(store.staging, tag, progress)
        if not args.checkpoint.no_save_rng:
            files.save(rng_state(), str(rng_file(staged)))
        if _is_main():
            write_configs(staged / "configs", args)
            write_layout(staged, args.parallel, args.optimization, data)

    keep = args.checkpoint.keep_last_n_checkpoints
    return Save(files, store, step, write_files, background=background, keep=keep)


def save_universal(
    engine: TrainingEngine,
    store: CheckpointStore,
    args: NeoXArgs,
    at: Resumed,
    parallel: ParallelState,
    vocab_size: int,
    data: dict[str, Any] | None = None,
) -> None:
    """A universal checkpoint of the engine's state; `vocab_size` is that before padding.

    `data`: sizes and hashes of what it was trained on.
    """
    staged = store.staging / tag_of(at.step)
    progress = {
        "iteration": at.step,
        "consumed_samples": at.consumed_samples,
        "schedule": engine.scheduler.state_dict(),
        "skipped_steps": engine.skipped_steps,
        "vocab_size": vocab_size,
    }

    def write_files() -> None:
        _write_whole(engine, staged, parallel, args.model, progress, data)
        if _is_main():
            write_configs(staged / "configs", args)

    Save(_files_of(engine), store, at.step, write_files).complete()
    if _is_main():
        write_text(store.directory / LATEST, tag_of(at.step))
    dist.barrier()


class Save:
    """One checkpoint, written by all ranks, invisible until all of them `complete` it.

    Making it calls `write_files` on every rank, which saves through `files`. With `background`
    (`async_save`) it takes copies, and a thread of each rank writes them while training continues.
    `keep`: how many checkpoints to keep; older ones are deleted after this one was verified.
    """

    def __init__(
        self,
        files: TrainingFiles,
        store: CheckpointStore,
        step: int,
        write_files: Callable[[], None],
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
            write_files()
            files.finish(self._staged)

        self._on_all_ranks(lambda: store.prepare(step) if _is_main() else None)
        self._on_all_ranks(take)
        self._thread.start()

    @property
    def is_written(self) -> bool:
        """Whether this rank has nothing left to write."""
        return not self._thread.is_alive()

    def complete(self) -> Path:
        """Wait for all ranks, then make the checkpoint visible and delete older ones."""
        shares = self._on_all_ranks(self._share)
        sums = {name: entry for share in shares for name, entry in share.items()}
        self._on_all_ranks(lambda: self.store.commit(self.step, sums) if _is_main() else None)
        if _is_main():  # only now that the newer one is complete and verified
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

    def _on_all_ranks(self, action: Callable[[], T]) -> list[T]:
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
        answers = gather_objects((problem, result))
        failed = [f"rank {rank}: {text}" for rank, (text, _) in enumerate(answers) if text]
        if failed:
            if _is_main():
                self.store.discard(self.step)
            raise CheckpointError(
                f"writing checkpoint {tag_of(self.step)} to {self.store.directory} failed "
                f"({'; '.join(failed)}). Earlier checkpoints are untouched: free disk space or "
                "choose another directory (`save` in the config), then run the same again."
            ) from cause
        return [cast(T, value) for _, value in answers]


def _is_main() -> bool:
    return dist.get_rank() == 0


def _files_of(engine: TrainingEngine) -> TrainingFiles:
    assert isinstance(engine.files, TrainingFiles)
    return engine.files


def _write_whole(
    engine: TrainingEngine,
    directory: Path,
    parallel: ParallelState,
    model: ModelArgs,
    progress: dict[str, Any],
    data: dict[str, Any] | None,
) -> None:
    """Write this rank's share of a universal checkpoint into `directory` (a global_stepN).

    A failed write is raised in `finish`: between the files, all ranks must reach the collectives.
    """
    sharding = Sharding.of(model, neox=False)
    names, files = canonical_names(engine.module), _files_of(engine)
    writes = parallel.dp_rank == 0 and parallel.tp.rank == 0
    step: Tensor | None = None
    for parameter, states in engine.read_states():
        name = names[parameter]
        step = states.get(STEP)
        whole = {key: _joined(name, value, sharding, parallel.tp) for key, value in states.items()}
        # A tied embedding is on the last stage too.
        is_copy = name.startswith("0.") and parallel.pp_rank > 0
        if writes and not is_copy:
            folder = directory / PARAMETERS / name
            files.makedirs(str(folder), exist_ok=True)
            for key, value in whole.items():
                content = described(name, value, sharding) if value.dim() else value
                files.save(content, str(folder / f"{key}.pt"))
            others = other_names(name, tied=not model.no_weight_tying)
            files.attempt(partial(_link, folder, others))
    if _is_main():
        groups = engine.optimizer.param_groups
        files.save(optimizer_state(groups, step), str(directory / PARAMETERS / OPTIMIZER))
        for file in MODEL_STATES:
            files.save(model_states(progress), str(directory / file))
        text = json.dumps({"format": 1, **progress, "data": data}, indent=1)
        files.attempt(lambda: write_text(directory / INDEX, text))


def _joined(name: str, value: Tensor, sharding: Sharding, tp: TensorParallel) -> Tensor:
    """All tensor-parallel ranks' slices as one; scalars (the step count) as they are."""
    if tp.size == 1 or value.dim() == 0:
        return value
    shards = [torch.empty_like(value) for _ in range(tp.size)]
    dist.all_gather(shards, value.contiguous(), group=tp.group)
    return sharding.merge(name, shards).contiguous()


def _link(folder: Path, others: list[str]) -> None:
    """Links for DeepSpeed's loader, which looks for a folder under the name in its module."""
    try:
        for other in others:
            (folder.parent / other).symlink_to(folder.name, target_is_directory=True)
    except OSError as error:
        if error.errno not in NO_LINKS_HERE:
            raise
