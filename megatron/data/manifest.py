"""The small JSON beside a dataset: what it holds and which tokenizer made it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from megatron.data.errors import DataError
from megatron.data.indexed_dataset import bin_path, idx_path, prefix_of
from megatron.tokenizer import Tokenizer

__all__ = ["check_tokenizer", "describe_tokenizer", "manifest_path", "read_manifest"]


def manifest_path(prefix: str | Path) -> Path:
    prefix = prefix_of(prefix)
    return prefix.with_name(prefix.name + ".json")


def describe_tokenizer(tokenizer: Tokenizer) -> dict[str, Any]:
    return {
        "type": tokenizer.name,
        "vocab_size": tokenizer.vocab_size,
        "eod": tokenizer.eod,
        "fingerprint": tokenizer.fingerprint(),
    }


def read_manifest(prefix: str | Path) -> dict[str, Any] | None:
    """The manifest if it is there, readable and belongs to the files as they are now."""
    try:
        content = json.loads(manifest_path(prefix).read_text())
        sizes = [path(prefix_of(prefix)).stat().st_size for path in (bin_path, idx_path)]
    except (OSError, ValueError):
        return None
    if not isinstance(content, dict):
        return None
    return content if [content.get("bin_bytes"), content.get("idx_bytes")] == sizes else None


def check_tokenizer(prefix: str | Path, tokenizer: Tokenizer) -> None:
    """Refuse data made with another tokenizer, when the manifest says so."""
    manifest = read_manifest(prefix)
    if manifest is None:
        return
    made, have = manifest.get("tokenizer", {}), describe_tokenizer(tokenizer)
    if not isinstance(made, dict) or made.get("fingerprint") == have["fingerprint"]:
        return
    raise DataError(
        f"{prefix}: prepared with {made.get('type')} (vocabulary {made.get('vocab_size')}, "
        f"{made.get('fingerprint')}), but the config's tokenizer is {have['type']} (vocabulary "
        f"{have['vocab_size']}, {have['fingerprint']}). Set tokenizer_type, vocab_file and "
        "merge_file to the ones it was prepared with, or prepare the data again."
    )
