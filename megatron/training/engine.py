"""From a config to an engine: the module, the optimizer and the training backend."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron.backends import TORCH, chosen_backend
from megatron.backends.interface import MicroBatch, Parts, TrainingEngine, is_partitioned
from megatron.backends.optimizers import build_optimizer
from megatron.backends.plain_torch import TorchEngine
from megatron.checkpoints.safe_files import TrainingFiles
from megatron.checkpoints.sharding import Sharding
from megatron.checkpoints.universal import attach_universal_info
from megatron.model import GPTModel, ModelSpec
from megatron.model.embedding import Embedding, Head, TiedHead, UntiedHead
from megatron.model.layer_list import Layer, LayerFactory
from megatron.model.loss import head_losses, loss_chunk, masked_mean
from megatron.mpu.collectives import WHOLE, ParallelState, SequenceParallel, TensorParallel
from megatron.mpu.job import current_device
from megatron.mpu.parallel_layers import after_initialisation
from megatron.neox_arguments import NeoXArgs
from megatron.neox_arguments.deepspeed_config import optimizer_kind
from megatron.neox_arguments.optimization_keys import OptimizationArgs
from megatron.training.optimizer import (
    Schedule,
    Scheduler,
    parameter_groups,
    scale_kernel_steps,
)


def build_schedule(options: OptimizationArgs) -> Schedule:
    """The learning-rate schedule."""
    return Schedule(
        peak=options.lr,
        minimum=options.min_lr,
        warmup_steps=options.warmup * options.decay_iters,
        decay_steps=options.decay_iters,
        style=options.lr_decay_style,
        rule=options.lr_decay_rule,
        wsd_steps=options.wsd_decay_iters,
        wsd_style=options.lr_wsd_decay_style,
    )


def weights_dtype(options: OptimizationArgs) -> torch.dtype:
    """The dtype of the forward pass."""
    dtypes = {"bf16": torch.bfloat16, "fp16": torch.float16}
    return dtypes.get(options.precision or "fp32", torch.float32)


def build_module(args: NeoXArgs, spec: ModelSpec, parallel: ParallelState) -> nn.Module:
    """The whole model, or this rank's pipeline stage."""
    if args.parallel.pipe_parallel_size >= 1:
        return _build_pipeline(spec, parallel, args.parallel.pipe_partition_method)
    if args.optimization.zero_stage == 3:
        config = args.deepspeed_config(dist.get_world_size())
        return _build_in_pieces(spec, parallel, config, weights_dtype(args.optimization))
    return GPTModel(spec, parallel.tp, parallel.sp)


def _build_in_pieces(
    spec: ModelSpec, parallel: ParallelState, config: dict[str, Any], dtype: torch.dtype
) -> nn.Module:
    """ZeRO 3: each parameter is drawn whole, as in any layout, and partitioned before the next."""
    from megatron.backends.deepspeed_engine import partitioner

    partition = partitioner(config, parallel.grid, dtype)
    with after_initialisation(partition):
        module = GPTModel(spec, parallel.tp, parallel.sp)
    for parameter in module.parameters():  # norms and kernels, made elsewhere
        if not is_partitioned(parameter):
            partition(parameter)
    for buffer in module.buffers():  # DeepSpeed does not move a partitioned module
        buffer.data = buffer.data.to(current_device())
    return module


# The list of layers as a pipeline.


class PipelineLoss:
    """The last stage's loss against (labels, loss mask); it applies the head itself."""

    def __init__(self, vocabulary: int, sp: SequenceParallel = WHOLE) -> None:
        self.vocabulary, self.sp = vocabulary, sp
        self.head: Head | None = None

    def __call__(self, hidden: Tensor, targets: tuple[Tensor, Tensor]) -> Tensor:
        labels, mask = targets
        assert self.head is not None
        own = self.sp.own(labels)
        chunk = loss_chunk(own.numel(), self.vocabulary)
        losses = head_losses(self.head.logits, hidden, own, self.head.vocab_tp, chunk)
        return masked_mean(losses, mask, self.sp)


def pipeline_layers(spec: ModelSpec, tp: TensorParallel, sp: SequenceParallel = WHOLE) -> list[Any]:
    """The list of layers for a pipeline; the tied embedding is first layer and head."""
    from megatron.backends.deepspeed_engine import PipelineLayer

    layers: list[Any] = []
    for layer in LayerFactory(spec, tp, pipelined=True, sp=sp).layers():
        if isinstance(layer, Layer):
            # As a layer the tied head does nothing: the loss makes the logits.
            tied = layer.is_tied_head or (layer.kind is Embedding and not spec.no_weight_tying)
            layers.append(PipelineLayer(layer.kind, layer.make, tied))
        else:
            layers.append(layer)
    return layers


def _build_pipeline(spec: ModelSpec, parallel: ParallelState, partition: str) -> nn.Module:
    from megatron.backends.deepspeed_engine import build_pipeline

    loss = PipelineLoss(spec.padded_vocab_size, parallel.sp)
    module = build_pipeline(
        pipeline_layers(spec, parallel.tp, parallel.sp),
        parallel.grid,
        loss,
        partition_method=partition,
        recomputed_layers=spec.checkpoint_num_layers if spec.checkpoint_activations else 0,
    )
    if module.tied_modules:
        loss.head = TiedHead(module.tied_modules["embedding"])
    else:  # stages before the last have no head
        loss.head = next((part for part in module.modules() if isinstance(part, UntiedHead)), None)
    return module


# The engine.


def build_engine(args: NeoXArgs, module: nn.Module, parallel: ParallelState) -> TrainingEngine:
    """The engine around the module, with our optimizer, schedule and files."""
    options = args.optimization
    kind = "adam8bit" if options.use_bnb_optimizer else optimizer_kind(options.optimizer)
    optimizer = build_optimizer(
        kind,
        parameter_groups(
            module.named_parameters(), options.weight_decay, linear_apart=kind == "muon"
        ),
        options.optimizer.params.model_dump(exclude_none=True),
        on_gpu=current_device().type == "cuda",
    )
    plan = args.batch_plan(dist.get_world_size())
    attach_universal_info(module, Sharding.of(args.model, neox=False), parallel.tp.size)
    parts = Parts(
        module=module,
        optimizer=optimizer,
        scheduler=Scheduler(
            optimizer, build_schedule(options), keep_saved=options.use_checkpoint_lr_scheduler
        ),
        files=TrainingFiles(),
        loss=partial(_mean_loss, sp=parallel.sp),
        accumulation=plan.gradient_accumulation_steps,
        samples_per_step=plan.train_batch_size,
        max_norm=options.gradient_clipping,
    )
    engine: TrainingEngine
    if chosen_backend(args.runtime.training_backend) == TORCH:
        engine = TorchEngine(parts, current_device())
    else:
        config = args.deepspeed_config(dist.get_world_size())
        pipelined = args.parallel.pipe_parallel_size >= 1
        engine = _on_deepspeed(parts, config, parallel, pipelined=pipelined)
    scale_kernel_steps(engine, scale=options.kerple_lr_scale, decay=options.kerple_weight_decay)
    return engine


def _on_deepspeed(
    parts: Parts, config: dict[str, Any], parallel: ParallelState, *, pipelined: bool
) -> TrainingEngine:
    from megatron.backends import deepspeed_engine

    name = "DeepSpeedPipelineEngine" if pipelined else "DeepSpeedEngine"
    kind: Callable[..., TrainingEngine] = getattr(deepspeed_engine, name)
    engine = kind(parts, config, parallel.grid, tp_rank=parallel.tp.rank)
    if engine.zero_stage == 3:
        for part in parts.module.modules():
            if isinstance(part, TiedHead):  # it uses the embedding's weight
                deepspeed_engine.register_shared_parameter(
                    part, part.embedding.word_embeddings.weight
                )
    return engine


def _mean_loss(
    model: Callable[..., Any], batch: MicroBatch, sp: SequenceParallel = WHOLE
) -> Tensor:
    inputs, (labels, mask) = batch
    return masked_mean(model(inputs, labels), mask, sp)
