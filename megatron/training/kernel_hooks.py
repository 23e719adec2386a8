"""The learned kernels: their values per head in the metrics, and the `project` constraint."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron.model.kernel_theory import effective_length
from megatron.model.position_base import TableEmbedding, Tables
from megatron.mpu import TensorParallel
from megatron.training.metrics import Sinks
from megatron.training.trainer import Hook, StepReport, Trainer


def kernel_modules(module: nn.Module) -> list[TableEmbedding]:
    """The tables on this rank that learn something."""
    return [
        part
        for part in module.modules()
        if isinstance(part, TableEmbedding) and next(part.parameters(), None) is not None
    ]


def gathered(engine: Any, kernel: nn.Module, *, write: bool = False) -> AbstractContextManager[Any]:
    """Under ZeRO-3 parameters are in pieces: put them together for the time of the block."""
    if engine.zero_optimization_stage() < 3:
        return nullcontext()
    import deepspeed

    return deepspeed.zero.GatheredParameters(
        list(kernel.parameters()), modifier_rank=0 if write else None
    )


def all_heads(values: Tensor, tp: TensorParallel, dim: int = 0) -> Tensor:
    """The values of every tensor-parallel rank's heads, in order."""
    if tp.size == 1:
        return values
    parts = [torch.empty_like(values) for _ in range(tp.size)]
    dist.all_gather(parts, values.contiguous(), group=tp.group)
    return torch.cat(parts, dim=dim)


class RecordKernels(Hook):
    """r1, r2, ... and the effective length of each head, every `interval` steps."""

    def __init__(self, sinks: Sinks, interval: int) -> None:
        self.sinks, self.interval = sinks, interval

    def on_start(self, trainer: Trainer) -> None:
        if trainer.step == 0:
            self._record(trainer)

    def after_step(self, trainer: Trainer, report: StepReport) -> None:
        if report.step % self.interval == 0 or report.step == trainer.train_iters:
            self._record(trainer)

    @torch.no_grad()
    def _record(self, trainer: Trainer) -> None:
        kernels = kernel_modules(trainer.stepper.engine.module)
        for number, kernel in enumerate(kernels):
            with gathered(trainer.stepper.engine, kernel):
                values = {
                    name: all_heads(value.float(), trainer.parallel.tp).tolist()
                    for name, value in kernel.kernel_values().items()
                }
                lengths = self._effective_lengths(kernel, trainer.parallel.tp)
            suffix = f"_layer{number}" if len(kernels) > 1 else ""
            line: dict[str, Any] = {f"kernel{suffix}": values}
            if lengths is not None:
                line[f"effective_length{suffix}"] = lengths
            self.sinks.write(trainer.step, line)

    def _effective_lengths(
        self, kernel: TableEmbedding, tp: TensorParallel
    ) -> list[int | None] | None:
        if "bias" not in kernel.table_names:
            return None
        tables: Tables = kernel(20_481)
        assert tables.bias is not None
        return effective_length(all_heads(tables.bias, tp))


class ProjectKernels(Hook):
    """kerple_constraint `project`: put parameters back into their bounds after every step."""

    def after_step(self, trainer: Trainer, report: StepReport) -> None:
        engine = trainer.stepper.engine
        for kernel in kernel_modules(engine.module):
            with gathered(engine, kernel, write=True):
                kernel.project_()
            for parameter in kernel.parameters():
                _clamp_master(parameter)


def _clamp_master(parameter: nn.Parameter) -> None:
    """Mixed precision and ZeRO keep an fp32 master copy, which would undo the projection."""
    from deepspeed.utils import safe_get_full_fp32_param, safe_set_full_fp32_param

    if not hasattr(parameter, "_hp_mapping") and not hasattr(parameter, "ds_id"):
        return
    master = safe_get_full_fp32_param(parameter)
    if master is not None:
        safe_set_full_fp32_param(parameter, parameter.detach().float().view_as(master))
