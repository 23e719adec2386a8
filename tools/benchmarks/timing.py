"""Interleaved timing: contenders take turns, so that a busy machine slows them all alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from tabulate import tabulate


@dataclass(frozen=True)
class Timings:
    """Seconds of every round, by contender; a contender may sit out the later rounds."""

    rounds: Mapping[str, Sequence[float]]

    def median(self, name: str) -> float:
        return statistics.median(self.rounds[name])

    def best(self, name: str) -> float:
        """The fastest round: other work on the machine only ever adds to it."""
        return min(self.rounds[name])

    def ratio(self, name: str, other: str) -> float:
        """Median over rounds of the ratio within a round."""
        pairs = zip(self.rounds[name], self.rounds[other], strict=False)
        return statistics.median(mine / theirs for mine, theirs in pairs)


def interleave(
    contenders: Mapping[str, Callable[[], object]],
    repeats: int,
    *,
    slow: Mapping[str, int] | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> Timings:
    """Runs all contenders in turn: one round to warm up, then `repeats` (or slow[name]) timed.

    Every other round goes backwards, so that no contender always follows the same one. With
    `time.process_time` for a clock, the time that other processes take does not count.
    """
    rounds: dict[str, list[float]] = {name: [] for name in contenders}
    limits = {name: (slow or {}).get(name, repeats) for name in contenders}
    for number in range(repeats + 1):
        turns = list(contenders.items())
        for name, run in turns if number % 2 == 0 else reversed(turns):
            if number > limits[name] or (number == 0 and limits[name] == 1):
                continue
            start = clock()
            run()
            if number > 0:
                rounds[name].append(clock() - start)
    return Timings(rounds)


@dataclass(frozen=True)
class Target:
    """One measured number and the bound that the project sets itself."""

    name: str
    value: float
    at_most: float

    @property
    def holds(self) -> bool:
        return self.value <= self.at_most

    def __str__(self) -> str:
        verdict = "ok" if self.holds else "MISSED"
        return f"{self.name:<66}{self.value:>8.3f}  at most {self.at_most:<6g} {verdict}"


def render_table(rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; the first row is its head."""
    return tabulate(rows, headers="firstrow", tablefmt="github", disable_numparse=True)
