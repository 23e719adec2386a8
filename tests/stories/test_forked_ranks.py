"""A forked rank is as `python SCRIPT`: arguments, environment, output, exit code, signals."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import pytest

from tests.processes import rank_environment, start_ranks

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="ranks are forked on Linux only")
SCRIPT = """
import os, sys, time
print(__name__, sys.argv[1:], os.environ["RANK"], os.getpid(), flush=True)
if sys.argv[1] == "exit": sys.exit(3)
if sys.argv[1] == "message": sys.exit("a message")
if sys.argv[1] == "raise": raise KeyError("nothing")
if sys.argv[1] == "sleep": time.sleep(60)
"""


def start(tmp_path: Path, word: str, world_size: int = 1) -> list:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    return start_ranks([str(script), word], world_size)


@pytest.mark.parametrize(
    ("word", "code", "last"),
    [
        ("end", 0, "__main__ ['end'] 0 "),
        ("exit", 3, "__main__ ['exit'] 0 "),
        ("message", 1, "a message"),
        ("raise", 1, "KeyError: 'nothing'"),
    ],
)
def test_output_and_exit_code(tmp_path: Path, word: str, code: int, last: str) -> None:
    (rank,) = start(tmp_path, word)
    output = rank.communicate(timeout=60)[0]
    assert rank.returncode == rank.poll() == rank.wait() == code
    assert output.splitlines()[-1].startswith(last)
    assert f" {rank.pid}" in output.splitlines()[0]


def test_ranks_have_their_own_environment(tmp_path: Path) -> None:
    first, second = start(tmp_path, "end", 2)
    assert [rank.communicate()[0].split()[2] for rank in (first, second)] == ["0", "1"]
    assert rank_environment(1, 2, 5)["RANK"] == "1" and "RANK" not in os.environ


def test_a_signal_ends_it(tmp_path: Path) -> None:
    (rank,) = start(tmp_path, "sleep")
    assert rank.stdout.readline().startswith("__main__")
    assert rank.poll() is None
    begun = time.monotonic()
    rank.send_signal(signal.SIGTERM)
    assert rank.wait(timeout=30) == -signal.SIGTERM
    assert time.monotonic() - begun < 30
    rank.kill()  # of a process that has ended: no error
