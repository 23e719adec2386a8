"""The loop. Everything that is not training a step is a hook."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from megatron.mpu import ParallelState
from megatron.training.stepper import MicroBatch, Stepper

if TYPE_CHECKING:
    from megatron.neox_arguments import NeoXArgs


@dataclass
class StepReport:
    """What is known after a step."""

    step: int
    loss: float
    lr: float
    grad_norm: float | None
    seconds: float
    tokens: int
    skipped: bool
    loss_scale: float | None = None  # fp16 with dynamic scaling
    raised: dict[str, int] = field(default_factory=dict)
    """By name, the number of ranks on which a hook's flag was up."""

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds if self.seconds > 0 else 0.0


class Hook:
    """Something that happens around the steps. Called on every rank, in order."""

    def on_start(self, trainer: Trainer) -> None:
        """Before the first step."""

    def flags(self) -> dict[str, bool]:
        """What all ranks are told of this one when its step is over; always the same names."""
        return {}

    def after_step(self, trainer: Trainer, report: StepReport) -> None:
        """After each optimizer step."""

    def on_end(self, trainer: Trainer) -> None:
        """After the last step, or when something asked to stop."""

    def on_failure(self, trainer: Trainer, error: BaseException) -> None:
        """When training raised; the error goes on afterwards."""


@dataclass
class Trainer:
    """State of a run that hooks may read: the engine, the step count, and why it should stop."""

    args: NeoXArgs
    stepper: Stepper
    parallel: ParallelState
    is_main: bool
    train_batches: Iterator[MicroBatch] | None
    valid_batches: Iterator[MicroBatch] | None
    test_batches: Iterator[MicroBatch] | None
    tokens_per_step: int
    train_iters: int
    step: int = 0
    stop_reason: str | None = None
    exit_code: int = 0
    hooks: Sequence[Hook] = field(default_factory=list)

    def run(self) -> int:
        """Train to the last step or until a hook asks to stop; returns the exit code."""
        try:
            for hook in self.hooks:
                hook.on_start(self)
            while self.step < self.train_iters and self.stop_reason is None:
                report = self._take_step()
                for hook in self.hooks:
                    hook.after_step(self, report)
            for hook in self.hooks:
                hook.on_end(self)
        except BaseException as error:
            self._tell_hooks(error)
            raise
        return self.exit_code

    def _tell_hooks(self, error: BaseException) -> None:
        """The error that ends the run is the one to report, not what goes wrong because of it."""
        for hook in self.hooks:
            try:
                hook.on_failure(self, error)
            except Exception as second:
                print(f"warning: {type(hook).__name__}: {second}", file=sys.stderr, flush=True)

    def ask_to_stop(self, reason: str, exit_code: int = 0) -> None:
        """End the run after this step, once every hook has seen it."""
        self.stop_reason, self.exit_code = reason, exit_code

    def _take_step(self) -> StepReport:
        assert self.train_batches is not None
        rate = float(self.stepper.engine.lr_scheduler.get_lr()[0])
        start = time.perf_counter()
        agreed = self.stepper.train(self.train_batches, self._flags)
        self.step += 1
        engine = self.stepper.engine
        norm = engine.get_global_grad_norm()
        return StepReport(
            step=self.step,
            loss=agreed.loss,
            lr=rate,
            grad_norm=None if norm is None else float(norm),
            seconds=time.perf_counter() - start,
            tokens=self.tokens_per_step,
            skipped=bool(getattr(engine.optimizer, "overflow", False)),
            loss_scale=_dynamic_loss_scale(engine),
            raised=agreed.raised,
        )

    def _flags(self) -> dict[str, bool]:
        return {name: up for hook in self.hooks for name, up in hook.flags().items()}


def _dynamic_loss_scale(engine: Any) -> float | None:
    """The scale that fp16 gradients are multiplied with, if it is searched for."""
    if not engine.fp16_enabled() or not engine.dynamic_loss_scale():
        return None
    return float(engine.optimizer.loss_scale)
