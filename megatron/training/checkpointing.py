"""Saving and resuming a run through DeepSpeed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from megatron.atomic_files import write_text
from megatron.checkpoints.universal import is_universal
from megatron.mpu import ParallelState
from megatron.training.checkpoint_store import CheckpointStore, tag_of
from megatron.training.distributed import set_seeds
from megatron.training.engine import zero_stage_in_effect
from megatron.training.rng import rng_state, set_rng_state
from megatron.training.safe_files import (
    CheckpointError,
    SafeCheckpointEngine,
    safe_load,
)
from megatron.training.saved_layout import check_layout, write_layout
from megatron.training.universal import load_universal, load_zero3_weights

if TYPE_CHECKING:
    from megatron.neox_arguments import NeoXArgs


@dataclass(frozen=True)
class Resumed:
    """Where a run continues."""

    step: int
    consumed_samples: int


def together(action: Callable[[], object], doing: str, advice: str) -> None:
    """Run `action` on every rank; if it fails on some, all raise the same error, and none waits."""
    problem: str | None = None
    cause: Exception | None = None
    try:
        action()
    except (OSError, RuntimeError, CheckpointError) as error:
        problem, cause = f"{type(error).__name__}: {error}", error
    problems: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(problems, problem)
    failed = [f"rank {rank}: {text}" for rank, text in enumerate(problems) if text is not None]
    if failed:
        raise CheckpointError(f"{doing} failed ({'; '.join(failed)}). {advice}") from cause


def save_checkpoint(
    engine: Any, store: CheckpointStore, args: NeoXArgs, step: int, consumed_samples: int
) -> Path:
    """Write checkpoint `step` on all ranks; it becomes visible only when it is complete."""
    main = dist.get_rank() == 0
    doing = f"writing checkpoint {tag_of(step)} to {store.directory}"
    advice = (
        "Earlier checkpoints are untouched: free disk space or set `save` to another directory, "
        "then resume."
    )
    try:
        together(lambda: store.prepare(step) if main else None, doing, advice)
        together(lambda: _write_share(engine, store, args, step, consumed_samples), doing, advice)
        together(lambda: store.commit(step) if main else None, doing, advice)
    except CheckpointError:
        if main:
            store.discard(step)
        raise
    if main:  # only now that the newer one is complete
        store.prune(args.checkpoint.keep_last_n_checkpoints)
    dist.barrier()
    return store.path(step)


def _write_share(
    engine: Any, store: CheckpointStore, args: NeoXArgs, step: int, consumed_samples: int
) -> None:
    """This rank's files: DeepSpeed's, the random states, and (on rank 0) the config."""
    staging, tag = store.staging, tag_of(step)
    client_state = {"iteration": step, "consumed_samples": consumed_samples}
    files: SafeCheckpointEngine = engine.checkpoint_engine
    files.begin()
    engine.save_checkpoint(str(staging), tag=tag, client_state=client_state, save_latest=False)
    rank = dist.get_rank()
    if not args.checkpoint.no_save_rng:
        files.save(rng_state(), str(staging / tag / f"rng_rank_{rank:05d}.pt"))
    if rank == 0:
        write_configs(staging / tag / "configs", args)
        write_layout(staging / tag, args)
    files.finish()


def write_configs(directory: Path, args: NeoXArgs) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    for name, text in args.sources.items():
        write_text(directory / Path(name).name, text)
    write_text(directory / "resolved.yml", args.to_yaml())


def find_checkpoint(store: CheckpointStore, iteration: int | None) -> int | None:
    """The step to load: the one asked for, else the newest; None if there is nothing yet."""
    if iteration is None:
        return store.newest()
    if not store.path(iteration).is_dir():
        there = ", ".join(map(str, store.steps())) or "none"
        raise CheckpointError(
            f"iteration = {iteration}: {store.path(iteration)} does not exist; "
            f"complete checkpoints: {there}"
        )
    return iteration


def resume(
    engine: Any,
    store: CheckpointStore,
    args: NeoXArgs,
    step: int,
    parallel: ParallelState,
) -> Resumed:
    """Load weights, optimizer, schedule and random states; the data position follows from them."""
    _verify_together(store, step)
    options = args.checkpoint
    fresh = options.finetune
    optimizer = not (options.no_load_optim or fresh)
    schedule = not (args.optimization.override_lr_scheduler or fresh)
    if is_universal(store.path(step)):
        progress = load_universal(
            engine, store.path(step), args, parallel.tp, optimizer=optimizer, schedule=schedule
        )
    elif zero_stage_in_effect(args) == 3 and not optimizer:
        check_layout(store.path(step), args)
        progress = load_zero3_weights(
            engine, store.path(step), args, parallel.tp, schedule=schedule
        )
    else:
        check_layout(store.path(step), args)
        _, progress = engine.load_checkpoint(
            str(store.directory),
            tag=tag_of(step),
            load_optimizer_states=optimizer,
            load_lr_scheduler_states=schedule,
        )
    if progress is None:
        raise CheckpointError(f"{store.path(step)}: DeepSpeed found no model state in it")
    if fresh:
        return Resumed(0, 0)
    if not options.no_load_rng:
        _load_rng(store.path(step), args.runtime.seed + step, parallel)
    return Resumed(int(progress["iteration"]), int(progress["consumed_samples"]))


def _verify_together(store: CheckpointStore, step: int) -> None:
    """Rank 0 reads the checksums; every rank learns of damage."""
    message: list[str | None] = [None]
    if dist.get_rank() == 0:
        try:
            store.verify(step)
        except (CheckpointError, OSError) as error:
            message = [str(error)]
    dist.broadcast_object_list(message, src=0)
    if message[0] is not None:
        raise CheckpointError(message[0])


def clean_up(store: CheckpointStore) -> None:
    """Remove what a killed run left half-written or half-deleted; before the first step."""
    if dist.get_rank() == 0:
        store.clean()
    dist.barrier()


def _load_rng(directory: Path, fresh_seed: int, parallel: ParallelState) -> None:
    """Continue the random streams; under another number of ranks, start new ones."""
    path = directory / f"rng_rank_{dist.get_rank():05d}.pt"
    if path.is_file():
        set_rng_state(safe_load(path))
    else:
        set_seeds(fresh_seed, parallel)
