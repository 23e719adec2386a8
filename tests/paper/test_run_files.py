"""Results kept in a repository count as finished where they are copied back."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from megatron.paper.cli import main
from megatron.paper.report import collect_results
from megatron.paper.run_files import is_finished
from megatron.paper.suite import load_suite
from tests.paper.synthetic import write_run


def test_only_finished_runs_are_kept_and_they_count_elsewhere(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    suite = load_suite("smoke", ["main"], runs_root=tmp_path / "runs")
    first, second, *_ = suite.runs
    for run in (first, second):
        folder = write_run(run)
        (folder / "global_step20").mkdir(exist_ok=True)
        (folder / "global_step20" / "weights.pt").write_bytes(b"large")
    shutil.rmtree(second.directory / "results")
    arguments = ["--suite", "smoke", "--only", "main", "--runs", str(tmp_path / "runs")]
    assert main(["keep", *arguments, "--out", str(tmp_path / "kept")]) == 0
    assert "1 finished runs" in capsys.readouterr().out
    assert [path.name for path in (tmp_path / "kept" / "smoke").iterdir()] == [first.name]
    assert not list((tmp_path / "kept").rglob("*.pt"))
    state = json.loads((tmp_path / "kept" / "smoke" / first.name / "state.json").read_text())
    assert state["host"] == "" and state["process"] is None

    copied = load_suite("smoke", ["main"], runs_root=tmp_path / "kept")
    assert is_finished(copied.run_named(first.name))
    there = {item.run.name: item for item in collect_results(copied).runs}
    here = {item.run.name: item for item in collect_results(suite).runs}
    assert there[first.name].perplexity == here[first.name].perplexity != {}
