"""The look of all figures, and writing them in every format."""

from __future__ import annotations

import base64
import io
import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib as mpl
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import LogLocator, NullLocator

from megatron.neox_arguments.catalogue import canonical_method

_STYLE: dict[Any, Any] = {
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 11,
    "axes.titlesize": 12,
    "axes.titleweight": "bold",
    "axes.labelsize": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#444444",
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#DDDDDD",
    "grid.linewidth": 0.7,
    "legend.frameon": False,
    "legend.fontsize": 10,
    "lines.linewidth": 1.9,
    "lines.markersize": 5.5,
    "xtick.color": "#333333",
    "ytick.color": "#333333",
    "svg.fonttype": "path",
    "svg.hashsalt": "kerple",
    "pdf.fonttype": 42,
    "figure.dpi": 100,
}


@dataclass(frozen=True)
class LineStyle:
    """How a method is drawn."""

    color: str = "#555555"
    marker: str = "o"
    dashes: str = "-"


# Okabe and Ito's palette, distinguishable with every common colour vision; markers and dashes
# repeat the information for black-and-white print.
_BLUE, _SKY, _ORANGE, _GREEN = "#0072B2", "#56B4E9", "#E69F00", "#009E73"
_VERMILION, _PURPLE, _BLACK, _GREY = "#D55E00", "#CC79A7", "#000000", "#7F7F7F"
DATA_COLORS = (_BLUE, _VERMILION, _GREEN, _PURPLE, _ORANGE, _SKY)
DATA_MARKERS = ("o", "s", "^", "D", "v", "P")

_METHOD_STYLES = {
    "kerple_log": LineStyle(_BLUE, "o"),
    "kerple_power": LineStyle(_SKY, "s", "--"),
    "kerple_log3": LineStyle(_BLACK, "P", "--"),
    "kerple_bias_wht": LineStyle(_GREY, "h", "-."),
    "gauss_bias2": LineStyle(_PURPLE, "p", "-."),
    "gauss_bias3": LineStyle(_GREEN, "*", ":"),
    "gauss_wht1": LineStyle(_ORANGE, "<", ":"),
    "gauss_wht2": LineStyle(_VERMILION, ">", "--"),
    "alibi": LineStyle(_ORANGE, "^"),
    "alibi_learned": LineStyle(_ORANGE, "h", ":"),
    "kerple_power_original": LineStyle(_ORANGE, "v", "--"),
    "rpe": LineStyle(_GREEN, "D"),
    "sandwich": LineStyle(_BLACK, "d", ":"),
    "kerple_inkling": LineStyle(_BLUE, "D", "--"),
    "bam": LineStyle(_SKY, "o", ":"),
    "bam_ssmax": LineStyle(_SKY, "D", "-."),
    "ape": LineStyle(_ORANGE, "o", "-."),
    "fire": LineStyle(_GREY, "D", "--"),
    "inkling": LineStyle(_PURPLE, "s"),
    "cable": LineStyle(_GREEN, "P", "--"),
    "rotary": LineStyle(_VERMILION, "v"),
    "xpos": LineStyle(_VERMILION, "p", "-."),
    "sinusoidal": LineStyle(_PURPLE, "X"),
    "learned": LineStyle(_GREY, "x", ":"),
    "none": LineStyle(_BLACK, "+", "-."),
}


_OWN_STYLES = (
    LineStyle(), LineStyle(_PURPLE, "s", "--"), LineStyle(_BLACK, "X", "-."),
    LineStyle(_SKY, "P", ":"),
)  # fmt: skip
_own_methods: dict[str, LineStyle] = {}


def line_style(method: str) -> LineStyle:
    """How a method is drawn in every figure; the user's own differ in the order they appear."""
    name = canonical_method(method)
    if name in _METHOD_STYLES:
        return _METHOD_STYLES[name]
    return _own_methods.setdefault(name, _OWN_STYLES[len(_own_methods) % len(_OWN_STYLES)])


def in_lines(text: str, width: int = 24) -> str:
    """A long name in several lines, cut between its words: at spaces, `_`, `.` and capitals."""
    lines = [""]
    for part in re.findall(r"[A-Z]?[^A-Z_.\s]*[_.\s]*|.", text):
        if lines[-1] and len(lines[-1]) + len(part.rstrip()) > width:
            lines.append("")
        lines[-1] += part
    return "\n".join(line.rstrip(" ") for line in lines)


class Plot(NamedTuple):
    """A figure, or None where there is nothing to draw."""

    key: str
    title: str
    caption: str
    figure: Figure | None


@dataclass(frozen=True)
class PlotFile:
    """A figure on disk and for the page."""

    key: str
    title: str
    caption: str
    svg: str

    @property
    def inches(self) -> float:
        """Its width: panels beside each other, which a phone scrolls, have more than eight."""
        width = re.search(r'width="([\d.]+)pt"', self.svg)
        return float(width[1]) / 72 if width else 0.0

    @property
    def data_uri(self) -> str:
        encoded = base64.b64encode(self.svg.encode("utf-8")).decode("ascii")
        return f"data:image/svg+xml;base64,{encoded}"


@contextmanager
def figure_style() -> Iterator[None]:
    """Also a decorator, for the functions that draw a figure."""
    with mpl.rc_context(_STYLE):
        yield


def new_figure(columns: int, rows: int = 1, *, width: float = 4.4, height: float = 3.5) -> Figure:
    """A figure for `columns` x `rows` panels, without touching pyplot's global state."""
    size = max(width * columns + 1.7, 6.2), height * rows
    # Rows apart by more than the default: a title must not touch the label above it.
    figure = Figure(figsize=size, layout=ConstrainedLayoutEngine(h_pad=0.1))
    FigureCanvasAgg(figure)
    return figure


def data_color(index: int) -> tuple[str, str]:
    """Colour and marker of the i-th data set."""
    return DATA_COLORS[index % len(DATA_COLORS)], DATA_MARKERS[index % len(DATA_MARKERS)]


def new_panels(
    columns: int, rows: int = 1, *, width: float = 4.4, height: float = 3.5, sharey: bool = False
) -> tuple[Figure, Any]:
    """A figure and its panels, `panels[row][column]`."""
    figure = new_figure(columns, rows, width=width, height=height)
    return figure, figure.subplots(rows, columns, squeeze=False, sharey=sharey)


def line_with_spread(
    axes: Axes, x: Any, values: Any, spread: tuple[Any, Any] | None, **look: Any
) -> None:
    """A line, and the area between the two bounds of its spread in the same colour."""
    axes.plot(x, values, **look)
    if spread is not None:
        axes.fill_between(x, *spread, color=look["color"], alpha=0.15, linewidth=0)


def finish_axes(axes: Axes, *, title: str, xlabel: str, ylabel: str) -> None:
    axes.set_title(in_lines(title, 40), loc="left")
    axes.set_xlabel(xlabel)
    axes.set_ylabel(ylabel)


@dataclass(frozen=True)
class EndLabel:
    """A name for a line, written where the line ends."""

    text: str
    color: str | tuple[float, ...]
    height: float
    """The line's last value, in the units of the vertical axis."""


_LABEL_GAP = 0.062
"""Least distance of two labels, as a share of the panel's height."""


def direct_labels(axes: Axes, labels: Sequence[EndLabel]) -> None:
    """Names at the right ends of lines, pushed apart; an arrow where a line leaves the panel.

    Call it when the limits are final.
    """
    to_panel = axes.transData + axes.transAxes.inverted()
    x = axes.get_xlim()[1]
    wanted = []
    for label in labels:
        height = float(to_panel.transform((x, label.height))[1])
        outside = " ↑" if height > 1.001 else " ↓" if height < -0.001 else ""
        wanted.append((min(max(height, 0.0), 1.0), label, outside))
    wanted.sort(key=lambda item: item[0])
    lines = [1 + in_lines(label.text).count("\n") for _, label, _ in wanted]
    heights = _spread([height for height, _, _ in wanted], lines)
    for height, (_, label, outside) in zip(heights, wanted, strict=True):
        axes.text(
            1.015,
            height,
            in_lines(label.text) + outside,
            transform=axes.transAxes,
            color=label.color,
            va="center",
            ha="left",
            fontsize=9.5,
            fontweight="bold",
        )


def _spread(heights: Sequence[float], lines: Sequence[int]) -> list[float]:
    """Rising heights with the gap between them that their lines need, moved as little as is simple.

    `lines` is how many lines of text stand at each height.
    """
    gaps = [_LABEL_GAP * (own + after) / 2 for own, after in itertools.pairwise(lines)]
    placed: list[float] = []
    for i, height in enumerate(heights):
        placed.append(max(height, placed[-1] + gaps[i - 1]) if placed else height)
    overflow = max(0.0, placed[-1] - 1.0) if placed else 0.0
    for i in range(len(placed) - 1, -1, -1):
        limit = placed[i + 1] - gaps[i] if i + 1 < len(placed) else placed[i] - overflow
        placed[i] = min(placed[i], limit)
    return placed


def figure_legend(figure: Figure, panels: Sequence[Axes]) -> None:
    """One for all panels, beside them and never over their curves."""
    found: dict[str, Artist] = {}
    for axes in panels:
        handles, labels = axes.get_legend_handles_labels()
        found |= dict(zip(labels, handles, strict=True))
    names = [in_lines(name) for name in found]
    figure.legend(list(found.values()), names, loc="outside right upper")


def mark_train_length(axes: Axes, train_length: int | None, *, below: bool = False) -> None:
    """A dotted line where training ended, and the words beside it, at the top or below."""
    if train_length is None:
        return
    axes.axvline(train_length, color="#999999", linestyle=":", linewidth=1.2, zorder=1)
    axes.text(
        train_length,
        0.03 if below else 0.985,
        f" trained at {train_length:,}",
        transform=axes.get_xaxis_transform(),
        color="#777777",
        fontsize=8.5,
        va="bottom" if below else "top",
        ha="left",
    )


def distance_axis(axes: Axes) -> None:
    """The distances drawn, from 1, on a logarithmic axis with so few marks that none touch."""
    axes.set_xscale("log", base=2)
    axes.set_xlim(1, axes.dataLim.x1)
    axes.xaxis.set_major_locator(LogLocator(base=2, numticks=6))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter("{x:g}")


def plain_log_axis(axis: Axis) -> None:
    """Plain numbers on a logarithmic axis, also between the powers of ten if it is short."""
    low, high = axis.get_view_interval()
    ratio = high / low
    if ratio < 4:
        subs: tuple[float, ...] = (1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 7, 8, 9)
    elif ratio < 60:
        subs = (1, 2, 3, 5, 7) if ratio < 12 else (1, 2, 5)
    else:
        subs = (1,)
    axis.set_major_locator(LogLocator(base=10, subs=subs))
    if ratio < 60:
        axis.set_minor_locator(NullLocator())
    axis.set_major_formatter("{x:g}")


def save_figures(plots: Iterable[Plot], directory: Path, prefix: str = "") -> list[PlotFile]:
    """Those that show something, in files with this prefix."""
    return [
        save_figure(plot.figure, directory, prefix + plot.key, plot.title, plot.caption)
        for plot in plots
        if plot.figure is not None
    ]


def save_figure(figure: Figure, directory: Path, key: str, title: str, caption: str) -> PlotFile:
    """Write PDF, PNG and SVG without time stamps, so that equal results give equal files."""
    directory.mkdir(parents=True, exist_ok=True)
    with figure_style():
        # Lay out once: three formats would otherwise repeat the most expensive part.
        figure.canvas.draw()
        figure.set_layout_engine("none")
        figure.savefig(directory / f"{key}.png", dpi=200)
        figure.savefig(directory / f"{key}.pdf", metadata={"CreationDate": None})
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    svg = buffer.getvalue()
    (directory / f"{key}.svg").write_text(svg, encoding="utf-8")
    return PlotFile(key, title, caption, svg)
