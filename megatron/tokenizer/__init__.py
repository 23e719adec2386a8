"""Tokenizers by NeoX's ``tokenizer_type`` names."""

from __future__ import annotations

from pathlib import Path

from megatron.errors import TokenizerError, did_you_mean
from megatron.tokenizer.base import Tokenizer, TokenizerFiles
from megatron.tokenizer.tokenizer_kinds import TOKENIZERS

__all__ = [
    "TOKENIZERS",
    "Tokenizer",
    "build_tokenizer",
]


def build_tokenizer(
    tokenizer_type: str,
    *,
    vocab_file: str | Path | None = None,
    merge_file: str | Path | None = None,
) -> Tokenizer:
    """The tokenizer NeoX calls ``tokenizer_type``, in any case, from its vocabulary files."""
    known = {name.lower(): kind for name, kind in TOKENIZERS.items()}
    if str(tokenizer_type).lower() not in known:
        listed = ", ".join(sorted(TOKENIZERS))
        hint = did_you_mean(str(tokenizer_type), TOKENIZERS, "Check the spelling.")
        raise TokenizerError(
            f'tokenizer_type "{tokenizer_type}" is unknown; there are {listed}. {hint}'
        )
    files = TokenizerFiles(_path(vocab_file), _path(merge_file))
    return known[tokenizer_type.lower()](files)


def _path(value: str | Path | None) -> Path | None:
    return None if value is None else Path(value).expanduser()
