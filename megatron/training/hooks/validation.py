"""Validation every `eval_interval` steps, and both splits at the end."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Protocol

from megatron.training.stepper import MicroBatch
from megatron.training.trainer import Hook, StepReport, Trainer


class Sink(Protocol):
    """Takes lines of metrics."""

    def write(self, step: int, values: dict[str, object]) -> None: ...


class Validate(Hook):
    """Mean loss and perplexity of `eval_iters` batches."""

    def __init__(self, interval: int, iterations: int, sink: Sink | None) -> None:
        self.interval, self.iterations, self.sink = interval, iterations, sink
        self.validated_step = -1

    def after_step(self, trainer: Trainer, report: StepReport) -> None:
        if report.step % self.interval == 0 and trainer.valid_batches is not None:
            self.measure(trainer, "valid", trainer.valid_batches)
            self.validated_step = report.step

    def on_end(self, trainer: Trainer) -> None:
        if trainer.stop_reason is not None or self.iterations == 0:
            return
        if trainer.valid_batches is not None and self.validated_step != trainer.step:
            self.measure(trainer, "valid", trainer.valid_batches)
        if trainer.test_batches is not None:
            self.measure(trainer, "test", trainer.test_batches)

    def measure(self, trainer: Trainer, name: str, batches: Iterator[MicroBatch]) -> None:
        """Evaluate one split; rank 0 prints and records it."""
        if self.iterations == 0:
            return
        loss = float(trainer.stepper.evaluate(batches, self.iterations))
        perplexity = math.exp(min(loss, 100.0))
        if trainer.is_main:
            print(
                f"step {trainer.step}: {name} loss {loss:.4f}, perplexity {perplexity:.4f}",
                flush=True,
            )
        if self.sink is not None:
            self.sink.write(trainer.step, {f"{name}_loss": loss, f"{name}_ppl": perplexity})
