"""docs/use_in_your_model.md holds: a Hugging Face model through its attention interface."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from kerple import attention

transformers = pytest.importorskip("transformers")


def padding_to_key_bias(mask: Tensor) -> Tensor:
    """[batch, keys] of ones and zeros to what hides the zeros, [batch, 1, keys]."""
    return torch.zeros(mask.shape).masked_fill(mask == 0, -math.inf)[:, None]


@pytest.fixture(scope="module")
def llama() -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    return transformers.LlamaForCausalLM(config).eval()


def our_logits(model: Any, tokens: Tensor, mask: Tensor) -> Tensor:
    key_bias = padding_to_key_bias(mask)

    def attend(module: Any, q: Tensor, k: Tensor, v: Tensor, *_: Any, scaling: float, **__: Any):
        out = attention(q, k, v, key_bias=key_bias, scale=scaling)
        return out.transpose(1, 2), None

    transformers.AttentionInterface.register("ours", attend)
    model.set_attn_implementation("ours")
    try:
        return model(tokens, position_ids=(mask.cumsum(-1) - 1).clamp(min=0)).logits
    finally:
        model.set_attn_implementation("eager")


def test_grouped_heads_and_padding_give_the_models_own_logits(llama: Any) -> None:
    tokens = torch.randint(64, (2, 40))
    mask = torch.ones(2, 40, dtype=torch.int64)
    mask[1, :13] = 0  # padded on the left
    llama.set_attn_implementation("eager")
    with torch.no_grad():
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        expected = llama(tokens, attention_mask=mask, position_ids=positions).logits
        actual = our_logits(llama, tokens, mask)
    seen = mask.bool()
    torch.testing.assert_close(actual[seen], expected[seen], rtol=1e-4, atol=1e-5)
