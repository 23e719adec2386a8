"""The files of a run's directory: whatever was written to them, nothing crashes."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.paper.report import collect_results
from megatron.paper.status import status_text
from megatron.paper.suite import load_suite
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
