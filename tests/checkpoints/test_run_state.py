"""What lies beside DeepSpeed's files: random states, and the layout of who wrote them."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron.checkpoints.run_state import (
    LAYOUT,
    check_layout,
    restore_random_states,
    rng_file,
    rng_state,
    saved_batch_size,
    write_configs,
    write_layout,
)
from megatron.errors import CheckpointError
from megatron.mpu.collectives import SERIAL, ParallelState
from tests.checkpoints.small_models import small_args

pytestmark = pytest.mark.usefixtures("one_process")
ALONE = ParallelState(SERIAL, pp_rank=0, dp_rank=0, dp_size=1, grid=None)


def draw() -> tuple[float, float, float]:
    return torch.rand(()).item(), float(np.random.rand()), random.random()


def test_random_streams_go_on_where_they_were(tmp_path: Path) -> None:
    draw()
    torch.save(rng_state(), rng_file(tmp_path))
    expected = [draw() for _ in range(3)]
    draw()
    restore_random_states(tmp_path, 0, ALONE)
    assert [draw() for _ in range(3)] == expected


def test_a_rank_that_was_not_there_starts_streams_of_its_own(tmp_path: Path) -> None:
    found = []
    for seed in (7, 7, 8):
        restore_random_states(tmp_path, seed, ALONE)
        found.append(draw())
    assert found[0] == found[1] != found[2]


def test_a_file_without_random_states_is_named_with_the_way_out(tmp_path: Path) -> None:
    torch.save({"torch": 3}, rng_file(tmp_path))
    with pytest.raises(CheckpointError, match=r"rng_rank_00000\.pt.*no_load_rng: true"):
        restore_random_states(tmp_path, 0, ALONE)


def test_another_layout_is_refused_with_the_command_to_run(tmp_path: Path) -> None:
    before, now = small_args(), small_args(zero_optimization={"stage": 1})
    write_layout(tmp_path, before.parallel, before.optimization)
    check_layout(tmp_path, before.parallel, before.optimization)
    with pytest.raises(CheckpointError, match="zero_stage 0 -> 1") as caught:
        check_layout(tmp_path, now.parallel, now.optimization)
    assert "tools/reshard_checkpoint.py" in str(caught.value)


def test_the_batch_of_a_run_from_before_it_was_recorded(tmp_path: Path) -> None:
    assert saved_batch_size(tmp_path) is None
    (tmp_path / LAYOUT).write_text(json.dumps({"world_size": 8}))
    saved = {"train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": 5}
    saved |= {"pipe_parallel_size": 2, "model_parallel_size": 2}
    write_configs(tmp_path / "configs", small_args(**saved))
    assert saved_batch_size(tmp_path) == 3 * 5 * 2
