"""The part of the config that DeepSpeed's engine reads."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from megatron.errors import ConfigError

if TYPE_CHECKING:
    from megatron.neox_arguments.arguments import NeoXArgs

SILENT_STEPS = 1_000_000_000
"""DeepSpeed prints its own progress line every steps_per_print; ours is enough."""


def build_deepspeed_config(args: NeoXArgs, world_size: int) -> dict[str, Any]:
    """A dict for `deepspeed.initialize(config=...)`; training builds the optimizer itself."""
    optimization = args.optimization
    batch = args.batch_plan(world_size)
    config: dict[str, Any] = {
        "train_batch_size": batch.train_batch_size,
        "train_micro_batch_size_per_gpu": batch.micro_batch_size,
        "gradient_accumulation_steps": batch.gradient_accumulation_steps,
        "gradient_clipping": optimization.gradient_clipping,
        "steps_per_print": SILENT_STEPS,
        "wall_clock_breakdown": args.logging.wall_clock_breakdown,
        "dump_state": args.logging.dump_state,
        "prescale_gradients": optimization.prescale_gradients,
        "gradient_predivide_factor": optimization.gradient_predivide_factor,
        "zero_optimization": _zero_block(args),
        # Training may build client-side optimizers DeepSpeed has not tested with ZeRO.
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "activation_checkpointing": _activation_block(args),
        "pipeline": {"pipe_partitioned": False, "grad_partitioned": False},
    }
    _add_precision(config, args)
    for key in ("flops_profiler", "comms_logger"):
        if (block := getattr(args.logging, key)) is not None:
            config[key] = block
    _add_extra(config, args.runtime.deepspeed_extra_args or {})
    return config


def _zero_block(args: NeoXArgs) -> dict[str, Any]:
    block = args.optimization.zero_optimization.model_dump(exclude_none=True)
    block["stage"] = zero_stage_in_effect(args)
    # The old spelling warns in DeepSpeed even when false.
    if block.pop("cpu_offload"):
        block.setdefault("offload_optimizer", {"device": "cpu"})
    return block


def _activation_block(args: NeoXArgs) -> dict[str, Any]:
    optimization = args.optimization
    block: dict[str, Any] = {
        "partition_activations": optimization.partition_activations,
        "cpu_checkpointing": optimization.checkpoint_in_cpu,
        "contiguous_memory_optimization": optimization.contiguous_checkpointing,
        "synchronize_checkpoint_boundary": optimization.synchronize_each_layer,
        "profile": optimization.profile_backward,
    }
    if optimization.activation_checkpointing is not None:
        block.update(optimization.activation_checkpointing.model_dump(exclude_none=True))
    return block


def _add_precision(config: dict[str, Any], args: NeoXArgs) -> None:
    optimization = args.optimization
    if optimization.precision == "fp16":
        assert optimization.fp16 is not None
        block = optimization.fp16.model_dump()
        # DeepSpeed insists on an integer here.
        block["min_loss_scale"] = int(block["min_loss_scale"])
        config["fp16"] = block
    elif optimization.precision == "bf16":
        assert optimization.bf16 is not None
        config["bf16"] = optimization.bf16.model_dump()
    config["data_types"] = {"grad_accum_dtype": accumulation_dtype(args)}
    config["data_types"] |= optimization.data_types or {}
    if optimization.communication_data_type is not None:
        config["communication_data_type"] = optimization.communication_data_type
    elif optimization.fp32_allreduce:
        config["communication_data_type"] = "fp32"


def accumulation_dtype(args: NeoXArgs) -> str:
    """What gradients are added up in: fp32 also under bf16, whose sums would lose small parts."""
    usual = "fp16" if args.optimization.precision == "fp16" else "fp32"
    chosen = str((args.optimization.data_types or {}).get("grad_accum_dtype") or usual)
    return {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}.get(chosen, chosen)


def _add_extra(config: dict[str, Any], extra: dict[str, Any]) -> None:
    for key, value in extra.items():
        if key in ("optimizer", "scheduler") or key in config:
            raise ConfigError(
                f"deepspeed_extra_args.{key} would replace a setting that this config makes. "
                f"Use the {key} key itself, or remove it."
            )
        config[key] = value


def zero_stage_in_effect(args: NeoXArgs) -> int:
    """The stage that runs: fp16 and bf16 without ZeRO become stage 1, which computes the same.

    DeepSpeed 0.19 without ZeRO divides fp16 gradients by a loss scale that it never multiplied the
    loss with, leaves tensor-parallel slices out of bf16's gradient norm, and cannot load what a
    bf16 pipeline saved.
    """
    half = args.optimization.precision in ("fp16", "bf16")
    return max(args.optimization.zero_stage, 1 if half else 0)
