"""Figures of kernels: their functions, how far they look, how they got there, what they do."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import FuncFormatter
from numpy.typing import NDArray

from megatron.model.kernel_theory import EFFECTIVE_BIAS, effective_length, heads_within
from megatron.model.position_base import DistanceKernel, TableEmbedding
from megatron.model.position_names import build_positional_embedding, position_options
from megatron.neox_arguments.catalogue import label_of
from megatron.paper import style
from megatron.paper.run_results import ResultSet
from megatron.paper.suite_file import DataSet

FloatArray = NDArray[np.float64]
_PLOTTED = ("kerple_log", "kerple_power", "kerple_log3", "kerple_bias_wht", "alibi")
_LOWEST_BIAS = -8.0
_EFFECTIVE_MAX_DISTANCE = 20480


def first_kernel(results: ResultSet, data: str, name: str) -> Mapping[str, list[float]] | None:
    """Of the first seed whose kernel can be drawn; ALiBi's needs no parameters."""
    for run in results.of(data, name):
        if run.kernel or (name == "alibi" and run.last_step):
            return run.kernel
    return None


def kernel_functions(
    results: ResultSet, data: Sequence[DataSet], heads: int, max_distance: int
) -> Figure | None:
    """Bias against distance, one line per head; rows are data sets, columns are kernels."""

    def draw(axes: Axes, bias: FloatArray) -> None:
        for line, color in _by_reach(bias):
            axes.plot(np.arange(1, bias.shape[1]), line[1:], color=color, linewidth=1.5)
        axes.axhline(EFFECTIVE_BIAS, color="#D55E00", linestyle="--", linewidth=1)
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.set_ylim(_LOWEST_BIAS, 0.4)

    return _kernel_grid(results, data, _PLOTTED, heads, max_distance, draw, sharey=True)


def kernels_on_paper_axes(
    results: ResultSet, data: Sequence[DataSet], heads: int, max_distance: int
) -> Figure | None:
    """Bias against distance on linear axes, uncut: power reaches values that log never does."""

    def draw(axes: Axes, bias: FloatArray) -> None:
        for line, color in _by_reach(bias):
            axes.plot(line, color=color, linewidth=1.5)
        axes.set_xlim(0, bias.shape[1] - 1)
        axes.ticklabel_format(axis="y", style="sci", scilimits=(-3, 4))

    names = ("kerple_log", "kerple_power", "alibi")
    return _kernel_grid(results, data, names, heads, max_distance, draw, sharey=False)


def _kernel_grid(
    results: ResultSet,
    data: Sequence[DataSet],
    candidates: Sequence[str],
    heads: int,
    max_distance: int,
    draw: Callable[[Axes, FloatArray], None],
    *,
    sharey: bool,
) -> Figure | None:
    """A panel for each data set and each kernel that was trained on any of them."""
    found = {
        (item.name, name): kernel
        for item in data
        for name in candidates
        if (kernel := first_kernel(results, item.name, name)) is not None
    }
    rows = [item for item in data if any(key[0] == item.name for key in found)]
    names = [name for name in candidates if any(key[1] == name for key in found)]
    if not rows:
        return None
    with style.figure_style():
        figure = style.new_figure(len(names), len(rows), width=3.9, height=3.2)
        grid = figure.subplots(len(rows), len(names), squeeze=False, sharey=sharey)
        for (row, item), (column, name) in product(enumerate(rows), enumerate(names)):
            axes, kernel = grid[row][column], found.get((item.name, name))
            bias = None if kernel is None else kernel_bias(name, kernel, heads, max_distance + 1)
            title = f"{label_of(name)}: {item.title}"
            style.finish_axes(axes, title=title, xlabel="distance |m − n| (tokens)", ylabel="bias")
            axes.title.set_fontsize(10.5)
            if bias is None:
                axes.text(0.5, 0.5, "—", transform=axes.transAxes, ha="center", fontsize=20)
                continue
            draw(axes, bias)
            style.mark_train_length(axes, results.train_length(item.name), below=True)
    return figure


def _by_reach(bias: FloatArray) -> Iterator[tuple[FloatArray, tuple[float, float, float]]]:
    """Each head's curve with its colour, the flattest darkest."""
    order = np.argsort(-bias[:, -1])
    for tone, head in zip(np.linspace(0.0, 0.85, len(order)), order, strict=True):
        yield bias[head], shade(float(tone))


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
    with style.figure_style():
        figure = style.new_figure(len(names))
        grid = figure.subplots(1, len(names), squeeze=False, sharey=True)
        for axes, name in zip(grid[0], names, strict=True):
            for index, item in enumerate(data):
                kernel = first_kernel(results, item.name, name)
                if kernel is not None:
                    color, _ = style.data_color(index)
                    _effective_line(axes, name, kernel, heads, item.title, color, "-")
            _effective_line(axes, "alibi", {}, heads, "ALiBi (any data)", "#888888", "--")
            axes.set_xscale("log", base=2)
            axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
            style.finish_axes(
                axes,
                title=label_of(name),
                xlabel="distance d = |m − n| (tokens)",
                ylabel="heads (effective length ≤ d)",
            )
        style.figure_legend(figure, grid[0])
    return figure


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
    with style.figure_style():
        figure = style.new_figure(len(names))
        grid = figure.subplots(1, len(names), squeeze=False)
        for axes, name in zip(grid[0], names, strict=True):
            for index, item in enumerate(data):
                color, marker = style.data_color(index)
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
            style.finish_axes(axes, title=label_of(name), xlabel="scale r₁", ylabel=meaning)
            axes.set_xscale("log")
            axes.set_yscale("log")
            style.plain_log_axis(axes.xaxis)
            style.plain_log_axis(axes.yaxis)
        style.figure_legend(figure, grid[0])
    return figure


_PATH_COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7")


def kernels_over_training(results: ResultSet, data: Sequence[DataSet]) -> Figure | None:
    """Learned parameters against step, a line per head (first seed): did they leave their draws?"""
    shown = [
        (item, name, run)
        for item in data
        for name in ("kerple_log", "kerple_power")
        for run in results.of(item.name, name)[:1]
        if len(run.kernel_path) > 1
    ]
    if not shown:
        return None
    columns = max(len(run.kernel) for _, _, run in shown)
    with style.figure_style():
        figure = style.new_figure(columns, len(shown), width=4.4, height=2.9)
        grid = figure.subplots(len(shown), columns, squeeze=False)
        for row, (item, name, run) in zip(grid, shown, strict=True):
            steps = [step for step, _ in run.kernel_path]
            for axes, parameter, color in zip(row, run.kernel, _PATH_COLORS, strict=False):
                heads = np.array([values[parameter] for _, values in run.kernel_path]).T
                for head in heads:
                    axes.plot(steps, head, color=color, linewidth=1.5)
                axes.set_xlim(0, steps[-1])
                title = f"{label_of(name)}: {item.title}"
                style.finish_axes(axes, title=title, xlabel="step", ylabel=parameter)
                axes.title.set_fontsize(10.5)
                ends = [float(head[-1]) for head in heads]
                style.direct_labels(
                    axes,
                    [style.EndLabel(f"head {i + 1}", color, end) for i, end in enumerate(ends)],
                )
    return figure


# Kernel functions of trained models, rebuilt from the parameters in their metrics.


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


_TRAINED, _TESTED = 3, 4
_COLORS = {"content": "#DCE9F5", "kernel": "#FBE3CC", "sum": "#DDEFE3"}


def framework_illustration() -> Figure:
    """Figure 1: scores plus the kernel of the distance; the last row is only met after training.

    Three learned numbers per head (3-para-log), whatever the length: a longer sequence needs no
    new parameters, only larger distances.
    """
    with style.figure_style():
        figure = style.new_figure(3, width=2.9, height=4.3)
        panels = figure.subplots(1, 3)
        _matrix(panels[0], "content", lambda m, n: f"$q_{m}^\\top k_{n}$")
        _matrix(panels[1], "kernel", lambda m, n: f"$\\tilde k({m - n})$")
        _matrix(panels[2], "sum", lambda m, n: f"$a_{{{m},{n}}}$")
        panels[0].set_title("what the tokens say", loc="center")
        panels[1].set_title("how far apart they are", loc="center")
        panels[2].set_title("attention", loc="center")
        for axes, sign in ((panels[0], "+"), (panels[1], "→")):
            axes.text(
                1.12, 0.5, sign, transform=axes.transAxes, fontsize=24, ha="center", va="center"
            )
        panels[0].set_xlabel(
            "a row per query, a column per key;\ndashed: only met after training at 3", labelpad=8
        )
        panels[1].set_xlabel(
            r"$\tilde k(d) = -r_1\,\log(1 + r_2\,d^{\,r_3})$" "\nthree numbers per head, learned",
            labelpad=8,
        )
        panels[2].set_xlabel("softmax of each row,\nwhich needs no constant added", labelpad=8)
    return figure


def _matrix(axes: Axes, kind: str, text: Callable[[int, int], str]) -> None:
    """A lower triangle of squares; rows beyond the training length are dashed."""
    for m in range(1, _TESTED + 1):
        for n in range(1, m + 1):
            beyond = m > _TRAINED
            axes.add_patch(
                Rectangle(
                    (n - 1 + 0.05, m - 1 + 0.05),
                    0.9,
                    0.9,
                    facecolor="white" if beyond else _COLORS[kind],
                    edgecolor="#666666",
                    linestyle="--" if beyond else "-",
                    linewidth=1.2,
                )
            )
            axes.text(n - 0.5, m - 0.5, text(m, n), ha="center", va="center", fontsize=11)
    axes.set_xlim(0, _TESTED)
    axes.set_ylim(_TESTED, 0)
    axes.set_aspect("equal")
    axes.set_xticks([])
    axes.set_yticks([])
    axes.grid(visible=False)
    for side in axes.spines.values():
        side.set_visible(False)
