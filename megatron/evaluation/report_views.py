"""What a task shows in a report, as data: a task lists its views, the report draws them.

A cell is one number (or record) of a result, found by its place: a group and a length. The group is
a split, a kind of text, or whatever the task tells apart; a panel and a table block each show one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

Place = tuple[str, int]
"""(group, length)"""


@dataclass(frozen=True)
class View:
    """A figure, with or without a table."""

    key: str
    """End of the names of its files."""
    title: str
    """Of the figure; `{split}` is replaced by the split that is drawn."""
    caption: str


@dataclass(frozen=True)
class GroupView(View):
    """One number by group and length: a panel and a table block for each group."""

    groups: Mapping[str, str]
    """Group -> title, in the order in which they are shown."""
    ylabel: str
    table_caption: str = ""
    """Empty: a figure without a table."""
    xlabel: str = "length (tokens)"
    row_head: str = "Length"
    scale: float = 1.0
    """Multiplied with every number: 100 for percent."""
    limits: tuple[float, float] | None = None
    """Of the vertical axis; None follows the numbers."""


@dataclass(frozen=True)
class SplitView(View):
    """Perplexity by split and length: the table that a suite's `table:` lays out, and its curves.

    Such cells are what the paper's tables, claims and contrasts compare.
    """


@dataclass(frozen=True)
class PositionView(View):
    """Loss by position of long sequences, with and without a window."""
