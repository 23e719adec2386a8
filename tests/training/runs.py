"""Real runs of train.py, started, watched, signalled and killed from outside."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from tests.processes import start_ranks
from tests.training.cases import ADAM, DROPOUT, tiny_config


def run_config(data: str, save: Path, **changes: Any) -> dict[str, Any]:
    """A run that saves and logs often, with everything on that could break an exact resume."""
    config: dict[str, Any] = {
        "optimizer": ADAM,
        "train_batch_size": 4,
        "train_micro_batch_size_per_gpu": 2,
        "train_iters": 12,
        "save": str(save),
        "load": "auto",
        "checkpoint_factor": 2,
        "keep_last_n_checkpoints": 2,
        "log_interval": 1,
        "steps_per_print": 1,
        "eval_interval": 6,
        "eval_iters": 1,
        **DROPOUT,
    }
    return tiny_config(data, **{**config, **changes})


def start_run(
    config: dict[str, Any], directory: Path, processes: int = 1, *, program: Sequence[str] = ()
) -> list[subprocess.Popen[str]]:
    """`python train.py config.yml` on every rank, or another `program` that trains."""
    directory.mkdir(parents=True, exist_ok=True)
    file = directory / "config.yml"
    file.write_text(yaml.safe_dump(config))
    return start_ranks([*(program or ["train.py"]), str(file)], processes)


def finish(job: list[subprocess.Popen[str]], timeout: float = 120) -> tuple[list[int], list[str]]:
    """Wait for all ranks; exit codes and outputs."""
    outputs = []
    try:
        for process in job:
            outputs.append(process.communicate(timeout=timeout)[0])
    finally:
        for process in job:
            process.kill()
    return [process.returncode for process in job], outputs


def run(
    config: dict[str, Any], directory: Path, processes: int = 1, *, timeout: float = 120
) -> str:
    """A run that must succeed; rank 0's output."""
    codes, outputs = finish(start_run(config, directory, processes), timeout)
    assert codes == [0] * processes, "\n".join(outputs)
    return outputs[0]


def wait_for(path: Path, job: list[subprocess.Popen[str]], timeout: float = 90) -> None:
    """Until `path` exists; a job that ends meanwhile fails the test."""
    deadline = time.monotonic() + timeout
    while not path.exists():
        for process in job:
            assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline, f"{path} did not appear"
        time.sleep(0.02)


def losses(save: Path) -> dict[int, float]:
    """Training loss by step; a step that is there twice fails the test."""
    found: dict[int, float] = {}
    for line in (save / "metrics.jsonl").read_text().splitlines(keepends=True):
        if not line.endswith("\n"):
            continue  # being written, or cut by a kill; a resumed run drops it
        values = json.loads(line)
        if "loss" in values:
            assert values["step"] not in found, f"step {values['step']} twice"
            found[values["step"]] = values["loss"]
    return found


def final_valid_loss(save: Path) -> float:
    lines = [json.loads(line) for line in (save / "metrics.jsonl").read_text().splitlines()]
    return float([line["valid_loss"] for line in lines if "valid_loss" in line][-1])
