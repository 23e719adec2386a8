"""DeepSpeed's engines as a `TrainingEngine`: how they are built, and which parts we replace."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.runtime import bf16_optimizer
from deepspeed.runtime.activation_checkpointing.checkpointing import non_reentrant_checkpoint
from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine
from deepspeed.utils import safe_get_full_fp32_param, safe_set_full_fp32_param
from torch import Tensor, nn
from torch.optim import Optimizer

from megatron.backends.interface import (
    COUNTERS,
    Files,
    MicroBatch,
    Parts,
    States,
    full_shape,
    is_partitioned,
)
from megatron.backends.optimizer_states import Group, StatesByParameter
from megatron.backends.plain_torch import clip_by_whole_norm


class DeepSpeedEngine(StatesByParameter):
    """pipe_parallel_size 0: the whole model on every rank (or tensor-parallel group)."""

    def __init__(self, parts: Parts, config: dict[str, Any], grid: Any, *, tp_rank: int) -> None:
        """`config` is DeepSpeed's; `grid` is `deepspeed_processes.build_grid`'s."""
        logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
        bf16_optimizer.see_memory_usage = lambda *_, **__: None  # 18 lines on stdout
        self._parts, self._grid = parts, grid
        self.scheduler, self.files = parts.scheduler, parts.files
        engine, _, _, _ = deepspeed.initialize(
            model=parts.module,
            optimizer=parts.optimizer,
            lr_scheduler=parts.scheduler,
            config=config,
            mpu=None if isinstance(parts.module, PipelineModule) else grid,
            dist_init_required=False,
        )
        self.deepspeed: Any = engine
        self.module: nn.Module = engine.module
        self.optimizer: Optimizer = engine.basic_optimizer
        self.device = torch.device(engine.device)
        self.zero_stage = int(engine.zero_optimization_stage())
        engine.checkpoint_engine = _checkpoint_engine(parts.files)
        # DeepSpeed copies a script into each ZeRO checkpoint; we have tools/convert_checkpoint.py.
        engine._copy_recovery_script = lambda save_path: None
        scaler: Any = getattr(engine.optimizer, "loss_scaler", None)
        if hasattr(scaler, "raise_error_at_min_scale"):
            scaler.raise_error_at_min_scale = False  # StopWhenDiverged ends the run instead
        self._steps_weights = engine.optimizer is engine.basic_optimizer
        if self._steps_weights:
            _clip_by_whole_norm(engine, parts.max_norm, tp_rank, grid.get_model_parallel_group())
        _keep_gradients_of_the_loss(engine.optimizer)

    @property
    def grad_norm(self) -> float | None:
        norm = self.deepspeed.get_global_grad_norm()
        return None if norm is None else float(norm)

    @property
    def step_skipped(self) -> bool:
        return bool(getattr(self.deepspeed.optimizer, "overflow", False))

    @property
    def loss_scale(self) -> float | None:
        if not self.deepspeed.fp16_enabled() or not self.deepspeed.dynamic_loss_scale():
            return None
        return float(self.deepspeed.optimizer.loss_scale)

    @property
    def skipped_steps(self) -> int:
        return int(self.deepspeed.skipped_steps)

    def set_counters(self, **counters: int) -> None:
        for name, value in counters.items():
            setattr(self.deepspeed, name, value)

    def train_step(self, batches: Iterator[MicroBatch]) -> Tensor:
        self.deepspeed.train()
        total = torch.zeros((), device=self.device)
        for _ in range(self._parts.accumulation):
            loss = self._parts.loss(self.deepspeed, next(batches))
            self.deepspeed.backward(loss)
            self.deepspeed.step()
            total += loss.detach().float()
        return total / self._parts.accumulation

    def evaluate(self, batches: Iterator[MicroBatch], count: int) -> Tensor:
        self.deepspeed.eval()
        mean = self._parts.mean_loss(self.deepspeed, batches, count)
        replicas = self._grid.get_data_parallel_world_size()
        if replicas > 1:
            dist.all_reduce(mean, group=self._grid.get_data_parallel_group())
            mean /= replicas
        return mean

    def copy_to_master(self, parameter: nn.Parameter) -> None:
        """Mixed precision and ZeRO keep an fp32 master copy."""
        if not hasattr(parameter, "_hp_mapping") and not is_partitioned(parameter):
            return
        master = safe_get_full_fp32_param(parameter)
        if master is not None:
            safe_set_full_fp32_param(parameter, parameter.detach().float().view_as(master))

    def write_states(self, states: dict[nn.Parameter, States]) -> None:
        super().write_states(states)
        self._refresh_weights()

    def _groups(self) -> list[Group]:
        wrapper = self.deepspeed.optimizer
        if self._steps_weights:
            return super()._groups()
        if hasattr(wrapper, "fp32_partitioned_groups_flat"):  # ZeRO 3
            pairs = zip(wrapper.fp16_groups, wrapper.fp32_partitioned_groups_flat, strict=True)
            return [Group(list(group), own, None, wrapper.dp_process_group) for group, own in pairs]
        if hasattr(wrapper, "single_partition_of_fp32_groups"):  # ZeRO 1 and 2
            groups = wrapper.round_robin_bit16_groups
            masters = wrapper.single_partition_of_fp32_groups
            offsets = wrapper.round_robin_bit16_offsets
        else:  # BF16_Optimizer
            groups, masters = wrapper.bf16_groups, wrapper.fp32_groups_flat_partition
            offsets = [[0, *accumulate(full_shape(p).numel() for p in group)] for group in groups]
        columns = zip(groups, masters, offsets, wrapper.real_dp_process_group, strict=True)
        return [Group(list(group), *rest) for group, *rest in columns]

    @torch.no_grad()
    def _refresh_weights(self) -> None:
        """Copy the fp32 weights into those of the model."""
        wrapper = self.deepspeed.optimizer
        if self._steps_weights:
            return
        if hasattr(wrapper, "update_lp_params"):
            wrapper.update_lp_params()
        else:  # ZeRO 3
            for number in range(len(wrapper.fp16_groups)):
                wrapper._reassign_or_swap_out_partitioned_parameters(number)
            if wrapper.persistent_parameters:
                wrapper.persistent_parameters[0].all_gather(wrapper.persistent_parameters)

    def save(self, directory: Path, tag: str, progress: dict[str, Any]) -> None:
        self.deepspeed.save_checkpoint(
            str(directory), tag=tag, client_state=dict(progress), save_latest=False
        )

    def load(
        self, directory: Path, tag: str, *, optimizer: bool, schedule: bool
    ) -> dict[str, Any] | None:
        _, progress = self.deepspeed.load_checkpoint(
            str(directory),
            tag=tag,
            load_optimizer_states=optimizer,
            load_lr_scheduler_states=schedule,
        )
        if progress is None:
            return None
        counters = {name: getattr(self.deepspeed, name) for name in (*COUNTERS, "micro_steps")}
        return {**progress, **counters}


class DeepSpeedPipelineEngine(DeepSpeedEngine):
    """pipe_parallel_size >= 1: DeepSpeed's pipeline engine runs the schedule."""

    def __init__(self, parts: Parts, config: dict[str, Any], grid: Any, *, tp_rank: int) -> None:
        super().__init__(parts, config, grid, tp_rank=tp_rank)
        self._evaluated = False
        # DeepSpeed would average over replicas, then broadcast to the stages.
        self.deepspeed._aggregate_total_loss = self._own_loss

    def train_step(self, batches: Iterator[MicroBatch]) -> Tensor:
        if self._evaluated:  # validation may use other lengths
            self.deepspeed.reset_activation_shape()
            self._evaluated = False
        own: Tensor = self.deepspeed.train_batch(data_iter=batches)
        return own

    def _own_loss(self) -> Tensor:
        """The mean over micro-batches where the loss is computed: on the last stage."""
        if not self.deepspeed.is_last_stage():
            return torch.zeros((), device=self.device)
        loss: Tensor = self.deepspeed._scale_loss_by_gas(self.deepspeed.total_loss)
        return loss.detach().float().mean()

    def evaluate(self, batches: Iterator[MicroBatch], count: int) -> Tensor:
        self.deepspeed.reset_activation_shape()
        self._evaluated = True
        total = torch.zeros((), device=self.device)
        for _ in range(count):
            loss = self.deepspeed.eval_batch(batches)
            total += loss.detach().float().mean()
        return total / count


def _checkpoint_engine(files: Files) -> Any:
    """Reads and writes DeepSpeed's files through `files`, which execute no code on load."""
    engine: Any = TorchCheckpointEngine()
    engine.makedirs, engine.save, engine.load = files.makedirs, files.save, files.load
    return engine


# Parts of DeepSpeed's optimizers that we replace.


def _keep_gradients_of_the_loss(optimizer: Any) -> None:
    """Add the head's gradient to bf16's fp32 sums in a pipeline, where the loss applies the head.

    DeepSpeed's optimizer clears the bf16 gradients when the backward pass reaches the model's
    output, and the head's is complete by then. Clear them once they have been added up instead.
    """
    if not hasattr(optimizer, "update_hp_grads") or optimizer.immediate_grad_update:
        return

    def add_up(*_: Any, **__: Any) -> None:
        optimizer.update_hp_grads(clear_lp_grads=True)

    optimizer.backward_prologue = lambda: None
    optimizer.backward_epilogue = add_up


def _clip_by_whole_norm(
    engine: Any, max_norm: float, tp_rank: int, replica: dist.ProcessGroup | None
) -> None:
    """fp32 without ZeRO: clip by the norm over all ranks; a step that is not finite is skipped.

    DeepSpeed's `clip_fp32_gradients` counts, on pipeline stages after the first, only the slices of
    tensor-parallel layers. ZeRO's optimizers do both themselves: they know the norm over all ranks
    before they touch a weight. The two attributes are those that DeepSpeed reads after a step.
    """
    optimizer = engine.optimizer
    apply = optimizer.step

    def step(*args: Any, **kwargs: Any) -> Any:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        norm = clip_by_whole_norm(parameters, max_norm, tp_rank=tp_rank, replica=replica)
        optimizer._global_grad_norm = norm
        optimizer.overflow = not math.isfinite(norm)
        return None if optimizer.overflow else apply(*args, **kwargs)

    optimizer.overflow = False
    optimizer.step = step
    engine.clip_fp32_gradients = lambda: None


# A list of layers as a pipeline.


@dataclass(frozen=True)
class PipelineLayer:
    """One layer of the list: `kind` decides its pipeline stage, `make` builds it."""

    kind: type[nn.Module]
    make: Callable[[], nn.Module]
    tied: bool = False
    """Shares its weights with the other tied layer; the second does nothing to its input."""


def pipeline_specs(layers: Sequence[PipelineLayer | Callable[..., Any]]) -> list[Any]:
    """DeepSpeed's layer specs; a plain function of the activations is passed unchanged."""
    specs: list[Any] = []
    tied = partial(TiedLayerSpec, "embedding", tied_weight_attr="word_embeddings.weight")
    seen = False
    for layer in layers:
        if not isinstance(layer, PipelineLayer):
            specs.append(layer)
            continue
        if layer.tied:
            built = tied(layer.kind, forward_fn=lambda _, x: x) if seen else tied(layer.kind)
            seen = True
        else:
            built = LayerSpec(layer.kind)
        built.build = partial(_make, layer)  # DeepSpeed partitions the layers by their kind
        specs.append(built)
    return specs


def _make(layer: PipelineLayer, log: bool = False) -> nn.Module:
    return layer.make()


def build_pipeline(
    layers: Sequence[PipelineLayer | Callable[..., Any]],
    grid: Any,
    loss: Callable[..., Tensor],
    *,
    partition_method: str,
    recomputed_layers: int,
) -> PipelineModule:
    """This rank's stage; `recomputed_layers` is how many layers a recomputed block has, 0: none."""
    return PipelineModule(
        pipeline_specs(layers),
        topology=grid.topology(),
        loss_fn=loss,
        partition_method=partition_method,
        activation_checkpoint_interval=recomputed_layers,
        activation_checkpoint_func=non_reentrant_checkpoint,
        checkpointable_layers=["TransformerLayer"],
    )


# ZeRO 3: partitioned parameters.


def partitioner(
    config: dict[str, Any], grid: Any, dtype: torch.dtype
) -> Callable[[nn.Parameter], None]:
    """A function that partitions a parameter, in `dtype`, over the data-parallel ranks."""
    first: list[Any] = []

    def partition(parameter: nn.Parameter) -> None:
        parameter.data = parameter.data.to(dtype)
        if first:
            first[0].convert_to_zero_parameters(param_list=[parameter])
            return
        deepspeed.zero.Init(
            module=nn.ParameterList([parameter]),
            data_parallel_group=grid.get_data_parallel_group(),
            config_dict_or_path=config,
            mpu=grid,
        )
        first.append(parameter)

    return partition


def register_shared_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """`module` uses another module's weight: ZeRO 3 must all-gather it there too."""
    deepspeed.zero.register_external_parameter(module, parameter)


def gather_parameters(
    parameters: Iterable[nn.Parameter], *, write: bool
) -> AbstractContextManager[Any]:
    """See `interface.gathered`."""
    context: AbstractContextManager[Any] = deepspeed.zero.GatheredParameters(
        list(parameters), modifier_rank=0 if write else None
    )
    return context
