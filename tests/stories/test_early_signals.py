"""Each documented exit code holds from the first moment of the script."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from tests.processes import REPOSITORY, rank_environment
from tests.training.cases import write_data
from tests.training.runs import run_config


@pytest.mark.parametrize(
    ("number", "code", "delay"),
    [
        (signal.SIGTERM, 75, 0.4),
        (signal.SIGTERM, 75, 1.5),
        (signal.SIGUSR1, 75, 0.8),
        (signal.SIGINT, 130, 0.6),
    ],
)
def test_a_signal_during_start_up(
    tmp_path: Path, number: signal.Signals, code: int, delay: float
) -> None:
    config = tmp_path / "config.yml"
    config.write_text(yaml.safe_dump(run_config(write_data(tmp_path), tmp_path / "run")))
    # An interpreter of its own needs some hundredths of a second before our first line.
    process = subprocess.Popen(
        [sys.executable, "train.py", str(config)],
        cwd=REPOSITORY,
        env=rank_environment(0, 1, 29599),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    time.sleep(delay)
    for _ in range(50):  # more than one is no way around the handler
        if process.poll() is None:
            os.kill(process.pid, number)
    output = process.communicate(timeout=60)[0]
    assert process.returncode == code, output
    assert "Traceback" not in output
