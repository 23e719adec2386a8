"""Running DeepSpeed's runner or a single script, with signals passed on and exit codes kept."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from types import FrameType

FORWARDED = (signal.SIGINT, signal.SIGTERM)


def run_script(arguments: Sequence[str]) -> int:
    """Become the script: signals and the exit code are its own."""
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, [sys.executable, "-u", *arguments])  # noqa: S606


def run_runner(arguments: Sequence[str]) -> int:
    """DeepSpeed's runner in this process; its child gets our signals and we wait for it."""
    from deepspeed.launcher import runner

    def forward(number: int, frame: FrameType | None) -> None:
        _signal_children(number)

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


def _signal_children(number: int) -> None:
    import psutil

    for child in psutil.Process().children():
        try:
            child.send_signal(number)
        except psutil.NoSuchProcess:
            continue
