"""The training loop and its step; everything else is a hook."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor
from tqdm import tqdm

from megatron.backends.interface import MicroBatch, TrainingEngine
from megatron.mpu.collectives import ParallelState
from megatron.neox_arguments import NeoXArgs

Stream = Iterator[MicroBatch] | None  # endless; None where there is no such data


@dataclass
class StepReport:
    """Loss, learning rate, gradient norm, time and flags of one step."""

    step: int
    loss: float
    lr: float
    grad_norm: float | None
    seconds: float
    tokens: int
    skipped: bool
    loss_scale: float | None = None  # fp16 with dynamic scaling
    raised: dict[str, int] = field(default_factory=dict)
    """Flag name -> the number of ranks on which a hook set it."""

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds if self.seconds > 0 else 0.0


class Hook:
    """Callbacks around the steps. Called on every rank, in order."""

    def on_start(self, trainer: Trainer) -> None:
        """Before the first step."""

    def flags(self) -> dict[str, bool]:
        """Flags summed over ranks after each step; always the same names."""
        return {}

    def after_step(self, trainer: Trainer, report: StepReport) -> None:
        """After each optimizer step."""

    def on_end(self, trainer: Trainer) -> None:
        """After the last step, or when something asked to stop."""

    def on_failure(self, trainer: Trainer, error: BaseException) -> None:
        """When training raised; the error is raised again afterwards."""


@dataclass
class Trainer:
    """State of a run that hooks may read: the engine, the step count, and why it should stop."""

    args: NeoXArgs
    engine: TrainingEngine
    parallel: ParallelState
    is_main: bool
    train_batches: Stream
    valid_batches: Stream
    test_batches: Stream
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
        """Call `on_failure`; errors in it are printed, so that the first one is raised."""
        for hook in self.hooks:
            try:
                hook.on_failure(self, error)
            except Exception as second:
                print(f"warning: {type(hook).__name__}: {second}", file=sys.stderr, flush=True)

    def say(self, text: str) -> None:
        """A line of output, from rank 0, above the progress bar."""
        if self.is_main:
            tqdm.write(text)
            sys.stdout.flush()

    def ask_to_stop(self, reason: str, exit_code: int = 0) -> None:
        """End the run after this step, once every hook has seen it."""
        self.stop_reason, self.exit_code = reason, exit_code

    def _take_step(self) -> StepReport:
        assert self.train_batches is not None
        rate = float(self.engine.scheduler.get_lr()[0])
        start = time.perf_counter()
        own = self.engine.train_step(self.train_batches)
        flags = {name: up for hook in self.hooks for name, up in hook.flags().items()}
        loss, raised = agree(own, self.parallel, flags)
        self.step += 1
        return StepReport(
            step=self.step,
            loss=loss,
            lr=rate,
            grad_norm=self.engine.grad_norm,
            seconds=time.perf_counter() - start,
            tokens=self.tokens_per_step,
            skipped=self.engine.step_skipped,
            loss_scale=self.engine.loss_scale,
            raised=raised,
        )


def agree(
    loss: Tensor, parallel: ParallelState, flags: Mapping[str, bool]
) -> tuple[float, dict[str, int]]:
    """The mean of the replicas' losses, and on how many ranks each flag is set.

    One all-reduce over all ranks and one copy to the host; of the tensor-parallel ranks, which hold
    the same loss, the first counts.
    """
    own = loss if parallel.tp.rank == 0 else torch.zeros_like(loss)
    said = torch.cat([own[None], torch.tensor([float(up) for up in flags.values()]).to(loss)])
    if dist.get_world_size() > 1:
        dist.all_reduce(said)
    said[0] /= parallel.dp_size
    mean, *numbers = said.tolist()
    return mean, dict(zip(flags, map(int, numbers), strict=True))
