"""One cell of a results table: mean and deviation over seeds, the paper's t-test, its digits.

Also the cells of the KERPLE paper itself, as data.
"""

from __future__ import annotations

import csv
import math
import statistics
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from megatron.paper.suite_file import Rounding

MISSING = "—"
"""Printed where a result does not exist."""
ALPHA = 0.05
"""Significance level of the paper."""
FEWEST_SEEDS = 3
"""Fewest common seeds with which a difference can count as settled."""

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
        # One diverged seed makes the mean meaningless: note it instead of dropping the seed.
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
        """Whether the difference counts; with two seeds a small p is often chance."""
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


# The numbers of the KERPLE paper as data: every perplexity cell and every training time.
#
# Means and deviations are kept with the digits the paper prints, and so are its bold faces and
# daggers: the paper does not publish single seeds, so neither can be computed from the cells.

_PUBLISHED = Path(__file__).resolve().parent / "published"
DATA_TITLES = {
    "openwebtext2": "OpenWebText2",
    "github": "GitHub",
    "arxiv": "ArXiv",
    "wikitext103": "WikiText-103",
}
"""How the paper spells its data sets."""

CellKey = tuple[str, str, int, int, str]
"""(table, data, training length, evaluation length, method)"""


def _rows(name: str) -> Iterator[dict[str, str]]:
    with (_PUBLISHED / name).open(newline="", encoding="utf-8") as file:
        yield from csv.DictReader(file)


@lru_cache(maxsize=1)
def published_cells() -> dict[CellKey, Cell]:
    """All perplexity cells of the paper, by (table, data, training length, length, method)."""
    cells: dict[CellKey, Cell] = {}
    for row in _rows("perplexity.csv"):
        train_length, length = int(row["train_length"]), int(row["length"])
        cells[row["table"], row["data"], train_length, length, row["method"]] = Cell(
            mean=float(row["mean"]) if row["mean"] else None,
            std=float(row["std"]) if row["std"] else None,
            bold=row["bold"] == "1",
            dagger=row["dagger"] == "1",
            note=row["note"],
            printed=" ± ".join(part for part in (row["mean"], row["std"]) if part),
        )
    return cells


@lru_cache(maxsize=1)
def published_seconds_per_step() -> dict[str, float]:
    """Seconds per training step of the 162M model on one A100 (length 512, batch 32)."""
    return {row["method"]: float(row["seconds_per_step"]) for row in _rows("speed.csv")}
