"""Tables of aligned columns, for a terminal and for Markdown."""

from __future__ import annotations

from collections.abc import Sequence

from tabulate import tabulate

Value = str | int | float | None


def shown(value: Value) -> str:
    """A number at fixed precision; a dash for None."""
    if value is None:
        return "-"
    return f"{value:.4f}" if isinstance(value, float) else str(value).strip()


def text_table(
    header: Sequence[str],
    rows: Sequence[Sequence[Value]],
    align: Sequence[str] | None = None,
    style: str = "simple",
) -> str:
    """Columns aligned to the right; `align` names the side of the first ones.

    Styles: `simple` has a line under the header, `plain` has none, `pipe` is Markdown.
    """
    sides = [*(align or []), *["right"] * len(header)][: len(header)]
    cells = [header, *([shown(value) for value in row] for row in rows)]
    # As a header of tabulate's, the first row would widen its columns.
    text = tabulate(cells, tablefmt=style, colalign=sides, disable_numparse=True)
    if style == "plain":
        return text
    rule, first, *body = text.splitlines()
    return "\n".join([first, rule, *(body[:-1] if style == "simple" else body)])
