"""Checkpoints that a real DeepSpeed engine wrote, read back."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import kerple
from tests.checkpoints.small_models import logits_of, tokens
from tests.conftest import REPOSITORY

CASES: dict[str, tuple[str | None, dict[str, Any]]] = {
    "plain": (None, {"pos_emb": "kerple_log"}),
    "pipeline": (None, {"pos_emb": "kerple_log", "pipe_parallel_size": 1, "no_weight_tying": True}),
    "tied_pipeline": (None, {"pos_emb": "rpe", "pipe_parallel_size": 1}),
    "zero_2": (None, {"pos_emb": "kerple_power", "zero_optimization": {"stage": 2}}),
    "zero_3": (
        None,
        {"pos_emb": "kerple_log", "no_weight_tying": True, "zero_optimization": {"stage": 3}},
    ),
    # started from the weights of an earlier case, in another layout
    "from_zero_3": (
        "zero_3",
        {"pos_emb": "kerple_log", "no_weight_tying": True, "pipe_parallel_size": 1},
    ),
    "from_pipeline": ("pipeline", {"pos_emb": "kerple_log", "no_weight_tying": True}),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("deepspeed")
    command = [sys.executable, "-m", "tests.checkpoints.deepspeed_runs", str(root)]
    done = subprocess.run(
        [*command, json.dumps(CASES)],
        cwd=REPOSITORY,
        env={**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return root


@pytest.mark.parametrize("case", CASES)
def test_what_deepspeed_saved_is_what_is_loaded(runs: Path, case: str) -> None:
    model = kerple.load_pretrained(runs / case)
    assert model.kind == "native"
    assert model.iteration == 2
    expected = torch.load(runs / case / "expected.pt", weights_only=True)
    torch.testing.assert_close(logits_of(model, tokens(30)), expected, atol=1e-5, rtol=0)
    start = CASES[case][0]
    if start is not None:
        assert torch.equal(expected, torch.load(runs / start / "expected.pt", weights_only=True))
