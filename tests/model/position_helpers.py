"""What the tests of positional embeddings share."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from megatron.model.positional_embeddings import (
    POSITIONAL_EMBEDDINGS,
    DistanceKernel,
    PositionalEmbedding,
    PositionOptions,
    TableEmbedding,
    Tables,
    build_positional_embedding,
)

OPTIONS = PositionOptions(
    num_heads=12, head_dim=64, hidden_size=768, max_position_embeddings=512, seed=7
)
KERNELS = sorted(n for n, c in POSITIONAL_EMBEDDINGS.items() if issubclass(c, DistanceKernel))
TABLES = sorted(n for n, c in POSITIONAL_EMBEDDINGS.items() if issubclass(c, TableEmbedding))
LEARNED_TABLES = [*KERNELS, "rpe"]
CONSTRAINTS = ["ste", "project", "softplus"]


def build(name: str, **changes: object) -> PositionalEmbedding:
    return build_positional_embedding(name, replace(OPTIONS, **changes))


def kernel(name: str, **changes: object) -> DistanceKernel:
    built = build(name, **changes)
    assert isinstance(built, DistanceKernel)
    return built


def present(tables: Tables) -> list[Tensor]:
    return [table for table in tables if table is not None]
