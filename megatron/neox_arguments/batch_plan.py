"""Batch arithmetic: train_batch_size = micro-batch x accumulation x data-parallel size."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.errors import ConfigError
from megatron.neox_arguments.optimization_keys import OptimizationArgs
from megatron.neox_arguments.run_keys import ParallelArgs


@dataclass(frozen=True)
class BatchPlan:
    """What one optimizer step is made of."""

    train_batch_size: int
    micro_batch_size: int
    gradient_accumulation_steps: int
    data_parallel_size: int


def data_parallel_size(parallel: ParallelArgs, world_size: int) -> int:
    """Copies of the model that `world_size` processes hold."""
    replica = parallel.processes_per_replica
    if world_size < 1 or world_size % replica:
        raise ConfigError(
            f"{world_size} processes cannot hold whole copies of a model over pipe_parallel_size "
            f"{parallel.pipe_parallel_size} x model_parallel_size {parallel.model_parallel_size}. "
            f"Start a multiple of {replica} processes (num_gpus), or lower one of the two."
        )
    return world_size // replica


def plan_batch(
    optimization: OptimizationArgs, parallel: ParallelArgs, world_size: int
) -> BatchPlan:
    """Fill in the batch sizes that are not given; ConfigError if those given disagree."""
    copies = data_parallel_size(parallel, world_size)
    total = optimization.train_batch_size
    micro = optimization.train_micro_batch_size_per_gpu
    steps = optimization.gradient_accumulation_steps
    if total is None and micro is None:
        raise ConfigError(
            "no batch size: set train_micro_batch_size_per_gpu (sequences per process and "
            "forward pass) or train_batch_size (sequences per step)."
        )
    if total is None:
        assert micro is not None
        steps = steps or 1
        return BatchPlan(micro * steps * copies, micro, steps, copies)
    if micro is None:
        steps = steps or 1
        micro = _divide(total, steps * copies, f"accumulation {steps} x {copies} copies")
    elif steps is None:
        steps = _divide(total, micro * copies, f"micro-batch {micro} x {copies} copies")
    if micro * steps * copies != total:
        raise ConfigError(
            f"train_batch_size = {total}, but train_micro_batch_size_per_gpu {micro} x "
            f"gradient_accumulation_steps {steps} x {copies} data-parallel copies = "
            f"{micro * steps * copies}. Remove one of the three keys and it is derived."
        )
    return BatchPlan(total, micro, steps, copies)


def _divide(total: int, divisor: int, what: str) -> int:
    if total % divisor:
        raise ConfigError(
            f"train_batch_size = {total} is not a multiple of {divisor} ({what}). "
            f"Use {max(total // divisor, 1) * divisor}, or change the number of processes."
        )
    return total // divisor
