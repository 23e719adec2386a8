"""What the framework does (the paper's Figure 1), kernels on its axes, and how they got there."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from megatron.neox_arguments.catalogue import label_of
from megatron.paper import style
from megatron.paper.kernel_figures import first_kernel, kernel_bias, shade
from megatron.paper.run_results import ResultSet
from megatron.paper.suite_file import DataSet

__all__ = ["framework_illustration", "kernels_on_paper_axes", "kernels_over_training"]

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


def _matrix(axes: Axes, kind: str, text) -> None:  # type: ignore[no-untyped-def]
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


def kernels_on_paper_axes(
    results: ResultSet, data: Sequence[DataSet], heads: int, max_distance: int
) -> Figure | None:
    """Bias against distance on linear axes, uncut: power reaches values that log never does."""
    names = [
        name
        for name in ("kerple_log", "kerple_power", "alibi")
        if any(first_kernel(results, item.name, name) for item in data)
    ]
    rows = [item for item in data if any(first_kernel(results, item.name, n) for n in names)]
    if not rows:
        return None
    with style.figure_style():
        figure = style.new_figure(len(names), len(rows), width=4.2, height=3.3)
        grid = figure.subplots(len(rows), len(names), squeeze=False)
        for row, item in zip(grid, rows, strict=True):
            for axes, name in zip(row, names, strict=True):
                found = first_kernel(results, item.name, name)
                values = found[1] if found else {}
                bias = kernel_bias(name, values, heads, max_distance + 1) if found else None
                _whole_kernel(axes, bias, results.train_length(item.name))
                style.finish_axes(
                    axes,
                    title=f"{label_of(name)}: {item.title}",
                    xlabel="distance |m − n| (tokens)",
                    ylabel="bias",
                )
    return figure


def _whole_kernel(axes: Axes, bias: np.ndarray | None, train_length: int | None) -> None:
    if bias is None:
        axes.text(0.5, 0.5, "—", transform=axes.transAxes, ha="center", fontsize=20)
        return
    order = np.argsort(-bias[:, -1])
    for tone, head in zip(np.linspace(0.0, 0.85, len(order)), order, strict=True):
        axes.plot(bias[head], color=shade(float(tone)), linewidth=1.5)
    axes.set_xlim(0, bias.shape[1] - 1)
    axes.ticklabel_format(axis="y", style="sci", scilimits=(-3, 4))
    style.mark_train_length(axes, train_length, below=True)


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
