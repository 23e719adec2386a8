"""Two tensor-parallel processes compute what one does."""

from __future__ import annotations

import json
from pathlib import Path

from tests.processes import run_ranks


def test_split_models_equal_whole_ones(tmp_path: Path) -> None:
    output = tmp_path / "differences.json"
    run_ranks(["tests/mpu/tensor_parallel_worker.py", str(output)], 2)
    found = json.loads(output.read_text())
    assert len(found) == 16
    for name, gaps in found.items():
        assert gaps["logits"] < 1e-5, name
        assert gaps["losses"] < 1e-5, name
        assert gaps["gradient"] < 1e-6, name
