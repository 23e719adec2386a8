"""The architectures of transformers that our model computes: one table each, read in both ways.

A table has the keys of the config that are plain renames, the values that the architecture implies,
the values that it must not have, and the names and layouts of the weights. What is
more than a rename (activation, rotary angles, window) is converted by `hf_config.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Layout = Literal["same", "heads", "stacked"]


@dataclass(frozen=True)
class HFWeight:
    """Names and layout of one of our weights in their files.

    heads    our queries, keys and values: three weights there, or one that stacks the three
    stacked  equal parts of ours, one after the other
    """

    names: tuple[str, ...]
    layout: Layout = "same"
    transposed: bool = False
    """A matrix there is [inputs, outputs]."""


@dataclass(frozen=True)
class Architecture:
    """One `model_type` of transformers."""

    model_type: str
    causal_lm: str
    """The class that computes logits."""
    keys: Mapping[str, str]
    """Our key -> theirs, with the same value."""
    implied: Mapping[str, Any]
    """Our keys that have this value in every such model."""
    layer: Mapping[str, HFWeight]
    """How names of our weights in a layer begin -> where they are, after `layers`."""
    outside: Mapping[str, str]
    """The same for the other weights; L is the number of layers."""
    layers: str = "model.layers.{number}."
    required: Mapping[str, Any] = field(default_factory=dict)
    """Their keys that must have this value, since our model has no other."""
    activation: str = "hidden_act"
    width: str = "intermediate_size"
    rotary: Literal["none", "part", "whole"] = "whole"
    """Whether heads are rotated, and whether a part of them may be."""
    window: Literal["none", "sliding_window", "layer_types"] = "none"
    """Which of their keys sets the attention window."""
    copies: Mapping[str, str] = field(default_factory=dict)
    """Their keys that repeat a key of ours."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Other beginnings of names in their files -> those of the table."""
    base: str = "model."
    """What names lack in the files of a model without its head."""


_SIZES = {
    "num_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "num_attention_heads": "num_attention_heads",
    "max_position_embeddings": "max_position_embeddings",
    "init_method_std": "initializer_range",
    "attention_dropout": "attention_dropout",
}
_LLAMA_KEYS = {
    **_SIZES,
    "num_kv_heads": "num_key_value_heads",
    "kv_channels": "head_dim",
    "rms_norm_epsilon": "rms_norm_eps",
}
_NO_BIASES = {"use_bias_in_attn_linear": False, "use_bias_in_mlp": False}
_LLAMA = {"pos_emb": "rotary", "norm": "rmsnorm", "use_bias_in_norms": False}
_LLAMA_BLOCKS = {
    "attention.query_key_value.": HFWeight(
        ("self_attn.q_proj.", "self_attn.k_proj.", "self_attn.v_proj."), "heads"
    ),
    "attention.dense.": HFWeight(("self_attn.o_proj.",)),
    "mlp.dense_h_to_4h.": HFWeight(("mlp.up_proj.", "mlp.gate_proj."), "stacked"),
    "mlp.dense_4h_to_h.": HFWeight(("mlp.down_proj.",)),
    "post_attention_layernorm.scale": HFWeight(("post_attention_layernorm.weight",)),
}
_INPUT_NORM = {"input_layernorm.scale": HFWeight(("input_layernorm.weight",))}
_QK_NORMS = {
    "attention.q_norm.scale": HFWeight(("self_attn.q_norm.weight",)),
    "attention.k_norm.scale": HFWeight(("self_attn.k_norm.weight",)),
}
_LLAMA_LAYER = {**_LLAMA_BLOCKS, **_INPUT_NORM}
_LLAMA_OUTSIDE = {
    "0.word_embeddings.": "model.embed_tokens.",
    "{L+3}.norm.scale": "model.norm.weight",
    "{L+4}.final_linear.": "lm_head.",
}
_ATTENTION_BIAS = {"use_bias_in_attn_linear": "attention_bias"}

LLAMA = Architecture(
    "llama",
    "LlamaForCausalLM",
    {**_LLAMA_KEYS, **_ATTENTION_BIAS, "use_bias_in_mlp": "mlp_bias"},
    _LLAMA,
    _LLAMA_LAYER,
    _LLAMA_OUTSIDE,
)
MISTRAL = Architecture(
    "mistral",
    "MistralForCausalLM",
    _LLAMA_KEYS,
    {**_LLAMA, **_NO_BIASES},
    _LLAMA_LAYER,
    _LLAMA_OUTSIDE,
    window="sliding_window",
)
QWEN2 = Architecture(
    "qwen2",
    "Qwen2ForCausalLM",
    _LLAMA_KEYS,
    {**_LLAMA, **_NO_BIASES, "add_qkv_bias": True},
    _LLAMA_LAYER,
    _LLAMA_OUTSIDE,
    window="layer_types",
)
QWEN3 = Architecture(
    "qwen3",
    "Qwen3ForCausalLM",
    {**_LLAMA_KEYS, **_ATTENTION_BIAS},
    {**_LLAMA, "use_bias_in_mlp": False, "qk_norm": "per_head"},
    {**_LLAMA_LAYER, **_QK_NORMS},
    _LLAMA_OUTSIDE,
    window="layer_types",
)
OLMO2 = Architecture(
    "olmo2",
    "Olmo2ForCausalLM",
    {**_LLAMA_KEYS, **_ATTENTION_BIAS},
    {**_LLAMA, "use_bias_in_mlp": False, "qk_norm": "all_heads", "norm_placement": "output"},
    {
        **_LLAMA_BLOCKS,
        **_QK_NORMS,
        "post_feedforward_layernorm.scale": HFWeight(("post_feedforward_layernorm.weight",)),
    },
    _LLAMA_OUTSIDE,
)
GPT_NEOX = Architecture(
    "gpt_neox",
    "GPTNeoXForCausalLM",
    {
        **_SIZES,
        **_ATTENTION_BIAS,
        "gpt_j_residual": "use_parallel_residual",
        "hidden_dropout": "hidden_dropout",
        "layernorm_epsilon": "layer_norm_eps",
    },
    {"pos_emb": "rotary"},
    {"": HFWeight(("",))},
    {
        "0.word_embeddings.": "gpt_neox.embed_in.",
        "{L+3}.norm.": "gpt_neox.final_layer_norm.",
        "{L+4}.final_linear.": "embed_out.",
    },
    "gpt_neox.layers.{number}.",
    rotary="part",
    aliases={"lm_head.": "embed_out."},
    base="gpt_neox.",
)
GPT2 = Architecture(
    "gpt2",
    "GPT2LMHeadModel",
    {
        "num_layers": "n_layer",
        "hidden_size": "n_embd",
        "num_attention_heads": "n_head",
        "max_position_embeddings": "n_positions",
        "init_method_std": "initializer_range",
        "attention_dropout": "attn_pdrop",
        "hidden_dropout": "resid_pdrop",
        "layernorm_epsilon": "layer_norm_epsilon",
    },
    {"pos_emb": "learned"},
    {
        "input_layernorm.": HFWeight(("ln_1.",)),
        "attention.query_key_value.": HFWeight(("attn.c_attn.",), "heads", transposed=True),
        "attention.dense.": HFWeight(("attn.c_proj.",), transposed=True),
        "post_attention_layernorm.": HFWeight(("ln_2.",)),
        "mlp.dense_h_to_4h.": HFWeight(("mlp.c_fc.",), transposed=True),
        "mlp.dense_4h_to_h.": HFWeight(("mlp.c_proj.",), transposed=True),
    },
    {
        "0.word_embeddings.": "transformer.wte.",
        "0.position_embeddings.": "transformer.wpe.",
        "{L+3}.norm.": "transformer.ln_f.",
        "{L+4}.final_linear.": "lm_head.",
    },
    "transformer.h.{number}.",
    required={
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "add_cross_attention": False,
    },
    activation="activation_function",
    width="n_inner",
    rotary="none",
    copies={"embd_pdrop": "hidden_dropout"},
    base="transformer.",
)

ARCHITECTURES = {
    each.model_type: each for each in (GPT_NEOX, GPT2, LLAMA, MISTRAL, QWEN2, QWEN3, OLMO2)
}
"""By model_type; an export takes the first that computes the model."""
