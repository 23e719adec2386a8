"""Figures show the results they are given, and nothing where there is nothing."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from megatron.paper.figures import perplexity_by_length, training_loss, training_speed
from megatron.paper.kernel_figures import (
    effective_lengths,
    kernel_bias,
    kernel_functions,
    learned_parameters,
)
from megatron.paper.position_figures import positionwise_perplexity
from megatron.paper.report import collect_results
from megatron.paper.run_results import ResultSet, RunResults
from megatron.paper.style import save_figure
from megatron.paper.suite import load_suite
from megatron.paper.suite_file import DataSet, Positionwise
from tests.paper.synthetic import write_run

STDLIB = DataSet(name="stdlib", title="Python standard library")
EMPTY = ResultSet(())
POSITIONS = Positionwise(data="stdlib", methods=["kerple_log"], length=1024)
WINDOWED = Positionwise(data="stdlib", methods=["kerple_log"], length=1024, window=128)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> ResultSet:
    root = tmp_path_factory.mktemp("runs")
    suite = load_suite("laptop", ["main", "stdlib"], runs_root=root)
    for run in suite.runs:
        write_run(run)
    return collect_results(suite)


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
    expected = np.mean([run.perplexity["valid", 4096] for run in runs])
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


def test_windowed_line_stands_beside_the_others(results: ResultSet) -> None:
    figure = positionwise_perplexity(results, "valid", STDLIB, [POSITIONS, WINDOWED])
    assert figure is not None
    shown = lines(figure.axes[0])
    windowed = shown["KERPLE-log, windowed@128"].get_ydata()
    assert windowed[-1] > shown["KERPLE-log"].get_ydata()[-1]
    assert windowed[0] == pytest.approx(shown["KERPLE-log"].get_ydata()[0])


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
    line = lines(figure.axes[0])[STDLIB.title]
    counts = dict(zip(line.get_xdata(), line.get_ydata(), strict=True))
    assert [counts[d] for d in (2, 3, 200, 201, 20480)] == [0, 1, 1, 2, 2]


def test_learned_parameters_show_every_head_of_every_seed(results: ResultSet) -> None:
    figure = learned_parameters(results, [STDLIB])
    assert figure is not None
    assert len(figure.axes[0].collections[0].get_offsets()) == 4 * 3


def test_speed_is_relative_to_log(results: ResultSet) -> None:
    figure = training_speed(results, ["stdlib"], ["kerple_log", "rpe"], "a laptop")
    assert figure is not None
    widths = [bar.get_width() for bar in figure.axes[0].patches]
    assert widths == pytest.approx([1.0, 0.106 / 0.120, 1.0, 0.340 / 0.307])


def test_nothing_is_drawn_without_results() -> None:
    methods = ["kerple_log", "alibi"]
    assert perplexity_by_length(EMPTY, "valid", [STDLIB], methods) is None
    assert positionwise_perplexity(EMPTY, "valid", STDLIB, [POSITIONS]) is None
    assert kernel_functions(EMPTY, [STDLIB], 4, 128) is None
    assert effective_lengths(EMPTY, [STDLIB], 4) is None
    assert learned_parameters(EMPTY, [STDLIB]) is None
    assert training_speed(EMPTY, ["stdlib"], methods, "") is None
    assert training_loss(EMPTY, [STDLIB], methods) is None


def test_every_format_is_written(results: ResultSet, tmp_path: Path) -> None:
    figure = training_loss(results, [STDLIB], ["kerple_log"])
    assert figure is not None
    plot = save_figure(figure, tmp_path, "loss", "Loss", "A caption")
    assert (tmp_path / "loss.pdf").read_bytes().startswith(b"%PDF")
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert "<svg" in (tmp_path / "loss.svg").read_text(encoding="utf-8")
    assert plot.data_uri.startswith("data:image/svg+xml;base64,")
