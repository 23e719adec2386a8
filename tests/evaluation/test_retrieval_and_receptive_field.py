"""passkey and receptive_field against independent computations."""

from __future__ import annotations

import json
import re
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from megatron.evaluation.context_use import input_gradient_norms, tokens_covering
from megatron.evaluation.evaluator import run_evaluation
from megatron.evaluation.retrieval import make_prompt
from megatron.model import GPTModel, ModelSpec
from megatron.neox_arguments import NeoXArgs
from megatron.tokenizer import build_tokenizer
from tests.evaluation.helpers import sharpened, write_run
from tests.evaluation.test_perplexity import official_texts


def result_of(args: NeoXArgs, name: str) -> dict[str, Any]:
    assert run_evaluation(args.replace(eval_tasks=[name])) == 0
    folder = Path(args.checkpoint.load or "") / "results"
    path = max(folder.glob(f"step10_{name}*.json"), key=lambda found: found.stat().st_mtime_ns)
    content: dict[str, Any] = json.loads(path.read_text("utf-8"))
    return content


@pytest.mark.parametrize("depth", [0.0, 0.37, 1.0])
@pytest.mark.parametrize("length", [200, 777])
def test_prompts_have_the_length_and_hide_the_key_at_the_depth(length: int, depth: float) -> None:
    tokenizer = build_tokenizer("CharLevelTokenizer")
    prompt, answer = make_prompt(tokenizer, length, depth, 5, Random(1))
    assert len(prompt) + len(answer) == length
    text, spoken = tokenizer.detokenize(prompt), tokenizer.detokenize(answer)
    assert re.fullmatch(r" \d{5}", spoken)
    key = spoken.strip()
    assert text.count(key) == 2
    assert text.endswith("The pass key is")
    hint = text.index(" The pass key is")
    first, last = len("There is a pass key hidden in this text. Find it and memorize it."), 0
    last = length - len(answer) - len(text[text.index(" What is the pass key?") :])
    last -= len(f" The pass key is {key}. Remember it. {key} is the pass key.")
    assert hint == pytest.approx(first + depth * (last - first), abs=1)


class OracleModel(GPTModel):
    """Repeats the first run of digits it has seen, from position `horizon` behind at most."""

    horizon = 10**9

    def hidden_states(self, tokens_BL: torch.Tensor, cache: Any = None) -> torch.Tensor:
        out = torch.zeros(*tokens_BL.shape, self.spec.padded_vocab_size)
        for row, tokens in enumerate(tokens_BL.tolist()):
            text = bytes(tokens).decode("latin-1")
            for place in range(len(text)):
                out[row, place, self._guess(text[: place + 1])] = 9.0
        return out

    def _guess(self, text: str) -> int:
        question = text.rfind(" What is the pass key?")
        if question < 0:
            return 0
        answer = text[question:].partition("The pass key is")[2]
        seen = text[max(0, len(text) - self.horizon) : question]
        place = seen.find("The pass key is ")
        if place < 0:
            return 0
        key = f" {seen[place + 16 : place + 21]}"
        return ord(key[len(answer)]) if len(answer) < len(key) else 0


class IdentityHead(torch.nn.Module):
    """The oracle's hidden states are its logits."""

    def __init__(self, vocab_tp: Any) -> None:
        super().__init__()
        self.vocab_tp = vocab_tp

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def test_a_model_that_finds_the_key_scores_one_and_a_short_sighted_one_only_near(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    args, model = write_run(
        tmp_path, passkey_lengths=[300], passkey_depths=3, passkey_samples=2, passkey_digits=5
    )
    oracle = OracleModel(model.spec)
    oracle.sequential[-1] = IdentityHead(model.head.vocab_tp)
    monkeypatch.setattr("megatron.generation.pretrained._load", lambda *_: oracle)
    grid = result_of(args, "passkey")["results"]["grid"]
    assert [(cell["depth"], cell["accuracy"]) for cell in grid] == [(0, 1), (0.5, 1), (1, 1)]
    oracle.horizon = 120  # sees the question and a key right before it, nothing earlier
    grid = result_of(args.replace(seed=5), "passkey")["results"]["grid"]
    assert [(cell["depth"], cell["accuracy"]) for cell in grid] == [(0, 0), (0.5, 0), (1, 1)]


def test_passkey_agrees_with_greedy_decoding(tmp_path: Path) -> None:
    args, model = write_run(
        tmp_path, passkey_lengths=[170], passkey_depths=2, passkey_samples=3, passkey_digits=1
    )
    grid = result_of(args, "passkey")["results"]["grid"]
    tokenizer = build_tokenizer("CharLevelTokenizer")
    for cell in grid:
        random = Random(f"1234/170/{cell['depth']}")
        right = token_hits = 0
        for _ in range(3):
            prompt, answer = make_prompt(tokenizer, 170, cell["depth"], 1, random)
            with torch.no_grad():
                logits = model(torch.tensor([prompt + answer]))[0]
            guesses = logits[len(prompt) - 1 : -1].argmax(-1).tolist()
            token_hits += sum(a == b for a, b in zip(guesses, answer, strict=True))
            right += guesses == answer
        assert cell["accuracy"] == right / 3
        assert cell["token_accuracy"] == token_hits / (3 * len(answer))


def test_too_short_a_length_is_an_error_and_the_others_run(tmp_path: Path) -> None:
    args, _ = write_run(tmp_path, passkey_lengths=[20, 200], passkey_depths=1, passkey_samples=1)
    content = result_of(args, "passkey")
    assert [cell["length"] for cell in content["results"]["grid"]] == [200]
    assert "use longer passkey_lengths" in content["errors"][0]["error"]


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
