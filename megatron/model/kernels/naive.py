"""The dense engine: all scores at once, through the fused softmax.

Runs on any device and in any precision and is the only engine with attention dropout; needs
O(Lq * Lk) memory. The others are tested against it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron.model.fused_softmax import fused_softmax

__all__ = ["naive_attention"]


def naive_attention(
    q_BHLD: Tensor,
    k_BHLD: Tensor,
    v_BHLD: Tensor,
    bias: Tensor | None,
    weight: Tensor | None,
    *,
    window: int | None,
    scale: float,
    dropout: float = 0.0,
    generator: torch.Generator | None = None,
) -> Tensor:
    batch, heads, q_len, _ = q_BHLD.shape
    # The scale goes into the product, before it is rounded: unscaled fp16 scores may overflow.
    scores = torch.baddbmm(
        q_BHLD.new_empty(1, 1, 1),
        q_BHLD.flatten(0, 1),
        k_BHLD.flatten(0, 1).transpose(-2, -1),
        beta=0.0,
        alpha=scale,
    )
    probs = fused_softmax(
        scores.view(batch, heads, q_len, -1),
        bias,
        weight,
        window=window,
        dropout=dropout,
        generator=generator,
    )
    return probs @ v_BHLD
