"""Evaluation data at any length."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from megatron.data import IndexedDatasetWriter, build_train_valid_test_datasets
from megatron.data.windows import build_eval_dataset, common_token_count, token_windows
from megatron.errors import DataError


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


def test_every_length_predicts_the_same_tokens_once(prefix: Path) -> None:
    windows = token_windows(prefix, "5,4,1", "valid", [4, 8, 32, 128])
    predicted = {
        length: np.concatenate([w[i]["text"][1:] for i in range(len(w))])
        for length, w in windows.items()
    }
    for tokens in predicted.values():
        np.testing.assert_array_equal(tokens, predicted[4])
    assert len(set(predicted[4].tolist())) == len(predicted[4]) == windows[4].total_tokens
    assert len(predicted[4]) % 128 == 0
    first = windows[4][0]["text"][0]
    np.testing.assert_array_equal(predicted[4], np.arange(first + 1, first + 1 + len(predicted[4])))


def test_windows_overlap_by_the_one_token_that_is_only_context(prefix: Path) -> None:
    windows = token_windows(prefix, "5,4,1", "valid", [8])[8]
    assert windows[0]["text"][-1] == windows[1]["text"][0]
    with pytest.raises(IndexError):
        windows[len(windows)]


def test_a_limit_on_the_tokens(prefix: Path) -> None:
    windows = token_windows(prefix, "5,4,1", "valid", [4, 16], limit=70)
    assert windows[4].total_tokens == windows[16].total_tokens == 64


def test_common_token_count() -> None:
    assert common_token_count(1000, [128, 512]) == 512
    assert common_token_count(1100, [128, 512]) == 1024
    assert common_token_count(100, [6, 4], limit=30) == 24
    with pytest.raises(DataError, match="every 35"):
        common_token_count(30, [5, 7])
    with pytest.raises(DataError, match="lengths"):
        common_token_count(30, [])


def test_fixed_sequences_are_the_official_validation_samples(prefix: Path) -> None:
    _, valid, _ = build_train_valid_test_datasets(prefix, "5,4,1", (0, 9, 0), 8, 16, 77)
    assert valid is not None
    dataset = build_eval_dataset(prefix, "5,4,1", "valid", 16, 9, seed=77)
    for item in range(9):
        np.testing.assert_array_equal(dataset[item]["text"], valid[item]["text"])


def test_fixed_tokens_through_the_common_door(prefix: Path) -> None:
    total = [
        len(d) * length
        for length in (4, 8, 64)
        for d in [
            build_eval_dataset(
                prefix, "5,4,1", "valid", length, 3, protocol="fixed_tokens", lengths=[4, 8, 64]
            )
        ]
    ]
    assert total == [192, 192, 192]


def test_impossible_requests_are_refused(prefix: Path) -> None:
    with pytest.raises(DataError, match="no documents for test"):
        build_eval_dataset(prefix, "9,1,0", "test", 8)
    with pytest.raises(DataError, match="protocol"):
        build_eval_dataset(prefix, "9,1,0", "valid", 8, protocol="other")  # type: ignore[arg-type]
    with pytest.raises(DataError, match="train, valid or test"):
        build_eval_dataset(prefix, "9,1,0", "dev", 8)  # type: ignore[arg-type]
