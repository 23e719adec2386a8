"""Words and characters of a text in any script.

`str.split` knows spaces only and `re` has no Unicode classes: accents that are code points of their
own (marks), and digits of any script, belong to words here.
"""

from __future__ import annotations

import regex

__all__ = ["count_characters", "count_words"]

# Letters, marks and digits; an apostrophe or hyphen between two of them does not end the word. Han,
# Hiragana, Thai and the like write no spaces: each of their characters counts as a word.
_UNSPACED = r"\p{Han}\p{Hiragana}\p{Katakana}\p{Thai}\p{Lao}\p{Khmer}\p{Myanmar}"
_INSIDE = rf"[[\p{{L}}\p{{M}}\p{{N}}_]--[{_UNSPACED}]]"
_WORD = regex.compile(rf"[{_UNSPACED}]|{_INSIDE}+(?:['’\-]{_INSIDE}+)*", regex.V1)
_CHARACTER = regex.compile(r"\X")


def count_words(text: str) -> int:
    """Words, in the sense above."""
    return sum(1 for _ in _WORD.finditer(text))


def count_characters(text: str) -> int:
    """Characters as a reader sees them: a letter with its accents, or an emoji, is one."""
    return sum(1 for _ in _CHARACTER.finditer(text))
