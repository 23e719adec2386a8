"""Signals before there is anything to save: the first act of train.py, before heavy imports.

Imported alone and first, this needs nothing but the standard library: from then on SIGTERM and
SIGUSR1 end the process with the code that asks to be started again, and Ctrl-C with its own.
"""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType

__all__ = ["EXIT_INTERRUPTED", "EXIT_REQUEUE", "leave_until_started"]

# sysexits.h's "temporary failure; try again": the sbatch templates requeue on it.
EXIT_REQUEUE = 75
EXIT_INTERRUPTED = 130


def leave_until_started() -> None:
    """A signal ends the process at once; training takes over when it has its own handlers."""

    def leave(number: int, frame: FrameType | None) -> None:
        code = EXIT_INTERRUPTED if number == signal.SIGINT else EXIT_REQUEUE
        # Not print: the signal may have come in the middle of one.
        name = signal.Signals(number).name
        stopped = f"received {name} before the first step"
        text = f"{'interrupted' if code == EXIT_INTERRUPTED else stopped}\n"
        os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, text.encode())
        os._exit(code)

    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
        signal.signal(number, leave)
