"""What runs left behind: results of the suite's settings, metrics, learned kernels; over seeds.

Everything is optional: a run that has not started, or that stopped half-way, contributes what it
has; what cannot be read or used is named, not skipped silently.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import statistics
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron.evaluation.results_schema import PositionEntry, Result
from megatron.paper.result_fit import RECALL, ResultFiles, StepCheck, cells_of, wanted_cells
from megatron.paper.suite import Run, Step
from megatron.paper.suite_file import Point, Rounding

_WARMUP_STEPS = 10
"""The first steps compile and fill caches; they are left out of the seconds per step."""


@dataclass
class RunResults:
    run: Run
    perplexity: dict[tuple[str, int], float] = field(default_factory=dict)
    """(split, length) -> perplexity"""
    variants: dict[str, dict[tuple[str, int], float]] = field(default_factory=dict)
    """The same of the same weights, evaluated with other settings."""
    recall: dict[tuple[str, int], float] = field(default_factory=dict)
    """(kind, length) -> share of symbols recalled"""
    positions: dict[tuple[str, int, int | None], PositionEntry] = field(default_factory=dict)
    """(split, length, window) -> loss by position"""
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


# What a run has to show.


def read_run(run: Run) -> RunResults:
    """All results of a run, whose directory need not exist."""
    files = ResultFiles(run)
    results = RunResults(run, problems=list(files.problems))
    unused: dict[Path, str] = {}
    for step in run.evaluations:
        good, bad = files.sort(step)
        results.checks[step.name] = files.check(step)
        unused |= {path: f"{fit.value}: {why}" for fit, path, why in bad}
        for result in good:
            results.versions.add(result.version or "0.1.0 or older")
            _add_cells(results, result, step)
    results.unused = [f"{path}: {why}" for path, why in unused.items()]
    if not files.other_training:
        _read_training(run.directory / "metrics.jsonl", results)
    return results


def _add_cells(results: RunResults, result: Result, step: Step) -> None:
    wanted = wanted_cells(results.run, step)
    found = {place: cell for place, cell in cells_of(result, step).items() if place in wanted}
    if step.length:
        results.positions |= {(*place, step.window): entry for place, entry in found.items()}
    elif step.task == RECALL:
        results.recall |= found
    else:
        own = results.variants.setdefault(step.variant, {}) if step.variant else results.perplexity
        own |= {place: value for place, value in found.items() if value is not None}


def finite(value: object) -> float | None:
    """A number from a file that anything may have been written to."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:  # an integer that no float can hold
        return None


def read_metrics(path: Path, last_bytes: int | None = None) -> Iterator[dict[str, Any]]:
    """The lines of metrics.jsonl, or of its end, with a usable step; broken ones are left out."""
    try:
        with path.open("rb") as file:
            if last_bytes is not None and path.stat().st_size > last_bytes:
                file.seek(-last_bytes, os.SEEK_END)
                file.readline()
            lines = file.read().decode("utf-8", errors="replace").splitlines()
    except OSError:
        return
    for entry in json_lines(lines):
        step = finite(entry.get("step"))
        if step is not None:
            yield {**entry, "step": int(step)}


def json_lines(lines: Iterable[str]) -> Iterator[dict[str, Any]]:
    """The objects of a JSONL file; lines that are none are left out."""
    for line in lines:
        entry = None
        with contextlib.suppress(ValueError, RecursionError):
            entry = json.loads(line)
        if isinstance(entry, dict):
            yield entry


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
        if isinstance(entry.get("kernel"), dict) and (kernel := kernel_values(entry["kernel"])):
            results.kernel = kernel
            results.kernel_path.append((step, kernel))
    results.seconds_per_step = statistics.median(seconds) if seconds else None


def kernel_values(content: Mapping[str, Any]) -> dict[str, list[float]]:
    """The parameters in a line of metrics that have a number for every head."""
    values = {}
    for name, entries in content.items():
        numbers = [finite(entry) for entry in entries] if isinstance(entries, list) else [None]
        if None not in numbers:
            values[str(name)] = [number for number in numbers if number is not None]
    return values


# All results of a suite, with the questions that tables, figures and claims ask of them.


@dataclass(frozen=True)
class ResultSet:
    runs: tuple[RunResults, ...]

    def of_models(self, models: Iterable[str]) -> ResultSet:
        wanted = set(models)
        return ResultSet(tuple(item for item in self.runs if item.run.model in wanted))

    def of_methods(self, methods: Iterable[str]) -> ResultSet:
        wanted = set(methods)
        return ResultSet(tuple(item for item in self.runs if item.run.method in wanted))

    def of(self, data: str, method: str) -> list[RunResults]:
        return [item for item in self.runs if (item.run.data, item.run.method) == (data, method)]

    def perplexities(
        self, split: str, data: str, method: str, train_length: int | None = None
    ) -> dict[int, dict[int, float]]:
        """Length -> seed -> perplexity; of the data set's shortest training length, if not told."""
        trained_at = train_length or self.train_length(data)
        return by_length(
            (length, item.run.seed, value)
            for item in self.of(data, method)
            for (own, length), value in item.perplexity.items()
            if own == split and item.run.train_length == trained_at
        )

    def perplexity(self, split: str, data: str, method: str, point: Point) -> dict[int, float]:
        """By seed at one length."""
        return self.perplexities(split, data, method, point.train_length).get(point.length, {})

    def recalled(self, data: str, method: str, kind: str) -> dict[int, dict[int, float]]:
        """Length -> seed -> share of symbols recalled."""
        return by_length(
            (length, item.run.seed, share)
            for item in self.of(data, method)
            for (own, length), share in item.recall.items()
            if own == kind
        )

    def train_length(self, data: str) -> int | None:
        lengths = [item.run.train_length for item in self.runs if item.run.data == data]
        return min(lengths, default=None)

    def seconds_per_step(self, data: Iterable[str], method: str) -> dict[int, float]:
        wanted = set(data)
        return {
            item.run.seed: item.seconds_per_step
            for item in self.runs
            if item.run.data in wanted
            and item.run.method == method
            and item.seconds_per_step is not None
        }

    def positions(
        self, data: str, method: str, length: int, window: int | None, split: str
    ) -> dict[int, PositionEntry]:
        """By seed: seeds have texts of their own, so only the same seed can be compared."""
        place, runs = (split, length, window), self.of(data, method)
        return {run.run.seed: run.positions[place] for run in runs if place in run.positions}


def by_length(values: Iterable[tuple[int, int, float]]) -> dict[int, dict[int, float]]:
    """Length -> seed -> value, the shortest length first."""
    found: dict[int, dict[int, float]] = {}
    for length, seed, value in values:
        found.setdefault(length, {})[seed] = value
    return dict(sorted(found.items()))


# One cell of a results table: mean and deviation over seeds, the paper's t-test, its digits.

MISSING = "—"
"""Printed where a result does not exist. Nothing is ever filled in."""
ALPHA = 0.05
"""Significance level of the paper."""
FEWEST_SEEDS = 3
"""From which on a difference of ours counts."""

_SCIENTIFIC_FROM = 1e7
_FIXED_DECIMALS = {Rounding.TWO_DECIMALS: 2, Rounding.THREE_DECIMALS: 3}


@dataclass(frozen=True)
class Cell:
    """Mean and standard deviation over seeds; `note` replaces the number ("OOM")."""

    mean: float | None = None
    std: float | None = None
    seeds: int = 0
    bold: bool = False
    dagger: bool = False
    note: str = ""
    p_value: float | None = None
    printed: str = ""
    """A published number in the paper's own digits."""
    words: str = ""
    """What is shown in place of mean and deviation: a difference with its test, a verdict."""

    @property
    def present(self) -> bool:
        return self.mean is not None


def summarize(values: Iterable[float]) -> Cell:
    """Mean and sample standard deviation (n - 1); one value alone has no deviation."""
    numbers = list(values)
    if not numbers:
        return Cell()
    if not all(math.isfinite(number) for number in numbers):
        # One diverged seed makes the mean meaningless: say so instead of hiding the seed.
        return Cell(math.inf, None, len(numbers))
    deviation = statistics.stdev(numbers) if len(numbers) > 1 else None
    return Cell(statistics.fmean(numbers), deviation, len(numbers))


@dataclass(frozen=True)
class PairedTest:
    """Of the candidate's values minus the reference's, over the seeds that both have."""

    mean: float | None = None
    """None without a common seed."""
    p_value: float | None = None
    """None where the test is not defined."""
    seeds: int = 0

    @property
    def reference_is_better(self) -> bool:
        """Is the reference's perplexity significantly lower? (The paper's dagger.)"""
        return self.p_value is not None and self.p_value < ALPHA and (self.mean or 0.0) > 0

    @property
    def settled(self) -> bool:
        """Whether the difference counts; with two seeds a small p is easily luck."""
        return self.seeds >= FEWEST_SEEDS and self.p_value is not None and self.p_value < ALPHA


def compare_paired(reference: Mapping[int, float], candidate: Mapping[int, float]) -> PairedTest:
    """Two-sided paired t-test over the seeds that both have.

    Undefined, hence never significant, with fewer than two common seeds, with a diverged seed,
    or when every pair is equal.
    """
    seeds = sorted(set(reference) & set(candidate))
    if not seeds:
        return PairedTest()
    differences = [candidate[seed] - reference[seed] for seed in seeds]
    mean = sum(differences) / len(seeds)
    if len(seeds) < 2 or not all(math.isfinite(difference) for difference in differences):
        return PairedTest(mean, None, len(seeds))
    if len(set(differences)) == 1:
        # No spread at all: scipy would divide by zero.
        return PairedTest(mean, 0.0 if mean else None, len(seeds))
    from scipy import stats

    pairs = [[own[seed] for seed in seeds] for own in (candidate, reference)]
    p_value = float(stats.ttest_rel(*pairs).pvalue)
    return PairedTest(mean, p_value if math.isfinite(p_value) else None, len(seeds))


def decimals_for(mean: float) -> int:
    """Decimals that leave three significant digits for 1 <= mean < 1000: 3.40, 23.9, 111."""
    if not math.isfinite(mean) or abs(mean) >= 99.95:
        return 0
    return 1 if abs(mean) >= 9.995 else 2


def reference_decimals(cells: Iterable[Cell]) -> int:
    """Decimals of the smallest mean of a data set, used for all deviations beside it."""
    means = [cell.mean for cell in cells if cell.mean is not None and math.isfinite(cell.mean)]
    return decimals_for(min(means)) if means else 1


def _number(value: float, decimals: int) -> str:
    if math.isfinite(value) and abs(value) >= _SCIENTIFIC_FROM:
        return f"{value:.1e}".replace("e+0", "e").replace("e+", "e")
    return f"{value:.{decimals}f}"


def _decimals(cell: Cell, rounding: Rounding, reference: int) -> tuple[int, int]:
    mean, std = cell.mean or 0.0, cell.std or 0.0
    if rounding is Rounding.INTEGER:
        return 0, 1 if std < 0.5 else 0
    if rounding in _FIXED_DECIMALS:
        return _FIXED_DECIMALS[rounding], _FIXED_DECIMALS[rounding]
    by_mean = decimals_for(mean)
    return by_mean, reference if rounding is Rounding.REFERENCE else by_mean


def cell_text(
    cell: Cell, rounding: Rounding, reference: int, plus_minus: str = " ± ", missing: str = MISSING
) -> str:
    """The number as printed, without bold face and dagger."""
    if cell.words:
        return cell.words
    if cell.mean is None:
        return cell.note or missing
    for_mean, for_std = _decimals(cell, rounding, reference)
    text = _number(cell.mean, for_mean)
    if cell.std is not None:
        text += plus_minus + _number(cell.std, for_std)
    return text
