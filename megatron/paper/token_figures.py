"""Differences between methods, and another task below, against the tokens they were trained on."""

from __future__ import annotations

import math
from collections.abc import Mapping

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from megatron.evaluation.task_registry import find_task
from megatron.evaluation.tasks import GroupView
from megatron.neox_arguments.catalogue import label_of
from megatron.paper.cells import FEWEST_SEEDS, PairedTest, summarize
from megatron.paper.run_results import ResultSet
from megatron.paper.style import (
    DATA_COLORS,
    EndLabel,
    direct_labels,
    figure_style,
    finish_axes,
    line_style,
    new_panels,
)
from megatron.paper.suite_file import Contrast, Pair
from megatron.paper.tables import difference

CAPTION = (
    "Above: difference in perplexity of the first method to the second, mean over seeds; below "
    "zero the first is better. A filled marker is settled (paired two-sided t-test, p < 0.05, at "
    f"least {FEWEST_SEEDS} seeds), a hollow one is not. Below: another task's result in "
    "the same runs at the training length, mean over seeds."
)


@figure_style()
def figure_by_tokens(contrast: Contrast, results: ResultSet, split: str) -> Figure | None:
    """A column for each two methods that were compared at two budgets or more; None without any."""
    columns = [
        (methods, tests)
        for methods, pairs in _pairs_by_methods(contrast).items()
        if len(tests := _tests_by_tokens(pairs, results, split, contrast.curve_lengths)) > 1
    ]
    if not columns:
        return None
    below = _view_below(contrast)
    figure, grid = new_panels(len(columns), 2 if below else 1, width=5.4)
    for column, ((first, second), tests) in enumerate(columns):
        title = f"{label_of(first)} against {label_of(second)}"
        _difference_panel(grid[0][column], tests, contrast.curve_lengths, results, title)
        if below:
            _task_panel(grid[1][column], (first, second), results, contrast.curve_task, below)
    return figure


def _view_below(contrast: Contrast) -> GroupView | None:
    """The first view of the task that the contrast shows below; its first group is drawn."""
    views = find_task(contrast.curve_task).views if contrast.curve_task else ()
    return next((view for view in views if isinstance(view, GroupView)), None)


def _pairs_by_methods(contrast: Contrast) -> dict[tuple[str, str], list[Pair]]:
    """(first method, second method) -> the pairs that compare them."""
    found: dict[tuple[str, str], list[Pair]] = {}
    for pair in contrast.pairs if contrast.curve_lengths else []:
        first, second = (kind.split(".")[-1] for kind in (pair.first, pair.second))
        found.setdefault((first, second), []).append(pair)
    return found


def _tests_by_tokens(
    pairs: list[Pair], results: ResultSet, split: str, lengths: list[int]
) -> dict[int, dict[int, PairedTest]]:
    """Tokens -> length -> test; only budgets that have every length."""
    found = {}
    for pair in pairs:
        runs = results.of_kind(pair.first)
        first, second = (results.perplexities_of(kind, split) for kind in (pair.first, pair.second))
        tests = {n: difference(first.get(n, {}), second.get(n, {})) for n in lengths}
        if runs and all(test.mean is not None for test in tests.values()):
            found[runs[0].run.training_tokens] = tests
    return dict(sorted(found.items()))


def _difference_panel(
    axes: Axes,
    tests: Mapping[int, Mapping[int, PairedTest]],
    lengths: list[int],
    results: ResultSet,
    title: str,
) -> None:
    train_length = min(item.run.train_length for item in results.runs)
    ends = []
    for length, color in zip(lengths, DATA_COLORS, strict=False):
        percents = [100 * math.expm1(row[length].mean or 0.0) for row in tests.values()]
        axes.plot(list(tests), percents, color=color)
        for tokens, percent in zip(tests, percents, strict=True):
            face = color if tests[tokens][length].settled else "white"
            axes.plot([tokens], [percent], marker="o", color=color, markerfacecolor=face)
        ends.append(EndLabel(f"{length // train_length}x", color, percents[-1]))
    axes.axhline(0.0, color="#444444", linewidth=1)
    _token_axis(axes, list(tests))
    finish_axes(axes, title=title, xlabel="", ylabel="difference in perplexity (%)")
    direct_labels(axes, ends)


def _task_panel(
    axes: Axes, methods: tuple[str, str], results: ResultSet, task: str, view: GroupView
) -> None:
    group, title = next(iter(view.groups.items()))
    ends, budgets = [], set()
    for method in methods:
        curve = _by_tokens(method, results, task, group)
        style = line_style(method)
        values = [view.scale * value for value in curve.values()]
        axes.plot(list(curve), values, color=style.color, marker=style.marker)
        if curve:
            budgets |= set(curve)
            ends.append(EndLabel(label_of(method), style.color, values[-1]))
    _token_axis(axes, sorted(budgets))
    finish_axes(axes, title=title, xlabel="training tokens", ylabel=view.ylabel)
    axes.margins(y=0.08)  # so that no marker is cut at the top
    axes.set_ylim(bottom=0)
    direct_labels(axes, ends)


def _by_tokens(method: str, results: ResultSet, task: str, group: str) -> dict[int, float]:
    """Tokens -> mean over seeds at the training length."""
    found: dict[int, list[float]] = {}
    for item in results.of_methods([method]).runs:
        value = item.of(task).get((group, item.run.train_length))
        if value is not None:
            found.setdefault(item.run.training_tokens, []).append(float(value))
    return {tokens: summarize(values).mean or 0.0 for tokens, values in sorted(found.items())}


def _token_axis(axes: Axes, tokens: list[int]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(tokens, [f"{count / 1e6:.0f}M" for count in tokens])
    axes.minorticks_off()
