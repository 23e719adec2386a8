"""What our pages say about who wins is what the tables beside them hold."""

from __future__ import annotations

import csv
import re
from pathlib import Path

import pytest

from megatron.paper.pages import fill_tables
from tests.conftest import REPOSITORY
from tests.stories.stated_claims import check_page, read_claims, sentences

RESULTS = REPOSITORY / "docs" / "results"
REPORTS = sorted(RESULTS.glob("*/README.md"))
# All but the pages on GPU kernels, which are about another kind of kernel.
DOCS = [page for page in sorted((REPOSITORY / "docs").glob("*.md")) if "triton" not in page.name]
PAGES = [REPOSITORY / "README.md", *DOCS, RESULTS / "README.md", *REPORTS]
HEAD = "table,block,group,column,row,mean,std,seeds,bold,dagger,p_value,note\n"
CELLS = """main,Code,,KERPLE-log,128,5.0,0.1,3,0,0,,
main,Code,,KERPLE-log,4096,4.5,0.1,3,0,0,,
main,Code,,ALiBi,128,6.0,0.1,3,0,0,,
main,Code,,ALiBi,4096,4.25,0.1,3,0,0,,
main,Prose,,ALiBi,128,7.0,0.1,3,0,0,,
tests,,,4096,log against ALiBi,5.9,,3,1,0,0.01,
tests,,,4096,log against T5,-1.0,,2,0,0,0.4,
"""


@pytest.mark.parametrize("name", [page.relative_to(REPOSITORY).as_posix() for page in PAGES])
def test_every_sentence_about_who_wins_holds(name: str) -> None:
    assert check_page(REPOSITORY / name, name, read_claims(RESULTS), RESULTS) == []


def test_every_page_with_claims_is_checked() -> None:
    pages = {page.relative_to(REPOSITORY).as_posix() for page in PAGES}
    assert set(read_claims(RESULTS)) <= pages


@pytest.mark.parametrize("page", REPORTS, ids=lambda page: page.parent.name)
def test_tables_in_pages_are_the_reports(page: Path) -> None:
    path = page.parent / "tables.md"
    written = path.read_text() if path.is_file() else ""
    places = re.findall(r"<!-- table: (\S+) -->\n\n(.*?)\n<!-- end of table -->", written, re.S)
    tables = dict(places)
    text = page.read_text()
    assert fill_tables(text, tables) == text


def test_the_readmes_table_is_the_demos() -> None:
    """Cell by cell, as far as it is printed; the best of each row in bold."""
    with (RESULTS / "demo" / "tables.csv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["mean"] and row["table"] == "main"]
    cells = {(row["row"], row["column"]): float(row["mean"]) for row in rows}
    text = (REPOSITORY / "README.md").read_text()
    head, _, *lines = re.findall(r"^\|(.*)\|$", text[text.index("| perplexity at") :], re.M)
    methods = [name.strip() for name in head.split("|")][1:]
    shown = 0
    for line in lines[: len({row for row, _ in cells})]:
        length, *values = (part.strip() for part in line.split("|"))
        found = [cells[length.split()[0], name] for name in methods]
        for value, number in zip(values, found, strict=True):
            plain = value.strip("*")
            decimals = len(plain.partition(".")[2])
            assert f"{number:.{decimals}f}" == plain
            assert value.startswith("**") == (number == min(found))
            shown += 1
    assert shown == len(cells)


def check(tmp_path: Path, text: str, claims: dict[str, list[str]]) -> list[str]:
    path = tmp_path / "results" / "small" / "tables.csv"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(HEAD + CELLS)
    page = tmp_path / "page.md"
    page.write_text(text)
    listed = {"page.md": [{"says": says, "holds": holds} for says, holds in claims.items()]}
    return check_page(page, "page.md", listed, tmp_path / "results")


@pytest.mark.parametrize(
    "evidence",
    [
        "small/main[Code]: ALiBi@4096 < KERPLE-log@4096",
        "small/main[Code]: KERPLE-log@* < 5.1",
        "small/main[Code]: KERPLE-log@4096 = 4.5",
        "small/main[Prose]: ALiBi@128 >= 7",
        "small/main[Code]: KERPLE-log@4096 / KERPLE-log@128 = 0.90",
        "small/main[Code]: KERPLE-log@* / KERPLE-log@128 <= 1",
        "small/tests: 4096@log against ALiBi > 0, settled",
        "small/tests: 4096@log against T5 < 0, not settled",
        "paper/main[github]: KERPLE-log@* < ALiBi@*",
    ],
)
def test_true_evidence_passes(tmp_path: Path, evidence: str) -> None:
    assert check(tmp_path, "Log is better.\n", {"Log is better.": [evidence]}) == []


@pytest.mark.parametrize(
    ("evidence", "complaint"),
    [
        ("small/main[Code]: KERPLE-log@4096 < ALiBi@4096", "does not hold: 4.5 and 4.25 at 4096"),
        ("small/main[Code]: KERPLE-log@* < ALiBi@*", "does not hold: 4.5 and 4.25 at 4096"),
        ("small/main[Code]: KERPLE-log@4096 = 4.6", "does not hold"),
        ("small/tests: 4096@log against ALiBi > 0, not settled", "p is 0.01 with 3 seeds"),
        ("small/tests: 4096@log against T5 < 0, settled", "p is 0.4"),
        ("small/main: ALiBi@128 < 7", "no block None (have Code, Prose)"),
        ("small/main[Code]: T5@128 < 7", "no column 'T5' (have KERPLE-log, ALiBi)"),
        ("small/main[Code]: ALiBi@512 < 7", "no row '512'"),
        ("small/other: ALiBi@512 < 7", "no table other"),
        ("large/main: ALiBi@512 < 7", "No such file"),
        ("ALiBi wins", "cannot be read"),
    ],
)
def test_false_or_unreadable_evidence_is_named(
    tmp_path: Path, evidence: str, complaint: str
) -> None:
    (problem,) = check(tmp_path, "Log is better.\n", {"Log is better.": [evidence]})
    assert complaint in problem
    assert "Log is better." in problem


def test_each_sentence_that_ranks_needs_conditions_of_its_own(tmp_path: Path) -> None:
    text = """# Log is best

ALiBi is better than log. <!-- a comment --> T5 is worse
than both (5.1 against 4.1). Training took an hour.

- **Rotary explodes**, we
  think.

| log is | the best |
"""
    rows = "| log | the best | settled |\n| T5 | not settled |\n"
    row = "| log | the best | settled |"
    assert check(tmp_path, rows, {row: ["small/main[Code]: ALiBi@4096 < 4.3"]}) == [
        "page.md: says who wins without conditions in claims.yml: | T5 | not settled |"
    ]
    claims = {
        "ALiBi is better than log.": ["small/main[Code]: ALiBi@4096 < 4.3"],
        "Power wins.": ["small/main[Code]: ALiBi@4096 < 4.3"],
        "- **Rotary explodes**, we think.": [],
    }
    assert check(tmp_path, text, claims) == [
        "page.md: says who wins without conditions in claims.yml: T5 is worse than both (5.1 "
        "against 4.1).",
        "page.md: says who wins without conditions in claims.yml: - **Rotary explodes**, we think.",
        "page.md: no longer says: Power wins.",
    ]
    assert len(list(sentences(text))) == 4
