"""transformers' Inkling and Inkling2 models on our attention engine.

Inkling adds to each score a bias that depends on the query: a product of a few features per query
and per distance. transformers computes it for every pair of tokens, [batch, heads, length, length].
Here the two factors go to `kerple.attention`, which needs O(length) memory:

    model = InklingForCausalLM.from_pretrained(...)
    use_inkling_engine(model)
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from megatron.engines.dispatch import attention
from megatron.errors import EngineError

NAME = "kerple_inkling"


class BiasFactors:
    """Takes the place of the dense bias between transformers' module and its attention function.

    A layer multiplies its queries and its bias with a temperature by position: the bias' share is
    in the query features then.
    """

    def __init__(self, query_features: Tensor, distance_features: Tensor) -> None:
        self.query_features = query_features  # [B, H, L, R]
        self.distance_features = distance_features  # [1, R, E]

    @property
    def dtype(self) -> torch.dtype:
        return self.query_features.dtype

    def float(self) -> BiasFactors:
        return self

    def to(self, *_: Any) -> BiasFactors:
        return self

    def __mul__(self, temperature: Tensor) -> BiasFactors:
        return BiasFactors(self.query_features.float() * temperature, self.distance_features)


def use_inkling_engine(model: nn.Module) -> nn.Module:
    """Make an Inkling or Inkling2 model of transformers use our engine; returns the model."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import flash_attention_mask

    projections = [part for part in model.modules() if _makes_relative_logits(part)]
    if not projections:
        raise EngineError(
            f"{type(model).__name__} has no relative logits of Inkling; use_inkling_engine takes "
            "transformers' Inkling and Inkling2 models"
        )
    AttentionInterface.register(NAME, _attend)
    AttentionMaskInterface.register(NAME, flash_attention_mask)  # the padding, [B, L], or None
    for part in projections:
        part.forward = partial(_factors, part)
    for part in model.modules():
        if (config := getattr(part, "config", None)) is not None:
            config._attn_implementation = NAME
    return model


def _makes_relative_logits(part: nn.Module) -> bool:
    return type(part).__name__ in ("InklingRelativeLogits", "Inkling2RelativeLogits")


def _factors(part: Any, relative_states: Tensor, *_: Tensor) -> BiasFactors:
    """In the place of its `forward`: [B, L, H, R] states and positions, which are the last ones."""
    return BiasFactors(relative_states.transpose(1, 2), part.proj[None])


def _attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    position_bias: BiasFactors | None = None,
    sinks: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """transformers' attention function: [B, H, L, D] in, [B, L, H, D] out."""
    key_bias = None
    if attention_mask is not None:
        hidden = ~attention_mask[:, None, -key.shape[2] :].bool()
        key_bias = torch.zeros(hidden.shape, device=query.device).masked_fill(hidden, -torch.inf)
    features: dict[str, Any] = {} if position_bias is None else vars(position_bias)
    out = attention(
        *(query, key, value),
        **features,
        key_bias=key_bias,
        sink=None if sinks is None else sinks[..., 0].expand(query.shape[:3]),
        window=sliding_window,
        scale=scaling,
        dropout=dropout,
    )
    return out.transpose(1, 2).contiguous(), None
