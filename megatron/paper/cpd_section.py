"""The paper's theory, checked on the kernels that a suite has trained: a section of its report."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from megatron.errors import KernelAnalysisError
from megatron.model.kernel_theory import cpd_margin, is_cpd, smallest_shift
from megatron.neox_arguments.catalogue import label_of
from megatron.paper.kernel_figures import kernel_bias
from megatron.paper.run_results import Cell, ResultSet
from megatron.paper.suite_file import Rounding
from megatron.paper.tables import Block, Column, Entry, Row, Table

__all__ = ["cpd_table"]

POINTS = (4, 16, 64, 128)
_TOO_STEEP = 2.1
_CAPTION = (
    "Every head of every trained kernel (how many, in brackets) on that many points: is it "
    "conditionally positive definite (CPD, Corollary 1: no negative eigenvalue on coefficients "
    "that sum to zero), and the largest c that a head needs for c + kernel to be positive definite "
    "(Lemma 1). c grows with the number of points, without end where a kernel has no lower bound; "
    "nothing is computed with it, as softmax cancels it. Last, -d^2.1: an exponent above 2 is not "
    "CPD (Proposition 1). `tools/check_kernel.py` does the same for any kernel."
)


def cpd_table(key: str, results: ResultSet, methods: Sequence[str], heads: int) -> Table | None:
    """Rows of the suite's kernels and of the counterexample; None without a trained kernel."""
    rows = []
    for name in dict.fromkeys(methods):
        tables = list(_biases(results, name, heads))
        if tables:
            rows.append(_row(f"{label_of(name)} ({len(tables)})", tables))
    if not rows:
        return None
    steep = -torch.arange(max(POINTS), dtype=torch.float64).pow(_TOO_STEEP)
    rows.append(_row(f"power with exponent {_TOO_STEEP:g}", [steep]))
    columns = tuple(Column(f"{points} points") for points in POINTS)
    return Table(key, _CAPTION, (Block("", "", columns, tuple(rows)),))


def _biases(results: ResultSet, name: str, heads: int) -> Iterable[Tensor]:
    """A table per head of every run that logged its kernel."""
    for item in results.runs:
        if item.run.method == name and item.kernel:
            bias = kernel_bias(name, item.kernel, heads, max(POINTS))
            yield from torch.from_numpy(bias) if bias is not None else ()


def _row(label: str, tables: Sequence[Tensor]) -> Row:
    return Row(
        label, tuple(Entry(_cell(tables, points), Rounding.MAGNITUDE, 2) for points in POINTS)
    )


def _cell(tables: Sequence[Tensor], points: int) -> Cell:
    broken = [table for table in tables if not is_cpd(table.float(), points)]
    if broken:
        worst = min(float(cpd_margin(table, points)) for table in broken)
        text = f"not CPD ({len(broken)} of {len(tables)}), eigenvalue {worst:.2g}"
        return Cell(worst, seeds=len(tables), words=text.replace("-", "−"))
    shifts = [shift for table in tables if (shift := _shift(table, points)) is not None]
    none = len(tables) - len(shifts)
    text = f"CPD, c {max(shifts):.3g}" if shifts else "CPD"
    text += f" ({none} not strictly: none)" if none else ""
    return Cell(max(shifts, default=0.0), seeds=len(tables), words=text)


def _shift(table: Tensor, points: int) -> float | None:
    """None where the kernel is CPD but not strictly so, to the rounding of its table."""
    try:
        return smallest_shift(table, points, 0.05)
    except KernelAnalysisError:
        return None
