"""When checkpoints are due, and when a run is given up."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from megatron.checkpoints.resuming import Resumed
from megatron.checkpoints.store import CheckpointStore
from megatron.errors import NonFiniteError
from megatron.neox_arguments.run_keys import CheckpointArgs
from megatron.training.control_hooks import (
    EXIT_DIVERGED,
    SaveCheckpoints,
    WatchDivergence,
    raise_at_first_nonfinite_layer,
)
from megatron.training.trainer import StepReport, Trainer
from tests.training.cases import write_data
from tests.training.runs import finish, run, run_config, start_run


@pytest.mark.parametrize(
    ("interval", "scale", "due"),
    [
        (20, "linear", [20, 40, 60, 80, 100]),
        (2, "log", [1, 2, 4, 8, 16, 32, 64]),
        (3, "log", [1, 3, 9, 27, 81]),
        (1.5, "log", [1, 2, 3, 5, 7, 11, 17, 25, 38, 57, 86]),
        (None, "log", []),
    ],
)
def test_the_steps_of_gpt_neox(
    tmp_path: Path, interval: float | None, scale: str, due: list[int]
) -> None:
    options = CheckpointArgs(checkpoint_factor=interval, checkpoint_scale=scale)
    saves = SaveCheckpoints(CheckpointStore(tmp_path), options, Resumed(0, 0), 1)
    assert [step for step in range(1, 101) if saves._is_due(step)] == due


def test_step_0_is_saved_on_request_and_resumed_from(tmp_path: Path) -> None:
    save = tmp_path / "run"
    config = run_config(
        write_data(tmp_path), save, extra_save_iters=[0, 1], checkpoint_factor=None,
        keep_last_n_checkpoints=None, train_iters=2,
    )  # fmt: skip
    run(config, tmp_path)
    assert CheckpointStore(save).steps() == [0, 1, 2]
    again = {**config, "iteration": 0, "load": str(save), "save": str(tmp_path / "again")}
    run(again, tmp_path)
    lines = [(d / "metrics.jsonl").read_text().splitlines() for d in (save, tmp_path / "again")]
    assert len(lines[0]) == len(lines[1])


# A loss that leaves for good is told from the first steps on.


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


# Numbers that are not finite.


def test_a_diverged_run_stops_and_names_the_last_good_checkpoint(tmp_path: Path) -> None:
    config = run_config(
        write_data(tmp_path),
        tmp_path / "run",
        optimizer={"type": "SGD", "params": {"lr": 1e30, "betas": [0.0, 0.9]}},
        checkpoint_factor=1,
        max_consecutive_nonfinite=3,
        gradient_clipping=0.0,
        train_iters=20,
    )
    codes, outputs = finish(start_run(config, tmp_path))
    assert codes == [EXIT_DIVERGED] == [76]
    assert "the step was skipped (3 in a row)" in outputs[0]
    assert f"The last good checkpoint: {tmp_path / 'run' / 'global_step1'}" in outputs[0]
    assert [p.name for p in (tmp_path / "run").glob("global_step*")] == ["global_step1"]
    codes, outputs = finish(start_run({**config, "detect_anomaly": True}, tmp_path))
    assert codes == [EXIT_DIVERGED], outputs[0]
    assert "detect_anomaly: the output (" in outputs[0] and "is not finite" in outputs[0]
    assert "Traceback" not in outputs[0]


class _Root(nn.Module):
    """sqrt at 0: a finite output with an infinite gradient."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.abs().sqrt()


def test_the_first_bad_layer_is_named() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Sequential(nn.Linear(3, 3), nn.GELU()))
    raise_at_first_nonfinite_layer(model)
    model(torch.ones(2, 3)).sum().backward()
    with torch.no_grad():
        model[1][0].weight[0, 0] = float("inf")  # type: ignore[index]
    with pytest.raises(NonFiniteError, match=r"output \(Linear\) of 1\.0 is not finite"):
        model(torch.ones(2, 3))


def test_the_first_bad_gradient_is_named() -> None:
    model = nn.Sequential(nn.Linear(3, 3), _Root(), nn.Identity())
    nn.init.zeros_(model[0].weight)  # type: ignore[arg-type]
    nn.init.zeros_(model[0].bias)  # type: ignore[arg-type]
    raise_at_first_nonfinite_layer(model)
    with pytest.raises(NonFiniteError, match=r"gradient \(Linear\) of 0 is not finite"):
        model(torch.ones(2, 3)).sum().backward()
