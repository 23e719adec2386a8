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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from megatron.data.gpt_dataset import SPLIT_NAMES, GPTDataset, read_stream, split_bounds
from megatron.data.indexed_dataset import IndexedDataset
from megatron.errors import EvaluationError
from megatron.evaluation.tasks import Split
from megatron.neox_arguments.run_keys import DataArgs

Tokens = npt.NDArray[np.int64]


@dataclass(frozen=True)
class SplitTokens:
    """The documents of one split in one token file, laid end to end."""

    tokens: IndexedDataset
    prefix: str
    which: Split
    first: int
    last: int

    @cached_property
    def _ends(self) -> Tokens:
        return np.cumsum(self.tokens.sizes[self.first : self.last], dtype=np.int64)

    @property
    def predictable(self) -> int:
        """Tokens that have one before them."""
        return max(0, int(self._ends[-1]) - 1)

    def read(self, start: int, count: int) -> Tokens:
        return read_stream(self.tokens, range(self.first, self.last), self._ends, start, count)


class SequenceSet:
    """Sequences of [length + 1] tokens, inputs and labels shifted by one, each read when asked."""

    def __init__(self, length: int, readers: Sequence[Callable[[], Tokens | Tensor]]) -> None:
        self.length, self._readers = length, readers

    def __len__(self) -> int:
        return len(self._readers)

    def __getitem__(self, number: int) -> Tensor:
        return torch.as_tensor(self._readers[number]())


def token_files(data: DataArgs, which: Split) -> list[tuple[str, str]]:
    """Prefix and split string of each token file that serves this split."""
    own = data.valid_data_paths if which == "valid" else data.test_data_paths
    if own:
        everything = "0,1,0" if which == "valid" else "0,0,1"
        return [(prefix, everything) for prefix in own]
    return [(data.data_path, data.split)] if data.data_path else []


def open_split(data: DataArgs, which: Split) -> list[SplitTokens]:
    """The token files of a split; a range without documents is an error that names the key."""
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
        opened.append(SplitTokens(tokens, prefix, which, first, last))
    return opened


def fixed_sequences(
    files: Sequence[SplitTokens], length: int, count: int, *, seed: int, cache_dir: str | None
) -> SequenceSet:
    """The first `count` sequences in the official order, spread evenly over the files."""

    def read(dataset: GPTDataset, item: int) -> Tokens:
        return dataset[item]["text"]

    readers: list[Callable[[], Tokens]] = []
    for file, wanted in zip(files, _shares(count, len(files)), strict=True):
        usable = min(wanted, file.predictable // length)
        if not usable:
            continue
        dataset = GPTDataset(
            file.tokens,
            file.first,
            file.last,
            length,
            usable,
            seed,
            name=file.which,
            cache_dir=cache_dir,
        )
        readers += [partial(read, dataset, item) for item in range(usable)]
    return _checked(SequenceSet(length, readers), files)


def fixed_tokens(
    files: Sequence[SplitTokens], length: int, lengths: Sequence[int], count: int
) -> SequenceSet:
    """Windows of `length` over tokens that windows of all `lengths` cover exactly.

    `count` limits the longest length; lengths longer than the split are left out of the comparison.
    """
    readers: list[Callable[[], Tokens]] = []
    for file, wanted in zip(files, _shares(count, len(files)), strict=True):
        fitting = [each for each in lengths if each <= file.predictable]
        if length not in fitting or not wanted:
            continue
        step = math.lcm(*fitting)
        usable = min(file.predictable, wanted * max(fitting))
        if usable < step:
            raise EvaluationError(
                f"eval_protocol: fixed_tokens: lengths {fitting} divide evenly only every {step} "
                f"tokens, but {usable} are available; use lengths that are multiples of each "
                "other, or more data"
            )
        total = usable // step * step
        readers += [partial(file.read, start, length + 1) for start in range(0, total, length)]
    return _checked(SequenceSet(length, readers), files)


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
