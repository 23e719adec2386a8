"""Who trains into a directory, where locks do not reach other hosts."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from megatron.atomic_files import OWNER, read_json, write_text
from megatron.checkpoints import run_lock
from megatron.checkpoints.run_lock import lock_directory
from megatron.errors import CheckpointError


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_lock, "REFRESH_SECONDS", 0.05)
    monkeypatch.setattr(run_lock, "WATCH_SECONDS", 1.0)
    monkeypatch.setattr(run_lock, "_held", {})


def elsewhere(directory: Path, count: int) -> None:
    about = {"host": "node-2", "process": 7, "refreshed": f"{count:09d}"}
    write_text(directory / OWNER, json.dumps(about))


def test_another_hosts_living_training_is_refused(tmp_path: Path) -> None:
    """Its lock is not seen here, as on sshfs; the file that it refreshes is."""
    ended = threading.Event()

    def refresh() -> None:
        count = 2
        while not ended.wait(0.05):
            elsewhere(tmp_path, count)
            count += 1

    elsewhere(tmp_path, 1)
    thread = threading.Thread(target=refresh)
    thread.start()
    try:
        with pytest.raises(CheckpointError, match="process 7 on node-2 is training into it"):
            lock_directory(tmp_path)
    finally:
        ended.set()
        thread.join()


def test_what_a_dead_host_left_is_taken_over(tmp_path: Path) -> None:
    elsewhere(tmp_path, 5)
    lock_directory(tmp_path)
    first = read_json(tmp_path / OWNER)
    assert first is not None and first["host"] != "node-2"
    deadline = time.monotonic() + 10
    while read_json(tmp_path / OWNER) in (first, None):  # it is written again
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_an_ended_training_leaves_no_owner(tmp_path: Path) -> None:
    program = """
import pathlib, sys
from megatron.checkpoints.run_lock import OWNER, lock_directory
lock_directory(pathlib.Path(sys.argv[1]))
print((pathlib.Path(sys.argv[1]) / OWNER).exists())
"""
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, timeout=60
    )
    assert done.stdout == "True\n", done.stderr
    assert not (tmp_path / OWNER).exists()
