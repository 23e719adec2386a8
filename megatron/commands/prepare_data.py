"""Fetch a corpus, or take your own text, and turn it into token files for training."""

from __future__ import annotations

import argparse
import logging
import os
import shlex
from collections.abc import Sequence
from pathlib import Path

from megatron.atomic_files import check_writable
from megatron.data.chunks import DOCUMENT_SPLITTERS
from megatron.data.corpora import SOURCES
from megatron.data.indexed_dataset import read_manifest
from megatron.data.prepare import PrepareRequest, prepare_corpus, print_problems, report
from megatron.data.preprocess import PreprocessOptions, available_cores, terminated_like_interrupted
from megatron.errors import DataError
from megatron.terminal import say_next, shown_command
from megatron.tokenizer import TOKENIZERS
from megatron.tokenizer.byte_pairs import MERGES, VOCABULARY

DEFAULT_CORPUS = "enwik8"  # GPT-NeoX's


def build_parser() -> argparse.ArgumentParser:
    table = "\n".join(
        f"  {s.name:<14}{s.description}; licence: {s.licence}" for s in SOURCES.values()
    )
    parser = argparse.ArgumentParser(
        prog="prepare_data.py",
        description=__doc__,
        epilog=f"corpora:\n{table}\n\nWrites DIR/NAME/NAME_text_document.bin, .idx and .json. "
        "An output that is up to date is not rebuilt.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
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
        type=Path,
        nargs="+",
        action="extend",
        default=[],
        metavar="PATH",
        help="local text instead of a download: jsonl, jsonl.zst, txt, archives, folders of any",
    )
    parser.add_argument(
        "--split-text",
        choices=["auto", *sorted(DOCUMENT_SPLITTERS)],
        default="auto",
        help="what a document is in plain text files (default: the corpus's own, or the file)",
    )
    parser.add_argument(
        "--jsonl-key", default="text", help="the JSON key that holds the text (default: text)"
    )
    parser.add_argument(
        "--where",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="only JSON lines with this value, e.g. meta.pile_set_name=Github for a part of the "
        "Pile; repeated, all must hold",
    )
    _add_switches(parser)
    return parser


def _add_switches(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--workers", type=int, default=available_cores(), help="processes")
    parser.add_argument("--ftfy", action="store_true", help="repair broken encodings with ftfy")
    parser.add_argument("--strict", action="store_true", help="a broken line is an error")
    parser.add_argument(
        "-f",
        "--force",
        "--force-redownload",
        action="store_true",
        help="rebuild an output that is up to date",
    )
    parser.add_argument("-q", "--quiet", action="store_true", help="no progress bars")


def main(argv: Sequence[str] | None = None) -> int:
    parser = build_parser()
    args = parser.parse_intermixed_args(argv)
    if not args.names:
        args.names, args.input = _name_after_inputs(args.input)
    if not args.names and args.input:
        parser.error("--input PATH... needs a NAME for the corpus as the last word")
    args.names = args.names or [DEFAULT_CORPUS]
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    if args.input and len(args.names) > 1:
        raise DataError("--input takes one NAME; prepare the others separately")
    request = PrepareRequest(
        directory=args.data_dir,
        tokenizer_type=args.tokenizer,
        vocab_file=args.vocab_file,
        merge_file=args.merge_file,
        inputs=tuple(args.input),
        force=args.force,
        options=PreprocessOptions(
            keys=(args.jsonl_key,),
            ftfy=args.ftfy,
            splitter=args.split_text,
            where=tuple(_condition(text) for text in args.where),
            strict=args.strict,
            workers=max(1, args.workers),
            progress=not args.quiet,
        ),
    )
    check_writable(args.data_dir / "corpus", "--data-dir")
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
    sets = [f"data_path={prefix}", f"tokenizer_type={kind}", f"save={run}", f"load={run}"]
    folder = prefix.parent
    vocab = request.vocab_file or (folder / VOCABULARY if (folder / VOCABULARY).is_file() else None)
    merges = request.merge_file or (folder / MERGES if (folder / MERGES).is_file() else None)
    if kind != "CharLevelTokenizer":
        sets += [f"vocab_file={vocab}"] if vocab else []
        sets += [f"merge_file={merges}"] if merges else []
    command = shlex.join(["configs/laptop/tiny.yml", "--set", *sets])
    say_next(f"{shown_command('deepy')} train.py {command}")


def _condition(text: str) -> tuple[str, str]:
    key, separator, value = text.partition("=")
    if not separator or not key:
        raise DataError(f"--where {text}: expected KEY=VALUE, e.g. meta.pile_set_name=Github")
    return key, value


def _name_after_inputs(inputs: list[Path]) -> tuple[list[str], list[Path]]:
    """In ``--input PATH... NAME`` the list of paths has swallowed the name: give it back."""
    if len(inputs) < 2:
        return [], inputs
    last = str(inputs[-1])
    if inputs[-1].exists() and last not in SOURCES:
        return [], inputs
    return [last], inputs[:-1]
