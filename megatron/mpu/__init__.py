"""Tensor parallelism: groups, the collectives that carry gradients, and the split layers."""

from __future__ import annotations

from megatron.mpu.collectives import (
    SERIAL,
    ParallelState,
    TensorParallel,
    initialize_parallel,
    vocab_parallel_cross_entropy,
)
from megatron.mpu.parallel_layers import (
    ColumnParallelLinear,
    InitMethod,
    Projections,
    RowParallelLinear,
    VocabParallelEmbedding,
    init_method,
    per_head_parameter,
    seeded_generator,
)

__all__ = [
    "SERIAL",
    "ColumnParallelLinear",
    "InitMethod",
    "ParallelState",
    "Projections",
    "RowParallelLinear",
    "TensorParallel",
    "VocabParallelEmbedding",
    "init_method",
    "initialize_parallel",
    "per_head_parameter",
    "seeded_generator",
    "vocab_parallel_cross_entropy",
]
