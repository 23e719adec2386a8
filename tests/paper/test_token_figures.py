"""The figure against tokens shows the paired differences, and none without two budgets."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from megatron.evaluation.induction import REPEATED
from megatron.paper.run_results import ResultSet, RunResults
from megatron.paper.suite import load_suite
from megatron.paper.suite_file import PERPLEXITY
from megatron.paper.token_figures import figure_by_tokens

SUITE = load_suite("budget", ["short", "main"], runs_root=Path("none"))
METHODS = ("kerple_log", "alibi")
GAIN = {"steps500": 0.02, "steps2000": -0.01}
"""Log's loss minus ALiBi's."""


def made_up(models: tuple[str, ...] = tuple(GAIN)) -> ResultSet:
    """ALiBi at 3 nats; log differs by GAIN; loss on repeated tokens 8."""
    found = []
    for run in SUITE.runs:
        if run.method in METHODS and run.model in models:
            loss = 3.0 + (GAIN[run.model] if run.method == "kerple_log" else 0.0)
            loss += 0.1 * (run.seed % 5)
            noise = 1e-3 * (run.seed % 3) if run.method == "kerple_log" else 0.0
            cells = {("valid", n): math.exp(loss + noise) for n in (128, 1024, 4096)}
            induction = {(REPEATED, 128): 8.0}
            found.append(
                RunResults(run, {(PERPLEXITY, None, ""): cells, ("induction", None, ""): induction})
            )
    return ResultSet(tuple(found))


def test_lines_are_the_differences_in_percent_against_tokens() -> None:
    figure = figure_by_tokens(SUITE.file.contrasts["tokens"], made_up(), "valid")
    assert figure is not None
    above, below = figure.axes[:2]
    assert "KERPLE-log against ALiBi" in above.get_title(loc="left") + above.get_title()
    line = above.get_lines()[0]
    assert list(line.get_xdata()) == [500 * 16 * 128, 2000 * 16 * 128]
    assert line.get_ydata() == pytest.approx(
        [100 * math.expm1(0.021), 100 * math.expm1(-0.009)], abs=0.05
    )
    assert [list(line.get_ydata()) for line in below.get_lines()] == [[8.0, 8.0]] * 2


def test_nothing_is_drawn_of_one_budget() -> None:
    contrast = SUITE.file.contrasts["tokens"]
    assert figure_by_tokens(contrast, made_up(("steps500",)), "valid") is None
    without = contrast.model_copy(update={"curve_lengths": []})
    assert figure_by_tokens(without, made_up(), "valid") is None


def test_tokens_of_a_run() -> None:
    assert {run.training_tokens for run in SUITE.runs} == {1_024_000, 4_096_000}
