"""From a suite and its run directories to the report: tables, figures, claims, one page."""

from __future__ import annotations

import platform
import time
from dataclasses import dataclass
from pathlib import Path

from kerple import __version__
from megatron.atomic_files import write_text
from megatron.paper.claims import check_claims, cpd_table
from megatron.paper.pages import (
    Chapter,
    Listing,
    Page,
    fill_tables,
    to_markdown,
    write_page,
    write_tables,
)
from megatron.paper.result_fit import Fit, is_finished
from megatron.paper.run_files import finite, read_history, step_seconds
from megatron.paper.run_results import ResultSet, read_run
from megatron.paper.section_report import heads_of, machine_name, section_chapter
from megatron.paper.style import Plot, save_figures
from megatron.paper.suite import TRAIN, Suite
from megatron.paper.suite_file import DataSet, Layout
from megatron.paper.tables import Table, contrast_table
from megatron.paper.token_figures import CAPTION, figure_by_tokens
from megatron.training.metrics import installed_versions


@dataclass(frozen=True)
class ReportFiles:
    directory: Path
    tables: tuple[Table, ...]

    @property
    def html(self) -> Path:
        return self.directory / "report.html"

    @property
    def markdown(self) -> Path:
        return self.directory / "report.md"


def collect_results(suite: Suite) -> ResultSet:
    """What all runs have so far."""
    return ResultSet(tuple(read_run(run) for run in suite.runs))


def make_report(
    suite: Suite, directory: Path | None = None, command: str = "", *, of_folders: bool = False
) -> ReportFiles:
    """Write report.html, report.md, tables/ and figures/ of whatever is finished.

    Runs `of_folders` were trained outside suites, which mark a finished training.
    """
    directory = directory or suite.directory / "report"
    results = collect_results(suite)
    missing = [item.run.name for item in results.runs if not is_finished(item.run, item.checks)]
    missing = [] if of_folders else missing
    chapters = [section_chapter(suite, part, results, directory) for part in suite.sections]
    # The first thing to see is the main table; the claims follow it.
    chapters[1:1] = [
        _claims_chapter(suite, results),
        *_contrast_chapters(suite, results, directory),
    ]
    chapters += _theory_chapters(suite, results)
    chapters.append(Chapter("What differs from the paper", notes=suite.file.differs))
    page = Page(
        "KERPLE: trained runs" if of_folders else f"KERPLE: the {suite.name} suite",
        suite.file.about + ".",
        _facts(suite, results, len(missing), command),
        chapters,
        _listings(results, missing),
    )
    tables = tuple(table for chapter in chapters for table in [*chapter.tables, *chapter.folded])
    write_tables(tables, directory)
    own_page = directory / "README.md"
    if own_page.is_file():  # written by hand, with the report's tables in it
        texts = {table.key: to_markdown(table) for table in tables}
        write_text(own_page, fill_tables(own_page.read_text(encoding="utf-8"), texts))
    write_page(page, directory)
    return ReportFiles(directory, tables)


def _listings(results: ResultSet, missing: list[str]) -> list[Listing]:
    """Missing, foreign, outdated and unreadable results, with the reason for each."""
    checks = [
        (item.run.name, name, check)
        for item in results.runs
        for name, check in item.checks.items()
        if item.last_step or check.fit is not Fit.MISSING
    ]
    unfit = [
        f"{run}: {step}: {check.fit.value}: {check.detail}"
        for run, step, check in checks
        if check.fit is not Fit.COMPLETE
    ]
    older = [f"{run}: {step}" for run, step, check in checks if not check.recorded]
    refused = [f"{run}: {note}" for run, _, check in checks for note in check.not_measurable]
    unused = [line for item in results.runs for line in item.unused]
    problems = [line for item in results.runs for line in item.problems]
    listings = [
        Listing("Missing runs", "Not finished: their cells show “—”.", missing),
        Listing(
            "Results that are missing, outdated or foreign",
            "Left out of every table; `tools/reproduce.py run` evaluates them again.",
            unfit,
        ),
        Listing("Not measurable", "evaluate.py tried and said why not.", refused),
        Listing(
            "Results of an older version",
            "Their files did not record every setting. What they record (seed, protocol, number of "
            "sequences, lengths, window, step) agrees with the suite; data files and weights "
            "could not be checked.",
            older,
        ),
        Listing(
            "Result files that no table uses",
            "Made with other settings or from another checkpoint than the suite asks for.",
            unused,
        ),
        Listing("Files that could not be read", "Nothing of them is shown.", problems),
    ]
    return [listing for listing in listings if listing.items]


def _claims_chapter(suite: Suite, results: ResultSet) -> Chapter:
    """Only claims about data sets of stacked or side-by-side tables (one training length)."""
    data: dict[str, DataSet] = {}
    models: list[str] = []
    for section in suite.sections:
        if section.table and section.table.layout is not Layout.BY_METHOD:
            if models and set(section.models) - set(models):
                continue
            models += section.models
            data |= {item.name: item for item in suite.data_of(section)}
    findings = check_claims(results.of_models(models), suite.file.splits[0], tuple(data.values()))
    return Chapter("The paper's claims against these results", findings=findings)


def _contrast_chapters(suite: Suite, results: ResultSet, directory: Path) -> list[Chapter]:
    """One per question of the suite file that has any answer yet."""
    split, chapters = suite.file.splits[0], []
    for key, contrast in suite.file.contrasts.items():
        if table := contrast_table(key, contrast, results, split):
            plots = [
                Plot("tokens", contrast.title, CAPTION, figure_by_tokens(contrast, results, split))
            ]
            figures = save_figures(plots, directory / "figures", f"{key}_")
            chapters.append(Chapter(contrast.title, tables=[table], figures=figures))
    return chapters


def _theory_chapters(suite: Suite, results: ResultSet) -> list[Chapter]:
    """CPD checks of the trained kernels, where a suite has trained some."""
    table = cpd_table(results, [run.method for run in suite.runs], heads_of(suite.runs))
    return [Chapter("The theory, on the trained kernels", tables=[table])] if table else []


def _facts(suite: Suite, results: ResultSet, missing: int, command: str) -> list[tuple[str, str]]:
    total = len(suite.runs)
    seeds = sorted({run.seed for run in suite.runs})
    facts = [
        ("Runs", f"{total - missing} of {total} finished; seeds {', '.join(map(str, seeds))}"),
        ("Machine", f"{machine_name()} (of this report)"),
        ("Software", _software()),
    ]
    versions = sorted({name for item in results.runs for name in item.versions})
    if versions and versions != [__version__]:
        facts.append(("Results", f"made by version {', '.join(versions)}"))
    spent = _time_spent(suite)
    if spent:
        facts.append(("Time", spent))
    history = read_history(suite.directory)
    if history:
        wall = sum(finite(entry.get("seconds")) or 0.0 for entry in history)
        facts.append(("Wall clock", f"{_hours(wall)} in {len(history)} call(s) of run"))
        command = str(history[-1].get("command", command))
    facts.append(("Written", time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())))
    if command:
        facts.insert(0, ("Command", command))
    return facts


def _time_spent(suite: Suite) -> str:
    train = sum(step_seconds(run, TRAIN) or 0.0 for run in suite.runs)
    evaluate = sum(step_seconds(run, step) or 0.0 for run in suite.runs for step in run.evaluations)
    if not train:
        return ""
    return f"{_hours(train)} training and {_hours(evaluate)} evaluating, summed over runs"


def _hours(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def _software() -> str:
    versions = {"KERPLE-NeoX": __version__, "Python": platform.python_version()}
    versions |= installed_versions(("torch", "deepspeed", "scipy"))
    return ", ".join(f"{name} {version}" for name, version in versions.items())
