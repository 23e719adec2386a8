"""Three local lm-eval tasks, with data in a local file: nothing is downloaded."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

QUESTIONS = [
    {"question": "The sky is", "choices": ["blue", "green and old", "x"], "answer": 0},
    {"question": "Two and two make", "choices": ["three", "four", "twenty-two"], "answer": 1},
    {"question": "Grass", "choices": ["is red", "is green", "hums"], "answer": 1},
    {"question": "A cat says", "choices": ["woof", "moo", "meow"], "answer": 2},
    {"question": "Water is rather", "choices": ["wet", "dry", "loud"], "answer": 0},
    {"question": "It", "choices": ["a", "b", "c"], "answer": 2},
    {"question": "Long ago, in a far away place, there", "choices": ["was", "x"], "answer": 0},
]
STOPS = ["q", "\n\n"]
NEW_TOKENS = 12
TEXTS = [
    {"text": "A short text."},
    {"text": "A text that is longer than the context, so that it needs several windows. " * 2},
    {"text": "One more text of middling length, with a few commas, and an end."},
]


def _data(folder: Path, name: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    file = folder / f"{name}.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    return {
        "task": name,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(file), "fewshot": str(file)}},
        "test_split": "test",
    }


def write_tasks(folder: Path, targets: Sequence[str]) -> Path:
    """Task files `local_choice`, `local_rolling` and `local_generation` (with these targets)."""
    folder.mkdir()
    asked = [
        {"question": row["question"], "target": target}
        for row, target in zip(QUESTIONS, targets, strict=True)
    ]
    choice = {
        **_data(folder, "local_choice", QUESTIONS),
        "output_type": "multiple_choice",
        "fewshot_split": "fewshot",
        "doc_to_text": "{{question}}",
        "doc_to_choice": "choices",
        "doc_to_target": "answer",
        "target_delimiter": " ",
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
        "metadata": {"version": 1.0},
    }
    rolling = {
        **_data(folder, "local_rolling", TEXTS),
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{text}}",
        "metric_list": [{"metric": "word_perplexity"}, {"metric": "bits_per_byte"}],
        "metadata": {"version": 1.0},
    }
    generation = {
        **_data(folder, "local_generation", asked),
        "output_type": "generate_until",
        "doc_to_text": "{{question}}",
        "doc_to_target": "target",
        "generation_kwargs": {"until": STOPS, "max_gen_toks": NEW_TOKENS, "do_sample": False},
        "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
        "metadata": {"version": 1.0},
    }
    for task in (choice, rolling, generation):
        (folder / f"{task['task']}.yaml").write_text(yaml.safe_dump(task), "utf-8")
    return folder
