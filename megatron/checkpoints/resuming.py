"""Resuming a run: weights, optimizer, schedule, random states and data position.

DeepSpeed's files are read by DeepSpeed, a universal checkpoint's whole tensors here. (DeepSpeed can
read those too, `checkpoint: {load_universal: true}`; the code here executes no code from the file
and works without ZeRO.)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from megatron.backends.interface import (
    COUNTERS,
    STEP,
    WEIGHT,
    States,
    TrainingEngine,
    full_shape,
)
from megatron.checkpoints.neox_run import is_neox_run, read_neox_progress, read_neox_states
from megatron.checkpoints.reading import read_checkpoint
from megatron.checkpoints.run_state import check_layout, restore_random_states
from megatron.checkpoints.saved_config import resolved_config
from megatron.checkpoints.sharding import Sharding, canonical_names, with_rows
from megatron.checkpoints.store import CheckpointStore, tag_of
from megatron.checkpoints.universal import (
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
from megatron.mpu.parallel_layers import parameter_facts
from megatron.neox_arguments import NeoXArgs
from megatron.neox_arguments.deepspeed_config import OptimizerBlock, optimizer_family
from megatron.neox_arguments.model_keys import ModelArgs, padded_vocab_size
from megatron.neox_arguments.optimization_keys import OptimizationArgs


@dataclass(frozen=True)
class Resumed:
    """Where a run continues."""

    step: int
    consumed_samples: int

    def samples_at(self, step: int, batch_size: int) -> int:
        """Samples consumed when the run has reached `step`."""
        return self.consumed_samples + (step - self.step) * batch_size


def resume(
    engine: TrainingEngine,
    store: CheckpointStore,
    args: NeoXArgs,
    step: int,
    parallel: ParallelState,
) -> Resumed:
    """Load weights, optimizer, schedule and random states; returns the training progress."""
    _verify_on_all_ranks(store, step)
    options = args.checkpoint
    progress = _load(engine, store, args, step, parallel)
    if options.finetune:
        return Resumed(0, 0)
    if not options.no_load_rng:
        restore_random_states(store.path(step), args.runtime.seed + step, parallel)
    try:
        if any(type(progress.get(name, 0)) is not int for name in (*COUNTERS, "micro_steps")):
            raise TypeError
        return Resumed(int(progress["iteration"]), int(progress["consumed_samples"]))
    except (KeyError, TypeError, ValueError):
        raise CheckpointError(
            f"{store.path(step)}: holds no training progress; only checkpoints of train.py "
            "can be resumed. Set finetune: true to begin a new run with its weights."
        ) from None


def _load(
    engine: TrainingEngine,
    store: CheckpointStore,
    args: NeoXArgs,
    step: int,
    parallel: ParallelState,
) -> dict[str, Any]:
    directory = store.path(step)
    fresh = args.checkpoint.finetune
    optimizer = not (args.checkpoint.no_load_optim or fresh)
    schedule = not fresh
    universal = is_universal(directory) or is_neox_run(directory)
    if optimizer:
        _check_optimizer(directory, args.optimization.optimizer)
    if not universal:
        check_layout(directory, args.parallel, args.optimization)
    if universal or (args.optimization.zero_stage_in_effect == 3 and not optimizer):
        model, options = args.model, args.optimization
        return _load_whole(
            engine, directory, model, options, parallel.tp, optimizer=optimizer, schedule=schedule
        )
    try:
        progress = engine.load(
            store.directory, tag_of(step), optimizer=optimizer, schedule=schedule
        )
    except KerpleError:
        raise
    except (RuntimeError, KeyError, ValueError, TypeError, AssertionError) as error:
        # Errors of DeepSpeed and torch for files that do not fit the engine.
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise CheckpointError(
            f"{directory}: does not fit this config's model ({reason}); use the model settings it "
            "was trained with"
        ) from error
    if progress is None:
        raise CheckpointError(f"{directory}: there is no model state in it")
    return progress


def _check_optimizer(directory: Path, now: OptimizerBlock) -> None:
    """Refuse a checkpoint of another optimizer."""
    saved = resolved_config(directory).get("optimizer")
    kind = saved.get("type") if isinstance(saved, dict) else None
    if isinstance(kind, str) and optimizer_family(kind) != optimizer_family(now.type):
        raise _other_optimizer(directory, kind, now.type)


def _other_optimizer(directory: Path, then: str, now: str) -> CheckpointError:
    return CheckpointError(
        f"{directory}: was trained with another optimizer: {then:.200}, where optimizer.type is "
        f"{now:.80}. Set that one, or no_load_optim: true to start {now:.80} with new states."
    )


def _verify_on_all_ranks(store: CheckpointStore, step: int) -> None:
    """Rank 0 verifies the checksums; damage is raised on every rank."""
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
    engine: TrainingEngine,
    directory: Path,
    model: ModelArgs,
    options: OptimizationArgs,
    tp: TensorParallel,
    *,
    optimizer: bool,
    schedule: bool,
) -> dict[str, Any]:
    """Set this rank's weights and optimizer from whole tensors; returns the training progress.

    `directory` is a universal checkpoint, GPT-NeoX's or, without its optimizer, one of ZeRO 3:
    DeepSpeed takes those weights from the newest checkpoint, whichever was named, and executes
    what it reads.
    """
    of_neox = is_neox_run(directory)
    progress = read_neox_progress(directory, options) if of_neox else read_progress(directory)
    sharding = Sharding.of(model, neox=False)
    rows = None  # padded vocabulary under this layout; None keeps all rows of the checkpoint
    if "vocab_size" in progress:
        tokens = int(progress["vocab_size"])
        rows = padded_vocab_size(tokens, model.make_vocab_size_divisible_by, tp.size)
    states: dict[nn.Parameter, States] = {}
    neox = read_neox_states(directory, model) if of_neox else None
    for parameter, name, whole in _whole_states(
        engine, directory, options.optimizer, neox, optimizer=optimizer
    ):
        shape = full_shape(parameter)
        share = {key: _share(name, v, shape, sharding, tp, rows) for key, v in whole.items()}
        if share[WEIGHT].shape != shape:
            raise CheckpointError(
                f"{directory}: {name} gives {tuple(share[WEIGHT].shape)}, but this config's model "
                f"has {tuple(shape)}; resume with the model settings it was trained with"
            )
        states[parameter] = share
    engine.write_states(states)
    engine.set_counters(
        global_steps=progress["iteration"],
        global_samples=progress["consumed_samples"],
        skipped_steps=progress["skipped_steps"],
    )
    if schedule:
        engine.scheduler.load_state_dict(progress["schedule"])
    return progress


def _whole_states(
    engine: TrainingEngine,
    directory: Path,
    block: OptimizerBlock,
    neox: dict[str, States] | None,
    *,
    optimizer: bool,
) -> Iterator[tuple[nn.Parameter, str, States]]:
    """This rank's parameters, their names, and what the checkpoint holds for them."""
    there: Any
    if neox is not None:
        there = neox
    elif optimizer:
        there = parameter_folders(directory)
    elif is_universal(directory):
        there = read_weights(directory)
    else:
        there = read_checkpoint(directory).weights
    step = cache(partial(common_step, directory))
    for parameter, name in canonical_names(engine.module).items():
        if name not in there:
            raise CheckpointError(f"{directory}: holds no {name}, which this config's model has")
        if neox is not None:
            states = neox[name] if optimizer else {WEIGHT: neox[name][WEIGHT]}
        else:
            states = read_states(there[name]) if optimizer else {WEIGHT: there[name].detach()}
        if "exp_avg_sq" in states and STEP not in states:  # DeepSpeed's converter, from ZeRO 3
            states[STEP] = step()
        kept = sorted(states.keys() - {WEIGHT, STEP})
        is_linear = parameter_facts(parameter).is_linear(full_shape(parameter))
        expected = block.linear_states if is_linear else block.states
        # A run with momentum 0 keeps nothing, nor does one before its first step.
        if kept and expected is not None and kept != sorted(expected):
            raise _other_optimizer(directory, f"one that keeps {', '.join(kept)}", block.type)
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
        whole, dim = list(shape), sharding.facts(name).split
        if dim is not None:
            whole[dim] *= tp.size
        value = value.view(whole) if value.numel() == torch.Size(whole).numel() else value
    if rows is not None and sharding.facts(name).vocabulary:
        value = with_rows(value, rows)
    return sharding.split(name, value, tp.rank, tp.size)
