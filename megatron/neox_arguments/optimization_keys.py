"""Optimiser, schedule, batch, precision and activation checkpointing; what a batch is made of."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

from megatron.errors import ConfigError
from megatron.neox_arguments import values
from megatron.neox_arguments.deepspeed_config import (
    ActivationCheckpointingBlock,
    BFloat16Block,
    Float16Block,
    OptimizerBlock,
    ZeroBlock,
)
from megatron.neox_arguments.run_keys import ParallelArgs
from megatron.neox_arguments.values import Group, key

Precision = Literal["fp32", "bf16", "fp16"]
PRECISION_NAMES: dict[str, str] = {
    "bfloat16": "bf16", "bf16": "bf16", "float16": "fp16", "half": "fp16", "fp16": "fp16",
    "float32": "fp32", "fp32": "fp32",
}  # fmt: skip
"""Names of precisions in YAML files -> ours."""


class OptimizationArgs(Group):
    """Optimiser, learning-rate schedule, batch sizes, precision, memory savings."""

    optimizer: OptimizerBlock = key(
        OptimizerBlock(), "{type: Adam, params: {lr: 0.0006, betas: [0.9, 0.999], eps: 1.0e-8}}."
    )
    zero_optimization: ZeroBlock = key(
        ZeroBlock(), "DeepSpeed's ZeRO block, e.g. {stage: 1}.", changes="execution"
    )
    train_iters: values.NonNegativeInt | None = key(
        None, "Optimizer steps; 0: evaluate the loaded checkpoint.", resume="free"
    )
    train_epochs: values.PositiveInt | None = key(
        None,
        "Passes over the training data, in the same order each; the number of steps follows from "
        "its size. In place of train_iters.",
    )
    lr_decay_style: Literal["constant", "linear", "cosine", "exponential", "wsd"] = key(
        "linear",
        "Shape of the learning-rate decay after warmup; wsd: warmup, a stable rate, and a decay "
        "over the last lr_wsd_decay_iters steps.",
        schedule=True,
    )
    lr_wsd_decay_iters: values.PositiveInt | None = key(
        None,
        "wsd: how many steps before lr_decay_iters the decay begins (Megatron-LM's key); null: a "
        "tenth of lr_decay_iters.",
        schedule=True,
    )
    lr_wsd_decay_style: Literal["linear", "cosine", "exponential", "minus_sqrt"] = key(
        "linear", "wsd: shape of that decay to min_lr, by Megatron-LM's formulas.", schedule=True
    )
    lr_decay_rule: Literal["neox", "kerple", "earlier"] = key(
        "neox",
        "Whose formulas: GPT-NeoX's (neox), or the official KERPLE fork's, which made "
        "the paper's numbers (kerple: the first step has rate 0, a cosine ends above 0). A run "
        "that began before this key existed keeps its own (earlier).",
        schedule=True,
    )
    lr_decay_iters: values.PositiveInt | None = key(
        None, "Step where the decay ends; null: train_iters.", schedule=True
    )
    lr_decay_fraction: values.Fraction | None = key(
        None,
        "Share of train_iters after which the decay ends, where lr_decay_iters is not set.",
        schedule=True,
    )
    min_lr: values.NonNegativeFloat = key(0.0, "Lowest learning rate after warmup.", schedule=True)
    warmup: values.Fraction = key(
        0.01, "Linear warmup as a fraction of lr_decay_iters (0.01 is 1%).", schedule=True
    )
    override_lr_scheduler: bool = key(
        False,
        "On resume use this config's schedule, from the step reached; also its "
        "lr_decay_rule, for a run that began before that key existed.",
        resume="free",
    )
    use_checkpoint_lr_scheduler: bool = key(
        False, "On resume use the checkpoint's schedule.", resume="free"
    )
    use_bnb_optimizer: bool = key(
        False,
        "Adam with 8-bit states, of the bitsandbytes package (not measured on a GPU).",
    )
    weight_decay: values.NonNegativeFloat = key(
        0.1, "Decoupled decay; not of norms, biases or kernels."
    )
    kerple_lr_scale: values.NonNegativeFloat = key(
        1.0,
        "Learning rate of kernel parameters and of T5's table as a multiple of the "
        "model's; 0: they are not trained.",
    )
    kerple_weight_decay: values.NonNegativeFloat = key(
        0.0,
        "Decoupled weight decay of kernel parameters and of T5's table. The official "
        "fork decays them by weight_decay, GPT-NeoX T5's table.",
    )
    gradient_clipping: values.NonNegativeFloat = key(
        1.0, "Clip the global gradient norm to this; 0: never."
    )
    train_batch_size: values.PositiveInt | None = key(
        None,
        "Sequences per optimizer step over all processes: micro-batch x accumulation "
        "x data-parallel size. Give any two; the third is derived.",
        resume="free",
    )
    train_micro_batch_size_per_gpu: values.PositiveInt | None = key(
        None, "Sequences per forward pass of one data-parallel process.", resume="free"
    )
    gradient_accumulation_steps: values.PositiveInt | None = key(
        None,
        "Forward passes per optimizer step; null means 1, or what train_batch_size needs.",
        resume="free",
    )
    precision: Precision | None = key(
        None,
        "fp32, bf16 (or bfloat16) or fp16; null derives it from the fp16 and bf16 "
        "blocks, fp32 without them.",
        resume="free",
    )
    fp16: Float16Block | None = key(
        None,
        "DeepSpeed's fp16 block with loss scaling. `type: bfloat16` inside means bf16.",
        resume="free",
    )
    bf16: BFloat16Block | None = key(None, "DeepSpeed's bf16 block.", resume="free")
    fp32_allreduce: bool = key(False, "Average gradients in fp32.", resume="free")
    communication_data_type: Literal["fp32", "fp16", "bf16", "bfp16"] | None = key(
        None, "Data type of gradient averaging; null follows the precision.", resume="free"
    )
    prescale_gradients: bool = key(
        False, "Divide gradients before they are summed over processes.", resume="free"
    )
    gradient_predivide_factor: values.PositiveFloat = key(
        1.0, "prescale_gradients divides by this first.", resume="free"
    )
    data_types: dict[str, Any] | None = key(
        None,
        "DeepSpeed's data_types block. Under bf16 gradients are added up in fp32, as "
        "in GPT-NeoX; {grad_accum_dtype: bf16} takes less memory.",
        resume="free",
    )
    checkpoint_activations: bool = key(
        False, "Recompute layers in the backward pass: less memory.", changes="execution"
    )
    checkpoint_num_layers: values.PositiveInt = key(
        1, "Layers per recomputed block.", changes="execution"
    )
    partition_activations: bool = key(
        False, "Split kept activations over tensor-parallel ranks.", changes="execution"
    )
    synchronize_each_layer: bool = key(
        False, "Synchronise the device around recomputed blocks.", changes="execution"
    )
    contiguous_checkpointing: bool = key(
        False, "Keep activations in one contiguous buffer.", changes="execution"
    )
    checkpoint_in_cpu: bool = key(False, "Keep activations in host memory.", changes="execution")
    profile_backward: bool = key(False, "Time the backward pass of blocks.", changes="execution")
    activation_checkpointing: ActivationCheckpointingBlock | None = key(
        None, "DeepSpeed's block; its keys win over the five above.", changes="execution"
    )
    exit_on_divergence: bool = key(
        False,
        "End with exit code 76 when the loss stays far above the uniform model's and "
        "grows; otherwise only a message is printed.",
        changes="execution",
    )
    max_consecutive_nonfinite: values.NonNegativeInt = key(
        20,
        "Stop after this many steps in a row with a loss or gradient that is not "
        "finite; 0 never stops.",
        changes="execution",
    )

    @property
    def lr(self) -> float:
        return self.optimizer.params.lr

    @property
    def zero_stage(self) -> int:
        return self.zero_optimization.stage

    @property
    def zero_stage_in_effect(self) -> int:
        """The stage that runs: fp16 and bf16 without ZeRO become stage 1, which computes the same.

        DeepSpeed 0.19 without ZeRO divides fp16 gradients by a loss scale that it never multiplied
        the loss with, leaves tensor-parallel slices out of bf16's gradient norm, and cannot load
        what a bf16 pipeline saved.
        """
        return max(self.zero_stage, 1 if self.precision in ("fp16", "bf16") else 0)

    @property
    def accumulation_dtype(self) -> str:
        """What gradients are added up in: fp32 also under bf16, whose sums lose small parts."""
        usual = "fp16" if self.precision == "fp16" else "fp32"
        chosen = str((self.data_types or {}).get("grad_accum_dtype") or usual)
        return PRECISION_NAMES.get(chosen, chosen)

    @property
    def decay_iters(self) -> int:
        """lr_decay_iters, or what lr_decay_fraction makes of train_iters."""
        steps = self.train_iters or 1
        if self.lr_decay_fraction is not None:
            steps = max(1, math.floor(steps * self.lr_decay_fraction))
        return self.lr_decay_iters or steps

    @property
    def wsd_decay_iters(self) -> int:
        """lr_wsd_decay_iters, or a tenth of the schedule."""
        return self.lr_wsd_decay_iters or max(1, self.decay_iters // 10)


# Batch arithmetic: train_batch_size = micro-batch x accumulation x data-parallel size.


@dataclass(frozen=True)
class BatchPlan:
    """The batch sizes of one optimizer step."""

    train_batch_size: int
    micro_batch_size: int
    gradient_accumulation_steps: int
    data_parallel_size: int


def data_parallel_size(parallel: ParallelArgs, world_size: int) -> int:
    """Copies of the weights that `world_size` processes hold; those of a sequence hold one each."""
    replica = parallel.processes_per_replica
    if world_size < 1 or world_size % replica:
        raise ConfigError(
            f"{world_size} processes cannot hold whole copies of a model over pipe_parallel_size "
            f"{parallel.pipe_parallel_size} x model_parallel_size {parallel.model_parallel_size}. "
            f"Start a multiple of {replica} processes (num_gpus), or lower one of the two."
        )
    return world_size // replica


def plan_batch(
    optimization: OptimizationArgs, parallel: ParallelArgs, world_size: int
) -> BatchPlan:
    """Fill in the batch sizes that are not given; ConfigError if those given disagree."""
    copies, shared = data_parallel_size(parallel, world_size), parallel.sequence_parallel_size
    if copies % shared:
        raise ConfigError(
            f"sequence_parallel_size = {shared}: {world_size} processes hold {copies} copies of "
            f"the model, and {shared} of them share each sequence. Start a multiple of "
            f"{shared * parallel.processes_per_replica} processes (num_gpus), or lower it."
        )
    copies //= shared
    total = optimization.train_batch_size
    micro = optimization.train_micro_batch_size_per_gpu
    steps = optimization.gradient_accumulation_steps
    if total is None and micro is None:
        raise ConfigError(
            "no batch size: set train_micro_batch_size_per_gpu (sequences per process and "
            "forward pass) or train_batch_size (sequences per step)."
        )
    if total is None:
        assert micro is not None
        steps = steps or 1
        return BatchPlan(micro * steps * copies, micro, steps, copies)
    if micro is None:
        steps = steps or 1
        micro = _divide(total, steps * copies, f"accumulation {steps} x {copies} copies")
    elif steps is None:
        steps = _divide(total, micro * copies, f"micro-batch {micro} x {copies} copies")
    if micro * steps * copies != total:
        raise ConfigError(
            f"train_batch_size = {total}, but train_micro_batch_size_per_gpu {micro} x "
            f"gradient_accumulation_steps {steps} x {copies} data-parallel copies = "
            f"{micro * steps * copies}. Remove one of the three keys and it is derived."
        )
    return BatchPlan(total, micro, steps, copies)


def _divide(total: int, divisor: int, what: str) -> int:
    if total % divisor:
        raise ConfigError(
            f"train_batch_size = {total} is not a multiple of {divisor} ({what}). "
            f"Use {max(total // divisor, 1) * divisor}, or change the number of processes."
        )
    return total // divisor
