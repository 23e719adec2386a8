#!/usr/bin/env python
"""Tokenize any text into NeoX's .bin/.idx files: streaming, many processes, bounded memory."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Sequence
from pathlib import Path

from megatron.atomic_files import check_writable
from megatron.data.chunks import DOCUMENT_SPLITTERS
from megatron.data.prepare import print_problems
from megatron.data.preprocess import (
    PreprocessOptions,
    available_cores,
    preprocess,
    terminated_like_interrupted,
)
from megatron.tokenizer import TOKENIZERS, build_tokenizer


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="preprocess_data.py", description=__doc__)
    source = parser.add_argument_group("input data")
    source.add_argument(
        "--input",
        nargs="+",
        required=True,
        metavar="PATH",
        help="jsonl, jsonl.zst/.gz/.xz/.bz2, txt, tar, zip, folders; or a comma-separated list",
    )
    source.add_argument(
        "--jsonl-keys",
        "--json-keys",
        nargs="+",
        default=["text"],
        metavar="KEY",
        help="JSON keys to tokenize, each into its own dataset (default: text)",
    )
    source.add_argument(
        "--num-docs", type=int, help="accepted as in NeoX; progress is measured in bytes"
    )
    source.add_argument(
        "--split-text",
        choices=sorted(DOCUMENT_SPLITTERS),
        default="file",
        help="what a document is in plain text files (default: file)",
    )
    source.add_argument("--ftfy", action="store_true", help="repair broken encodings with ftfy")
    source.add_argument(
        "--strict",
        action="store_true",
        help="stop at the first broken line instead of counting and reporting them",
    )
    tokens = parser.add_argument_group("tokenizer")
    tokens.add_argument("--tokenizer-type", required=True, choices=sorted(TOKENIZERS))
    tokens.add_argument("--vocab-file", "--vocab", help="vocabulary file, folder or encoding name")
    tokens.add_argument("--merge-file", help="merges of GPT2BPETokenizer")
    tokens.add_argument(
        "--append-eod", action="store_true", help="end every document with the end token"
    )
    output = parser.add_argument_group("output data")
    output.add_argument(
        "--output-prefix", required=True, type=Path, help="writes PREFIX_KEY_document.bin/.idx"
    )
    output.add_argument("--dataset-impl", choices=["mmap"], default="mmap", help="only mmap")
    runtime = parser.add_argument_group("runtime")
    runtime.add_argument("--workers", type=int, default=available_cores(), help="processes")
    runtime.add_argument("--log-interval", type=int, help="accepted as in NeoX; unused")
    runtime.add_argument("-q", "--quiet", action="store_true", help="no progress bar")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    options = PreprocessOptions(
        keys=tuple(args.jsonl_keys),
        append_eod=args.append_eod,
        ftfy=args.ftfy,
        splitter=args.split_text,
        strict=args.strict,
        workers=max(1, args.workers),
        progress=not args.quiet,
    )
    check_writable(args.output_prefix, "--output-prefix")
    tokenizer = build_tokenizer(
        args.tokenizer_type, vocab_file=args.vocab_file, merge_file=args.merge_file
    )
    with terminated_like_interrupted():
        outcome = preprocess(_paths(args.input), args.output_prefix, tokenizer, options)
    print(f"{outcome.documents} documents, {outcome.tokens} tokens")
    for prefix in outcome.prefixes:
        print(prefix)
    print_problems(outcome)
    return 0


def _paths(values: Sequence[str]) -> list[Path]:
    """NeoX joins several inputs with commas; a path that exists with its comma is kept whole."""
    paths: list[Path] = []
    for value in values:
        whole = Path(value)
        paths += [whole] if whole.exists() else [Path(part) for part in value.split(",") if part]
    return paths
