"""Associative recall and passkeys: the accuracy of models that are known."""

from __future__ import annotations

import re
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from megatron.data.recall_text import RECALL_KINDS
from megatron.evaluation import retrieval
from megatron.evaluation.evaluator import run_evaluation
from megatron.evaluation.losses import Score
from megatron.evaluation.retrieval import make_prompt
from megatron.model import GPTModel
from megatron.tokenizer import build_tokenizer
from tests.evaluation.helpers import result_of, write_run


def near_only(reach: int) -> Any:
    """A model that recalls what it first saw at most `reach` symbols ago."""

    def scores(model: Any, texts: Any, places: Any) -> list[Score]:
        found = []
        for text, own in zip(texts, places, strict=True):
            symbols = bytes(text).decode()
            if "#" in symbols or "@" in symbols:
                start = symbols.index("#" if "#" in symbols else "@") + 1
                found.append([place - (start + i) <= reach for i, place in enumerate(own)])
            else:
                found.append(
                    [place - symbols.index(symbols[place - 1]) - 1 <= reach for place in own]
                )
        return [Score(torch.zeros(len(own)), torch.tensor(own)) for own in found]

    return scores


def test_accuracy_by_length_and_distance(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    args, _ = write_run(tmp_path, eval_lengths=[64, 512], recall_samples=40)
    monkeypatch.setattr(retrieval, "score_tokens", near_only(63))
    cells = {
        (cell["kind"], cell["length"]): cell
        for cell in result_of(args, "recall")["results"]["grid"]
    }
    assert cells["mqar", 64]["accuracy"] == cells["passkey_in_noise", 64]["whole"] == 1.0
    for kind in ("digit_in_noise", "mqar", "passkey_in_noise"):
        cell = cells[kind, 512]
        assert 0.0 < cell["accuracy"] < 0.4
        for part in cell["by_distance"]:
            assert part["accuracy"] == (1.0 if part["to"] <= 64 else 0.0)
        assert sum(part["symbols"] for part in cell["by_distance"]) == cell["symbols"]


def test_other_tokens_than_bytes_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    args, _ = write_run(tmp_path, eval_lengths=[64])
    from megatron.tokenizer import build_tokenizer

    tokenizer = build_tokenizer("CharLevelTokenizer")
    monkeypatch.setattr(type(tokenizer), "tokenize", lambda self, text: [1] * (len(text) // 2))
    assert run_evaluation(args.replace(eval_tasks=["recall"])) == 1
    assert "one token per symbol" in capsys.readouterr().err


@pytest.mark.parametrize("method", ["kerple_log", "gauss_wht1", "none"])
def test_attention_on_the_answer_is_that_of_a_softmax_by_hand(tmp_path: Path, method: str) -> None:
    length, samples = 48, 3
    args, model = write_run(
        tmp_path, eval_lengths=[length], recall_samples=samples, pos_emb=method, data_seed=7
    )
    grid = result_of(args, "recall_attention")["results"]["grid"]
    for cell in grid:
        shares = torch.zeros(2, 2)
        for number in range(samples):
            random = Random(f"7/{cell['kind']}/{length}/{number}")
            made = RECALL_KINDS[cell["kind"]](length, random)
            weights = first_layer_weights(model, made.text)
            for place, distance in zip(made.places, made.distances, strict=True):
                row = weights[:, place - 1]
                far = row[:, : max(0, place - 1 - 16 + 1)].sum(-1)
                answer = row[:, place - distance]
                if distance > 16:
                    far = far - answer
                shares += torch.stack([answer, far], -1) / samples / len(made.places)
        own = [(head["answer"], head["far"]) for head in cell["heads"] if head["layer"] == 0]
        torch.testing.assert_close(torch.tensor(own), shares, rtol=1e-4, atol=1e-6)
    assert len(grid) == 3 and len(grid[0]["heads"]) == 4
    assert all(layer.attention.observer is None for layer in model.layers)


def first_layer_weights(model: GPTModel, text: str) -> torch.Tensor:
    """The attention of layer 0, [heads, queries, keys], with a mask and a softmax by hand."""
    tokens = torch.tensor([list(text.encode())])
    layer, tables = model.layers[0], model.positional_tables(len(text))
    with torch.no_grad():
        x = layer.input_layernorm(model.embedding(tokens))
        qkv = layer.attention.query_key_value(x)[0].unflatten(-1, (2, 3, 16)).permute(2, 1, 0, 3)
        scores = qkv[0] @ qkv[1].transpose(1, 2) / 4
        place = torch.arange(len(text))
        distance = (place[:, None] - place).clamp(min=0)
        if tables.weight is not None:
            scores = scores * tables.weight[:, distance]
        if tables.bias is not None:
            scores = scores + tables.bias[:, distance]
        return scores.masked_fill(place[:, None] < place, -torch.inf).softmax(-1)


# Passkeys in prose, against independent computations.


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
    monkeypatch.setattr("megatron.generation.pretrained.load_pretrained", lambda *_, **__: oracle)
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
