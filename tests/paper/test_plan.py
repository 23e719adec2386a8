"""What a suite costs, before anything is started."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from megatron.paper.cells import published_seconds_per_step
from megatron.paper.plan import estimate_cost, plan_text
from megatron.paper.suite import load_suite


def test_parameters_of_the_papers_model() -> None:
    run = load_suite("paper").runs[0]
    assert estimate_cost(run).parameters + 2 * 12 == 162_322_968


def test_gpu_hours_follow_the_papers_seconds_per_step() -> None:
    run = next(run for run in load_suite("paper").runs if run.method == "rpe")
    cost = estimate_cost(run)
    assert cost.steps == 50_000
    assert cost.tokens == 50_000 * 32 * 512
    training = 50_000 * published_seconds_per_step()["rpe"] / 3600
    assert cost.train_hours == pytest.approx(training)
    assert training < cost.hours < 1.3 * training


def test_the_large_model_counts_its_accumulation_and_not_its_tensor_parallel_ranks() -> None:
    run = next(run for run in load_suite("paper").runs if run.model == "large")
    assert estimate_cost(run).tokens == 150_000 * 32 * 512


def test_a_checkpoint_has_the_weights_and_the_states_of_its_optimizer() -> None:
    """bf16: two bytes a weight, four of its fp32 copy, and Adam's two states; none with sgd."""
    run = load_suite("paper").runs[0]
    assert run.config["precision"] == "bf16"
    sgd = {**run.config, "optimizer": {"type": "sgd", "params": {"lr": 1e-3}}}
    costs = [estimate_cost(one) for one in (run, replace(run, config=sgd))]
    whole = costs[0].parameters + 2 * 12
    kept = int(run.config.get("keep_last_n_checkpoints") or 1) + 1
    assert [cost.checkpoint_bytes for cost in costs] == [kept * whole * 14, kept * whole * 6]


def test_plan_counts_shared_runs_once() -> None:
    text = plan_text(load_suite("paper"))
    assert "274 runs" in text
    assert "(runs of a section above)" in text
    assert "Nothing of this was measured on a GPU by us" in text
    for fact in ("A100 40 GB", "A100 80 GB", "H100 80 GB", "95.16 GB raw", "tokenizing about"):
        assert fact in text


def test_laptop_suites_are_planned_in_minutes_on_cores() -> None:
    text = plan_text(load_suite("demo"))
    assert "A100" not in text
    found = re.search(r"With -j 2 on two cores about ([\d.]+) min", text)
    assert found is not None
    assert 4 < float(found.group(1)) < 16  # `make demo` took 8 minutes here


def test_a_corpus_with_its_own_vocabulary_is_not_counted_with_gpt2s() -> None:
    """The study's models have 4,096 tokens; with 50,257 they would look fifteen times as costly."""
    run = load_suite("study").run_named("short.python_projects.kerple_log.1235")
    assert estimate_cost(run).parameters + 2 * 4 == 1_841_928  # as its results record
    cost = estimate_cost(run)
    assert cost.on_cpu
    assert 100 < 3600 * cost.train_hours < 250  # 134 to 166 s were measured
    tokens = 12 * 4096 * 6 + 12 * 2 * (1024 + 4096)  # one split, two window sizes
    assert cost.evaluation_tokens == tokens


def test_cores_and_gpus_are_never_added_up() -> None:
    """A suite of both has a row, a total and a table for each."""
    small = load_suite("study", ["short.python_projects.kerple_log.1235"])
    large = load_suite("paper", ["small.github.kerple_log.1235", "main"])
    runs = (*large.runs, replace(small.runs[0], sections=("main",)))
    file = large.file.model_copy(update={"data": large.file.data | small.file.data})
    both = replace(large, runs=runs, file=file)
    costs = [estimate_cost(run) for run in both.runs]
    assert [cost.on_cpu for cost in costs] == [False, True]
    rows = [line for line in plan_text(both).splitlines() if "one core" in line or "A100" in line]
    assert any(re.search(r"^main .* 1.02M +one core +\S+ min", row) for row in rows)
    assert any(re.search(r"^ +819M +an A100 +4.\d h +4.\d h", row) for row in rows)
    assert any(
        re.search(r"estimate: \S+ min on one core and 4.\d h on an A100", row) for row in rows
    )
    gpu_table = [row for row in rows if row.startswith("A100 40 GB")]
    assert gpu_table
    assert all("short" not in row for row in gpu_table)
