"""The files of a run's directory: whatever was written to them, nothing crashes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron.paper.kernel_figures import learned_parameters
from megatron.paper.report import collect_results
from megatron.paper.status import status_text
from megatron.paper.suite import load_suite
from megatron.paper.suite_file import DataSet
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
