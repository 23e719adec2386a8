"""Put a suite's results together: tables in four formats, figures in three, and one page."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from matplotlib.figure import Figure

from megatron.atomic_files import write_text
from megatron.paper.claims import check_claims
from megatron.paper.figures import (
    PositionCurve,
    perplexity_by_length,
    positionwise_perplexity,
    training_loss,
)
from megatron.paper.kernel_figures import (
    effective_lengths,
    kernel_functions,
    learned_parameters,
    training_speed,
)
from megatron.paper.pages import Chapter, Page, page_html, page_markdown
from megatron.paper.render import to_csv, to_latex, to_markdown
from megatron.paper.results import ResultSet
from megatron.paper.speed import speed_table
from megatron.paper.style import PlotFile, save_figure
from megatron.paper.tables import (
    DataSet,
    Layout,
    Table,
    TableSpec,
    lay_out,
    measured_cells,
    published_source,
)

__all__ = ["PositionPanel", "ReportFiles", "ReportSection", "ReportSpec", "write_report"]


@dataclass(frozen=True)
class PositionPanel:
    """One position-wise figure: a data set, a length, and its lines."""

    data: str
    length: int
    curves: tuple[PositionCurve, ...]


@dataclass(frozen=True)
class ReportSection:
    name: str
    title: str
    models: tuple[str, ...]
    methods: tuple[str, ...]
    data: tuple[DataSet, ...]
    heads: int
    table: TableSpec | None = None
    speed_caption: str | None = None
    speed_data: tuple[str, ...] = ()
    positions: tuple[PositionPanel, ...] = ()


@dataclass(frozen=True)
class ReportSpec:
    title: str
    lead: str
    splits: tuple[str, ...]
    sections: tuple[ReportSection, ...]
    facts: list[tuple[str, str]] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    machine: str = "this machine"


@dataclass(frozen=True)
class ReportFiles:
    directory: Path
    html: Path
    markdown: Path
    tables: tuple[Table, ...]


def write_report(spec: ReportSpec, results: ResultSet, directory: Path) -> ReportFiles:
    """Write report.html, report.md, tables/ and figures/; missing results stay missing."""
    directory.mkdir(parents=True, exist_ok=True)
    chapters = [_claims_chapter(spec, results)]
    for section in spec.sections:
        chapters.append(_section_chapter(spec, section, results, directory))
    # The first thing to see is the main table; the claims follow it.
    chapters[0], chapters[1] = chapters[1], chapters[0]
    page = Page(spec.title, spec.lead, spec.facts, chapters, spec.missing, results.problems)
    tables = tuple(table for chapter in chapters for table in [*chapter.tables, *chapter.folded])
    for table in tables:
        _write_table(table, directory / "tables")
    _write_text(directory / "report.html", page_html(page))
    _write_text(directory / "report.md", page_markdown(page))
    return ReportFiles(directory, directory / "report.html", directory / "report.md", tables)


def _write_text(path: Path, text: str) -> None:
    """An interrupted report leaves the old one in place."""
    write_text(path, text, parents=True)


def _write_table(table: Table, directory: Path) -> None:
    _write_text(directory / f"{table.key}.md", to_markdown(table))
    _write_text(directory / f"{table.key}.tex", to_latex(table))
    _write_text(directory / f"{table.key}.csv", to_csv(table))


def _claims_chapter(spec: ReportSpec, results: ResultSet) -> Chapter:
    """Only claims about data sets of stacked or side-by-side tables (one training length)."""
    data: dict[str, DataSet] = {}
    models: list[str] = []
    for section in spec.sections:
        if section.table and section.table.layout is not Layout.BY_METHOD:
            if models and set(section.models) - set(models):
                continue
            models += section.models
            data |= {item.name: item for item in section.data}
    findings = check_claims(results.of_models(models), spec.splits[0], tuple(data.values()))
    return Chapter("The paper's claims against these results", findings=findings)


def _section_chapter(
    spec: ReportSpec, section: ReportSection, results: ResultSet, directory: Path
) -> Chapter:
    own = results.of_models(section.models)
    chapter = Chapter(section.title)
    if section.table:
        for index, split in enumerate(spec.splits):
            table = _result_table(section.table, own, split, first=index == 0)
            (chapter.tables if index == 0 else chapter.folded).append(table)
    if section.speed_caption:
        seconds = {m: own.seconds_per_step(section.speed_data, m) for m in section.methods}
        chapter.tables.append(
            speed_table(f"{section.name}_speed", section.speed_caption, section.methods, seconds)
        )
    chapter.figures = _figures(spec, section, own, directory / "figures")
    return chapter


def _result_table(spec: TableSpec, results: ResultSet, split: str, *, first: bool) -> Table:
    table = lay_out(
        spec,
        measured_cells(spec, results.table_values(split)),
        published_source(spec) if first else None,
    )
    key = spec.key if first else f"{spec.key}_{split}"
    return Table(key, f"{table.caption} [{split} split]", table.blocks)


_LENGTH_CAPTION = (
    "Mean over seeds, shaded by one standard deviation; logarithmic axes. The dotted line marks "
    "the training length. The lower row, where there is one, zooms in "
    "on the methods that do not explode (linear axis)."
)
_POSITION_CAPTION = (
    "Perplexity of the tokens at each position of long sequences, mean over seeds. If a model used "
    "no more than the window, its line would coincide with the dashed windowed line beyond it."
)
_KERNEL_CAPTION = (
    "One line per head of the first seed, flattest darkest, cut at −8. Dashed: the bias of −2, "
    "below which a token hardly counts. Dotted: training length."
)
_EFFECTIVE_CAPTION = (
    "A head's effective length is the first distance with a bias below −2. The slower a curve "
    "rises, the farther the model looks."
)


def _figures(
    spec: ReportSpec, section: ReportSection, results: ResultSet, directory: Path
) -> list[PlotFile]:
    plots: list[PlotFile] = []

    def add(name: str, title: str, caption: str, figure: Figure | None) -> None:
        if figure is not None:
            plots.append(save_figure(figure, directory, f"{section.name}_{name}", title, caption))

    split, data, methods = spec.splits[0], section.data, section.methods
    if section.table:
        by_length = perplexity_by_length(results, split, data, methods)
        add("perplexity", f"Perplexity against length ({split})", _LENGTH_CAPTION, by_length)
    for item in data:
        panels = [panel for panel in section.positions if panel.data == item.name]
        curves = [(panel.length, panel.curves) for panel in panels]
        by_position = positionwise_perplexity(results, split, item, curves)
        add(f"positionwise_{item.name}", "Position-wise perplexity", _POSITION_CAPTION, by_position)
    if section.table:
        reach = 32 * max((results.train_length(item.name) or 0) for item in data)
        functions = kernel_functions(_drawn(results, methods), data, section.heads, reach)
        add("kernels", "Kernel functions per head", _KERNEL_CAPTION, functions)
        counts = effective_lengths(_drawn(results, methods), data, section.heads)
        add("effective_length", "Heads by effective length", _EFFECTIVE_CAPTION, counts)
        learned = learned_parameters(_drawn(results, methods), data)
        add("parameters", "Learned r1 and r2", "One point per head and seed.", learned)
    if section.speed_caption:
        speed = training_speed(results, section.speed_data, methods, spec.machine)
        caption = "Median seconds per step, mean over seeds, as a multiple of KERPLE-log's."
        add("speed", "Training time per step", caption, speed)
    if section.table:
        losses = training_loss(results, data, methods)
        add("loss", "Training loss", "First seed of each method, as logged.", losses)
    return plots


def _drawn(results: ResultSet, methods: Sequence[str]) -> ResultSet:
    wanted: Callable[[str], bool] = set(methods).__contains__
    return ResultSet(tuple(run for run in results.runs if wanted(run.key.method)))
