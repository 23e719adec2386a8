"""Made-up text for recall: what is asked for was told, at the distance that is said."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

from megatron.commands import run
from megatron.data import IndexedDataset
from megatron.data.recall_text import (
    DIGIT_NOISE,
    MQAR_NOISE,
    PASSKEY_NOISE,
    digit_in_noise,
    mqar,
    passkey_in_noise,
)


@pytest.mark.parametrize(("length", "asked"), [(16, 1), (72, 8), (127, 3), (1000, 1)])
@pytest.mark.parametrize("seed", range(5))
def test_every_key_comes_again_with_its_value(length: int, asked: int, seed: int) -> None:
    made = mqar(length, Random(seed), asked)
    assert len(made.text) == length and len(made.places) == 4 * asked
    pairs = dict(zip(made.text[0:8:2], made.text[1:8:2], strict=True))
    assert len(pairs) == 4
    assert sorted(made.text[place - 1] for place in made.places) == sorted([*pairs] * asked)
    for place, distance in zip(made.places, made.distances, strict=True):
        assert made.text[place] == pairs[made.text[place - 1]]
        assert made.text[place - distance] == made.text[place] and place - distance < 8
    told = {*range(8)} | {p for place in made.places for p in (place, place - 1)}
    assert all(made.text[i] in MQAR_NOISE for i in range(length) if i not in told)


@pytest.mark.parametrize(("length", "asked"), [(12, 1), (45, 8), (127, 3), (1000, 1)])
@pytest.mark.parametrize("seed", range(5))
def test_the_passkey_is_asked_for_at_the_end(length: int, asked: int, seed: int) -> None:
    made = passkey_in_noise(length, Random(seed), asked)
    key = made.text.split("#")[1][:4]
    answers = [part[:4] for part in made.text.split("?")[1:]]
    assert len(made.text) == length and answers == [key] * asked and made.text.endswith(f"?{key}")
    assert "".join(made.text[place] for place in made.places) == key * asked
    for place, distance in zip(made.places, made.distances, strict=True):
        assert made.text[place - distance] == made.text[place]
        assert place - distance - 4 <= made.text.index("#") < place - distance
    assert set(made.text) - set("#?0123456789") <= set(PASSKEY_NOISE)


@pytest.mark.parametrize(("length", "asked"), [(4, 1), (18, 8), (1000, 1)])
def test_the_digit_is_asked_for_at_the_end(length: int, asked: int) -> None:
    made = digit_in_noise(length, Random(1), asked)
    digit = made.text[made.text.index("@") + 1]
    assert len(made.text) == length and made.text.endswith(f"!{digit}")
    assert [made.text[place - 1 : place + 1] for place in made.places] == [f"!{digit}"] * asked
    for place, distance in zip(made.places, made.distances, strict=True):
        assert made.text[place - distance - 1] == "@"
    assert set(made.text) - set("@!0123456789") <= set(DIGIT_NOISE)


def test_the_corpus_has_documents_of_the_training_length(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megatron.data.recall_text.DOCUMENTS", 10)
    assert run("prepare_data", ["-d", str(tmp_path), "-q", "recall"]) == 0
    data = IndexedDataset(tmp_path / "recall" / "recall_text_document")
    assert data.sizes.tolist() == [128] * 10
    assert bytes(data[2][:-1].tolist()).count(b"#") == 1
