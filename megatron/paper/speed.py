"""The training-time tables: seconds per step by method."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from megatron.paper.cells import Cell, Rounding
from megatron.paper.methods import method
from megatron.paper.published import published_seconds_per_step
from megatron.paper.statistics import summarize
from megatron.paper.tables import Block, Column, Entry, Row, Table

__all__ = ["published_speed_table", "speed_table"]


def speed_table(
    key: str,
    caption: str,
    methods: Sequence[str],
    seconds: Mapping[str, Mapping[int, float]],
    *,
    beside: bool = True,
) -> Table:
    """Mean seconds per step over seeds, with the paper's A100 beside."""
    paper = published_seconds_per_step() if beside else {}
    cells = {}
    for name in methods:
        summary = summarize(seconds.get(name, {}).values())
        cells[name] = Cell(summary.mean, summary.std, summary.seeds)
    return _table(key, caption, methods, cells, paper)


def published_speed_table(key: str, caption: str, methods: Sequence[str]) -> Table:
    """The paper's own numbers through the same layout."""
    paper = published_seconds_per_step()
    cells = {name: Cell(paper.get(name)) for name in methods}
    return _table(key, caption, methods, cells, {})


def _table(
    key: str,
    caption: str,
    methods: Sequence[str],
    cells: Mapping[str, Cell],
    paper: Mapping[str, float],
) -> Table:
    rounding = Rounding.THREE_DECIMALS
    entries = tuple(
        Entry(cells[name], rounding, 3, Cell(paper[name]) if name in paper else None)
        for name in methods
    )
    columns = tuple(Column(method(name).column, method(name).group) for name in methods)
    return Table(key, caption, (Block("", "", columns, (Row("sec/step", entries),)),))
