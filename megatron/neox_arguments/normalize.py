"""Canonical keys: hyphens, old names, old spellings of bf16, keys of GPT-NeoX that we lack.

GPT-NeoX has keys for features that are absent here. A config that carries such a key at the value
that switches the feature off means the same here and loads; any other value is refused, because
ignoring it would train another model than the one the file describes.
"""

from __future__ import annotations

from typing import Any

from megatron.errors import ConfigError, did_you_mean
from megatron.neox_arguments.declared_keys import KNOWN_KEYS, NESTED_BLOCKS
from megatron.neox_arguments.optimization_keys import PRECISION_NAMES

ALIASES: dict[str, str] = {
    "save_interval": "checkpoint_factor",
    "slurm_comment": "comment",
    "gas": "gradient_accumulation_steps",
    "label_data_paths": "train_label_data_paths",
}
"""Old name -> today's name; the value keeps its meaning."""


def _keys(off: str = "", **harmless: tuple[Any, ...]) -> dict[str, tuple[Any, ...]]:
    """Keys -> values that leave their feature off; for those in `off`, null and false alone do."""
    return {**dict.fromkeys(off.split(), ()), **harmless}


_FEATURES: dict[str, dict[str, tuple[Any, ...]]] = {
    "mixture of experts": _keys(
        "moe_token_dropping moe_glu moe_lbl_in_fp32 moe_jitter_eps moe_grouped_gemm use_tutel "
        "enable_expert_tensor_parallelism",
        moe_num_experts=(0, 1), moe_top_k=(1,), moe_loss_coeff=(0.1,),
        moe_train_capacity_factor=(1.0,), moe_eval_capacity_factor=(1.0,),
        moe_min_capacity=(4,), moe_use_residual=(True,), moe_expert_parallel_size=(1,),
        moe_type=("megablocks",), moe_expert_interval=(1, 2), moe_aux_loss_coeff=(0, 0.1),
        moe_router_type=("sinkhorn", "topk"), create_moe_param_group=(True,),
        expert_interval=(1, 2)
    ),
    "mu-parametrisation": _keys(
        "use_mup coord_check save_base_shapes base_shapes_file",
        mup_init_scale=(1.0,), mup_attn_temp=(1.0,), mup_output_temp=(1.0,),
        mup_embedding_mult=(1.0,), mup_rp_embedding_mult=(1.0,), mup_width_scale=(2,)
    ),
    "sparse attention": _keys(sparsity_config=({},), sparse_attention=({},)),
    "Mamba": _keys(
        "mamba_selective_scan_fusion mamba_causal_conv_fusion mamba_inner_func_fusion "
        "mamba_use_bias_in_linears",
        mamba_selective_fp32_params=(True,), mamba_use_bias_in_conv=(True,)
    ),
    "RWKV": _keys("dim_att head_size ffn_dim"),
    "Transformer Engine": _keys(
        "te_columnparallel te_rowparallel te_layernorm_mlp te_mha te_fp8_mha",
        te_fp8_format=("hybrid",), te_fp8_wgrad=(True,), te_fp8_amax_history_len=(1,),
        te_fp8_amax_compute_algo=("most_recent",), te_fp8_margin=(0,)
    ),
    "preference training": _keys(
        "dpo_reference_free reinforce_leave_one_out precompute_model_name",
        train_impl=("normal",), dataset_impl=("gpt2",), dpo_fp32=(True,), dpo_beta=(0.1,),
        kto_fp32=(True,), kto_desirable_weight=(1.0,), kto_undesirable_weight=(1.0,),
        kto_beta=(0.1,), z_loss=(0.0,), fp32_reinforce=(True,), kl_impl=("mse",),
        kl_div_beta=(0.1,)
    ) | {
        f"{sign}_{split}_{kind}": ()
        for sign in ("pos", "neg") for split in ("train", "valid", "test")
        for kind in ("data_paths", "label_data_paths")
    },
    "reward datasets": _keys(
        "train_reward_data_paths valid_reward_data_paths test_reward_data_paths"
    ),
    "packing other than the default": _keys("packing", short_seq_prob=(0.1,)),
    "online data and replay": _keys(
        "is_replay_enabled replay_config serve_model_weights",
        online_dataserver_ips=("localhost",), online_dataserver_ports=(10000,),
        weight_server_port=(6000,)
    ),
    "encoder-decoder and masked models": _keys(
        "num_encoder_layers decoder_seq_length loss_on_targets_only",
        model_arch=("gpt2",), extra_sentinel_tokens=(0,), masked_lm_prob=(0.15,),
        mean_noise_span_length=(3,)
    ),
    "parameter-efficient tuning": _keys("adapter_config", soft_prompt_tuning=({},)),
    "layer sharing": _keys("num_unique_layers", param_sharing_style=("grouped",)),
    "gMLP": _keys(gmlp_attn_dim=(64,)),
    "this MLP or attention variant": _keys(
        "fp16_lm_cross_entropy",
        mlp_type=("regular",), expansion_factor=(4,), opt_pos_emb_offset=(0,),
        rotary_save_freqs_buffer=(True,), rmsnorm_fusion=(True,)
    ),
    "sequence and context parallelism (here sequence_parallel_size)": _keys(
        "sequence_parallel", context_parallel_size=(0, 1), requires_attention_mask=(True,)
    ),
    "Comet": _keys(
        "use_comet comet_workspace comet_project comet_experiment_name comet_tags comet_others "
        "comet_experiment"
    ),
    "this kind of logging or profiling": _keys(
        "log_gradient_noise_scale gradient_noise_scale_cpu_offload peak_theoretical_tflops",
        gradient_noise_scale_n_batches=(5,), tensorboard=({},), wandb=({},), csv_monitor=({},)
    ),
    "S3 storage": _keys("s3_path", s3_chunk_size=(104_857_600,)),
    "data without a shared file system": _keys(use_shared_fs=(True,)),
    "this DeepSpeed feature": _keys(
        "sparse_gradients autotuning_run load_universal detect_nvlink_pairs deepscale "
        "deepscale_config",
        amp=({},), scheduler=({},), curriculum_learning=({},), curriculum_seqlen=(0,),
        autotuning=({},), data_efficiency=({},), elasticity=({},), compression_training=({},),
        checkpoint=({},), deepspeed=(True,), deepspeed_activation_checkpointing=(True,)
    ),
    "this old switch": _keys(
        "lazy_mpu_init adlr_autoresume onnx_safe weighted_document_limit",
        adlr_autoresume_interval=(1000,)
    ),
}  # fmt: skip

SHAPING = (
    "mixture of experts", "mu-parametrisation", "sparse attention", "Mamba", "RWKV",
    "Transformer Engine", "encoder-decoder and masked models", "parameter-efficient tuning",
    "layer sharing", "gMLP", "this MLP or attention variant",
)  # fmt: skip
"""Features that make another model. A checkpoint that was trained with one of the rest loads."""

IGNORED = frozenset({"use_flashattn_swiglu", "fused_kernels_build_path", "global_num_gpus"})
"""GPT-NeoX keys that change nothing: the same function fused, a build folder, a derived count."""

UNIMPLEMENTED: dict[str, tuple[str, tuple[Any, ...]]] = {
    key: (feature, harmless)
    for feature, keys in _FEATURES.items()
    for key, harmless in keys.items()
}
"""GPT-NeoX key -> (the feature, values that leave it off; null, false and {enabled: false} do)."""

DERIVED: dict[str, str] = {
    "lr": "optimizer.params.lr",
    "optimizer_type": "optimizer.type",
    "zero_stage": "zero_optimization.stage",
    "zero_reduce_scatter": "zero_optimization.reduce_scatter",
    "zero_contiguous_gradients": "zero_optimization.contiguous_gradients",
    "zero_reduce_bucket_size": "zero_optimization.reduce_bucket_size",
    "zero_allgather_bucket_size": "zero_optimization.allgather_bucket_size",
    "batch_size": "train_micro_batch_size_per_gpu",
    "clip_grad": "gradient_clipping",
    "hysteresis": "fp16.hysteresis",
    "loss_scale": "fp16.loss_scale",
    "dynamic_loss_scale": "fp16.loss_scale",
    "loss_scale_window": "fp16.loss_scale_window",
    "min_scale": "fp16.min_loss_scale",
    "padded_vocab_size": "make_vocab_size_divisible_by",
    "save_iters": "extra_save_iters",
    "is_pipe_parallel": "pipe_parallel_size",
    "world_size": "num_gpus",
    "rank": "num_gpus",
    "local_rank": "num_gpus",
    "user_script": "the script after deepy.py",
    "config_files": "the files on the command line",
    "git_hash": "nothing: it is recorded by itself",
}
"""Keys that GPT-NeoX fills in itself -> what to set instead."""


def changes_the_model(key: str) -> bool:
    """Whether a foreign key belongs to a feature that makes another model."""
    return key in UNIMPLEMENTED and UNIMPLEMENTED[key][0] in SHAPING


def _is_off(key: str, value: Any) -> bool:
    if value is None or (value is False and key != "use_shared_fs"):
        return True
    if isinstance(value, dict) and value.get("enabled") is False:
        return True
    # 1 == True in Python, yet `moe_num_experts: true` is not a number of experts.
    return any(
        value == option and isinstance(value, bool) == isinstance(option, bool)
        for option in UNIMPLEMENTED[key][1]
    )


def _foreign_problems(foreign: list[tuple[str, Any]], source: str) -> list[str]:
    """One line per feature that is switched on, and one per key that cannot be set."""
    switched_on: dict[str, list[tuple[str, Any]]] = {}
    for key, value in foreign:
        if key in UNIMPLEMENTED and not _is_off(key, value):
            switched_on.setdefault(UNIMPLEMENTED[key][0], []).append((key, value))
    problems = []
    for feature, found in switched_on.items():
        named = ", ".join(f"{key} = {value!r:.80}" for key, value in found)
        if len(found) > 1:
            which, fix = "are GPT-NeoX keys that are", "Remove them."
        else:
            harmless = UNIMPLEMENTED[found[0][0]][1]
            neutral = "null or false"
            if harmless:
                neutral = "its default" if harmless[0] is True else repr(harmless[0])
            which, fix = "is a GPT-NeoX key that is", f"Remove it, or leave it at {neutral}."
        problems.append(f"{source}: {named} {which} not implemented here ({feature}). {fix}")
    return problems + [
        f"{source}: {key} = {value!r:.80} cannot be set, it is derived. Set {DERIVED[key]} instead."
        for key, value in foreign
        if key in DERIVED
    ]


# One layer (a file, a --set) in canonical keys and values.

_OF_LOSS_SCALING = (
    "bf16", "loss_scale", "loss_scale_window", "initial_scale_power", "hysteresis",
    "min_loss_scale",
)  # fmt: skip


def canonical_key(key: str) -> str:
    """`save-interval` -> `checkpoint_factor`."""
    underscored = key.replace("-", "_")
    return ALIASES.get(underscored, underscored)


def unknown_key(key: str, source: str) -> str:
    """The error message for an unknown key, with the nearest known one."""
    hint = did_you_mean(key, [*KNOWN_KEYS, *ALIASES], "docs/neox_arguments.md lists every key.")
    return f"{source}: unknown key {key!r:.80}. {hint}"


def normalize(values: dict[str, Any], source: str) -> tuple[dict[str, Any], list[str]]:
    """Canonical keys and values of one layer (a file, a --set), and all that is wrong with them."""
    result: dict[str, Any] = {}
    foreign: list[tuple[str, Any]] = []
    problems = []
    for raw_key, raw_value in values.items():
        key = canonical_key(raw_key)
        if key in UNIMPLEMENTED or key in DERIVED:
            foreign.append((key, raw_value))
        elif key in KNOWN_KEYS:
            value = _normalize_value(key, raw_value, source)
            if key in result and result[key] != value:
                problems.append(
                    f"{source}: {key} is given twice with different values, {result[key]!r:.80} "
                    f"and {value!r:.80} (hyphens, underscores and old names are the same key). "
                    "Keep one."
                )
            result[key] = value
        elif key not in IGNORED:
            problems.append(unknown_key(raw_key, source))
    _move_bfloat16_block(result, source)
    return result, [*_foreign_problems(foreign, source), *problems]


def _normalize_value(key: str, value: Any, source: str) -> Any:
    if key in NESTED_BLOCKS:
        block = underscore_keys(value)
        if key == "bf16" and isinstance(block, dict):  # written like fp16's, which scales its loss
            return {name: item for name, item in block.items() if name not in _OF_LOSS_SCALING}
        return block
    if key == "layer_pattern" and isinstance(value, list):
        return [underscore_keys(entry) if isinstance(entry, dict) else entry for entry in value]
    if key == "precision" and isinstance(value, str):
        return PRECISION_NAMES.get(value.lower(), value)
    if key == "pos_emb" and value is None:
        raise ConfigError(f"{source}: pos_emb = null is ambiguous; write `none` for no positions.")
    if key == "split" and isinstance(value, list):
        return ",".join(str(share) for share in value)
    return value


def underscore_keys(value: Any) -> Any:
    """A nested block with underscores in its keys; a flag is `{enabled: flag}`."""
    if isinstance(value, bool):
        return {"enabled": value}
    if isinstance(value, dict):
        return {
            key.replace("-", "_"): underscore_keys(item) if isinstance(item, dict) else item
            for key, item in value.items()
        }
    return value


def _move_bfloat16_block(values: dict[str, Any], source: str) -> None:
    """`fp16: {enabled: True, type: bfloat16}` has always been meant as bf16."""
    block = values.get("fp16")
    if not isinstance(block, dict):
        return
    block.pop("fp16", None)
    kind = block.pop("type", None)
    name = PRECISION_NAMES.get(str(kind).lower())
    if kind is None or name == "fp16":
        return
    if name != "bf16":
        raise ConfigError(f"{source}: fp16.type = {kind!r:.80}; use fp16 or bfloat16.")
    bf16 = {"enabled": block.get("enabled", True)}
    if values.setdefault("bf16", bf16) != bf16:
        raise ConfigError(
            f"{source}: fp16.type = bfloat16 and the bf16 block disagree. Keep the bf16 block only."
        )
    del values["fp16"]


def enabled_blocks(values: dict[str, Any]) -> list[str]:
    """Which of the fp16 and bf16 blocks are there and not switched off."""
    return [
        name
        for name in ("fp16", "bf16")
        if isinstance(values.get(name), dict) and values[name].get("enabled", True) is not False
    ]


def resolve_precision(values: dict[str, Any]) -> dict[str, Any]:
    """Make `precision` and the fp16/bf16 blocks agree; ConfigError if they contradict."""
    enabled = enabled_blocks(values)
    if len(enabled) == 2:
        raise ConfigError(
            "fp16 and bf16 are both enabled. Keep one block, or use `--set precision=bf16`."
        )
    precision = values.get("precision")
    if precision is None:
        precision = enabled[0] if enabled else "fp32"
    elif enabled and precision in ("fp32", "fp16", "bf16") and precision != enabled[0]:
        raise ConfigError(
            f"precision = {precision} but {enabled[0]}.enabled is true. Remove the "
            f"{enabled[0]} block or set precision to {enabled[0]}."
        )
    resolved = {**values, "precision": precision}
    for name in ("fp16", "bf16"):
        block = values.get(name)
        if name == precision:
            resolved[name] = {} if block is None else block
        elif isinstance(block, dict) and name not in enabled:
            resolved[name] = None
    return resolved
