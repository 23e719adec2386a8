"""From a config to a DeepSpeed engine."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import deepspeed
import torch.distributed as dist
from torch import nn

from megatron.model.gpt import GPTModel
from megatron.model.pipeline import build_pipeline
from megatron.model.spec import ModelSpec
from megatron.mpu import ParallelState
from megatron.training.clipping import mark_gradients, own_whole_step
from megatron.training.optimizer import build_optimizer, parameter_groups
from megatron.training.safe_files import SafeCheckpointEngine
from megatron.training.schedule import Schedule, Scheduler

if TYPE_CHECKING:
    from megatron.neox_arguments import NeoXArgs


def build_schedule(args: NeoXArgs) -> Schedule:
    """The learning rate over the run."""
    optimization = args.optimization
    steps = optimization.decay_iters
    return Schedule(
        peak=optimization.lr,
        minimum=optimization.min_lr,
        warmup_steps=int(optimization.warmup * steps),
        decay_steps=steps,
        style=optimization.lr_decay_style,
    )


def build_module(args: NeoXArgs, spec: ModelSpec, parallel: ParallelState) -> nn.Module:
    """The whole model, or this rank's pipeline stage."""
    if args.parallel.pipe_parallel_size >= 1:
        return build_pipeline(spec, parallel, args.parallel.pipe_partition_method)
    return GPTModel(spec, parallel.tp)


def build_engine(args: NeoXArgs, module: nn.Module, parallel: ParallelState) -> Any:
    """DeepSpeed's engine around the module, with our optimizer, schedule and file format."""
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    options = args.optimization
    optimizer = build_optimizer(
        options.optimizer.type,
        parameter_groups(module.named_parameters(), options.weight_decay),
        lr=options.lr,
        betas=options.optimizer.params.betas,
        eps=options.optimizer.params.eps,
    )
    pipelined = args.parallel.pipe_parallel_size >= 1
    engine, _, _, _ = deepspeed.initialize(
        model=module,
        optimizer=optimizer,
        lr_scheduler=Scheduler(optimizer, build_schedule(args)),
        config=_deepspeed_config(args),
        mpu=None if pipelined else parallel.grid,
        dist_init_required=False,
    )
    engine.checkpoint_engine = SafeCheckpointEngine()
    # DeepSpeed puts a program beside each ZeRO checkpoint; tools/convert_checkpoint.py does more.
    engine._copy_recovery_script = lambda save_path: None
    _clip_by_whole_norm(engine, parallel)
    return engine


def _deepspeed_config(args: NeoXArgs) -> dict[str, Any]:
    """DeepSpeed's config; fp16 without ZeRO becomes ZeRO stage 1, which computes the same.

    DeepSpeed 0.19 without ZeRO divides fp16 gradients by a loss scale that it never multiplied the
    loss with: Adam hides most of that, underflow and clipping do not.
    """
    config = args.deepspeed_config(dist.get_world_size())
    if args.optimization.precision == "fp16" and args.optimization.zero_stage == 0:
        config["zero_optimization"]["stage"] = 1
    return config


def _clip_by_whole_norm(engine: Any, parallel: ParallelState) -> None:
    """Mend the two of DeepSpeed's paths that clip by a part of the norm (see clipping.py)."""
    from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer

    if engine.optimizer is engine.basic_optimizer:
        own_whole_step(
            engine.optimizer,
            max_norm=engine.gradient_clipping(),
            tp_rank=parallel.tp.rank,
            replica=parallel.grid.get_model_parallel_group(),
        )
        engine.clip_fp32_gradients = lambda: None
    elif isinstance(engine.optimizer, FP16_UnfusedOptimizer):
        mark_gradients(engine.optimizer)
    scaler: Any = getattr(engine.optimizer, "loss_scaler", None)
    if hasattr(scaler, "raise_error_at_min_scale"):
        scaler.raise_error_at_min_scale = False  # StopWhenDiverged ends the run, with a code
