"""LongPPL against its definition, on losses made by hand and on a model's own logits."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from megatron.evaluation import context_use
from megatron.evaluation.context_use import (
    input_gradient_norms,
    key_tokens,
    long_perplexity,
    scored,
    short_contexts,
    tokens_covering,
)
from megatron.evaluation.evaluator import run_evaluation
from megatron.evaluation.sequences import SequenceSet
from megatron.model import GPTModel, ModelSpec
from tests.evaluation.helpers import plain_losses, result_of, sharpened, write_run
from tests.evaluation.test_perplexity import official_texts


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


# receptive_field against finite differences.


def finite_difference_norms(model: GPTModel, tokens: torch.Tensor) -> torch.Tensor:
    """Norms of the gradient of the best next logit, by central differences in fp64."""
    with torch.no_grad():
        best = int(model(tokens[None])[0, -1].argmax())
        width = model.spec.hidden_size
        change = torch.zeros(len(tokens), width, dtype=torch.float64)
        hook = model.embedding.word_embeddings.register_forward_hook(
            lambda _module, _inputs, output: output + change
        )
        gradient = torch.zeros_like(change)
        for position in range(len(tokens)):
            for i in range(width):
                sides = []
                for step in (1e-5, -1e-5):
                    change[position, i] = step
                    sides.append(float(model(tokens[None])[0, -1, best]))
                change[position, i] = 0
                gradient[position, i] = (sides[0] - sides[1]) / 2e-5
        hook.remove()
    return gradient.norm(dim=-1)


def test_gradient_norms_agree_with_finite_differences() -> None:
    spec = ModelSpec(
        padded_vocab_size=64, num_layers=1, hidden_size=8, num_attention_heads=2, seq_length=16,
        pos_emb="alibi", attention_engine="naive",
    )  # fmt: skip
    model = sharpened(GPTModel(spec)).double()
    tokens = torch.tensor([3, 1, 4, 1, 5])
    expected = finite_difference_norms(model, tokens)
    torch.testing.assert_close(input_gradient_norms(model, tokens), expected, rtol=1e-3, atol=1e-6)


def test_receptive_field_counts_tokens_from_the_end(tmp_path: Path) -> None:
    args, model = write_run(tmp_path, eval_lengths=[24], eval_num_sequences=3)
    (entry,) = result_of(args, "receptive_field")["results"]["valid"]
    curves = []
    for text in official_texts(args, 24, 3)["valid"]:
        norms = input_gradient_norms(model, text[:-1])
        curves.append(torch.tensor([float(norms[-n:].sum() / norms.sum()) for n in range(1, 25)]))
    mean = torch.stack(curves).mean(0)
    expected = next(n for n in range(1, 25) if mean[n - 1] >= 0.99)
    assert entry["tokens_for"]["0.99"] == expected
    assert entry["curve"][-1] == {"tokens": 24, "share": pytest.approx(1.0)}
    assert entry["curve"][0]["share"] == pytest.approx(float(mean[0]), rel=1e-4)


def test_a_window_bounds_the_receptive_field(tmp_path: Path) -> None:
    args, _ = write_run(tmp_path, eval_lengths=[32], eval_window=3)
    assert run_evaluation(args.replace(eval_tasks=["receptive_field"])) == 0
    path = Path(args.checkpoint.load or "") / "results" / "step10_receptive_field_window3.json"
    (entry,) = json.loads(path.read_text("utf-8"))["results"]["valid"]
    assert entry["tokens_for"]["0.99"] <= 1 + 2 * (3 - 1)  # two layers, two steps back each


def test_tokens_covering() -> None:
    shares = torch.tensor([0.5, 0.9, 0.99, 1.0], dtype=torch.float64)
    assert [tokens_covering(shares, share) for share in (0.4, 0.5, 0.6, 0.99, 1.0)] == [
        1,
        1,
        2,
        3,
        4,
    ]
