"""Position-wise figures: bins, smoothing, the windowed comparison."""

from __future__ import annotations

import numpy as np
import pytest

from megatron.evaluation.positionwise import PositionEntry
from megatron.paper.claims import check_claims
from megatron.paper.position_figures import BINS, binned, positionwise_perplexity, smoothed
from megatron.paper.run_results import ResultSet, RunResults
from megatron.paper.suite import load_suite
from megatron.paper.suite_file import POSITIONWISE, DataSet, Positionwise

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
        found.cells = {
            (POSITIONWISE, None, ""): {("valid", 1024): entry(plain)},
            (POSITIONWISE, 128, ""): {("valid", 1024): entry(windowed, 128)},
        }
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
    del first.cells[POSITIONWISE, 128, ""], second.cells[POSITIONWISE, None, ""]
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


def test_windowed_line_stands_beside_the_others(results: ResultSet) -> None:
    figure = positionwise_perplexity(results, "valid", STDLIB, [PLAIN, WINDOWED])
    assert figure is not None
    shown = {line.get_label(): line for line in figure.axes[0].get_lines()}
    windowed = shown["KERPLE-log, windowed@128"].get_ydata()
    assert windowed[-1] > shown["KERPLE-log"].get_ydata()[-1]
    assert windowed[0] == pytest.approx(shown["KERPLE-log"].get_ydata()[0])


def test_nothing_is_drawn_without_results() -> None:
    assert positionwise_perplexity(ResultSet(()), "valid", STDLIB, [PLAIN]) is None
