"""Process groups and seeds."""

from __future__ import annotations

import importlib
import os
import random
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist

from megatron.mpu import ParallelState, initialize_parallel

if TYPE_CHECKING:
    from megatron.neox_arguments import NeoXArgs


def start_distributed(args: NeoXArgs) -> ParallelState:
    """Join the other ranks and lay the grid."""
    join_job(args)
    return initialize_parallel(args.parallel.pipe_parallel_size, args.parallel.model_parallel_size)


def join_job(args: NeoXArgs) -> None:
    """Join the other ranks, found by the launcher's, Slurm's or no variables; once."""
    if dist.is_initialized():
        return
    import deepspeed
    from deepspeed.accelerator import get_accelerator

    from megatron.neox_arguments.environment import environment_for

    environment = environment_for(args.launcher)
    os.environ["LOCAL_RANK"] = str(environment.local_rank)
    accelerator = get_accelerator()
    on_cpu = accelerator.device_name() == "cpu"
    if not on_cpu:
        accelerator.set_device(environment.local_rank)
    if on_cpu:
        _without_compiled_collectives()
        # DeepSpeed asks for fp16 instructions; PyTorch computes fp16 without them, only slower.
        accelerator.is_fp16_supported = lambda: True
    deepspeed.init_distributed(
        dist_backend="gloo" if on_cpu else args.parallel.distributed_backend,
        auto_mpi_discovery=False,
        verbose=False,
        timeout=timedelta(minutes=args.runtime.distributed_timeout_minutes),
    )


def _without_compiled_collectives() -> None:
    """DeepSpeed compiles shared-memory collectives at the first start on a CPU.

    That takes a minute and a compiler; gloo does the same work without either.
    """
    # By name: `deepspeed.comm.torch` as an attribute is PyTorch itself.
    backend: Any = importlib.import_module("deepspeed.comm.torch")
    backend.build_shm_op = lambda: None


def set_seeds(seed: int, parallel: ParallelState) -> None:
    """Seed the streams of dropout: shared by tensor-parallel ranks, apart for all others."""
    own = seed + 7919 * parallel.dp_rank + 104729 * parallel.pp_rank
    random.seed(own)
    np.random.seed(own % 2**32)
    torch.manual_seed(own)
