"""What all figures share: labels that can be read, and a file in every format."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from megatron.neox_arguments.catalogue import METHODS
from megatron.paper.figures import training_loss
from megatron.paper.run_results import ResultSet
from megatron.paper.style import (
    EndLabel,
    direct_labels,
    figure_style,
    in_lines,
    line_style,
    new_figure,
    new_panels,
    save_figure,
)
from megatron.paper.suite_file import DataSet

STDLIB = DataSet(name="stdlib", title="Python standard library")


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


def test_every_format_is_written(results: ResultSet, tmp_path: Path) -> None:
    figure = training_loss(results, [STDLIB], ["kerple_log"])
    assert figure is not None
    plot = save_figure(figure, tmp_path, "loss", "Loss", "A caption")
    assert (tmp_path / "loss.pdf").read_bytes().startswith(b"%PDF")
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert "<svg" in (tmp_path / "loss.svg").read_text(encoding="utf-8")
    assert plot.data_uri.startswith("data:image/svg+xml;base64,")
    assert plot.inches == pytest.approx(figure.get_figwidth()) and plot.inches < 8


def test_a_line_belongs_to_one_method() -> None:
    drawn = {line_style(name) for name in METHODS}
    assert len(drawn) == len(METHODS)
    assert line_style("kerple_power_ap_") == line_style("kerple_power")
    own = {line_style(f"my.module:Kernel{number}") for number in range(3)}
    assert len(own) == 3 and not own & drawn, "a user's own kernels, side by side"


def test_long_names_take_several_lines_and_their_labels_do_not_touch() -> None:
    name = "SquareRootOfLogarithmKernelWithDecay"
    assert in_lines(name) == "SquareRootOfLogarithm\nKernelWithDecay"
    assert in_lines("KERPLE-log") == "KERPLE-log" and in_lines("T5 bias") == "T5 bias"
    assert in_lines("_" * 60).replace("\n", "") == "_" * 60
    figure, grid = new_panels(1)
    axes = grid[0][0]
    axes.set_ylim(0, 1)
    direct_labels(axes, [EndLabel(name, "black", 0.5), EndLabel("log", "black", 0.51)])
    figure.canvas.draw()
    low, high = (text.get_window_extent() for text in axes.texts)
    assert not low.overlaps(high)
