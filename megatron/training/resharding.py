"""One rank of `tools/reshard_checkpoint.py`: loads its part of a checkpoint, writes it whole."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron.atomic_files import write_text
from megatron.checkpoints.save_and_resume import Resumed, resume, together, write_configs
from megatron.checkpoints.saved_config import RESOLVED, as_it_began
from megatron.checkpoints.store import CheckpointStore, tag_of
from megatron.checkpoints.universal_engine import LATEST, export, progress_of
from megatron.errors import CheckpointError
from megatron.model.spec import ModelSpec
from megatron.mpu import ParallelState
from megatron.mpu.job import set_seeds, start_distributed
from megatron.neox_arguments import NeoXArgs, allow_kernel
from megatron.training.engine import build_engine, build_module
from megatron.training.run import find_vocabulary


def reshard(source: Path, target: Path, step: int) -> None:
    """Called on every rank of the layout that `source` was written under."""
    store = CheckpointStore(source)
    saved = NeoXArgs.from_files([str(store.path(step) / "configs" / RESOLVED)])
    args = as_it_began(saved.replace(finetune=False, override_lr_scheduler=False), store.path(step))
    parallel = start_distributed(args)
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
    main, staged = dist.get_rank() == 0, store.staging / tag_of(at.step)
    progress = progress_of(engine, at.step, at.consumed_samples, vocab_size)
    doing, advice = f"writing {store.path(at.step)}", "What was read is untouched."
    try:
        together(lambda: store.prepare(at.step) if main else None, doing, advice)
        together(lambda: export(engine, staged, parallel, args, progress), doing, advice)
        together(lambda: _publish(store, args, at.step) if main else None, doing, advice)
    except CheckpointError:
        if main:
            store.discard(at.step)
        raise
    dist.barrier()


def _publish(store: CheckpointStore, args: NeoXArgs, step: int) -> None:
    write_configs(store.staging / tag_of(step) / "configs", args)
    store.commit(step)
    write_text(store.directory / LATEST, tag_of(step))


def main() -> int:
    source, target, step, *kernels = sys.argv[1:]
    try:
        allow_kernel(kernels)
        reshard(Path(source), Path(target), int(step))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
