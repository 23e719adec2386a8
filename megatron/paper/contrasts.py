"""Questions that pairs of runs answer: the same seed trained or evaluated in two ways.

Seeds share their texts, so that differences are far more certain than the perplexities themselves;
every number here is a mean difference over the seeds that both kinds have, with a paired t-test.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from megatron.evaluation.results_schema import PositionEntry
from megatron.paper.run_results import (
    ALPHA,
    FEWEST_SEEDS,
    Cell,
    PairedTest,
    ResultSet,
    RunResults,
    by_length,
    compare_paired,
)
from megatron.paper.suite_file import Contrast
from megatron.paper.tables import Block, Column, Entry, Row, Table


def runs_of_kind(results: ResultSet, kind: str) -> list[RunResults]:
    """`kind` is MODEL.DATA.METHOD, as suite files write it."""
    return [item for item in results.runs if item.run.name == f"{kind}.{item.run.seed}"]


def perplexities(results: ResultSet, kind: str, split: str) -> dict[int, dict[int, float]]:
    """Length -> seed -> perplexity of one kind of runs."""
    plain, _, variant = kind.partition("@")
    return by_length(
        (length, item.run.seed, value)
        for item in runs_of_kind(results, plain)
        for (own, length), value in (
            item.variants.get(variant, {}) if variant else item.perplexity
        ).items()
        if own == split
    )


def difference(first: Mapping[int, float], second: Mapping[int, float]) -> PairedTest:
    """Of two kinds' perplexities by seed, in nats per token."""
    logs = [{seed: math.log(value) for seed, value in own.items()} for own in (second, first)]
    return compare_paired(*logs)


def loss_from(entry: PositionEntry, start: int) -> float | None:
    """Mean loss of the positions from `start` on."""
    if entry.by_position:
        rest = entry.by_position[start:]
        return sum(rest) / len(rest) if rest else None
    buckets = [bucket for bucket in entry.buckets if bucket.start >= start]
    total = sum(bucket.end - bucket.start for bucket in buckets)
    weighted = sum(bucket.loss * (bucket.end - bucket.start) for bucket in buckets)
    return weighted / total if total else None


def beyond_window(
    own: Sequence[RunResults], windowed: Sequence[RunResults], split: str
) -> dict[int, PairedTest]:
    """By length: loss past the training length, against the others' in a window of that length."""
    losses: dict[bool, list[tuple[int, int, float]]] = {False: [], True: []}
    for in_window, runs in ((False, own), (True, windowed)):
        for item in runs:
            start = item.run.train_length
            for (of_split, length, window), entry in item.positions.items():
                if (of_split, window) == (split, start if in_window else None):
                    loss = loss_from(entry, start)
                    if loss is not None:
                        losses[in_window].append((length, item.run.seed, loss))
    without, within = by_length(losses[False]), by_length(losses[True])
    tests = {n: compare_paired(within.get(n, {}), found) for n, found in without.items()}
    return {n: test for n, test in tests.items() if test.seeds}


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


_Rows = list[tuple[str, dict[str, PairedTest]]]


def _pair_rows(contrast: Contrast, results: ResultSet, split: str) -> _Rows:
    rows: _Rows = []
    for pair in contrast.pairs:
        first, second = (perplexities(results, kind, split) for kind in (pair.first, pair.second))
        found = {str(n): difference(own, second[n]) for n, own in first.items() if n in second}
        rows.append((pair.label, found))
    return rows


def _growth_rows(contrast: Contrast, results: ResultSet, split: str) -> _Rows:
    rows: _Rows = []
    for label, kind in contrast.growth.items():
        found = perplexities(results, kind, split)
        shortest, longest = min(found, default=0), max(found, default=0)
        test = difference(found[longest], found[shortest]) if found else PairedTest()
        rows.append((label, {f"{longest} against {shortest}": test}))
    return rows


def _beyond_rows(contrast: Contrast, results: ResultSet, split: str) -> _Rows:
    rows: _Rows = []
    for label, kind in contrast.beyond.items():
        runs = runs_of_kind(results, kind)
        rows.append((label, {str(n): test for n, test in beyond_window(runs, runs, split).items()}))
    return rows


def _block(title: str, rows: _Rows) -> Block | None:
    heads = list(
        dict.fromkeys(head for _, tests in rows for head, test in tests.items() if test.seeds)
    )
    if not heads:
        return None
    lines = tuple(
        Row(label, tuple(Entry(_cell(tests.get(head, PairedTest()))) for head in heads))
        for label, tests in rows
    )
    return Block(title, "", tuple(Column(head) for head in heads), lines)


def _cell(test: PairedTest) -> Cell:
    """Printed as it stands; the numbers for the CSV beside it."""
    if test.mean is None:
        return Cell()
    percent = 100 * math.expm1(test.mean)
    p_value = f"p {test.p_value:.2g}" if test.p_value is not None else "one seed"
    text = f"{percent:+.2f}% ({test.seeds}; {p_value})".replace("-", "−")
    return Cell(percent, seeds=test.seeds, bold=test.settled, p_value=test.p_value, words=text)
