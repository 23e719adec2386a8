"""Results kept in a repository count as finished where they are copied back."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from megatron.paper.cli import main
from megatron.paper.report import collect_results
from megatron.paper.run_files import done_steps, step_names
from megatron.paper.suite import load_suite
from tests.paper.synthetic import write_run


def test_only_finished_runs_are_kept_and_they_count_elsewhere(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    suite = load_suite("smoke", ["main"], runs_root=tmp_path / "runs")
    first, second, *_ = suite.runs
    for run in (first, second):
        folder = write_run(suite, tmp_path / "runs", run)
        (folder / "global_step20").mkdir(exist_ok=True)
        (folder / "global_step20" / "weights.pt").write_bytes(b"large")
    shutil.rmtree(suite.run_directory(tmp_path / "runs", second) / "results")
    arguments = ["--suite", "smoke", "--only", "main", "--runs", str(tmp_path / "runs")]
    assert main(["keep", *arguments, "--out", str(tmp_path / "kept")]) == 0
    assert "1 finished runs" in capsys.readouterr().out
    assert [path.name for path in (tmp_path / "kept" / "smoke").iterdir()] == [first.name]
    assert not list((tmp_path / "kept").rglob("*.pt"))
    state = json.loads((suite.run_directory(tmp_path / "kept", first) / "state.json").read_text())
    assert state["host"] == "" and state["process"] is None

    copied = load_suite("smoke", ["main"], runs_root=tmp_path / "kept")
    assert done_steps(copied.run_directory(tmp_path / "kept", first), first) == set(
        step_names(first)
    )
    there = {item.run.name: item for item in collect_results(copied, tmp_path / "kept").runs}
    here = {item.run.name: item for item in collect_results(suite, tmp_path / "runs").runs}
    assert there[first.name].perplexity == here[first.name].perplexity != {}
