"""The loop: what its hooks are told, and when. Its steps: tests/stories/test_layouts.py."""

from __future__ import annotations

from typing import Any

import pytest

from megatron.training.trainer import Hook, StepReport, Trainer


class Listener(Hook):
    """Writes down what it is told."""

    def __init__(self, name: str, heard: list[str]) -> None:
        self.name, self.heard = name, heard

    def on_start(self, trainer: Trainer) -> None:
        self.heard.append(f"{self.name} starts")

    def after_step(self, trainer: Trainer, report: StepReport) -> None:
        self.heard.append(f"{self.name} {report.step}")

    def on_end(self, trainer: Trainer) -> None:
        self.heard.append(f"{self.name} ends")

    def on_failure(self, trainer: Trainer, error: BaseException) -> None:
        self.heard.append(f"{self.name} fails: {error}")


class StopAtTwo(Hook):
    def after_step(self, trainer: Trainer, report: StepReport) -> None:
        if report.step == 2:
            trainer.ask_to_stop("enough", exit_code=7)


class Broken(Hook):
    def after_step(self, trainer: Trainer, report: StepReport) -> None:
        raise OSError("the first error")

    def on_failure(self, trainer: Trainer, error: BaseException) -> None:
        raise RuntimeError("the second")


@pytest.fixture
def trainer(monkeypatch: pytest.MonkeyPatch) -> Trainer:
    """Three steps that train nothing."""

    def take_step(self: Trainer) -> StepReport:
        self.step += 1
        return StepReport(self.step, 1.0, 0.1, 1.0, 0.5, 64, skipped=False)

    monkeypatch.setattr(Trainer, "_take_step", take_step)
    nothing: Any = None
    return Trainer(
        args=nothing,
        engine=nothing,
        parallel=nothing,
        is_main=True,
        train_batches=None,
        valid_batches=None,
        test_batches=None,
        tokens_per_step=64,
        train_iters=3,
    )


def test_hooks_hear_of_every_step_in_their_order(trainer: Trainer) -> None:
    heard: list[str] = []
    trainer.hooks = [Listener("a", heard), Listener("b", heard)]
    assert trainer.run() == 0
    steps = [f"{name} {step}" for step in (1, 2, 3) for name in "ab"]
    assert heard == ["a starts", "b starts", *steps, "a ends", "b ends"]


def test_every_hook_sees_the_step_after_which_one_asked_to_stop(trainer: Trainer) -> None:
    heard: list[str] = []
    trainer.hooks = [StopAtTwo(), Listener("a", heard)]
    assert trainer.run() == 7
    assert heard == ["a starts", "a 1", "a 2", "a ends"]
    assert trainer.stop_reason == "enough"


def test_the_error_that_ends_a_run_is_the_one_that_is_raised(
    trainer: Trainer, capsys: pytest.CaptureFixture[str]
) -> None:
    heard: list[str] = []
    trainer.hooks = [Broken(), Listener("a", heard)]
    with pytest.raises(OSError, match="the first error"):
        trainer.run()
    assert heard == ["a starts", "a fails: the first error"]
    assert capsys.readouterr().err == "warning: Broken: the second\n"
