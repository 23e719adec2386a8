"""Read the results of runs: those of the suite's settings, metrics, learned kernels; over seeds.

Everything is optional: a run that has not started, or that stopped half-way, contributes what it
has; what cannot be read or used is named, not skipped silently.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron.evaluation.positionwise import PositionEntry
from megatron.evaluation.tasks import Place
from megatron.paper.cells import PairedTest, compare_paired
from megatron.paper.result_fit import ResultFiles, StepCheck
from megatron.paper.run_files import (
    finite,
    kernel_values,
    read_metrics,
    same_heads,
)
from megatron.paper.suite import Run, Step
from megatron.paper.suite_file import PERPLEXITY, POSITIONWISE, Point

_WARMUP_STEPS = 10
"""The first steps compile and fill caches; they are left out of the seconds per step."""


@dataclass
class RunResults:
    run: Run
    cells: dict[tuple[str, int | None, str], dict[Place, Any]] = field(default_factory=dict)
    """(task, window, variant) -> what was measured, by group and length"""
    kernel: dict[str, list[float]] = field(default_factory=dict)
    """Last logged kernel parameters, per head."""
    kernel_path: list[tuple[int, dict[str, list[float]]]] = field(default_factory=list)
    """All of them, with their steps."""
    losses: list[tuple[int, float]] = field(default_factory=list)
    seconds_per_step: float | None = None
    last_step: int = 0
    checks: dict[str, StepCheck] = field(default_factory=dict)
    """By the name of the evaluation step."""
    unused: list[str] = field(default_factory=list)
    """Result files that the tables leave out, each with the reason."""
    versions: set[str] = field(default_factory=set)
    problems: list[str] = field(default_factory=list)

    def of(self, task: str, window: int | None = None, variant: str = "") -> dict[Place, Any]:
        """The cells of one task; a variant has the same weights and other settings."""
        return self.cells.get((task, window, variant), {})


# One run.


def read_run(run: Run) -> RunResults:
    """All results of a run, whose directory need not exist."""
    files = ResultFiles(run)
    results = RunResults(run, problems=files.problems)
    unused: dict[Path, str] = {}
    for step in run.evaluations:
        results.checks[step.name] = check = files.check(step)
        unused |= {path: f"{fit.value}: {why}" for fit, path, why in check.left_out}
        for file in check.files:
            results.versions.add(file.result.version or "0.1.0 or older")
            _add_cells(results, step, file.cells, files.wanted(step))
    results.unused = [f"{path}: {why}" for path, why in unused.items()]
    if not files.other_training:
        _read_training(run.directory / "metrics.jsonl", results)
    return results


def _add_cells(
    results: RunResults, step: Step, found: Mapping[Place, Any], wanted: Sequence[Place]
) -> None:
    """Without lengths that the suite does not ask for, and without cells that have no number."""
    groups = {group for group, _ in wanted}
    own = results.cells.setdefault((step.task, step.window, step.variant), {})
    for place, value in found.items():
        if value is not None and (place in wanted or place[0] not in groups):
            own[place] = value


def _read_training(path: Path, results: RunResults) -> None:
    seconds: list[float] = []
    for entry in read_metrics(path):
        step = entry["step"]
        results.last_step = max(results.last_step, step)
        loss, pace = finite(entry.get("loss")), finite(entry.get("step_seconds"))
        if loss is not None:
            results.losses.append((step, loss))
        if pace is not None and step > _WARMUP_STEPS:
            seconds.append(pace)
        kernel = kernel_values(entry["kernel"]) if isinstance(entry.get("kernel"), dict) else {}
        if kernel and same_heads(kernel, results.kernel or kernel):
            results.kernel = kernel
            results.kernel_path.append((step, kernel))
    results.seconds_per_step = statistics.median(seconds) if seconds else None


# All results of a suite, with the questions that tables, figures and claims ask of them.


@dataclass(frozen=True)
class ResultSet:
    runs: tuple[RunResults, ...]

    def of_runs(self, runs: Iterable[Run]) -> ResultSet:
        wanted = {run.name for run in runs}
        return ResultSet(tuple(item for item in self.runs if item.run.name in wanted))

    def of_models(self, models: Iterable[str]) -> ResultSet:
        wanted = set(models)
        return ResultSet(tuple(item for item in self.runs if item.run.model in wanted))

    def of_methods(self, methods: Iterable[str]) -> ResultSet:
        wanted = set(methods)
        return ResultSet(tuple(item for item in self.runs if item.run.method in wanted))

    def of(self, data: str, method: str) -> list[RunResults]:
        return [item for item in self.runs if (item.run.data, item.run.method) == (data, method)]

    def of_kind(self, kind: str) -> list[RunResults]:
        """`kind` is MODEL.DATA.METHOD, as suite files write it."""
        return [item for item in self.runs if item.run.name == f"{kind}.{item.run.seed}"]

    def perplexities(
        self, split: str, data: str, method: str, train_length: int | None = None
    ) -> dict[int, dict[int, float]]:
        """Length -> seed -> perplexity; of the data set's shortest training length, if not told."""
        trained_at = train_length or self.train_length(data)
        return by_length(
            (length, item.run.seed, value)
            for item in self.of(data, method)
            for (own, length), value in item.of(PERPLEXITY).items()
            if own == split and item.run.train_length == trained_at
        )

    def perplexities_of(self, kind: str, split: str) -> dict[int, dict[int, float]]:
        """Length -> seed -> perplexity of one kind of runs, `@VARIANT` behind it if it has one."""
        plain, _, variant = kind.partition("@")
        return by_length(
            (length, item.run.seed, value)
            for item in self.of_kind(plain)
            for (own, length), value in item.of(PERPLEXITY, variant=variant).items()
            if own == split
        )

    def perplexity(self, split: str, data: str, method: str, point: Point) -> dict[int, float]:
        """By seed at one length."""
        return self.perplexities(split, data, method, point.train_length).get(point.length, {})

    def values(self, task: str, data: str, method: str, group: str) -> dict[int, dict[int, float]]:
        """Length -> seed -> what a task measured of one group."""
        return by_length(
            (length, item.run.seed, value)
            for item in self.of(data, method)
            for (own, length), value in item.of(task).items()
            if own == group
        )

    def train_length(self, data: str) -> int | None:
        lengths = [item.run.train_length for item in self.runs if item.run.data == data]
        return min(lengths, default=None)

    def seconds_per_step(self, data: Iterable[str], method: str) -> list[float]:
        """Of every run on these data sets."""
        runs = [item for name in data for item in self.of(name, method)]
        return [item.seconds_per_step for item in runs if item.seconds_per_step is not None]

    def positions(
        self, data: str, method: str, length: int, window: int | None, split: str
    ) -> dict[int, PositionEntry]:
        """By seed: seeds have texts of their own, so only the same seed can be compared."""
        found = {item.run.seed: item.of(POSITIONWISE, window) for item in self.of(data, method)}
        place = (split, length)
        return {seed: cells[place] for seed, cells in found.items() if place in cells}


def by_length(values: Iterable[tuple[int, int, float]]) -> dict[int, dict[int, float]]:
    """Length -> seed -> value, the shortest length first."""
    found: dict[int, dict[int, float]] = {}
    for length, seed, value in values:
        found.setdefault(length, {})[seed] = value
    return dict(sorted(found.items()))


def loss_from(entry: PositionEntry, start: int) -> float | None:
    """Mean loss of the positions from `start` on."""
    if entry.by_position:
        rest = entry.by_position[start:]
        return sum(rest) / len(rest) if rest else None
    buckets = [bucket for bucket in entry.buckets if bucket.start >= start]
    total = sum(bucket.end - bucket.start for bucket in buckets)
    weighted = sum(bucket.loss * (bucket.end - bucket.start) for bucket in buckets)
    return weighted / total if total else None


def beyond_window(
    own: Sequence[RunResults], windowed: Sequence[RunResults], split: str
) -> dict[int, PairedTest]:
    """By length: loss past the training length, against the others' in a window of that length."""
    without, within = _losses_beyond(own, split, False), _losses_beyond(windowed, split, True)
    tests = {n: compare_paired(within.get(n, {}), found) for n, found in without.items()}
    return {n: test for n, test in tests.items() if test.seeds}


def _losses_beyond(
    runs: Sequence[RunResults], split: str, in_window: bool
) -> dict[int, dict[int, float]]:
    """Length -> seed -> mean loss past the training length, with a window of it or with none."""
    return by_length(
        (length, item.run.seed, loss)
        for item in runs
        for (own, length), entry in item.of(
            POSITIONWISE, item.run.train_length if in_window else None
        ).items()
        if own == split
        if (loss := loss_from(entry, item.run.train_length)) is not None
    )
