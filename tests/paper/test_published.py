"""The paper's numbers in the repository are the paper's, and our table code prints its tables."""

from __future__ import annotations

import re

import pytest

from megatron.paper.pages import latex_row
from megatron.paper.published import published_cells, published_seconds_per_step
from megatron.paper.suite import load_suite
from megatron.paper.suite_file import Section
from megatron.paper.tables import Table, lay_out, published_source, published_speed_table
from tests.conftest import FIXTURES

SECTIONS = {section.name: section for section in load_suite("paper").sections}


def paper_rows(name: str) -> list[list[str]]:
    """Cells of the rows as they stand in the paper's LaTeX source."""
    text = (FIXTURES / "paper_tables" / f"{name}.tex").read_text(encoding="utf-8")
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
    return lay_out(section.table, published_source(section.table), missing_note="-")


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
    table = published_speed_table("speed", "", SECTIONS[section].methods)
    assert our_rows(table) == paper_rows(fixture)


def test_every_cell_of_the_paper_is_used_by_the_paper_suite() -> None:
    shown = sum(
        entry.cell.present or entry.cell.note == "OOM"
        for section in SECTIONS.values()
        if section.table
        for entry in published_table(section).entries
    )
    assert shown == sum(cell.present or cell.note == "OOM" for cell in published_cells().values())


def test_speeds_quoted_in_the_papers_text() -> None:
    seconds = published_seconds_per_step()
    assert seconds["rpe"] / seconds["kerple_log"] - 1 == pytest.approx(0.107, abs=0.002)
    assert 1 - seconds["kerple_log"] / seconds["rpe"] == pytest.approx(0.097, abs=0.001)


def test_a_wrong_cell_would_be_noticed() -> None:
    section = SECTIONS["main"]
    assert section.table is not None
    source = published_source(section.table)

    def changed(data: str, name: str, point):  # type: ignore[no-untyped-def]
        cell = source(data, name, point)
        return source("github", name, point) if data == "arxiv" else cell

    assert our_rows(lay_out(section.table, changed)) != paper_rows("main")
