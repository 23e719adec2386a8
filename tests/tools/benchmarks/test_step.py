"""The benchmark of one optimizer step, at toy size."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tools.benchmark import main


def test_step_runs_every_embedding_on_shared_weights(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    result = tmp_path / "step.json"
    threads = torch.get_num_threads()
    options = ["--layers", "1", "--hidden", "32", "--heads", "2", "--vocabulary", "128"]
    options += ["--length", "32", "--repeats", "2", "--threads", str(threads)]
    main(["step", *options, "--json", str(result)])
    content = json.loads(result.read_text())
    assert set(content["seconds"]) == {"kerple_log", "kerple_power", "alibi", "rpe", "none"}
    assert all(len(rounds) == 2 for rounds in content["seconds"].values())
    assert content["spread"] >= 1.0
    assert "GPU: not measured" in capsys.readouterr().out


def test_both_ways_to_free_memory_train_the_same_losses(tmp_path: Path) -> None:
    result = tmp_path / "kept.json"
    options = ["--layers", "1", "--hidden", "32", "--heads", "2", "--vocabulary", "128"]
    options += ["--length", "32", "--repeats", "1", "--threads", "1", "--kept-memory"]
    main(["step", *options, "--json", str(result)])
    given_back, kept = json.loads(result.read_text()).values()
    assert [run["loss"] for run in given_back] == [run["loss"] for run in kept]
