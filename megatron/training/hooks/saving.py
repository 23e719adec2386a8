"""When to write a checkpoint."""

from __future__ import annotations

from megatron.training.checkpoint_store import CheckpointStore
from megatron.training.checkpointing import save_checkpoint
from megatron.training.hooks.stopping import EXIT_DIVERGED, is_bad_step
from megatron.training.trainer import Hook, StepReport, Trainer


class SaveCheckpoints(Hook):
    """Every `interval` steps (or at powers of it), at extra steps, and when the run ends."""

    def __init__(
        self,
        store: CheckpointStore,
        *,
        interval: int | None,
        scale: str,
        extra_steps: frozenset[int],
        samples_per_step: int,
    ) -> None:
        self.store = store
        self.interval, self.scale, self.extra_steps = interval, scale, extra_steps
        self.samples_per_step = samples_per_step
        self.saved_step = -1

    def on_start(self, trainer: Trainer) -> None:
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
        power = self.interval
        while power < step:
            power *= 2
        return power == step

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
