"""The token sequences that are evaluated: how many a split holds, and the sequences themselves.

``fixed_sequences`` is what the official evaluation does: so many samples of each length from the
shuffled index; longer samples then cover more tokens, and other ones. ``fixed_tokens`` compares
lengths on equal terms: the documents of a split are laid end to end and the same stretch of
tokens is cut into windows of each length, every token after the first predicted exactly once::

    stream      0 . . . . . . . . . . . . . . . T
    length 4    [0....4][4....8][8...12][12..16]
    length 8    [0............8][8............16]

A split that is too small never serves the same tokens twice: what it holds is used, and the caller
is told when that is less than was asked for.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from megatron.data.gpt_dataset import (
    SPLIT_NAMES,
    Sample,
    SampleDataset,
    build_split_dataset,
    read_stream,
    split_bounds,
)
from megatron.data.indexed_dataset import IndexedDataset
from megatron.errors import DataError, EvaluationError
from megatron.evaluation.tasks import Split
from megatron.neox_arguments.run_keys import DataArgs


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
        self._documents = range(first, last)
        self.length = length
        self.total_tokens = total_tokens

    def __len__(self) -> int:
        return self.total_tokens // self.length

    def __getitem__(self, item: int) -> Sample:
        return {"text": self.window(item)}

    def window(self, item: int) -> npt.NDArray[np.int64]:
        if not 0 <= item < len(self):
            raise IndexError(f"window {item} of {len(self)}")
        start, count = item * self.length, self.length + 1
        return read_stream(self._tokens, self._documents, self._ends, start, count)


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


@dataclass(frozen=True)
class SplitTokens:
    """The documents of one split in one token file."""

    tokens: IndexedDataset
    prefix: str
    split: str
    which: Split
    first: int
    last: int

    @property
    def predictable(self) -> int:
        """Tokens that have one before them."""
        return max(0, int(self.tokens.sizes[self.first : self.last].sum(dtype=np.int64)) - 1)

    def stretch(self, count: int) -> Tensor:
        """The first `count` + 1 tokens, documents end to end."""
        windows = TokenWindows(self.tokens, self.first, self.last, count, count)
        return torch.from_numpy(windows.window(0))


class SequenceSet:
    """Sequences of one length, [length + 1] tokens each: inputs, and labels shifted by one."""

    def __init__(self, parts: Sequence[tuple[SampleDataset, int]], length: int) -> None:
        self.length = length
        self._places = [(data, i) for data, count in parts for i in range(count)]

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, number: int) -> Tensor:
        data, i = self._places[number]
        return torch.from_numpy(np.asarray(data[i]["text"], dtype=np.int64))


def token_files(data: DataArgs, which: Split) -> list[tuple[str, str]]:
    """Prefix and split string of each token file that serves this split."""
    own = data.valid_data_paths if which == "valid" else data.test_data_paths
    if own:
        everything = "0,1,0" if which == "valid" else "0,0,1"
        return [(prefix, everything) for prefix in own]
    return [(data.data_path, data.split)] if data.data_path else []


def open_split(data: DataArgs, which: Split) -> list[SplitTokens]:
    """The token files of a split; empty documents ranges are an error that names the key."""
    sources = token_files(data, which)
    if not sources:
        raise EvaluationError(
            f"no {which} data: set data_path (with split) or {which}_data_paths in the config"
        )
    opened = []
    for prefix, split in sources:
        tokens = IndexedDataset(prefix)
        bounds = split_bounds(split, len(tokens))
        place = SPLIT_NAMES.index(which)
        first, last = bounds[place], bounds[place + 1]
        if last <= first:
            raise EvaluationError(
                f'{prefix}: split "{split}" leaves no documents of {len(tokens)} for {which}; '
                f"change split, or set {which}_data_paths"
            )
        opened.append(SplitTokens(tokens, prefix, split, which, first, last))
    return opened


def fixed_sequences(
    files: Sequence[SplitTokens], length: int, count: int, *, seed: int, cache_dir: str | None
) -> SequenceSet:
    """The first `count` sequences in the official order, spread evenly over the files."""
    parts: list[tuple[SampleDataset, int]] = []
    for file, wanted in zip(files, _shares(count, len(files)), strict=True):
        usable = min(wanted, file.predictable // length)
        if not usable:
            continue
        dataset = build_split_dataset(
            file.tokens,
            file.first,
            file.last,
            length,
            usable,
            seed,
            name=file.which,
            cache_dir=cache_dir,
        )
        parts.append((dataset, usable))
    return _checked(SequenceSet(parts, length), files)


def fixed_tokens(
    files: Sequence[SplitTokens], length: int, lengths: Sequence[int], count: int
) -> SequenceSet:
    """Windows of `length` over tokens that windows of all `lengths` cover exactly.

    `count` limits the longest length; lengths longer than the split are left out of the comparison.
    """
    parts: list[tuple[SampleDataset, int]] = []
    for file, wanted in zip(files, _shares(count, len(files)), strict=True):
        fitting = [each for each in lengths if each <= file.predictable]
        if length not in fitting or not wanted:
            continue
        try:
            total = common_token_count(file.predictable, fitting, wanted * max(fitting))
        except DataError as error:
            raise EvaluationError(f"eval_protocol: fixed_tokens: {error}") from error
        windows = TokenWindows(file.tokens, file.first, file.last, length, total)
        parts.append((windows, len(windows)))
    return _checked(SequenceSet(parts, length), files)


def _shares(count: int, files: int) -> list[int]:
    return [count // files + (i < count % files) for i in range(files)]


def _checked(sequences: SequenceSet, files: Sequence[SplitTokens]) -> SequenceSet:
    if not len(sequences):
        largest = max(file.predictable for file in files)
        raise EvaluationError(
            f"the {files[0].which} split of {files[0].prefix} holds {largest} tokens to predict, "
            f"too few for one sequence of {sequences.length}; use shorter eval_lengths, a larger "
            "share in split, or more data"
        )
    return sequences
