"""Signals save and leave with a code that the batch system requeues on; dead ranks are named."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from megatron.launcher.environment import free_port
from megatron.training.control_hooks import EXIT_REQUEUE
from megatron.training.liveness import EXIT_PEER_LOST
from tests.processes import REPOSITORY
from tests.training.cases import layout, write_data
from tests.training.runs import finish, losses, run_config, start_run, wait_for

FOREVER = 100_000


def _config(tmp_path: Path, **changes: Any) -> dict[str, Any]:
    data = write_data(tmp_path)
    changes = {"train_iters": FOREVER, "checkpoint_factor": FOREVER, **changes}
    return run_config(data, tmp_path / "run", eval_interval=FOREVER, **changes)


def _check_saved(save: Path, name: str) -> None:
    """The last step that was taken is the one that was saved."""
    step = max(losses(save))
    assert (save / "latest").read_text() == f"global_step{step}"
    last = json.loads((save / "manifest.json").read_text())["history"][-1]
    assert last["reason"] == f"received {name}" and last["at_step"] == step


@pytest.mark.parametrize(
    ("number", "code"),
    [
        (signal.SIGTERM, EXIT_REQUEUE),
        pytest.param(signal.SIGUSR1, EXIT_REQUEUE, marks=pytest.mark.slow),
        pytest.param(signal.SIGINT, 130, marks=pytest.mark.slow),
    ],
)
def test_a_signal_finishes_the_step_saves_and_leaves(
    tmp_path: Path, number: signal.Signals, code: int
) -> None:
    job = start_run(_config(tmp_path), tmp_path)
    wait_for(tmp_path / "run" / "metrics.jsonl", job)
    time.sleep(0.5)
    job[0].send_signal(number)
    codes, outputs = finish(job)
    assert codes == [code], outputs[0]
    assert f"received {number.name}" in outputs[0]
    _check_saved(tmp_path / "run", number.name)


def test_a_signal_before_the_first_step_asks_for_another_try() -> None:
    program = (
        "import os, signal\n"
        "from megatron.terminal import exit_on_signal\n"
        "exit_on_signal()\n"
        "os.kill(os.getpid(), signal.SIGUSR1)\n"
        "signal.pause()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=REPOSITORY, capture_output=True, text=True
    )
    assert done.returncode == EXIT_REQUEUE, done.stderr
    assert "received SIGUSR1 before the first step" in done.stderr


def test_a_signal_to_one_rank_stops_all_after_the_same_step(tmp_path: Path) -> None:
    job = start_run(_config(tmp_path, **layout(pp=2)), tmp_path, processes=2)
    wait_for(tmp_path / "run" / "metrics.jsonl", job)
    time.sleep(0.5)
    job[1].send_signal(signal.SIGUSR1)
    codes, outputs = finish(job)
    assert codes == [EXIT_REQUEUE] * 2, "\n".join(outputs)
    _check_saved(tmp_path / "run", "SIGUSR1")


def test_deepy_passes_the_signal_on_and_the_code_back(tmp_path: Path) -> None:
    """Through DeepSpeed's launcher, which by itself would kill the ranks and end with 1."""
    import yaml

    file = tmp_path / "config.yml"
    config = {**_config(tmp_path), "num_gpus": 2, "master_port": free_port()}
    file.write_text(yaml.safe_dump(config))
    environment = {k: v for k, v in os.environ.items() if not k.startswith("SLURM_")}
    job = subprocess.Popen(
        [sys.executable, "deepy.py", "train.py", str(file)],
        cwd=REPOSITORY,
        env={**environment, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    children = [psutil.Process(job.pid)]
    try:
        wait_for(tmp_path / "run" / "metrics.jsonl", [job])
        while not losses(tmp_path / "run"):  # a busy machine takes its time for the first step
            assert job.poll() is None
            time.sleep(0.05)
        children = psutil.Process(job.pid).children(recursive=True)
        job.send_signal(signal.SIGTERM)
        codes, outputs = finish([job])
    finally:
        for child in children:
            with suppress(psutil.NoSuchProcess):
                child.kill()
    assert codes == [EXIT_REQUEUE], outputs[0]
    _check_saved(tmp_path / "run", "SIGTERM")


@pytest.mark.parametrize("dead", [1, pytest.param(0, marks=pytest.mark.slow)])
def test_a_dead_rank_is_named_and_ends_the_job(tmp_path: Path, dead: int) -> None:
    job = start_run(_config(tmp_path), tmp_path, processes=2)
    wait_for(tmp_path / "run" / "metrics.jsonl", job)
    time.sleep(0.5)
    job[dead].send_signal(signal.SIGKILL)
    start = time.monotonic()
    survivor = job[1 - dead]
    output = survivor.communicate(timeout=60)[0]
    assert time.monotonic() - start < 40
    assert survivor.returncode == EXIT_PEER_LOST, output
    assert f"error (rank {1 - dead}): rank {dead}" in output
    finish(job)
