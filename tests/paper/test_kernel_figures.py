"""Figures of kernels follow their formulas, and show what was trained."""

from __future__ import annotations

import numpy as np
import pytest

from megatron.paper.kernel_figures import (
    effective_lengths,
    framework_illustration,
    kernel_bias,
    kernel_functions,
    kernels_on_paper_axes,
    kernels_over_training,
    learned_parameters,
)
from megatron.paper.run_results import ResultSet, RunResults
from megatron.paper.suite import load_suite
from megatron.paper.suite_file import DataSet

STDLIB = DataSet(name="stdlib", title="Python standard library")
EMPTY = ResultSet(())


def one_run() -> RunResults:
    suite = load_suite("laptop", ["main", "stdlib", "kerple_log", "*.1235"])
    kernel = {"r1": [1.0, 0.5], "r2": [1.0, 2.0]}
    return RunResults(suite.runs[0], kernel=kernel, last_step=500)


def test_kernel_functions_follow_the_formula() -> None:
    bias = kernel_bias("kerple_log", {"r1": [2.0, 0.5], "r2": [1.0, 3.0]}, 2, 100)
    assert bias is not None
    distance = np.arange(100)
    expected = [-2.0 * np.log1p(distance), -0.5 * np.log1p(3.0 * distance)]
    np.testing.assert_allclose(bias, expected, rtol=1e-5, atol=1e-6)


def test_alibi_needs_no_parameters_and_rotary_has_no_bias() -> None:
    alibi = kernel_bias("alibi", {}, 4, 10)
    assert alibi is not None
    np.testing.assert_allclose(alibi[0], -(2.0**-2) * np.arange(10), rtol=1e-6)
    assert kernel_bias("rotary", {}, 4, 10) is None
    assert kernel_bias("kerple_log", {}, 4, 10) is None


def test_one_kernel_line_per_head(results: ResultSet) -> None:
    figure = kernel_functions(results, [STDLIB], 4, 4096)
    assert figure is not None
    titles = [axes.get_title(loc="left") for axes in figure.axes]
    assert titles == [f"{k}: {STDLIB.title}" for k in ("KERPLE-log", "KERPLE-power", "ALiBi")]
    curves = [line for line in figure.axes[0].get_lines() if len(line.get_xdata()) > 2]
    assert len(curves) == 4


def test_effective_length_counts_heads() -> None:
    suite = load_suite("laptop", ["main", "stdlib", "kerple_power", "*.1235"])
    run = RunResults(suite.runs[0])
    run.kernel = {"r1": [1.0, 0.01], "r2": [1.0, 1.0]}  # below -2 from 3 and from 201 on
    run.last_step = 1
    figure = effective_lengths(ResultSet((run,)), [STDLIB], 2)
    assert figure is not None
    (line,) = [item for item in figure.axes[0].get_lines() if item.get_label() == STDLIB.title]
    counts = dict(zip(line.get_xdata(), line.get_ydata(), strict=True))
    assert [counts[d] for d in (2, 3, 200, 201, 20480)] == [0, 1, 1, 2, 2]


def test_learned_parameters_show_every_head_of_every_seed(results: ResultSet) -> None:
    figure = learned_parameters(results, [STDLIB])
    assert figure is not None
    assert len(figure.axes[0].collections[0].get_offsets()) == 4 * 3


def test_kernels_on_the_papers_axes_are_not_cut() -> None:
    figure = kernels_on_paper_axes(ResultSet((one_run(),)), [STDLIB], 2, 4096)
    assert figure is not None
    axes = figure.axes[0]
    lowest = min(float(line.get_ydata().min()) for line in axes.get_lines()[:2])
    assert lowest == pytest.approx(-np.log1p(4096.0), rel=1e-5)
    assert axes.get_ylim()[0] <= lowest and axes.get_xscale() == "linear"
    assert axes.yaxis.get_major_formatter()(-20000.0) == "\N{MINUS SIGN}20,000"  # no offset
    assert kernels_on_paper_axes(EMPTY, [STDLIB], 2, 4096) is None


def test_figure_1_has_a_last_row_that_training_never_met() -> None:
    for axes in framework_illustration().axes:
        dashed = [patch for patch in axes.patches if patch.get_linestyle() == "--"]
        assert (len(axes.patches), len(dashed)) == (10, 4)


def test_kernels_over_training_have_a_line_per_head() -> None:
    results = ResultSet((one_run(),))
    assert kernels_over_training(results, [STDLIB]) is None  # no path was recorded
    path = [(0, {"r1": [1.0, 2.0], "r2": [0.5, 0.1]}), (500, {"r1": [3.0, 2.5], "r2": [0.2, 0.3]})]
    results.runs[0].kernel_path = path
    figure = kernels_over_training(results, [STDLIB])
    assert figure is not None and len(figure.axes) == 2
    first = [line.get_ydata().tolist() for line in figure.axes[0].get_lines()]
    assert first == [[1.0, 3.0], [2.0, 2.5]]


def test_nothing_is_drawn_without_kernels() -> None:
    assert kernel_functions(EMPTY, [STDLIB], 4, 128) is None
    assert effective_lengths(EMPTY, [STDLIB], 4) is None
    assert learned_parameters(EMPTY, [STDLIB]) is None
