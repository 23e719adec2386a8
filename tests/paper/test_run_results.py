"""What runs left behind: paired by seed where runs are compared."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from scipy import stats

from megatron.evaluation.positionwise import PositionEntry
from megatron.paper.cells import PairedTest
from megatron.paper.run_results import ResultSet, RunResults, _read_training, beyond_window
from megatron.paper.suite import Run
from megatron.paper.suite_file import PERPLEXITY, POSITIONWISE
from megatron.paper.tables import difference


def run_of(model: str, seed: int, method: str = "kerple_log") -> Run:
    config = {"seq_length": 128, "eval_lengths": [128, 4096]}
    return Run(f"{model}.code.{method}.{seed}", model, "code", method, seed, 1, config)


def results_of(model: str, seed: int, first: float, last: float) -> RunResults:
    values = {("valid", 128): first, ("valid", 4096): last, ("test", 128): 1e9}
    return RunResults(run_of(model, seed), {(PERPLEXITY, None, ""): values})


PLAIN = [(1, 50.0, 48.0), (2, 60.0, 57.0), (3, 55.0, 53.0)]
SLOW = [(1, 51.0, 52.0), (2, 61.5, 61.0), (4, 10.0, 10.0)]
RESULTS = ResultSet(
    tuple(results_of("short", *row) for row in PLAIN)
    + tuple(results_of("slow", *row) for row in SLOW)
)


def test_only_seeds_that_both_have_are_compared() -> None:
    slow = RESULTS.perplexities_of("slow.code.kerple_log", "valid")
    plain = RESULTS.perplexities_of("short.code.kerple_log", "valid")
    found = difference(slow[4096], plain[4096])
    logs = [(math.log(52), math.log(61)), (math.log(48), math.log(57))]
    assert found.seeds == 2
    assert found.mean == pytest.approx(sum(logs[0]) / 2 - sum(logs[1]) / 2)
    assert found.p_value == pytest.approx(float(stats.ttest_rel(*logs).pvalue))
    assert not found.settled
    assert not PairedTest(-0.1, 0.001, seeds=2).settled
    assert PairedTest(-0.1, 0.001, seeds=3).settled


def test_time_per_step_is_of_every_run_on_every_data_set() -> None:
    found = []
    for number, data in enumerate(["code", "code", "prose", "other"]):
        run = replace(run_of("short", number % 2), data=data)
        found.append(RunResults(run, seconds_per_step=float(number)))
    seconds = ResultSet(tuple(found)).seconds_per_step(["code", "prose"], "kerple_log")
    assert seconds == [0.0, 1.0, 2.0]


def position_entry(losses: list[float], window: int | None) -> PositionEntry:
    return PositionEntry(length=256, buckets=[], by_position=losses, window=window)


def test_a_kernel_of_other_heads_or_names_is_no_record_of_this_run(tmp_path: Path) -> None:
    whole = {"r1": [1.0, 2.0], "r2": [0.1, 0.2]}
    odd = [{"r1": [1.0]}, {"r1": [1.0, 2.0], "x": [0.1, 0.2]}, {"r1": [1.0], "r2": [0.1]}]
    lines = [{"step": step, "kernel": kernel} for step, kernel in enumerate([whole, *odd], 1)]
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    results = RunResults(run_of("short", 1))
    _read_training(metrics, results)
    assert results.kernel == whole
    assert results.kernel_path == [(1, whole)]


def test_beyond_the_window_only_positions_past_the_training_length_count() -> None:
    runs = []
    for seed, gain in ((1, 0.1), (2, 0.3)):
        item = RunResults(run_of("short", seed))
        losses = {
            None: [9.0] * 128 + [2.0 - gain] * 128,
            128: [1.0] * 128 + [2.0] * 128,
            64: [0.0] * 256,  # another window says nothing here
        }
        item.cells = {
            (POSITIONWISE, window, ""): {("valid", 256): position_entry(own, window)}
            for window, own in losses.items()
        }
        runs.append(item)
    found = beyond_window(runs, runs, "valid")
    assert found[256].mean == pytest.approx(-0.2)
    assert found[256].seeds == 2
