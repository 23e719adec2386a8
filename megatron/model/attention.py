"""Self-attention. It knows tables over distance and never asks which kernel made them.

Shape suffixes: B batch, L length, H heads (of this rank), D head dimension.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from einops import rearrange
from torch import Tensor, nn

from megatron.model.cache import LayerCache
from megatron.model.kernels import attention
from megatron.model.positional_embeddings import RotaryEmbedding, Tables
from megatron.mpu import (
    SERIAL,
    ColumnParallelLinear,
    InitMethod,
    RowParallelLinear,
    TensorParallel,
)


def _dropout_generator(device: torch.device, tp: TensorParallel) -> torch.Generator:
    """A generator for this layer's attention dropout.

    Its seed is drawn from the default CPU stream, which all tensor-parallel ranks share, and moved
    apart by the rank: heads on different ranks get different masks, a recomputed activation gets
    the same mask again, and nothing but torch's own RNG state need be saved.
    """
    seed = int(torch.randint(2**62, (), dtype=torch.int64).item())
    generator = torch.Generator(device=device)
    generator.manual_seed(seed + tp.rank)
    return generator


class SelfAttention(nn.Module):
    """Projections around the one attention function."""

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        *,
        init: InitMethod,
        output_init: InitMethod,
        generators: Callable[[str], torch.Generator],
        bias: bool = True,
        dropout: float = 0.0,
        window: int | None = None,
        engine: str = "auto",
        pruning: bool = True,
        rotary: RotaryEmbedding | None = None,
        tp: TensorParallel = SERIAL,
    ) -> None:
        super().__init__()
        tp.slice_of(num_heads, "num_attention_heads")  # whole heads only
        self.head_dim = hidden_size // num_heads
        self.dropout, self.window = dropout, window
        self.engine, self.pruning = engine, pruning
        self.tp = tp
        self.rotary = rotary
        self.query_key_value = ColumnParallelLinear(
            hidden_size,
            3 * hidden_size,
            bias=bias,
            init=init,
            generator=generators("attention.query_key_value"),
            tp=tp,
        )
        self.dense = RowParallelLinear(
            hidden_size,
            hidden_size,
            bias=bias,
            init=output_init,
            generator=generators("attention.dense"),
            tp=tp,
        )

    def forward(self, x_BLh: Tensor, tables: Tables, cache: LayerCache | None = None) -> Tensor:
        q_BHLD, k_BHLD, v_BHLD = rearrange(
            self.query_key_value(x_BLh),
            "b l (h three d) -> three b h l d",
            three=3,
            d=self.head_dim,
        )
        if self.rotary is not None:
            offset = cache.length if cache is not None else 0
            q_BHLD, k_BHLD = self.rotary(q_BHLD, k_BHLD, offset, offset)
        if cache is not None:
            k_BHLD, v_BHLD = cache.append(k_BHLD, v_BHLD)
        dropout = self.dropout if self.training else 0.0
        out_BHLD = attention(
            q_BHLD,
            k_BHLD,
            v_BHLD,
            tables.bias,
            tables.weight,
            window=self.window,
            dropout=dropout,
            engine=self.engine,
            pruning=self.pruning,
            generator=_dropout_generator(x_BLh.device, self.tp) if dropout else None,
        )
        return self.dense(rearrange(out_BHLD, "b h l d -> b l (h d)"))
