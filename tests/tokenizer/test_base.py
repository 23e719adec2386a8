"""Words and characters in several scripts."""

from __future__ import annotations

import pytest

from megatron.tokenizer.base import count_characters, count_words


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", 0),
        ("The cat's well-known tail -- isn't it?", 6),
        ("naïve cafe\u0301, 42 Дом, ١٢٣", 5),
        ("x_1 = f(y)", 3),
        ("你好 world", 3),
    ],
)
def test_words(text: str, words: int) -> None:
    assert count_words(text) == words


@pytest.mark.parametrize(
    ("text", "characters"), [("cafe\u0301", 4), ("a\r\nb", 3), ("👩‍👩‍👧 ok", 4)]
)
def test_characters_are_what_a_reader_sees(text: str, characters: int) -> None:
    assert count_characters(text) == characters < len(text) + 1
