"""DeepSpeed's part of the config: its own nested mappings, and what its engine gets."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Field, SerializeAsAny, model_validator

from megatron.backends.deepspeed_processes import zero_keys
from megatron.errors import ConfigError, did_you_mean
from megatron.neox_arguments import values
from megatron.neox_arguments.allowed_code import imported_class, is_import_path
from megatron.neox_arguments.values import Group, key

if TYPE_CHECKING:
    from megatron.neox_arguments.arguments import NeoXArgs
    from megatron.neox_arguments.optimization_keys import OptimizationArgs

_MOMENTS = ("exp_avg", "exp_avg_sq")
OPTIMIZERS: dict[str, tuple[str, ...]] = {
    "adam": _MOMENTS,
    "adamw": _MOMENTS,
    "fused_adam": _MOMENTS,
    "cpu_adam": _MOMENTS,
    "cpu_torch_adam": _MOMENTS,
    "sgd": ("momentum_buffer",),
    "lion": ("exp_avg",),
    "muon": _MOMENTS,
}
"""The optimizers by name, and what each keeps for every number of the model, in fp32."""
_DEFAULT_PARAMS: dict[str, dict[str, Any]] = {
    **{name: {"betas": (0.9, 0.999), "eps": 1e-8} for name in OPTIMIZERS},
    "sgd": {"betas": (0.9, 0.999), "eps": 1e-8, "momentum": 0.0},
    "lion": {"betas": (0.9, 0.99)},
    "muon": {"betas": (0.9, 0.999), "eps": 1e-8, "momentum": 0.95},
}


def optimizer_family(kind: str) -> str:
    """The several names of Adam are one arithmetic; every other optimizer is its own."""
    name = kind.lower()
    return "adam" if name in OPTIMIZERS and name.endswith(("adam", "adamw")) else kind


def _optimizer_name(value: Any) -> Any:
    if not isinstance(value, str) or is_import_path(value):
        return value
    if value.lower() not in OPTIMIZERS:
        raise ValueError(
            f"{value!r:.80} is not one of {', '.join(OPTIMIZERS)}, nor package.module:Class"
        )
    return value.lower()


def _list_to_tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


class OptimizerParams(Group):
    """Hyperparameters of the optimizer."""

    lr: values.NonNegativeFloat = key(0.001, "Peak learning rate.")
    betas: (
        Annotated[tuple[values.Fraction, values.Fraction], BeforeValidator(_list_to_tuple)] | None
    ) = key(None, "Decay rates of the moments; null: [0.9, 0.999], for lion [0.9, 0.99].")
    eps: values.PositiveFloat | None = key(None, "Added to Adam's denominator; null: 1e-8.")
    momentum: values.Fraction | None = key(
        None, "Of sgd (null: 0, as in GPT-NeoX) and of muon's matrices (null: 0.95)."
    )


class _OwnParams(OptimizerParams):
    """A class of the user's own takes what it takes."""

    model_config = ConfigDict(extra="allow")


class OptimizerBlock(Group):
    """Which optimiser, with which hyperparameters."""

    type: Annotated[str, BeforeValidator(_optimizer_name)] = key(
        "adam",
        "adam or adamw (apex's fused kernel on GPUs if installed, else torch's), "
        "fused_adam or cpu_adam (DeepSpeed's, compiled at first use), cpu_torch_adam (torch's, not "
        "fused), lion, all with decoupled weight decay as in GPT-NeoX; muon (torch's, for the "
        "matrices of linear layers, adamw for the rest); sgd; upper or lower case. Or "
        "package.module:Class, a torch.optim.Optimizer of your own.",
    )
    params: SerializeAsAny[OptimizerParams] = key(
        OptimizerParams(), "lr, betas, eps, momentum; for a class of your own what it takes."
    )

    @model_validator(mode="before")
    @classmethod
    def _fill_params(cls, block: Any) -> Any:
        """What is not given has the default of this optimizer; a class has its own defaults."""
        if not isinstance(block, dict):
            return block
        kind, params = block.get("type", "adam"), block.get("params", {})
        if not isinstance(params, dict) or not isinstance(kind, str):
            return block
        given = {name: value for name, value in params.items() if value is not None}
        if is_import_path(kind):
            return {**block, "params": _OwnParams.model_validate(given)}
        return {**block, "params": {**_DEFAULT_PARAMS.get(kind.lower(), {}), **given}}

    @property
    def states(self) -> tuple[str, ...] | None:
        """What the optimizer keeps for every number of the model; None: a class of the user's."""
        if self.type == "sgd" and not self.params.momentum:
            return ()
        return OPTIMIZERS.get(self.type)

    @property
    def linear_states(self) -> tuple[str, ...] | None:
        """The same for the matrices of linear layers, of which Muon keeps less."""
        return ("momentum_buffer",) if self.type == "muon" else self.states


def optimizer_kind(block: OptimizerBlock) -> Any:
    """The known name, or the user's class."""
    return imported_class("optimizer.type", block.type) if block.states is None else block.type


class Float16Block(Group):
    """fp16 and its loss scaling."""

    enabled: bool = key(True, "Train in fp16.")
    auto_cast: bool = key(False, "Cast inputs to fp16.")
    loss_scale: values.NonNegativeFloat = key(0, "Fixed loss scale; 0 is dynamic.")
    initial_scale_power: values.NonNegativeInt = key(16, "First dynamic scale: 2^this.")
    loss_scale_window: values.PositiveInt = key(1000, "Good steps before it doubles.")
    hysteresis: values.PositiveInt = key(2, "Overflows before it halves.")
    consecutive_hysteresis: bool = key(False, "Refill hysteresis on good steps.")
    min_loss_scale: Annotated[values.PositiveFloat, Field(multiple_of=1)] = key(
        1, "Lowest dynamic scale; a whole number."
    )


class BFloat16Block(Group):
    """bf16; needs no loss scaling."""

    enabled: bool = key(True, "Train in bf16.")
    immediate_grad_update: bool = key(False, "Add gradients to fp32 copies once they are ready.")
    check_grad_overflow: bool = key(True, "Skip steps whose gradients are not finite.")


class OffloadBlock(Group):
    """Where ZeRO keeps what it offloads."""

    device: Literal["none", "cpu", "nvme"] = key("none", "none, cpu or nvme.")
    nvme_path: str | None = key(None, "Directory for device nvme.")
    pin_memory: bool = key(True, "Use page-locked host memory.")
    buffer_count: values.PositiveInt | None = key(None, "Number of buffers.")
    buffer_size: values.PositiveInt | None = key(None, "Elements of a buffer.")
    max_in_cpu: values.PositiveInt | None = key(None, "Elements kept in host memory.")
    pipeline_read: bool | None = key(None, "Overlap reading.")
    pipeline_write: bool | None = key(None, "Overlap writing.")
    fast_init: bool | None = key(None, "Faster first touch on nvme.")
    ratio: values.Fraction | None = key(None, "Share of the states to offload.")


class ZeroBlock(Group):
    """DeepSpeed's ZeRO: what is split over data-parallel processes.

    Any other key that the installed DeepSpeed knows is passed on to it.
    """

    model_config = ConfigDict(extra="allow")

    stage: Annotated[values.NonNegativeInt, Field(le=3)] = key(
        0, "0 nothing, 1 optimizer states, 2 and gradients, 3 and parameters."
    )
    allgather_partitions: bool = key(True, "Gather with allgather.")
    allgather_bucket_size: values.PositiveInt = key(500_000_000, "Elements per gather.")
    overlap_comm: bool | None = key(None, "Overlap communication with the backward pass.")
    reduce_scatter: bool = key(True, "Average with reduce-scatter.")
    reduce_bucket_size: values.PositiveInt = key(500_000_000, "Elements per reduction.")
    contiguous_gradients: bool = key(True, "Copy gradients to one buffer.")
    cpu_offload: bool = key(False, "Old spelling of offload_optimizer: {device: cpu}.")
    offload_optimizer: OffloadBlock | None = key(None, "Offload the optimizer.")
    offload_param: OffloadBlock | None = key(None, "Offload parameters (stage 3).")
    load_from_fp32_weights: bool = key(True, "Restore the fp32 copies on load.")
    elastic_checkpoint: bool = key(False, "Old spelling, DeepSpeed ignores it.")
    round_robin_gradients: bool = key(False, "Spread gradient copies (stage 1, 2).")
    ignore_unused_parameters: bool = key(True, "Allow parameters without gradient.")
    sub_group_size: values.PositiveInt | None = key(None, "Stage 3: elements per update.")
    stage3_prefetch_bucket_size: values.NonNegativeInt | None = key(
        None, "Stage 3: elements to prefetch."
    )
    stage3_param_persistence_threshold: values.NonNegativeInt | None = key(
        None, "Stage 3: smaller parameters are not split."
    )
    stage3_max_live_parameters: values.NonNegativeInt | None = key(
        None, "Stage 3: gathered elements kept at a time."
    )
    stage3_max_reuse_distance: values.NonNegativeInt | None = key(
        None, "Stage 3: keep a parameter used again within this many elements."
    )
    stage3_gather_16bit_weights_on_model_save: bool | None = key(
        None, "Stage 3: save whole 16-bit weights."
    )

    @property
    def offloads_optimizer(self) -> bool:
        """Whether the optimizer's states are off the device, in either spelling."""
        chosen = self.offload_optimizer
        return self.cpu_offload if chosen is None else chosen.device != "none"


class ActivationCheckpointingBlock(Group):
    """DeepSpeed's activation checkpointing block."""

    partition_activations: bool | None = key(None, "As the key outside.")
    cpu_checkpointing: bool | None = key(None, "As checkpoint_in_cpu.")
    contiguous_memory_optimization: bool | None = key(None, "As contiguous_checkpointing.")
    number_checkpoints: values.PositiveInt | None = key(None, "Number of blocks.")
    synchronize_checkpoint_boundary: bool | None = key(None, "As synchronize_each_layer.")
    profile: bool | None = key(None, "As profile_backward.")


def unknown_zero_keys(block: Any) -> list[str]:
    """Error texts for keys in `zero_optimization` that neither we nor DeepSpeed have."""
    names = list(block) if isinstance(block, dict) else []
    others = [name for name in names if name not in ZeroBlock.model_fields]
    if not others:
        return []  # DeepSpeed takes seconds to import
    known = [*ZeroBlock.model_fields, *zero_keys()]
    return [
        f"unknown key 'zero_optimization.{name:.80}'. "
        + did_you_mean(name, known, "DeepSpeed does not know it either.")
        for name in others
        if name not in known
    ]


# What its engine reads.

SILENT_STEPS = 1_000_000_000
"""DeepSpeed prints its own progress line every steps_per_print; ours is enough."""


def build_deepspeed_config(args: NeoXArgs, world_size: int) -> dict[str, Any]:
    """A dict for `deepspeed.initialize(config=...)`; training builds the optimizer itself."""
    optimization = args.optimization
    batch = args.batch_plan(world_size)
    config: dict[str, Any] = {
        # to DeepSpeed, the processes that share a sequence are data-parallel
        "train_batch_size": batch.train_batch_size * args.parallel.sequence_parallel_size,
        "train_micro_batch_size_per_gpu": batch.micro_batch_size,
        "gradient_accumulation_steps": batch.gradient_accumulation_steps,
        "gradient_clipping": optimization.gradient_clipping,
        "steps_per_print": SILENT_STEPS,
        "wall_clock_breakdown": args.logging.wall_clock_breakdown,
        "dump_state": args.logging.dump_state,
        "prescale_gradients": optimization.prescale_gradients,
        "gradient_predivide_factor": optimization.gradient_predivide_factor,
        "zero_optimization": _zero_block(optimization),
        # Training may build client-side optimizers DeepSpeed has not tested with ZeRO.
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "activation_checkpointing": _activation_block(optimization),
        "pipeline": {"pipe_partitioned": False, "grad_partitioned": False},
    }
    _add_precision(config, optimization)
    for name in ("flops_profiler", "comms_logger"):
        if (block := getattr(args.logging, name)) is not None:
            config[name] = block
    _add_extra(config, args.runtime.deepspeed_extra_args or {})
    return config


def _zero_block(optimization: OptimizationArgs) -> dict[str, Any]:
    block = optimization.zero_optimization.model_dump(exclude_none=True)
    block["stage"] = optimization.zero_stage_in_effect
    # The old spelling warns in DeepSpeed even when false.
    if block.pop("cpu_offload"):
        block.setdefault("offload_optimizer", {"device": "cpu"})
    return block


def _activation_block(optimization: OptimizationArgs) -> dict[str, Any]:
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


def _add_precision(config: dict[str, Any], optimization: OptimizationArgs) -> None:
    if optimization.precision == "fp16":
        assert optimization.fp16 is not None
        block = optimization.fp16.model_dump()
        # DeepSpeed insists on an integer here, also where it is written 1.0.
        block["min_loss_scale"] = int(block["min_loss_scale"])
        config["fp16"] = block
    elif optimization.precision == "bf16":
        assert optimization.bf16 is not None
        config["bf16"] = optimization.bf16.model_dump()
    config["data_types"] = {"grad_accum_dtype": optimization.accumulation_dtype}
    config["data_types"] |= optimization.data_types or {}
    if optimization.communication_data_type is not None:
        config["communication_data_type"] = optimization.communication_data_type
    elif optimization.fp32_allreduce:
        config["communication_data_type"] = "fp32"


def _add_extra(config: dict[str, Any], extra: dict[str, Any]) -> None:
    for name, value in extra.items():
        if name in ("optimizer", "scheduler") or name in config:
            raise ConfigError(
                f"deepspeed_extra_args.{name} would replace a setting that this config makes. "
                f"Use the {name} key itself, or remove it."
            )
        config[name] = value
