"""Questions that pairs of runs answer: the same seed trained or evaluated in two ways.

Seeds share their texts, so that differences are far more certain than the perplexities themselves;
every number here is a mean difference over the seeds that both kinds have, with a paired t-test.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megatron.evaluation.results_schema import PositionEntry
from megatron.paper.run_results import ALPHA, Cell, ResultSet, RunResults, compare_paired
from megatron.paper.suite_file import Contrast, Rounding
from megatron.paper.tables import Block, Column, Entry, Row, Table

FEWEST_SEEDS = 3


@dataclass(frozen=True)
class Difference:
    """Of logarithms of perplexities (nats per token), first minus second."""

    nats: float
    p_value: float | None
    seeds: int

    @property
    def settled(self) -> bool:
        return is_settled(self.p_value, self.seeds)

    @property
    def percent(self) -> float:
        return 100 * math.expm1(self.nats)


def is_settled(p_value: float | None, seeds: int) -> bool:
    """Whether a difference counts; with two seeds a small p is easily luck."""
    return seeds >= FEWEST_SEEDS and p_value is not None and p_value < ALPHA


def kind_of(item: RunResults) -> str:
    """MODEL.DATA.METHOD, as suite files write it."""
    return f"{item.run.model}.{item.run.data}.{item.run.method}"


def perplexities(results: ResultSet, kind: str, split: str) -> dict[int, dict[int, float]]:
    """Length -> seed -> perplexity of one kind of runs."""
    plain, _, variant = kind.partition("@")
    found: dict[int, dict[int, float]] = {}
    for item in results.runs:
        if kind_of(item) != plain:
            continue
        values = item.variants.get(variant, {}) if variant else item.perplexity
        for (own_split, length), value in values.items():
            if own_split == split:
                found.setdefault(length, {})[item.run.seed] = value
    return found


def difference(first: Mapping[int, float], second: Mapping[int, float]) -> Difference | None:
    """Of two kinds' perplexities by seed; None without a seed that both have."""
    logs = [{seed: math.log(value) for seed, value in own.items()} for own in (first, second)]
    return _paired(logs[0], logs[1])


def _paired(first: Mapping[int, float], second: Mapping[int, float]) -> Difference | None:
    common = sorted(set(first) & set(second))
    if not common:
        return None
    mean = sum(first[seed] - second[seed] for seed in common) / len(common)
    return Difference(mean, compare_paired(second, first).p_value, len(common))


def loss_from(entry: PositionEntry, start: int) -> float | None:
    """Mean loss of the positions from `start` on."""
    if entry.by_position:
        rest = entry.by_position[start:]
        return sum(rest) / len(rest) if rest else None
    buckets = [bucket for bucket in entry.buckets if bucket.start >= start]
    total = sum(bucket.end - bucket.start for bucket in buckets)
    weighted = sum(bucket.loss * (bucket.end - bucket.start) for bucket in buckets)
    return weighted / total if total else None


def beyond_window(results: ResultSet, kind: str, split: str) -> dict[int, Difference]:
    """By length: loss past the training length, without and with a window of that length."""
    by_length: dict[int, tuple[dict[int, float], dict[int, float]]] = {}
    for item in results.runs:
        if kind_of(item) != kind:
            continue
        start = item.run.train_length
        for found in item.positions:
            loss = loss_from(found.entry, start) if found.split == split else None
            if loss is not None and found.entry.window in (None, start):
                sides = by_length.setdefault(found.entry.length, ({}, {}))
                sides[found.entry.window is not None][item.run.seed] = loss
    differences = {n: _paired(*sides) for n, sides in sorted(by_length.items())}
    return {n: value for n, value in differences.items() if value is not None}


# Tables of such differences.


def contrast_table(key: str, contrast: Contrast, results: ResultSet, split: str) -> Table | None:
    """All rows of one question that have results; None if none has."""
    blocks = [
        _block("", _pair_rows(contrast, results, split)),
        _block("Perplexity at the longest length against that at the training length",
               _growth_rows(contrast, results, split)),
        _block("Loss beyond the training length, without a window against with one",
               _beyond_rows(contrast, results, split)),
    ]  # fmt: skip
    shown = tuple(block for block in blocks if block is not None)
    if not shown:
        return None
    caption = (
        "Difference of the first to the second in percent of perplexity, mean over the seeds that "
        "both have (their number in brackets) and p of a paired two-sided t-test; with p < "
        f"{ALPHA:g} and at least {FEWEST_SEEDS} seeds the difference counts (bold), otherwise it "
        f"is not settled. Split: {split}."
    )
    return Table(key, caption, shown)


_Rows = list[tuple[str, dict[str, Difference]]]


def _pair_rows(contrast: Contrast, results: ResultSet, split: str) -> _Rows:
    rows: _Rows = []
    for pair in contrast.pairs:
        first, second = (perplexities(results, kind, split) for kind in (pair.first, pair.second))
        found = {
            str(n): value
            for n in sorted(set(first) & set(second))
            if (value := difference(first[n], second[n])) is not None
        }
        rows.append((pair.label, found))
    return rows


def _growth_rows(contrast: Contrast, results: ResultSet, split: str) -> _Rows:
    rows: _Rows = []
    for label, kind in contrast.growth.items():
        by_length = perplexities(results, kind, split)
        shortest, longest = min(by_length, default=0), max(by_length, default=0)
        value = difference(by_length[longest], by_length[shortest]) if by_length else None
        rows.append((label, {f"{longest} against {shortest}": value} if value else {}))
    return rows


def _beyond_rows(contrast: Contrast, results: ResultSet, split: str) -> _Rows:
    return [
        (label, {str(n): value for n, value in beyond_window(results, kind, split).items()})
        for label, kind in contrast.beyond.items()
    ]


def _block(title: str, rows: _Rows) -> Block | None:
    measured = [row for row in rows if row[1]]
    if not measured:
        return None
    heads = list(dict.fromkeys(head for _, cells in measured for head in cells))
    lines = tuple(Row(label, _entries(heads, cells)) for label, cells in rows)
    return Block(title, "", tuple(Column(head) for head in heads), lines)


def _entries(heads: Sequence[str], cells: Mapping[str, Difference]) -> tuple[Entry, ...]:
    return tuple(
        Entry(difference_cell(cells[head]) if head in cells else Cell(), Rounding.MAGNITUDE, 2)
        for head in heads
    )


def difference_cell(value: Difference) -> Cell:
    """Printed as it stands; the numbers for the CSV beside it."""
    p_value = f"p {value.p_value:.2g}" if value.p_value is not None else "one seed"
    text = f"{value.percent:+.2f}% ({value.seeds}; {p_value})".replace("-", "−")
    return Cell(
        value.percent,
        seeds=value.seeds,
        bold=value.settled,
        p_value=value.p_value,
        words=text,
    )
