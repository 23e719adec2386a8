"""Differences between two kinds of runs: paired by seed, with a test that can say "not settled"."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from scipy import stats

from megatron.errors import ReproduceError
from megatron.evaluation.results_schema import PositionEntry
from megatron.paper.contrasts import (
    beyond_window,
    contrast_table,
    difference,
    perplexities,
)
from megatron.paper.pages import to_markdown
from megatron.paper.run_files import done_steps
from megatron.paper.run_results import PairedTest, ResultSet, RunResults, read_run
from megatron.paper.suite import Run, Step, load_suite
from megatron.paper.suite_file import SUITE_DIRECTORY, Contrast, Pair
from tests.paper.synthetic import write_run


def run_of(model: str, seed: int, method: str = "kerple_log") -> Run:
    config = {"seq_length": 128, "eval_lengths": [128, 4096]}
    return Run(f"{model}.code.{method}.{seed}", model, "code", method, seed, 1, config)


def results_of(model: str, seed: int, first: float, last: float) -> RunResults:
    values = {("valid", 128): first, ("valid", 4096): last, ("test", 128): 1e9}
    return RunResults(run_of(model, seed), values)


PLAIN = [(1, 50.0, 48.0), (2, 60.0, 57.0), (3, 55.0, 53.0)]
SLOW = [(1, 51.0, 52.0), (2, 61.5, 61.0), (4, 10.0, 10.0)]
RESULTS = ResultSet(
    tuple(results_of("short", *row) for row in PLAIN)
    + tuple(results_of("slow", *row) for row in SLOW)
)


def test_only_seeds_that_both_have_are_compared() -> None:
    slow = perplexities(RESULTS, "slow.code.kerple_log", "valid")
    plain = perplexities(RESULTS, "short.code.kerple_log", "valid")
    found = difference(slow[4096], plain[4096])
    logs = [(math.log(52), math.log(61)), (math.log(48), math.log(57))]
    assert found.seeds == 2
    assert found.mean == pytest.approx(sum(logs[0]) / 2 - sum(logs[1]) / 2)
    assert found.p_value == pytest.approx(float(stats.ttest_rel(*logs).pvalue))
    assert not found.settled
    assert not PairedTest(-0.1, 0.001, seeds=2).settled
    assert PairedTest(-0.1, 0.001, seeds=3).settled


def test_growth_is_settled_only_by_its_p_value() -> None:
    contrast = Contrast(title="", growth={"plain": "short.code.kerple_log", "none": "x.code.y"})
    table = contrast_table("growth", contrast, RESULTS, "valid")
    assert table is not None
    text = to_markdown(table)
    assert "4096 against 128" in text
    line = next(line for line in text.splitlines() if "plain" in line)
    logs = [math.log(last / first) for _, first, last in PLAIN]
    p_value = float(stats.ttest_1samp(logs, 0.0).pvalue)
    assert p_value < 0.05
    assert f"**{100 * math.expm1(sum(logs) / 3):+.2f}% (3; p".replace("-", "−") in line
    assert "—" in next(line for line in text.splitlines() if "none" in line)


def test_a_question_without_results_has_no_table() -> None:
    pair = Pair(label="a", first="x.code.kerple_log", second="short.code.kerple_log")
    assert contrast_table("q", Contrast(title="", pairs=[pair]), RESULTS, "valid") is None


def position_entry(losses: list[float], window: int | None) -> PositionEntry:
    return PositionEntry(length=256, buckets=[], by_position=losses, window=window)


def test_beyond_the_window_only_positions_past_the_training_length_count() -> None:
    runs = []
    for seed, gain in ((1, 0.1), (2, 0.3)):
        item = RunResults(run_of("short", seed))
        losses = {
            None: [9.0] * 128 + [2.0 - gain] * 128,
            128: [1.0] * 128 + [2.0] * 128,
            64: [0.0] * 256,  # another window says nothing here
        }
        item.positions = {
            ("valid", 256, window): position_entry(own, window) for window, own in losses.items()
        }
        runs.append(item)
    found = beyond_window(runs, runs, "valid")
    assert found[256].mean == pytest.approx(-0.2)
    assert found[256].seeds == 2


def test_a_variant_needs_results_of_its_own(tmp_path: Path) -> None:
    """Plain results, also of an older version that recorded no settings, do not stand in for it."""
    name = "short.python_projects.kerple_log.1235"
    suite = load_suite("study", [name], runs_root=tmp_path)
    run = suite.run_named(name)
    variant = Step("extrapolation", variant="bf16_tables", settings=(("kerple_legacy_bf16", True),))
    assert variant in run.evaluations
    plain = replace(run, evaluations=tuple(step for step in run.evaluations if not step.variant))
    folder = write_run(plain)
    missing = {step.name for step in run.steps} - done_steps(run)
    assert missing == {"extrapolation-bf16_tables"}

    own = folder / "results" / "bf16_tables_extrapolation.json"
    content = json.loads((folder / "results" / "step500_extrapolation.json").read_text())
    old = {key: value for key, value in content.items() if key not in ("settings", "version")}
    own.write_text(json.dumps({**old, "format": 1}))
    assert "extrapolation-bf16_tables" not in done_steps(run)
    content["settings"]["model"] = {"kerple_legacy_bf16": True}
    content["results"]["valid"][0]["ppl"] = 77.0
    own.write_text(json.dumps(content))
    assert done_steps(run) == {step.name for step in run.steps}
    results = read_run(run)
    assert results.variants["bf16_tables"]["valid", 128] == 77.0
    assert results.perplexity["valid", 128] != 77.0
    assert not results.unused


def test_a_question_may_not_have_a_sections_name(tmp_path: Path) -> None:
    text = (SUITE_DIRECTORY / "study.yml").read_text(encoding="utf-8")
    path = tmp_path / "mine.yml"
    path.write_text(text.replace("\n  kernel_decay:", "\n  decay:"))
    with pytest.raises(ReproduceError, match="contrasts: decay: a section has this name"):
        load_suite(str(path))
