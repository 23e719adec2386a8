"""A model's config, and the names of its weights, in Hugging Face's form and back."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import GPTNeoXConfig, PretrainedConfig

from megatron.checkpoints.hf.configuration_kerple import KerpleNeoXConfig
from megatron.errors import CheckpointError
from megatron.model import ModelSpec
from megatron.model.layer_formulas import ACTIVATIONS, GATED, NORM_EPSILONS
from megatron.model.layer_list import FIRST_LAYER, Layer, LayerFactory
from megatron.model.position_names import canonical_name
from megatron.neox_arguments import NeoXArgs
from megatron.neox_arguments.catalogue import METHODS
from megatron.neox_arguments.model_keys import ModelArgs, hugging_face_keys, intermediate_size_for

_GELU_TANH = ("gelu_new", "gelu_fast", "gelu_pytorch_tanh", "gelu_tanh")


# Keys that transformers' GPTNeoXConfig has; any other key must have its default.
_SAME_NAME = {
    "num_layers", "hidden_size", "num_attention_heads", "intermediate_size",
    "max_position_embeddings", "gpt_j_residual", "use_bias_in_attn_linear", "hidden_dropout",
    "attention_dropout", "init_method_std",
}  # fmt: skip
_CONVERTED = {"seq_length", "pos_emb", "rotary_pct", "rotary_emb_base", "activation"}
# Keys that rotary models do not read.
_UNUSED_BY_ROTARY = {
    "rpe_num_buckets", "rpe_max_distance", "kerple_constraint", "kerple_bias_scale",
    "kerple_share", "kerple_legacy_bf16",
}  # fmt: skip


def is_plain_gpt_neox(spec: ModelSpec) -> bool:
    """Whether transformers' own GPTNeoXForCausalLM computes exactly this model."""
    free = _SAME_NAME | _CONVERTED | _UNUSED_BY_ROTARY
    shaping = {key.key for key in hugging_face_keys()} - free
    return (
        canonical_name(spec.pos_emb) == "rotary"
        and spec.activation_name in ("gelu", "gelu_tanh", "relu")
        and all(getattr(spec, key) == ModelArgs.model_fields[key].default for key in shaping)
    )


def hf_config(
    spec: ModelSpec, *, iteration: int, eos: int | None, own_kernel: bool
) -> PretrainedConfig:
    """GPTNeoXConfig where that is the same model, else KerpleNeoXConfig."""
    keys = hugging_face_keys()
    values = {key.name: getattr(spec, key.key) for key in keys}
    common = {key.name: values[key.name] for key in keys if key.key in _SAME_NAME} | {
        "vocab_size": spec.padded_vocab_size,
        "intermediate_size": spec.ffn_size,
        "tie_word_embeddings": not spec.no_weight_tying,
        "bos_token_id": eos,
        "eos_token_id": eos,
    }
    act = spec.activation_name
    if is_plain_gpt_neox(spec):
        common |= {
            "hidden_act": "gelu_pytorch_tanh" if act == "gelu_tanh" else act,
            "layer_norm_eps": spec.layernorm_epsilon,
            "rotary_pct": spec.rotary_pct,
            "rotary_emb_base": spec.rotary_emb_base,
        }
        return GPTNeoXConfig(**common)
    pos_emb = canonical_name(spec.pos_emb)
    if pos_emb not in METHODS and not own_kernel:
        raise CheckpointError(
            f"pos_emb: {spec.pos_emb!r} is a class of your own, whose source an export must hold. "
            "If its users may read and run the source: --with-kernel-source (in Python "
            "write_hf(..., with_kernel_source=True))."
        )
    scaling, heat = spec.rope_scaling, spec.attention_temperature
    values |= common | {
        "pos_emb": pos_emb,
        "layer_pattern": _exported_pattern(spec),
        "attention_temperature": heat.model_dump() if heat else None,
        "hidden_act": act,
        "attention_window": spec.attention_window,
        "norm_eps": getattr(spec, NORM_EPSILONS[spec.norm]),
        "apply_query_key_layer_scaling": _scales_tables(spec),
        "rotary_scaling": scaling.model_dump(exclude_none=True) if scaling else None,
        "iteration": iteration,
    }
    return KerpleNeoXConfig(**values)


def _exported_pattern(spec: ModelSpec) -> list[dict[str, Any]] | None:
    """layer_pattern with our names of positions: an export knows no others."""
    pattern = []
    for entry in spec.layer_pattern or ():
        name = canonical_name(entry.get("pos_emb", spec.pos_emb))
        if name not in METHODS:
            raise CheckpointError(
                f"layer_pattern with pos_emb: {name!r:.80}, a class of your own: the export of a "
                "pattern holds no source of yours. Convert to native."
            )
        pattern.append({**entry, "pos_emb": name} if "pos_emb" in entry else entry)
    return pattern or None


def _scales_tables(spec: ModelSpec) -> bool:
    """Whether layers scale their bias; in an export one key holds for all layers."""
    factors = [spec.table_factor(layer) for layer in range(spec.num_layers)]
    scaled = factors == [max(1, layer) for layer in range(spec.num_layers)]
    if not scaled and max(factors) > 1:
        raise CheckpointError(
            "attention_config with `flash` in some layers and apply_query_key_layer_scaling: an "
            "export scales the bias of all layers or of none. Convert to native or neox."
        )
    return scaled and max(factors) > 1


def args_from_hf(config: PretrainedConfig, source: Path) -> NeoXArgs:
    """The NeoX config of a Hugging Face folder of ours, or of a GPT-NeoX one."""
    ours = isinstance(config, KerpleNeoXConfig)
    values = {
        key.key: getattr(config, key.name)
        for key in hugging_face_keys()
        if ours or key.key in _SAME_NAME
    }
    values |= _from_kerple(config) if ours else _from_gpt_neox(config, source)
    values |= {
        **_activation(config.hidden_act, source),
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


def _from_kerple(config: Any) -> dict[str, Any]:
    window: int | None = config.attention_window
    return {
        "sliding_window_width": None if window is None else window - 1,
        NORM_EPSILONS[config.norm]: config.norm_eps,
    }


def _from_gpt_neox(config: Any, source: Path) -> dict[str, Any]:
    rope: Mapping[str, Any] = getattr(config, "rope_parameters", None) or {}
    kind = rope.get("rope_type", "default")
    if kind != "default":
        raise CheckpointError(
            f"{source / 'config.json'}: rope_type {kind!r} is not converted; only plain rotary is"
        )
    share = rope.get("partial_rotary_factor", getattr(config, "rotary_pct", 0.25))
    base = rope.get("rope_theta", getattr(config, "rotary_emb_base", 10000))
    return {
        "seq_length": config.max_position_embeddings,
        "pos_emb": "rotary",
        "rotary_pct": share,
        "rotary_emb_base": base,
        "layernorm_epsilon": config.layer_norm_eps,
    }


# Names of weights in Hugging Face files: each layer states those of its own (`hf_names`).

_BUFFERS = re.compile(r"\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)$")
HEADS = {"kerple_neox": "lm_head.weight", "gpt_neox": "embed_out.weight"}
"""Name of the head's weight by model type."""


def _prefixes(spec: ModelSpec, head: str) -> dict[str, str]:
    """Our prefix of a layer's names -> the prefix in a Hugging Face file."""
    return {
        f"{index}.{ours}": theirs.format(number=index - FIRST_LAYER, head=head)
        for index, layer in enumerate(LayerFactory(spec).layers())
        if isinstance(layer, Layer)
        for ours, theirs in layer.hf_names.items()
    }


def _renamed(name: str, prefixes: Mapping[str, str]) -> str:
    """A name whose prefix is one of these, with the other one; any other name as it is."""
    for prefix, other in prefixes.items():
        if name.startswith(prefix):
            return other + name[len(prefix) :]
    return name


def to_hf_names(
    weights: Mapping[str, Tensor], spec: ModelSpec, model_type: str
) -> dict[str, Tensor]:
    """Canonical names to Hugging Face's."""
    prefixes = _prefixes(spec, HEADS[model_type])
    return {_renamed(name, prefixes): tensor for name, tensor in weights.items()}


def from_hf_names(weights: Mapping[str, Tensor], spec: ModelSpec) -> dict[str, Tensor]:
    """Hugging Face's names to canonical ones; buffers and a tied head are left out.

    A name that is not known is kept under an index of no layer, to be listed among the misfits.
    """
    prefixes = {
        theirs: ours for head in HEADS.values() for ours, theirs in _prefixes(spec, head).items()
    }
    prefixes[""] = f"{spec.num_layers + 5}."
    tied = not spec.no_weight_tying
    return {
        _renamed(name, prefixes): tensor
        for name, tensor in weights.items()
        if not _BUFFERS.search(name) and not (tied and name in HEADS.values())
    }
