"""DeepSpeed's part of the config: its own nested mappings, and what its engine gets."""

from __future__ import annotations

from difflib import get_close_matches
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Field

from megatron.errors import ConfigError
from megatron.neox_arguments import values

if TYPE_CHECKING:
    from megatron.neox_arguments.arguments import NeoXArgs

OptimizerType = Literal["adam", "adamw", "fused_adam", "cpu_adam", "cpu_torch_adam", "sgd"]


def _lower(value: Any) -> Any:
    return value.lower() if isinstance(value, str) else value


def _list_to_tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


class OptimizerParams(values.Group):
    """Hyperparameters of Adam."""

    lr: values.NonNegativeFloat = Field(0.001, description="Peak learning rate.")
    betas: Annotated[tuple[values.Fraction, values.Fraction], BeforeValidator(_list_to_tuple)] = (
        Field((0.9, 0.999), description="Decay rates of the two moments.")
    )
    eps: values.PositiveFloat = Field(1.0e-8, description="Added to the denominator.")


class OptimizerBlock(values.Group):
    """Which optimiser, with which hyperparameters."""

    type: Annotated[OptimizerType, BeforeValidator(_lower)] = Field(
        "adam",
        description="adam or adamw (apex's fused kernel on GPUs if installed, else torch's), "
        "fused_adam or cpu_adam (DeepSpeed's, compiled at first use), cpu_torch_adam (torch's, not "
        "fused), all with decoupled weight decay as in GPT-NeoX; or sgd (momentum is betas[0]). "
        "Upper or lower case.",
    )
    params: OptimizerParams = Field(OptimizerParams(), description="lr, betas, eps.")


class Float16Block(values.Group):
    """fp16 and its loss scaling."""

    enabled: bool = Field(True, description="Train in fp16.")
    auto_cast: bool = Field(False, description="Cast inputs to fp16.")
    loss_scale: values.NonNegativeFloat = Field(0, description="Fixed loss scale; 0 is dynamic.")
    initial_scale_power: values.NonNegativeInt = Field(
        16, description="First dynamic scale: 2^this."
    )
    loss_scale_window: values.PositiveInt = Field(1000, description="Good steps before it doubles.")
    hysteresis: values.PositiveInt = Field(2, description="Overflows before it halves.")
    consecutive_hysteresis: bool = Field(False, description="Refill hysteresis on good steps.")
    min_loss_scale: values.PositiveFloat = Field(1, description="Lowest dynamic scale.")


class BFloat16Block(values.Group):
    """bf16; needs no loss scaling."""

    enabled: bool = Field(True, description="Train in bf16.")
    immediate_grad_update: bool = Field(
        False, description="Add gradients to their fp32 copies as soon as they are ready."
    )
    check_grad_overflow: bool = Field(
        True, description="Skip steps whose gradients are not finite."
    )


class OffloadBlock(values.Group):
    """Where ZeRO keeps what it offloads."""

    device: Literal["none", "cpu", "nvme"] = Field("none", description="none, cpu or nvme.")
    nvme_path: str | None = Field(None, description="Directory for device nvme.")
    pin_memory: bool = Field(True, description="Use page-locked host memory.")
    buffer_count: values.PositiveInt | None = Field(None, description="Number of buffers.")
    buffer_size: values.PositiveInt | None = Field(None, description="Elements of a buffer.")
    max_in_cpu: values.PositiveInt | None = Field(None, description="Elements kept in host memory.")
    pipeline_read: bool | None = Field(None, description="Overlap reading.")
    pipeline_write: bool | None = Field(None, description="Overlap writing.")
    fast_init: bool | None = Field(None, description="Faster first touch on nvme.")
    ratio: values.Fraction | None = Field(None, description="Share of the states to offload.")


class ZeroBlock(values.Group):
    """DeepSpeed's ZeRO: what is split over data-parallel processes.

    Any other key that the installed DeepSpeed knows is passed on to it.
    """

    model_config = ConfigDict(extra="allow")

    stage: Annotated[values.NonNegativeInt, Field(le=3)] = Field(
        0, description="0 nothing, 1 optimizer states, 2 and gradients, 3 and parameters."
    )
    allgather_partitions: bool = Field(True, description="Gather with allgather.")
    allgather_bucket_size: values.PositiveInt = Field(
        500_000_000, description="Elements per gather."
    )
    overlap_comm: bool | None = Field(
        None, description="Overlap communication with the backward pass."
    )
    reduce_scatter: bool = Field(True, description="Average with reduce-scatter.")
    reduce_bucket_size: values.PositiveInt = Field(
        500_000_000, description="Elements per reduction."
    )
    contiguous_gradients: bool = Field(True, description="Copy gradients to one buffer.")
    cpu_offload: bool = Field(
        False, description="Old spelling of offload_optimizer: {device: cpu}."
    )
    offload_optimizer: OffloadBlock | None = Field(None, description="Offload the optimizer.")
    offload_param: OffloadBlock | None = Field(None, description="Offload parameters (stage 3).")
    load_from_fp32_weights: bool = Field(True, description="Restore the fp32 copies on load.")
    elastic_checkpoint: bool = Field(False, description="Old spelling, DeepSpeed ignores it.")
    round_robin_gradients: bool = Field(False, description="Spread gradient copies (stage 1, 2).")
    ignore_unused_parameters: bool = Field(True, description="Allow parameters without gradient.")
    sub_group_size: values.PositiveInt | None = Field(
        None, description="Stage 3: elements per update."
    )
    stage3_prefetch_bucket_size: values.NonNegativeInt | None = Field(
        None, description="Stage 3: elements fetched ahead."
    )
    stage3_param_persistence_threshold: values.NonNegativeInt | None = Field(
        None, description="Stage 3: smaller parameters are not split."
    )
    stage3_max_live_parameters: values.NonNegativeInt | None = Field(
        None, description="Stage 3: gathered elements kept at a time."
    )
    stage3_max_reuse_distance: values.NonNegativeInt | None = Field(
        None, description="Stage 3: keep a parameter used again within this many elements."
    )
    stage3_gather_16bit_weights_on_model_save: bool | None = Field(
        None, description="Stage 3: save whole 16-bit weights."
    )


class ActivationCheckpointingBlock(values.Group):
    """DeepSpeed's activation checkpointing block."""

    partition_activations: bool | None = Field(None, description="As the key outside.")
    cpu_checkpointing: bool | None = Field(None, description="As checkpoint_in_cpu.")
    contiguous_memory_optimization: bool | None = Field(
        None, description="As contiguous_checkpointing."
    )
    number_checkpoints: values.PositiveInt | None = Field(None, description="Number of blocks.")
    synchronize_checkpoint_boundary: bool | None = Field(
        None, description="As synchronize_each_layer."
    )
    profile: bool | None = Field(None, description="As profile_backward.")


def unknown_zero_keys(block: Any) -> list[str]:
    """What to say of keys in `zero_optimization` that neither we nor DeepSpeed know."""
    names = list(block) if isinstance(block, dict) else []
    others = [key for key in names if key not in ZeroBlock.model_fields]
    if not others:
        return []  # DeepSpeed takes seconds to import
    known = [*ZeroBlock.model_fields, *_deepspeeds_zero_keys()]
    problems = []
    for key in others:
        if key not in known:
            close = get_close_matches(key, known, n=1)
            hint = f"Did you mean {close[0]}?" if close else "DeepSpeed does not know it either."
            problems.append(f"unknown key 'zero_optimization.{key:.80}'. {hint}")
    return problems


def _deepspeeds_zero_keys() -> list[str]:
    try:
        from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
    except ImportError:
        return []
    fields: Any = DeepSpeedZeroConfig.model_fields
    return [*fields, *(field.alias for field in fields.values() if field.alias)]


# What its engine reads.

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
