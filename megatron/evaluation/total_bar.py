"""One bar over everything that is evaluated, with the time that is left for all of it.

Work is counted in the multiplications of a transformer layer: a token at length L costs about
12 x hidden_size for the matrices and L for attention, so the bar moves evenly over all lengths.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from tqdm import tqdm

__all__ = ["TotalBar", "current_bar", "showing"]

BAR = "{desc} {percentage:3.0f}%|{bar}| {elapsed}<{remaining}"
SECONDS_BETWEEN_LINES = 5.0


class TotalBar:
    """A bar on a terminal; elsewhere a line now and then. `total` 0 shows nothing."""

    def __init__(self, hidden_size: int = 1, total: float = 0.0, *, show: bool = False) -> None:
        self._hidden_size = hidden_size
        self._total, self._done = total, 0.0
        self._label = ""
        self._start = self._last_line = time.monotonic()
        self._show = show and total > 0
        terminal = sys.stderr.isatty()
        self._lines = self._show and not terminal
        self._bar = tqdm(
            total=total,
            bar_format=BAR,
            disable=not (self._show and terminal),
            dynamic_ncols=True,
            leave=False,  # what stays on the screen are the tables
        )

    def cost(self, tokens: int, length: int) -> float:
        """Work of `tokens` tokens in sequences of `length`."""
        return float(tokens) * (12 * self._hidden_size + length)

    def at(self, label: str) -> None:
        """What is being measured now."""
        self._label = label
        self._bar.set_description_str(label)
        self._say()

    def advance(self, tokens: int, length: int) -> None:
        self.move_to(self._done + self.cost(tokens, length))

    def move_to(self, done: float) -> None:
        """`done` of the total; data may turn out shorter than planned, or be measured already."""
        done = min(done, self._total)
        self._bar.update(done - self._done)
        self._done = done
        self._say()

    @property
    def done(self) -> float:
        return self._done

    def _say(self) -> None:
        now = time.monotonic()
        if not self._lines or not self._done or now - self._last_line < SECONDS_BETWEEN_LINES:
            return
        self._last_line = now
        left = (now - self._start) * (self._total - self._done) / self._done
        share = self._done / self._total
        print(f"{self._label}: {share:.0%}, about {left:.0f} s left", file=sys.stderr, flush=True)

    def close(self) -> None:
        self._bar.close()


_SILENT = TotalBar()
_CURRENT: ContextVar[TotalBar] = ContextVar("total_bar", default=_SILENT)


def current_bar() -> TotalBar:
    """The bar that is showing; one that shows nothing where there is none."""
    return _CURRENT.get()


@contextmanager
def showing(bar: TotalBar) -> Iterator[TotalBar]:
    """Make `bar` the current one while the block runs."""
    token = _CURRENT.set(bar)
    try:
        yield bar
    finally:
        _CURRENT.reset(token)
        bar.close()
