"""Running DeepSpeed's runner or a single script, with signals passed on and exit codes kept."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from types import FrameType

FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


def run_script(arguments: Sequence[str]) -> int:
    """Become the script: signals and the exit code are its own."""
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, [sys.executable, "-u", *arguments])  # noqa: S606


def run_runner(arguments: Sequence[str]) -> int:
    """DeepSpeed's runner in this process; the ranks get our signals and we wait for them."""
    from deepspeed.launcher import runner

    def forward(number: int, frame: FrameType | None) -> None:
        _signal_ranks(number)

    for number in FORWARDED:
        signal.signal(number, forward)
    try:
        runner.main(list(arguments))
    except SystemExit as ending:
        code = ending.code if isinstance(ending.code, int) else 1
        if code:
            print(f"error: a process of the job ended with status {code}.", file=sys.stderr)
        return code
    except (ValueError, RuntimeError, OSError, subprocess.CalledProcessError) as error:
        print(f"error: DeepSpeed's runner: {error}", file=sys.stderr)
        return 1
    return 0


def _signal_ranks(number: int) -> None:
    """Pass a signal to the processes of the job.

    Not to DeepSpeed's launcher between us and them: on SIGTERM it gives each rank 30 seconds and
    then kills it, and its exit code hides theirs. It ends by itself when they have ended.
    """
    import psutil

    for child in psutil.Process().children():
        try:
            for process in child.children() or [child]:
                process.send_signal(number)
        except psutil.NoSuchProcess:
            continue
