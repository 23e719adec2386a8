"""Induction against losses computed from full logits, text by text."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatron.evaluation.induction import Induction, distances, repeated_text
from megatron.tokenizer import build_tokenizer
from tests.evaluation.helpers import plain_losses, result_of, write_run


def test_the_last_tokens_repeat_those_before_them() -> None:
    text = repeated_text(12, 4, range(100), "seed")
    assert len(text) == 12 and text[8:] == text[4:8]
    assert text != repeated_text(12, 4, range(100), "other")
    assert repeated_text(12, 6, range(100), "seed")[:6] == text[:6]


@pytest.mark.parametrize(
    ("length", "expected"), [(128, [8, 16, 32, 64]), (40, [8, 16, 20]), (16, [8]), (10, [5])]
)
def test_distances_double_up_to_half_of_the_length(length: int, expected: list[int]) -> None:
    assert distances(length) == expected


def test_losses_are_those_of_the_repeated_tokens_but_the_first(tmp_path: Path) -> None:
    args, model = write_run(tmp_path, eval_lengths=[16, 32], eval_num_sequences=3, data_seed=5)
    content = result_of(args, "induction")
    tokenizer = build_tokenizer("CharLevelTokenizer")
    vocabulary = [token for token in range(tokenizer.vocab_size) if token != tokenizer.eod]
    for entry, length in zip(content["results"]["grid"], (16, 32), strict=True):
        for own in entry["by_distance"]:
            scored = []
            for number in range(3):
                text = repeated_text(length, own["distance"], vocabulary, f"5/{length}/{number}")
                losses = plain_losses(model, torch.tensor(text))
                # losses[i] is of token i + 1; the first repeated token is length - distance.
                scored += losses[length - own["distance"] :].tolist()
            assert own["tokens"] == len(scored) == 3 * (own["distance"] - 1)
            assert own["loss"] == pytest.approx(sum(scored) / len(scored), rel=1e-5)
        assert entry["loss"] == entry["by_distance"][-1]["loss"]
        assert entry["by_distance"][-1]["distance"] == length // 2
    cells = Induction().cells(content["results"])
    long = content["results"]["grid"][1]
    assert cells["repeated", 32] == long["loss"]
    assert {n for group, n in cells if group == "by_distance"} == {8, 16}
    assert cells["by_distance", 8] == long["by_distance"][0]["loss"]


def test_a_length_that_cannot_repeat_is_named(tmp_path: Path) -> None:
    args, _ = write_run(tmp_path, eval_lengths=[2, 16])
    content = result_of(args, "induction")
    assert content["errors"] == [
        {
            "kind": "repeated",
            "length": 2,
            "error": "2 tokens are too few to repeat; use longer eval_lengths",
        }
    ]
