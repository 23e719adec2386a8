#!/usr/bin/env python
"""Train a tokenizer on your text: GPT-2-style byte-level BPE, or SentencePiece."""

from __future__ import annotations

import argparse
import io
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron.atomic_files import atomic_writer
from megatron.data.chunks import read_chunks
from megatron.data.streams import list_files
from megatron.errors import DataError

END_OF_TEXT = "<|endoftext|>"
PADDING = "<|padding|>"
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
        "--max-megabytes", type=float, help="learn from the first so many megabytes only"
    )
    parser.add_argument("-q", "--quiet", action="store_true", help="no progress bar")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    try:
        if args.vocab_size < SMALLEST_VOCABULARY:
            raise DataError(f"--vocab-size {args.vocab_size}: at least {SMALLEST_VOCABULARY}")
        files, _ = list_files(args.input)
        texts = _texts(files, args.jsonl_key, args.max_megabytes)
        args.output_dir.mkdir(parents=True, exist_ok=True)
        size = TRAINERS[args.type](texts, args.output_dir, args.vocab_size, not args.quiet)
    except (DataError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{args.type} with {size} tokens -> {args.output_dir}")
    return 0


def _texts(files: Sequence[Path], key: str, megabytes: float | None) -> Iterator[str]:
    """Texts of all documents, until the limit; broken lines are simply no part of the sample."""
    left = float("inf") if megabytes is None else megabytes * 1e6
    for chunk in read_chunks(files):
        parts = b"".join(chunk.parts).split(b"\n") if chunk.kind == "lines" else chunk.parts
        for part in parts:
            if left <= 0:
                return
            text = (
                _json_text(part, key) if chunk.kind == "lines" else part.decode("utf-8", "replace")
            )
            if text:
                left -= len(text)
                yield text


def _json_text(line: bytes, key: str) -> str:
    try:
        value = json.loads(line)[key]
    except (ValueError, KeyError, TypeError, RecursionError):
        return ""
    return value.encode("utf-8", "replace").decode() if isinstance(value, str) else ""


def _train_bpe(texts: Iterator[str], size: int, progress: bool):  # type: ignore[no-untyped-def]
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[END_OF_TEXT, PADDING],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=progress and sys.stderr.isatty(),
    )
    tokenizer.train_from_iterator(_not_empty(texts), trainer)
    return tokenizer


def _not_empty(texts: Iterator[str]) -> Iterator[str]:
    first = next(texts, None)
    if first is None:
        raise DataError("no text in the input")
    yield first
    yield from texts


def _gpt2_bpe(texts: Iterator[str], folder: Path, size: int, progress: bool) -> int:
    tokenizer = _train_bpe(texts, size, progress)
    model = json.loads(tokenizer.to_str())["model"]
    pairs = [pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]]
    with atomic_writer(folder / "vocab.json") as handle:
        handle.write(json.dumps(model["vocab"], ensure_ascii=False).encode())
    with atomic_writer(folder / "merges.txt") as handle:
        handle.write(("#version: 0.2\n" + "\n".join(pairs) + "\n").encode())
    return int(tokenizer.get_vocab_size())


def _hugging_face(texts: Iterator[str], folder: Path, size: int, progress: bool) -> int:
    tokenizer = _train_bpe(texts, size, progress)
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


TRAINERS: dict[str, Callable[[Iterator[str], Path, int, bool], int]] = {
    "GPT2BPETokenizer": _gpt2_bpe,
    "HFTokenizer": _hugging_face,
    "SPMTokenizer": _sentence_piece,
}


if __name__ == "__main__":
    sys.exit(main())
