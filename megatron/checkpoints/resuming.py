"""Resuming a run: weights, optimizer, schedule, random states and the place in the data.

DeepSpeed's files are read by DeepSpeed, a universal checkpoint's whole tensors here. (DeepSpeed can
read those too, `checkpoint: {load_universal: true}`; the code here executes nothing of what it
reads and serves runs without ZeRO.)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from megatron.checkpoints import optimizer_view
from megatron.checkpoints.reading import read_checkpoint
from megatron.checkpoints.run_state import check_layout, continue_streams
from megatron.checkpoints.sharding import Sharding, canonical_names, with_rows
from megatron.checkpoints.store import CheckpointStore, tag_of
from megatron.checkpoints.universal import (
    STEP,
    WEIGHT,
    States,
    common_step,
    is_universal,
    parameter_folders,
    read_progress,
    read_states,
    read_weights,
)
from megatron.errors import CheckpointError, KerpleError
from megatron.mpu.collectives import ParallelState, TensorParallel
from megatron.mpu.job import Ranks
from megatron.mpu.parallel_layers import whole_shape
from megatron.neox_arguments import NeoXArgs
from megatron.neox_arguments.model_keys import padded_vocab_size


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
        return _load_whole(
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


# From whole tensors, under any layout.


def _load_whole(
    engine: Any,
    directory: Path,
    args: NeoXArgs,
    tp: TensorParallel,
    *,
    optimizer: bool,
    schedule: bool,
) -> dict[str, Any]:
    """Set this rank's weights and optimizer from whole tensors; returns where training stood.

    `directory` is a universal checkpoint or, without its optimizer, one of ZeRO 3: DeepSpeed takes
    those weights from the newest checkpoint, whichever was asked for, and executes what it reads.
    """
    progress = read_progress(directory)
    sharding = Sharding.of(args.model, neox=False)
    rows = None  # a vocabulary's under this layout; where the words are not known, all are kept
    if "vocab_size" in progress:
        divisor, parallel = args.model.make_vocab_size_divisible_by, args.parallel
        words = int(progress["vocab_size"])
        rows = padded_vocab_size(words, divisor, parallel.model_parallel_size)
    states: dict[nn.Parameter, States] = {}
    for parameter, name, whole in _whole_states(engine, directory, optimizer=optimizer):
        shape = whole_shape(parameter)
        share = {key: _share(name, v, shape, sharding, tp, rows) for key, v in whole.items()}
        if share[WEIGHT].shape != shape:
            raise CheckpointError(
                f"{directory}: {name} gives {tuple(share[WEIGHT].shape)}, but this config's model "
                f"has {tuple(shape)}; resume with the model settings it was trained with"
            )
        states[parameter] = share
    optimizer_view.write(engine, states)
    engine.global_steps = progress["iteration"]
    engine.global_samples = progress["consumed_samples"]
    engine.skipped_steps = progress["skipped_steps"]
    if schedule:
        engine.lr_scheduler.load_state_dict(progress["schedule"])
    return progress


def _whole_states(
    engine: Any, directory: Path, *, optimizer: bool
) -> Iterator[tuple[nn.Parameter, str, States]]:
    """This rank's parameters, their names, and what the checkpoint holds for them."""
    there: Any
    if optimizer:
        there = parameter_folders(directory)
    elif is_universal(directory):
        there = read_weights(directory)
    else:
        there = read_checkpoint(directory).weights
    step = cache(partial(common_step, directory))
    is_adam = "betas" in engine.basic_optimizer.defaults
    for parameter, name in canonical_names(engine.module).items():
        if name not in there:
            raise CheckpointError(f"{directory}: holds no {name}, which this config's model has")
        states = read_states(there[name]) if optimizer else {WEIGHT: there[name].detach()}
        if "exp_avg" in states and STEP not in states:  # DeepSpeed's converter, from ZeRO 3
            states[STEP] = step()
        if len(states) > 1 and is_adam != ("exp_avg" in states):
            raise CheckpointError(
                f"{directory} was trained with another kind of optimizer than optimizer.type asks "
                f"for (it holds {', '.join(sorted(states))}); set that one, or no_load_optim: true"
            )
        yield parameter, name, states


def _share(
    name: str,
    value: Tensor,
    shape: torch.Size,
    sharding: Sharding,
    tp: TensorParallel,
    rows: int | None,
) -> Tensor:
    """This rank's part, of shape `shape`, of a whole tensor; a vocabulary has `rows` here."""
    if value.dim() == 0:
        return value
    if value.dim() == 1 and len(shape) > 1:  # DeepSpeed's converter flattens what ZeRO 3 saved
        whole, dim = list(shape), sharding.dim(name)
        if dim is not None:
            whole[dim] *= tp.size
        value = value.view(whole) if value.numel() == torch.Size(whole).numel() else value
    if rows is not None and sharding.has_vocabulary_rows(name):
        value = with_rows(value, rows)
    return sharding.split(name, value, tp.rank, tp.size)
