"""Join token datasets made with one tokenizer (for example shards) into a new one."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from megatron.atomic_files import check_writable, write_json
from megatron.data.indexed_dataset import (
    bin_path,
    idx_path,
    manifest_path,
    prefix_of,
    read_manifest,
)
from megatron.data.writer import merge_datasets
from megatron.errors import DataError


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="merge_datasets.py", description=__doc__)
    parser.add_argument(
        "--input",
        nargs="+",
        required=True,
        metavar="PATH",
        help="prefixes in the order wanted, or one folder: all its datasets, sorted by name",
    )
    parser.add_argument("--output-prefix", required=True, type=Path, help="the new dataset")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    inputs = _inputs(args.input)
    tokenizer = _common_tokenizer(inputs)
    output = prefix_of(args.output_prefix)
    check_writable(output, "--output-prefix")
    manifest_path(output).unlink(missing_ok=True)
    merged = merge_datasets(inputs, output)
    if tokenizer is not None:
        _describe(output, inputs, len(merged), merged.total_tokens, tokenizer)
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


def _common_tokenizer(inputs: Sequence[Path]) -> dict[str, object] | None:
    """The tokenizer of all inputs, None when one does not say; different ones are refused."""
    described = [(path, (read_manifest(path) or {}).get("tokenizer")) for path in inputs]
    known = {
        json.dumps(tokenizer, sort_keys=True): path for path, tokenizer in described if tokenizer
    }
    if len(known) > 1:
        raise DataError(
            "these datasets were made with different tokenizers: "
            + ", ".join(str(path) for path in known.values())
        )
    return described[0][1] if all(tokenizer for _, tokenizer in described) else None


def _describe(
    output: Path, inputs: Sequence[Path], documents: int, tokens: int, tokenizer: dict[str, object]
) -> None:
    content = {
        "format": 1,
        "documents": documents,
        "tokens": tokens,
        "tokenizer": tokenizer,
        "merged_from": [path.name for path in inputs],
        "bin_bytes": bin_path(output).stat().st_size,
        "idx_bytes": idx_path(output).stat().st_size,
    }
    write_json(manifest_path(output), content)
