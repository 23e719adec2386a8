"""Resuming a run: weights, optimizer, schedule, random states and the place in the data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from megatron.checkpoints.random_states import continue_streams
from megatron.checkpoints.rank_layout import check_layout
from megatron.checkpoints.store import CheckpointStore, tag_of
from megatron.checkpoints.universal import is_universal
from megatron.checkpoints.universal_engine import load_universal, load_zero3_weights
from megatron.errors import CheckpointError, KerpleError
from megatron.mpu import ParallelState
from megatron.neox_arguments.deepspeed_config import zero_stage_in_effect

if TYPE_CHECKING:
    from megatron.neox_arguments import NeoXArgs

__all__ = ["Resumed", "resume"]


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
    if is_universal(directory):
        return load_universal(
            engine, directory, args, parallel.tp, optimizer=optimizer, schedule=schedule
        )
    check_layout(directory, args)
    if zero_stage_in_effect(args) == 3 and not optimizer:
        return load_zero3_weights(engine, directory, args, parallel.tp, schedule=schedule)
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
    message: list[str | None] = [None]
    if dist.get_rank() == 0:
        try:
            if not store.verify(step):
                print(f"{store.path(step)}: unverified, it has no checksums.json", flush=True)
        except (CheckpointError, OSError) as error:
            message = [str(error)]
    dist.broadcast_object_list(message, src=0)
    if message[0] is not None:
        raise CheckpointError(message[0])
