"""Keys that other code bases know and this one does not, and old names of keys it does know.

GPT-NeoX has keys for features that are absent here. A config that carries such a key at the value
that switches the feature off means the same here and loads; any other value is refused, because
ignoring it would train another model than the one the file describes.
"""

from __future__ import annotations

from typing import Any

ALIASES: dict[str, str] = {
    "save_interval": "checkpoint_factor",
    "slurm_comment": "comment",
    "gas": "gradient_accumulation_steps",
}
"""Old name -> today's name; the value keeps its meaning."""

_OFF: tuple[Any, ...] = ()

_FEATURES: dict[str, dict[str, tuple[Any, ...]]] = {
    "mixture of experts": {
        "moe_num_experts": (0, 1),
        "moe_top_k": (1,),
        "moe_loss_coeff": (0.1,),
        "moe_train_capacity_factor": (1.0,),
        "moe_eval_capacity_factor": (1.0,),
        "moe_min_capacity": (4,),
        "moe_token_dropping": _OFF,
        "moe_use_residual": (True,),
        "moe_expert_parallel_size": (1,),
        "moe_type": ("megablocks",),
        "moe_glu": _OFF,
        "moe_lbl_in_fp32": _OFF,
        "moe_jitter_eps": _OFF,
        "moe_expert_interval": (1, 2),
        "moe_aux_loss_coeff": (0, 0.1),
        "moe_router_type": ("sinkhorn", "topk"),
        "moe_grouped_gemm": _OFF,
        "create_moe_param_group": (True,),
        "expert_interval": (1, 2),
        "use_tutel": _OFF,
        "enable_expert_tensor_parallelism": _OFF,
    },
    "mu-parametrisation": {
        "use_mup": _OFF,
        "coord_check": _OFF,
        "save_base_shapes": _OFF,
        "base_shapes_file": _OFF,
        "mup_init_scale": (1.0,),
        "mup_attn_temp": (1.0,),
        "mup_output_temp": (1.0,),
        "mup_embedding_mult": (1.0,),
        "mup_rp_embedding_mult": (1.0,),
        "mup_width_scale": (2,),
    },
    "sparse attention": {"sparsity_config": ({},), "sparse_attention": ({},)},
    "Mamba": {
        "mamba_selective_scan_fusion": _OFF,
        "mamba_causal_conv_fusion": _OFF,
        "mamba_inner_func_fusion": _OFF,
        "mamba_selective_fp32_params": (True,),
        "mamba_use_bias_in_conv": (True,),
        "mamba_use_bias_in_linears": _OFF,
    },
    "RWKV": {"dim_att": _OFF, "head_size": _OFF, "ffn_dim": _OFF},
    "Transformer Engine": {
        "te_columnparallel": _OFF,
        "te_rowparallel": _OFF,
        "te_layernorm_mlp": _OFF,
        "te_mha": _OFF,
        "te_fp8_format": ("hybrid",),
        "te_fp8_wgrad": (True,),
        "te_fp8_amax_history_len": (1,),
        "te_fp8_amax_compute_algo": ("most_recent",),
        "te_fp8_margin": (0,),
        "te_fp8_mha": _OFF,
    },
    "preference training": {
        "train_impl": ("normal",),
        "dataset_impl": ("gpt2",),
        "dpo_fp32": (True,),
        "dpo_reference_free": _OFF,
        "dpo_beta": (0.1,),
        "kto_fp32": (True,),
        "kto_desirable_weight": (1.0,),
        "kto_undesirable_weight": (1.0,),
        "kto_beta": (0.1,),
        "z_loss": (0.0,),
        "reinforce_leave_one_out": _OFF,
        "fp32_reinforce": (True,),
        "kl_impl": ("mse",),
        "kl_div_beta": (0.1,),
        "precompute_model_name": _OFF,
        **{
            f"{sign}_{split}_{kind}": _OFF
            for sign in ("pos", "neg")
            for split in ("train", "valid", "test")
            for kind in ("data_paths", "label_data_paths")
        },
    },
    "label and reward datasets": {
        "label_data_paths": _OFF,
        **{
            f"{split}_{kind}_data_paths": _OFF
            for split in ("train", "valid", "test")
            for kind in ("label", "reward")
        },
    },
    "packing other than the default": {
        "pack_impl": ("packed",),
        "allow_chopped": (True,),
        "packing": _OFF,
        "short_seq_prob": (0.1,),
    },
    "online data and replay": {
        "is_replay_enabled": _OFF,
        "replay_config": _OFF,
        "online_dataserver_ips": ("localhost",),
        "online_dataserver_ports": (10000,),
        "serve_model_weights": _OFF,
        "weight_server_port": (6000,),
    },
    "encoder-decoder and masked models": {
        "model_arch": ("gpt2",),
        "num_encoder_layers": _OFF,
        "decoder_seq_length": _OFF,
        "extra_sentinel_tokens": (0,),
        "loss_on_targets_only": _OFF,
        "masked_lm_prob": (0.15,),
        "mean_noise_span_length": (3,),
    },
    "parameter-efficient tuning": {"soft_prompt_tuning": ({},), "adapter_config": _OFF},
    "layer sharing": {"num_unique_layers": _OFF, "param_sharing_style": ("grouped",)},
    "gMLP": {"gmlp_attn_dim": (64,)},
    "this MLP or attention variant": {
        "mlp_type": ("regular",),
        "expansion_factor": (4,),
        "opt_pos_emb_offset": (0,),
        "rotary_save_freqs_buffer": (True,),
        "rmsnorm_fusion": (True,),
        "fp16_lm_cross_entropy": _OFF,
    },
    "sequence and context parallelism": {
        "sequence_parallel": _OFF,
        "context_parallel_size": (0, 1),
        "requires_attention_mask": (True,),
    },
    "training by epochs": {"train_epochs": _OFF, "lr_decay_fraction": _OFF},
    "bitsandbytes optimizers": {"use_bnb_optimizer": _OFF},
    "Comet": {
        "use_comet": _OFF,
        "comet_workspace": _OFF,
        "comet_project": _OFF,
        "comet_experiment_name": _OFF,
        "comet_tags": _OFF,
        "comet_others": _OFF,
        "comet_experiment": _OFF,
    },
    "this kind of logging or profiling": {
        "log_gradient_noise_scale": _OFF,
        "gradient_noise_scale_n_batches": (5,),
        "gradient_noise_scale_cpu_offload": _OFF,
        "memory_profiling": _OFF,
        "memory_profiling_path": _OFF,
        "profile": _OFF,
        "profile_step_start": (10,),
        "profile_step_stop": (12,),
        "peak_theoretical_tflops": _OFF,
        "tensorboard": ({},),
        "wandb": ({},),
        "csv_monitor": ({},),
    },
    "S3 storage": {"s3_path": _OFF, "s3_chunk_size": (104_857_600,)},
    "data without a shared file system": {"use_shared_fs": (True,)},
    "this DeepSpeed feature": {
        "amp": ({},),
        "scheduler": ({},),
        "sparse_gradients": _OFF,
        "curriculum_learning": ({},),
        "curriculum_seqlen": (0,),
        "autotuning": ({},),
        "autotuning_run": _OFF,
        "data_efficiency": ({},),
        "elasticity": ({},),
        "compression_training": ({},),
        "checkpoint": ({},),
        "load_universal": _OFF,
        "detect_nvlink_pairs": _OFF,
        "deepspeed": (True,),
        "deepscale": _OFF,
        "deepscale_config": _OFF,
        "deepspeed_activation_checkpointing": (True,),
    },
    "this old switch": {
        "lazy_mpu_init": _OFF,
        "adlr_autoresume": _OFF,
        "adlr_autoresume_interval": (1000,),
        "onnx_safe": _OFF,
        "weighted_document_limit": _OFF,
    },
}

SHAPING = frozenset(
    {
        "mixture of experts",
        "mu-parametrisation",
        "sparse attention",
        "Mamba",
        "RWKV",
        "Transformer Engine",
        "encoder-decoder and masked models",
        "parameter-efficient tuning",
        "layer sharing",
        "gMLP",
        "this MLP or attention variant",
    }
)
"""Features that make another model; a checkpoint trained with any other one can be loaded."""

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


_FALSE_ASKS = frozenset({"use_shared_fs"})


def _is_off(key: str, value: Any, harmless: tuple[Any, ...]) -> bool:
    if value is None or (value is False and key not in _FALSE_ASKS):
        return True
    if isinstance(value, dict) and value.get("enabled") is False:
        return True
    # 1 == True in Python, yet `moe_num_experts: true` is not a number of experts.
    return any(
        value == option and isinstance(value, bool) == isinstance(option, bool)
        for option in harmless
    )


def changes_the_model(key: str) -> bool:
    """Whether a foreign key belongs to a feature that makes another model."""
    return key in UNIMPLEMENTED and UNIMPLEMENTED[key][0] in SHAPING


class ForeignKeys:
    """The foreign keys of one file: which can be passed over, and what to say of the others."""

    def __init__(self, source: str) -> None:
        self.source = source
        self._refused: dict[str, list[str]] = {}
        self._derived: list[str] = []

    def passes_over(self, key: str, value: Any) -> bool:
        """True for a foreign key, on or off; those that are on are remembered."""
        if key in IGNORED:
            return True
        if key in DERIVED:
            self._derived.append(
                f"{self.source}: {key} = {value!r:.80} cannot be set, it is derived. "
                f"Set {DERIVED[key]} instead."
            )
            return True
        if key not in UNIMPLEMENTED:
            return False
        feature, harmless = UNIMPLEMENTED[key]
        if not _is_off(key, value, harmless):
            self._refused.setdefault(feature, []).append(f"{key} = {value!r:.80}")
        return True

    def problems(self) -> list[str]:
        """One line per feature that is switched on, and one per key that cannot be set."""
        return [*(self._line(feature) for feature in self._refused), *self._derived]

    def _line(self, feature: str) -> str:
        found = self._refused[feature]
        if len(found) > 1:
            return (
                f"{self.source}: {', '.join(found)} are GPT-NeoX keys that are not implemented "
                f"here ({feature}). Remove them."
            )
        harmless = UNIMPLEMENTED[found[0].split(" = ")[0]][1]
        neutral = "null or false"
        if harmless:
            neutral = "its default" if harmless[0] is True else repr(harmless[0])
        return (
            f"{self.source}: {found[0]} is a GPT-NeoX key that is not implemented here "
            f"({feature}). Remove it, or leave it at {neutral}."
        )
