"""From text to token files: prepare_data, preprocess_data, merge_datasets, train_tokenizer."""

from __future__ import annotations

import argparse
import logging
import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron.atomic_files import check_folder_writable, check_writable
from megatron.data import merge_datasets as merge
from megatron.data.chat import ChatTemplate
from megatron.data.chunks import DOCUMENT_SPLITTERS, read_texts
from megatron.data.corpora import SOURCES
from megatron.data.indexed_dataset import prefix_of, read_manifest
from megatron.data.prepare import (
    PrepareRequest,
    gpt2_folder,
    prepare_corpus,
    print_problems,
    report,
)
from megatron.data.preprocess import (
    PreprocessOptions,
    available_cores,
    output_prefixes,
    preprocess,
    terminated_like_interrupted,
)
from megatron.data.streams import list_files
from megatron.errors import DataError
from megatron.terminal import command_parser, print_next_command, shown_command
from megatron.tokenizer import TOKENIZERS, build_tokenizer
from megatron.tokenizer.vocabularies import MERGES, TRAINABLE, VOCABULARY, train_vocabulary

DEFAULT_CORPUS = "enwik8"  # GPT-NeoX's


def _prepare_parser() -> argparse.ArgumentParser:
    table = "\n".join(
        f"  {s.name:<16} {s.description}; licence: {s.licence}" for s in SOURCES.values()
    )
    parser = command_parser(
        "prepare_data.py",
        "Download a corpus, or take your own text, and turn it into token files for training.",
        f"corpora:\n{table}\n\nWrites DIR/NAME/NAME_text_document.bin, .idx and .json. "
        "An output that is up to date is not rebuilt.",
    )
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help="corpora to prepare, see below (default: enwik8)"
    )
    parser.add_argument(
        "-d",
        "--data-dir",
        type=Path,
        default=Path(os.environ.get("DATA_DIR", "data")),
        help="where the outputs go (default: $DATA_DIR or ./data)",
    )
    parser.add_argument(
        "-t",
        "--tokenizer",
        choices=sorted(TOKENIZERS),
        help="default: GPT2BPETokenizer (python_projects, english_docs and latex_docs learn their "
        "own vocabulary); CharLevelTokenizer (bytes) for stdlib, django_docs and your own text "
        "when no vocabulary is given",
    )
    parser.add_argument(
        "-v", "--vocab-file", type=Path, help="the tokenizer's vocabulary, or its folder"
    )
    parser.add_argument("-m", "--merge-file", type=Path, help="the merges of GPT2BPETokenizer")
    parser.add_argument(
        "--input",
        type=_path,
        nargs="+",
        action="extend",
        default=[],
        metavar="PATH",
        help="local text instead of a download: jsonl, jsonl.zst, txt, archives, folders of any",
    )
    _add_text_arguments(parser, "auto", "the corpus's own, or the file")
    _add_jsonl_key(parser)
    parser.add_argument(
        "--where",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="only JSON lines with this value, e.g. meta.pile_set_name=Github for a part of the "
        "Pile; repeated, all must hold",
    )
    force = ("-f", "--force", "--force-redownload")
    parser.add_argument(*force, action="store_true", help="rebuild an output that is up to date")
    return parser


def _path(text: str) -> Path:
    """Refuse an empty path, as of an unset shell variable: Path("") is the current folder."""
    if not text:
        raise argparse.ArgumentTypeError("an empty path")
    return Path(text)


def _add_text_arguments(parser: argparse.ArgumentParser, split: str, meaning: str) -> None:
    """How text is read and tokenized."""
    parser.add_argument(
        "--split-text",
        choices=sorted({split, *DOCUMENT_SPLITTERS}),
        default=split,
        help=f"what a document is in plain text files (default: {meaning})",
    )
    parser.add_argument(
        "--chat-template",
        type=_path,
        metavar="FILE",
        help="JSON lines are conversations: a Jinja template, or a tokenizer_config.json that has "
        "one. Writes PREFIX_messages_document, and PREFIX_messages_label_document for "
        "train_label_data_paths, with labels where the assistant speaks",
    )
    parser.add_argument("--ftfy", action="store_true", help="repair broken encodings with ftfy")
    parser.add_argument(
        "--strict",
        action="store_true",
        help="stop at the first broken line instead of counting and reporting them",
    )
    parser.add_argument("--workers", type=int, default=available_cores(), help="processes")
    _add_quiet(parser)


def _add_jsonl_key(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--jsonl-key",
        help="the JSON key that holds the text (default: text; with --chat-template: messages)",
    )


def _add_quiet(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-q", "--quiet", action="store_true", help="no progress bars")


def _options(
    args: argparse.Namespace, keys: Sequence[str] | None, **others: Any
) -> PreprocessOptions:
    template = args.chat_template and ChatTemplate.read(args.chat_template)
    keys = keys or ["messages" if template else "text"]
    if template and args.ftfy:
        raise DataError("--ftfy changes plain text, not conversations. Leave it out.")
    if args.workers < 1:
        raise DataError(f"--workers {args.workers}: at least 1 process")
    for key in keys:
        if Path(key).name != key:
            raise DataError(f"JSON key {key!r}: must be usable in a file name")
    return PreprocessOptions(
        keys=tuple(keys),
        ftfy=args.ftfy,
        splitter=args.split_text,
        strict=args.strict,
        workers=args.workers,
        progress=not args.quiet,
        chat=template,
        **others,
    )


def prepare_data(argv: Sequence[str] | None = None) -> int:
    parser = _prepare_parser()
    args = parser.parse_intermixed_args(argv)
    if not args.names:
        args.names, args.input = _name_after_inputs(args.input)
    if not args.names and args.input:
        parser.error("--input PATH... needs a NAME for the corpus as the last word")
    args.names = args.names or [DEFAULT_CORPUS]
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    if args.input and len(args.names) > 1:
        raise DataError("--input takes one NAME; prepare the others separately")
    keys = args.jsonl_key and [args.jsonl_key]
    request = PrepareRequest(
        directory=args.data_dir,
        tokenizer_type=args.tokenizer,
        vocab_file=args.vocab_file,
        merge_file=args.merge_file,
        inputs=tuple(args.input),
        force=args.force,
        options=_options(args, keys, where=tuple(map(_condition, args.where))),
    )
    check_folder_writable(args.data_dir, "--data-dir")
    with terminated_like_interrupted():
        for name in args.names:
            prefix, outcome = prepare_corpus(name, request)
            print(report(name, prefix, outcome))
            if outcome is not None:
                print_problems(outcome)
    _hint(prefix, request)
    return 0


def _hint(prefix: Path, request: PrepareRequest) -> None:
    """The likely next command, with the tokenizer that made the data."""
    manifest = read_manifest(prefix)
    if manifest is None or not Path("configs/laptop/tiny.yml").is_file():
        return
    kind = manifest["tokenizer"]["type"]
    run = f"runs/{prefix.parent.name}"
    data = [f"data_path={prefix}"]
    if (keys := request.options.keys) and request.options.chat is not None:
        label = output_prefixes(prefix.parent / prefix.parent.name, [f"{keys[0]}_label"])[0]
        data = [f"train_data_paths=[{prefix}]", f"train_label_data_paths=[{label}]"]
        data.append("pack_impl=unpacked")
    sets = [*data, f"tokenizer_type={kind}", f"save={run}", f"load={run}"]
    files = {
        "vocab_file": (request.vocab_file, prefix.parent / VOCABULARY),
        "merge_file": (request.merge_file, prefix.parent / MERGES),
    }
    if kind != "CharLevelTokenizer":  # what was given may be a name, not a file
        known = {key: given or own for key, (given, own) in files.items() if given or own.is_file()}
        if kind == "GPT2BPETokenizer" and not known and (found := gpt2_folder(request.directory)):
            known["vocab_file"] = found
        sets += [f"{key}={value}" for key, value in known.items()]
    command = shlex.join(["configs/laptop/tiny.yml", "--set", *sets])
    print_next_command(f"{shown_command('deepy')} train.py {command}")


def _condition(text: str) -> tuple[str, str]:
    key, separator, value = text.partition("=")
    if not separator or not key:
        raise DataError(f"--where {text}: expected KEY=VALUE, e.g. meta.pile_set_name=Github")
    return key, value


def _name_after_inputs(inputs: list[Path]) -> tuple[list[str], list[Path]]:
    """argparse puts NAME of ``--input PATH... NAME`` into the list of paths: split it off.

    The last word is the NAME, also where a file is called the same; a word with / or . is a path.
    """
    last = str(inputs[-1]) if inputs else ""
    is_path = inputs and inputs[-1].exists() and ("/" in last or inputs[-1].suffix)
    return ([], inputs) if len(inputs) < 2 or is_path else ([last], inputs[:-1])


def _preprocess_parser() -> argparse.ArgumentParser:
    parser = command_parser(
        "preprocess_data.py",
        "Tokenize any text into NeoX's .bin/.idx files: streaming, many processes, bounded memory.",
    )
    add = parser.add_argument
    add(
        "--input",
        type=_path,
        nargs="+",
        required=True,
        metavar="PATH",
        help="jsonl, jsonl.zst/.gz/.xz/.bz2, txt, tar, zip, folders; or a comma-separated list",
    )
    add(
        "--jsonl-keys",
        "--json-keys",
        nargs="+",
        metavar="KEY",
        help="JSON keys to tokenize, each into its own dataset (default: text; with "
        "--chat-template: messages)",
    )
    _add_text_arguments(parser, "file", "file")
    add("--tokenizer-type", required=True, choices=sorted(TOKENIZERS))
    add("--vocab-file", "--vocab", help="vocabulary file, folder or encoding name")
    add("--merge-file", help="merges of GPT2BPETokenizer")
    add("--append-eod", action="store_true", help="end every document with the end token")
    add("--output-prefix", required=True, type=Path, help="writes PREFIX_KEY_document.bin/.idx")
    add("--num-docs", type=int, help="accepted as in NeoX; progress is measured in bytes")
    add("--log-interval", type=int, help="accepted as in NeoX; unused")
    add("--dataset-impl", choices=["mmap"], default="mmap", help="only mmap")
    return parser


def preprocess_data(argv: Sequence[str] | None = None) -> int:
    args = _preprocess_parser().parse_args(argv)
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    options = _options(args, args.jsonl_keys, append_eod=args.append_eod)
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


def _paths(values: Sequence[Path]) -> list[Path]:
    """NeoX joins several inputs with commas; a path that exists with its comma is kept whole."""
    paths: list[Path] = []
    for whole in values:
        parts = [Path(part) for part in str(whole).split(",") if part]
        paths += [whole] if whole.exists() else parts
    return paths


def merge_datasets(argv: Sequence[str] | None = None) -> int:
    parser = command_parser(
        "merge_datasets.py",
        "Join token datasets made with one tokenizer (for example shards) into one.",
    )
    parser.add_argument(
        "--input",
        nargs="+",
        required=True,
        metavar="PATH",
        help="prefixes in the order wanted, or one folder: all its datasets, sorted by name",
    )
    parser.add_argument("--output-prefix", required=True, type=Path, help="the new dataset")
    args = parser.parse_args(argv)
    output = prefix_of(args.output_prefix)
    check_writable(output, "--output-prefix")
    inputs = _inputs(args.input)
    merged = merge(inputs, output)
    print(f"{len(inputs)} datasets, {len(merged)} documents, {merged.total_tokens} tokens")
    print(output)
    return 0


def _inputs(values: Sequence[str]) -> list[Path]:
    if len(values) == 1 and Path(values[0]).is_dir():
        found = sorted(prefix_of(path) for path in Path(values[0]).glob("*.idx"))
        if not found:
            raise DataError(f"{values[0]}: no .idx files in this folder")
        return found
    return [prefix_of(value) for value in values]


SMALLEST_VOCABULARY = 260  # 256 bytes, the end token, and something learned


def _tokenizer_parser() -> argparse.ArgumentParser:
    parser = command_parser(
        "train_tokenizer.py",
        "Train a tokenizer on your text: GPT-2-style byte-level BPE, or SentencePiece.",
        "GPT2BPETokenizer writes vocab.json and merges.txt, HFTokenizer tokenizer.json,\n"
        "SPMTokenizer tokenizer.model. Give the output folder as vocab_file.",
    )
    parser.add_argument("--input", nargs="+", required=True, type=_path, metavar="PATH")
    parser.add_argument("--output-dir", required=True, type=Path)
    parser.add_argument("--vocab-size", type=int, default=32768)
    parser.add_argument("--type", choices=TRAINABLE, default="GPT2BPETokenizer")
    _add_jsonl_key(parser)
    parser.add_argument(
        "--pattern",
        metavar="REGEX",
        help="HFTokenizer: pieces that no token crosses, with Unicode classes such as \\p{L} "
        "(default: GPT-2's)",
    )
    parser.add_argument(
        "--max-megabytes", type=float, help="learn from the first so many megabytes only"
    )
    _add_quiet(parser)
    return parser


def train_tokenizer(argv: Sequence[str] | None = None) -> int:
    args = _tokenizer_parser().parse_args(argv)
    if args.vocab_size < SMALLEST_VOCABULARY:
        raise DataError(f"--vocab-size {args.vocab_size}: at least {SMALLEST_VOCABULARY}")
    if args.max_megabytes is not None and not args.max_megabytes > 0:
        raise DataError(f"--max-megabytes {args.max_megabytes}: must be above 0")
    files, _ = list_files(args.input)
    texts = read_texts(files, args.jsonl_key or "text", args.max_megabytes)
    check_folder_writable(args.output_dir, "--output-dir")
    size = train_vocabulary(
        args.type, texts, args.output_dir, args.vocab_size, not args.quiet, args.pattern
    )
    print(f"{args.type} with {size} tokens -> {args.output_dir}")
    return 0
