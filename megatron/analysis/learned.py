"""Kernel functions of trained models, rebuilt from the parameters in their metrics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from megatron.model.positional_embeddings import (
    DistanceKernel,
    PositionOptions,
    TableEmbedding,
    build_positional_embedding,
)

__all__ = ["kernel_bias"]

FloatArray = NDArray[np.float64]


def kernel_bias(
    method: str, values: Mapping[str, Sequence[float]], num_heads: int, length: int
) -> FloatArray | None:
    """Bias by head and distance [heads, length], or None where the method has none.

    Fixed kernels (ALiBi) need no values; a learned kernel without its values has no curve.
    """
    heads = len(next(iter(values.values()))) if values else num_heads
    options = PositionOptions(
        num_heads=heads, head_dim=64, hidden_size=64 * heads, max_position_embeddings=length
    )
    embedding = build_positional_embedding(method, options)
    if isinstance(embedding, DistanceKernel):
        if set(values) < set(embedding.learnable):
            return None
        embedding.set_kernel_values_(
            {name: torch.tensor(values[name]) for name in embedding.learnable}
        )
    elif not isinstance(embedding, TableEmbedding) or list(embedding.parameters()):
        return None
    with torch.no_grad():
        bias = embedding(length).bias
    return None if bias is None else bias.double().numpy()
