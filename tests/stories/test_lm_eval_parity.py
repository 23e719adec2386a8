"""The real lm-eval gives an export, through its own `hf` model, the scores of our adapter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lm_eval
import pytest
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

from megatron.checkpoints import read_checkpoint
from megatron.checkpoints.hf.folder import write_hf
from megatron.evaluation.lm_eval_adapter import KerpleNeoXLM
from tests.evaluation.helpers import tiny_config, write_checkpoint
from tests.evaluation.lm_eval_tasks import QUESTIONS, write_tasks

CONTEXT = 48  # three times the training length
TASKS = ["local_choice", "local_rolling", "local_generation"]


def scores(model: Any, tasks: Path) -> dict[str, Any]:
    manager = TaskManager(include_path=str(tasks), include_defaults=False)
    found = lm_eval.simple_evaluate(
        model=model, tasks=TASKS, task_manager=manager, log_samples=True, bootstrap_iters=0
    )
    assert found is not None
    return found


@pytest.mark.parametrize("pos_emb", ["kerple_log", "rotary"])
def test_lm_eval_scores_of_an_export_equal_our_adapters(tmp_path: Path, pos_emb: str) -> None:
    run, export = tmp_path / "run", tmp_path / "export"
    write_checkpoint(run, tiny_config(pos_emb=pos_emb))
    export.mkdir()
    write_hf(read_checkpoint(run), export)
    tasks = write_tasks(tmp_path / "tasks", ["a target"] * len(QUESTIONS))
    ours = scores(KerpleNeoXLM(str(run), max_length=CONTEXT, device="cpu"), tasks)
    exported = HFLM(str(export), device="cpu", max_length=CONTEXT, batch_size=3, dtype="float32")
    theirs = scores(exported, tasks)
    for task in TASKS:
        for metric, value in ours["results"][task].items():
            if isinstance(value, float):
                assert theirs["results"][task][metric] == pytest.approx(value, rel=1e-4), metric
        ordered = [
            sorted(found["samples"][task], key=lambda sample: sample["doc_id"])
            for found in (ours, theirs)
        ]
        for mine, other in zip(*ordered, strict=True):
            assert _numbers(mine) == pytest.approx(_numbers(other), abs=1e-3), task


def _numbers(sample: dict[str, Any]) -> list[float]:
    """Log-likelihoods of every request; generated text as its letters' codes."""
    answers = [answer for request in sample["filtered_resps"] for answer in _flat(request)]
    return [float(answer) for answer in answers]


def _flat(answer: Any) -> list[float]:
    if isinstance(answer, str):
        return [float(ord(letter)) for letter in answer]
    if isinstance(answer, list | tuple):
        return [number for part in answer for number in _flat(part)]
    return [float(answer)]
