"""One cell of a results table, and how many digits of it are printed."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

__all__ = ["MISSING", "Cell", "Rounding", "cell_text", "decimals_for", "reference_decimals"]

MISSING = "—"
"""Printed where a result does not exist. Nothing is ever filled in."""

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
    """The paper's own digits, used where its cell stands beside ours."""

    @property
    def present(self) -> bool:
        return self.mean is not None


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
