"""From a config to a DeepSpeed engine."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import deepspeed
import torch
import torch.distributed as dist
from torch import nn

from megatron.checkpoints.safe_files import SafeCheckpointEngine
from megatron.checkpoints.sharding import Sharding
from megatron.checkpoints.universal import note_cuts
from megatron.model.embedding import TiedHead
from megatron.model.gpt import GPTModel
from megatron.model.pipeline import build_pipeline
from megatron.model.spec import ModelSpec
from megatron.mpu import ParallelState
from megatron.mpu.job import current_device
from megatron.mpu.parallel_layers import after_drawing
from megatron.training.gradients import own_whole_step
from megatron.training.optimizer import (
    Schedule,
    Scheduler,
    build_optimizer,
    parameter_groups,
    scale_kernel_steps,
)

if TYPE_CHECKING:
    from megatron.neox_arguments import NeoXArgs


def build_schedule(args: NeoXArgs) -> Schedule:
    """The learning rate over the run."""
    optimization = args.optimization
    steps = optimization.decay_iters
    return Schedule(
        peak=optimization.lr,
        minimum=optimization.min_lr,
        warmup_steps=optimization.warmup * steps,
        decay_steps=steps,
        style=optimization.lr_decay_style,
        rule=optimization.lr_decay_rule,
    )


def weights_dtype(args: NeoXArgs) -> torch.dtype:
    """What the forward pass computes with."""
    dtypes = {"bf16": torch.bfloat16, "fp16": torch.float16}
    return dtypes.get(args.optimization.precision or "fp32", torch.float32)


def build_module(args: NeoXArgs, spec: ModelSpec, parallel: ParallelState) -> nn.Module:
    """The whole model, or this rank's pipeline stage."""
    if args.parallel.pipe_parallel_size >= 1:
        return build_pipeline(spec, parallel, args.parallel.pipe_partition_method)
    if args.optimization.zero_stage == 3:
        return _build_in_pieces(args, spec, parallel)
    return GPTModel(spec, parallel.tp)


def _build_in_pieces(args: NeoXArgs, spec: ModelSpec, parallel: ParallelState) -> nn.Module:
    """ZeRO 3: each parameter is drawn whole, as under any layout, and cut up before the next."""
    cut: list[Any] = []

    def cut_up(parameter: nn.Parameter) -> None:
        parameter.data = parameter.data.to(weights_dtype(args))
        if cut:
            cut[0].convert_to_zero_parameters(param_list=[parameter])
            return
        deepspeed.zero.Init(
            module=nn.ParameterList([parameter]),
            data_parallel_group=parallel.grid.get_data_parallel_group(),
            config_dict_or_path=args.deepspeed_config(dist.get_world_size()),
            mpu=parallel.grid,
        )
        cut.append(parameter)

    with after_drawing(cut_up):
        module = GPTModel(spec, parallel.tp)
    for parameter in module.parameters():  # norms and kernels, made elsewhere
        if not hasattr(parameter, "ds_id"):
            cut_up(parameter)
    for buffer in module.buffers():  # DeepSpeed leaves a module that is in pieces where it is
        buffer.data = buffer.data.to(current_device())
    return module


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
    sharding = Sharding.of(args.model, neox=False)
    note_cuts(module, sharding, parallel.tp.size)
    engine, _, _, _ = deepspeed.initialize(
        model=module,
        optimizer=optimizer,
        lr_scheduler=Scheduler(
            optimizer, build_schedule(args), keep_saved=options.use_checkpoint_lr_scheduler
        ),
        config=args.deepspeed_config(dist.get_world_size()),
        mpu=None if pipelined else parallel.grid,
        dist_init_required=False,
    )
    engine.checkpoint_engine = SafeCheckpointEngine()
    # DeepSpeed puts a program beside each ZeRO checkpoint; tools/convert_checkpoint.py does more.
    engine._copy_recovery_script = lambda save_path: None
    scale_kernel_steps(engine, scale=options.kerple_lr_scale, decay=options.kerple_weight_decay)
    _clip_by_whole_norm(engine, parallel)
    _keep_gradients_of_the_loss(engine.optimizer)
    if args.optimization.zero_stage == 3:
        _announce_borrowed_weights(module)
    return engine


def _announce_borrowed_weights(module: nn.Module) -> None:
    """A tied head uses the embedding's weight; ZeRO-3 must know, to gather it for the head too."""
    for part in module.modules():
        if isinstance(part, TiedHead):
            deepspeed.zero.register_external_parameter(part, part.embedding.word_embeddings.weight)


def _keep_gradients_of_the_loss(optimizer: Any) -> None:
    """Let bf16's fp32 sums see the head's gradient in a pipeline, where the loss applies the head.

    DeepSpeed's optimizer clears the bf16 gradients when the backward pass reaches the model's
    output, and the head's is complete by then. Clear them once they have been added up instead.
    """
    if not hasattr(optimizer, "update_hp_grads") or optimizer.immediate_grad_update:
        return

    def add_up(*_: Any, **__: Any) -> None:
        optimizer.update_hp_grads(clear_lp_grads=True)

    optimizer.backward_prologue = lambda: None
    optimizer.backward_epilogue = add_up


def _clip_by_whole_norm(engine: Any, parallel: ParallelState) -> None:
    """Mend what DeepSpeed clips by a part of the norm (see gradients.py)."""
    if engine.optimizer is engine.basic_optimizer:
        own_whole_step(
            engine.optimizer,
            max_norm=engine.gradient_clipping(),
            tp_rank=parallel.tp.rank,
            replica=parallel.grid.get_model_parallel_group(),
        )
        engine.clip_fp32_gradients = lambda: None
    scaler: Any = getattr(engine.optimizer, "loss_scaler", None)
    if hasattr(scaler, "raise_error_at_min_scale"):
        scaler.raise_error_at_min_scale = False  # StopWhenDiverged ends the run, with a code
