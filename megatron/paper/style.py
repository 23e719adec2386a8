"""The look of all figures, and writing them in every format."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

__all__ = [
    "PlotFile",
    "data_color",
    "figure_style",
    "finish_axes",
    "new_figure",
    "plain_log_axis",
    "save_figure",
]

DATA_COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00")
DATA_MARKERS = ("o", "s", "^", "D", "v")

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
class PlotFile:
    """A figure on disk and for the page."""

    key: str
    title: str
    caption: str
    svg: str

    @property
    def data_uri(self) -> str:
        encoded = base64.b64encode(self.svg.encode("utf-8")).decode("ascii")
        return f"data:image/svg+xml;base64,{encoded}"


@contextmanager
def figure_style() -> Iterator[None]:
    with mpl.rc_context(_STYLE):
        yield


def new_figure(columns: int, rows: int = 1, *, width: float = 4.4, height: float = 3.5) -> Figure:
    """A figure for `columns` x `rows` panels, without touching pyplot's global state."""
    figure = Figure(figsize=(max(width * columns + 1.7, 6.2), height * rows), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def data_color(index: int) -> tuple[str, str]:
    """Colour and marker of the i-th data set."""
    return DATA_COLORS[index % len(DATA_COLORS)], DATA_MARKERS[index % len(DATA_MARKERS)]


def finish_axes(axes: Axes, *, title: str, xlabel: str, ylabel: str) -> None:
    axes.set_title(title, loc="left")
    axes.set_xlabel(xlabel)
    axes.set_ylabel(ylabel)


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
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


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
