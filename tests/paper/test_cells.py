"""Means, deviations and the paired t-test that decides the daggers; digits; the paper's numbers."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from megatron.paper.cells import (
    Cell,
    cell_text,
    compare_paired,
    decimals_for,
    published_seconds_per_step,
    summarize,
)
from megatron.paper.suite_file import Rounding

LOG = {1235: 3.40, 1236: 3.55, 1237: 3.21, 1238: 3.62, 1239: 3.30}


def shifted(amount: float, wobble: float = 0.01) -> dict[int, float]:
    signs = [1, -1, 0.5, -0.5, 0.2]
    return {s: v + amount + wobble * k for (s, v), k in zip(LOG.items(), signs, strict=True)}


def test_mean_and_sample_deviation_over_seeds() -> None:
    summary = summarize([1.0, 2.0, 3.0, 4.0])
    assert summary.mean == 2.5
    assert summary.std == pytest.approx(math.sqrt(5 / 3))
    assert summary.seeds == 4


def test_one_seed_has_no_deviation_and_none_has_nothing() -> None:
    assert summarize([7.0]).std is None
    assert summarize([]).mean is None


def test_a_diverged_seed_is_not_hidden() -> None:
    assert summarize([3.0, math.inf, 3.1]).mean == math.inf


def test_consistently_worse_candidate_gets_the_dagger() -> None:
    test = compare_paired(LOG, shifted(+0.05))
    assert test.p_value is not None
    assert test.p_value < 0.05
    assert test.reference_is_better


def test_significantly_better_candidate_gets_no_dagger() -> None:
    test = compare_paired(LOG, shifted(-0.05))
    assert test.p_value is not None
    assert test.p_value < 0.05
    assert not test.reference_is_better


def test_pairing_matters() -> None:
    """Seeds vary by 0.2 and the method by 0.05: only the paired test can see it."""
    candidate = shifted(+0.05)
    unpaired = stats.ttest_ind(list(LOG.values()), list(candidate.values())).pvalue
    assert unpaired > 0.5
    assert compare_paired(LOG, candidate).reference_is_better


def test_only_common_seeds_are_paired() -> None:
    candidate = shifted(+0.05) | {9999: 100.0}
    del candidate[1235]
    test = compare_paired(LOG, candidate)
    assert test.seeds == 4
    first, second = ([d[s] for s in (1236, 1237, 1238, 1239)] for d in (candidate, LOG))
    assert test.p_value == pytest.approx(stats.ttest_rel(first, second).pvalue)


@pytest.mark.parametrize(
    "candidate",
    [{}, {1235: 9.0}, dict(LOG), dict.fromkeys(LOG, math.inf)],
    ids=["no seeds", "one seed", "equal", "diverged"],
)
def test_undefined_tests_are_never_significant(candidate: dict[int, float]) -> None:
    assert not compare_paired(LOG, candidate).reference_is_better


@given(
    st.lists(
        st.tuples(st.floats(1, 100), st.floats(1, 100)),
        min_size=2,
        max_size=8,
        unique_by=lambda t: t,
    )
)
def test_dagger_implies_a_larger_mean(pairs: list[tuple[float, float]]) -> None:
    reference = {i: a for i, (a, _) in enumerate(pairs)}
    candidate = {i: b for i, (_, b) in enumerate(pairs)}
    if compare_paired(reference, candidate).reference_is_better:
        assert sum(candidate.values()) > sum(reference.values())
        assert not compare_paired(candidate, reference).reference_is_better


@pytest.mark.parametrize(
    ("mean", "text"),
    [(3.4049, "3.40"), (9.994, "9.99"), (9.996, "10.0"), (99.94, "99.9"), (99.96, "100")],
)
def test_three_significant_digits(mean: float, text: str) -> None:
    assert cell_text(Cell(mean), Rounding.MAGNITUDE, 1) == text


def test_huge_and_diverged_perplexities_stay_readable() -> None:
    assert cell_text(Cell(1.234e12), Rounding.MAGNITUDE, 1) == "1.2e12"
    assert cell_text(Cell(float("inf")), Rounding.MAGNITUDE, 1) == "inf"


@given(st.floats(min_value=1.0, max_value=9e6))
def test_printed_mean_is_within_half_a_unit(mean: float) -> None:
    text = cell_text(Cell(mean), Rounding.MAGNITUDE, 1)
    assert abs(float(text) - mean) <= 0.5 * 10 ** -decimals_for(mean) * (1 + 1e-9)


def test_speeds_quoted_in_the_papers_text() -> None:
    seconds = published_seconds_per_step()
    assert seconds["rpe"] / seconds["kerple_log"] - 1 == pytest.approx(0.107, abs=0.002)
    assert 1 - seconds["kerple_log"] / seconds["rpe"] == pytest.approx(0.097, abs=0.001)
