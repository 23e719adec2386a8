"""Perplexity by position, as the paper draws it: linear axes, with and without a window."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from megatron.evaluation.positionwise import PositionEntry
from megatron.neox_arguments.catalogue import label_of
from megatron.paper import style as look
from megatron.paper.run_results import ResultSet
from megatron.paper.suite_file import DataSet, Positionwise

FloatArray = NDArray[np.float64]
_POSITION = "position in the sequence (tokens)"
BINS = 64
SMOOTHING = 5
"""Bins that the drawn line averages; the bins themselves stay visible behind it."""


@dataclass(frozen=True)
class _Line:
    name: str
    window: int | None
    middles: FloatArray
    losses: FloatArray
    """By seed and bin."""
    seeds: tuple[int, ...] = ()

    @property
    def label(self) -> str:
        return label_of(self.name) + (f", windowed@{self.window}" if self.window else "")

    @property
    def style(self) -> dict[str, Any]:
        dashes = (0, (4, 2)) if self.window else "-"
        return {"color": look.line_style(self.name).color, "linestyle": dashes}


def binned(losses: Sequence[float], bins: int = BINS) -> tuple[FloatArray, FloatArray]:
    """Middles and mean losses of equal stretches of positions."""
    values = np.asarray(losses, dtype=np.float64)
    edges = np.linspace(0, len(values), min(bins, len(values)) + 1).astype(int)
    means = [values[low:high].mean() for low, high in pairwise(edges)]
    return (edges[:-1] + edges[1:]) / 2, np.array(means)


def smoothed(values: FloatArray, width: int = SMOOTHING) -> FloatArray:
    """Centred running mean, over fewer neighbours at the two ends."""
    half = width // 2
    return np.array([values[max(0, i - half) : i + half + 1].mean() for i in range(len(values))])


@look.figure_style()
def positionwise_perplexity(
    results: ResultSet, split: str, data: DataSet, entries: Sequence[Positionwise]
) -> Figure | None:
    """One panel per evaluation length, windowed lines last; None without results."""
    panels: dict[int, list[_Line]] = {}
    for item in sorted(entries, key=lambda entry: (entry.length, entry.window or 0)):
        for name in item.methods if item.data == data.name else []:
            found = results.positions(data.name, name, item.length, item.window, split)
            if found:
                panels.setdefault(item.length, []).append(_line(name, item.window, found))
    if not panels:
        return None
    compared = any(_reference(lines) for lines in panels.values())
    figure, grid = look.new_panels(len(panels), 2 if compared else 1, width=6.2, height=3.6)
    for column, (length, lines) in enumerate(panels.items()):
        train_length = results.train_length(data.name)
        _panel(grid[0][column], lines, length, train_length, f"{data.title}, length {length:,}")
        if compared:
            _difference_panel(grid[1][column], lines, length, train_length)
    return figure


def _reference(lines: Sequence[_Line]) -> _Line | None:
    """The first windowed line; the texts' own ups and downs cancel in differences to it."""
    return next((line for line in lines if line.window and line.losses.shape[1] == BINS), None)


def _difference_panel(
    axes: Axes, lines: Sequence[_Line], length: int, train_length: int | None
) -> None:
    """Loss minus the windowed line's, bin by bin: below zero, a model uses more than a window."""
    reference = _reference(lines)
    if reference is None:
        axes.set_visible(False)
        return
    labels = []
    for line in lines:
        # Each seed has its own texts, whose ups and downs are far larger than any difference.
        common = [seed for seed in line.seeds if seed in reference.seeds]
        if line is reference or line.losses.shape[1] != BINS or not common:
            continue
        rows = [[own.seeds.index(seed) for seed in common] for own in (line, reference)]
        fine, error = _mean_and_error(line.losses[rows[0]] - reference.losses[rows[1]])
        spread = None if error is None else (fine - error, fine + error)
        look.line_with_spread(axes, line.middles, fine, spread, **line.style)
        labels.append(look.EndLabel(line.label, line.style["color"], float(fine[-1])))
    axes.axhline(0.0, **reference.style, linewidth=1.2)
    low, high = axes.get_ylim()
    axes.set_ylim(max(low, -0.25), min(high, 0.25))
    _finish(axes, length, train_length, labels)
    title = f"the same, against {reference.label}"
    look.finish_axes(axes, title=title, xlabel=_POSITION, ylabel="difference of the loss (nats)")


def _line(name: str, window: int | None, found: Mapping[int, PositionEntry]) -> _Line:
    """Bins of the stored positions; results of older versions have only their buckets."""
    full = {
        seed: binned(entry.by_position)
        for seed, entry in found.items()
        if len(entry.by_position) == entry.length
    }
    if full:
        middles = next(iter(full.values()))[0]
        return _Line(
            name, window, middles, np.array([own for _, own in full.values()]), tuple(full)
        )
    first = next(iter(found.values())).buckets
    same = {seed: item.buckets for seed, item in found.items() if len(item.buckets) == len(first)}
    middles = np.array([math.sqrt((b.start + 1) * max(b.end, b.start + 1)) for b in first])
    losses = np.array([[b.loss for b in own] for own in same.values()])
    return _Line(name, window, middles, losses, tuple(same))


def _panel(
    axes: Axes, lines: Sequence[_Line], length: int, train_length: int | None, title: str
) -> None:
    labels = []
    most = max(len(line.seeds) for line in lines)
    for line in lines:
        color = line.style["color"]
        axes.plot(line.middles, _ppl(line.losses.mean(axis=0)), color=color, lw=0.7, alpha=0.35)
        # Each seed has its own texts, so that the error is the spread of both.
        fine, error = _mean_and_error(line.losses)
        spread = None if error is None else (_ppl(fine - error), _ppl(fine + error))
        look.line_with_spread(
            axes, line.middles, _ppl(fine), spread, label=line.label, **line.style
        )
        fewer = f" ({len(line.seeds)} of {most} seeds)" if len(line.seeds) < most else ""
        labels.append(look.EndLabel(line.label + fewer, color, float(_ppl(fine)[-1])))
    axes.set_ylim(*_frame(lines))
    _finish(axes, length, train_length, labels)
    look.finish_axes(axes, title=title, xlabel=_POSITION, ylabel="perplexity")


def _mean_and_error(losses: FloatArray) -> tuple[FloatArray, FloatArray | None]:
    """Over seeds, smoothed; the buckets of older versions are wide as they are."""
    smooth = smoothed if losses.shape[1] == BINS else np.asarray
    error = losses.std(axis=0, ddof=1) / math.sqrt(len(losses)) if len(losses) > 1 else None
    return smooth(losses.mean(axis=0)), None if error is None else smooth(error)


def _finish(
    axes: Axes, length: int, train_length: int | None, labels: Sequence[look.EndLabel]
) -> None:
    axes.set_xlim(0, length)
    axes.xaxis.set_major_locator(MaxNLocator(5))
    axes.xaxis.set_major_formatter("{x:,.0f}")
    look.mark_train_length(axes, train_length)
    look.direct_labels(axes, labels)


def _ppl(losses: FloatArray) -> FloatArray:
    return np.exp(np.minimum(losses, 700.0))


def _frame(lines: Sequence[_Line]) -> tuple[float, float]:
    """Everything that matters: from the best to the first bins, explosions cut off."""
    values = np.concatenate([_ppl(line.losses.mean(axis=0)) for line in lines])
    low = float(values.min())
    high = min(float(np.percentile(values, 98)) * 1.05, 2.5 * float(np.median(values)))
    return low * 0.97, max(high, low * 1.2)
