"""A loss that leaves for good is told from the first steps on."""

from __future__ import annotations

import math
from typing import Any

import pytest

from megatron.training.control_hooks import EXIT_DIVERGED, WatchDivergence
from megatron.training.trainer import StepReport, Trainer


class Listener:
    """What the hook needs of a trainer, and what it said."""

    is_main = True
    say = Trainer.say

    def __init__(self) -> None:
        self.lines: list[tuple[int, dict[str, object]]] = []
        self.stopped: tuple[str, int] | None = None

    def ask_to_stop(self, reason: str, exit_code: int = 0) -> None:
        self.stopped = (reason, exit_code)

    def write(self, step: int, values: dict[str, object]) -> None:
        self.lines.append((step, values))


def watch(losses: list[float], *, ends: bool = False) -> Listener:
    listener: Any = Listener()
    hook = WatchDivergence(64, listener, ends=ends)
    for step, loss in enumerate(losses, start=1):
        report = StepReport(step, loss, 1e3, 1.0, 0.1, 64, skipped=False)
        hook.after_step(listener, report)
    found: Listener = listener
    return found


UNIFORM = math.log(64)
GROWING = [UNIFORM, *(UNIFORM * 4**n for n in range(1, 20))]


def test_a_rate_far_too_high_is_told_within_some_steps(
    capsys: pytest.CaptureFixture[str],
) -> None:
    listener = watch(GROWING)
    assert [step for step, _ in listener.lines] == [4]
    assert listener.stopped is None
    assert "the training diverges: loss" in capsys.readouterr().out


def test_it_ends_with_the_documented_code_when_asked() -> None:
    listener = watch(GROWING, ends=True)
    assert listener.stopped is not None
    assert listener.stopped[1] == EXIT_DIVERGED


@pytest.mark.parametrize(
    "losses",
    [
        [UNIFORM * (1 + 0.1 * (n % 3)) for n in range(50)],  # noise about the start
        [UNIFORM * 0.99**n for n in range(50)],
        [3.0] * 30 + [20.0] + [3.0] * 30,  # a spike
        [40 * 0.8**n for n in range(30)],  # a bad start that mends itself
        [math.nan] * 20,  # counted elsewhere
    ],
)
def test_nothing_is_said_of_what_is_no_divergence(losses: list[float]) -> None:
    listener = watch(losses, ends=True)
    assert listener.lines == []
    assert listener.stopped is None
