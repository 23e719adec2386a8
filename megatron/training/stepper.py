"""One training step and one validation pass, on either kind of DeepSpeed engine.

All that a step's end has to tell between ranks, the loss and what hooks want to know of the others,
goes through one reduction and comes to the host at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.model.loss import masked_mean
from megatron.mpu import ParallelState

Inputs = Tensor | tuple[Tensor, Tensor]  # tokens, or (tokens, where their documents start)
MicroBatch = tuple[Inputs, tuple[Tensor, Tensor]]  # inputs, (labels, loss mask)


Flags = Callable[[], Mapping[str, bool]]
"""What a rank says when its step is over: the same names on all ranks."""


@dataclass(frozen=True)
class Agreed:
    """What all ranks know after a step: the mean loss, and on how many each flag is up."""

    loss: float
    raised: dict[str, int]


class Stepper(Protocol):
    """What the loop needs of an engine."""

    engine: Any

    def train(self, batches: Iterator[MicroBatch], flags: Flags = dict) -> Agreed:
        """Take one optimizer step; the loss is the mean over micro-batches and replicas."""

    def evaluate(self, batches: Iterator[MicroBatch], count: int) -> Tensor:
        """The mean loss of `count` whole batches: the same samples under every layout."""


class PlainStepper:
    """pipe_parallel_size 0: the whole model on every rank (or tensor-parallel group)."""

    def __init__(self, engine: Any, parallel: ParallelState) -> None:
        self.engine = engine
        self.parallel = parallel

    def train(self, batches: Iterator[MicroBatch], flags: Flags = dict) -> Agreed:
        self.engine.train()
        accumulation = self.engine.gradient_accumulation_steps()
        total = torch.zeros((), device=self.engine.device)
        for _ in range(accumulation):
            loss = self._loss(next(batches))
            self.engine.backward(loss)
            self.engine.step()
            total += loss.detach().float()
        return _agree(total / accumulation, flags(), self.parallel)

    def evaluate(self, batches: Iterator[MicroBatch], count: int) -> Tensor:
        self.engine.eval()
        total = torch.zeros((), device=self.engine.device)
        micro_batches = count * self.engine.gradient_accumulation_steps()
        with torch.no_grad():
            for _ in range(micro_batches):
                total += self._loss(next(batches)).float()
        return self._mean_over_replicas(total / max(micro_batches, 1))

    def _loss(self, batch: MicroBatch) -> Tensor:
        inputs, (labels, mask) = batch
        return masked_mean(self.engine(inputs, labels), mask)

    def _mean_over_replicas(self, value: Tensor) -> Tensor:
        if self.parallel.dp_size > 1:
            dist.all_reduce(value, group=self.parallel.dp_group)
            value /= self.parallel.dp_size
        return value


class PipelineStepper:
    """pipe_parallel_size >= 1: DeepSpeed's pipeline engine runs the schedule."""

    def __init__(self, engine: Any, parallel: ParallelState) -> None:
        self.engine = engine
        self.parallel = parallel
        self._evaluated = False
        # DeepSpeed would average over replicas, then broadcast to the stages.
        engine._aggregate_total_loss = self._own_loss

    def train(self, batches: Iterator[MicroBatch], flags: Flags = dict) -> Agreed:
        if self._evaluated:  # validation may use other lengths
            self.engine.reset_activation_shape()
            self._evaluated = False
        own = self.engine.train_batch(data_iter=batches)
        return _agree(own, flags(), self.parallel, counts=self.engine.is_last_stage())

    def _own_loss(self) -> Tensor:
        """The mean over micro-batches where the loss is computed: on the last stage."""
        if not self.engine.is_last_stage():
            return torch.zeros((), device=self.engine.device)
        loss: Tensor = self.engine._scale_loss_by_gas(self.engine.total_loss)
        return loss.detach().float().mean()

    def evaluate(self, batches: Iterator[MicroBatch], count: int) -> Tensor:
        self.engine.reset_activation_shape()
        self._evaluated = True
        total = torch.zeros((), device=self.engine.device)
        for _ in range(count):
            loss = self.engine.eval_batch(batches)
            total += loss.detach().float().mean()
        return total / max(count, 1)


def _agree(
    loss: Tensor, flags: Mapping[str, bool], parallel: ParallelState, *, counts: bool = True
) -> Agreed:
    """One sum over all ranks; of those that hold the same loss, the first counts."""
    counts = counts and parallel.tp.rank == 0
    ups = torch.tensor([float(up) for up in flags.values()], device=loss.device)
    said = torch.cat([loss[None] if counts else torch.zeros_like(loss)[None], ups])
    if dist.get_world_size() > 1:
        dist.all_reduce(said)
    said[0] /= parallel.dp_size
    mean, *numbers = said.tolist()
    return Agreed(mean, dict(zip(flags, map(int, numbers), strict=True)))


def build_stepper(engine: Any, parallel: ParallelState, *, pipelined: bool) -> Stepper:
    """The stepper for this engine."""
    return PipelineStepper(engine, parallel) if pipelined else PlainStepper(engine, parallel)
