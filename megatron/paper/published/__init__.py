"""The numbers of the KERPLE paper as data: every perplexity cell and every training time.

Means and deviations are kept with the digits the paper prints, and so are its bold faces and
daggers: the paper does not publish single seeds, so neither can be computed from the cells.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

from megatron.paper.run_results import Cell

__all__ = ["DATA_TITLES", "published_cell", "published_cells", "published_seconds_per_step"]

_HERE = Path(__file__).resolve().parent

DATA_TITLES = {
    "openwebtext2": "OpenWebText2",
    "github": "GitHub",
    "arxiv": "ArXiv",
    "wikitext103": "WikiText-103",
}
"""How the paper spells its data sets."""

CellKey = tuple[str, str, int, int, str]
"""(table, data, training length, evaluation length, method)"""


def _rows(name: str) -> Iterator[dict[str, str]]:
    with (_HERE / name).open(newline="", encoding="utf-8") as file:
        yield from csv.DictReader(file)


@lru_cache(maxsize=1)
def published_cells() -> dict[CellKey, Cell]:
    """All perplexity cells of the paper, by (table, data, training length, length, method)."""
    cells: dict[CellKey, Cell] = {}
    for row in _rows("perplexity.csv"):
        key = (
            row["table"],
            row["data"],
            int(row["train_length"]),
            int(row["length"]),
            row["method"],
        )
        cells[key] = Cell(
            mean=float(row["mean"]) if row["mean"] else None,
            std=float(row["std"]) if row["std"] else None,
            bold=row["bold"] == "1",
            dagger=row["dagger"] == "1",
            note=row["note"],
            printed=" ± ".join(part for part in (row["mean"], row["std"]) if part),
        )
    return cells


def published_cell(
    table: str, data: str, train_length: int, length: int, method: str
) -> Cell | None:
    """One cell of the paper, or None if the paper has no such cell."""
    return published_cells().get((table, data, train_length, length, method))


@lru_cache(maxsize=1)
def published_seconds_per_step() -> dict[str, float]:
    """Seconds per training step of the 162M model on one A100 (length 512, batch 32)."""
    return {row["method"]: float(row["seconds_per_step"]) for row in _rows("speed.csv")}
