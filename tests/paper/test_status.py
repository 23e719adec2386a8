"""What `status` says of runs, from their files."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.paper.run_files import State, prepare_run
from megatron.paper.status import duration, progress_of, status_text
from megatron.paper.suite import load_suite
from tests.conftest import REPOSITORY
from tests.paper.synthetic import write_run


def test_status_tells_a_dead_process_from_a_running_one(tmp_path: Path) -> None:
    suite = load_suite("smoke", ["alibi", "*.1235"], runs_root=tmp_path)
    directory = suite.runs[0].directory
    prepare_run(suite.runs[0])
    assert "1 runs: 1 pending" in status_text(suite)
    (directory / "metrics.jsonl").write_text(
        '{"step": 5, "loss": 4.25, "step_seconds": 2.0}\n{"step": 6, "lo', encoding="utf-8"
    )
    state = {
        "state": "running",
        "step": "train",
        "process": os.getpid(),
        "host": socket.gethostname(),
    }
    (directory / "state.json").write_text(json.dumps(state))
    line = progress_of(suite.runs[0])
    assert (line.state, line.step, line.loss, line.seconds_left) == ("running", 5, 4.25, 30.0)
    assert "0:30" in status_text(suite)
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    (directory / "state.json").write_text(json.dumps({**state, "process": child.pid}))
    assert progress_of(suite.runs[0]).state == State.INTERRUPTED


def test_status_is_quick_and_prints_nothing_else(tmp_path: Path) -> None:
    """Tasks say what a run must have, and import torch; none of DeepSpeed's own lines."""
    suite = load_suite("smoke", ["alibi", "*.1235"], runs_root=tmp_path)
    (path,) = (write_run(suite.runs[0]) / "results").glob("*_extrapolation.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | {"checkpoint_id": "of its weights"}))
    code = (
        "import sys; from megatron.commands import run; "
        "run('reproduce', ['status', '--suite', 'smoke', '--only', 'alibi', '--runs', sys.argv[1]])"
        "; print({'deepspeed', 'matplotlib'} & set(sys.modules))"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    shown = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True)
    first, *_, last = shown.stdout.splitlines()
    assert first.startswith("run ")
    assert last == "set()"


@pytest.mark.parametrize(
    ("seconds", "text"), [(5, "0:05"), (65, "1:05"), (3665, "1:01:05"), (200000, "2.3 d")]
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text
