"""From a config to a DeepSpeed engine: the module, the engine, and what of DeepSpeed we mend."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable
from functools import partial
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.runtime import bf16_optimizer
from deepspeed.runtime.activation_checkpointing.checkpointing import non_reentrant_checkpoint
from torch import Tensor, nn

from megatron.checkpoints.safe_files import SafeCheckpointEngine
from megatron.checkpoints.sharding import Sharding
from megatron.checkpoints.universal import note_cuts
from megatron.model import GPTModel, ModelSpec
from megatron.model.embedding import (
    Embedding,
    Head,
    TiedHead,
    UntiedHead,
    head_losses,
    loss_chunk,
    masked_mean,
)
from megatron.model.layer_list import Layer, LayerFactory
from megatron.mpu.collectives import ParallelState, TensorParallel
from megatron.mpu.job import current_device
from megatron.mpu.parallel_layers import after_drawing
from megatron.neox_arguments import NeoXArgs
from megatron.neox_arguments.optimization_keys import OptimizationArgs
from megatron.training.optimizer import (
    Schedule,
    Scheduler,
    build_optimizer,
    parameter_groups,
    scale_kernel_steps,
)


def build_schedule(options: OptimizationArgs) -> Schedule:
    """The learning rate over the run."""
    return Schedule(
        peak=options.lr,
        minimum=options.min_lr,
        warmup_steps=options.warmup * options.decay_iters,
        decay_steps=options.decay_iters,
        style=options.lr_decay_style,
        rule=options.lr_decay_rule,
    )


def weights_dtype(options: OptimizationArgs) -> torch.dtype:
    """What the forward pass computes with."""
    dtypes = {"bf16": torch.bfloat16, "fp16": torch.float16}
    return dtypes.get(options.precision or "fp32", torch.float32)


def build_module(args: NeoXArgs, spec: ModelSpec, parallel: ParallelState) -> nn.Module:
    """The whole model, or this rank's pipeline stage."""
    if args.parallel.pipe_parallel_size >= 1:
        return _build_pipeline(args, spec, parallel)
    if args.optimization.zero_stage == 3:
        return _build_in_pieces(args, spec, parallel)
    return GPTModel(spec, parallel.tp)


def _build_in_pieces(args: NeoXArgs, spec: ModelSpec, parallel: ParallelState) -> nn.Module:
    """ZeRO 3: each parameter is drawn whole, as under any layout, and cut up before the next."""
    cut: list[Any] = []

    def cut_up(parameter: nn.Parameter) -> None:
        parameter.data = parameter.data.to(weights_dtype(args.optimization))
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


# The list of layers, handed to DeepSpeed's PipelineModule.


class PipelineLoss:
    """The last stage's loss against (labels, loss mask); it applies the head itself."""

    def __init__(self, vocabulary: int) -> None:
        self.vocabulary = vocabulary
        self.head: Head | None = None

    def __call__(self, hidden: Tensor, targets: tuple[Tensor, Tensor]) -> Tensor:
        labels, mask = targets
        assert self.head is not None
        chunk = loss_chunk(labels.numel(), self.vocabulary)
        losses = head_losses(self.head.logits, hidden, labels, self.head.vocab_tp, chunk)
        return masked_mean(losses, mask)


def layer_specs(spec: ModelSpec, tp: TensorParallel) -> list[Any]:
    """The list of layers as DeepSpeed's layer specs; the tied embedding is first layer and head."""
    tied = partial(TiedLayerSpec, "embedding", tied_weight_attr="word_embeddings.weight")
    specs: list[Any] = []
    for layer in LayerFactory(spec, tp, pipelined=True).layers():
        if not isinstance(layer, Layer):
            specs.append(layer)
            continue
        if layer.is_tied_head:  # as a layer it does nothing: the loss makes the logits
            built = tied(layer.kind, forward_fn=lambda embedding, x: x)
        elif layer.kind is Embedding and not spec.no_weight_tying:
            built = tied(layer.kind)
        else:
            built = LayerSpec(layer.kind)
        built.build = partial(_make, layer)  # DeepSpeed deals the layers out by their kind
        specs.append(built)
    return specs


def _make(layer: Layer, log: bool = False) -> nn.Module:
    return layer.make()


def _build_pipeline(args: NeoXArgs, spec: ModelSpec, parallel: ParallelState) -> PipelineModule:
    loss = PipelineLoss(spec.padded_vocab_size)
    module = PipelineModule(
        layer_specs(spec, parallel.tp),
        topology=parallel.grid.topology(),
        loss_fn=loss,
        partition_method=args.parallel.pipe_partition_method,
        activation_checkpoint_interval=(
            spec.checkpoint_num_layers if spec.checkpoint_activations else 0
        ),
        activation_checkpoint_func=non_reentrant_checkpoint,
        checkpointable_layers=["TransformerLayer"],
    )
    if module.tied_modules:
        loss.head = TiedHead(module.tied_modules["embedding"])
    else:  # stages before the last have no head
        loss.head = next((part for part in module.modules() if isinstance(part, UntiedHead)), None)
    return module


# The engine.


def build_engine(args: NeoXArgs, module: nn.Module, parallel: ParallelState) -> Any:
    """DeepSpeed's engine around the module, with our optimizer, schedule and file format."""
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    bf16_optimizer.see_memory_usage = lambda *_, **__: None  # 18 lines on stdout, whoever reads it
    options = args.optimization
    optimizer = build_optimizer(
        options.optimizer.type,
        parameter_groups(module.named_parameters(), options.weight_decay),
        lr=options.lr,
        betas=options.optimizer.params.betas,
        eps=options.optimizer.params.eps,
    )
    pipelined = args.parallel.pipe_parallel_size >= 1
    note_cuts(module, Sharding.of(args.model, neox=False), parallel.tp.size)
    engine, _, _, _ = deepspeed.initialize(
        model=module,
        optimizer=optimizer,
        lr_scheduler=Scheduler(
            optimizer, build_schedule(options), keep_saved=options.use_checkpoint_lr_scheduler
        ),
        config=args.deepspeed_config(dist.get_world_size()),
        mpu=None if pipelined else parallel.grid,
        dist_init_required=False,
    )
    engine.checkpoint_engine = SafeCheckpointEngine()
    # DeepSpeed puts a program beside each ZeRO checkpoint; tools/convert_checkpoint.py does more.
    engine._copy_recovery_script = lambda save_path: None
    scale_kernel_steps(engine, scale=options.kerple_lr_scale, decay=options.kerple_weight_decay)
    scaler: Any = getattr(engine.optimizer, "loss_scaler", None)
    if hasattr(scaler, "raise_error_at_min_scale"):
        scaler.raise_error_at_min_scale = False  # StopWhenDiverged ends the run, with a code
    _clip_by_whole_norm(engine, parallel)
    _keep_gradients_of_the_loss(engine.optimizer)
    if options.zero_stage == 3:
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


# Gradient clipping by the norm of the whole model, whatever its layout, and refused steps.
#
# A step whose gradient is not finite anywhere changes nothing anywhere. ZeRO's optimizers do this
# themselves: they know the norm over all ranks before they touch a weight, and set `overflow`. fp32
# without ZeRO has no wrapper, and `clip_fp32_gradients` counts, on pipeline stages after the first,
# only the slices of tensor-parallel layers: the optimizer's own step takes its place.


def _clip_by_whole_norm(engine: Any, parallel: ParallelState) -> None:
    """Mend what DeepSpeed clips by a part of the norm: fp32 without ZeRO.

    The two attributes that a step sets are those that DeepSpeed's engine looks for after it.
    """
    optimizer, max_norm = engine.optimizer, engine.gradient_clipping()
    if optimizer is not engine.basic_optimizer:
        return
    replica, apply = parallel.grid.get_model_parallel_group(), optimizer.step

    def step(*args: Any, **kwargs: Any) -> Any:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        norm = whole_norm(parameters, tp_rank=parallel.tp.rank, replica=replica)
        optimizer._global_grad_norm = norm
        optimizer.overflow = not math.isfinite(norm)
        if optimizer.overflow:
            return None
        if 0 < max_norm < norm:
            gradients = [p.grad for p in parameters if p.grad is not None]
            torch._foreach_mul_(gradients, max_norm / (norm + 1e-6))
        return apply(*args, **kwargs)

    optimizer.overflow = False
    optimizer.step = step
    engine.clip_fp32_gradients = lambda: None


def _counts_here(parameter: nn.Parameter, tp_rank: int) -> bool:
    """Whether this rank is the one that adds the parameter to the norm.

    Slices count everywhere, whole copies on the first tensor-parallel rank, and an embedding that
    a later pipeline stage uses again (DeepSpeed marks it) only where it came from.
    """
    if getattr(parameter, "ds_pipe_replicated", False):
        return False
    return tp_rank == 0 or bool(getattr(parameter, "model_parallel", False))


def whole_norm(
    parameters: Iterable[nn.Parameter], *, tp_rank: int, replica: dist.ProcessGroup | None
) -> float:
    """The norm of the gradient over all ranks of `replica`: the same number on each of them.

    Copies that do not count must still be finite: infinity in one makes the norm infinite.
    """
    present = [p for p in parameters if p.grad is not None]
    square = torch.zeros((), device=current_device())
    if present:
        gradients = [p.grad.float() for p in present if p.grad is not None]
        squares = torch.stack(list(torch._foreach_norm(gradients))).square()
        counted = torch.tensor([_counts_here(p, tp_rank) for p in present], device=squares.device)
        square = torch.where(counted | ~torch.isfinite(squares), squares, 0.0).sum()
    if dist.is_initialized() and dist.get_world_size(replica) > 1:
        dist.all_reduce(square, group=replica)
    return float(square.sqrt())
