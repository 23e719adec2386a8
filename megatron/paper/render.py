"""Write a table as Markdown, LaTeX, CSV, HTML, or plain text for a terminal."""

from __future__ import annotations

import csv
import html
import io
from itertools import groupby

from megatron.paper.cells import MISSING
from megatron.paper.tables import Block, Entry, Table

__all__ = ["to_csv", "to_html", "to_latex", "to_markdown", "to_text"]

DAGGER = "†"


def _groups(block: Block) -> list[tuple[str, int]]:
    """Runs of neighbouring columns under the same head: [("KERPLE", 2), ("", 4)]."""
    runs: list[tuple[str, int]] = []
    for group, columns in groupby(block.columns, key=lambda column: column.group):
        runs.append((group, len(list(columns))))
    return runs


def _flat_label(group: str, label: str) -> str:
    return f"{group} {label}" if group else label


def to_markdown(table: Table, *, beside: bool = True) -> str:
    """GitHub Markdown; the paper's number follows ours in small type."""
    parts = [f"**{table.key}.** {table.caption}"]
    for block in table.blocks:
        if block.title:
            parts.append(f"#### {block.title}")
        heads = [block.corner, *(_flat_label(c.group, c.label) for c in block.columns)]
        lines = [_markdown_row(heads), _markdown_row(["---", *["---:"] * len(block.columns)])]
        for row in block.rows:
            cells = [_markdown_cell(entry, beside) for entry in row.entries]
            lines.append(_markdown_row([row.label, *cells]))
        parts.append("\n".join(lines))
    return "\n\n".join(parts) + "\n"


def _markdown_row(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _markdown_cell(entry: Entry, beside: bool) -> str:
    text = entry.text()
    if entry.cell.bold:
        text = f"**{text}**"
    if entry.cell.dagger:
        text += DAGGER
    if beside and entry.published is not None:
        text += f"<br><sub>paper {_published_marked(entry)}</sub>"
    return text


def _published_marked(entry: Entry) -> str:
    dagger = DAGGER if entry.published and entry.published.dagger else ""
    return entry.published_text() + dagger


def to_latex(table: Table) -> str:
    """A `table` environment in the paper's form (needs multirow and amsmath)."""
    lines = [
        r"\begin{table}[!ht]",
        r"    \setlength{\tabcolsep}{3pt}",
        r"    \centering",
        rf"    \caption{{{_latex_escape(table.caption)}}}",
    ]
    width = max(len(block.columns) for block in table.blocks)
    lines.append(rf"    \begin{{tabular}}{{@{{\extracolsep{{3pt}}}}l{'c' * width}}}")
    for block in table.blocks:
        lines += [r"    \hline\hline", *_latex_head(block)]
        lines += ["    " + latex_row(row.label, row.entries) for row in block.rows]
    lines += [r"    \hline\hline", r"    \end{tabular}", rf"    \label{{tab:{table.key}}}"]
    lines.append(r"\end{table}")
    return "\n".join(lines) + "\n"


def latex_row(label: str, entries: tuple[Entry, ...]) -> str:
    cells = [_latex_escape(label), *(_latex_cell(entry) for entry in entries)]
    return " & ".join(cells) + r"\\"


def _latex_cell(entry: Entry) -> str:
    plus_minus = r" $\pmb{\pm}$ " if entry.cell.bold else r" $\pm$ "
    text = entry.text(plus_minus, missing="--")
    if entry.cell.bold:
        text = rf"\textbf{{{text}}}"
    return text + (r"$^\dagger$" if entry.cell.dagger else "")


def _latex_head(block: Block) -> list[str]:
    lines: list[str] = []
    if block.title:
        span = len(block.columns) + 1
        title = _latex_escape(block.title)
        lines += [rf"    \multicolumn{{{span}}}{{c}}{{\textbf{{{title}}}}}\\", r"    \hline"]
    if any(column.group for column in block.columns):
        lines.append("    " + " & ".join(["", *_latex_groups(block)]) + r"\\")
    heads = [block.corner, *(column.label for column in block.columns)]
    lines.append("    " + " & ".join(_latex_escape(head) for head in heads) + r"\\ \hline")
    return lines


def _latex_groups(block: Block) -> list[str]:
    cells: list[str] = []
    for group, count in _groups(block):
        if group:
            cells.append(rf"\multicolumn{{{count}}}{{c}}{{{_latex_escape(group)}}}")
        else:
            cells += [""] * count
    return cells


_LATEX = {"%": r"\%", "&": r"\&", "_": r"\_", "#": r"\#", "±": r"$\pm$", "†": r"$^\dagger$"}
_LATEX |= {"×": r"$\times$", "—": "---", "–": "--", "α": r"$\alpha$"}


def _latex_escape(text: str) -> str:
    return "".join(_LATEX.get(character, character) for character in text)


def to_csv(table: Table) -> str:
    """One line per cell with full precision, ours and the paper's."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    head = "table,block,group,column,row,mean,std,seeds,bold,dagger,p_value,note"
    writer.writerow([*head.split(","), "published_mean", "published_std", "published_dagger"])
    for block in table.blocks:
        for row in block.rows:
            for column, entry in zip(block.columns, row.entries, strict=True):
                place = [table.key, block.title, column.group, column.label, row.label]
                writer.writerow([*place, *_csv_values(entry)])
    return out.getvalue()


def _csv_values(entry: Entry) -> list[object]:
    cell, paper = entry.cell, entry.published
    blank = ""
    values: list[object] = [
        blank if cell.mean is None else repr(cell.mean),
        blank if cell.std is None else repr(cell.std),
        cell.seeds,
        int(cell.bold),
        int(cell.dagger),
        blank if cell.p_value is None else repr(cell.p_value),
        cell.note or (blank if cell.present else "missing"),
    ]
    if paper is None or paper.mean is None:
        return [*values, blank, blank, blank]
    return [*values, paper.mean, blank if paper.std is None else paper.std, int(paper.dagger)]


def to_html(table: Table) -> str:
    """A `<table>`; the paper's number stands below ours in grey."""
    caption = html.escape(table.caption)
    parts = [f'<table class="results" id="table-{table.key}"><caption>{caption}</caption>']
    for block in table.blocks:
        parts.append(_html_head(block))
        parts.append("<tbody>")
        for row in block.rows:
            cells = "".join(_html_cell(entry) for entry in row.entries)
            parts.append(f'<tr><th scope="row">{html.escape(row.label)}</th>{cells}</tr>')
        parts.append("</tbody>")
    return "\n".join([*parts, "</table>"])


def _html_head(block: Block) -> str:
    rows: list[str] = []
    if block.title:
        span = len(block.columns) + 1
        rows.append(f'<tr><th class="block" colspan="{span}">{html.escape(block.title)}</th></tr>')
    if any(column.group for column in block.columns):
        cells = "".join(
            f'<th colspan="{count}" class="group{"" if group else " empty"}">'
            f"{html.escape(group)}</th>"
            for group, count in _groups(block)
        )
        rows.append(f"<tr><th></th>{cells}</tr>")
    heads = "".join(f'<th scope="col">{html.escape(c.label)}</th>' for c in block.columns)
    rows.append(f"<tr><th>{html.escape(block.corner)}</th>{heads}</tr>")
    return "<tbody class='head'>" + "".join(rows) + "</tbody>"


def _html_cell(entry: Entry) -> str:
    text = html.escape(entry.text())
    classes = [] if entry.cell.present else ["missing"]
    if entry.cell.bold:
        text, classes = f"<strong>{text}</strong>", [*classes, "best"]
    if entry.cell.dagger:
        text += f"<sup>{DAGGER}</sup>"
    hint = ""
    if entry.cell.p_value is not None:
        hint = f' title="paired t-test against log: p = {entry.cell.p_value:.3g}"'
    if entry.published is not None:
        text += f'<small class="paper">{html.escape(_published_marked(entry))}</small>'
    return f'<td class="{" ".join(classes)}"{hint}>{text}</td>'


def to_text(table: Table, *, color: bool = False) -> str:
    """Aligned columns for a terminal; best in bold (ANSI) or with a star."""
    parts: list[str] = []
    for block in table.blocks:
        heads = [block.corner, *(_flat_label(c.group, c.label) for c in block.columns)]
        body = [[row.label, *(_plain(entry, color) for entry in row.entries)] for row in block.rows]
        widths = [max(len(line[i]) for line in [heads, *body]) for i in range(len(heads))]
        rule = "─" * (sum(widths) + 2 * (len(widths) - 1))
        if block.title:
            parts += ["", block.title]
        parts += [rule, "  ".join(h.rjust(w) for h, w in zip(heads, widths, strict=True)), rule]
        for row, line in zip(block.rows, body, strict=True):
            cells = [text.rjust(width) for text, width in zip(line, widths, strict=True)]
            if color:
                cells[1:] = [
                    f"\033[1;32m{text}\033[0m" if entry.cell.bold else text
                    for text, entry in zip(cells[1:], row.entries, strict=True)
                ]
            parts.append("  ".join(cells))
        parts.append(rule)
    return "\n".join(parts).strip("\n") + "\n"


def _plain(entry: Entry, color: bool) -> str:
    marks = DAGGER if entry.cell.dagger else ""
    if entry.cell.bold and not color:
        marks += "*"
    return (entry.text(missing=MISSING) + marks) if marks else entry.text(missing=MISSING)
