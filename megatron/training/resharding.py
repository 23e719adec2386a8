"""One rank of `tools/reshard_checkpoint.py`: loads its part of a checkpoint, writes it whole."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron.atomic_files import write_text
from megatron.checkpoints.resuming import Resumed, resume
from megatron.checkpoints.saved_config import (
    RESOLVED,
    args_from,
    as_it_began,
    read_config_file,
)
from megatron.checkpoints.saving import Save, write_configs
from megatron.checkpoints.store import CheckpointStore, tag_of
from megatron.checkpoints.universal import LATEST
from megatron.checkpoints.universal_engine import progress_of, write_universal_files
from megatron.model import ModelSpec
from megatron.mpu.collectives import ParallelState
from megatron.mpu.job import join_training, set_seeds
from megatron.neox_arguments import NeoXArgs, allow_kernel
from megatron.terminal import leave, run_command
from megatron.training.engine import build_engine, build_module
from megatron.training.run import find_vocabulary


def reshard(source: Path, target: Path, step: int) -> None:
    """Called on every rank of the layout that `source` was written under."""
    store = CheckpointStore(source)
    file = store.path(step) / "configs" / RESOLVED
    saved = args_from(read_config_file(file), file)
    args = as_it_began(saved.replace(finetune=False, override_lr_scheduler=False), store.path(step))
    parallel = join_training(args)
    set_seeds(args.runtime.seed, parallel)
    vocabulary = find_vocabulary(args)
    spec = ModelSpec.from_args(args, vocabulary.padded_size)
    engine = build_engine(args, build_module(args, spec, parallel), parallel)
    # All of the checkpoint, however the run that wrote it had begun.
    everything = args.replace(no_load_optim=False)
    resumed = resume(engine, store, everything, step, parallel)
    write_universal(engine, CheckpointStore(target), args, resumed, parallel, vocabulary.size)
    dist.destroy_process_group()


def write_universal(
    engine: Any,
    store: CheckpointStore,
    args: NeoXArgs,
    at: Resumed,
    parallel: ParallelState,
    vocab_size: int,
) -> None:
    """A universal checkpoint of the engine as it stands; complete or invisible."""
    staged = store.staging / tag_of(at.step)
    progress = progress_of(engine, at.step, at.consumed_samples, vocab_size)

    def write() -> None:
        write_universal_files(engine, staged, parallel, args, progress)
        if dist.get_rank() == 0:
            write_configs(staged / "configs", args)

    Save(engine.checkpoint_engine, store, at.step, write).complete()
    if dist.get_rank() == 0:
        write_text(store.directory / LATEST, tag_of(at.step))
    dist.barrier()


def main(argv: Sequence[str] | None = None) -> int:
    source, target, step, *kernels = sys.argv[1:] if argv is None else argv
    allow_kernel(kernels)
    reshard(Path(source), Path(target), int(step))
    return 0


if __name__ == "__main__":
    leave(run_command(main))
