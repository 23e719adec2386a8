"""What the tests of positional embeddings share."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from megatron.model.position_base import (
    POSITIONAL_EMBEDDINGS,
    DistanceKernel,
    PositionalEmbedding,
    PositionOptions,
    TableEmbedding,
    Tables,
)
from megatron.model.position_names import build_positional_embedding, position_options

_LAYOUT = ("layer", "tp_rank", "tp_size")
KERNELS = sorted(n for n, c in POSITIONAL_EMBEDDINGS.items() if issubclass(c, DistanceKernel))
TABLES = sorted(n for n, c in POSITIONAL_EMBEDDINGS.items() if issubclass(c, TableEmbedding))
LEARNED_TABLES = [*KERNELS, "rpe"]
CONSTRAINTS = ["ste", "project", "softplus"]


def options(*, heads: int = 12, head_dim: int = 64, **changes: object) -> PositionOptions:
    """Options of any kind, unchecked: what the embeddings themselves refuse is to be seen."""
    layout = {key: changes.pop(key) for key in _LAYOUT if key in changes}
    built = position_options(heads=heads, head_dim=head_dim, max_position_embeddings=512, seed=7)
    vars(built.config).update(changes)
    return replace(built, **layout)


def build(name: str, **changes: object) -> PositionalEmbedding:
    return build_positional_embedding(name, options(**changes))


def kernel(name: str, **changes: object) -> DistanceKernel:
    built = build(name, **changes)
    assert isinstance(built, DistanceKernel)
    return built


def wave(*shape: int, start: float = 0.0) -> Tensor:
    """Numbers for which the results of other projects' code are recorded in tests: sines."""
    steps = torch.arange(math.prod(shape), dtype=torch.float64)
    return torch.sin(0.7 * steps + start).view(shape)


def present(tables: Tables) -> list[Tensor]:
    return [table for table in tables if table is not None]
