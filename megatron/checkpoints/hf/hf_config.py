"""A model's config in Hugging Face's form and back."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import GPTNeoXConfig, PretrainedConfig

from megatron.checkpoints.hf.configuration_kerple import KerpleNeoXConfig
from megatron.checkpoints.sharding import split_name
from megatron.errors import CheckpointError
from megatron.model import ModelSpec
from megatron.model.layer_formulas import ACTIVATIONS, GATED, NORM_EPSILONS
from megatron.model.layer_list import FIRST_LAYER
from megatron.model.position_names import canonical_name
from megatron.neox_arguments import NeoXArgs
from megatron.neox_arguments.catalogue import METHODS
from megatron.neox_arguments.model_keys import ModelArgs, hugging_face_keys, intermediate_size_for

_GELU_TANH = ("gelu_new", "gelu_fast", "gelu_pytorch_tanh", "gelu_tanh")


# What transformers' GPTNeoXConfig can say; any other key must be as it is by default.
_PLAIN_KEYS = {
    "num_layers", "hidden_size", "num_attention_heads", "intermediate_size",
    "max_position_embeddings", "seq_length", "pos_emb", "rotary_pct", "rotary_emb_base",
    "activation", "gpt_j_residual", "use_bias_in_attn_linear", "hidden_dropout",
    "attention_dropout", "init_method_std",
}  # fmt: skip
# What rotary models never look at.
_OF_OTHER_POSITIONS = {
    "rpe_num_buckets", "rpe_max_distance", "kerple_constraint", "kerple_bias_scale",
    "kerple_share", "kerple_legacy_bf16",
}  # fmt: skip


def is_plain_gpt_neox(spec: ModelSpec) -> bool:
    """Whether transformers' own GPTNeoXForCausalLM computes exactly this model."""
    shaping = {key.key for key in hugging_face_keys()} - _PLAIN_KEYS - _OF_OTHER_POSITIONS
    return (
        canonical_name(spec.pos_emb) == "rotary"
        and spec.activation_name in ("gelu", "gelu_tanh", "relu")
        and all(getattr(spec, key) == ModelArgs.model_fields[key].default for key in shaping)
    )


def hf_config(
    spec: ModelSpec, *, iteration: int, eos: int | None, own_kernel: bool
) -> PretrainedConfig:
    """GPTNeoXConfig where that is the same model, else KerpleNeoXConfig."""
    values = {key.name: getattr(spec, key.key) for key in hugging_face_keys()}
    values |= {
        "vocab_size": spec.padded_vocab_size,
        "intermediate_size": spec.ffn_size,
        "attention_window": spec.attention_window,
        "hidden_act": spec.activation_name,
        "tie_word_embeddings": not spec.no_weight_tying,
        "bos_token_id": eos,
        "eos_token_id": eos,
    }
    if is_plain_gpt_neox(spec):
        return _gpt_neox_config(values, spec)
    pos_emb = canonical_name(spec.pos_emb)
    if pos_emb not in METHODS and not own_kernel:
        raise CheckpointError(
            f"pos_emb: {spec.pos_emb!r} is a class of your own, whose source an export must hold. "
            "If whoever gets the folder may read and run it: --with-kernel-source (in Python "
            "write_hf(..., with_kernel_source=True))."
        )
    scaling = spec.rope_scaling
    values |= {
        "pos_emb": pos_emb,
        "norm_eps": getattr(spec, NORM_EPSILONS[spec.norm]),
        "rotary_scaling": scaling.model_dump(exclude_none=True) if scaling else None,
        "iteration": iteration,
    }
    return KerpleNeoXConfig(**values)


def _gpt_neox_config(values: dict[str, Any], spec: ModelSpec) -> GPTNeoXConfig:
    same = (
        "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads",
        "intermediate_size", "max_position_embeddings", "use_parallel_residual", "attention_bias",
        "hidden_dropout", "attention_dropout", "initializer_range", "tie_word_embeddings",
        "bos_token_id", "eos_token_id", "rotary_pct",
    )  # fmt: skip
    act = spec.activation_name
    theirs: dict[str, Any] = {name: values[name] for name in same}
    theirs |= {
        "hidden_act": "gelu_pytorch_tanh" if act == "gelu_tanh" else act,
        "layer_norm_eps": spec.layernorm_epsilon,
        "rotary_emb_base": spec.rotary_emb_base,
    }
    return GPTNeoXConfig(**theirs)


def args_from_hf(config: PretrainedConfig, source: Path) -> NeoXArgs:
    """The NeoX config of a Hugging Face folder of ours, or of a GPT-NeoX one."""
    if isinstance(config, KerpleNeoXConfig):
        values = _from_kerple(config, source)
    else:
        values = _from_gpt_neox(config, source)
    values |= {
        "no_weight_tying": not config.tie_word_embeddings,
        "train_micro_batch_size_per_gpu": 1,
    }
    width = values.pop("intermediate_size")
    args = NeoXArgs.from_dict(values)
    if args.model.ffn_size == width:
        return args
    return args.replace(intermediate_size=intermediate_size_for(width, args.model.activation))


def _activation(name: str, source: Path) -> dict[str, Any]:
    if name in _GELU_TANH:
        return {"activation": "gelu", "bias_gelu_fusion": True}
    if name not in ACTIVATIONS and name not in GATED:
        raise CheckpointError(f"{source / 'config.json'}: hidden_act {name!r} is not known here")
    return {"activation": name}


def _from_kerple(config: KerpleNeoXConfig, source: Path) -> dict[str, Any]:
    values = {key.key: getattr(config, key.name) for key in hugging_face_keys()}
    window: int | None = config.attention_window
    return values | {
        "sliding_window_width": None if window is None else window - 1,
        NORM_EPSILONS[config.norm]: config.norm_eps,
        **_activation(config.hidden_act, source),
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
        "num_layers": values.num_hidden_layers,
        "hidden_size": values.hidden_size,
        "num_attention_heads": values.num_attention_heads,
        "intermediate_size": values.intermediate_size,
        "max_position_embeddings": values.max_position_embeddings,
        "seq_length": values.max_position_embeddings,
        "gpt_j_residual": values.use_parallel_residual,
        "use_bias_in_attn_linear": values.attention_bias,
        "hidden_dropout": values.hidden_dropout,
        "attention_dropout": values.attention_dropout,
        "init_method_std": values.initializer_range,
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
