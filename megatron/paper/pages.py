"""One self-contained HTML page: inline style, inline figures, nothing from the network."""

from __future__ import annotations

import html
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from megatron.paper.claims import Finding
from megatron.paper.render import to_html, to_markdown
from megatron.paper.style import PlotFile
from megatron.paper.tables import Table

__all__ = ["Chapter", "Page", "page_html", "page_markdown"]

_STYLE_SHEET = Path(__file__).resolve().parent / "report.css"


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


@dataclass
class Page:
    title: str
    lead: str
    facts: list[tuple[str, str]]
    chapters: list[Chapter]
    missing: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def page_html(page: Page) -> str:
    chapters = [chapter for chapter in page.chapters if not chapter.empty]
    links = "".join(f'<a href="#{c.anchor}">{html.escape(c.title)}</a>' for c in chapters)
    facts = "".join(
        f"<dt>{html.escape(name)}</dt><dd>{html.escape(value)}</dd>" for name, value in page.facts
    )
    body = [
        f"<h1>{html.escape(page.title)}</h1>",
        f'<p class="lead">{html.escape(page.lead)}</p>',
        f'<dl class="facts">{facts}</dl>',
        f"<nav>{links}</nav>",
        *(_chapter_html(chapter) for chapter in chapters),
        _list_html("Missing runs", page.missing),
        _list_html("Files that could not be read", page.problems),
    ]
    style = _STYLE_SHEET.read_text(encoding="utf-8")
    content = "\n".join(part for part in body if part)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{html.escape(page.title)}</title>\n<style>\n{style}</style>\n</head>\n"
        f"<body>\n<main>\n{content}\n</main>\n</body>\n</html>\n"
    )


def _chapter_html(chapter: Chapter) -> str:
    parts = [f'<h2 id="{chapter.anchor}">{html.escape(chapter.title)}</h2>']
    parts += [f"<p>{html.escape(note)}</p>" for note in chapter.notes]
    if chapter.findings:
        parts.append(_findings_html(chapter.findings))
    tables = [f'<div class="scroll">{to_html(table)}</div>' for table in chapter.tables]
    tables += [
        f"<details><summary>The same on another split ({html.escape(table.key)})</summary>"
        f'<div class="scroll">{to_html(table)}</div></details>'
        for table in chapter.folded
    ]
    plots = [_figure_html(plot) for plot in chapter.figures]
    return "\n".join([*parts, *tables[:1], *plots[:1], *tables[1:], *plots[1:]])


def _figure_html(plot: PlotFile) -> str:
    title = html.escape(plot.title)
    return (
        f'<figure id="figure-{plot.key}"><img alt="{title}" src="{plot.data_uri}">'
        f"<figcaption><strong>{title}.</strong> {html.escape(plot.caption)}</figcaption></figure>"
    )


def _findings_html(findings: Sequence[Finding]) -> str:
    rows = []
    for finding in findings:
        css = finding.verdict.value.replace(" ", "-")
        rows.append(
            f"<tr><td>{html.escape(finding.claim)}</td><td>{html.escape(finding.data)}</td>"
            f'<td class="verdict {css}">{finding.verdict.value}</td>'
            f"<td>{html.escape(finding.evidence)}</td></tr>"
        )
    head = "<tr><th>The paper says</th><th>Data</th><th>Our result</th><th>Evidence</th></tr>"
    return f'<div class="scroll"><table class="claims">{head}{"".join(rows)}</table></div>'


def _list_html(title: str, items: Sequence[str]) -> str:
    if not items:
        return ""
    lines = "".join(f"<li><code>{html.escape(item)}</code></li>" for item in items)
    return f'<h2>{html.escape(title)} ({len(items)})</h2><ul class="missing-runs">{lines}</ul>'


def page_markdown(page: Page) -> str:
    """The same report for GitHub; figures are links to the PNG files beside it."""
    parts = [f"# {page.title}", page.lead]
    parts.append("\n".join(f"- {name}: {value}" for name, value in page.facts))
    for chapter in page.chapters:
        if chapter.empty:
            continue
        parts += [f"## {chapter.title}", *chapter.notes]
        if chapter.findings:
            parts.append(_findings_markdown(chapter.findings))
        parts += [to_markdown(table).rstrip() for table in [*chapter.tables, *chapter.folded]]
        for plot in chapter.figures:
            parts.append(
                f"![{plot.title}](figures/{plot.key}.png)\n\n*{plot.title}.* {plot.caption}"
            )
    for title, items in (("Missing runs", page.missing), ("Unreadable files", page.problems)):
        if items:
            listed = "\n".join(f"- `{item}`" for item in items)
            parts.append(f"## {title} ({len(items)})\n\n{listed}")
    return "\n\n".join(parts) + "\n"


def _findings_markdown(findings: Sequence[Finding]) -> str:
    lines = ["| The paper says | Data | Our result | Evidence |", "| --- | --- | --- | --- |"]
    lines += [f"| {f.claim} | {f.data} | **{f.verdict.value}** | {f.evidence} |" for f in findings]
    return "\n".join(lines)
