"""Evaluation data: the official shuffled samples, or the same tokens cut at every length.

``fixed_sequences`` is what the official evaluation does: so many samples of each length from the
shuffled index; longer samples then cover more tokens, and other ones. ``fixed_tokens`` compares
lengths on equal terms: the documents of a split are laid end to end and the same stretch of
tokens is cut into windows of each length, every token after the first predicted exactly once::

    stream      0 . . . . . . . . . . . . . . . T
    length 4    [0....4][4....8][8...12][12..16]
    length 8    [0............8][8............16]
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt

from megatron.data.gpt_dataset import (
    SPLIT_NAMES,
    Sample,
    SampleDataset,
    build_split_dataset,
    split_bounds,
)
from megatron.data.indexed_dataset import IndexedDataset
from megatron.errors import DataError

__all__ = ["TokenWindows", "build_eval_dataset", "common_token_count", "token_windows"]


class TokenWindows:
    """Item i is ``{"text": int64[length + 1]}``, the i-th window of a stretch of documents."""

    def __init__(
        self, tokens: IndexedDataset, first: int, last: int, length: int, total_tokens: int
    ) -> None:
        self._ends = np.cumsum(tokens.sizes[first:last], dtype=np.int64)
        available = max(0, int(self._ends[-1]) - 1) if last > first else 0
        if length < 1 or total_tokens < length:
            raise DataError(f"{total_tokens} tokens cannot be cut into windows of {length}")
        if total_tokens > available:
            raise DataError(
                f"{tokens.prefix}: {total_tokens} tokens asked for, but documents {first} to "
                f"{last - 1} can predict only {available}"
            )
        if total_tokens % length:
            raise DataError(f"{total_tokens} tokens are not a whole number of windows of {length}")
        self._tokens = tokens
        self._first = first
        self.length = length
        self.total_tokens = total_tokens

    def __len__(self) -> int:
        return self.total_tokens // self.length

    def __getitem__(self, item: int) -> Sample:
        return {"text": self.window(item)}

    def window(self, item: int) -> npt.NDArray[np.int64]:
        if not 0 <= item < len(self):
            raise IndexError(f"window {item} of {len(self)}")
        start = item * self.length
        document = int(np.searchsorted(self._ends, start, side="right"))
        offset = start - (int(self._ends[document - 1]) if document else 0)
        text = np.empty(self.length + 1, np.int64)
        filled = 0
        while filled < len(text):
            stop = offset + len(text) - filled
            part = self._tokens.get(self._first + document, offset, stop)
            text[filled : filled + len(part)] = part
            filled += len(part)
            document, offset = document + 1, 0
        return text


def common_token_count(available: int, lengths: Sequence[int], limit: int | None = None) -> int:
    """The most tokens, up to ``limit``, that windows of every length cover exactly."""
    if not lengths or min(lengths) < 1:
        raise DataError(f"lengths {list(lengths)}: at least one, all at least 1")
    step = math.lcm(*lengths)
    usable = available if limit is None else min(available, limit)
    if usable < step:
        raise DataError(
            f"lengths {list(lengths)} divide evenly only every {step} tokens, but {usable} are "
            "available; use lengths that are multiples of each other, or more data"
        )
    return usable // step * step


def token_windows(
    prefix: str | Path,
    split: str,
    which: Literal["train", "valid", "test"],
    lengths: Sequence[int],
    limit: int | None = None,
) -> dict[int, TokenWindows]:
    """Windows of each length over the very same tokens of one split."""
    tokens, first, last = _open_split(prefix, split, which)
    available = int(tokens.sizes[first:last].sum(dtype=np.int64)) - 1
    total = common_token_count(available, lengths, limit)
    return {length: TokenWindows(tokens, first, last, length, total) for length in lengths}


def build_eval_dataset(
    prefix: str | Path,
    split: str,
    which: Literal["train", "valid", "test"],
    length: int,
    num_sequences: int | None = None,
    *,
    protocol: Literal["fixed_sequences", "fixed_tokens"] = "fixed_sequences",
    lengths: Sequence[int] | None = None,
    total_tokens: int | None = None,
    seed: int = 1234,
    cache_dir: str | Path | None = None,
    vocab_size: int | None = None,
) -> SampleDataset:
    """One split at one length.

    ``fixed_sequences``: the official order, at least ``num_sequences`` samples (one epoch if
    None). ``fixed_tokens``: windows over the tokens that all ``lengths`` can cover, at most
    ``total_tokens`` of them; ``num_sequences`` then limits the longest length.
    """
    if protocol == "fixed_tokens":
        every = sorted({*(lengths or ()), length})
        if total_tokens is None and num_sequences is not None:
            total_tokens = num_sequences * every[-1]
        return token_windows(prefix, split, which, every, total_tokens)[length]
    if protocol != "fixed_sequences":
        raise DataError(f'protocol "{protocol}": use fixed_sequences or fixed_tokens')
    tokens, first, last = _open_split(prefix, split, which)
    return build_split_dataset(
        tokens,
        first,
        last,
        length,
        num_sequences or 0,
        seed,
        name=which,
        cache_dir=cache_dir,
        vocab_size=vocab_size,
    )


def _open_split(prefix: str | Path, split: str, which: str) -> tuple[IndexedDataset, int, int]:
    if which not in SPLIT_NAMES:
        raise DataError(f'"{which}": use train, valid or test')
    tokens = IndexedDataset(prefix)
    bounds = split_bounds(split, len(tokens))
    position = SPLIT_NAMES.index(which)
    first, last = bounds[position], bounds[position + 1]
    if last <= first:
        raise DataError(
            f'{tokens.prefix}: split "{split}" leaves no documents for {which}; change the split'
        )
    return tokens, first, last
