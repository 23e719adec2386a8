"""One rank of `tools/reshard_checkpoint.py`: loads its part of a checkpoint, writes it portably."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron.model.spec import ModelSpec
from megatron.mpu import ParallelState
from megatron.neox_arguments import NeoXArgs
from megatron.training.checkpoint_store import CheckpointStore, tag_of
from megatron.training.checkpointing import Resumed, resume, together, write_configs
from megatron.training.distributed import set_seeds, start_distributed
from megatron.training.engine import build_engine, build_module
from megatron.training.portable import export
from megatron.training.run import find_vocabulary
from megatron.training.safe_files import CheckpointError


def reshard(source: Path, target: Path, step: int) -> None:
    """Called on every rank of the layout that `source` was written under."""
    store = CheckpointStore(source)
    args = NeoXArgs.from_files([str(store.path(step) / "configs" / "resolved.yml")])
    parallel = start_distributed(args)
    set_seeds(args.runtime.seed, parallel)
    spec = ModelSpec.from_args(args, find_vocabulary(args).padded_size)
    engine = build_engine(args, build_module(args, spec, parallel), parallel)
    resumed = resume(engine, store, args, step, parallel)
    write_portable(engine, CheckpointStore(target), args, resumed, parallel)
    dist.destroy_process_group()


def write_portable(
    engine: Any, store: CheckpointStore, args: NeoXArgs, at: Resumed, parallel: ParallelState
) -> None:
    """A portable checkpoint of the engine as it stands; complete or invisible."""
    main, staged = dist.get_rank() == 0, store.staging / tag_of(at.step)
    doing, advice = f"writing {store.path(at.step)}", "What was read is untouched."
    try:
        together(lambda: store.prepare(at.step) if main else None, doing, advice)
        together(
            lambda: export(engine, store, at.step, parallel, args, at.consumed_samples),
            doing,
            advice,
        )
        if main:
            write_configs(staged / "configs", args)
        together(lambda: store.commit(at.step) if main else None, doing, advice)
    except CheckpointError:
        if main:
            store.discard(at.step)
        raise
    dist.barrier()


def main() -> int:
    source, target, step = sys.argv[1:]
    try:
        reshard(Path(source), Path(target), int(step))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
