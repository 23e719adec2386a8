"""One training step and one validation pass, on either kind of DeepSpeed engine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.model.loss import masked_mean
from megatron.mpu import ParallelState

MicroBatch = tuple[Tensor, tuple[Tensor, Tensor]]  # tokens, (labels, loss mask)


class Stepper(Protocol):
    """What the loop needs of an engine."""

    engine: Any

    def train(self, batches: Iterator[MicroBatch]) -> Tensor:
        """Take one optimizer step; the mean loss over micro-batches and replicas."""

    def evaluate(self, batches: Iterator[MicroBatch], count: int) -> Tensor:
        """The mean loss of `count` whole batches: the same samples under every layout."""


class PlainStepper:
    """pipe_parallel_size 0: the whole model on every rank (or tensor-parallel group)."""

    def __init__(self, engine: Any, parallel: ParallelState) -> None:
        self.engine = engine
        self.parallel = parallel

    def train(self, batches: Iterator[MicroBatch]) -> Tensor:
        self.engine.train()
        accumulation = self.engine.gradient_accumulation_steps()
        total = torch.zeros((), device=self.engine.device)
        for _ in range(accumulation):
            loss = self._loss(next(batches))
            self.engine.backward(loss)
            self.engine.step()
            total += loss.detach().float()
        return self._mean_over_replicas(total / accumulation)

    def evaluate(self, batches: Iterator[MicroBatch], count: int) -> Tensor:
        self.engine.eval()
        total = torch.zeros((), device=self.engine.device)
        micro_batches = count * self.engine.gradient_accumulation_steps()
        with torch.no_grad():
            for _ in range(micro_batches):
                total += self._loss(next(batches)).float()
        return self._mean_over_replicas(total / max(micro_batches, 1))

    def _loss(self, batch: MicroBatch) -> Tensor:
        tokens, (labels, mask) = batch
        return masked_mean(self.engine(tokens, labels), mask)

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

    def train(self, batches: Iterator[MicroBatch]) -> Tensor:
        if self._evaluated:  # validation may use other lengths
            self.engine.reset_activation_shape()
            self._evaluated = False
        return self.engine.train_batch(data_iter=batches).detach().float().mean()

    def evaluate(self, batches: Iterator[MicroBatch], count: int) -> Tensor:
        self.engine.reset_activation_shape()
        self._evaluated = True
        total = torch.zeros((), device=self.engine.device)
        for _ in range(count):
            loss = self.engine.eval_batch(batches)
            total += loss.detach().float().mean()
        return total / max(count, 1)


def build_stepper(engine: Any, parallel: ParallelState, *, pipelined: bool) -> Stepper:
    """The stepper for this engine."""
    return PipelineStepper(engine, parallel) if pipelined else PlainStepper(engine, parallel)
