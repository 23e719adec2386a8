"""Blending and the config's data section."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.data import IndexedDatasetWriter
from megatron.data.datasets import (
    blending_order,
    build_datasets,
    check_documents_end,
    normalised_weights,
    sample_counts,
    samples_per_dataset,
    weights_by_num_documents,
)
from megatron.errors import DataError
from megatron.neox_arguments.run_keys import DataArgs


def corpus(folder: Path, token: int, documents: int = 20) -> str:
    with IndexedDatasetWriter(folder / f"corpus{token}") as writer:
        for _ in range(documents):
            writer.add_document([token] * 30)
    return str(folder / f"corpus{token}")


def build(data: Any, num_samples: tuple[int, int, int] = (60, 12, 6), **changes: Any) -> Any:
    options = {"seq_length": 8, "seq_length_val": 16, "seed": 1, **changes}
    return build_datasets(data, num_samples=num_samples, **options)


def test_documents_that_cannot_be_told_apart_are_refused(tmp_path: Path) -> None:
    paths = [corpus(tmp_path, 7), corpus(tmp_path, 9)]
    single, _, _ = build(DataArgs(data_path=paths[0]))
    blend, _, _ = build(DataArgs(train_data_paths=paths))
    check_documents_end(single, eod=7)
    for dataset, eod in ((single, 3), (blend, 7)):
        with pytest.raises(DataError, match=rf"corpus\d: none of its first 20 .* token {eod}, by"):
            check_documents_end(dataset, eod)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.floats(0.01, 10), min_size=1, max_size=5), st.integers(1, 400))
def test_blends_stay_within_one_sample_of_their_shares(weights: list[float], count: int) -> None:
    shares = normalised_weights(weights)
    order, numbers = blending_order(shares, count).values()
    for dataset, share in enumerate(shares):
        mine = order == dataset
        assert abs(mine.sum() - share * count) <= len(weights)
        np.testing.assert_array_equal(numbers[mine], np.arange(mine.sum()))


def test_blending_order_by_hand() -> None:
    # deficits 0.75*max(i,1)-n0 and 0.25*max(i,1)-n1, the first of equals wins
    order, numbers = blending_order([0.75, 0.25], 8).values()
    assert list(order) == [0, 1, 0, 0, 0, 1, 0, 0]
    assert list(numbers) == [0, 0, 1, 2, 3, 1, 4, 5]


def test_the_order_does_not_depend_on_how_far_it_is_computed() -> None:
    short, long = blending_order([0.3, 0.6, 0.1], 50), blending_order([0.3, 0.6, 0.1], 500)
    for name in ("order", "numbers"):
        np.testing.assert_array_equal(short[name], long[name][:50])


def test_half_a_percent_more_is_prepared() -> None:
    assert samples_per_dataset([3, 1], 1000) == [754, 252]


def test_weights_from_document_counts() -> None:
    assert weights_by_num_documents([5]) == [1.0]
    # p = (0.8, 0.2): p * (1 - p) is the same for both
    assert weights_by_num_documents([80, 20]) == pytest.approx([0.5, 0.5])
    raised = np.array([0.8, 0.2]) ** 0.3
    expected = raised * (1 - np.array([0.8, 0.2]))
    assert weights_by_num_documents([80, 20], 0.3) == pytest.approx(list(expected / expected.sum()))


def test_blend_from_config(tmp_path: Path) -> None:
    paths = [corpus(tmp_path, 1), corpus(tmp_path, 2)]
    data = DataArgs(
        train_data_paths=paths,
        train_data_weights=[3, 1],
        valid_data_paths=paths,
        test_data_paths=paths[:1],
    )
    train, valid, test = build(data)
    assert [len(d) for d in (train, valid, test)] == [60, 12, 6]
    tokens = [int(train[i]["text"][0]) for i in range(60)]
    assert tokens.count(1) == pytest.approx(45, abs=1)
    assert len(train[0]["text"]) == 9
    assert len(build(data, (4000, 12, 6))[0][3999]["text"]) == 9  # several epochs of each
    once = build_datasets(data, seq_length=8, seq_length_val=None, num_samples=None, seed=1)
    assert [len(part or ()) for part in once] == [73] * 3  # of the first file: 600 tokens
    assert len(valid[0]["text"]) == len(test[0]["text"]) == 17  # seq_length_val holds here too
    assert [int(valid[i]["text"][0]) for i in range(12)].count(2) == 6


def test_one_file_with_a_split_from_config(tmp_path: Path) -> None:
    train, valid, test = build(DataArgs(data_path=corpus(tmp_path, 1), split="8,1,1"))
    assert len(train[0]["text"]) == 9 and len(valid[0]["text"]) == len(test[0]["text"]) == 17


def test_weight_by_num_documents_from_config(tmp_path: Path) -> None:
    paths = [corpus(tmp_path, 1, 80), corpus(tmp_path, 2, 20)]
    data = DataArgs(
        train_data_paths=paths, weight_by_num_documents=True, weighted_sampler_alpha=1.0
    )
    train, valid, _ = build(data)
    assert [int(train[i]["text"][0]) for i in range(60)].count(1) == 30
    assert valid is None


def test_cache_dir_from_config(tmp_path: Path) -> None:
    build(DataArgs(data_path=corpus(tmp_path, 1), split="1", data_cache_dir=str(tmp_path / "c")))
    assert list((tmp_path / "c").glob("*.index"))
    assert not (tmp_path / "index_cache").exists()


def test_the_blend_is_kept_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = [corpus(tmp_path, 1), corpus(tmp_path, 2)]
    data = DataArgs(train_data_paths=paths, train_data_weights=[3, 1])
    first, _, _ = build(data)
    monkeypatch.setattr("megatron.data.datasets.blending_order", lambda *_: pytest.fail("rebuilt"))
    again, _, _ = build(data)
    for item in range(60):
        np.testing.assert_array_equal(first[item]["text"], again[item]["text"])


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, "no data"),
        ({"data_path": "x", "train_data_paths": ["y"]}, "keep one"),
    ],
)
def test_contradictions_are_refused(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(DataError, match=reason):
        build(DataArgs(**changes))


def test_weights_of_nothing_are_refused() -> None:
    with pytest.raises(DataError, match="weights"):
        normalised_weights([0.0, 0.0])


def test_sample_counts_are_neoxs() -> None:
    assert sample_counts(320, 100, 10, 8) == (2560, 320, 80)
    assert sample_counts(0, 1000, 10, 4) == (0, 40, 40)
