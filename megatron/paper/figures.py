"""Figures of what was measured: perplexity and recall by length, loss and time of training."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import AutoLocator, FuncFormatter, NullLocator

from megatron.neox_arguments.catalogue import label_of, line_style
from megatron.paper.run_results import ResultSet, RunResults, summarize
from megatron.paper.style import (
    EndLabel,
    direct_labels,
    figure_legend,
    figure_style,
    finish_axes,
    mark_train_length,
    new_figure,
    plain_log_axis,
)
from megatron.paper.suite_file import DataSet, Point
from megatron.paper.tables import REFERENCE_METHOD, published_seconds_per_step

_ZOOM_FROM_RATIO = 4.0
"""Above this spread a second row zooms in on the methods that do not explode."""


@dataclass(frozen=True)
class _Curve:
    name: str
    lengths: list[int]
    means: list[float]
    deviations: list[float]
    seeds: int = 0
    label: str = ""


def perplexity_by_length(
    results: ResultSet, split: str, data: Sequence[DataSet], methods: Sequence[str]
) -> Figure | None:
    """Perplexity against evaluation length, one panel per data set; None without results."""
    curves = {item.name: _curves(results, split, item.name, methods) for item in data}
    shown = [item for item in data if curves[item.name]]
    if not shown:
        return None
    zoom = any(_spread(curves[item.name]) > _ZOOM_FROM_RATIO for item in shown)
    with figure_style():
        figure = new_figure(len(shown), 2 if zoom else 1, width=5.4)
        grid = figure.subplots(2 if zoom else 1, len(shown), squeeze=False)
        for column, item in enumerate(shown):
            train_length = results.train_length(item.name)
            _length_panel(grid[0][column], curves[item.name], item.title, train_length)
            if zoom:
                _length_panel(
                    grid[1][column], curves[item.name], f"{item.title}, zoomed", train_length
                )
                _zoom(grid[1][column], curves[item.name])
            for axes in (row[column] for row in grid):
                _label_ends(axes, curves[item.name])
    return figure


def _label_ends(axes: Axes, curves: list[_Curve]) -> None:
    direct_labels(
        axes,
        [EndLabel(curve.label, line_style(curve.name).color, curve.means[-1]) for curve in curves],
    )


def _curves(results: ResultSet, split: str, data: str, methods: Sequence[str]) -> list[_Curve]:
    train_length = results.train_length(data) or 1
    curves = []
    for name in methods:
        curve, seeds = _Curve(name, [], [], []), 0
        for length in results.lengths(split, data, name):
            values = results.perplexity(
                split, data, name, Point(train_length=train_length, length=length)
            )
            summary = summarize(values.values())
            if summary.mean is not None and math.isfinite(summary.mean):
                curve.lengths.append(length)
                curve.means.append(summary.mean)
                curve.deviations.append(summary.std or 0.0)
                seeds = summary.seeds
        if curve.lengths:
            curves.append(replace(curve, seeds=seeds))
    # Seeds have texts of their own: a mean over fewer is not quite comparable, and says so.
    most = max((curve.seeds for curve in curves), default=0)
    return [replace(curve, label=_label(curve, most)) for curve in curves]


def _label(curve: _Curve, most: int) -> str:
    fewer = f" ({curve.seeds} of {most} seeds)" if curve.seeds < most else ""
    return label_of(curve.name) + fewer


def _spread(curves: list[_Curve]) -> float:
    means = [mean for curve in curves for mean in curve.means]
    return max(means) / min(means)


def _length_panel(axes: Axes, curves: list[_Curve], title: str, train_length: int | None) -> None:
    for curve in curves:
        style = line_style(curve.name)
        means, deviations = np.array(curve.means), np.array(curve.deviations)
        axes.plot(
            curve.lengths,
            means,
            label=label_of(curve.name),
            color=style.color,
            marker=style.marker,
            linestyle=style.dashes,
            zorder=4 if curve.name == "kerple_log" else 3,
        )
        low = np.maximum(means - deviations, means * 0.05)
        axes.fill_between(
            curve.lengths, low, means + deviations, color=style.color, alpha=0.15, linewidth=0
        )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    lengths = sorted({length for curve in curves for length in curve.lengths})
    _length_ticks(axes, lengths)
    axes.tick_params(axis="x", labelsize=9.5, rotation=0 if len(lengths) <= 6 else 45)
    plain_log_axis(axes.yaxis)
    mark_train_length(axes, train_length)
    finish_axes(axes, title=title, xlabel="evaluation length (tokens)", ylabel="perplexity")


def _length_ticks(axes: Axes, lengths: Sequence[int]) -> None:
    axes.set_xticks(list(lengths), [str(length) for length in lengths])
    axes.xaxis.set_minor_locator(NullLocator())


def _zoom(axes: Axes, curves: list[_Curve]) -> None:
    """Show what lies within twice the best, on a linear axis."""
    best = min(mean for curve in curves for mean in curve.means)
    # Everything that stays within twice the best at its training length sets the frame.
    tops = [mean for curve in curves for mean in curve.means if mean < 1.6 * best]
    margin = 0.08 * (max(tops) - best) + 0.01 * best
    axes.set_yscale("linear")
    axes.yaxis.set_major_locator(AutoLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.set_ylim(best - margin, max(tops) + margin)


RECALL_TITLES = {
    "digit_in_noise": "One digit in noise",
    "mqar": "Associative recall (four pairs)",
    "passkey_in_noise": "Passkey of four digits in noise",
}


def recall_by_length(results: ResultSet, data: DataSet, methods: Sequence[str]) -> Figure | None:
    """Share of symbols recalled against length, a panel per kind; None without results."""
    found = {
        kind: {
            name: values for name in methods if (values := results.recalled(data.name, name, kind))
        }
        for kind in RECALL_TITLES
    }
    if not any(found.values()):
        return None
    with figure_style():
        figure = new_figure(len(found), width=5.4)
        grid = figure.subplots(1, len(found), squeeze=False)
        for axes, (kind, curves) in zip(grid[0], found.items(), strict=True):
            ends = []
            for name, by_length in curves.items():
                style, lengths = line_style(name), list(by_length)
                cells = [summarize(by_length[length].values()) for length in lengths]
                means = np.array([100 * (cell.mean or 0.0) for cell in cells])
                spread = np.array([100 * (cell.std or 0.0) for cell in cells])
                axes.plot(lengths, means, color=style.color, marker=style.marker, ls=style.dashes)
                axes.fill_between(
                    lengths, means - spread, means + spread, color=style.color, alpha=0.15, lw=0
                )
                ends.append(EndLabel(label_of(name), style.color, float(means[-1])))
            axes.set_xscale("log", base=2)
            axes.set_ylim(-3, 103)
            _length_ticks(axes, sorted({length for curve in curves.values() for length in curve}))
            mark_train_length(axes, results.train_length(data.name), below=True)
            finish_axes(axes, title=RECALL_TITLES[kind], xlabel="length (tokens)",
                        ylabel="symbols recalled (%)")  # fmt: skip
            direct_labels(axes, ends)
    return figure


def training_loss(
    results: ResultSet, data: Sequence[DataSet], methods: Sequence[str]
) -> Figure | None:
    """Training loss against step (first seed of each method)."""

    def curves(data_name: str, method: str) -> list[RunResults]:
        """Runs with a line to draw: one point shows nothing."""
        return [run for run in results.of(data_name, method) if len(run.losses) > 1]

    shown = [item for item in data if any(curves(item.name, name) for name in methods)]
    if not shown:
        return None
    with figure_style():
        figure = new_figure(len(shown))
        grid = figure.subplots(1, len(shown), squeeze=False)
        for axes, item in zip(grid[0], shown, strict=True):
            for name in methods:
                runs = curves(item.name, name)
                if runs:
                    steps, losses = zip(*runs[0].losses, strict=True)
                    style = line_style(name)
                    axes.plot(
                        steps,
                        losses,
                        label=label_of(name),
                        color=style.color,
                        linestyle=style.dashes,
                        linewidth=1.3,
                    )
            finish_axes(axes, title=item.title, xlabel="step", ylabel="training loss (nats/token)")
        figure_legend(figure, grid[0][:1])
    return figure


def training_speed(
    results: ResultSet, data: Sequence[str], methods: Sequence[str], machine: str
) -> Figure | None:
    """Time per step relative to log, ours and the paper's A100."""
    ours = {
        name: summary.mean
        for name in methods
        if (summary := summarize(results.seconds_per_step(data, name).values())).mean
    }
    if REFERENCE_METHOD not in ours:
        return None
    shown = [name for name in methods if name in ours]
    paper = published_seconds_per_step()
    with figure_style():
        figure = new_figure(1, width=6.5, height=0.55 * len(shown) + 1.6)
        axes = figure.subplots()
        own = _bars(axes, shown, ours.__getitem__, 0.2, "#0072B2")
        published = _bars(axes, shown, lambda name: paper.get(name), -0.2, "#BBBBBB")
        axes.axvline(1.0, color="#444444", linewidth=1)
        axes.set_yticks(range(len(shown)), [label_of(name) for name in shown])
        axes.invert_yaxis()
        axes.grid(axis="y", visible=False)
        axes.set_xlim(0, axes.get_xlim()[1] * 1.12)
        finish_axes(axes, title="", xlabel="time per training step, KERPLE-log = 1", ylabel="")
        handles: list[Line2D] = [own, published]
        labels = [textwrap.fill(f"ours ({machine})", 60), "paper (A100, 162M)"]
        figure.legend(handles, labels, loc="outside upper left")
    return figure


def _bars(
    axes: Axes,
    names: Sequence[str],
    seconds: Callable[[str], float | None],
    shift: float,
    color: str,
) -> Line2D:
    reference = seconds(REFERENCE_METHOD) or 1.0
    for index, name in enumerate(names):
        value = seconds(name)
        if value is None:
            continue
        axes.barh(index - shift, value / reference, height=0.36, color=color)
        axes.text(
            value / reference + 0.01,
            index - shift,
            f"{value:.3f} s",
            va="center",
            fontsize=9,
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.6},
        )
    return Line2D([], [], color=color, linewidth=8)
