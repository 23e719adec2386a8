"""Figures show the results they are given, and nothing where there is nothing."""

from __future__ import annotations

import numpy as np
import pytest

from megatron.paper.figures import perplexity_by_length, training_loss, training_speed
from megatron.paper.run_results import ResultSet, RunResults
from megatron.paper.suite import load_suite
from megatron.paper.suite_file import PERPLEXITY, DataSet

STDLIB = DataSet(name="stdlib", title="Python standard library")
EMPTY = ResultSet(())


def lines(axes):  # type: ignore[no-untyped-def]
    return {line.get_label(): line for line in axes.get_lines()}


def test_perplexity_curves_are_the_means_over_seeds(results: ResultSet) -> None:
    figure = perplexity_by_length(results, "valid", [STDLIB], ["kerple_log", "rotary"])
    assert figure is not None
    axes = figure.axes[0]
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
    line = lines(axes)["KERPLE-log"]
    runs = results.of("stdlib", "kerple_log")
    assert len(runs) == 3
    expected = np.mean([run.of(PERPLEXITY)["valid", 4096] for run in runs])
    assert line.get_xdata()[-1] == 4096
    assert line.get_ydata()[-1] == pytest.approx(expected)


def test_a_zoomed_row_appears_when_a_method_explodes(results: ResultSet) -> None:
    calm = perplexity_by_length(results, "valid", [STDLIB], ["kerple_log", "alibi"])
    wild = perplexity_by_length(results, "valid", [STDLIB], ["kerple_log", "sinusoidal"])
    assert calm is not None
    assert wild is not None
    assert (len(calm.axes), len(wild.axes)) == (1, 2)
    low, high = wild.axes[1].get_ylim()
    assert high / low < 2


def test_speed_is_relative_to_log(results: ResultSet) -> None:
    figure = training_speed(results, ["stdlib"], ["kerple_log", "rpe"], "a laptop")
    assert figure is not None
    widths = [bar.get_width() for bar in figure.axes[0].patches]
    assert widths == pytest.approx([1.0, 0.106 / 0.120, 1.0, 0.340 / 0.307])


def test_losses_are_also_drawn_minus_logs_of_the_same_seed() -> None:
    suite = load_suite("laptop", ["main", "stdlib", "*.1235"])
    steps = [(step, 5.0 - 0.1 * step) for step in range(1, 9)]
    extra = {"kerple_log": 0.0, "alibi": 0.02, "rpe": -0.01, "sinusoidal": 3.0}
    runs = [
        RunResults(run, losses=[(step, loss + extra[run.method]) for step, loss in steps])
        for run in suite.runs
        if run.method in extra
    ]
    figure = training_loss(ResultSet(tuple(runs)), [STDLIB], list(extra))
    assert figure is not None
    whole, difference = figure.axes
    assert lines(whole)["ALiBi"].get_ydata()[0] == pytest.approx(4.92)
    assert lines(difference)["ALiBi"].get_ydata() == pytest.approx([0.02] * 8)
    assert 0.02 < difference.get_ylim()[1] < 0.1  # sinusoidal does not set the frame
    extra["sinusoidal"] = -0.05
    for own in runs:
        own.losses[:] = [(step, loss + extra[own.run.method]) for step, loss in steps]
    figure = training_loss(ResultSet(tuple(runs)), [STDLIB], list(extra))
    assert figure is not None
    assert figure.axes[1].get_ylim()[0] < -0.05  # not far away: all is shown
    alone = training_loss(ResultSet((runs[0],)), [STDLIB], list(extra))
    assert alone is not None and len(alone.axes) == 1


def test_nothing_is_drawn_without_results() -> None:
    methods = ["kerple_log", "alibi"]
    assert perplexity_by_length(EMPTY, "valid", [STDLIB], methods) is None
    assert training_speed(EMPTY, ["stdlib"], methods, "") is None
    assert training_loss(EMPTY, [STDLIB], methods) is None
