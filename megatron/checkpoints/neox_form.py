"""Our model in the terms of GPT-NeoX, or of the official KERPLE code for its kernels.

GPT-NeoX of today calls the MLP's matrices linear1 and linear2; the official KERPLE code (and
GPT-NeoX 2.0) dense_h_to_4h and dense_4h_to_h. KERPLE kernels exist in the latter only.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from megatron.checkpoints.errors import CheckpointError
from megatron.checkpoints.names import FIRST_LAYER, official_kernel_names, split_name
from megatron.model.kernel_parameters import constraint_named
from megatron.model.positional_embeddings import (
    DistanceKernel,
    alibi_slopes,
    canonical_name,
    positional_embedding_class,
)
from megatron.model.spec import ModelSpec
from megatron.neox_arguments import OWNER, NeoXArgs

__all__ = ["neox_config", "neox_shard", "neox_weights"]

_OFFICIAL_POSITIONS = {
    "kerple_log": "kerple_log",
    "kerple_power": "kerple_power_ap_",
    "kerple_bias_wht": "kerple_power_ap_ap",
    "gauss_wht2": "kerple_power__ap",
    "kerple_power_original": "kerple_power_original",
}
_NEOX_POSITIONS = ("learned", "sinusoidal", "rpe", "rotary", "alibi", "none")
_GROUPS = ("model", "parallel", "optimization", "tokenizer", "runtime")
_NOT_THEIRS = {
    "kerple_constraint",
    "kerple_bias_scale",
    "kerple_share",
    "kerple_legacy_bf16",
    "rope_scaling",
    "attention_engine",
    "attention_pruning",
    "max_consecutive_nonfinite",
    "distributed_timeout_minutes",
    "detect_anomaly",
    "deepspeed_extra_args",
    "vocab_size",
    "seq_length_val",
    "activation_checkpointing",
}


def is_official_kerple(spec: ModelSpec) -> bool:
    """Whether only the official KERPLE code has this kernel."""
    return canonical_name(spec.pos_emb) in _OFFICIAL_POSITIONS


def neox_config(args: NeoXArgs, spec: ModelSpec, *, mp: int, pp: int) -> dict[str, Any]:
    """The YAML to keep beside the weights: keys that they know, and an error for what they lack."""
    pos_emb = canonical_name(spec.pos_emb)
    lacking = []
    if pos_emb not in _NEOX_POSITIONS and not is_official_kerple(spec):
        lacking.append(f"pos_emb: {spec.pos_emb}")
    if is_official_kerple(spec) and spec.kerple_bias_scale == "pre":
        lacking.append("kerple_bias_scale: pre")
    if spec.kerple_share == "per_layer" and pos_emb not in ("rotary", "learned", "none", "alibi"):
        lacking.append("kerple_share: per_layer")
    if spec.rope_scaling:
        lacking.append("rope_scaling")
    if lacking:
        raise CheckpointError(
            f"neither GPT-NeoX nor the official KERPLE code has {', '.join(lacking)}; "
            "convert to native or hf instead"
        )
    flat = args.replace(model_parallel_size=mp, pipe_parallel_size=pp).to_dict()
    config = {
        key: value
        for key, value in flat.items()
        if OWNER[key] in _GROUPS and key not in _NOT_THEIRS
    }
    config["pos_emb"] = _OFFICIAL_POSITIONS.get(pos_emb, pos_emb)
    return config


def neox_weights(weights: Mapping[str, Tensor], spec: ModelSpec) -> dict[str, Tensor]:
    """Kernel values as the official code stores them: it knows no softplus, it clamps."""
    cls = positional_embedding_class(spec.pos_emb)
    if spec.kerple_constraint == "ste" or not issubclass(cls, DistanceKernel):
        return dict(weights)
    constraint = constraint_named(spec.kerple_constraint)
    result = dict(weights)
    for parameter, bounds in cls.learnable.items():
        name = f"1.embedding.{parameter}"
        with torch.no_grad():
            result[name] = constraint.value(weights[name].float(), bounds)
    return result


def neox_shard(
    shard: Mapping[str, Tensor], spec: ModelSpec, rank: int, mp: int
) -> dict[str, Tensor]:
    """One model-parallel rank's weights under their names, the kernel written into each layer."""
    kernel = {ours: theirs for theirs, ours in official_kernel_names(spec.pos_emb).items()}
    per_layer: dict[str, Tensor] = {}
    result: dict[str, Tensor] = {}
    for name, tensor in shard.items():
        index, rest = split_name(name)
        if index == 1:
            parameter = rest.removeprefix("embedding.")
            stored = tensor if parameter == "weight" else tensor.reshape(-1, 1, 1)
            per_layer[f"attention.rpe.{kernel[parameter]}"] = stored
            continue
        if not is_official_kerple(spec):
            rest = rest.replace("mlp.dense_h_to_4h.", "mlp.linear1.")
            rest = rest.replace("mlp.dense_4h_to_h.", "mlp.linear2.")
        result[f"{index}.{rest}"] = tensor
    if canonical_name(spec.pos_emb) == "alibi":
        slopes = torch.tensor(alibi_slopes(spec.num_attention_heads)).chunk(mp)[rank]
        per_layer["attention.alibi_embed.slopes"] = slopes
    for layer in range(FIRST_LAYER, FIRST_LAYER + spec.num_layers):
        result |= {f"{layer}.{name}": tensor for name, tensor in per_layer.items()}
    if not spec.no_weight_tying:
        result[f"{spec.num_layers + 4}.word_embeddings.weight"] = shard["0.word_embeddings.weight"]
    return result
