"""Some hundred spoilt files of every kind; `make fuzz N=100000` spoils as many as one likes."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from tests.fuzz.harness import run_cases
from tests.fuzz.targets import TARGETS, cycle

CASES = 5 * len(cycle())


def test_every_answer_is_a_result_or_one_of_our_errors(tmp_path: Path) -> None:
    counts, failures = run_cases(range(CASES), seed=1, root=tmp_path)
    assert failures == []
    outcomes: Counter[str] = Counter()
    for key, number in counts.items():
        outcomes[key.split("|")[1]] += number
    assert outcomes["refused"] > CASES // 5  # else nothing was spoilt
    assert sum(outcomes.values()) == CASES
    assert {key.split("|")[0] for key in counts} == set(TARGETS)
