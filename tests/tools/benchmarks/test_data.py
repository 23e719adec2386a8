"""The data benchmark at toy size: it measures, compares and reports."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron.data import IndexedDataset
from megatron.errors import DataError
from tools.benchmark import main
from tools.benchmarks import data as benchmark


def test_synthetic_data_is_a_valid_dataset(tmp_path: Path) -> None:
    benchmark.write_synthetic_dataset(tmp_path / "s", 1000, 50_000)
    data = IndexedDataset(tmp_path / "s")
    assert len(data) == 1000
    assert data.total_tokens == pytest.approx(50_000, rel=0.02)


def test_index_benchmark(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "out.json"
    arguments = ["--parts", "index", "--documents", "1000", "--tokens", "500000"]
    assert main(["data", *arguments, "--length", "64", "--output", str(output)]) == 0
    assert "peak memory" in capsys.readouterr().out
    assert all(m["holds"] and m["value"] > 0 for m in json.loads(output.read_text()))


def test_a_missed_target_is_a_failure(capsys: pytest.CaptureFixture[str]) -> None:
    missed = benchmark.Measurement("slow", 3.0, "s", 2.0, at_most=True)
    assert not missed.holds and "MISSED" in str(missed)
    assert benchmark.Measurement("fast", 3.0, "MB/s", 2.0).holds


def test_consumption_of_a_real_run(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text('{"step": 1, "tokens_per_second": 10}\n{"step": 2, "valid_loss": 1}\n')
    assert benchmark._consumption(metrics) == 10
    metrics.write_text('{"step": 1}\n')
    with pytest.raises(DataError, match="tokens_per_second"):
        benchmark._consumption(metrics)
