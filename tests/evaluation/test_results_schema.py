"""The form of result files: read in one place, older ones too, and never a traceback."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron.errors import EvaluationError
from megatron.evaluation.perplexity import Extrapolation
from megatron.evaluation.results_schema import (
    read_result,
    recorded_settings,
    weights_id,
)

OLD: dict[str, Any] = {
    "format": 1,
    "task": "extrapolation",
    "checkpoint": "runs/demo/x/global_step500",
    "iteration": 500,
    "pos_emb": "kerple_log",
    "seed": 1235,
    "protocol": "fixed_tokens",
    "train_length": 128,
    "results": {"valid": [{"length": 128, "loss": 2.0, "ppl": 7.39, "sequences": 512}]},
}


def written(path: Path, content: object) -> Path:
    path.write_text(json.dumps(content), encoding="utf-8")
    return path


def test_a_file_of_the_first_format_is_read_without_inventing_settings(tmp_path: Path) -> None:
    result = read_result(written(tmp_path / "old.json", OLD))
    assert result.settings is None
    assert result.checkpoint_id is None
    assert Extrapolation().cells(result.results) == {("valid", 128): 7.39}
    old = {"num_sequences": 512, "longest length": 128}
    assert Extrapolation().comparable_in_old_file(result.results) == old


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff\xfe\x00",
        b"[]",
        b"{}",
        b'{"format": 1, "task": "extrapolation", "resu',
        json.dumps({**OLD, "results": []}).encode(),
        json.dumps({**OLD, "iteration": None}).encode(),
        json.dumps(OLD).replace('"iteration": 500', '"iteration": 1e999').encode(),
        json.dumps({**OLD, "settings": {"data": 3}}).encode(),
    ],
)
def test_anything_else_is_one_line_with_the_files_name(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "bad.json"
    path.write_bytes(content)
    with pytest.raises(EvaluationError, match=r"bad\.json: not a result file") as caught:
        read_result(path)
    assert "\n" not in str(caught.value)


def test_settings_know_data_by_size_and_not_by_time() -> None:
    def settings(time: int) -> dict[str, Any]:
        files = [["valid", "data/x", "90,5,5", [1000, time, 80, time]]]
        return recorded_settings({"files": files, "lengths": (8, 16)}, {"rope_scaling": None})

    assert settings(1) == settings(2)
    data = {"split": "valid", "prefix": "data/x", "share": "90,5,5", "bytes": 1000}
    assert settings(1) == {"lengths": [8, 16], "data": [data], "model": {}}


def test_weights_are_known_by_their_checksums(tmp_path: Path) -> None:
    assert weights_id(tmp_path) is None
    written(tmp_path / "checksums.json", {"mp_rank_00_model_states.pt": [10, "aa"]})
    first = weights_id(tmp_path)
    written(tmp_path / "checksums.json", {"mp_rank_00_model_states.pt": [10, "ab"]})
    assert weights_id(tmp_path) != first
