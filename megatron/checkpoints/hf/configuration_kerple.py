"""Configuration of KERPLE-NeoX models in Hugging Face's form.

This file, positions_kerple.py and modeling_kerple.py travel with every exported model: they need
torch and transformers and nothing else.
"""

from __future__ import annotations

from typing import Any

from transformers import PretrainedConfig

__all__ = ["KerpleNeoXConfig"]


class KerpleNeoXConfig(PretrainedConfig):
    """A GPT-NeoX decoder whose positions are functions of distance.

    `pos_emb` names the positional embedding (kerple_log, kerple_power, alibi, rpe, rotary, ...);
    `kerple_*`, `rpe_*` and `rotary_*` are its settings. `train_length` is the length trained at;
    only `learned` positions are limited, by `max_position_embeddings`.
    """

    model_type = "kerple_neox"
    keys_to_ignore_at_inference = ("past_key_values",)

    def __init__(
        self,
        vocab_size: int = 50304,
        hidden_size: int = 768,
        num_hidden_layers: int = 12,
        num_attention_heads: int = 12,
        intermediate_size: int = 3072,
        max_position_embeddings: int = 512,
        train_length: int = 512,
        pos_emb: str = "kerple_log",
        norm: str = "layernorm",
        norm_eps: float = 1e-5,
        hidden_act: str = "gelu",
        use_parallel_residual: bool = False,
        share_parallel_norm: bool = False,
        norm_bias: bool = True,
        attention_bias: bool = True,
        mlp_bias: bool = True,
        hidden_dropout: float = 0.0,
        attention_dropout: float = 0.0,
        attention_window: int | None = None,
        rpe_num_buckets: int = 32,
        rpe_max_distance: int = 128,
        rotary_pct: float = 1.0,
        rotary_base: float = 10000.0,
        rotary_scaling: dict[str, Any] | None = None,
        kerple_constraint: str = "ste",
        kerple_bias_scale: str = "post",
        kerple_share: str = "all",
        kerple_legacy_bf16: bool = False,
        initializer_range: float = 0.02,
        iteration: int = 0,
        use_cache: bool = True,
        tie_word_embeddings: bool = False,
        bos_token_id: int | None = None,
        eos_token_id: int | None = None,
        pad_token_id: int | None = None,
        **kwargs: Any,
    ) -> None:
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.num_hidden_layers = num_hidden_layers
        self.num_attention_heads = num_attention_heads
        self.intermediate_size = intermediate_size
        self.max_position_embeddings = max_position_embeddings
        self.train_length = train_length
        self.pos_emb = pos_emb
        self.norm = norm
        self.norm_eps = norm_eps
        self.hidden_act = hidden_act
        self.use_parallel_residual = use_parallel_residual
        self.share_parallel_norm = share_parallel_norm
        self.norm_bias = norm_bias
        self.attention_bias = attention_bias
        self.mlp_bias = mlp_bias
        self.hidden_dropout = hidden_dropout
        self.attention_dropout = attention_dropout
        self.attention_window = attention_window
        self.rpe_num_buckets = rpe_num_buckets
        self.rpe_max_distance = rpe_max_distance
        self.rotary_pct = rotary_pct
        self.rotary_base = rotary_base
        self.rotary_scaling = rotary_scaling
        self.kerple_constraint = kerple_constraint
        self.kerple_bias_scale = kerple_bias_scale
        self.kerple_share = kerple_share
        self.kerple_legacy_bf16 = kerple_legacy_bf16
        self.initializer_range = initializer_range
        self.iteration = iteration
        self.use_cache = use_cache
        kwargs |= {
            "tie_word_embeddings": tie_word_embeddings,
            "bos_token_id": bos_token_id,
            "eos_token_id": eos_token_id,
            "pad_token_id": pad_token_id,
        }
        super().__init__(**kwargs)

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_attention_heads
