"""Which ranks work together. Objects handed to the layers that need them; nothing global."""

from __future__ import annotations

import contextlib
import io
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist


@dataclass(frozen=True)
class TensorParallel:
    """The ranks that hold slices of the same layer."""

    group: dist.ProcessGroup | None = None
    rank: int = 0
    size: int = 1

    def slice_of(self, total: int, what: str) -> slice:
        """This rank's share of `total` items."""
        if total % self.size:
            raise ValueError(
                f"{what} = {total} cannot be split over model_parallel_size = {self.size}: "
                f"choose a model_parallel_size that divides {total}"
            )
        share = total // self.size
        return slice(self.rank * share, (self.rank + 1) * share)


SERIAL = TensorParallel()


@dataclass(frozen=True)
class ParallelState:
    """The place of this process in the pipeline x data x tensor grid."""

    tp: TensorParallel
    pp_rank: int
    pp_size: int
    dp_rank: int
    dp_size: int
    dp_group: dist.ProcessGroup | None
    grid: Any
    topology: Any

    @property
    def is_first_stage(self) -> bool:
        return self.pp_rank == 0

    @property
    def is_last_stage(self) -> bool:
        return self.pp_rank == self.pp_size - 1

    @property
    def is_first_replica(self) -> bool:
        """True on the ranks that together hold exactly one copy of the model."""
        return self.dp_rank == 0


def initialize_parallel(pipe_parallel_size: int, model_parallel_size: int) -> ParallelState:
    """Lay the grid over the initialised process group, tensor-parallel ranks adjacent."""
    from deepspeed.runtime.pipe.topology import (
        PipelineParallelGrid,
        PipeModelDataParallelTopology,
    )

    world_size = dist.get_world_size()
    stages = max(pipe_parallel_size, 1)
    if world_size % (stages * model_parallel_size):
        raise ValueError(
            f"{world_size} processes cannot be split into pipe_parallel_size = "
            f"{pipe_parallel_size} x model_parallel_size = {model_parallel_size}: "
            f"start a multiple of {stages * model_parallel_size} processes"
        )
    topology = PipeModelDataParallelTopology(
        num_pp=stages,
        num_mp=model_parallel_size,
        num_dp=world_size // (stages * model_parallel_size),
    )
    with contextlib.redirect_stdout(io.StringIO()):  # it prints the whole grid
        grid = PipelineParallelGrid(topology=topology)
    return ParallelState(
        tp=TensorParallel(
            group=grid.get_slice_parallel_group(),
            rank=grid.get_slice_parallel_rank(),
            size=grid.get_slice_parallel_world_size(),
        ),
        pp_rank=grid.get_pipe_parallel_rank(),
        pp_size=grid.get_pipe_parallel_world_size(),
        dp_rank=grid.get_data_parallel_rank(),
        dp_size=grid.get_data_parallel_world_size(),
        dp_group=grid.get_data_parallel_group(),
        grid=grid,
        topology=topology,
    )
