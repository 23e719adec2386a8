"""A prepared corpus in numbers: documents, tokens, lengths, and how many tokens a word costs.

Words and characters are counted in any script. `str.split` knows spaces only and `re` has no
Unicode classes: accents that are code points of their own (marks), and digits of any script, belong
to words here.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import regex

from megatron.data.chunks import read_texts
from megatron.data.indexed_dataset import IndexedDataset, read_manifest

__all__ = ["corpus_numbers", "count_characters", "count_words", "sample_counts_of_text"]

SAMPLE_MEGABYTES = 1.0  # counting words is slower than some tokenizers


def sample_counts_of_text(files: Sequence[Path], key: str) -> dict[str, int]:
    """Code points, characters and words of the first megabyte, for the manifest."""
    counts = {"code_points": 0, "characters": 0, "words": 0}
    for text in read_texts(files, key, SAMPLE_MEGABYTES):
        text = text[: int(SAMPLE_MEGABYTES * 1e6)]
        counts["code_points"] += len(text)
        counts["characters"] += count_characters(text)
        counts["words"] += count_words(text)
    return counts


def corpus_numbers(prefix: Path) -> list[str]:
    """Lines for people."""
    sizes = IndexedDataset(prefix).sizes
    tokens = int(sizes.sum(dtype=np.int64))
    shortest, median, longest = (int(x) for x in np.quantile(sizes, [0, 0.5, 1], method="nearest"))
    lines = [
        f"{len(sizes):,} documents, {tokens:,} tokens",
        f"tokens per document: {shortest:,} to {longest:,}, median {median:,}, "
        f"mean {tokens / max(len(sizes), 1):,.0f}",
    ]
    return lines + _per_word(read_manifest(prefix) or {}, tokens)


def _per_word(manifest: dict[str, Any], tokens: int) -> list[str]:
    sample = manifest.get("text_sample") or {}
    code_points = manifest.get("text_characters") or 0
    if not sample.get("words") or not code_points or not tokens:
        return []
    scale = code_points / sample["code_points"]
    words, characters = sample["words"] * scale, sample["characters"] * scale
    return [f"about {words:,.0f} words: {tokens / words:.2f} tokens a word, "
            f"{characters / tokens:.2f} characters a token"]  # fmt: skip


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
