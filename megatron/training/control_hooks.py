"""Reasons to stop: signals, too many bad steps, exit_interval."""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Iterator
from types import FrameType
from typing import Protocol

import torch
import torch.distributed as dist

from megatron.checkpoints.save_and_resume import save_checkpoint
from megatron.checkpoints.store import CheckpointStore
from megatron.mpu.job import current_device
from megatron.training.stepper import MicroBatch
from megatron.training.trainer import Hook, StepReport, Trainer

# sysexits.h's "temporary failure; try again": the sbatch templates requeue on it.
EXIT_REQUEUE = 75
EXIT_DIVERGED = 76


def leave_on_signal_until_started() -> None:
    """Before the first step there is nothing to save: a signal ends the process, to be requeued."""

    def leave(number: int, frame: FrameType | None) -> None:
        print(f"received {signal.Signals(number).name} before the first step", flush=True)
        os._exit(EXIT_REQUEUE)

    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, leave)


class StopOnSignal(Hook):
    """SIGTERM and SIGUSR1 finish the step, save and leave; a second Ctrl-C ends at once."""

    SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)

    def __init__(self) -> None:
        self.received = 0

    def on_start(self, trainer: Trainer) -> None:
        for number in self.SIGNALS:
            signal.signal(number, self._note)

    def after_step(self, trainer: Trainer, report: StepReport) -> None:
        number = _largest_anywhere(self.received)
        if number:
            name = signal.Signals(number).name
            code = 130 if number == signal.SIGINT else EXIT_REQUEUE
            trainer.ask_to_stop(f"received {name}", exit_code=code)

    # The handlers stay: a launcher that sees one rank leave with 75 sends SIGTERM to the others,
    # which may still be writing their last lines.

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self.received:
            raise KeyboardInterrupt
        self.received = number


def _largest_anywhere(number: int) -> int:
    """Signals reach ranks at different times; all must stop after the same step."""
    if dist.get_world_size() == 1:
        return number
    flag = torch.tensor([number], device=current_device())
    dist.all_reduce(flag, op=dist.ReduceOp.MAX)
    return int(flag.item())


class StopWhenDiverged(Hook):
    """Gives up after too many steps in a row whose loss or gradient was not finite."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.in_a_row = 0
        self.total = 0

    def after_step(self, trainer: Trainer, report: StepReport) -> None:
        bad = is_bad_step(trainer, report)
        self.in_a_row = self.in_a_row + 1 if bad else 0
        self.total += bad
        if bad and trainer.is_main:
            print(
                f"step {report.step}: loss {report.loss} or its gradient is not finite; "
                f"the step was skipped ({self.in_a_row} in a row)",
                flush=True,
            )
        if self.limit and self.in_a_row >= self.limit:
            trainer.ask_to_stop(
                f"{self.in_a_row} steps in a row were not finite", exit_code=EXIT_DIVERGED
            )


def is_bad_step(trainer: Trainer, report: StepReport) -> bool:
    """A step that counts towards giving up.

    With fp16 a skipped step is how the loss scale is found: it counts once the scale has reached
    its minimum. (DeepSpeed's own answer there is an exception without a checkpoint's name.)
    """
    if not math.isfinite(report.loss):
        return True
    if report.loss_scale is None or trainer.args.optimization.fp16 is None:
        return report.skipped
    return report.skipped and report.loss_scale <= trainer.args.optimization.fp16.min_loss_scale


class StopAtInterval(Hook):
    """`exit_interval`: leave (after saving) at the first step divisible by it."""

    def __init__(self, interval: int) -> None:
        self.interval = interval

    def after_step(self, trainer: Trainer, report: StepReport) -> None:
        if report.step % self.interval == 0:
            trainer.ask_to_stop(f"exit_interval {self.interval} reached")


# When to write a checkpoint.


class SaveCheckpoints(Hook):
    """Every `interval` steps (or at powers of it), at extra steps, and when the run ends."""

    def __init__(
        self,
        store: CheckpointStore,
        *,
        interval: float | None,
        scale: str,
        extra_steps: frozenset[int],
        samples_per_step: int,
    ) -> None:
        self.store = store
        self.interval, self.scale, self.extra_steps = interval, scale, extra_steps
        self.samples_per_step = samples_per_step
        self.saved_step = -1

    def on_start(self, trainer: Trainer) -> None:
        if trainer.step == 0 and 0 in self.extra_steps:
            self._save(trainer)
        self.saved_step = trainer.step

    def after_step(self, trainer: Trainer, report: StepReport) -> None:
        if self._is_due(report.step) and not is_bad_step(trainer, report):
            self._save(trainer)

    def on_end(self, trainer: Trainer) -> None:
        if trainer.exit_code == EXIT_DIVERGED:
            newest = self.store.newest()
            if trainer.is_main:
                good = self.store.path(newest) if newest is not None else "none was saved"
                print(f"The last good checkpoint: {good}", flush=True)
        elif trainer.step > self.saved_step:
            self._save(trainer)

    def _is_due(self, step: int) -> bool:
        if step in self.extra_steps:
            return True
        if not self.interval:
            return False
        if self.scale == "linear":
            return step % self.interval == 0
        power = 1.0
        while int(power) < step:  # GPT-NeoX's: 1 and the powers, cut to whole steps
            power *= self.interval
        return int(power) == step

    def _save(self, trainer: Trainer) -> None:
        if trainer.step == self.saved_step:
            return
        path = save_checkpoint(
            trainer.stepper.engine,
            self.store,
            trainer.args,
            trainer.step,
            trainer.step * self.samples_per_step,
        )
        self.saved_step = trainer.step
        if trainer.is_main:
            print(f"saved {path}", flush=True)


# Validation every `eval_interval` steps, and both splits at the end.


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
