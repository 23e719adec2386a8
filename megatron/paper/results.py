"""Read what finished runs left behind: result files and metrics.

Everything is optional: a run that has not started, or that stopped half-way, contributes what it
has, and unreadable files are named in `problems` instead of being skipped silently.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron.paper.tables import Point

__all__ = [
    "Bucket",
    "Positionwise",
    "ResultSet",
    "RunKey",
    "RunResults",
    "read_metrics",
    "read_run",
]

_WARMUP_STEPS = 10
"""The first steps compile and fill caches; they are left out of the seconds per step."""


@dataclass(frozen=True)
class RunKey:
    """Which run of a suite this is."""

    model: str
    data: str
    method: str
    seed: int
    train_length: int


@dataclass(frozen=True)
class Bucket:
    start: int
    end: int
    loss: float

    @property
    def perplexity(self) -> float:
        return _exp(self.loss)


@dataclass(frozen=True)
class Positionwise:
    length: int
    window: int | None
    split: str
    buckets: tuple[Bucket, ...]


@dataclass
class RunResults:
    key: RunKey
    perplexity: dict[tuple[str, int], float] = field(default_factory=dict)
    """(split, length) -> perplexity"""
    positionwise: list[Positionwise] = field(default_factory=list)
    kernel: dict[str, list[float]] = field(default_factory=dict)
    """Last logged kernel parameters, per head."""
    losses: list[tuple[int, float]] = field(default_factory=list)
    seconds_per_step: float | None = None
    last_step: int = 0
    parameters: int | None = None
    problems: list[str] = field(default_factory=list)


def _exp(loss: float) -> float:
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf


def read_run(directory: Path, key: RunKey) -> RunResults:
    """All results of one run directory, which need not exist."""
    results = RunResults(key)
    for path in sorted((directory / "results").glob("*.json")):
        _read_result(path, results)
    _read_training(directory / "metrics.jsonl", results)
    return results


def _read_result(path: Path, results: RunResults) -> None:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        task = content["task"]
        if task == "extrapolation":
            _add_extrapolation(content["results"], results)
            results.parameters = content.get("parameters")
        elif task.startswith("positionwise"):  # also positionwise_windowed
            _add_positionwise(content["results"], results)
    except (OSError, ValueError, KeyError, TypeError) as error:
        results.problems.append(f"{path}: {type(error).__name__}: {error}")


def _add_extrapolation(content: Mapping[str, Any], results: RunResults) -> None:
    for split, entries in content.items():
        for entry in entries:
            perplexity = entry.get("ppl")
            if perplexity is None:
                perplexity = _exp(float(entry["loss"]))
            results.perplexity[split, int(entry["length"])] = float(perplexity)


def _add_positionwise(content: Mapping[str, Any], results: RunResults) -> None:
    for split, entry in content.items():
        buckets = tuple(
            Bucket(int(bucket["start"]), int(bucket["end"]), float(bucket["loss"]))
            for bucket in entry["buckets"]
        )
        window = entry.get("window")
        results.positionwise.append(
            Positionwise(int(entry["length"]), int(window) if window else None, split, buckets)
        )


def read_metrics(path: Path) -> Iterator[dict[str, Any]]:
    """The lines of metrics.jsonl; a last line cut off by a crash is left out."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError:
        return
    for line in text.splitlines():
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        if isinstance(entry, dict) and "step" in entry:
            yield entry


def _read_training(path: Path, results: RunResults) -> None:
    seconds: list[float] = []
    for entry in read_metrics(path):
        step = int(entry["step"])
        results.last_step = max(results.last_step, step)
        if entry.get("loss") is not None:
            results.losses.append((step, float(entry["loss"])))
        if entry.get("step_seconds") is not None and step > _WARMUP_STEPS:
            seconds.append(float(entry["step_seconds"]))
        if isinstance(entry.get("kernel"), dict):
            results.kernel = {
                name: [float(value) for value in values]
                for name, values in entry["kernel"].items()
                if isinstance(values, list)
            }
    results.seconds_per_step = statistics.median(seconds) if seconds else None


# All results of a suite, with the questions that tables, figures and claims ask of them.


@dataclass(frozen=True)
class ResultSet:
    runs: tuple[RunResults, ...]

    def of_models(self, models: Iterable[str]) -> ResultSet:
        wanted = set(models)
        return ResultSet(tuple(run for run in self.runs if run.key.model in wanted))

    def of(self, data: str, method: str) -> list[RunResults]:
        return [run for run in self.runs if run.key.data == data and run.key.method == method]

    def methods(self) -> list[str]:
        return list(dict.fromkeys(run.key.method for run in self.runs))

    def data(self) -> list[str]:
        return list(dict.fromkeys(run.key.data for run in self.runs))

    def perplexity(self, split: str, data: str, method: str, point: Point) -> dict[int, float]:
        """Perplexity by seed at one length."""
        return {
            run.key.seed: run.perplexity[split, point.length]
            for run in self.of(data, method)
            if run.key.train_length == point.train_length
            and (split, point.length) in run.perplexity
        }

    def table_values(self, split: str) -> Callable[[str, str, Point], Mapping[int, float]]:
        def values(data: str, method: str, point: Point) -> Mapping[int, float]:
            return self.perplexity(split, data, method, point)

        return values

    def lengths(self, split: str, data: str, method: str) -> list[int]:
        found = {
            length
            for run in self.of(data, method)
            for (run_split, length) in run.perplexity
            if run_split == split
        }
        return sorted(found)

    def train_length(self, data: str) -> int | None:
        lengths = [run.key.train_length for run in self.runs if run.key.data == data]
        return min(lengths, default=None)

    def seconds_per_step(self, data: Iterable[str], method: str) -> dict[int, float]:
        wanted = set(data)
        return {
            run.key.seed: run.seconds_per_step
            for run in self.runs
            if run.key.data in wanted
            and run.key.method == method
            and run.seconds_per_step is not None
        }

    def positionwise(
        self, data: str, method: str, length: int, window: int | None, split: str
    ) -> list[Positionwise]:
        return [
            item
            for run in self.of(data, method)
            for item in run.positionwise
            if (item.length, item.window, item.split) == (length, window, split)
        ]

    @property
    def problems(self) -> list[str]:
        return [problem for run in self.runs for problem in run.problems]

    @property
    def any_results(self) -> bool:
        return any(run.perplexity or run.positionwise or run.losses for run in self.runs)
