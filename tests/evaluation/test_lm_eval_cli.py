"""lm-eval's tasks inside evaluate.py, and its own command with our model."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron.evaluation import lm_eval_adapter
from megatron.evaluation.evaluator import run_evaluation
from tests.conftest import REPOSITORY
from tests.evaluation.lm_eval_tasks import (
    CONTEXT,
    QUESTIONS,
    TEXTS,
    expected_choice,
    local_run,
    metrics,
    rolling_log_likelihood,
    write_tasks,
)

pytestmark = pytest.mark.usefixtures("only_local_tasks")


def test_lm_eval_scores_agree_with_the_models_logits(tmp_path: Path) -> None:
    args, model = local_run(tmp_path)
    assert run_evaluation(args) == 0
    expected = expected_choice(model, [row["question"] for row in QUESTIONS])
    assert 0 < expected["acc"] < 1
    assert metrics(args, "local_choice")["metrics"] == pytest.approx(expected)
    totals = [rolling_log_likelihood(model, row["text"]) for row in TEXTS]
    words = sum(len(re.split(r"\s+", row["text"])) for row in TEXTS)  # as lm-eval counts them
    letters = sum(len(row["text"].encode()) for row in TEXTS)
    rolling = metrics(args, "local_rolling")["metrics"]
    assert rolling["bits_per_byte"] == pytest.approx(-sum(totals) / letters / math.log(2), rel=1e-5)
    assert math.log(rolling["word_perplexity"]) == pytest.approx(-sum(totals) / words, rel=1e-5)
    generation = metrics(args, "local_generation")
    assert generation["samples"] == len(QUESTIONS)
    assert generation["metrics"]["exact_match"] == pytest.approx(3 / 7)


def test_limit_few_shot_and_the_request_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    args, _ = local_run(tmp_path, eval_limit=2, num_fewshot=1)
    asked: list[str] = []
    score = lm_eval_adapter.score_continuations

    def listening(model: Any, pairs: Any) -> Any:
        asked.extend(bytes(context).decode() for context, _ in pairs)
        return score(model, pairs)

    monkeypatch.setattr(lm_eval_adapter, "score_continuations", listening)
    assert run_evaluation(args.replace(eval_tasks=["local_choice"])) == 0
    scores = metrics(args, "local_choice")
    assert (scores["samples"], scores["n-shot"]) == (2, 1)
    assert len(asked) == 6
    assert all("\n\n" in prompt for prompt in asked), "an example, then the question"
    asked.clear()
    for file in (tmp_path / "run" / "results" / "cache").glob("local_choice*"):
        file.unlink()  # as if the run had been killed before its result was written
    assert run_evaluation(args.replace(eval_tasks=["local_choice"])) == 0
    assert asked == []
    assert metrics(args, "local_choice") == scores


@pytest.mark.slow
def test_the_lm_eval_command_knows_our_model(tmp_path: Path) -> None:
    args, model = local_run(tmp_path)
    task = tmp_path / "tasks" / "local_choice.yaml"
    arguments = [
        *("run", "--model", "kerple_neox", "--tasks", str(task), "--output_path"),
        *(str(tmp_path / "out"), "--model_args"),
        f"pretrained={args.checkpoint.load},max_length={CONTEXT}",
    ]
    subprocess.run(
        [sys.executable, "-m", "megatron.evaluation.lm_eval_cli", *arguments],
        cwd=tmp_path,
        env={
            **os.environ,
            "PYTHONPATH": str(REPOSITORY),
            "HF_DATASETS_CACHE": str(tmp_path / "datasets"),
        },
        check=True,
        capture_output=True,
        timeout=180,
    )
    (file,) = (tmp_path / "out").rglob("results_*.json")
    found = json.loads(file.read_text("utf-8"))["results"]["local_choice"]
    expected = expected_choice(model, [row["question"] for row in QUESTIONS])
    assert found["acc,none"] == pytest.approx(expected["acc"])
    assert found["acc_norm,none"] == pytest.approx(expected["acc_norm"])


def test_the_lm_eval_command_with_a_wrong_path_is_one_line(tmp_path: Path) -> None:
    write_tasks(tmp_path / "tasks", ["x"] * len(QUESTIONS))
    task = tmp_path / "tasks" / "local_choice.yaml"
    done = subprocess.run(
        [
            *(sys.executable, "-m", "megatron.evaluation.lm_eval_cli", "run", "--model"),
            *("kerple_neox", "--tasks", str(task), "--model_args"),
            "pretrained=nowhere",
        ],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 2
    assert "error: nowhere" in done.stderr and "Traceback" not in done.stderr
