"""Watch training runs: loss, learning rate, tokens/s, kernels and evaluation cells.

kerple watch RUN [RUN ...] [--once] [--serve [PORT]]

A RUN is the `save` of a training, running or finished. Only files are read: its metrics.jsonl, its
manifest.json and its results. On a terminal the view is redrawn every few seconds, else it is plain
text. --serve shows the same on a page of this machine alone, with curves.
"""

from __future__ import annotations

import json
import sys
import threading
import time
import warnings
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron.atomic_files import read_json
from megatron.commands.plot_run import RunMetrics, read_run
from megatron.errors import ConfigError, DataError
from megatron.paper.run_files import finite
from megatron.terminal import command_parser

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

SHOWN = {
    "loss": "loss",
    "valid_loss": "validation loss",
    "lr": "learning rate",
    "grad_norm": "gradient norm",
    "tokens_per_second": "tokens/s",
}
BARS = "▁▂▃▄▅▆▇█"
WIDTH = 24  # characters of a curve
MAX_HEADS, MAX_CELLS, MAX_POINTS = 16, 40, 2000
SILENT = 600.0  # seconds without a new metric after which a run is not called running
DEFAULT_PORT = 8765
PAGE = Path(__file__).with_name("watch.html")
COUNTS = ("distance", "length", "sequences", "stderr", "tokens")


class Watched:
    """What is known of a run now."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.problem = ""
        self.metrics = RunMetrics(directory.name)
        try:
            with warnings.catch_warnings():  # the last line may be half written
                warnings.simplefilter("ignore")
                self.metrics = read_run(directory)
        except DataError as error:
            if not directory.is_dir():
                raise
            self.problem = str(error)
        self.tables, self.cells = evaluations(directory)

    @property
    def step(self) -> int:
        return max((points[-1][0] for points in self.metrics.values.values()), default=0)

    @property
    def state(self) -> str:
        """`step 40 of 100, running`, with the time left at the last steps' speed."""
        from megatron.training.metrics import finished_at  # imports torch

        total = finite(self.metrics.config.get("train_iters"))
        where = f"step {self.step:,}" + (f" of {total:,.0f}" if total else "")
        if finished_at(self.directory) is not None:
            return f"{where}, finished"
        written = self.metrics.values.get("time", [(0, 0.0)])[-1][1]
        if self.problem or time.time() - written > SILENT:
            silent = f"{where}, no new metrics for {SILENT / 60:.0f} minutes"
            return silent if self.step else "not begun"
        seconds = self.metrics.values.get("step_seconds", [(0, 0.0)])[-1][1]
        left = max((total or 0) - self.step, 0) * seconds
        return f"{where}, running, about {left / 60:,.0f} minutes left"


def evaluations(directory: Path) -> tuple[dict[str, str], dict[str, float]]:
    """The table of each finished result by its file's name; numbers of those under way."""
    folder = directory / "results"
    tables: dict[str, str] = {}
    cells: dict[str, float] = {}
    for path in sorted([*folder.glob("*.json"), *folder.glob("cache/*.part")]):
        content = read_json(path) or {}
        inner = content.get("results", content.get("cells"))
        if not isinstance(inner, dict):
            continue
        if path.suffix == ".part":
            cells |= dict(_numbers(f"{path.stem} (under way)", inner))
        elif table := _table(str(content.get("task")), inner):
            tables[path.stem] = table
        else:
            cells |= dict(_numbers(path.stem, inner))
    return tables, cells


def _table(task: str, results: dict[str, Any]) -> str:
    """As its evaluation printed it; empty for a task not of this package, or another format."""
    from megatron.evaluation.task_registry import own_tasks  # imports torch

    try:
        return own_tasks()[task].table(results)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
        return ""


def _numbers(name: str, value: Any) -> Iterator[tuple[str, float]]:
    """What was measured, without counts of what it was measured on."""
    number = finite(value)
    if number is not None:
        yield name, number
    for key, item in value.items() if isinstance(value, dict) else ():
        if key not in COUNTS:
            yield from _numbers(f"{name} {key}", item)


# In the terminal.


def curve(values: Sequence[float], width: int = WIDTH) -> str:
    """Values as bars from their least to their largest, the last at the right."""
    if not values:
        return ""
    count = min(width, len(values))
    picked = [values[(i + 1) * len(values) // count - 1] for i in range(count)]
    low, high = min(picked), max(picked)
    scale = (len(BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(BARS[round((value - low) * scale)] for value in picked)


def frame(runs: Sequence[Watched], *, boxed: bool) -> RenderableType:
    """One picture of all runs."""
    from rich.console import Group
    from rich.text import Text

    parts: list[RenderableType] = []
    for run in runs:
        parts.append(Text(f"{run.metrics.name}: {run.state}", style="bold"))
        if run.problem:
            parts.append(Text(run.problem))
        for table in _tables(run, boxed=boxed):
            parts += [table, Text("")]
        for name, text in run.tables.items():
            parts += [Text(name), Text(text), Text("")]
    return Group(*parts)


def _tables(run: Watched, *, boxed: bool) -> Iterator[RenderableType]:
    from rich import box
    from rich.table import Table

    def table(*columns: str) -> Table:
        made = Table(box=box.SIMPLE if boxed else None, pad_edge=False)
        for number, column in enumerate(columns):
            made.add_column(column, justify="left" if number == 0 or not column else "right")
        return made

    curves = table("", "first", "last", "least", "")
    for name, title in SHOWN.items():
        points = [value for _, value in run.metrics.values.get(name, [])]
        if points:
            numbers = (points[0], points[-1], min(points))
            curves.add_row(title, *map(_short, numbers), curve(points))
    if curves.row_count:
        yield curves
    for owner in (run.metrics, *run.metrics.shared.values()):
        if owner.kernels:
            yield _kernel_table(table, owner, "head" if owner is run.metrics else owner.name)
    if run.cells:
        cells = table("evaluation", "value")
        for name, value in list(run.cells.items())[-MAX_CELLS:]:
            cells.add_row(name, _short(value))
        yield cells


def _kernel_table(table: Any, metrics: RunMetrics, title: str) -> RenderableType:
    """Each parameter of each head: its first and its last value."""
    first, last = metrics.kernels[0][1], metrics.kernels[-1][1]
    names = list(last)
    made: RenderableType = table(title, *(word for name in names for word in (name, "was", "")))
    heads = len(last[names[0]]) if names else 0
    for head in range(min(heads, MAX_HEADS)):
        row = [str(head + 1)]
        for name in names:
            moved = [kernel[name][head] for _, kernel in metrics.kernels]
            row += [_short(last[name][head]), _short(first[name][head]), curve(moved, WIDTH // 3)]
        made.add_row(*row)  # type: ignore[union-attr]
    return made


def _short(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _redraw(console: Console, folders: Sequence[Path], seconds: float) -> None:
    from rich.live import Live

    def now() -> RenderableType:
        return frame([Watched(folder) for folder in folders], boxed=True)

    with Live(now(), console=console, screen=False, auto_refresh=False) as live:
        while True:
            time.sleep(seconds)
            live.update(now(), refresh=True)


# On a page of this machine.


def as_data(runs: Sequence[Watched]) -> list[dict[str, Any]]:
    """What the page draws."""
    return [
        {
            "name": run.metrics.name,
            "state": run.state,
            "problem": run.problem,
            "curves": {
                title: _thinned(run.metrics.values.get(name, [])) for name, title in SHOWN.items()
            },
            "kernels": _kernel_curves(run.metrics)
            | {
                f"{owner.name}: {name}": curves
                for owner in run.metrics.shared.values()
                for name, curves in _kernel_curves(owner).items()
            },
            "tables": run.tables,
            "cells": list(run.cells.items())[-MAX_CELLS:],
        }
        for run in runs
    ]


def _kernel_curves(metrics: RunMetrics) -> dict[str, list[Any]]:
    """For each parameter a curve per head."""
    names = list(metrics.kernels[0][1]) if metrics.kernels else []
    return {
        name: [
            _thinned([(step, kernel[name][head]) for step, kernel in metrics.kernels])
            for head in range(min(len(metrics.kernels[0][1][name]), MAX_HEADS))
        ]
        for name in names
    }


def _thinned(points: Sequence[tuple[int, float]]) -> Sequence[tuple[int, float]]:
    every = -(-len(points) // MAX_POINTS) or 1
    return [*points[:-1:every], *points[-1:]]


def server(folders: Sequence[Path], port: int) -> ThreadingHTTPServer:
    """Answers this machine only (loopback): the page, and the numbers as JSON."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            host = (self.headers.get("Host") or "").rpartition(":")[0]
            if host not in ("127.0.0.1", "localhost"):  # DNS rebinding
                self.send_error(403)
            elif self.path == "/":
                self._answer("text/html; charset=utf-8", PAGE.read_bytes())
            elif self.path == "/runs.json":
                try:
                    found = as_data([Watched(folder) for folder in folders])
                except DataError as error:  # a folder was moved away
                    self.send_error(404, str(error))
                else:
                    self._answer("application/json", json.dumps(found).encode())
            else:
                self.send_error(404)

        def _answer(self, kind: str, content: bytes) -> None:
            self.send_response(200)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(content)))
            self.send_header("Cache-Control", "no-store")
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: Any) -> None:
            """No line for each request."""

    try:
        return ThreadingHTTPServer(("127.0.0.1", port), Handler)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"--serve {port}: {reason}. Choose another port.") from error


def main(argv: Sequence[str] | None = None) -> int:
    parser = command_parser("kerple watch", __doc__ or "")
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="a training's `save`")
    parser.add_argument("--once", action="store_true", help="print one frame and end")
    parser.add_argument(
        "--seconds", type=float, default=3.0, help="seconds between two frames (default: 3)"
    )
    parser.add_argument(
        "--serve",
        nargs="?",
        type=int,
        const=DEFAULT_PORT,
        metavar="PORT",
        help=f"show a web page at 127.0.0.1 instead (default port: {DEFAULT_PORT}; 0: a free one)",
    )
    options = parser.parse_args(argv)
    if not 0 <= options.seconds < threading.TIMEOUT_MAX:
        parser.error(f"--seconds {options.seconds}: a time of 0 or more")
    watched = [Watched(folder) for folder in options.runs]  # a folder that is missing ends here
    if options.serve is not None:
        with server(options.runs, options.serve) as served:
            print(f"http://127.0.0.1:{served.server_address[1]}/ (Ctrl-C ends it)", flush=True)
            served.serve_forever()
    from rich.console import Console

    console = Console(highlight=False, width=None if sys.stdout.isatty() else 100)
    if options.once or not console.is_terminal:
        console.print(frame(watched, boxed=console.is_terminal))
        return 0
    _redraw(console, options.runs, max(options.seconds, 0.5))
    return 0
