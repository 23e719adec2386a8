"""One cell of a results table: mean and deviation over seeds, the paper's t-test, its digits."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum

__all__ = [
    "ALPHA",
    "MISSING",
    "Cell",
    "PairedTest",
    "Rounding",
    "cell_text",
    "compare_paired",
    "decimals_for",
    "reference_decimals",
    "summarize",
]

MISSING = "—"
"""Printed where a result does not exist. Nothing is ever filled in."""
ALPHA = 0.05
"""Significance level of the paper."""

_SCIENTIFIC_FROM = 1e7


class Rounding(str, Enum):
    """How the paper rounds "mean ± std"."""

    REFERENCE = "reference"
    """Mean to three digits; deviation to the decimals of the data set's best mean (main table)."""
    MAGNITUDE = "magnitude"
    """Mean to three digits, deviation to the same decimals (Gaussian table)."""
    INTEGER = "integer"
    """Whole numbers, small deviations to one decimal (the sinusoidal column)."""
    TWO_DECIMALS = "two_decimals"
    """WikiText-103."""
    THREE_DECIMALS = "three_decimals"
    """Seconds per step."""


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
    """How it is printed, where that is not mean and deviation: the paper's own digits, a test."""

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
    """Result of the t-test; `p_value` is None where the test is not defined."""

    p_value: float | None
    mean_difference: float | None
    pairs: int

    def reference_is_better(self, alpha: float = ALPHA) -> bool:
        """Is the reference's perplexity significantly lower? (The paper's dagger.)"""
        if self.p_value is None or self.mean_difference is None:
            return False
        return self.p_value < alpha and self.mean_difference > 0


def compare_paired(reference: Mapping[int, float], candidate: Mapping[int, float]) -> PairedTest:
    """Two-sided paired t-test over the seeds that both have.

    Undefined, hence never significant, with fewer than two common seeds, with a diverged seed,
    or when every pair is equal.
    """
    seeds = sorted(set(reference) & set(candidate))
    first = [reference[seed] for seed in seeds]
    second = [candidate[seed] for seed in seeds]
    differences = [after - before for before, after in zip(first, second, strict=True)]
    if len(seeds) < 2 or not all(math.isfinite(difference) for difference in differences):
        return PairedTest(None, None, len(seeds))
    mean = statistics.fmean(differences)
    if len(set(differences)) == 1:
        # No spread at all: scipy would divide by zero.
        return PairedTest(0.0 if mean else None, mean, len(seeds))
    from scipy import stats

    p_value = float(stats.ttest_rel(second, first).pvalue)
    return PairedTest(p_value if math.isfinite(p_value) else None, mean, len(seeds))


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
    if math.isnan(value):
        return "nan"
    if math.isinf(value):
        return "inf"
    if abs(value) >= _SCIENTIFIC_FROM:
        return f"{value:.1e}".replace("e+0", "e").replace("e+", "e")
    return f"{value:.{decimals}f}"


def _decimals(cell: Cell, rounding: Rounding, reference: int) -> tuple[int, int]:
    mean, std = cell.mean or 0.0, cell.std or 0.0
    if rounding is Rounding.INTEGER:
        return 0, 1 if std < 0.5 else 0
    if rounding is Rounding.TWO_DECIMALS:
        return 2, 2
    if rounding is Rounding.THREE_DECIMALS:
        return 3, 3
    by_mean = decimals_for(mean)
    return by_mean, reference if rounding is Rounding.REFERENCE else by_mean


def cell_text(
    cell: Cell, rounding: Rounding, reference: int, plus_minus: str = " ± ", missing: str = MISSING
) -> str:
    """The number as printed, without bold face and dagger."""
    if cell.mean is None:
        return cell.note or missing
    for_mean, for_std = _decimals(cell, rounding, reference)
    text = _number(cell.mean, for_mean)
    if cell.std is not None:
        text += plus_minus + _number(cell.std, for_std)
    return text
