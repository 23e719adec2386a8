"""How the model is spread over processes."""

from __future__ import annotations

from pydantic import Field

from ..fields import Group, NonNegativeInt, PositiveInt


class ParallelArgs(Group):
    """Tensor, pipeline and data parallelism."""

    pipe_parallel_size: NonNegativeInt = Field(
        0,
        description="Pipeline stages; 0 is a plain model without DeepSpeed's pipeline engine, "
        "1 is that engine with one stage.",
    )
    model_parallel_size: PositiveInt = Field(1, description="Tensor-parallel processes.")
    pipe_partition_method: str = Field(
        "type:transformer|mlp",
        description="How layers are dealt to pipeline stages: uniform, parameters or type:REGEX.",
    )
    distributed_backend: str = Field(
        "nccl", description="torch.distributed backend on GPUs; on CPUs it is always gloo."
    )

    @property
    def processes_per_replica(self) -> int:
        """Processes that together hold one copy of the model."""
        return max(self.pipe_parallel_size, 1) * self.model_parallel_size
