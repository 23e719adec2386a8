"""Tables from our own runs; and the paper's own, cell by cell."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

import pytest
from scipy import stats

from megatron.paper.cells import Cell, published_cells, published_seconds_per_step
from megatron.paper.pages import (
    latex_row,
    to_markdown,
)
from megatron.paper.suite import load_suite
from megatron.paper.suite_file import (
    Contrast,
    DataSet,
    Layout,
    Pair,
    Point,
    Rounding,
    Section,
    TableSpec,
)
from megatron.paper.tables import (
    Table,
    contrast_table,
    lay_out,
    measured_cells,
    published_source,
    speed_table,
)
from tests.fixture_archives import unpacked
from tests.paper.test_run_results import PLAIN, RESULTS

SPEC = TableSpec(
    key="main",
    caption="Perplexity, x† where log is better (α=0.05)",
    layout=Layout.STACKED,
    methods=("kerple_log", "alibi", "rpe"),
    data=(DataSet(name="stdlib", title="Python standard library", published="github"),),
    points=(Point(train_length=128, length=128), Point(train_length=128, length=4096)),
    rounding=Rounding.MAGNITUDE,
    published="main",
)

PERPLEXITY = {
    ("kerple_log", 128): {1235: 5.01, 1236: 5.11, 1237: 4.92},
    ("kerple_log", 4096): {1235: 4.01, 1236: 4.12, 1237: 3.93},
    ("alibi", 128): {1235: 5.06, 1236: 5.17, 1237: 4.96},
    ("alibi", 4096): {1235: 4.51, 1236: 4.62, 1237: 4.41},
    ("rpe", 128): {1235: 4.95, 1236: 5.06, 1237: 4.85},
}


def values(data: str, name: str, point: Point) -> Mapping[int, float]:
    assert data == "stdlib"
    return PERPLEXITY.get((name, point.length), {})


def table():  # type: ignore[no-untyped-def]
    return lay_out(SPEC, measured_cells(SPEC, values), published_source(SPEC))


def entry(length: int, name: str):  # type: ignore[no-untyped-def]
    row = next(row for row in table().blocks[0].rows if row.label == str(length))
    return row.entries[SPEC.methods.index(name)]


def test_mean_deviation_and_seeds() -> None:
    cell = entry(128, "kerple_log").cell
    assert cell.seeds == 3
    assert entry(128, "kerple_log").text() == "5.01 ± 0.10"


def test_best_is_bold_once_per_row() -> None:
    assert entry(128, "rpe").cell.bold
    assert not entry(128, "kerple_log").cell.bold
    assert entry(4096, "kerple_log").cell.bold
    assert not entry(4096, "alibi").cell.bold


def test_a_mean_over_fewer_seeds_is_never_best() -> None:
    def with_a_gap(data: str, name: str, point: Point) -> Mapping[int, float]:
        found = values(data, name, point)
        return {1237: found[1237]} if name == "rpe" and found else found

    rows = lay_out(SPEC, measured_cells(SPEC, with_a_gap)).blocks[0].rows
    shortest, longest = ([item.cell.bold for item in row.entries] for row in (rows[0], rows[-1]))
    assert shortest == [False] * 3  # the one seed of rpe is the lowest: nothing is called best
    assert longest == [True, False, False]


def test_dagger_only_where_log_is_significantly_better() -> None:
    assert entry(4096, "alibi").cell.dagger
    assert not entry(128, "rpe").cell.dagger  # significantly different, but better
    assert entry(128, "rpe").cell.p_value < 0.05
    assert not entry(128, "kerple_log").cell.dagger


# The paper's numbers in the repository are the paper's, and our table code prints its tables.

SECTIONS = {section.name: section for section in load_suite("paper").sections}


def paper_rows(name: str) -> list[list[str]]:
    """Cells of the rows as they stand in the paper's LaTeX source."""
    text = (unpacked("paper_tables") / f"{name}.tex").read_text(encoding="utf-8")
    return [normalized_cells(line) for line in text.splitlines() if line.strip()]


def normalized_cells(row: str) -> list[str]:
    row = row.strip().removesuffix(r"\\").replace(r"$\pmb{\pm}$", r"$\pm$")
    return [re.sub(r"\s+", " ", cell).strip() for cell in row.split("&")]


def our_rows(table: Table) -> list[list[str]]:
    return [
        normalized_cells(latex_row(row.label, row.entries))
        for block in table.blocks
        for row in block.rows
    ]


def published_table(section: Section) -> Table:
    assert section.table is not None
    source = published_source(section.table)
    return lay_out(section.table, lambda *place: source(*place) or Cell(note="-"))


@pytest.mark.parametrize("name", ["main", "complicated", "gaussian", "long", "wikitext103"])
def test_given_the_papers_cells_we_print_the_papers_table(name: str) -> None:
    assert our_rows(published_table(SECTIONS[name])) == paper_rows(name)


def test_the_1_3B_half_of_the_double_table() -> None:
    """The paper sets it beside the long table, without repeating the length column."""
    rows = our_rows(published_table(SECTIONS["large"]))
    assert [row[1:] for row in rows] == paper_rows("large")
    assert [row[0] for row in rows[:6]] == ["512", "1024", "2048", "4096", "8192", "16384"]


@pytest.mark.parametrize(
    ("section", "fixture"), [("speed", "speed"), ("gaussian", "gaussian_speed")]
)
def test_training_times(section: str, fixture: str) -> None:
    published = {name: [seconds] for name, seconds in published_seconds_per_step().items()}
    table = speed_table("speed", "", SECTIONS[section].methods, published)
    assert our_rows(table) == paper_rows(fixture)


def test_every_cell_of_the_paper_is_used_by_the_paper_suite() -> None:
    shown = sum(
        entry.cell.present or entry.cell.note == "OOM"
        for section in SECTIONS.values()
        if section.table
        for entry in published_table(section).entries
    )
    assert shown == sum(cell.present or cell.note == "OOM" for cell in published_cells().values())


def test_a_wrong_cell_would_be_noticed() -> None:
    section = SECTIONS["main"]
    assert section.table is not None
    source = published_source(section.table)

    def changed(data: str, name: str, point):  # type: ignore[no-untyped-def]
        cell = source(data, name, point)
        return source("github", name, point) if data == "arxiv" else cell

    assert our_rows(lay_out(section.table, changed)) != paper_rows("main")


# Differences between two kinds of runs, with a test that can say "not settled".


def test_growth_is_settled_only_by_its_p_value() -> None:
    contrast = Contrast(title="", growth={"plain": "short.code.kerple_log", "none": "x.code.y"})
    table = contrast_table("growth", contrast, RESULTS, "valid")
    assert table is not None
    text = to_markdown(table)
    assert "4096 against 128" in text
    line = next(line for line in text.splitlines() if "plain" in line)
    logs = [math.log(last / first) for _, first, last in PLAIN]
    p_value = float(stats.ttest_1samp(logs, 0.0).pvalue)
    assert p_value < 0.05
    assert f"**{100 * math.expm1(sum(logs) / 3):+.2f}% (3; p".replace("-", "−") in line
    assert "—" in next(line for line in text.splitlines() if "none" in line)


def test_a_question_without_results_has_no_table() -> None:
    pair = Pair(label="a", first="x.code.kerple_log", second="short.code.kerple_log")
    assert contrast_table("q", Contrast(title="", pairs=[pair]), RESULTS, "valid") is None
