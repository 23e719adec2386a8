"""Process groups and seeds."""

from __future__ import annotations

import importlib
import os
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np
import torch
import torch.distributed as dist

from megatron.errors import EvaluationError
from megatron.mpu import ParallelState, initialize_parallel

if TYPE_CHECKING:
    from megatron.neox_arguments import NeoXArgs

__all__ = ["Ranks", "join_ranks", "pick_device"]


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

    from megatron.launcher.environment import environment_for

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


# Work shared by processes: each takes every n-th item, everybody gets all results.

Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(frozen=True)
class Ranks:
    """This process among those that evaluate together."""

    rank: int = 0
    size: int = 1

    @classmethod
    def current(cls) -> Ranks:
        """All processes of the default group; one process where there is none."""
        if dist.is_available() and dist.is_initialized():
            return cls(dist.get_rank(), dist.get_world_size())
        return cls()

    @property
    def is_main(self) -> bool:
        """Whether this process prints and writes."""
        return self.rank == 0

    def broadcast(self, value: Result | None) -> Result:
        """The main process's value."""
        if self.size == 1:
            return cast(Result, value)
        box = [value]
        dist.broadcast_object_list(box, src=0)
        return cast(Result, box[0])

    def map(
        self, function: Callable[[Sequence[Item]], Sequence[Result]], items: Sequence[Item]
    ) -> list[Result]:
        """`function` on this rank's share; all results in the order of `items`.

        A ValueError on any rank is raised on all of them, so that nobody waits for a process that
        has given up.
        """
        if self.size == 1:
            return list(function(items))
        share: tuple[list[Result] | None, str | None]
        try:
            share = (list(function(items[self.rank :: self.size])), None)
        except ValueError as error:
            share = (None, str(error))
        shares: list[Any] = [None] * self.size
        dist.all_gather_object(shares, share)
        for _, message in shares:
            if message is not None:
                raise EvaluationError(message)
        merged: list[Any] = [None] * len(items)
        for rank, (results, _) in enumerate(shares):
            merged[rank :: self.size] = results
        return merged


# Joining the other processes, and the device to compute on.


def join_ranks(args: NeoXArgs, local_rank: int | None = None) -> tuple[Ranks, str]:
    """This process among the job's, and its device.

    Every process holds the whole model and takes a share of the sequences; they exchange results
    only, which gloo does on any machine.
    """
    from megatron.launcher.environment import environment_for

    environment = environment_for(args.launcher, local_rank)
    if environment.world_size > 1 and not dist.is_initialized():
        dist.init_process_group(
            "gloo", timeout=timedelta(minutes=args.runtime.distributed_timeout_minutes)
        )
    return Ranks.current(), pick_device(environment.local_rank)


def pick_device(local_rank: int = 0) -> str:
    """This process's accelerator if the machine has any (and DS_ACCELERATOR does not forbid it)."""
    if not torch.accelerator.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # DeepSpeed would search, and say so
    if os.environ.get("DS_ACCELERATOR") == "cpu":
        return "cpu"
    kind = torch.accelerator.current_accelerator()
    count = max(1, torch.accelerator.device_count())
    return f"{kind.type if kind else 'cpu'}:{local_rank % count}"
