"""Tensor parallelism: groups, the collectives that carry gradients, and the split layers."""

from __future__ import annotations

from megatron.mpu.cross_entropy import vocab_parallel_cross_entropy
from megatron.mpu.groups import SERIAL, ParallelState, TensorParallel, initialize_parallel
from megatron.mpu.initialize import InitMethod, init_method, seeded_generator
from megatron.mpu.layers import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding

__all__ = [
    "SERIAL",
    "ColumnParallelLinear",
    "InitMethod",
    "ParallelState",
    "RowParallelLinear",
    "TensorParallel",
    "VocabParallelEmbedding",
    "init_method",
    "initialize_parallel",
    "seeded_generator",
    "vocab_parallel_cross_entropy",
]
