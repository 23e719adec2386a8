"""One rank of `tools/reshard_checkpoint.py`: loads its part of a checkpoint, writes it whole."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import torch.distributed as dist

from megatron.checkpoints.resuming import resume
from megatron.checkpoints.saved_config import (
    RESOLVED,
    args_from,
    config_to_resume,
    read_config_file,
)
from megatron.checkpoints.saving import save_universal
from megatron.checkpoints.store import CheckpointStore
from megatron.model import ModelSpec
from megatron.mpu.job import join_training, set_seeds
from megatron.neox_arguments import allow_kernel
from megatron.terminal import exit_with, run_command
from megatron.training.engine import build_engine, build_module
from megatron.training.metrics import recorded_data
from megatron.training.run import find_vocabulary


def reshard(source: Path, target: Path, step: int) -> None:
    """Called on every rank of the layout that `source` was written under."""
    store = CheckpointStore(source)
    file = store.path(step) / "configs" / RESOLVED
    saved = args_from(read_config_file(file), file)
    args = config_to_resume(
        saved.replace(finetune=False, override_lr_scheduler=False), store.path(step)
    )
    parallel = join_training(args)
    set_seeds(args.runtime.seed, parallel)
    vocabulary = find_vocabulary(args.tokenizer, args.data)
    spec = ModelSpec.from_args(args, args.padded_vocabulary(vocabulary.size))
    engine = build_engine(args, build_module(args, spec, parallel), parallel)
    # Load all of the checkpoint, whatever the saved config says about loading.
    everything = args.replace(no_load_optim=False)
    resumed = resume(engine, store, everything, step, parallel)
    data = recorded_data(store.path(step))
    save_universal(engine, CheckpointStore(target), args, resumed, parallel, vocabulary.size, data)
    dist.destroy_process_group()


def main(argv: Sequence[str] | None = None) -> int:
    source, target, step, *kernels = sys.argv[1:] if argv is None else argv
    allow_kernel(kernels)
    reshard(Path(source), Path(target), int(step))
    return 0


if __name__ == "__main__":
    exit_with(lambda: run_command(main))
