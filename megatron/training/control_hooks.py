"""Hooks that control a run: when to stop, when to save a checkpoint, when to validate."""

from __future__ import annotations

import math
import signal
from collections import deque
from functools import partial
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from megatron.checkpoints.resuming import Resumed
from megatron.checkpoints.saving import Save, save_run
from megatron.checkpoints.store import CheckpointStore
from megatron.errors import NonFiniteError
from megatron.neox_arguments.run_keys import CheckpointArgs
from megatron.terminal import EXIT_INTERRUPTED, EXIT_REQUEUE
from megatron.training.metrics import Sinks
from megatron.training.trainer import Hook, StepReport, Stream, Trainer

EXIT_DIVERGED = 76
INTERRUPTED = (EXIT_REQUEUE, EXIT_INTERRUPTED)


class StopOnSignal(Hook):
    """SIGTERM and SIGUSR1 finish the step, save and exit; a second Ctrl-C exits at once."""

    SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)

    def __init__(self) -> None:
        self.received = 0

    def on_start(self, trainer: Trainer) -> None:
        for number in self.SIGNALS:
            signal.signal(number, self._note)

    def flags(self) -> dict[str, bool]:
        """Signals reach ranks at different times; all must stop after the same step."""
        return {number.name: self.received == number for number in self.SIGNALS}

    def after_step(self, trainer: Trainer, report: StepReport) -> None:
        number = next((n for n in self.SIGNALS if report.raised[n.name]), None)
        if number is not None:
            code = EXIT_INTERRUPTED if number == signal.SIGINT else EXIT_REQUEUE
            trainer.ask_to_stop(f"received {number.name}", exit_code=code)

    # The handlers stay installed: a launcher that sees one rank exit with 75 sends SIGTERM to the
    # others, which may still be printing.

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self.received:
            raise KeyboardInterrupt
        self.received = number


class StopWhenDiverged(Hook):
    """Stops the run after too many steps in a row whose loss or gradient was not finite.

    Gradients are looked at one by one in the first step and after a bad one, until one is good.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.in_a_row = self.steps = 0
        self.first_bad: str | None = None
        self._watching: list[Any] = []

    def on_start(self, trainer: Trainer) -> None:
        self._watch(trainer.engine.module)

    def after_step(self, trainer: Trainer, report: StepReport) -> None:
        bad = is_bad_step(trainer, report)
        self.in_a_row = self.in_a_row + 1 if bad else 0
        self.steps += 1
        if bad:
            named = f" (the first in the backward pass: {self.first_bad})" if self.first_bad else ""
            trainer.say(
                f"step {report.step}: loss {report.loss} or its gradient is not finite{named}; "
                f"the step was skipped ({self.in_a_row} in a row)"
            )
            self._watch(trainer.engine.module)
        else:
            for handle in self._watching:
                handle.remove()
            self._watching = []
        self.first_bad = None
        if self.limit and self.in_a_row >= self.limit:
            trainer.ask_to_stop(
                f"{self.in_a_row} steps in a row had a loss or gradient that is not finite",
                exit_code=EXIT_DIVERGED,
            )

    def on_end(self, trainer: Trainer) -> None:
        """A run of which every step was skipped has no result."""
        if trainer.stop_reason is None and 0 < self.steps == self.in_a_row:
            trainer.say("error: every step was skipped, so nothing was learned or saved")
            trainer.exit_code = EXIT_DIVERGED

    def _watch(self, module: nn.Module) -> None:
        if not self._watching:
            self._watching = [
                parameter.register_hook(partial(self._note_if_bad, name))
                for name, parameter in module.named_parameters()
                if parameter.requires_grad
            ]

    def _note_if_bad(self, name: str, gradient: Tensor) -> None:
        if self.first_bad is None and not bool(torch.isfinite(gradient).all()):
            self.first_bad = name


def is_bad_step(trainer: Trainer, report: StepReport) -> bool:
    """Whether a step counts towards `StopWhenDiverged`'s limit.

    With fp16 a skipped step lowers the loss scale: it counts once the scale is at its minimum.
    (DeepSpeed raises an exception there, which names no checkpoint.)
    """
    if not math.isfinite(report.loss):
        return True
    if report.loss_scale is None or trainer.args.optimization.fp16 is None:
        return report.skipped
    return report.skipped and report.loss_scale <= trainer.args.optimization.fp16.min_loss_scale


class WatchDivergence(Hook):
    """Warns when the loss diverges: far above a uniform model's loss, and not falling.

    Printed once, after three such steps in a row; `exit_on_divergence` stops after `PATIENCE`.
    """

    WINDOW = 5
    PATIENCE = 10

    def __init__(self, vocabulary: int, sinks: Sinks, *, ends: bool) -> None:
        self.uniform = math.log(max(vocabulary, 2))
        self.sinks, self.ends = sinks, ends
        self.recent: deque[float] = deque(maxlen=2 * self.WINDOW)
        self.in_a_row = 0
        self.warned = False

    def after_step(self, trainer: Trainer, report: StepReport) -> None:
        if not math.isfinite(report.loss):
            return  # StopWhenDiverged counts those
        self.recent.append(report.loss)
        far = report.loss > 1.5 * self.uniform + 1.0
        self.in_a_row = self.in_a_row + 1 if far and self._does_not_fall() else 0
        if self.in_a_row >= 3 and not self.warned:
            self.warned = True
            trainer.say(
                f"warning: step {report.step}: the training diverges: loss {report.loss:.4g}, "
                f"where a uniform model has {self.uniform:.4g}. Lower the learning rate "
                f"(now {report.lr:.2e}); exit_on_divergence: true ends such a run with "
                f"{EXIT_DIVERGED}."
            )
            self.sinks.write(report.step, {"diverging": report.loss, "uniform_loss": self.uniform})
        if self.ends and self.in_a_row >= self.PATIENCE:
            trainer.ask_to_stop(
                f"the loss diverged: {report.loss:.4g}, the uniform model's is {self.uniform:.4g}",
                exit_code=EXIT_DIVERGED,
            )

    def _does_not_fall(self) -> bool:
        """Whether the newer half of the last losses is less than a tenth below the older half."""
        losses = list(self.recent)
        half = len(losses) // 2
        if half == 0:
            return True
        older, newer = losses[:half], losses[half:]
        return sum(newer) / len(newer) >= 0.9 * sum(older) / len(older)


class StopAtInterval(Hook):
    """`exit_interval`: save and exit at the first step divisible by it."""

    def __init__(self, interval: int) -> None:
        self.interval = interval

    def after_step(self, trainer: Trainer, report: StepReport) -> None:
        if report.step % self.interval == 0:
            trainer.ask_to_stop(f"exit_interval {self.interval} reached")


def raise_at_first_nonfinite_layer(module: nn.Module) -> None:
    """detect_anomaly: raise at the first leaf layer with a NaN or infinite output or gradient."""
    for name, part in module.named_modules():
        if next(part.children(), None) is None:
            name = name or type(part).__name__
            part.register_forward_hook(partial(_check_finite, name, "output"))
            part.register_full_backward_hook(partial(_check_finite, name, "gradient"))


def _check_finite(name: str, what: str, module: nn.Module, _: Any, found: Any) -> None:
    for leaf in tree_leaves(found):
        if isinstance(leaf, Tensor) and not bool(torch.isfinite(leaf).all()):
            kind = type(module).__name__
            raise NonFiniteError(f"detect_anomaly: the {what} ({kind}) of {name} is not finite")


# When to write a checkpoint.


class SaveCheckpoints(Hook):
    """Every `checkpoint_factor` steps (or at its powers), at extra steps, and when the run ends.

    `async_save` writes the files while training continues, one checkpoint at a time. The checkpoint
    becomes visible after the first step at whose end every rank has written its files, or when the
    next checkpoint or the end of the run waits for it.
    """

    def __init__(
        self,
        store: CheckpointStore,
        options: CheckpointArgs,
        start: Resumed,
        samples_per_step: int,
        data: dict[str, Any] | None = None,
    ) -> None:
        self.store, self.options, self.data = store, options, data
        self.extra_steps = options.extra_save_iters or []
        self.start, self.samples_per_step = start, samples_per_step
        self.saved_step = -1
        self.pending: Save | None = None

    def flags(self) -> dict[str, bool]:
        return {"writing": self.pending is not None and not self.pending.is_written}

    def on_start(self, trainer: Trainer) -> None:
        if trainer.step == 0 and 0 in self.extra_steps:
            self._save(trainer)
        self.saved_step = trainer.step

    def after_step(self, trainer: Trainer, report: StepReport) -> None:
        if not report.raised["writing"]:
            self._complete(trainer)
        if self._is_due(report.step) and not is_bad_step(trainer, report):
            self._save(trainer)

    def on_failure(self, trainer: Trainer, error: BaseException) -> None:
        """One process completes a pending checkpoint; several cannot synchronise any more."""
        if dist.get_world_size() == 1 and isinstance(error, Exception):
            self._complete(trainer)
        elif self.pending is not None:
            self.pending.abandon()

    def on_end(self, trainer: Trainer) -> None:
        self._complete(trainer)
        if trainer.exit_code == EXIT_DIVERGED:
            newest = self.store.newest()
            good = self.store.path(newest) if newest is not None else "none was saved"
            trainer.say(f"The last good checkpoint: {good}")
        elif trainer.step > self.saved_step:
            self._save(trainer)
            self._complete(trainer)

    def _is_due(self, step: int) -> bool:
        interval = self.options.checkpoint_factor
        if step in self.extra_steps:
            return True
        if not interval:
            return False
        if self.options.checkpoint_scale == "linear":
            return step % interval == 0
        power = 1.0
        while int(power) < step:  # GPT-NeoX's: 1 and the powers, cut to whole steps
            power *= interval
        return int(power) == step

    def _save(self, trainer: Trainer) -> None:
        if trainer.step == self.saved_step:
            return
        self._complete(trainer)
        progress = {
            "iteration": trainer.step,
            "consumed_samples": self.start.samples_at(trainer.step, self.samples_per_step),
        }
        background = self.options.async_save
        self.saved_step = trainer.step
        self.pending = save_run(
            trainer.engine,
            self.store,
            trainer.args,
            trainer.step,
            progress,
            background=background,
            data=self.data,
        )
        if not background:
            self._complete(trainer)

    def _complete(self, trainer: Trainer) -> None:
        """Wait for the checkpoint being written, and make it visible."""
        pending, self.pending = self.pending, None
        if pending is not None:
            trainer.say(f"saved {pending.complete()}")


# Validation every `eval_interval` steps, and both splits at the end.


class Validate(Hook):
    """Mean loss and perplexity of `eval_iters` batches."""

    def __init__(self, interval: int, iterations: int, sinks: Sinks) -> None:
        self.interval, self.iterations, self.sinks = interval, iterations, sinks
        self.validated_step = -1

    def after_step(self, trainer: Trainer, report: StepReport) -> None:
        if report.step % self.interval == 0:
            self._measure(trainer, "valid", trainer.valid_batches)
            self.validated_step = report.step

    def on_end(self, trainer: Trainer) -> None:
        """Validation, unless it ran at this step, and test."""
        if trainer.stop_reason is not None:
            return
        if self.validated_step != trainer.step:
            self._measure(trainer, "valid", trainer.valid_batches)
        self._measure(trainer, "test", trainer.test_batches)

    def _measure(self, trainer: Trainer, name: str, batches: Stream) -> None:
        """Evaluate one split; rank 0 prints and records it."""
        if batches is None or self.iterations == 0:
            return
        loss = float(trainer.engine.evaluate(batches, self.iterations))
        perplexity = math.exp(min(loss, 100.0))
        trainer.say(f"step {trainer.step}: {name} loss {loss:.4f}, perplexity {perplexity:.4f}")
        self.sinks.write(trainer.step, {f"{name}_loss": loss, f"{name}_ppl": perplexity})
