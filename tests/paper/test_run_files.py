"""The files of a run's directory: whatever was written to them, nothing crashes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron.atomic_files import read_json
from megatron.paper.kernel_figures import learned_parameters
from megatron.paper.report import collect_results
from megatron.paper.result_fit import is_finished
from megatron.paper.run_archive import unpacked
from megatron.paper.run_files import prepare_run, trained, training_differences
from megatron.paper.status import status_text
from megatron.paper.suite import load_suite
from megatron.paper.suite_file import DataSet
from tests.conftest import REPOSITORY
from tests.paper.synthetic import write_run


@pytest.mark.parametrize(
    "line", [b'{"step": 1e999, "loss": 1}', b"\xff\xfe", b'{"step": "x"}', b"[]"]
)
def test_a_damaged_metrics_line_is_left_out(tmp_path: Path, line: bytes) -> None:
    suite = load_suite("smoke", ["alibi", "*.1235"], runs_root=tmp_path)
    directory = write_run(suite.runs[0])
    path = directory / "metrics.jsonl"
    bad = [line, b'{"step": 201, "loss": NaN, "kernel": {"r1": 3, "r2": [1e999]}}', b'{"step": 2']
    path.write_bytes(path.read_bytes() + b"\n".join(bad) + b"\n")
    assert "1 runs: 1 done" in status_text(suite)
    assert len(collect_results(suite).runs[0].losses) == 200


def test_half_a_kernel_is_no_kernel(tmp_path: Path) -> None:
    """A parameter that diverged is null in the metrics: the last whole kernel is shown."""
    suite = load_suite("smoke", ["kerple_log", "*.1235"], runs_root=tmp_path)
    path = write_run(suite.runs[0]) / "metrics.jsonl"
    whole = collect_results(suite).runs[0].kernel
    assert set(whole) == {"r1", "r2"}
    half = {"step": 201, "kernel": {"r1": whole["r1"], "r2": [None] * len(whole["r2"])}}
    path.write_text(path.read_text() + json.dumps(half) + "\n")
    found = collect_results(suite)
    assert found.runs[0].kernel == whole
    assert learned_parameters(found, [DataSet(name="stdlib", title="")]) is not None


@pytest.mark.parametrize("name", ["state.json", ".done/train.json", "run.json", "metrics.jsonl"])
@pytest.mark.parametrize(
    "content", [b"\xff\xfe", b"[]", b'{"hash": {}, "seconds": "x", "state": 1}']
)
def test_damaged_run_files_are_no_crash(tmp_path: Path, name: str, content: bytes) -> None:
    suite = load_suite("smoke", ["alibi", "*.1235"], runs_root=tmp_path)
    directory = write_run(suite.runs[0])
    (directory / name).write_bytes(content)
    assert "1 runs: 1" in status_text(suite)
    collect_results(suite)


RECALL_OF_0_1 = [
    f"tiny.recall.{method}.1235"
    for method in ("kerple_log", "kerple_power", "alibi", "rpe", "rotary", "sinusoidal", "none")
]


def test_runs_of_version_0_1_stay_finished() -> None:
    """Their train hashes were made by another rule; the committed ones are all accepted."""
    results = REPOSITORY / "docs" / "results"
    for name, only, count in (("study", [], 83), ("recall", RECALL_OF_0_1, 7)):
        with unpacked(results / name / "runs.tar.gz") as folder:
            chosen = load_suite(name, only, runs_root=folder).runs
            runs = [run for run in chosen if (run.directory / "run.json").is_file()]
            recorded = {read_json(run.directory / "run.json")["train_hash"] for run in runs}  # type: ignore[index]
            assert not recorded & {run.train_hash for run in runs}
            assert [run.name for run in runs if not is_finished(run)] == []
            assert len(runs) == count
            prepare_run(runs[0])  # writes today's hash beside the old marker
            assert trained(runs[0]) and is_finished(runs[0])


@pytest.mark.parametrize("key", ["recall_samples", "do_test", "log_interval", "use_wandb"])
def test_a_key_that_trains_nothing_else_keeps_a_run_finished(tmp_path: Path, key: str) -> None:
    """It is asked of the key's declaration, not of its name."""
    only = ["smoke.stdlib.alibi.1235"]
    write_run(load_suite("smoke", only, runs_root=tmp_path).runs[0])
    value = {"recall_samples": 7, "log_interval": 1}.get(key, False)
    (run,) = load_suite("smoke", only, runs_root=tmp_path, sets={key: value}).runs
    assert training_differences(run) == "" and trained(run)
    prepare_run(run)
    assert trained(run)


def test_a_key_that_trains_otherwise_does_not(tmp_path: Path) -> None:
    only = ["smoke.stdlib.alibi.1235"]
    (old,) = load_suite("smoke", only, runs_root=tmp_path).runs
    write_run(old)
    for sets in ({"warmup": 0.5}, {"num_layers": 2}, {"model_parallel_size": 2}):
        (run,) = load_suite("smoke", only, runs_root=tmp_path, sets=sets).runs
        assert next(iter(sets)) in training_differences(run) and not trained(run)
    # A hash that belongs to no config beside it: the file was edited.
    (old.directory / "run.json").write_text(json.dumps({"train_hash": "0" * 16}))
    assert training_differences(old) == "trained with another training config"
