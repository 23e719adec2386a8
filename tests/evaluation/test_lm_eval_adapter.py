"""The real lm-eval on our model: scores agree with computations from the model's logits."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml

from megatron.errors import EvaluationError
from megatron.evaluation import lm_eval_adapter, lm_eval_cli
from megatron.evaluation.evaluator import run_evaluation
from megatron.evaluation.lm_eval_adapter import KerpleNeoXLM
from megatron.model import GPTModel
from megatron.neox_arguments import NeoXArgs
from megatron.tokenizer import build_tokenizer
from tests.conftest import REPOSITORY
from tests.evaluation.helpers import write_run
from tests.evaluation.lm_eval_tasks import NEW_TOKENS, QUESTIONS, STOPS, TEXTS, write_tasks
from tests.evaluation.test_evaluator import run_processes
from tests.generation.test_generation import greedy_by_hand

CONTEXT = 48  # three times the training length
TASKS = ["local_choice", "local_rolling", "local_generation"]


@pytest.fixture(autouse=True)
def only_local_tasks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Spares lm-eval the reading of its own 14,000 task files."""
    monkeypatch.setattr(lm_eval_cli, "INCLUDE_DEFAULTS", False)
    lm_eval_cli._task_manager.cache_clear()
    yield
    lm_eval_cli._task_manager.cache_clear()


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


def adapter(tmp_path: Path, **options: Any) -> tuple[KerpleNeoXLM, GPTModel]:
    _, model = write_run(tmp_path)
    tokenizer = build_tokenizer("CharLevelTokenizer")
    return KerpleNeoXLM(model, tokenizer=tokenizer, max_length=CONTEXT, **options), model


def request(*args: Any) -> Any:
    return SimpleNamespace(args=args)


def test_batches_do_not_change_log_likelihoods(tmp_path: Path) -> None:
    lm, model = adapter(tmp_path, batch_tokens=100)
    pairs = [(row["question"], f" {choice}") for row in QUESTIONS for choice in row["choices"]]
    pairs += [("", "no context"), ("far too long" * 20, "end")]
    found = lm.loglikelihood([request(*pair) for pair in pairs], disable_tqdm=True)
    for (context, continuation), (score, greedy) in zip(pairs, found, strict=True):
        before, after = list(context.encode()) or [0], list(continuation.encode())
        assert score == pytest.approx(log_likelihood(model, before, after), rel=1e-4, abs=1e-4)
        best = greedy_by_hand(model, before[-(CONTEXT + 1 - len(after)) :], len(after))
        assert greedy == (best == after)


def test_a_space_at_the_end_of_the_context_belongs_to_the_continuation(tmp_path: Path) -> None:
    lm, model = adapter(tmp_path)
    ((score, _),) = lm.loglikelihood([request("a space ", "moves")], disable_tqdm=True)
    moved = log_likelihood(model, list(b"a space"), list(b" moves"))
    assert score == pytest.approx(moved, rel=1e-4)


def test_a_context_of_spaces_alone_leaves_the_end_of_document_before_them(tmp_path: Path) -> None:
    lm, model = adapter(tmp_path)
    pairs = [("first of the batch", " x"), ("  ", "moves")]
    found = lm.loglikelihood([request(*pair) for pair in pairs], disable_tqdm=True)
    assert found[1][0] == pytest.approx(log_likelihood(model, [0], list(b"  moves")), rel=1e-4)


def test_greedy_continuations_are_recognised(tmp_path: Path) -> None:
    lm, model = adapter(tmp_path)
    prompt = list(b"A prompt")
    best = greedy_by_hand(model, prompt, 4)
    wrong = [*best[:3], best[3] ^ 1]
    found = lm._loglikelihood_tokens([(None, prompt, best), (None, prompt, wrong)], True)
    assert [greedy for _, greedy in found] == [True, False]


def test_generation_stops_at_strings_and_cuts_long_prompts(tmp_path: Path) -> None:
    lm, model = adapter(tmp_path)
    tokenizer = build_tokenizer("CharLevelTokenizer")
    prompts = ["short", "rather longer, " * 10]
    free = {"until": [], "max_gen_toks": 10}
    texts = lm.generate_until([request(prompt, free) for prompt in prompts], disable_tqdm=True)
    for prompt, text in zip(prompts, texts, strict=True):
        tokens = greedy_by_hand(model, list(prompt.encode())[-(CONTEXT - 10) :], 10)
        assert text == tokenizer.detokenize(tokens)
    assert len(texts[0]) > 3
    stop = texts[0][2]
    (cut,) = lm.generate_until(
        [request(prompts[0], {"until": [stop], "max_gen_toks": 10})], disable_tqdm=True
    )
    assert cut == texts[0].split(stop)[0]


def test_sampled_answers_do_not_depend_on_batches(tmp_path: Path) -> None:
    lm, model = adapter(tmp_path, batch_tokens=CONTEXT)  # one prompt at a time
    options = {"until": [], "max_gen_toks": 10, "do_sample": True, "temperature": 1.0}
    requests = [request(prompt, options) for prompt in ("a", "rather longer", "b")]
    alone = lm.generate_until(requests, disable_tqdm=True)
    together = KerpleNeoXLM(model, tokenizer=lm.model_tokenizer, max_length=CONTEXT)
    assert together.generate_until(requests, disable_tqdm=True) == alone
    assert len(set(alone)) == 3


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    lm, _ = adapter(tmp_path)
    with pytest.raises(EvaluationError, match="does not fit into a context of 48"):
        lm.loglikelihood([request("a", "b" * 60)], disable_tqdm=True)
    with pytest.raises(EvaluationError, match="max_gen_toks = 48 leaves no room"):
        lm.generate_until([request("a", {"until": [], "max_gen_toks": 48})], disable_tqdm=True)


def test_two_processes_give_the_same_scores(tmp_path: Path) -> None:
    args, _ = local_run(tmp_path, eval_limit=3, eval_lengths=[8, 32])
    tasks = ["local_choice", "local_rolling", "extrapolation", "receptive_field"]
    (tmp_path / "config.yml").write_text(
        yaml.safe_dump({**args.to_dict(), "eval_tasks": tasks}), "utf-8"
    )
    first, second = run_processes(
        2, [str(tmp_path / "config.yml"), "--eval_results_prefix", str(tmp_path / "two" / "x")]
    )
    assert first.returncode == second.returncode == 0, first.stderr
    assert "extrapolation: kerple_log, step 10" in first.stdout
    assert "extrapolation: kerple_log" not in second.stdout
    assert run_evaluation(args.replace(eval_tasks=tasks)) == 0
    for task in tasks:
        both = json.loads((tmp_path / "two" / f"x_{task}.json").read_text("utf-8"))["results"]
        alone = tmp_path / "run" / "results" / f"step10_{task}.json"
        assert_close(both, json.loads(alone.read_text("utf-8"))["results"])


def assert_close(one: Any, other: Any) -> None:
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            assert_close(one[key], other[key])
    elif isinstance(one, list):
        assert len(one) == len(other)
        for a, b in zip(one, other, strict=True):
            assert_close(a, b)
    else:
        assert one == pytest.approx(other, rel=1e-5)


def test_scores_agree_with_lm_evals_hugging_face_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same weights, exported and run by transformers instead of by our code."""
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    from megatron.checkpoints import read_checkpoint
    from megatron.checkpoints.hf.folder import write_hf

    args, _ = local_run(tmp_path)
    exported = tmp_path / "exported"
    exported.mkdir()
    write_hf(read_checkpoint(args.checkpoint.load or ""), exported)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf_home"))
    theirs = HFLM(
        str(exported), trust_remote_code=True, max_length=CONTEXT, device="cpu", dtype="float32"
    )
    tasks = ["local_choice", "local_rolling"]
    manager = TaskManager(include_path=str(tmp_path / "tasks"), include_defaults=False)
    found = simple_evaluate(model=theirs, tasks=tasks, task_manager=manager, log_samples=False)
    assert found is not None
    assert run_evaluation(args.replace(eval_tasks=tasks)) == 0
    for task in tasks:
        for name, value in metrics(args, task)["metrics"].items():
            assert value == pytest.approx(found["results"][task][f"{name},none"], rel=1e-4)


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
