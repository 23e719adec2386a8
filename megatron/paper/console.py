"""What the terminal shows: live lines that redraw in place, and the paper-like table at the end."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Sequence
from typing import TextIO

from megatron.paper.render import to_text
from megatron.paper.tables import Table

__all__ = ["LiveLines", "print_tables"]

_PLAIN_INTERVAL = 30.0
_TERMINAL_INTERVAL = 0.5


class LiveLines:
    """Lasting messages above, changing lines below; plain lines now and then without a terminal."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._terminal = out.isatty()
        self._shown = 0
        self._last = 0.0
        self._lock = threading.RLock()

    def say(self, text: str) -> None:
        with self._lock:
            self.clear()
            self._out.write(text + "\n")
            self._out.flush()

    def show(self, lines: Sequence[str]) -> None:
        """Replace the changing lines, not more often than anyone can read."""
        with self._lock:
            now = time.monotonic()
            interval = _TERMINAL_INTERVAL if self._terminal else _PLAIN_INTERVAL
            if now - self._last < interval:
                return
            first = self._last == 0.0
            self._last = now
            if not self._terminal:
                if not first:
                    self._out.write("\n".join(lines) + "\n")
                    self._out.flush()
                return
            self.clear()
            width = shutil.get_terminal_size().columns - 1
            self._out.write("".join(line[:width] + "\n" for line in lines))
            self._out.flush()
            self._shown = len(lines)

    def clear(self) -> None:
        with self._lock:
            if self._terminal and self._shown:
                self._out.write(f"\033[{self._shown}A\033[J")
                self._out.flush()
            self._shown = 0


def print_tables(tables: Sequence[Table], out: TextIO) -> None:
    """The tables of a suite in the paper's layout."""
    color = out.isatty()
    for table in tables:
        out.write(f"\n{to_text(table, color=color)}")
        best = "bold" if color else "*"
        out.write(f"{best}: best in its row. †: log is significantly better. —: missing.\n")
    out.flush()
