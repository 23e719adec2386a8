"""Figures of kernels: bias by distance, effective lengths, learned parameters, Figure 1."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from megatron.model.kernel_theory import EFFECTIVE_BIAS, effective_length, heads_within
from megatron.model.position_base import DistanceKernel, Exponent, TableEmbedding
from megatron.model.position_names import (
    build_positional_embedding,
    position_options,
    positional_embedding_class,
)
from megatron.neox_arguments.catalogue import label_of, method
from megatron.paper import style
from megatron.paper.run_results import ResultSet
from megatron.paper.suite_file import DataSet

FloatArray = NDArray[np.float64]
_LOWEST_BIAS = -8.0
_EFFECTIVE_MAX_DISTANCE = 20480
_KernelLine = tuple[str, Mapping[str, list[float]], str, str, str]
"""Method, learned values, label, colour and dashes."""
_EFFECTIVE_ALIBI: _KernelLine = ("alibi", {}, "ALiBi (any data)", "#888888", "--")


_KERNEL_CAPTION = (
    "One line per head of the first seed, flattest darkest, cut at −8. Dashed: the bias of −2, "
    "below which a token hardly counts. Dotted: training length."
)
_WHOLE_CAPTION = (
    "As in the paper: linear axes, nothing cut off. Where power has an exponent near 2, a far "
    "token gets a bias that nothing else in a score makes up for; log's stays within reach."
)
_EFFECTIVE_CAPTION = (
    "A head's effective length is the first distance with a bias below −2. The slower a curve "
    "rises, the farther the model looks."
)


def kernel_plots(results: ResultSet, data: Sequence[DataSet], heads: int) -> Iterator[style.Plot]:
    """The figures of trained kernels."""
    reach = 32 * max((results.train_length(item.name) or 0) for item in data)
    functions = kernel_functions(results, data, heads, reach)
    yield style.Plot("kernels", "Kernel functions per head", _KERNEL_CAPTION, functions)
    whole = kernels_on_paper_axes(results, data, heads, reach)
    yield style.Plot("kernels_whole", "The same on the paper's axes", _WHOLE_CAPTION, whole)
    paths = kernels_over_training(results, data)
    caption = "A line per head, first seed."
    yield style.Plot("kernel_paths", "Kernels over training", caption, paths)
    counts = effective_lengths(results, data, heads)
    yield style.Plot("effective_length", "Heads by effective length", _EFFECTIVE_CAPTION, counts)
    learned = learned_parameters(results, data)
    yield style.Plot("parameters", "Learned r1 and r2", "One point per head and seed.", learned)


def _kernels_with_bias(results: ResultSet) -> dict[str, type[TableEmbedding]]:
    """The classes of the methods that were trained and add to scores, by name in their order.

    Not those of layers that differ, `a+b`: tools/plot_kernels.py draws each.
    """
    names = dict.fromkeys(item.run.method for item in results.runs)
    classes = {name: positional_embedding_class(name) for name in names if "+" not in name}
    return {
        name: cls
        for name, cls in classes.items()
        if issubclass(cls, TableEmbedding) and "bias" in cls.table_names
    }


def first_kernel(results: ResultSet, data: str, name: str) -> Mapping[str, list[float]] | None:
    """Of the first seed whose kernel can be drawn; a fixed one (ALiBi's) needs no parameters."""
    options = position_options(heads=1, head_dim=2)
    is_fixed = not build_positional_embedding(name, options).initial_values()
    for run in results.of(data, name):
        if run.kernel or (is_fixed and run.last_step):
            return run.kernel
    return None


def kernel_functions(
    results: ResultSet, data: Sequence[DataSet], heads: int, max_distance: int
) -> Figure | None:
    """Bias against distance, one line per head; rows are data sets, columns are kernels."""
    highest = 0.4

    def draw(axes: Axes, bias: FloatArray) -> None:
        nonlocal highest
        for line, color in _by_reach(bias):
            axes.plot(np.arange(1, bias.shape[1]), line[1:], color=color, linewidth=1.5)
        axes.axhline(EFFECTIVE_BIAS, color="#D55E00", linestyle="--", linewidth=1)
        style.distance_axis(axes)
        highest = max(highest, 1.05 * float(bias.max()))
        axes.set_ylim(_LOWEST_BIAS, highest)

    return _kernel_grid(results, data, heads, max_distance, draw, sharey=True)


def kernels_on_paper_axes(
    results: ResultSet, data: Sequence[DataSet], heads: int, max_distance: int
) -> Figure | None:
    """Bias against distance on linear axes, uncut: power reaches values that log never does."""

    def draw(axes: Axes, bias: FloatArray) -> None:
        for line, color in _by_reach(bias):
            axes.plot(line, color=color, linewidth=1.5)
        axes.set_xlim(0, bias.shape[1] - 1)
        axes.yaxis.set_major_formatter("{x:,.10g}")  # -20,000: no power of ten beside the title

    return _kernel_grid(results, data, heads, max_distance, draw, sharey=False)


@style.figure_style()
def _kernel_grid(
    results: ResultSet,
    data: Sequence[DataSet],
    heads: int,
    max_distance: int,
    draw: Callable[[Axes, FloatArray], None],
    *,
    sharey: bool,
) -> Figure | None:
    """A panel for each data set and each kernel that was trained on any of them."""
    candidates = _kernels_with_bias(results)
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
    figure, grid = style.new_panels(len(names), len(rows), width=3.9, height=3.2, sharey=sharey)
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
    """Each head's curve with its colour, the flattest darkest: blues, readable in grey too."""
    strong, pale = np.array([0.0, 0.27, 0.55]), np.array([0.74, 0.86, 0.95])
    order = np.argsort(-bias[:, -1])
    for tone, head in zip(np.linspace(0.0, 0.85, len(order)), order, strict=True):
        red, green, blue = (strong + (pale - strong) * tone).tolist()
        yield bias[head], (red, green, blue)


@style.figure_style()
def effective_lengths(results: ResultSet, data: Sequence[DataSet], heads: int) -> Figure | None:
    """Number of heads with effective length <= distance: the paper's Figure on cut-offs."""
    names = [
        name
        for name in _kernels_with_bias(results)
        if any(first_kernel(results, item.name, name) for item in data)
    ]
    if not names:
        return None
    figure, grid = style.new_panels(len(names), sharey=True)
    for axes, name in zip(grid[0], names, strict=True):
        found = [(item, first_kernel(results, item.name, name)) for item in data]
        lines: list[_KernelLine] = [
            (name, kernel, item.title, style.data_color(index)[0], "-")
            for index, (item, kernel) in enumerate(found)
            if kernel is not None
        ]
        for drawn, kernel, label, color, dashes in [*lines, _EFFECTIVE_ALIBI]:
            bias = kernel_bias(drawn, kernel, heads, _EFFECTIVE_MAX_DISTANCE + 1)
            if bias is not None:
                reach = effective_length(torch.from_numpy(bias), _EFFECTIVE_MAX_DISTANCE)
                counts = heads_within(reach, _EFFECTIVE_MAX_DISTANCE).numpy()[1:]
                axes.step(np.arange(1, len(counts) + 1), counts, where="post", label=label,
                          color=color, linestyle=dashes)  # fmt: skip
        style.distance_axis(axes)
        style.finish_axes(
            axes,
            title=label_of(name),
            xlabel="distance d = |m − n| (tokens)",
            ylabel="heads (effective length ≤ d)",
        )
        axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    style.figure_legend(figure, grid[0])
    return figure


@style.figure_style()
def learned_parameters(results: ResultSet, data: Sequence[DataSet]) -> Figure | None:
    """r1 against r2, one point per head and seed."""
    shown = {
        name: cls
        for name, cls in _kernels_with_bias(results).items()
        if any(_with_r1_and_r2(results, item, name) for item in data)
    }
    if not shown:
        return None
    figure, grid = style.new_panels(len(shown))
    for axes, (name, cls) in zip(grid[0], shown.items(), strict=True):
        for index, item in enumerate(data):
            color, marker = style.data_color(index)
            kernels = _with_r1_and_r2(results, item, name)
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
        first_label, second_label = ("scale r₁", "inner scale r₂") if method(name) else ("r₁", "r₂")
        of_r2 = cls.learnable.get("r2") if issubclass(cls, DistanceKernel) else None
        if isinstance(of_r2, Exponent):
            second_label = "exponent r₂"
        style.finish_axes(axes, title=label_of(name), xlabel=first_label, ylabel=second_label)
        axes.set_xscale("log")
        axes.set_yscale("log")
        style.plain_log_axis(axes.xaxis)
        style.plain_log_axis(axes.yaxis)
    style.figure_legend(figure, grid[0])
    return figure


def _with_r1_and_r2(results: ResultSet, data: DataSet, name: str) -> list[dict[str, list[float]]]:
    kernels = [run.kernel for run in results.of(data.name, name)]
    return [kernel for kernel in kernels if {"r1", "r2"} <= set(kernel)]


@style.figure_style()
def kernels_over_training(results: ResultSet, data: Sequence[DataSet]) -> Figure | None:
    """Learned parameters against step, a line per head (first seed): did they leave their draws?"""
    shown = [
        (item, name, run)
        for item in data
        for name in _kernels_with_bias(results)
        for run in results.of(item.name, name)[:1]
        if len(run.kernel_path) > 1
    ]
    if not shown:
        return None
    columns = max(len(run.kernel) for _, _, run in shown)
    figure, grid = style.new_panels(columns, len(shown), width=4.4, height=2.9)
    for row, (item, name, run) in zip(grid, shown, strict=True):
        steps = [step for step, _ in run.kernel_path]
        for axes, parameter, color in zip(row, run.kernel, style.DATA_COLORS, strict=False):
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

    Fixed kernels (ALiBi) need no values; a learned kernel without its values has no curve. Layers
    that differ (`a+b`) have several.
    """
    if "+" in method:
        return None
    heads = len(next(iter(values.values()))) if values else num_heads
    embedding = build_positional_embedding(method, position_options(heads=heads, head_dim=64))
    if isinstance(embedding, DistanceKernel):
        if not set(embedding.learnable) <= set(values):
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


@style.figure_style()
def framework_illustration() -> Figure:
    """Figure 1: scores plus the kernel of the distance; the last row is only met after training.

    Three learned numbers per head (3-para-log), whatever the length: a longer sequence needs no
    new parameters, only larger distances.
    """
    parts: tuple[tuple[str, str, str, Callable[[int, int], str]], ...] = (
        ("#DCE9F5", "what the tokens say",
         "a row per query, a column per key;\ndashed: only met after training at 3",
         lambda m, n: f"$q_{m}^\\top k_{n}$"),
        ("#FBE3CC", "how far apart they are",
         "$\\tilde k(d) = -r_1\\,\\log(1 + r_2\\,d^{\\,r_3})$\nthree numbers per head, learned",
         lambda m, n: f"$\\tilde k({m - n})$"),
        ("#DDEFE3", "attention", "softmax of each row,\nwhich needs no constant added",
         lambda m, n: f"$a_{{{m},{n}}}$"),
    )  # fmt: skip
    figure, grid = style.new_panels(3, width=2.9, height=4.3)
    for axes, (color, title, below, text) in zip(grid[0], parts, strict=True):
        _matrix(axes, color, text)
        axes.set_title(title, loc="center")
        axes.set_xlabel(below, labelpad=8)
    for axes, sign in zip(grid[0], "+→", strict=False):
        axes.text(1.12, 0.5, sign, transform=axes.transAxes, fontsize=24, ha="center", va="center")
    return figure


def _matrix(axes: Axes, color: str, text: Callable[[int, int], str]) -> None:
    """A lower triangle of squares; rows beyond the training length are dashed."""
    for m in range(1, _TESTED + 1):
        for n in range(1, m + 1):
            beyond = m > _TRAINED
            axes.add_patch(
                Rectangle(
                    (n - 1 + 0.05, m - 1 + 0.05),
                    0.9,
                    0.9,
                    facecolor="white" if beyond else color,
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
