"""The samples must be the ones the official code served, token for token."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from megatron.data import build_train_valid_test_datasets
from tests.fixture_archives import unpacked

OFFICIAL = unpacked("official_dataset")
EXPECTED = np.load(OFFICIAL / "expected_a.npz")
SETTINGS = json.loads((OFFICIAL / "expected_a.json").read_text())


@pytest.mark.parametrize("runs", [1, 2], ids=["built", "from cache"])
@pytest.mark.parametrize("which", ["train", "valid"])
def test_samples_equal_the_official_ones(tmp_path: Path, runs: int, which: str) -> None:
    for _ in range(runs):
        train, valid, test = build_train_valid_test_datasets(
            OFFICIAL / "toy_text_document", **SETTINGS, cache_dir=tmp_path
        )
    dataset = {"train": train, "valid": valid}[which]
    assert dataset is not None
    assert test is None  # one document in a thousand of 120 rounds to none
    assert len(dataset) == int(EXPECTED[f"{which}_len"])
    for item, expected in enumerate(EXPECTED[which]):
        sample = dataset[item]["text"]
        assert sample.dtype == np.int64
        np.testing.assert_array_equal(sample, expected)


def test_another_seed_gives_another_order(tmp_path: Path) -> None:
    settings = {**SETTINGS, "seed": SETTINGS["seed"] + 1}
    train, _, _ = build_train_valid_test_datasets(
        OFFICIAL / "toy_text_document", **settings, cache_dir=tmp_path
    )
    assert train is not None
    assert not np.array_equal(train[0]["text"], EXPECTED["train"][0])


def test_default_cache_is_beside_the_data(tmp_path: Path) -> None:
    for suffix in (".bin", ".idx"):
        shutil.copy(OFFICIAL / f"toy_text_document{suffix}", tmp_path)
    build_train_valid_test_datasets(tmp_path / "toy_text_document", **SETTINGS)
    assert list((tmp_path / "index_cache").glob("toy_text_document_train_*.index"))
