"""Tables of aligned columns, for a terminal and for Markdown."""

from __future__ import annotations

import re
from collections.abc import Sequence
from unicodedata import east_asian_width

Value = str | int | float | None
_COLOR = re.compile(r"\033\[[0-9;]*m")


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
    lines = [list(header), *([shown(value) for value in row] for row in rows)]
    widths = [max(map(_width, column)) for column in zip(*lines, strict=True)]
    padded = [[_padded(*cell) for cell in zip(line, widths, sides, strict=True)] for line in lines]
    if style == "pipe":
        rules = [
            f":{'-' * (width + 1)}" if side == "left" else f"{'-' * (width + 1)}:"
            for width, side in zip(widths, sides, strict=True)
        ]
        body = [f"| {' | '.join(line)} |" for line in padded]
        return "\n".join([body[0], f"|{'|'.join(rules)}|", *body[1:]])
    if style == "simple":
        padded.insert(1, ["-" * width for width in widths])
    return "\n".join("  ".join(line).rstrip() for line in padded)


def _width(text: str) -> int:
    """Columns that a terminal needs: colour codes take none, wide characters two."""
    plain = _COLOR.sub("", text)
    return len(plain) + sum(east_asian_width(letter) in "WF" for letter in plain)


def _padded(text: str, width: int, side: str) -> str:
    space = " " * (width - _width(text))
    return text + space if side == "left" else space + text
