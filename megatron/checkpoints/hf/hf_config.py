"""A model's config in Hugging Face's form and back."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import GPTNeoXConfig, PretrainedConfig

from megatron.checkpoints.hf.configuration_kerple import KerpleNeoXConfig
from megatron.checkpoints.hf.modeling_kerple import ACTIVATIONS, GATED
from megatron.checkpoints.hf.positions_kerple import TABLES
from megatron.checkpoints.weight_names import FIRST_LAYER, split_name
from megatron.errors import CheckpointError
from megatron.model.mlp import default_intermediate_size
from megatron.model.positional_embeddings import canonical_name
from megatron.model.spec import ModelSpec
from megatron.neox_arguments import NeoXArgs

__all__ = ["args_from_hf", "from_hf_names", "hf_config", "is_plain_gpt_neox", "to_hf_names"]

POSITIONS = (*TABLES, "rotary", "learned", "sinusoidal", "none")
_GELU_TANH = ("gelu_new", "gelu_fast", "gelu_pytorch_tanh", "gelu_tanh")


def is_plain_gpt_neox(spec: ModelSpec) -> bool:
    """Whether transformers' own GPTNeoXForCausalLM computes exactly this model."""
    return (
        canonical_name(spec.pos_emb) == "rotary"
        and not spec.rope_scaling
        and spec.norm == "layernorm"
        and spec.activation_name in ("gelu", "gelu_tanh", "relu")
        and spec.use_bias_in_norms
        and spec.use_bias_in_mlp
        and spec.sliding_window_width is None
        and not (spec.gpt_j_residual and spec.gpt_j_tied)
    )


def hf_config(
    spec: ModelSpec, args: NeoXArgs, *, iteration: int, eos: int | None
) -> PretrainedConfig:
    """GPTNeoXConfig where that is the same model, else KerpleNeoXConfig."""
    common: dict[str, Any] = {
        "vocab_size": spec.padded_vocab_size,
        "hidden_size": spec.hidden_size,
        "num_hidden_layers": spec.num_layers,
        "num_attention_heads": spec.num_attention_heads,
        "intermediate_size": spec.feed_forward_size,
        "max_position_embeddings": spec.max_position_embeddings,
        "use_parallel_residual": spec.gpt_j_residual,
        "attention_bias": spec.use_bias_in_attn_linear,
        "hidden_dropout": spec.hidden_dropout,
        "attention_dropout": spec.attention_dropout,
        "initializer_range": spec.init_method_std,
        "tie_word_embeddings": not spec.no_weight_tying,
        "bos_token_id": eos,
        "eos_token_id": eos,
    }
    if is_plain_gpt_neox(spec):
        tanh = spec.activation_name == "gelu_tanh"
        common |= {
            "hidden_act": "gelu_pytorch_tanh" if tanh else spec.activation_name,
            "layer_norm_eps": spec.layernorm_epsilon,
            "rotary_pct": spec.rotary_pct,
            "rotary_emb_base": spec.rotary_emb_base,
        }
        return GPTNeoXConfig(**common)
    return KerpleNeoXConfig(
        **common, **_kerple_values(spec), train_length=args.model.seq_length, iteration=iteration
    )


def _kerple_values(spec: ModelSpec) -> dict[str, Any]:
    pos_emb = canonical_name(spec.pos_emb)
    if pos_emb not in POSITIONS:
        raise CheckpointError(
            f"pos_emb: {spec.pos_emb!r} is a class of your own; the exported modelling file knows "
            f"{', '.join(POSITIONS)}. Add its formula to positions_kerple.py first."
        )
    return {
        "pos_emb": pos_emb,
        "norm": spec.norm,
        "norm_eps": _epsilon(spec),
        "hidden_act": spec.activation_name,
        "share_parallel_norm": spec.gpt_j_tied,
        "norm_bias": spec.use_bias_in_norms,
        "mlp_bias": spec.use_bias_in_mlp,
        "attention_window": spec.sliding_window_width,
        "rpe_num_buckets": spec.rpe_num_buckets,
        "rpe_max_distance": spec.rpe_max_distance,
        "rotary_pct": spec.rotary_pct,
        "rotary_base": spec.rotary_emb_base,
        "rotary_scaling": dict(spec.rope_scaling) if spec.rope_scaling else None,
        "kerple_constraint": spec.kerple_constraint,
        "kerple_bias_scale": spec.kerple_bias_scale,
        "kerple_share": spec.kerple_share,
        "kerple_legacy_bf16": spec.kerple_legacy_bf16,
    }


_EPSILONS = {
    "layernorm": "layernorm_epsilon",
    "rmsnorm": "rms_norm_epsilon",
    "scalenorm": "scalenorm_epsilon",
}


def _epsilon(spec: ModelSpec) -> float:
    return float(getattr(spec, _EPSILONS[spec.norm]))


def args_from_hf(config: PretrainedConfig, source: Path) -> NeoXArgs:
    """The NeoX config of a Hugging Face folder of ours, or of a GPT-NeoX one."""
    values = _shared_values(config)
    if isinstance(config, KerpleNeoXConfig):
        values |= _from_kerple(config)
    elif config.model_type == "gpt_neox":
        values |= _from_gpt_neox(config, source)
    else:
        raise CheckpointError(
            f"{source / 'config.json'}: model_type {config.model_type!r} is not one that can be "
            "converted; there are kerple_neox and gpt_neox"
        )
    usual = default_intermediate_size(values["hidden_size"], values["activation"])
    if values["intermediate_size"] == usual:
        del values["intermediate_size"]
    return NeoXArgs.from_dict(values)


def _shared_values(config: PretrainedConfig) -> dict[str, Any]:
    values: Any = config
    return {
        "num_layers": values.num_hidden_layers,
        "hidden_size": values.hidden_size,
        "num_attention_heads": values.num_attention_heads,
        "intermediate_size": values.intermediate_size,
        "max_position_embeddings": values.max_position_embeddings,
        "gpt_j_residual": values.use_parallel_residual,
        "use_bias_in_attn_linear": values.attention_bias,
        "hidden_dropout": values.hidden_dropout,
        "attention_dropout": values.attention_dropout,
        "init_method_std": values.initializer_range,
        "no_weight_tying": not values.tie_word_embeddings,
        "train_micro_batch_size_per_gpu": 1,
    }


def _activation(name: str, source: Path) -> dict[str, Any]:
    if name in _GELU_TANH:
        return {"activation": "gelu", "bias_gelu_fusion": True}
    if name not in ACTIVATIONS and name not in GATED:
        raise CheckpointError(f"{source / 'config.json'}: hidden_act {name!r} is not known here")
    return {"activation": name}


def _from_kerple(config: KerpleNeoXConfig) -> dict[str, Any]:
    return {
        "seq_length": config.train_length,
        "pos_emb": config.pos_emb,
        "norm": config.norm,
        _EPSILONS[config.norm]: config.norm_eps,
        **_activation(config.hidden_act, Path()),
        "gpt_j_tied": config.share_parallel_norm,
        "use_bias_in_norms": config.norm_bias,
        "use_bias_in_mlp": config.mlp_bias,
        "sliding_window_width": config.attention_window,
        "rpe_num_buckets": config.rpe_num_buckets,
        "rpe_max_distance": config.rpe_max_distance,
        "rotary_pct": config.rotary_pct,
        "rotary_emb_base": config.rotary_base,
        "rope_scaling": config.rotary_scaling,
        "kerple_constraint": config.kerple_constraint,
        "kerple_bias_scale": config.kerple_bias_scale,
        "kerple_share": config.kerple_share,
        "kerple_legacy_bf16": config.kerple_legacy_bf16,
    }


def _from_gpt_neox(config: PretrainedConfig, source: Path) -> dict[str, Any]:
    values: Any = config
    rope: Mapping[str, Any] = getattr(values, "rope_parameters", None) or {}
    kind = rope.get("rope_type", "default")
    if kind != "default":
        raise CheckpointError(
            f"{source / 'config.json'}: rope_type {kind!r} is not converted; only plain rotary is"
        )
    share = rope.get("partial_rotary_factor", getattr(values, "rotary_pct", 0.25))
    base = rope.get("rope_theta", getattr(values, "rotary_emb_base", 10000))
    return {
        "seq_length": values.max_position_embeddings,
        "pos_emb": "rotary",
        "rotary_pct": share,
        "rotary_emb_base": base,
        "layernorm_epsilon": values.layer_norm_eps,
        **_activation(values.hidden_act, source),
    }


# Names of weights in Hugging Face files: GPT-NeoX's there, with `positions` for the kernel.

_LAYER = re.compile(r"^gpt_neox\.layers\.(\d+)\.(.+)$")
_BUFFERS = re.compile(r"\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)$")
_HEADS = ("lm_head.weight", "embed_out.weight")


def to_hf_names(
    weights: Mapping[str, Tensor], num_layers: int, head: str = "lm_head.weight"
) -> dict[str, Tensor]:
    """Canonical names to Hugging Face's."""
    return {_to_hf(name, num_layers, head): tensor for name, tensor in weights.items()}


def _to_hf(name: str, num_layers: int, head: str) -> str:
    index, rest = split_name(name)
    if index == 0:
        embedding, _, leaf = rest.partition(".")
        return f"gpt_neox.{'embed_in' if 'word' in embedding else 'embed_positions'}.{leaf}"
    if index == 1:
        return rest.replace("embedding.", "gpt_neox.positions.", 1)
    if index == num_layers + 3:
        return rest.replace("norm.", "gpt_neox.final_layer_norm.", 1)
    if index == num_layers + 4:
        return head
    return f"gpt_neox.layers.{index - FIRST_LAYER}.{rest}"


def from_hf_names(
    weights: Mapping[str, Tensor], num_layers: int, *, tied: bool
) -> dict[str, Tensor]:
    """Hugging Face's names to canonical ones; buffers and a tied head are left out."""
    result: dict[str, Tensor] = {}
    for name, tensor in weights.items():
        if _BUFFERS.search(name) or (tied and name in _HEADS):
            continue
        result[_from_hf(name, num_layers)] = tensor
    return result


def _from_hf(name: str, num_layers: int) -> str:
    if match := _LAYER.match(name):
        return f"{int(match[1]) + FIRST_LAYER}.{match[2]}"
    if name in _HEADS:
        return f"{num_layers + 4}.final_linear.weight"
    for theirs, ours in (
        ("gpt_neox.embed_in.", "0.word_embeddings."),
        ("gpt_neox.embed_positions.", "0.position_embeddings."),
        ("gpt_neox.positions.", "1.embedding."),
        ("gpt_neox.final_layer_norm.", f"{num_layers + 3}.norm."),
    ):
        if name.startswith(theirs):
            return ours + name[len(theirs) :]
    # Kept under an index of no layer, so that it is listed among the misfits.
    return f"{num_layers + 5}.{name}"
