"""LongPPL against its definition, on losses made by hand and on a model's own logits."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from megatron.evaluation import context_use
from megatron.evaluation.context_use import (
    key_tokens,
    long_perplexity,
    scored,
    short_contexts,
)
from megatron.evaluation.evaluator import run_evaluation
from megatron.evaluation.sequences import SequenceSet
from tests.evaluation.helpers import plain_losses, write_run
from tests.evaluation.test_perplexity import official_texts
from tests.evaluation.test_retrieval_and_receptive_field import result_of


def test_a_key_token_gains_more_than_two_and_ends_above_minus_two() -> None:
    long = torch.tensor([0.5, 0.5, 1.9, 2.1, 0.0])
    short = torch.tensor([2.6, 2.4, 4.0, 9.0, 2.0])
    assert key_tokens(long, short).tolist() == [True, False, True, False, False]


def test_the_result_averages_the_models_losses_over_the_evaluators_key_tokens() -> None:
    model = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    long = torch.tensor([[0.1, 0.1], [0.1, 5.0]])
    short = torch.tensor([[3.0, 0.2], [2.2, 9.0]])
    result = long_perplexity(model, long, short)
    assert result["key_tokens"] == 2 and result["tokens"] == 4
    assert result["longppl"] == pytest.approx(math.exp((1.0 + 3.0) / 2))
    assert result["ppl"] == pytest.approx(math.exp(2.5))
    none = long_perplexity(model, long, long)
    assert none["longppl"] is None and none["key_tokens"] == 0


@pytest.mark.parametrize(("context", "step"), [(4, 2), (4, 3), (5, 1), (8, 4), (11, 2)])
def test_every_token_beyond_the_short_context_is_scored_once(context: int, step: int) -> None:
    texts = SequenceSet(11, [lambda: torch.arange(12), lambda: torch.arange(100, 112)])
    windows = short_contexts(texts, context, step)
    assert all(len(windows[i]) == context + step for i in range(len(windows)))
    # A "loss" that names its token shows where each score comes from.
    losses = [windows[i][1:].float() for i in range(len(windows))]
    for number, own in enumerate(scored(losses, texts, context)):
        assert own.tolist() == [100 * number + token for token in range(context, 12)]
    assert all(int(windows[i][0]) % 100 % step == 0 for i in range(len(windows)))


@pytest.fixture
def easy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Thresholds that an untrained model's losses of random tokens pass now and then."""
    monkeypatch.setattr(context_use, "GAIN", 0.3)
    monkeypatch.setattr(context_use, "FLOOR", -6.0)


@pytest.mark.usefixtures("easy")
def test_the_task_against_full_logits(tmp_path: Path) -> None:
    args, model = write_run(tmp_path, eval_lengths=[16, 48], longppl_short_context=16)
    content = result_of(args, "longppl")
    (entry,) = content["results"]["valid"]
    assert [error["length"] for error in content["errors"]] == [16, 16]
    assert "no longer than the short context" in content["errors"][0]["error"]
    full, short = [], []
    for text in official_texts(args, 48, 5)["valid"]:
        full.append(plain_losses(model, text)[15:])
        for token in range(16, 49):
            start = (token - 16) // 4 * 4
            short.append(plain_losses(model, text[start : token + 1])[-1])
    long = torch.cat(full)
    keys = (torch.stack(short) - long > 0.3) & (long < 6)
    assert 0 < entry["key_tokens"] == int(keys.sum()) < entry["tokens"] == 5 * 33
    assert entry["longppl"] == pytest.approx(float(long[keys].mean().exp()), rel=1e-4)
    assert entry["ppl"] == pytest.approx(float(long.mean().exp()), rel=1e-4)


@pytest.mark.usefixtures("easy")
def test_another_models_key_tokens(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    settings = {"eval_lengths": [48], "longppl_short_context": 16}
    args, model = write_run(tmp_path / "a", **settings)
    other, judge = write_run(tmp_path / "b", pos_emb="alibi", seed=77, **settings)
    named = args.replace(longppl_evaluator=other.checkpoint.load)
    (entry,) = result_of(named, "longppl")["results"]["valid"]
    losses, long, short = [], [], []
    for text in official_texts(args, 48, 5)["valid"]:
        losses.append(plain_losses(model, text)[15:])
        long.append(plain_losses(judge, text)[15:])
        for token in range(16, 49):
            short.append(plain_losses(judge, text[(token - 16) // 4 * 4 : token + 1])[-1])
    judged = torch.cat(long)
    keys = (torch.stack(short) - judged > 0.3) & (judged < 6)
    assert entry["key_tokens"] == int(keys.sum()) > 0
    assert entry["longppl"] == pytest.approx(float(torch.cat(losses)[keys].mean().exp()), rel=1e-4)


def test_an_evaluator_that_is_not_there_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    args, _ = write_run(tmp_path, eval_lengths=[48], longppl_short_context=16)
    wrong = args.replace(longppl_evaluator=str(tmp_path / "none"), eval_tasks=["longppl"])
    assert run_evaluation(wrong) == 1
    assert "none" in capsys.readouterr().err
