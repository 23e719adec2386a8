"""Check what our pages say about who wins against the tables that the report code wrote.

A sentence that ranks methods is listed in `docs/results/claims.yml` under its page, word for word,
with its conditions::

    README.md:
    - says: ALiBi does better than log far out.
      holds:
      - 'study/main: ALiBi@4096 < KERPLE-log@4096'

SUITE/TABLE is a table of `docs/results/SUITE/tables.csv`, or `paper/TABLE` for the published
numbers, with `[BLOCK]` behind it where a table has several. A cell is COLUMN@ROW, where `*` stands
for every row; the left side may be one cell divided by another. A row of a hand-written table with
a verdict ("settled") is listed as a sentence is. `ranks_nothing: START` lists a sentence by its
first words that has the words of a ranking and is none. Relations: `<`, `>`, `<=`, `>=`; `=` with a
number as it is printed; `, settled` and `, not settled` behind it ask for the paired test of the
left cell.
"""

from __future__ import annotations

import csv
import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml

from megatron.errors import ReproduceError
from megatron.neox_arguments.catalogue import label_of
from megatron.paper.cells import PairedTest, published_cells


@dataclass(frozen=True)
class _Value:
    mean: float
    p_value: float | None = None
    seeds: int = 0


_Block = dict[str, dict[str, _Value]]
"""Column -> row -> value."""


# Sentences of a page.

_NOT_PROSE = re.compile(
    r"^```.*?^```|<!-- table: .*?<!-- end of table -->|^\|.*?$|^!\[.*?$|^#.*?$|<!--.*?-->",
    re.S | re.M,
)
_METHOD = re.compile(
    r"\b(log|power|ALiBi|T5|rotary|sinusoidal|NoPE|KERPLE|Gaussian|kernels?|forget gate|sinks?"
    r"|SSMax|bias\+wht|3-para-log)\b|\bkerple_|\brpe\b|\bgauss_|\balibi_",
    re.I,
)
_RANKS = re.compile(
    r"\b(ahead|behind|best|better|beats?|wins?|worse|worst|lower|higher|lowest|highest|below|above"
    r"|outperforms?|advantage|explodes?|falls? apart|collapses?|extrapolates?|stays? flat|flat far"
    r"|level)\b",
    re.I,
)


def ranks(sentence: str) -> bool:
    """Whether a sentence says of a method how it compares."""
    return bool(_METHOD.search(sentence) and _RANKS.search(sentence))


def sentences(page: str) -> Iterator[str]:
    """The prose of a Markdown page; code, tables, pictures and headings are left out."""
    for paragraph in re.split(r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.)\s)", _NOT_PROSE.sub("", page)):
        # A sentence ends with a full stop and what clings to it: brackets, stars.
        for part in re.findall(r".+?[.!?][*)\"”]*(?=\s|$)|.+$", paragraph, re.S):
            if text := " ".join(part.split()):
                yield text


def verdicts(page: str) -> Iterator[str]:
    """The rows of hand-written tables that say what is settled and what is not."""
    prose = re.sub(r"<!-- table: .*?<!-- end of table -->", "", page, flags=re.S)
    yield from re.findall(r"^\|.*\bsettled\b.*$", prose, re.M)


# Conditions: cells of tables, and what is said of them.

_STATEMENT = re.compile(
    r"(?P<table>[\w]+/[\w]+)(?:\[(?P<block>[^\]]*)\])?: (?P<left>.+?) (?P<relation><=|>=|<|>|=) "
    r"(?P<right>.+?)(?P<test>, (?:not )?settled)?$"
)
_RELATIONS: dict[str, Callable[[float, float], bool]] = {
    "<": operator.lt,
    ">": operator.gt,
    "<=": operator.le,
    ">=": operator.ge,
}


Claims = Mapping[str, Sequence[Mapping[str, Any]]]
"""Page -> its sentences that rank, each with `says` and `holds`."""


def read_claims(results: Path) -> Claims:
    claims: Claims = yaml.safe_load((results / "claims.yml").read_text(encoding="utf-8"))
    return claims


def check_page(page: Path, name: str, claims: Claims, results: Path) -> list[str]:
    """What is wrong: a sentence without conditions, one that is gone, a condition that is false."""
    text = page.read_text(encoding="utf-8")
    rows = list(verdicts(text))
    said = [*sentences(text), *rows]
    listed = {claim["says"]: claim["holds"] for claim in claims.get(name, ()) if "says" in claim}
    spared = tuple(c["ranks_nothing"] for c in claims.get(name, ()) if "ranks_nothing" in c)
    problems = [
        f"{name}: says who wins without conditions in claims.yml: {text}"
        for text in said
        if (ranks(text) or text in rows) and not listed.get(text) and not text.startswith(spared)
    ]
    problems += [f"{name}: no longer says: {text}" for text in listed if text not in said]
    gone = [start for start in spared if not any(text.startswith(start) for text in said)]
    problems += [f"{name}: no longer says: {start}" for start in gone]
    for text, conditions in listed.items():
        for condition in conditions:
            try:
                wrong = _failure(condition, results)
            except ReproduceError as error:
                wrong = str(error)
            if wrong:
                problems.append(f"{name}: {wrong} ({condition}), for: {text}")
    return problems


def _failure(statement: str, results: Path) -> str:
    """Why a statement does not hold; empty if it does."""
    found = _STATEMENT.match(statement)
    if found is None:
        raise ReproduceError("cannot be read, expected SUITE/TABLE[BLOCK]: A@ROW < B@ROW")
    block = _block(found["table"], found["block"], results)
    dividend, _, divisor = found["left"].partition(" / ")
    left = _cells(block, dividend)
    if divisor:
        left = _divided(left, _cells(block, divisor))
    right = _cells(block, found["right"])
    for row, value in left.items():
        other = next(iter(right.values())) if len(right) == 1 else right.get(row)
        if other is None:
            return f"nothing to compare with at {row}"
        if found["relation"] == "=":
            decimals = len(found["right"].partition(".")[2])
            holds = f"{value.mean:.{decimals}f}" == f"{other.mean:.{decimals}f}"
        else:
            holds = _RELATIONS[found["relation"]](value.mean, other.mean)
        if not holds:
            return f"does not hold: {value.mean:.5g} and {other.mean:.5g} at {row}"
        settled = PairedTest(None, value.p_value, value.seeds).settled
        if found["test"] and settled == found["test"].startswith(", not"):
            return f"p is {value.p_value} with {value.seeds} seeds at {row}"
    return ""


def _divided(left: dict[str, _Value], right: dict[str, _Value]) -> dict[str, _Value]:
    """Row by row, or all by the one that there is."""
    only = next(iter(right.values())) if len(right) == 1 else None
    return {row: _Value(value.mean / (only or right[row]).mean) for row, value in left.items()}


def _cells(block: _Block, text: str) -> dict[str, _Value]:
    """The cells that COLUMN@ROW names, by row; or a plain number."""
    column, separator, row = text.partition("@")
    if not separator:
        try:
            return {"": _Value(float(text.replace(",", "")))}
        except ValueError as error:
            raise ReproduceError(f"{text!r} is neither COLUMN@ROW nor a number") from error
    if column not in block:
        raise ReproduceError(f"no column {column!r} (have {', '.join(block)})")
    cells = block[column]
    if row != "*" and row not in cells:
        raise ReproduceError(f"no row {row!r} under {column} (have {', '.join(cells)})")
    return dict(cells) if row == "*" else {row: cells[row]}


def _block(table: str, name: str | None, results: Path) -> _Block:
    blocks = _tables(table, results)
    if name is None and len(blocks) == 1:
        return next(iter(blocks.values()))
    if name not in blocks:
        raise ReproduceError(f"{table} has no block {name!r} (have {', '.join(blocks)})")
    return blocks[name]


@lru_cache(maxsize=64)
def _tables(table: str, results: Path) -> dict[str, _Block]:
    """Every block of one table; cells without a number are left out."""
    suite, _, key = table.partition("/")
    if suite == "paper":
        return _published(key)
    path = results / suite / "tables.csv"
    try:
        lines = csv.DictReader(path.read_text(encoding="utf-8").splitlines())
    except OSError as error:
        raise ReproduceError(f"{path}: {error.strerror}") from error
    rows = [row for row in lines if row["table"] == key]
    if not rows:
        raise ReproduceError(f"{path}: no table {key}")
    blocks: dict[str, _Block] = {}
    for row in rows:
        if row["mean"]:
            p_value = float(row["p_value"]) if row["p_value"] else None
            column = f"{row['group']} {row['column']}".strip()
            place = blocks.setdefault(row["block"], {}).setdefault(column, {})
            place[row["row"]] = _Value(float(row["mean"]), p_value, int(row["seeds"] or 0))
    return blocks


def _published(key: str) -> dict[str, _Block]:
    """The paper's own numbers at its shortest training length, by data set."""
    blocks: dict[str, _Block] = {}
    for (table, data, train_length, length, method), cell in published_cells().items():
        if table == key and cell.mean is not None and train_length == 512:
            column = blocks.setdefault(data, {}).setdefault(label_of(method), {})
            column[str(length)] = _Value(cell.mean)
    return blocks
