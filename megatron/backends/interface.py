"""`TrainingEngine`: the interface of a backend to training and checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

Inputs = Tensor | tuple[Tensor, Tensor]  # tokens, or (tokens, first position of each document)
MicroBatch = tuple[Inputs, tuple[Tensor, Tensor]]  # inputs, (labels, loss mask)
LossFunction = Callable[[Callable[..., Any], MicroBatch], Tensor]
"""(the model, or what calls it; a micro-batch) -> the mean loss."""
States = dict[str, Tensor]
"""A parameter's fp32 weight under `WEIGHT`, and the optimizer's states under its own names."""
Span = tuple[nn.Parameter, int, int, int]
"""A parameter, start and end of this rank's part in a tensor, and the first element's index."""
STEP = "step"
WEIGHT = "fp32"
COUNTERS = ("global_steps", "global_samples", "skipped_steps")
"""Counters of an engine, under DeepSpeed's names, in its files too."""


class LearningRates(Protocol):
    """The schedule: sets the rate of every parameter group."""

    def step(self) -> None: ...

    def get_lr(self) -> list[float]: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class Files(Protocol):
    """Writes and reads a checkpoint's files; see `checkpoints.safe_files`."""

    def makedirs(self, path: str, exist_ok: bool = False) -> None: ...

    def save(self, state_dict: Any, path: str) -> None: ...

    def load(self, path: str, map_location: Any = None) -> Any: ...


@dataclass(frozen=True)
class Parts:
    """The parts that an engine is built from, the same for every backend."""

    module: nn.Module
    optimizer: Optimizer
    scheduler: LearningRates
    files: Files
    loss: LossFunction
    accumulation: int
    """Micro-batches per step."""
    samples_per_step: int
    max_norm: float
    """Gradients are clipped to this norm; 0: never."""

    @torch.no_grad()
    def mean_loss(
        self, model: Callable[..., Any], batches: Iterator[MicroBatch], count: int
    ) -> Tensor:
        """This replica's mean loss over `count` batches, without gradients."""
        micro_batches = count * self.accumulation
        losses = (self.loss(model, next(batches)).float() for _ in range(micro_batches))
        return sum(losses, torch.zeros(())) / micro_batches


class TrainingEngine(Protocol):
    """A model and its optimizer, on this rank."""

    module: nn.Module
    optimizer: Optimizer
    """The optimizer that the config names; its tensors are those of `master_spans`."""
    scheduler: LearningRates
    files: Files
    device: torch.device
    zero_stage: int

    @property
    def skipped_steps(self) -> int: ...

    @property
    def grad_norm(self) -> float | None:
        """Of the last step, before clipping, over the whole model."""

    @property
    def step_skipped(self) -> bool:
        """Whether the last step changed nothing, because a gradient was not finite."""

    @property
    def loss_scale(self) -> float | None:
        """The dynamic scale of fp16's loss; None without one."""

    def train_step(self, batches: Iterator[MicroBatch]) -> Tensor:
        """Take one optimizer step; this rank's mean loss over micro-batches, 0 if it has none."""

    def evaluate(self, batches: Iterator[MicroBatch], count: int) -> Tensor:
        """The mean loss of `count` whole batches: the same samples under every layout."""

    def copy_to_master(self, parameter: nn.Parameter) -> None:
        """After a weight of the module was changed: copy it to the optimizer's fp32 weights."""

    def master_spans(self) -> Iterator[tuple[Tensor, list[Span]]]:
        """The optimizer's tensors on this rank, and which parameters' elements are in them."""

    def read_states(self) -> Iterator[tuple[nn.Parameter, States]]:
        """Each parameter, whole (of its tensor-parallel rank), with the optimizer's states."""

    def write_states(self, states: dict[nn.Parameter, States]) -> None:
        """Set every parameter's weight and states."""

    def save(self, directory: Path, tag: str, progress: dict[str, Any]) -> None:
        """Write this rank's files below `directory`/`tag`, `progress` among them."""

    def load(
        self, directory: Path, tag: str, *, optimizer: bool, schedule: bool
    ) -> dict[str, Any] | None:
        """Read what `save` wrote; its `progress`, or None where there is no model."""

    def set_counters(self, **counters: int) -> None:
        """Set some of `COUNTERS`."""


# Parameters partitioned by ZeRO 3: DeepSpeed sets these attributes on them.


def is_partitioned(parameter: Tensor) -> bool:
    """Whether ZeRO 3 has partitioned it, so that this rank holds a part only."""
    return hasattr(parameter, "ds_id")


def full_shape(parameter: Tensor) -> torch.Size:
    """The full shape of a parameter that ZeRO 3 may have partitioned."""
    shape: torch.Size = getattr(parameter, "ds_shape", parameter.shape)
    return shape


def gathered(
    parameters: Iterable[nn.Parameter], *, write: bool = False
) -> AbstractContextManager[Any]:
    """All-gathers the parameters inside the block; `write` broadcasts rank 0's changes."""
    found = list(parameters)
    if not any(map(is_partitioned, found)):
        return nullcontext()
    from megatron.backends.deepspeed_engine import gather_parameters

    return gather_parameters(found, write=write)
