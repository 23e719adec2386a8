"""Our model as lm-eval asks it: scores agree with computations from the model's logits."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from megatron.errors import EvaluationError
from megatron.evaluation.evaluator import run_evaluation
from megatron.evaluation.lm_eval_adapter import KerpleNeoXLM
from megatron.model import GPTModel
from megatron.tokenizer import build_tokenizer
from tests.evaluation.helpers import write_run
from tests.evaluation.lm_eval_tasks import CONTEXT, QUESTIONS, local_run, log_likelihood, metrics
from tests.evaluation.test_evaluator import run_processes
from tests.generation.test_decoding import greedy_by_hand

pytestmark = pytest.mark.usefixtures("only_local_tasks")


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
    with pytest.raises(EvaluationError, match="max_gen_toks = 48 leaves no tokens for a prompt"):
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
