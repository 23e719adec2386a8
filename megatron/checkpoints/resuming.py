"""Resuming a run: weights, optimizer, schedule, random states and the place in the data."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist

from megatron.atomic_files import write_text
from megatron.checkpoints.safe_files import load_mapping, read_object
from megatron.checkpoints.store import CheckpointStore, tag_of
from megatron.checkpoints.universal import is_universal
from megatron.checkpoints.universal_engine import load_whole
from megatron.errors import CheckpointError, KerpleError
from megatron.mpu.collectives import ParallelState
from megatron.mpu.job import Ranks, set_seeds

if TYPE_CHECKING:
    from megatron.neox_arguments import NeoXArgs


@dataclass(frozen=True)
class Resumed:
    """Where a run continues."""

    step: int
    consumed_samples: int

    def samples_at(self, step: int, batch_size: int) -> int:
        """Samples consumed when the run has come to `step`."""
        return self.consumed_samples + (step - self.step) * batch_size


DEEPSPEED_COUNTERS = ("global_steps", "global_samples", "micro_steps", "skipped_steps")
"""What DeepSpeed takes from a checkpoint unseen."""


def resume(
    engine: Any,
    store: CheckpointStore,
    args: NeoXArgs,
    step: int,
    parallel: ParallelState,
) -> Resumed:
    """Load weights, optimizer, schedule and random states; returns where training stood."""
    _verify_together(store, step)
    options = args.checkpoint
    progress = _load(engine, store, args, step, parallel)
    if options.finetune:
        return Resumed(0, 0)
    if not options.no_load_rng:
        continue_streams(store.path(step), args.runtime.seed + step, parallel)
    try:
        if any(type(getattr(engine, name, 0)) is not int for name in DEEPSPEED_COUNTERS):
            raise TypeError
        return Resumed(int(progress["iteration"]), int(progress["consumed_samples"]))
    except (KeyError, TypeError, ValueError):
        raise CheckpointError(
            f"{store.path(step)}: does not say where training stood; only checkpoints of train.py "
            "can be resumed. Set finetune: true to begin a new run with its weights."
        ) from None


def _load(
    engine: Any, store: CheckpointStore, args: NeoXArgs, step: int, parallel: ParallelState
) -> dict[str, Any]:
    directory = store.path(step)
    fresh = args.checkpoint.finetune
    optimizer = not (args.checkpoint.no_load_optim or fresh)
    schedule = not fresh
    universal = is_universal(directory)
    if not universal:
        check_layout(directory, args)
    if universal or (args.optimization.zero_stage_in_effect == 3 and not optimizer):
        return load_whole(
            engine, directory, args, parallel.tp, optimizer=optimizer, schedule=schedule
        )
    try:
        _, progress = engine.load_checkpoint(
            str(store.directory),
            tag=tag_of(step),
            load_optimizer_states=optimizer,
            load_lr_scheduler_states=schedule,
        )
    except KerpleError:
        raise
    except (RuntimeError, KeyError, ValueError, TypeError, AssertionError) as error:
        # What DeepSpeed and torch say of files that do not fit the engine.
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise CheckpointError(
            f"{directory}: does not fit this config's model ({reason}); use the model settings it "
            "was trained with"
        ) from error
    if progress is None:
        raise CheckpointError(f"{directory}: DeepSpeed found no model state in it")
    return dict(progress)


def _verify_together(store: CheckpointStore, step: int) -> None:
    """Rank 0 reads the checksums; every rank learns of damage."""
    ranks, problem = Ranks.current(), ""
    if ranks.is_main:
        try:
            if not store.verify(step):
                print(f"{store.path(step)}: unverified, it has no checksums.json", flush=True)
        except (CheckpointError, OSError) as error:
            problem = str(error)
    if problem := ranks.broadcast(problem):
        raise CheckpointError(problem)


# Random states as plain data, so that they can be saved and read back safely.


def rng_file(directory: Path) -> Path:
    """This rank's random states in a checkpoint."""
    return directory / f"rng_rank_{dist.get_rank():05d}.pt"


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


def continue_streams(directory: Path, fresh_seed: int, parallel: ParallelState) -> None:
    """Continue the random streams; under another number of ranks, start new ones."""
    path = rng_file(directory)
    if not path.is_file():
        set_seeds(fresh_seed, parallel)
        return
    try:
        set_rng_state(load_mapping(path))
    except (KeyError, TypeError, ValueError, RuntimeError, AttributeError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(
            f"{path}: holds no random states ({type(error).__name__}: {error}); set "
            "no_load_rng: true to start new streams"
        ) from error


# layout.json: the layout that a checkpoint was written under; DeepSpeed's files fit no other.

LAYOUT = "layout.json"


def layout_of(args: NeoXArgs, world_size: int) -> dict[str, Any]:
    """What must be equal for DeepSpeed's own files to fit."""
    plan = args.batch_plan(world_size)
    zero = args.optimization.zero_stage_in_effect
    return {
        "pipe_parallel_size": args.parallel.pipe_parallel_size,
        "model_parallel_size": args.parallel.model_parallel_size,
        "zero_stage": zero,
        "precision": args.optimization.precision or "fp32",
        # DeepSpeed keeps bf16's fp32 sums in an optimizer, and files, of another kind.
        "grad_accum_dtype": args.optimization.accumulation_dtype if zero == 1 else None,
        # Without ZeRO every replica holds everything, and their number is free.
        "data_parallel_size": plan.data_parallel_size if zero else None,
        "world_size": world_size,
    }


def write_layout(directory: Path, args: NeoXArgs) -> None:
    """Beside each checkpoint: the layout that its files were written under."""
    world_size = dist.get_world_size()
    content = layout_of(args, world_size)
    # Not part of the layout, but of what a resumed run is compared with.
    content["train_batch_size"] = args.batch_plan(world_size).train_batch_size
    write_text(directory / LAYOUT, json.dumps(content, indent=1))


def read_layout(directory: Path) -> dict[str, Any]:
    """What was written; an error if it is not there or not readable."""
    path = directory / LAYOUT
    content = read_object(path)
    world_size = content.get("world_size")
    if type(world_size) is not int or not 1 <= world_size <= 1_000_000:
        raise CheckpointError(f"{path}: does not say how many processes wrote the checkpoint")
    return content


def check_layout(directory: Path, args: NeoXArgs) -> None:
    """A clear error, with the command to run, instead of a failed load."""
    if not (directory / LAYOUT).is_file():
        return  # written by GPT-NeoX or by an earlier version
    saved = read_layout(directory)
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
