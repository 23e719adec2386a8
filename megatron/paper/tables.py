"""Tables in the paper's layouts, from our results or from the paper's own cells.

A `TableSpec` says what a table shows, a function gives each cell, and `lay_out` puts them in
place. The paper's cells and ours take the same way, so a test can compare the printed table
with the paper's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from enum import Enum

from megatron.paper.cells import Cell, Rounding, cell_text, reference_decimals
from megatron.paper.methods import method
from megatron.paper.published import published_cell
from megatron.paper.statistics import compare_paired, summarize

__all__ = [
    "REFERENCE_METHOD",
    "Block",
    "CellSource",
    "Column",
    "DataSet",
    "Entry",
    "Layout",
    "Point",
    "Row",
    "Table",
    "TableSpec",
    "lay_out",
    "measured_cells",
    "published_source",
]

REFERENCE_METHOD = "kerple_log"
"""Every other method is tested against this one, as in the paper."""


class Layout(str, Enum):
    STACKED = "stacked"
    """One block per data set, methods as columns, lengths as rows (main, Gaussian, long, large)."""
    SIDE_BY_SIDE = "side_by_side"
    """One block, data sets as column groups (complicated kernels)."""
    BY_METHOD = "by_method"
    """Methods as rows, lengths as columns grouped by training length (WikiText-103)."""


@dataclass(frozen=True)
class DataSet:
    """A data set of a table and the paper's data set that it is shown beside, if any."""

    name: str
    title: str
    published: str | None = None


@dataclass(frozen=True)
class Point:
    """A model trained at one length and evaluated at another."""

    train_length: int
    length: int

    @property
    def multiple(self) -> float:
        return self.length / self.train_length


@dataclass(frozen=True)
class TableSpec:
    key: str
    caption: str
    layout: Layout
    methods: tuple[str, ...]
    data: tuple[DataSet, ...]
    points: tuple[Point, ...]
    rounding: Rounding = Rounding.REFERENCE
    integer_methods: tuple[str, ...] = ()
    full_labels: bool = False
    mark_best: bool = True
    mark_significance: bool = True
    published_table: str | None = None
    published_train_length: int = 512


CellSource = Callable[[str, str, Point], Cell | None]
"""(data set, method, point) -> cell, or None if there is no such result."""


@dataclass(frozen=True)
class Entry:
    """A cell in its place: with its rounding, and the paper's cell beside it."""

    cell: Cell
    rounding: Rounding
    decimals: int
    published: Cell | None = None

    def text(self, plus_minus: str = " ± ", missing: str = "—") -> str:
        return cell_text(self.cell, self.rounding, self.decimals, plus_minus, missing)

    def published_text(self) -> str:
        if self.published is None:
            return ""
        return self.published.printed or cell_text(self.published, self.rounding, self.decimals)


@dataclass(frozen=True)
class Column:
    label: str
    group: str = ""


@dataclass(frozen=True)
class Row:
    label: str
    entries: tuple[Entry, ...]


@dataclass(frozen=True)
class Block:
    title: str
    corner: str
    columns: tuple[Column, ...]
    rows: tuple[Row, ...]


@dataclass(frozen=True)
class Table:
    key: str
    caption: str
    blocks: tuple[Block, ...]

    @property
    def entries(self) -> list[Entry]:
        return [entry for block in self.blocks for row in block.rows for entry in row.entries]

    @property
    def complete(self) -> bool:
        return all(entry.cell.present or entry.cell.note for entry in self.entries)


def published_source(spec: TableSpec) -> CellSource:
    """The paper's cells at the same multiple of the training length."""

    def source(data: str, name: str, point: Point) -> Cell | None:
        paper_data = next((item.published for item in spec.data if item.name == data), None)
        if spec.published_table is None or paper_data is None:
            return None
        if spec.layout is Layout.BY_METHOD:
            train_length, length = point.train_length, point.length
        else:
            train_length = spec.published_train_length
            length = round(point.multiple * train_length)
        return published_cell(spec.published_table, paper_data, train_length, length, name)

    return source


def measured_cells(
    spec: TableSpec, values: Callable[[str, str, Point], Mapping[int, float]]
) -> CellSource:
    """Cells from perplexities by seed: mean, deviation, best in bold, dagger against log."""

    def summary_cell(data: str, name: str, point: Point) -> Cell:
        summary = summarize(values(data, name, point).values())
        return Cell(summary.mean, summary.std, summary.seeds)

    def source(data: str, name: str, point: Point) -> Cell | None:
        cell = summary_cell(data, name, point)
        if not cell.present:
            return None
        if spec.mark_best:
            # Seeds differ more than methods do: a mean over fewer seeds is never called best.
            rivals = [summary_cell(data, other, point) for other in spec.methods]
            most = max(rival.seeds for rival in rivals)
            best = min(mean for rival, mean in _with_means(rivals) if rival.seeds == most)
            cell = replace(cell, bold=cell.seeds == most and cell.mean == best)
        if spec.mark_significance and name != REFERENCE_METHOD:
            test = compare_paired(values(data, REFERENCE_METHOD, point), values(data, name, point))
            cell = replace(cell, dagger=test.reference_is_better(), p_value=test.p_value)
        return cell

    return source


def _with_means(cells: Iterable[Cell]) -> list[tuple[Cell, float]]:
    return [(cell, cell.mean) for cell in cells if cell.mean is not None]


def lay_out(
    spec: TableSpec, source: CellSource, beside: CellSource | None = None, missing_note: str = ""
) -> Table:
    """Put every cell in its place. `beside` gives the paper's cells to print next to ours."""
    placed = _Placer(spec, source, beside, missing_note)
    if spec.layout is Layout.STACKED:
        blocks = tuple(_stacked_block(spec, placed, data) for data in spec.data)
    elif spec.layout is Layout.SIDE_BY_SIDE:
        blocks = (_side_by_side_block(spec, placed),)
    else:
        blocks = tuple(_by_method_block(spec, placed, data) for data in spec.data)
    return Table(spec.key, spec.caption, blocks)


class _Placer:
    """Looks each cell up once and knows the decimals of its data set."""

    def __init__(
        self, spec: TableSpec, source: CellSource, beside: CellSource | None, missing_note: str
    ) -> None:
        self._spec = spec
        self._missing_note = missing_note
        self._ours = self._collect(source)
        self._paper = self._collect(beside) if beside else {}
        self._decimals = {data.name: self._decimals_of(self._ours, data) for data in spec.data}

    def _collect(self, source: CellSource) -> dict[tuple[str, str, Point], Cell | None]:
        spec = self._spec
        return {
            (data.name, name, point): source(data.name, name, point)
            for data in spec.data
            for name in spec.methods
            for point in spec.points
        }

    def _decimals_of(
        self, cells: Mapping[tuple[str, str, Point], Cell | None], data: DataSet
    ) -> int:
        own: Iterable[Cell] = (
            cell for key, cell in cells.items() if key[0] == data.name and cell is not None
        )
        return reference_decimals(own)

    def entry(self, data: DataSet, name: str, point: Point) -> Entry:
        key = (data.name, name, point)
        rounding = self._spec.rounding
        if name in self._spec.integer_methods:
            rounding = Rounding.INTEGER
        note = "-" if point.length < point.train_length else self._missing_note
        return Entry(
            self._ours[key] or Cell(note=note),
            rounding,
            self._decimals[data.name],
            self._paper.get(key),
        )


def _column(spec: TableSpec, name: str, group: str | None = None) -> Column:
    shown = method(name)
    if spec.full_labels:
        return Column(shown.label, group or "")
    return Column(shown.column, shown.group if group is None else group)


def _stacked_block(spec: TableSpec, placed: _Placer, data: DataSet) -> Block:
    rows = tuple(
        Row(str(point.length), tuple(placed.entry(data, name, point) for name in spec.methods))
        for point in spec.points
    )
    return Block(data.title, "Extrp.", tuple(_column(spec, name) for name in spec.methods), rows)


def _side_by_side_block(spec: TableSpec, placed: _Placer) -> Block:
    columns = tuple(
        _column(spec, name, group=data.title) for data in spec.data for name in spec.methods
    )
    rows = tuple(
        Row(
            str(point.length),
            tuple(placed.entry(data, name, point) for data in spec.data for name in spec.methods),
        )
        for point in spec.points
    )
    return Block("", "Extrp.", columns, rows)


def _by_method_block(spec: TableSpec, placed: _Placer, data: DataSet) -> Block:
    columns = tuple(
        Column(str(point.length), f"train length {point.train_length}") for point in spec.points
    )
    rows = tuple(
        Row(method(name).label, tuple(placed.entry(data, name, point) for point in spec.points))
        for name in spec.methods
    )
    return Block(data.title, "Extrp. length", columns, rows)
