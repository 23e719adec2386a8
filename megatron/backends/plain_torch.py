"""Training in one process with torch alone: fp32, no ZeRO, no pipeline, no DeepSpeed.

Its numbers are bit-identical to DeepSpeed's in that setting, and it writes the same checkpoint
files: a run may be resumed with the other backend.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron.backends.interface import COUNTERS, MicroBatch, Parts
from megatron.backends.optimizer_states import StatesByParameter

MODEL_STATES = "mp_rank_00_model_states.pt"


class TorchEngine(StatesByParameter):
    """A `TrainingEngine` of one process."""

    zero_stage = 0
    loss_scale = None

    def __init__(self, parts: Parts, device: torch.device) -> None:
        self._parts = parts
        self.module: nn.Module = parts.module.to(device)
        self.optimizer, self.scheduler, self.files = parts.optimizer, parts.scheduler, parts.files
        self.device = device
        self.grad_norm: float | None = None
        self.step_skipped = False
        self.global_steps = self.global_samples = self.skipped_steps = 0

    def train_step(self, batches: Iterator[MicroBatch]) -> Tensor:
        self.module.train()
        accumulation = self._parts.accumulation
        total = torch.zeros((), device=self.device)
        for _ in range(accumulation):
            loss = self._parts.loss(self.module, next(batches))
            (loss / accumulation).backward()
            total += loss.detach().float()
        self._apply()
        return total / accumulation

    def _apply(self) -> None:
        """The optimizer's step, unless a gradient is not finite; then the next rate."""
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        self.grad_norm = clip_by_whole_norm(parameters, self._parts.max_norm)
        self.step_skipped = not math.isfinite(self.grad_norm)
        if self.step_skipped:
            self.skipped_steps += 1
        else:
            self.optimizer.step()
            self.scheduler.step()
        self.module.zero_grad()
        self.global_steps += 1
        self.global_samples += self._parts.samples_per_step

    def evaluate(self, batches: Iterator[MicroBatch], count: int) -> Tensor:
        self.module.eval()
        return self._parts.mean_loss(self.module, batches, count)

    def copy_to_master(self, parameter: nn.Parameter) -> None:
        """The optimizer steps the weights themselves."""

    def set_counters(self, **counters: int) -> None:
        vars(self).update(counters)

    def save(self, directory: Path, tag: str, progress: dict[str, Any]) -> None:
        self.files.makedirs(str(directory / tag), exist_ok=True)
        state = {
            "module": self.module.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "lr_scheduler": self.scheduler.state_dict(),
            **{name: getattr(self, name) for name in COUNTERS},
            "dp_world_size": 1,
            "mp_world_size": 1,
            **progress,
        }
        self.files.save(state, str(directory / tag / MODEL_STATES))

    def load(
        self, directory: Path, tag: str, *, optimizer: bool, schedule: bool
    ) -> dict[str, Any] | None:
        path = directory / tag / MODEL_STATES
        if not path.is_file():
            return None
        state: dict[str, Any] = self.files.load(str(path), map_location=self.device)
        self.module.load_state_dict(state["module"])
        if optimizer:
            self.optimizer.load_state_dict(state["optimizer"])
        if schedule:
            self.scheduler.load_state_dict(state["lr_scheduler"])
        self.set_counters(**{name: state[name] for name in COUNTERS})
        return state


# Gradient clipping by the global norm, for any parallel layout.


def clip_by_whole_norm(
    parameters: list[nn.Parameter],
    max_norm: float,
    *,
    tp_rank: int = 0,
    replica: dist.ProcessGroup | None = None,
) -> float:
    """Scale gradients whose norm is above `max_norm` (0: never) down to it; the norm before."""
    norm = whole_norm(parameters, tp_rank=tp_rank, replica=replica)
    if 0 < max_norm < norm < math.inf:
        gradients = [p.grad for p in parameters if p.grad is not None]
        torch._foreach_mul_(gradients, max_norm / (norm + 1e-6))
    return norm


def whole_norm(
    parameters: list[nn.Parameter], *, tp_rank: int, replica: dist.ProcessGroup | None
) -> float:
    """The norm of the gradient over all ranks of `replica`: the same number on each of them.

    Copies that do not count must still be finite: infinity in one makes the norm infinite.
    """
    present = [(p, p.grad) for p in parameters if p.grad is not None]
    square = torch.zeros((), device=parameters[0].device)
    if present:
        squares = torch.stack(list(torch._foreach_norm([g.float() for _, g in present]))).square()
        counts = [_counts_here(p, tp_rank) for p, _ in present]
        counted = torch.tensor(counts, device=squares.device)
        square = torch.where(counted | ~torch.isfinite(squares), squares, 0.0).sum()
    if dist.is_initialized() and dist.get_world_size(replica) > 1:
        dist.all_reduce(square, group=replica)
    return float(square.sqrt())


def _counts_here(parameter: nn.Parameter, tp_rank: int) -> bool:
    """Whether this rank adds the parameter to the global norm.

    Slices count everywhere, whole copies on the first tensor-parallel rank, and an embedding that
    a later pipeline stage uses again (DeepSpeed marks it) only where it came from.
    """
    if getattr(parameter, "ds_pipe_replicated", False):
        return False
    return tp_rank == 0 or bool(getattr(parameter, "model_parallel", False))
