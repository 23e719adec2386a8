"""Train a tokenizer on your text: GPT-2-style byte-level BPE, or SentencePiece."""

from __future__ import annotations

import argparse
import io
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from megatron.atomic_files import atomic_writer, check_writable
from megatron.data.chunks import read_texts
from megatron.data.streams import list_files
from megatron.errors import DataError, TokenizerError
from megatron.tokenizer.byte_pairs import (
    END_OF_TEXT,
    not_empty,
    train_byte_pairs,
    write_gpt2_files,
)

SMALLEST_VOCABULARY = 260  # 256 bytes, the end token, and something learned


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="train_tokenizer.py",
        description=__doc__,
        epilog="GPT2BPETokenizer writes vocab.json and merges.txt, HFTokenizer tokenizer.json, "
        "SPMTokenizer tokenizer.model. Give the output folder as vocab_file.",
    )
    parser.add_argument("--input", nargs="+", required=True, type=Path, metavar="PATH")
    parser.add_argument("--output-dir", required=True, type=Path)
    parser.add_argument("--vocab-size", type=int, default=32768)
    parser.add_argument("--type", choices=sorted(TRAINERS), default="GPT2BPETokenizer")
    parser.add_argument("--jsonl-key", default="text", help="JSON key of the text (default: text)")
    parser.add_argument(
        "--pattern",
        metavar="REGEX",
        help="HFTokenizer: pieces that no token crosses, with Unicode classes such as \\p{L} "
        "(default: GPT-2's)",
    )
    parser.add_argument(
        "--max-megabytes", type=float, help="learn from the first so many megabytes only"
    )
    parser.add_argument("-q", "--quiet", action="store_true", help="no progress bar")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    if args.vocab_size < SMALLEST_VOCABULARY:
        raise DataError(f"--vocab-size {args.vocab_size}: at least {SMALLEST_VOCABULARY}")
    if args.pattern is not None and args.type != "HFTokenizer":
        raise TokenizerError(f"--pattern: {args.type} has its own; use --type HFTokenizer")
    files, _ = list_files(args.input)
    texts = read_texts(files, args.jsonl_key, args.max_megabytes)
    check_writable(args.output_dir / "vocab.json", "--output-dir")
    if args.pattern is not None:
        size = _hugging_face(texts, args.output_dir, args.vocab_size, not args.quiet, args.pattern)
    else:
        size = TRAINERS[args.type](texts, args.output_dir, args.vocab_size, not args.quiet)
    print(f"{args.type} with {size} tokens -> {args.output_dir}")
    return 0


def _gpt2_bpe(texts: Iterator[str], folder: Path, size: int, progress: bool) -> int:
    return write_gpt2_files(train_byte_pairs(texts, size, progress), folder)


def _hugging_face(
    texts: Iterator[str], folder: Path, size: int, progress: bool, pattern: str | None = None
) -> int:
    tokenizer = train_byte_pairs(texts, size, progress, pattern)
    with atomic_writer(folder / "tokenizer.json") as handle:
        handle.write(tokenizer.to_str(pretty=True).encode())
    return int(tokenizer.get_vocab_size())


def _sentence_piece(texts: Iterator[str], folder: Path, size: int, progress: bool) -> int:
    import sentencepiece

    lines = (line for text in not_empty(texts) for line in text.splitlines() if line)
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


TRAINERS: dict[str, Callable[[Iterator[str], Path, int, bool], int]] = {
    "GPT2BPETokenizer": _gpt2_bpe,
    "HFTokenizer": _hugging_face,
    "SPMTokenizer": _sentence_piece,
}
