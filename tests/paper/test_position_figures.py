"""Position-wise figures: bins, smoothing, the windowed comparison; and the paper's own figures."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from megatron.evaluation.results_schema import PositionEntry
from megatron.paper.claims import check_claims
from megatron.paper.kernel_figures import (
    framework_illustration,
    kernels_on_paper_axes,
    kernels_over_training,
)
from megatron.paper.position_figures import BINS, binned, positionwise_perplexity, smoothed
from megatron.paper.run_results import ResultSet, RunResults
from megatron.paper.style import EndLabel, direct_labels, figure_style, new_figure
from megatron.paper.suite import load_suite
from megatron.paper.suite_file import DataSet, Positionwise

STDLIB = DataSet(name="stdlib", title="Python standard library")
PLAIN = Positionwise(data="stdlib", methods=["kerple_log"], length=1024)
WINDOWED = Positionwise(data="stdlib", methods=["kerple_log"], length=1024, window=128)


def entry(loss: float, window: int | None = None) -> PositionEntry:
    losses = [loss + 0.1 * (i % 2) for i in range(1024)]
    return PositionEntry(length=1024, buckets=[], by_position=losses, window=window, sequences=2)


def runs(*losses: tuple[float, float]) -> ResultSet:
    """A seed for each pair: the loss without a window, and with one."""
    suite = load_suite("laptop", ["main", "stdlib", "kerple_log"])
    made = []
    for run, (plain, windowed) in zip(suite.runs, losses, strict=False):
        found = RunResults(run)
        found.positions = {
            ("valid", 1024, None): entry(plain),
            ("valid", 1024, 128): entry(windowed, 128),
        }
        found.kernel = {"r1": [1.0, 0.5], "r2": [1.0, 2.0]}
        found.last_step = 500
        made.append(found)
    return ResultSet(tuple(made))


def test_bins_are_means_of_equal_stretches() -> None:
    middles, means = binned(list(range(100)), bins=4)
    assert middles.tolist() == [12.5, 37.5, 62.5, 87.5]
    assert means.tolist() == [12.0, 37.0, 62.0, 87.0]
    assert len(binned([1.0, 2.0, 3.0], bins=64)[1]) == 3


def test_smoothing_keeps_the_level_and_shortens_at_the_ends() -> None:
    assert smoothed(np.full(9, 2.0)).tolist() == [2.0] * 9
    assert smoothed(np.array([0.0, 3.0, 6.0, 9.0]), 3).tolist() == [1.5, 3.0, 6.0, 7.5]


def test_the_second_row_is_the_difference_to_the_windowed_line() -> None:
    results = runs((2.0, 2.3), (2.2, 2.4))
    figure = positionwise_perplexity(results, "valid", STDLIB, [PLAIN, WINDOWED])
    assert figure is not None
    top, below = figure.axes
    shown = {line.get_label(): line for line in top.get_lines()}
    assert shown["KERPLE-log"].get_ydata()[-1] == pytest.approx(np.exp(2.15))
    assert len(shown["KERPLE-log"].get_xdata()) == BINS
    difference = below.get_lines()[0].get_ydata()
    assert difference == pytest.approx(np.full(BINS, -0.25))
    texts = [text.get_text() for text in top.texts]
    assert "KERPLE-log" in texts and "KERPLE-log, windowed@128" in texts
    assert " trained at 128" in texts


def test_only_the_same_seed_is_subtracted() -> None:
    """The first seed lost its window, the second its plain result: nothing is left to compare."""
    results = runs((2.0, 2.3), (2.2, 2.4), (2.5, 2.6))
    first, second, _ = results.runs
    del first.positions["valid", 1024, 128], second.positions["valid", 1024, None]
    figure = positionwise_perplexity(results, "valid", STDLIB, [PLAIN, WINDOWED])
    assert figure is not None
    assert figure.axes[1].get_lines()[0].get_ydata() == pytest.approx(np.full(BINS, -0.1))
    (finding,) = [
        item
        for item in check_claims(results, "valid", (STDLIB,))
        if item.claim.startswith("KERPLE-log uses what lies beyond")
    ]
    assert finding.evidence == "loss minus the window's: -0.1000 nats at length 1024"


def test_without_a_window_there_is_one_row() -> None:
    figure = positionwise_perplexity(runs((2.0, 2.3)), "valid", STDLIB, [PLAIN])
    assert figure is not None and len(figure.axes) == 1


def test_labels_do_not_overlap_and_say_when_a_line_leaves() -> None:
    with figure_style():
        figure = new_figure(1)
        axes = figure.subplots()
        axes.set_ylim(0, 10)
        ends = (1.0, 1.01, 9.99, 99.0)
        direct_labels(axes, [EndLabel(f"m{i}", "black", height) for i, height in enumerate(ends)])
    heights = [text.get_position()[1] for text in axes.texts]
    assert all(high - low > 0.06 for low, high in pairwise(heights))
    assert min(heights) >= 0.0 and max(heights) <= 1.0
    assert [text.get_text() for text in axes.texts][-1] == "m3 ↑"


def test_kernels_on_the_papers_axes_are_not_cut() -> None:
    figure = kernels_on_paper_axes(runs((2.0, 2.3)), [STDLIB], 2, 4096)
    assert figure is not None
    axes = figure.axes[0]
    lowest = min(float(line.get_ydata().min()) for line in axes.get_lines()[:2])
    assert lowest == pytest.approx(-np.log1p(4096.0), rel=1e-5)
    assert axes.get_ylim()[0] <= lowest and axes.get_xscale() == "linear"
    assert kernels_on_paper_axes(ResultSet(()), [STDLIB], 2, 4096) is None


def test_figure_1_has_a_last_row_that_training_never_met() -> None:
    for axes in framework_illustration().axes:
        dashed = [patch for patch in axes.patches if patch.get_linestyle() == "--"]
        assert (len(axes.patches), len(dashed)) == (10, 4)


def test_kernels_over_training_have_a_line_per_head() -> None:
    results = runs((2.0, 2.3))
    assert kernels_over_training(results, [STDLIB]) is None  # no path was recorded
    path = [(0, {"r1": [1.0, 2.0], "r2": [0.5, 0.1]}), (500, {"r1": [3.0, 2.5], "r2": [0.2, 0.3]})]
    results.runs[0].kernel_path = path
    figure = kernels_over_training(results, [STDLIB])
    assert figure is not None and len(figure.axes) == 2
    first = [line.get_ydata().tolist() for line in figure.axes[0].get_lines()]
    assert first == [[1.0, 3.0], [2.0, 2.5]]
