"""The report: complete, self-contained, honest about what is missing."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path

import pytest

from megatron.paper.report import make_report
from megatron.paper.result_fit import done_steps
from megatron.paper.run_files import record_command
from megatron.paper.suite import Suite, load_suite
from tests.paper.synthetic import write_run

ONLY = ["stdlib", "main"]


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> tuple[Suite, Path, Path]:
    """The main table on one data set without sinusoidal and without rotary's last seed."""
    root = tmp_path_factory.mktemp("runs")
    suite = load_suite("laptop", ONLY, runs_root=root)
    for run in suite.runs:
        if run.method != "sinusoidal" and (run.method, run.seed) != ("rotary", 1237):
            write_run(run)
    files = make_report(suite, command="tools/reproduce.py run --suite laptop")
    return suite, root, files.directory


def test_page_needs_nothing_from_outside(report: tuple[Suite, Path, Path]) -> None:
    page = (report[2] / "report.html").read_text(encoding="utf-8")
    assert not re.findall(r'src="(?!data:)', page)
    links = re.findall(r'href="(?!#)([^"]*)"', page)
    assert links
    assert all((report[2] / link).is_file() for link in links)
    assert "@import" not in page
    assert "url(" not in page
    assert "<script" not in page
    assert page.count("<img") == page.count("data:image/svg+xml;base64,") >= 6


def test_page_names_command_machine_and_missing_runs(report: tuple[Suite, Path, Path]) -> None:
    page = (report[2] / "report.html").read_text(encoding="utf-8")
    assert "tools/reproduce.py run --suite laptop" in page
    assert "cores of" in page
    assert "14 of 18 finished" in page
    assert "What differs from the paper" in page
    assert "<code>kerple_lr_scale: 30</code>" in page
    assert "<code>tiny.stdlib.rotary.1237</code>" in page


def test_the_report_quotes_the_run_that_made_it(tmp_path: Path) -> None:
    suite = load_suite("smoke", ["two_processes"], runs_root=tmp_path)
    record_command(tmp_path / "smoke", "python tools/reproduce.py run --suite smoke -j 3", 7200, 0)
    text = make_report(suite, command="report").markdown.read_text(encoding="utf-8")
    assert "- Command: python tools/reproduce.py run --suite smoke -j 3" in text
    assert "- Wall clock: 2.0 h in 1 call(s)" in text


def test_a_missing_seed_is_not_filled_in(report: tuple[Suite, Path, Path]) -> None:
    with (report[2] / "tables" / "main.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    seeds = {row["column"]: int(row["seeds"]) for row in rows}
    assert seeds["Rotary"] == 2
    assert seeds["KERPLE-log"] == 3
    sinusoidal = [row for row in rows if row["column"] == "Sinusoidal"]
    assert {row["mean"] for row in sinusoidal} == {""}
    assert {row["note"] for row in sinusoidal} == {"missing"}


def test_all_tables_are_in_one_file_of_each_kind(report: tuple[Suite, Path, Path]) -> None:
    directory = report[2]
    single = sorted((directory / "tables").glob("*.csv"))
    lines = [path.read_text().splitlines() for path in single]
    rows = [row for table in lines for row in table[1:]]
    assert (directory / "tables.csv").read_text().splitlines() == [lines[0][0], *rows]
    page = (directory / "tables.md").read_text()
    assert re.findall(r"<!-- table: (\S+) -->", page) == [path.stem for path in single]
    for path in single:
        assert path.with_suffix(".md").read_text() in page


def test_tables_and_figures_in_every_format(report: tuple[Suite, Path, Path]) -> None:
    directory = report[2]
    for name in ("main", "main_test", "main_speed"):
        for suffix in ("md", "tex", "csv"):
            assert (directory / "tables" / f"{name}.{suffix}").stat().st_size > 100
    for name in ("perplexity", "positionwise_stdlib", "kernels", "effective_length", "parameters"):
        for suffix in ("pdf", "png", "svg"):
            assert (directory / "figures" / f"main_{name}.{suffix}").stat().st_size > 1000


def test_markdown_links_exist(report: tuple[Suite, Path, Path]) -> None:
    text = (report[2] / "report.md").read_text(encoding="utf-8")
    links = re.findall(r"\]\((figures/[^)]+)\)", text)
    assert links
    assert all((report[2] / link).is_file() for link in links)


def test_a_table_of_one_seed_has_no_daggers_and_says_so(tmp_path: Path) -> None:
    suite = load_suite("laptop", ["main", "stdlib", "*.1235"], runs_root=tmp_path)
    for run in suite.runs:
        write_run(run)
    files = make_report(suite)
    assert "†" not in files.html.read_text(encoding="utf-8")
    assert "†" not in files.markdown.read_text(encoding="utf-8")
    latex = (files.directory / "tables" / "main.tex").read_text(encoding="utf-8")
    assert "dagger" not in latex
    assert "One seed." in latex
    assert "small type" not in latex, "the paper's numbers are not in this file"


def test_a_method_has_one_name_on_the_page(report: tuple[Suite, Path, Path]) -> None:
    page = (report[2] / "report.html").read_text(encoding="utf-8")
    shown = re.sub(r'src="[^"]*"|<code>.*?</code>', "", page)
    for other in ("KERPLE (log)", "kerple_log", "(log)", "kerple-log"):
        assert other not in shown


def test_unreadable_results_are_named(tmp_path: Path) -> None:
    suite = load_suite("smoke", ["kerple_log", "*.1235"], runs_root=tmp_path)
    directory = write_run(suite.runs[0])
    broken = directory / "results" / "step20_extrapolation.json"
    broken.write_text('{"task": "extrapolation", "resu', encoding="utf-8")
    page = make_report(suite).html.read_text(encoding="utf-8")
    assert "step20_extrapolation.json" in page
    assert "Files that could not be read" in page


def test_a_report_before_any_run_says_that_all_is_missing(tmp_path: Path) -> None:
    suite = load_suite("paper", ["main"], runs_root=tmp_path)
    files = make_report(suite)
    text = files.markdown.read_text(encoding="utf-8")
    assert "0 of 90 finished" in text
    assert re.search(r"\| 512 +\| +—<br><sub>paper 23.9 ± 0.6</sub> \|", text)
    assert not any(entry.cell.present for table in files.tables for entry in table.entries)


def test_recall_has_its_own_table_and_figure(tmp_path: Path) -> None:
    chosen = ["tiny.recall.kerple_log.1235", "tiny.recall.rpe.1235"]
    suite = load_suite("recall", chosen, runs_root=tmp_path)
    for run in suite.runs:
        assert [step.name for step in run.steps] == ["train", "recall"]
        write_run(run)
    run = suite.runs[0]
    files = make_report(suite)
    assert "2 of 2 finished" in files.markdown.read_text(encoding="utf-8")
    assert (files.directory / "figures" / "main_recall.png").is_file()
    rows = list(csv.DictReader((files.directory / "tables" / "main.csv").open()))
    cell = next(row for row in rows if (row["column"], row["row"]) == ("KERPLE-log", "256"))
    assert float(cell["mean"]) == pytest.approx(100 * 0.45)
    assert cell["seeds"] == "1"

    path = run.directory / "results" / "step1500_recall.json"
    content = json.loads(path.read_text())
    content["results"]["grid"].pop()
    path.write_text(json.dumps(content))
    assert done_steps(run) == {"train"}


def test_a_section_with_seeds_of_its_own_shows_no_others(tmp_path: Path) -> None:
    suite = load_suite("demo", ["kerple_log", "alibi"], runs_root=tmp_path)
    for run in suite.runs:
        write_run(run)
    tables = make_report(suite).directory / "tables"
    for section, seeds in (("main", {"1"}), ("lead", {"3"})):
        rows = csv.DictReader((tables / f"{section}.csv").open())
        assert {row["seeds"] for row in rows} == seeds


def test_a_page_written_by_hand_gets_the_reports_tables(tmp_path: Path) -> None:
    suite = load_suite("recall", ["kerple_log"], runs_root=tmp_path)
    page = tmp_path / "out" / "README.md"
    page.parent.mkdir()
    page.write_text(
        "Ours.\n<!-- table: main -->\nold\n<!-- end of table -->\nMore.\n"
        "<!-- table: other -->\n<!-- end of table -->\n"
    )
    write_run(suite.runs[0])
    make_report(suite, tmp_path / "out")
    text = page.read_text()
    assert text.startswith("Ours.\n<!-- table: main -->\n\n**main.** Symbols recalled")
    assert "old" not in text and "\nMore.\n" in text and "(no results yet)" in text
    make_report(suite, tmp_path / "out")
    assert page.read_text() == text
