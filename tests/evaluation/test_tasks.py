"""What a task finds in its options, and what counts as a result."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron.evaluation.evaluator import run_evaluation
from megatron.evaluation.tasks import Context, EvaluationOptions, EvaluationTask
from tests.evaluation.helpers import result_of, write_run


def test_default_lengths_are_multiples_of_the_training_length(tmp_path: Path) -> None:
    args, _ = write_run(tmp_path)
    content = result_of(args, "extrapolation")
    measured = [entry["length"] for entry in content["results"]["valid"]]
    assert measured == [16, 32, 64, 128, 256, 512]


class Zero(EvaluationTask):
    """A task of one's own that keeps no cells."""

    def parameters(self, options: EvaluationOptions) -> dict[str, Any]:
        return {}

    def run(self, context: Context) -> dict[str, Any]:
        return {"accuracy": 0.0}

    def table(self, results: dict[str, Any]) -> str:
        return str(results["accuracy"])


def test_a_measured_nought_is_a_result(tmp_path: Path) -> None:
    args, _ = write_run(tmp_path)
    assert run_evaluation(args.replace(eval_tasks=[f"{__name__}:Zero"])) == 0
    content = json.loads((tmp_path / "run" / "results" / "step10_Zero.json").read_text("utf-8"))
    assert content["results"] == {"accuracy": 0.0}


class Partly(Zero):
    """Measures without cells, and notes what it could not."""

    def run(self, context: Context) -> dict[str, Any]:
        context.cells.errors.append({"length": 4, "error": "too short"})
        return super().run(context)


def test_what_was_measured_is_kept_beside_what_was_not(tmp_path: Path) -> None:
    args, _ = write_run(tmp_path)
    assert run_evaluation(args.replace(eval_tasks=[f"{__name__}:Partly"])) == 0
    content = json.loads((tmp_path / "run" / "results" / "step10_Partly.json").read_text("utf-8"))
    assert content["results"] == {"accuracy": 0.0}
    assert content["errors"] == [{"length": 4, "error": "too short"}]


def test_without_a_split_the_reason_is_said_and_a_traceback_on_request(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    args, _ = write_run(tmp_path, do_valid=False, do_test=False, eval_tasks=["extrapolation"])
    assert run_evaluation(args) == 1
    said = capsys.readouterr().err
    reason = "error: extrapolation: nothing to measure: do_valid and do_test are both false"
    assert reason in said and "Traceback" not in said
    monkeypatch.setenv("KERPLE_TRACEBACK", "1")
    assert run_evaluation(args) == 1
    said = capsys.readouterr().err
    assert reason in said and "Traceback" in said
