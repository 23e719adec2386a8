"""When checkpoints are due."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.checkpoints.resuming import Resumed
from megatron.checkpoints.store import CheckpointStore
from megatron.neox_arguments.run_keys import CheckpointArgs
from megatron.training.control_hooks import SaveCheckpoints
from tests.training.cases import write_data
from tests.training.runs import run, run_config


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
