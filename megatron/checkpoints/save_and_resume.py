"""Saving and resuming a run through DeepSpeed."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist

from megatron.atomic_files import write_text
from megatron.checkpoints.safe_files import SafeCheckpointEngine, safe_load
from megatron.checkpoints.store import CheckpointStore, tag_of
from megatron.checkpoints.universal import is_universal
from megatron.checkpoints.universal_engine import load_universal, load_zero3_weights
from megatron.errors import CheckpointError
from megatron.mpu import ParallelState
from megatron.mpu.job import set_seeds
from megatron.neox_arguments.deepspeed_config import accumulation_dtype, zero_stage_in_effect

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
    schedule = not fresh
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


# The layout that a checkpoint was written under: DeepSpeed's own files fit no other.

LAYOUT = "layout.json"


def layout_of(args: NeoXArgs, world_size: int) -> dict[str, Any]:
    """What must be equal for DeepSpeed's own files to fit."""
    plan = args.batch_plan(world_size)
    zero = zero_stage_in_effect(args)
    return {
        "pipe_parallel_size": args.parallel.pipe_parallel_size,
        "model_parallel_size": args.parallel.model_parallel_size,
        "zero_stage": zero,
        "precision": args.optimization.precision or "fp32",
        # DeepSpeed keeps bf16's fp32 sums in an optimizer, and files, of another kind.
        "grad_accum_dtype": accumulation_dtype(args) if zero == 1 else None,
        # Without ZeRO every replica holds everything, and their number is free.
        "data_parallel_size": plan.data_parallel_size if zero else None,
        "world_size": world_size,
    }


def write_layout(directory: Path, args: NeoXArgs) -> None:
    """Beside each checkpoint: the layout that its files were written under."""
    text = json.dumps(layout_of(args, dist.get_world_size()), indent=1)
    write_text(directory / LAYOUT, text)


def check_layout(directory: Path, args: NeoXArgs) -> None:
    """A clear error, with the command to run, instead of a failed load."""
    try:
        saved = json.loads((directory / LAYOUT).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return  # written by GPT-NeoX or by an earlier version
    now = layout_of(args, dist.get_world_size())
    differing = [
        f"{key} {saved.get(key)} -> {value}"
        for key, value in now.items()
        if key != "world_size" and saved.get(key, value) != value
    ]
    if differing:
        raise CheckpointError(
            f"{directory} was written under another layout ({', '.join(differing)}). Run\n"
            f"  python tools/reshard_checkpoint.py {directory.parent} NEW_DIRECTORY\n"
            "and set `load: NEW_DIRECTORY`; a universal checkpoint resumes under any layout."
        )


# Random states as plain data, so that they can be saved and read back safely.


def rng_state() -> dict[str, Any]:
    """The state of every stream of random numbers in this process."""
    legacy: Any = np.random.get_state()
    name, keys, position, has_gauss, gauss = legacy
    version, internal, next_gauss = random.getstate()
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "numpy": [name, torch.from_numpy(keys.astype(np.int64)), position, has_gauss, gauss],
        "python": [version, list(internal), next_gauss],
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_rng_state(state: dict[str, Any]) -> None:
    """Continue every stream from a saved state."""
    torch.set_rng_state(state["torch"])
    name, keys, position, has_gauss, gauss = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), position, has_gauss, gauss))
    version, internal, next_gauss = state["python"]
    random.setstate((version, tuple(internal), next_gauss))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
