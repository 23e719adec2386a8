"""The nested mappings of a config whose names and meaning are DeepSpeed's."""

from __future__ import annotations

from difflib import get_close_matches
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Field

from megatron.neox_arguments.values import (
    Fraction,
    Group,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
)

OptimizerType = Literal["adam", "adamw", "fused_adam", "cpu_adam", "cpu_torch_adam", "sgd"]


def _lower(value: Any) -> Any:
    return value.lower() if isinstance(value, str) else value


def _list_to_tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


class OptimizerParams(Group):
    """Hyperparameters of Adam."""

    lr: NonNegativeFloat = Field(0.001, description="Peak learning rate.")
    betas: Annotated[tuple[Fraction, Fraction], BeforeValidator(_list_to_tuple)] = Field(
        (0.9, 0.999), description="Decay rates of the two moments."
    )
    eps: PositiveFloat = Field(1.0e-8, description="Added to the denominator.")


class OptimizerBlock(Group):
    """Which optimiser, with which hyperparameters."""

    type: Annotated[OptimizerType, BeforeValidator(_lower)] = Field(
        "adam",
        description="adam or adamw (apex's fused kernel on GPUs if installed, else torch's), "
        "fused_adam or cpu_adam (DeepSpeed's, compiled at first use), cpu_torch_adam (torch's, not "
        "fused), all with decoupled weight decay as in GPT-NeoX; or sgd (momentum is betas[0]). "
        "Upper or lower case.",
    )
    params: OptimizerParams = Field(OptimizerParams(), description="lr, betas, eps.")


class Float16Block(Group):
    """fp16 and its loss scaling."""

    enabled: bool = Field(True, description="Train in fp16.")
    auto_cast: bool = Field(False, description="Cast inputs to fp16.")
    loss_scale: NonNegativeFloat = Field(0, description="Fixed loss scale; 0 is dynamic.")
    initial_scale_power: NonNegativeInt = Field(16, description="First dynamic scale: 2^this.")
    loss_scale_window: PositiveInt = Field(1000, description="Good steps before it doubles.")
    hysteresis: PositiveInt = Field(2, description="Overflows before it halves.")
    consecutive_hysteresis: bool = Field(False, description="Refill hysteresis on good steps.")
    min_loss_scale: PositiveFloat = Field(1, description="Lowest dynamic scale.")


class BFloat16Block(Group):
    """bf16; needs no loss scaling."""

    enabled: bool = Field(True, description="Train in bf16.")
    immediate_grad_update: bool = Field(
        False, description="Add gradients to their fp32 copies as soon as they are ready."
    )
    check_grad_overflow: bool = Field(
        True, description="Skip steps whose gradients are not finite."
    )


class OffloadBlock(Group):
    """Where ZeRO keeps what it offloads."""

    device: Literal["none", "cpu", "nvme"] = Field("none", description="none, cpu or nvme.")
    nvme_path: str | None = Field(None, description="Directory for device nvme.")
    pin_memory: bool = Field(True, description="Use page-locked host memory.")
    buffer_count: PositiveInt | None = Field(None, description="Number of buffers.")
    buffer_size: PositiveInt | None = Field(None, description="Elements of a buffer.")
    max_in_cpu: PositiveInt | None = Field(None, description="Elements kept in host memory.")
    pipeline_read: bool | None = Field(None, description="Overlap reading.")
    pipeline_write: bool | None = Field(None, description="Overlap writing.")
    fast_init: bool | None = Field(None, description="Faster first touch on nvme.")
    ratio: Fraction | None = Field(None, description="Share of the states to offload.")


class ZeroBlock(Group):
    """DeepSpeed's ZeRO: what is split over data-parallel processes.

    Any other key that the installed DeepSpeed knows is passed on to it.
    """

    model_config = ConfigDict(extra="allow")

    stage: Annotated[NonNegativeInt, Field(le=3)] = Field(
        0, description="0 nothing, 1 optimizer states, 2 and gradients, 3 and parameters."
    )
    allgather_partitions: bool = Field(True, description="Gather with allgather.")
    allgather_bucket_size: PositiveInt = Field(500_000_000, description="Elements per gather.")
    overlap_comm: bool | None = Field(
        None, description="Overlap communication with the backward pass."
    )
    reduce_scatter: bool = Field(True, description="Average with reduce-scatter.")
    reduce_bucket_size: PositiveInt = Field(500_000_000, description="Elements per reduction.")
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
    sub_group_size: PositiveInt | None = Field(None, description="Stage 3: elements per update.")
    stage3_prefetch_bucket_size: NonNegativeInt | None = Field(
        None, description="Stage 3: elements fetched ahead."
    )
    stage3_param_persistence_threshold: NonNegativeInt | None = Field(
        None, description="Stage 3: smaller parameters are not split."
    )
    stage3_max_live_parameters: NonNegativeInt | None = Field(
        None, description="Stage 3: gathered elements kept at a time."
    )
    stage3_max_reuse_distance: NonNegativeInt | None = Field(
        None, description="Stage 3: keep a parameter used again within this many elements."
    )
    stage3_gather_16bit_weights_on_model_save: bool | None = Field(
        None, description="Stage 3: save whole 16-bit weights."
    )


class ActivationCheckpointingBlock(Group):
    """DeepSpeed's activation checkpointing block."""

    partition_activations: bool | None = Field(None, description="As the key outside.")
    cpu_checkpointing: bool | None = Field(None, description="As checkpoint_in_cpu.")
    contiguous_memory_optimization: bool | None = Field(
        None, description="As contiguous_checkpointing."
    )
    number_checkpoints: PositiveInt | None = Field(None, description="Number of blocks.")
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
