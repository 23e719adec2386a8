"""Figures about the learned kernels and the training time."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter
from numpy.typing import NDArray

from megatron.model.kernel_theory import EFFECTIVE_BIAS, effective_length, heads_within
from megatron.model.position_base import DistanceKernel, TableEmbedding
from megatron.model.position_names import build_positional_embedding, position_options
from megatron.neox_arguments.catalogue import label_of
from megatron.paper.published import published_seconds_per_step
from megatron.paper.run_results import ResultSet, RunResults, summarize
from megatron.paper.style import (
    data_color,
    figure_style,
    finish_axes,
    mark_train_length,
    new_figure,
    plain_log_axis,
)
from megatron.paper.suite_file import DataSet
from megatron.paper.tables import REFERENCE_METHOD

__all__ = [
    "effective_lengths",
    "first_kernel",
    "kernel_bias",
    "kernel_functions",
    "learned_parameters",
    "shade",
    "training_speed",
]

_PLOTTED = ("kerple_log", "kerple_power", "kerple_log3", "kerple_bias_wht", "alibi")
_LOWEST_BIAS = -8.0
_EFFECTIVE_MAX_DISTANCE = 20480


def first_kernel(
    results: ResultSet, data: str, name: str
) -> tuple[RunResults, Mapping[str, list[float]]] | None:
    """The first seed whose kernel can be drawn; ALiBi's needs no parameters."""
    for run in results.of(data, name):
        if run.kernel or (name == "alibi" and run.last_step):
            return run, run.kernel
    return None


def kernel_functions(
    results: ResultSet, data: Sequence[DataSet], heads: int, max_distance: int
) -> Figure | None:
    """Bias against distance, one line per head; rows are data sets, columns are kernels."""
    found = {
        (item.name, name): kernel
        for item in data
        for name in _PLOTTED
        if (kernel := first_kernel(results, item.name, name))
    }
    rows = [item for item in data if any(key[0] == item.name for key in found)]
    names = [name for name in _PLOTTED if any(key[1] == name for key in found)]
    if not rows:
        return None
    with figure_style():
        figure = new_figure(len(names), len(rows), width=3.9, height=3.2)
        grid = figure.subplots(len(rows), len(names), squeeze=False, sharey=True)
        for row, item in enumerate(rows):
            for column, name in enumerate(names):
                title = f"{label_of(name)}: {item.title}"
                kernel = found.get((item.name, name))
                values = kernel[1] if kernel else {}
                bias = kernel_bias(name, values, heads, max_distance + 1) if kernel else None
                _kernel_panel(grid[row][column], bias, title, results.train_length(item.name))
    return figure


def _kernel_panel(
    axes: Axes, bias: np.ndarray | None, title: str, train_length: int | None
) -> None:
    finish_axes(axes, title=title, xlabel="distance |m − n| (tokens)", ylabel="bias")
    axes.title.set_fontsize(10.5)
    if bias is None:
        axes.text(0.5, 0.5, "—", transform=axes.transAxes, ha="center", fontsize=20)
        return
    distances = np.arange(1, bias.shape[1])
    order = np.argsort(-bias[:, -1])
    for tone, head in zip(np.linspace(0.0, 0.85, len(order)), order, strict=True):
        axes.plot(distances, bias[head, 1:], color=shade(float(tone)), linewidth=1.5)
    axes.axhline(EFFECTIVE_BIAS, color="#D55E00", linestyle="--", linewidth=1)
    mark_train_length(axes, train_length, below=True)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.set_ylim(_LOWEST_BIAS, 0.4)


def shade(position: float) -> tuple[float, float, float]:
    """From strong blue (flattest head) to pale blue (steepest), readable in grey too."""
    start, end = np.array([0.0, 0.27, 0.55]), np.array([0.74, 0.86, 0.95])
    red, green, blue = start + (end - start) * position
    return float(red), float(green), float(blue)


def effective_lengths(results: ResultSet, data: Sequence[DataSet], heads: int) -> Figure | None:
    """Number of heads with effective length <= distance: the paper's Figure on cut-offs."""
    names = [
        name
        for name in ("kerple_power", "kerple_log", "kerple_log3")
        if any(first_kernel(results, item.name, name) for item in data)
    ]
    if not names:
        return None
    with figure_style():
        figure = new_figure(len(names))
        grid = figure.subplots(1, len(names), squeeze=False, sharey=True)
        for axes, name in zip(grid[0], names, strict=True):
            for index, item in enumerate(data):
                kernel = first_kernel(results, item.name, name)
                if kernel:
                    color, _ = data_color(index)
                    _effective_line(axes, name, kernel[1], heads, item.title, color, "-")
            _effective_line(axes, "alibi", {}, heads, "ALiBi (any data)", "#888888", "--")
            axes.set_xscale("log", base=2)
            axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
            finish_axes(
                axes,
                title=label_of(name),
                xlabel="distance d = |m − n| (tokens)",
                ylabel="heads (effective length ≤ d)",
            )
        _figure_legend(figure, grid[0])
    return figure


def _figure_legend(figure: Figure, panels: Sequence[Axes]) -> None:
    """Beside the panels, never over their curves."""
    found: dict[str, Artist] = {}
    for axes in panels:
        handles, labels = axes.get_legend_handles_labels()
        found |= dict(zip(labels, handles, strict=True))
    figure.legend(list(found.values()), list(found), loc="outside right upper")


def _effective_line(
    axes: Axes,
    name: str,
    values: Mapping[str, list[float]],
    heads: int,
    label: str,
    color: str,
    dashes: str,
) -> None:
    bias = kernel_bias(name, values, heads, _EFFECTIVE_MAX_DISTANCE + 1)
    if bias is None:
        return
    lengths = effective_length(torch.from_numpy(bias), _EFFECTIVE_MAX_DISTANCE)
    counts = heads_within(lengths, _EFFECTIVE_MAX_DISTANCE).numpy()
    distances = np.arange(len(counts))
    axes.step(distances[1:], counts[1:], where="post", label=label, color=color, linestyle=dashes)


def learned_parameters(results: ResultSet, data: Sequence[DataSet]) -> Figure | None:
    """r1 against r2, one point per head and seed."""
    names = [
        name
        for name in ("kerple_log", "kerple_power", "kerple_log3")
        if any(
            {"r1", "r2"} <= set(run.kernel) for item in data for run in results.of(item.name, name)
        )
    ]
    if not names:
        return None
    with figure_style():
        figure = new_figure(len(names))
        grid = figure.subplots(1, len(names), squeeze=False)
        for axes, name in zip(grid[0], names, strict=True):
            for index, item in enumerate(data):
                color, marker = data_color(index)
                kernels = [run.kernel for run in results.of(item.name, name) if run.kernel]
                first = [value for kernel in kernels for value in kernel["r1"]]
                second = [value for kernel in kernels for value in kernel["r2"]]
                if first:
                    axes.scatter(
                        first,
                        second,
                        s=42,
                        color=color,
                        marker=marker,
                        alpha=0.75,
                        edgecolors="white",
                        linewidths=0.6,
                        label=item.title,
                    )
            meaning = "exponent r₂" if name == "kerple_power" else "inner scale r₂"
            finish_axes(axes, title=label_of(name), xlabel="scale r₁", ylabel=meaning)
            axes.set_xscale("log")
            axes.set_yscale("log")
            plain_log_axis(axes.xaxis)
            plain_log_axis(axes.yaxis)
        _figure_legend(figure, grid[0])
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


# Kernel functions of trained models, rebuilt from the parameters in their metrics.

FloatArray = NDArray[np.float64]


def kernel_bias(
    method: str, values: Mapping[str, Sequence[float]], num_heads: int, length: int
) -> FloatArray | None:
    """Bias by head and distance [heads, length], or None where the method has none.

    Fixed kernels (ALiBi) need no values; a learned kernel without its values has no curve.
    """
    heads = len(next(iter(values.values()))) if values else num_heads
    embedding = build_positional_embedding(method, position_options(heads=heads, head_dim=64))
    if isinstance(embedding, DistanceKernel):
        if set(values) < set(embedding.learnable):
            return None
        embedding.set_kernel_values_(
            {name: torch.tensor(values[name]) for name in embedding.learnable}
        )
    elif not isinstance(embedding, TableEmbedding) or list(embedding.parameters()):
        return None
    with torch.no_grad():
        bias = embedding(length).bias
    return None if bias is None else bias.double().numpy()
