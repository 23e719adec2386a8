"""The sequences that are evaluated: the same tokens at every length, or the official samples."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from megatron.data import IndexedDatasetWriter, build_train_valid_test_datasets
from megatron.errors import EvaluationError
from megatron.evaluation.sequences import (
    SequenceSet,
    SplitTokens,
    fixed_sequences,
    fixed_tokens,
    open_split,
)
from megatron.neox_arguments.run_keys import DataArgs


@pytest.fixture
def prefix(tmp_path: Path) -> Path:
    """100 documents of 1 to 30 tokens; every token is its own number."""
    sizes = np.random.default_rng(0).integers(1, 30, 100)
    position = 0
    with IndexedDatasetWriter(tmp_path / "d") as writer:
        for size in sizes:
            writer.add_document(range(position, position + size))
            position += int(size)
    return tmp_path / "d"


def valid(prefix: Path, split: str = "5,4,1") -> list[SplitTokens]:
    return open_split(DataArgs(data_path=str(prefix), split=split), "valid")


def predicted(sequences: SequenceSet) -> np.ndarray:
    return np.concatenate([sequences[i][1:].numpy() for i in range(len(sequences))])


def test_every_length_predicts_the_same_tokens_once(prefix: Path) -> None:
    lengths = [4, 8, 32, 128]
    found = {length: fixed_tokens(valid(prefix), length, lengths, 99) for length in lengths}
    tokens = predicted(found[4])
    for sequences in found.values():
        np.testing.assert_array_equal(predicted(sequences), tokens)
    assert len(set(tokens.tolist())) == len(tokens) and len(tokens) % 128 == 0
    first = int(found[4][0][0])
    np.testing.assert_array_equal(tokens, np.arange(first + 1, first + 1 + len(tokens)))


def test_windows_overlap_by_the_one_token_that_is_only_context(prefix: Path) -> None:
    windows = fixed_tokens(valid(prefix), 8, [8], 99)
    assert windows[0][-1] == windows[1][0]
    with pytest.raises(IndexError):
        windows[len(windows)]


def test_the_longest_length_limits_the_tokens(prefix: Path) -> None:
    found = [fixed_tokens(valid(prefix), length, [4, 16], 4) for length in (4, 16)]
    assert [len(sequences) * sequences.length for sequences in found] == [64, 64]


def test_all_lengths_share_the_most_tokens_that_each_covers_exactly(prefix: Path) -> None:
    (file,) = valid(prefix)
    assert 512 < file.predictable < 1024
    assert len(fixed_tokens([file], 128, [128, 512], 99)) * 128 == 512
    assert len(fixed_tokens([file], 6, [4, 6], 5)) * 6 == 24  # of the 30 that 5 x 6 allow
    with pytest.raises(EvaluationError, match=r"lengths \[5, 7\] divide evenly only every 35"):
        fixed_tokens([file], 5, [5, 7], 4)


def test_fixed_sequences_are_the_official_validation_samples(prefix: Path) -> None:
    _, official, _ = build_train_valid_test_datasets(prefix, "5,4,1", (0, 9, 0), 8, 16, 77)
    assert official is not None
    sequences = fixed_sequences(valid(prefix), 16, 9, seed=77, cache_dir=None)
    for item in range(9):
        np.testing.assert_array_equal(sequences[item].numpy(), official[item]["text"])


def test_impossible_requests_are_refused(prefix: Path) -> None:
    with pytest.raises(EvaluationError, match="no documents of 100 for valid"):
        valid(prefix, "9,0,1")
    with pytest.raises(EvaluationError, match="too few for one sequence of 4096"):
        fixed_sequences(valid(prefix), 4096, 1, seed=1, cache_dir=None)
    with pytest.raises(EvaluationError, match="data_path"):
        open_split(DataArgs(), "test")
