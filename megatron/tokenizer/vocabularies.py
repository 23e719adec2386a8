"""Vocabularies learned from text: GPT-2-style byte-level byte pairs, or SentencePiece's."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import regex
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from megatron.atomic_files import atomic_writer
from megatron.errors import DataError, TokenizerError
from megatron.tokenizer.base import END_OF_TEXT, PADDING

VOCABULARY, MERGES = "vocab.json", "merges.txt"
TRAINABLE = ("GPT2BPETokenizer", "HFTokenizer", "SPMTokenizer")


def train_byte_pairs(
    texts: Iterator[str], size: int, progress: bool, pattern: str | None = None
) -> Tokenizer:
    r"""A tokenizer of ``size`` tokens: 256 bytes, the end token, padding, and what it learned.

    No token crosses a piece of ``pattern``, GPT-2's by default; ``\p{N}{1,3}|\p{L}+|...`` would
    cut numbers into threes.
    """
    tokenizer = Tokenizer(models.BPE())
    if pattern is None:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    else:
        _check_pattern(pattern)
        pieces = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
        as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pieces, as_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[END_OF_TEXT, PADDING],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=progress and sys.stderr.isatty(),
    )
    tokenizer.train_from_iterator(_not_empty(texts), trainer)
    return tokenizer


def _check_pattern(pattern: str) -> None:
    """Refuse an invalid pattern, and one that matches the empty text, which never advances."""
    shown = f"--pattern {pattern!r:.80}"
    try:
        if regex.fullmatch(pattern, ""):
            raise TokenizerError(f"{shown}: it matches the empty text")
    except regex.error as error:
        raise TokenizerError(f"{shown}: not a regular expression: {error}") from error


def write_gpt2_files(tokenizer: Tokenizer, folder: Path) -> int:
    """GPT-2's two files, vocab.json and merges.txt; the number of tokens."""
    model = json.loads(tokenizer.to_str())["model"]
    pairs = [pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]]
    with atomic_writer(folder / MERGES) as handle:
        handle.write(("#version: 0.2\n" + "\n".join(pairs) + "\n").encode())
    with atomic_writer(folder / VOCABULARY) as handle:
        handle.write(json.dumps(model["vocab"], ensure_ascii=False).encode())
    return int(tokenizer.get_vocab_size())


def _not_empty(texts: Iterator[str]) -> Iterator[str]:
    """The same texts, or an error if there is none."""
    first = next(texts, None)
    if first is None:
        raise DataError("no text in the input")
    yield first
    yield from texts


def train_vocabulary(
    kind: str, texts: Iterator[str], folder: Path, size: int, progress: bool, pattern: str | None
) -> int:
    """Write the files of one of the ``TRAINABLE`` kinds; the number of its tokens."""
    if pattern is not None and kind != "HFTokenizer":
        raise TokenizerError(f"--pattern: {kind} has its own; use --type HFTokenizer")
    if kind == "SPMTokenizer":
        return _sentence_piece(texts, folder, size, progress)
    tokenizer = train_byte_pairs(texts, size, progress, pattern)
    if kind == "GPT2BPETokenizer":
        return write_gpt2_files(tokenizer, folder)
    with atomic_writer(folder / "tokenizer.json") as handle:
        handle.write(tokenizer.to_str(pretty=True).encode())
    return int(tokenizer.get_vocab_size())


def _sentence_piece(texts: Iterator[str], folder: Path, size: int, progress: bool) -> int:
    import sentencepiece

    lines = (line for text in _not_empty(texts) for line in text.splitlines() if line)
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=lines,
            model_writer=model,
            vocab_size=size,
            model_type="bpe",
            byte_fallback=True,
            character_coverage=0.9995,
            user_defined_symbols=[END_OF_TEXT],
            max_sentence_length=65536,
            minloglevel=1 if progress else 2,
        )
    except RuntimeError as error:
        raise DataError(f"SentencePiece could not train on this text: {error}") from error
    with atomic_writer(folder / "tokenizer.model") as handle:
        handle.write(model.getvalue())
    return size
