"""Three local lm-eval tasks with data in a local file, and the scores that a model must get."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import yaml

from megatron.model import GPTModel
from megatron.neox_arguments import NeoXArgs
from megatron.tokenizer import build_tokenizer
from tests.evaluation.helpers import write_run
from tests.generation.test_decoding import greedy_by_hand

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


CONTEXT = 48  # three times the training length
TASKS = ["local_choice", "local_rolling", "local_generation"]


def local_run(tmp_path: Path, **changes: Any) -> tuple[NeoXArgs, GPTModel]:
    args, model = write_run(
        tmp_path,
        eval_tasks=TASKS,
        eval_include_path=str(tmp_path / "tasks"),
        eval_context_length=CONTEXT,
        **changes,
    )
    # Half of the answers are what the model says, so that about half of them count.
    spoken = [greedy_text(model, row["question"]) for row in QUESTIONS]
    targets = [text if i % 2 else "something else" for i, text in enumerate(spoken)]
    write_tasks(tmp_path / "tasks", targets)
    return args, model


def greedy_text(model: GPTModel, prompt: str) -> str:
    """What greedy decoding says up to a stop string; padding ids are never said."""
    tokens = greedy_by_hand(model, list(prompt.encode()), NEW_TOKENS)
    text = build_tokenizer("CharLevelTokenizer").detokenize(tokens)
    for stop in STOPS:
        text = text.split(stop)[0]
    return text


def metrics(args: NeoXArgs, task: str) -> dict[str, Any]:
    path = Path(args.checkpoint.load or "") / "results" / f"step10_{task}.json"
    scores: dict[str, Any] = json.loads(path.read_text("utf-8"))["results"][task]["tasks"][task]
    return scores


def log_likelihood(model: GPTModel, context: list[int], continuation: list[int]) -> float:
    tokens = torch.tensor([*context, *continuation])[-CONTEXT - 1 :]
    with torch.no_grad():
        log_probs = model(tokens[None, :-1])[0].double().log_softmax(-1)
    picked = log_probs.gather(1, tokens[1:, None])[:, 0]
    return float(picked[-len(continuation) :].sum())


def expected_choice(model: GPTModel, prompts: list[str]) -> dict[str, float]:
    right = normalised = 0
    for prompt, row in zip(prompts, QUESTIONS, strict=True):
        scores = [
            log_likelihood(model, list(prompt.encode()), list(f" {choice}".encode()))
            for choice in row["choices"]
        ]
        per_letter = [
            score / len(choice) for score, choice in zip(scores, row["choices"], strict=True)
        ]
        right += scores.index(max(scores)) == row["answer"]
        normalised += per_letter.index(max(per_letter)) == row["answer"]
    return {"acc": right / len(prompts), "acc_norm": normalised / len(prompts)}


def rolling_log_likelihood(model: GPTModel, text: str) -> float:
    """Windows of the whole context, the last one full and scored at its end only."""
    tokens = [0, *text.encode()]  # 0 ends a document and begins the text
    total = log_likelihood(model, tokens[:1], tokens[1 : CONTEXT + 1])
    for start in range(CONTEXT + 1, len(tokens), CONTEXT):
        end = min(start + CONTEXT, len(tokens))
        total += log_likelihood(model, tokens[end - CONTEXT - 1 : start], tokens[start:end])
    return total
