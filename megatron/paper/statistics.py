"""Mean and deviation over seeds, and the paper's paired two-sided t-test against log."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from scipy import stats

__all__ = ["ALPHA", "PairedTest", "Summary", "compare_paired", "summarize"]

ALPHA = 0.05
"""Significance level of the paper."""


@dataclass(frozen=True)
class Summary:
    mean: float | None
    std: float | None
    seeds: int


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


def summarize(values: Iterable[float]) -> Summary:
    """Mean and sample standard deviation (n - 1); one value alone has no deviation."""
    numbers = list(values)
    if not numbers:
        return Summary(None, None, 0)
    if not all(math.isfinite(number) for number in numbers):
        # One diverged seed makes the mean meaningless: say so instead of hiding the seed.
        return Summary(math.inf, None, len(numbers))
    deviation = statistics.stdev(numbers) if len(numbers) > 1 else None
    return Summary(statistics.fmean(numbers), deviation, len(numbers))


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
    p_value = float(stats.ttest_rel(second, first).pvalue)
    return PairedTest(p_value if math.isfinite(p_value) else None, mean, len(seeds))
