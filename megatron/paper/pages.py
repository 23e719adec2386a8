"""Write tables and the report: HTML, Markdown and LaTeX from templates, text, CSV."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import groupby
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined, select_autoescape
from markupsafe import Markup, escape

from megatron.atomic_files import write_text
from megatron.evaluation.text_tables import text_table
from megatron.paper.claims import Finding
from megatron.paper.style import PlotFile
from megatron.paper.tables import DAGGER, Block, Entry, Table

TEMPLATES = Path(__file__).resolve().parent / "templates"


@dataclass
class Chapter:
    """A section of the report: the first table, the first figure, then the others.

    `folded` tables (other splits) open with a click.
    """

    title: str
    tables: list[Table] = field(default_factory=list)
    folded: list[Table] = field(default_factory=list)
    figures: list[PlotFile] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def anchor(self) -> str:
        return re.sub(r"[^a-z0-9]+", "-", self.title.lower()).strip("-")

    @property
    def empty(self) -> bool:
        return not (self.tables or self.figures or self.findings or self.notes)


@dataclass(frozen=True)
class Listing:
    """Names at the end of the page: what is missing, outdated, foreign or unreadable."""

    title: str
    about: str
    items: list[str]


@dataclass
class Page:
    title: str
    lead: str
    facts: list[tuple[str, str]]
    chapters: list[Chapter]
    listings: list[Listing] = field(default_factory=list)

    @property
    def shown(self) -> list[Chapter]:
        return [chapter for chapter in self.chapters if not chapter.empty]


@lru_cache(maxsize=1)
def _templates() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=select_autoescape(["html.j2"]),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {"tex": _latex_escape, "latex_row": latex_row, "markdown": to_markdown}
    environment.filters |= {"code": _code, "prose": _markdown_prose, "cell": _markdown_text}
    environment.globals["groups"] = _groups
    return environment


def page_html(page: Page) -> str:
    style = (TEMPLATES / "report.css").read_text(encoding="utf-8")
    return _templates().get_template("report.html.j2").render(page=page, style=style)


def page_markdown(page: Page) -> str:
    """The same report for GitHub; figures are links to the PNG files beside it."""
    text = _templates().get_template("report.md.j2").render(page=page)
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"


def to_latex(table: Table) -> str:
    """A `table` environment in the paper's form (needs amsmath)."""
    return _templates().get_template("table.tex.j2").render(table=table)


def to_markdown(table: Table) -> str:
    """GitHub Markdown; the paper's number follows ours in small type."""
    beside = f" {table.beside}" if table.published else ""
    parts = [f"**{table.key}.** {_markdown_prose(table.caption + beside)}"]
    for block in table.blocks:
        if block.title:
            parts.append(f"#### {_markdown_prose(block.title)}")
        rows = [
            [_markdown_text(row.label), *map(_markdown_cell, row.entries)] for row in block.rows
        ]
        align = ["left", *["right"] * len(block.columns)]
        parts.append(text_table([*map(_markdown_text, _heads(block))], rows, align, "pipe"))
    return "\n\n".join(parts) + "\n"


_TABLE_PLACE = re.compile(r"(<!-- table: (\S+) -->\n).*?(<!-- end of table -->)", re.S)


def fill_tables(page: str, tables: Mapping[str, str]) -> str:
    """A page of ours with the tables (by key, in Markdown) that it names, as they are now.

    Their place is between `<!-- table: KEY -->` and `<!-- end of table -->`; one without results
    says so.
    """

    def filled(place: re.Match[str]) -> str:
        text = tables.get(place[2], "(no results yet)\n")
        return f"{place[1]}\n{text}\n{place[3]}"

    return _TABLE_PLACE.sub(filled, page)


def _markdown_prose(text: str) -> str:
    """A suite's own words: `names` in backticks stay, but no tag, link, image or heading."""
    parts = re.split(r"((?<![`\\])`[^`]+`(?!`))", re.sub(r"\s+", " ", text).strip())
    parts[::2] = [re.sub(r"[\\\[\]]", r"\\\g<0>", p).replace("<", "&lt;") for p in parts[::2]]
    return re.sub(r"^(>|[#+*=-]+(?=\s|$))", r"\\\1", "".join(parts))


def _markdown_text(text: str) -> str:
    """Prose in a table's cell: pipes are escaped too."""
    return _markdown_prose(text).replace("|", r"\|")


def _markdown_cell(entry: Entry) -> str:
    text = f"**{entry.text()}**" if entry.cell.bold else entry.text()
    text += DAGGER if entry.cell.dagger else ""
    if entry.published is not None:
        text += f"<br><sub>paper {entry.published_text()}</sub>"
    return text


def to_text(table: Table, *, color: bool = False) -> str:
    """Aligned columns for a terminal; best in bold (ANSI) or with a star."""
    parts: list[str] = []
    for block in table.blocks:
        rows = [[row.label, *(_plain(entry, color) for entry in row.entries)] for row in block.rows]
        text = text_table(_heads(block), rows)
        parts.append(f"{block.title}\n{text}" if block.title else text)
    return "\n\n".join(parts) + "\n"


def _plain(entry: Entry, color: bool) -> str:
    text = entry.text() + (DAGGER if entry.cell.dagger else "")
    if not entry.cell.bold:
        return text
    return f"\033[1;32m{text}\033[0m" if color else f"{text}*"


def to_csv(*tables: Table) -> str:
    """One line per cell with full precision, ours and the paper's."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    head = "table,block,group,column,row,mean,std,seeds,bold,dagger,p_value,note"
    writer.writerow([*head.split(","), "published_mean", "published_std", "published_dagger"])
    for key, block in ((table.key, block) for table in tables for block in table.blocks):
        for row in block.rows:
            for column, entry in zip(block.columns, row.entries, strict=True):
                cell, paper = entry.cell, entry.published
                line: list[object] = [key, block.title, column.group, column.label, row.label]
                line += [cell.mean, cell.std, cell.seeds, int(cell.bold), int(cell.dagger)]
                line = [_csv_text(item) for item in line]
                line += [cell.p_value, cell.note or ("" if cell.present else "missing")]
                if paper is None or paper.mean is None:
                    writer.writerow([*line, None, None, None])
                else:
                    writer.writerow([*line, paper.mean, paper.std, int(paper.dagger)])
    return out.getvalue()


def _csv_text(item: object) -> object:
    """A spreadsheet takes a text that begins like this for a formula."""
    formula = isinstance(item, str) and item.startswith(("=", "+", "-", "@", "\t", "\r"))
    return f"'{item}" if formula else item


def write_tables(tables: Collection[Table], directory: Path) -> None:
    """tables/ with each in every format; tables.md and tables.csv with all of them."""
    folder = directory / "tables"
    for table in tables:
        for suffix, render in (("md", to_markdown), ("tex", to_latex), ("csv", to_csv)):
            write_text(folder / f"{table.key}.{suffix}", render(table), parents=True)
    ordered = sorted(tables, key=lambda table: table.key)
    head = (
        "# Tables of the report\n\n"
        "Written by `tools/reproduce.py report`; the page beside shows some of them.\n"
    )
    places = [f"<!-- table: {t.key} -->\n<!-- end of table -->\n" for t in ordered]
    texts = {table.key: to_markdown(table) for table in ordered}
    write_text(directory / "tables.md", fill_tables("\n".join([head, *places]), texts))
    write_text(directory / "tables.csv", to_csv(*ordered))


def write_page(page: Page, directory: Path) -> None:
    """report.html and report.md."""
    write_text(directory / "report.html", page_html(page), parents=True)
    write_text(directory / "report.md", page_markdown(page))


# Pieces that several formats share.


def _code(text: str) -> Markup:
    """Prose for the page: `names` in backticks become code."""
    return Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(text))))  # noqa: S704


def _heads(block: Block) -> list[str]:
    """One line of heads, where a format has no place for groups of columns."""
    heads = [f"{column.group} {column.label}".strip() for column in block.columns]
    return [block.corner, *heads]


def _groups(block: Block) -> list[tuple[str, int]]:
    """Runs of neighbouring columns under the same head: [("GitHub", 2), ("ArXiv", 2)]."""
    runs = groupby(block.columns, key=lambda column: column.group)
    return [(group, len(list(columns))) for group, columns in runs]


def latex_row(label: str, entries: tuple[Entry, ...]) -> str:
    cells = [_latex_escape(label), *(_latex_cell(entry) for entry in entries)]
    return " & ".join(cells) + r"\\"


def _latex_cell(entry: Entry) -> str:
    plus_minus = r" $\pmb{\pm}$ " if entry.cell.bold else r" $\pm$ "
    text = _latex_escape(entry.cell.words) or entry.text(plus_minus, missing="--")
    if entry.cell.bold:
        text = rf"\textbf{{{text}}}"
    return text + (r"$^\dagger$" if entry.cell.dagger else "")


_LATEX = {"%": r"\%", "&": r"\&", "_": r"\_", "#": r"\#", "±": r"$\pm$", "†": r"$^\dagger$"}
_LATEX |= {"\\": r"\textbackslash{}", "{": r"\{", "}": r"\}", "$": r"\$", "^": r"\^{}"}
_LATEX |= {"~": r"\textasciitilde{}"}
_LATEX |= {"×": r"$\times$", "—": "---", "–": "--", "−": "$-$", "α": r"$\alpha$"}


def _latex_escape(text: str) -> str:
    return "".join(_LATEX.get(character, character) for character in text)
