"""Reasons to stop: signals, too many bad steps, exit_interval."""

from __future__ import annotations

import math
import os
import signal
from types import FrameType

import torch
import torch.distributed as dist

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
    flag = torch.tensor([number])
    if dist.get_backend() == "nccl":
        flag = flag.cuda()
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
