"""Figures of what was measured: perplexity and other numbers by length, training loss and time."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median_low

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import AutoLocator, NullLocator

from megatron.evaluation.tasks import GroupView
from megatron.neox_arguments.catalogue import label_of
from megatron.paper.cells import Cell, published_seconds_per_step, summarize
from megatron.paper.run_results import ResultSet
from megatron.paper.style import (
    EndLabel,
    direct_labels,
    figure_legend,
    figure_style,
    finish_axes,
    line_style,
    line_with_spread,
    mark_train_length,
    new_figure,
    new_panels,
    plain_log_axis,
)
from megatron.paper.suite_file import DataSet
from megatron.paper.tables import REFERENCE_METHOD

_ZOOM_FROM_RATIO = 4.0
"""Above this spread a second row zooms in on the methods that do not explode."""


@dataclass(frozen=True)
class _Curve:
    name: str
    cells: dict[int, Cell]
    """Mean and deviation by length."""
    label: str

    @property
    def means(self) -> list[float]:
        return [cell.mean or 0.0 for cell in self.cells.values()]


@figure_style()
def perplexity_by_length(
    results: ResultSet, split: str, data: Sequence[DataSet], methods: Sequence[str]
) -> Figure | None:
    """Perplexity against evaluation length, one panel per data set; None without results."""
    found = {item.name: _curves(results, split, item.name, methods) for item in data}
    shown = [item for item in data if found[item.name]]
    if not shown:
        return None
    means = [[mean for curve in found[item.name] for mean in curve.means] for item in shown]
    zoom = any(max(own) / min(own) > _ZOOM_FROM_RATIO for own in means)
    figure, grid = new_panels(len(shown), 2 if zoom else 1, width=5.4)
    for column, item in enumerate(shown):
        curves, train_length = found[item.name], results.train_length(item.name)
        _length_panel(grid[0][column], curves, item.title, train_length)
        if zoom:
            _length_panel(grid[1][column], curves, f"{item.title}, zoomed", train_length)
            _zoom(grid[1][column], means[column])
        ends = [
            EndLabel(curve.label, line_style(curve.name).color, curve.means[-1]) for curve in curves
        ]
        for row in grid:
            direct_labels(row[column], ends)
    return figure


def _curves(results: ResultSet, split: str, data: str, methods: Sequence[str]) -> list[_Curve]:
    found: dict[str, dict[int, Cell]] = {}
    for name in methods:
        by_length = results.perplexities(split, data, name)
        cells = {length: summarize(seeds.values()) for length, seeds in by_length.items()}
        if finite := {n: cell for n, cell in cells.items() if math.isfinite(cell.mean or 0.0)}:
            found[name] = finite
    # Seeds have texts of their own: a mean over fewer is not quite comparable and is labelled.
    seeds = {name: cells[max(cells)].seeds for name, cells in found.items()}
    most = max(seeds.values(), default=0)
    curves = []
    for name, cells in found.items():
        fewer = f" ({seeds[name]} of {most} seeds)" if seeds[name] < most else ""
        curves.append(_Curve(name, cells, label_of(name) + fewer))
    return curves


def _length_panel(axes: Axes, curves: list[_Curve], title: str, train_length: int | None) -> None:
    for curve in curves:
        style, means = line_style(curve.name), np.array(curve.means)
        deviations = np.array([cell.std or 0.0 for cell in curve.cells.values()])
        line_with_spread(
            axes,
            list(curve.cells),
            means,
            (np.maximum(means - deviations, means * 0.05), means + deviations),
            label=label_of(curve.name),
            color=style.color,
            marker=style.marker,
            linestyle=style.dashes,
            zorder=4 if curve.name == "kerple_log" else 3,
        )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    lengths = sorted({length for curve in curves for length in curve.cells})
    _length_ticks(axes, lengths)
    axes.tick_params(axis="x", labelsize=9.5, rotation=0 if len(lengths) <= 6 else 45)
    plain_log_axis(axes.yaxis)
    mark_train_length(axes, train_length)
    finish_axes(axes, title=title, xlabel="evaluation length (tokens)", ylabel="perplexity")


def _length_ticks(axes: Axes, lengths: Sequence[int]) -> None:
    axes.set_xticks(list(lengths), [str(length) for length in lengths])
    axes.xaxis.set_minor_locator(NullLocator())


def _zoom(axes: Axes, means: Sequence[float]) -> None:
    """Show what lies within twice the best, on a linear axis."""
    best = min(means)
    # Everything that stays within twice the best at its training length sets the frame.
    top = max(mean for mean in means if mean < 1.6 * best)
    margin = 0.08 * (top - best) + 0.01 * best
    axes.set_yscale("linear")
    axes.yaxis.set_major_locator(AutoLocator())
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set_ylim(best - margin, top + margin)


@figure_style()
def group_by_length(
    results: ResultSet, task: str, view: GroupView, data: DataSet, methods: Sequence[str]
) -> Figure | None:
    """What a task measured against length, a panel per group; None without results."""
    found = {}
    for group in view.groups:
        by_method = {name: results.values(task, data.name, name, group) for name in methods}
        found[group] = {name: values for name, values in by_method.items() if values}
    if not any(found.values()):
        return None
    figure, grid = new_panels(len(found), width=5.4)
    for axes, (group, curves) in zip(grid[0], found.items(), strict=True):
        ends = []
        for name, by_length in curves.items():
            style = line_style(name)
            cells = [summarize(seeds.values()) for seeds in by_length.values()]
            means = np.array([view.scale * (cell.mean or 0.0) for cell in cells])
            spread = np.array([view.scale * (cell.std or 0.0) for cell in cells])
            line_with_spread(
                axes,
                list(by_length),
                means,
                (means - spread, means + spread),
                color=style.color,
                marker=style.marker,
                ls=style.dashes,
            )
            ends.append(EndLabel(label_of(name), style.color, float(means[-1])))
        axes.set_xscale("log", base=2)
        if view.limits is not None:
            axes.set_ylim(*view.limits)
        _length_ticks(axes, sorted({length for curve in curves.values() for length in curve}))
        mark_train_length(axes, results.train_length(data.name), below=True)
        finish_axes(axes, title=view.groups[group], xlabel=view.xlabel, ylabel=view.ylabel)
        direct_labels(axes, ends)
    return figure


@figure_style()
def training_loss(
    results: ResultSet, data: Sequence[DataSet], methods: Sequence[str]
) -> Figure | None:
    """Training loss against step (first seed of each method), and minus KERPLE-log's below.

    The curves of one data set lie on each other: runs of one seed read the same batches, so that
    their ups and downs cancel in the difference.
    """
    panels = []
    for item in data:
        # One point shows nothing.
        drawn = [run for run in results.runs if run.run.data == item.name and len(run.losses) > 1]
        first = {run.run.method: run for run in reversed(drawn)}
        panels.append((item.title, {name: first[name] for name in methods if name in first}))
    panels = [panel for panel in panels if panel[1]]
    if not panels:
        return None
    compared = any(len(runs) > 1 and REFERENCE_METHOD in runs for _, runs in panels)
    figure, grid = new_panels(len(panels), 2 if compared else 1)
    for column, (title, runs) in enumerate(panels):
        losses = {name: dict(run.losses) for name, run in runs.items()}
        _loss_lines(grid[0][column], losses)
        finish_axes(
            grid[0][column], title=title, xlabel="step", ylabel="training loss (nats/token)"
        )
        if compared:
            seed = runs[REFERENCE_METHOD].run.seed if REFERENCE_METHOD in runs else None
            same = {name: own for name, own in losses.items() if runs[name].run.seed == seed}
            _loss_differences(grid[1][column], same)
    figure_legend(figure, grid[0])
    return figure


def _loss_lines(axes: Axes, losses: Mapping[str, Mapping[int, float]]) -> None:
    for name, by_step in losses.items():
        style = line_style(name)
        (line,) = axes.plot(list(by_step), list(by_step.values()), label=label_of(name))
        line.set(color=style.color, linestyle=style.dashes, linewidth=1.3)


def _loss_differences(axes: Axes, losses: Mapping[str, Mapping[int, float]]) -> None:
    """Each loss minus KERPLE-log's at the same step, the closest methods in full."""
    reference = losses.get(REFERENCE_METHOD, {})
    differences = {
        name: {step: loss - reference[step] for step, loss in by_step.items() if step in reference}
        for name, by_step in losses.items()
    }
    if not any(any(own.values()) for own in differences.values()):
        axes.set_visible(False)
        return
    _loss_lines(axes, differences)
    # The first quarter of the steps and a method far away must not press the others together.
    later = [list(own.values())[len(own) // 4 :] for own in differences.values() if own]
    reach = [far for own in later if (far := max(map(abs, own))) > 0]
    if reach:
        frame = 1.1 * max(far for far in reach if far <= 3 * median_low(reach))
        axes.set_ylim(-frame, frame)
    title = f"the same minus {label_of(REFERENCE_METHOD)}'s"
    finish_axes(axes, title=title, xlabel="step", ylabel="difference (nats/token)")


@figure_style()
def training_speed(
    results: ResultSet, data: Sequence[str], methods: Sequence[str], machine: str
) -> Figure | None:
    """Time per step relative to log, ours and the paper's A100."""
    ours = {
        name: summary.mean
        for name in methods
        if (summary := summarize(results.seconds_per_step(data, name))).mean
    }
    if REFERENCE_METHOD not in ours:
        return None
    figure = new_figure(1, width=6.5, height=0.55 * len(ours) + 1.6)
    axes = figure.subplots()
    own = _bars(axes, list(ours), ours, 0.2, "#0072B2")
    published = _bars(axes, list(ours), published_seconds_per_step(), -0.2, "#BBBBBB")
    axes.axvline(1.0, color="#444444", linewidth=1)
    axes.set_yticks(range(len(ours)), [label_of(name) for name in ours])
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.set_xlim(0, axes.get_xlim()[1] * 1.12)
    finish_axes(axes, title="", xlabel="time per training step, KERPLE-log = 1", ylabel="")
    labels = [textwrap.fill(f"ours ({machine})", 60), "paper (A100, 162M)"]
    figure.legend([own, published], labels, loc="outside upper left")
    return figure


def _bars(
    axes: Axes, names: Sequence[str], seconds: Mapping[str, float], shift: float, color: str
) -> Line2D:
    """A bar for each name that has a time; what stands for them in the legend."""
    for index, name in enumerate(names):
        if name not in seconds:
            continue
        length = seconds[name] / seconds[REFERENCE_METHOD]
        axes.barh(index - shift, length, height=0.36, color=color)
        axes.text(
            length + 0.01,
            index - shift,
            f"{seconds[name]:.3f} s",
            va="center",
            fontsize=9,
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.6},
        )
    return Line2D([], [], color=color, linewidth=8)
