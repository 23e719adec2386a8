"""Tables in the paper's layouts, from our results or from the paper's own cells.

A `TableSpec` describes a table, a function gives each cell, and `lay_out` arranges them. The
paper's cells and ours use the same code, so a test can compare the printed table with the paper's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

from megatron.evaluation.tasks import GroupView
from megatron.neox_arguments.catalogue import label_of
from megatron.paper.cells import (
    ALPHA,
    FEWEST_SEEDS,
    MISSING,
    Cell,
    PairedTest,
    cell_text,
    compare_paired,
    published_cells,
    published_seconds_per_step,
    reference_decimals,
    summarize,
)
from megatron.paper.run_results import ResultSet, beyond_window
from megatron.paper.suite_file import (
    BESIDE,
    Contrast,
    DataSet,
    Layout,
    Point,
    Rounding,
    TableSpec,
)

DAGGER = "†"
REFERENCE_METHOD = "kerple_log"
"""Every other method is tested against this one, as in the paper."""

CellSource = Callable[[str, str, Point], Cell | None]
"""(data set, method, point) -> cell, or None if there is no such result."""


@dataclass(frozen=True)
class Entry:
    """A cell in its place: with its rounding, and the paper's cell beside it."""

    cell: Cell
    rounding: Rounding = Rounding.MAGNITUDE
    decimals: int = 2
    """Of deviations, where they follow the best mean beside them."""
    published: Cell | None = None

    def text(self, plus_minus: str = " ± ", missing: str = MISSING) -> str:
        return cell_text(self.cell, self.rounding, self.decimals, plus_minus, missing)

    def published_text(self) -> str:
        paper = self.published
        if paper is None:
            return ""
        text = paper.printed or cell_text(paper, self.rounding, self.decimals)
        return text + (DAGGER if paper.dagger else "")


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
    beside: str = BESIDE
    """Said where the paper's numbers are shown beside ours."""

    @property
    def entries(self) -> list[Entry]:
        return [entry for block in self.blocks for row in block.rows for entry in row.entries]

    @property
    def published(self) -> bool:
        """Whether any number of the paper stands beside ours."""
        return any(entry.published is not None for entry in self.entries)


def published_source(spec: TableSpec) -> CellSource:
    """The paper's cells at the same multiple of the training length."""

    def source(data: str, name: str, point: Point) -> Cell | None:
        paper_data = next((item.published for item in spec.data if item.name == data), None)
        if spec.published is None or paper_data is None:
            return None
        if spec.layout is Layout.BY_METHOD:
            train_length, length = point.train_length, point.length
        else:
            train_length = spec.published_train_length
            length = round(point.multiple * train_length)
        key = (spec.published, paper_data, train_length, length, name)
        return published_cells().get(key)

    return source


def measured_cells(
    spec: TableSpec, values: Callable[[str, str, Point], Mapping[int, float]]
) -> CellSource:
    """Cells from perplexities by seed: mean, deviation, best in bold, dagger against log."""

    def source(data: str, name: str, point: Point) -> Cell | None:
        cell = summarize(values(data, name, point).values())
        if not cell.present:
            return None
        if spec.mark_best:
            # Seeds differ more than methods do: a mean over fewer seeds is never called best, and
            # where it is the lowest, no other is.
            rivals = [summarize(values(data, other, point).values()) for other in spec.methods]
            most = max(rival.seeds for rival in rivals)
            best = min(rival.mean for rival in rivals if rival.mean is not None)
            cell = replace(cell, bold=cell.seeds == most and cell.mean == best)
        if spec.mark_significance and name != REFERENCE_METHOD:
            test = compare_paired(values(data, REFERENCE_METHOD, point), values(data, name, point))
            cell = replace(cell, dagger=test.reference_is_better, p_value=test.p_value)
        return cell

    return source


def lay_out(spec: TableSpec, source: CellSource, beside: CellSource | None = None) -> Table:
    """Put every cell in its place. `beside` gives the paper's cells to print next to ours."""
    placed = _Placer(spec, source, beside)
    if spec.layout is Layout.SIDE_BY_SIDE:
        blocks = [_by_length_block(placed, "", spec.data)]
    elif spec.layout is Layout.STACKED:
        blocks = [_by_length_block(placed, data.title, [data]) for data in spec.data]
    else:
        blocks = [_by_method_block(placed, data) for data in spec.data]
    table = Table(spec.key, spec.caption, tuple(blocks), spec.beside)
    if all(entry.cell.seeds == 0 for entry in table.entries):
        return table  # the paper's own cells, or nothing
    return replace(table, caption=" ".join([_sentence(spec.caption), *_notes(table)]))


def _sentence(caption: str) -> str:
    return caption if caption.endswith(".") else f"{caption}."


def _notes(table: Table) -> list[str]:
    """What the numbers and marks of this very table are."""
    cells = [entry.cell for entry in table.entries if entry.cell.seeds]
    few, many = min(cell.seeds for cell in cells), max(cell.seeds for cell in cells)
    if many == 1:
        notes = ["One seed."]
    else:
        count = str(many) if few == many else f"{few} to {many}"
        notes = [f"Mean ± standard deviation over {count} seeds."]
    if any(cell.bold for cell in cells):
        notes.append("Bold: the best of its row.")
    if any(cell.p_value is not None for cell in cells):
        notes.append(
            f"†: {label_of(REFERENCE_METHOD)} is significantly better (paired two-sided t-test "
            f"over seeds, α={ALPHA:g})."
        )
    return notes


class _Placer:
    """Looks each cell up once, with the decimals of its data set."""

    def __init__(self, spec: TableSpec, source: CellSource, beside: CellSource | None) -> None:
        self.spec = spec
        places = [*product([data.name for data in spec.data], spec.methods, spec.points)]
        self._ours = {place: found for place in places if (found := source(*place)) is not None}
        self._paper = {place: beside(*place) for place in places} if beside else {}
        self._decimals = {
            data.name: reference_decimals(c for at, c in self._ours.items() if at[0] == data.name)
            for data in spec.data
        }
        # The paper's daggers stand where ours could: not beside a single seed.
        measured = [cell for cell in self._ours.values() if cell.seeds]
        self._daggers = not measured or any(cell.p_value is not None for cell in measured)

    def has_results(self, data: DataSet, name: str) -> bool:
        return any((data.name, name, point) in self._ours for point in self.spec.points)

    def entry(self, data: DataSet, name: str, point: Point) -> Entry:
        place = (data.name, name, point)
        integer = name in self.spec.integer_methods
        paper = self._paper.get(place)
        if paper is not None and not self._daggers:
            paper = replace(paper, dagger=False)
        note = "-" if point.length < point.train_length else ""
        return Entry(
            self._ours.get(place) or Cell(note=note),
            Rounding.INTEGER if integer else self.spec.rounding,
            self._decimals[data.name],
            paper,
        )


def _by_length_block(placed: _Placer, title: str, data: Sequence[DataSet]) -> Block:
    """Methods as columns, under the names of their data sets if these are not the title."""
    places = [(item, name) for item in data for name in placed.spec.methods]
    if placed.spec.only_measured:
        places = [place for place in places if placed.has_results(*place)]
    columns = tuple(Column(label_of(name), "" if title else item.title) for item, name in places)
    rows = tuple(
        Row(str(point.length), tuple(placed.entry(*place, point) for place in places))
        for point in placed.spec.points
    )
    return Block(title, "length", columns, rows)


def _by_method_block(placed: _Placer, data: DataSet) -> Block:
    points = placed.spec.points
    columns = tuple(
        Column(str(point.length), f"train length {point.train_length}") for point in points
    )
    rows = tuple(
        Row(label_of(name), tuple(placed.entry(data, name, point) for point in points))
        for name in placed.spec.methods
    )
    return Block(data.title, "length", columns, rows)


def group_table(
    key: str,
    view: GroupView,
    methods: Sequence[str],
    values: Callable[[str, str], Mapping[int, Mapping[int, float]]],
) -> Table:
    """A block per group of a task; `values` gives length -> seed -> number of (method, group)."""
    blocks = []
    for group, title in view.groups.items():
        found = {name: values(name, group) for name in methods}
        lengths = sorted({length for by_length in found.values() for length in by_length})
        rows = []
        for length in lengths:
            seeds = [found[name].get(length, {}) for name in methods]
            cells = [summarize(view.scale * value for value in own.values()) for own in seeds]
            rows.append(Row(str(length), tuple(Entry(cell) for cell in cells)))
        columns = tuple(Column(label_of(name)) for name in methods)
        blocks.append(Block(title, view.row_head, columns, tuple(rows)))
    return Table(key, view.table_caption, tuple(blocks))


# The training-time tables: seconds per step by method.


def speed_table(
    key: str, caption: str, methods: Sequence[str], seconds: Mapping[str, Sequence[float]]
) -> Table:
    """Mean seconds per step over runs, with the paper's A100 beside."""
    paper = published_seconds_per_step()
    cells = {name: summarize(seconds.get(name, ())) for name in methods}
    entries = tuple(
        Entry(cell, Rounding.THREE_DECIMALS, 3, Cell(paper[name]) if name in paper else None)
        for name, cell in cells.items()
    )
    columns = tuple(Column(label_of(name)) for name in methods)
    return Table(key, _sentence(caption), (Block("", "", columns, (Row("sec/step", entries),)),))


# Questions that pairs of runs answer: the same seed trained or evaluated in two ways.
#
# Seeds share their texts, so that differences are far more certain than the perplexities
# themselves; every number here is a mean difference over the seeds that both kinds have, with a
# paired t-test.


def contrast_table(key: str, contrast: Contrast, results: ResultSet, split: str) -> Table | None:
    """All rows of one question, empty where nothing has run; None if nothing has."""
    blocks = [
        _difference_block("", _pair_rows(contrast, results, split)),
        _difference_block(
            "Perplexity at the longest length against that at the training length",
            _growth_rows(contrast, results, split),
        ),
        _difference_block(
            "Loss beyond the training length, without a window against with one",
            _beyond_rows(contrast, results, split),
        ),
    ]
    shown = tuple(block for block in blocks if block is not None)
    if not shown:
        return None
    caption = (
        "Difference of the first to the second in percent of perplexity, mean over the seeds that "
        "both have (their number in brackets) and p of a paired two-sided t-test; with p < "
        f"{ALPHA:g} and at least {FEWEST_SEEDS} seeds the difference counts (bold), otherwise it "
        f"is not settled. Split: {split}."
    )
    return Table(key, caption, shown)


_Rows = list[tuple[str, dict[str, PairedTest]]]


def _pair_rows(contrast: Contrast, results: ResultSet, split: str) -> _Rows:
    rows: _Rows = []
    for pair in contrast.pairs:
        first, second = (results.perplexities_of(kind, split) for kind in (pair.first, pair.second))
        found = {str(n): difference(own, second[n]) for n, own in first.items() if n in second}
        rows.append((pair.label, found))
    return rows


def _growth_rows(contrast: Contrast, results: ResultSet, split: str) -> _Rows:
    rows: _Rows = []
    for label, kind in contrast.growth.items():
        found = results.perplexities_of(kind, split)
        shortest, longest = min(found, default=0), max(found, default=0)
        test = difference(found[longest], found[shortest]) if found else PairedTest()
        rows.append((label, {f"{longest} against {shortest}": test}))
    return rows


def _beyond_rows(contrast: Contrast, results: ResultSet, split: str) -> _Rows:
    rows: _Rows = []
    for label, kind in contrast.beyond.items():
        runs = results.of_kind(kind)
        rows.append((label, {str(n): test for n, test in beyond_window(runs, runs, split).items()}))
    return rows


def _difference_block(title: str, rows: _Rows) -> Block | None:
    heads = list(
        dict.fromkeys(head for _, tests in rows for head, test in tests.items() if test.seeds)
    )
    if not heads:
        return None
    lines = tuple(
        Row(label, tuple(Entry(_difference_cell(tests.get(head, PairedTest()))) for head in heads))
        for label, tests in rows
    )
    return Block(title, "", tuple(Column(head) for head in heads), lines)


def difference(first: Mapping[int, float], second: Mapping[int, float]) -> PairedTest:
    """Of two kinds' perplexities by seed, in nats per token."""
    logs = [{seed: math.log(value) for seed, value in own.items()} for own in (second, first)]
    return compare_paired(*logs)


def _difference_cell(test: PairedTest) -> Cell:
    """Printed as it stands; the numbers for the CSV beside it."""
    if test.mean is None:
        return Cell()
    percent = 100 * math.expm1(test.mean)
    p_value = f"p {test.p_value:.2g}" if test.p_value is not None else "one seed"
    text = f"{percent:+.2f}% ({test.seeds}; {p_value})".replace("-", "−")
    return Cell(percent, seeds=test.seeds, bold=test.settled, p_value=test.p_value, words=text)
