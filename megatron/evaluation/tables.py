"""Text tables."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["number", "text_table"]


def number(value: float | None, digits: int = 4) -> str:
    """A number at fixed precision; a dash where there is none."""
    return "-" if value is None else f"{value:.{digits}f}"


def text_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns aligned to the right, under a line."""
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    lines = [
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        for row in [header, *rows]
    ]
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(lines)
