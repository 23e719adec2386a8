"""Absolute positional embeddings, added to the token embeddings x_BLH (batch, length, hidden)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .position_base import (
    InputEmbedding,
    PositionalEmbeddingError,
    PositionOptions,
    register,
    room_for,
)

__all__ = ["LearnedEmbedding", "SinusoidalEmbedding", "sinusoids"]


def sinusoids(positions: Tensor, hidden_size: int, base: float = 10000.0) -> Tensor:
    """All sines, then all cosines, of fp32 angles: [*positions.shape, hidden_size]."""
    pairs = torch.arange(0, hidden_size, 2, dtype=torch.float32, device=positions.device)
    angles = positions[..., None].float() * base ** -(pairs / hidden_size)
    return torch.cat((angles.sin(), angles.cos()), -1)


@register("learned")
class LearnedEmbedding(InputEmbedding):
    """One learned vector per position; there is none beyond max_position_embeddings."""

    def __init__(self, options: PositionOptions) -> None:
        super().__init__(options)
        shape = (options.max_position_embeddings, options.hidden_size)
        values = torch.randn(shape, generator=options.generator("position_embeddings"))
        self.weight = nn.Parameter(values * options.init_method_std)

    def forward(self, x_BLH: Tensor, offset: int = 0) -> Tensor:
        end, table_length = offset + x_BLH.shape[1], self.weight.shape[0]
        if end > table_length:
            raise PositionalEmbeddingError(
                f"pos_emb: learned has vectors for {table_length} positions "
                f"(max_position_embeddings), but position {end - 1} was asked for; shorten the "
                "sequence, train with a larger max_position_embeddings, or use a positional "
                "embedding that extrapolates, such as kerple_log."
            )
        return x_BLH + self.weight[offset:end].to(x_BLH.dtype)


@register("sinusoidal")
class SinusoidalEmbedding(InputEmbedding):
    """Vaswani et al. 2017 in NeoX's layout: all sines, then all cosines, of fp32 angles."""

    def __init__(self, options: PositionOptions) -> None:
        super().__init__(options)
        if options.hidden_size % 2:
            raise PositionalEmbeddingError(
                f"pos_emb: sinusoidal needs an even hidden_size, got {options.hidden_size}."
            )
        self._table_LH = torch.empty(0, options.hidden_size)

    def forward(self, x_BLH: Tensor, offset: int = 0) -> Tensor:
        end = offset + x_BLH.shape[1]
        if self._table_LH.shape[0] < end or self._table_LH.device != x_BLH.device:
            with torch.inference_mode(False):
                positions = torch.arange(room_for(end), device=x_BLH.device)
                self._table_LH = sinusoids(positions, self.options.hidden_size)
        return x_BLH + self._table_LH[offset:end].to(x_BLH.dtype)
