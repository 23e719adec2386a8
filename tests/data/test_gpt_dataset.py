"""Splits, epochs and sample positions, against slow and obvious versions of themselves."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.data import IndexedDatasetWriter, build_train_valid_test_datasets, gpt_dataset
from megatron.data.gpt_dataset import (
    GPTDataset,
    WholeDocuments,
    number_of_epochs,
    split_bounds,
)
from megatron.data.indexed_dataset import IndexedDataset
from megatron.errors import DataError


@pytest.mark.parametrize(
    ("split", "documents", "bounds"),
    [
        ("949,50,1", 120, [0, 114, 120, 120]),
        ("949/50/1", 120, [0, 114, 120, 120]),
        ("1", 7, [0, 7, 7, 7]),
        ("100,0,0", 3, [0, 3, 3, 3]),
        ("1,1,1", 10, [0, 4, 7, 10]),  # 3 + 3 + 3 leaves one over; it goes to the first
        ("0.5, 0.25, 0.25", 8, [0, 4, 6, 8]),
    ],
)
def test_split_bounds(split: str, documents: int, bounds: list[int]) -> None:
    assert split_bounds(split, documents) == bounds


@given(
    st.lists(st.floats(0, 1000), min_size=1, max_size=3).filter(lambda w: sum(w) > 0.1),
    st.integers(0, 10_000),
)
def test_bounds_always_ascend(weights: list[float], documents: int) -> None:
    bounds = split_bounds(",".join(str(w) for w in weights), documents)
    assert bounds[0] == 0 and bounds[3] == documents
    assert all(0 <= a <= documents for a in bounds)


@given(st.integers(1, 500), st.integers(1, 100), st.integers(0, 300))
def test_epochs_are_the_fewest_that_suffice(tokens: int, length: int, samples: int) -> None:
    epochs = number_of_epochs(tokens, length, samples)
    assert (epochs * tokens - 1) // length >= samples
    assert epochs == 1 or ((epochs - 1) * tokens - 1) // length < samples


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 12), min_size=1, max_size=30).filter(lambda s: sum(s) > 20),
    length=st.integers(1, 9),
    samples=st.integers(0, 60),
    seed=st.integers(0, 2**31),
)
def test_samples_are_windows_of_the_shuffled_stream(
    tmp_path_factory: pytest.TempPathFactory,
    sizes: list[int],
    length: int,
    samples: int,
    seed: int,
) -> None:
    prefix = tmp_path_factory.mktemp("d") / "d"
    documents = np.split(np.arange(sum(sizes)), np.cumsum(sizes)[:-1])
    with IndexedDatasetWriter(prefix, np.int32) as writer:
        for document in documents:
            writer.add_document(document)
    epochs = number_of_epochs(sum(sizes), length, samples)
    dataset = GPTDataset(IndexedDataset(prefix), 0, len(sizes), length, samples, seed)

    generator = np.random.RandomState(seed)
    order = np.array(list(range(len(sizes))) * epochs, np.int32)
    generator.shuffle(order)
    stream = np.concatenate([documents[d] for d in order])
    windows = [stream[i : i + length + 1] for i in range(0, len(stream) - length, length)]
    serving = np.arange(len(windows), dtype=np.uint32)
    generator.shuffle(serving)
    assert len(dataset) >= samples
    for item in range(len(dataset)):
        np.testing.assert_array_equal(dataset[item]["text"], windows[serving[item]])


def make(tmp_path: Path, documents: int = 40) -> Path:
    with IndexedDatasetWriter(tmp_path / "d") as writer:
        for i in range(documents):
            writer.add_document([i] * 10)
    return tmp_path / "d"


def test_lengths_differ_between_training_and_validation(tmp_path: Path) -> None:
    train, valid, test = build_train_valid_test_datasets(
        make(tmp_path), "8,1,1", (10, 3, 2), 7, 20, 1
    )
    assert train is not None and valid is not None and test is not None
    assert [len(d[0]["text"]) for d in (train, valid, test)] == [8, 21, 21]
    assert {int(t) for i in range(len(train)) for t in train[i]["text"]} <= set(range(32))
    assert {int(t) for i in range(len(valid)) for t in valid[i]["text"]} == set(range(32, 36))


def test_out_of_range_items_end_iteration(tmp_path: Path) -> None:
    train, _, _ = build_train_valid_test_datasets(make(tmp_path), "1", (4, 0, 0), 7)
    assert train is not None
    assert len(list(train)) == len(train)  # type: ignore[call-overload]
    np.testing.assert_array_equal(train[-1]["text"], train[len(train) - 1]["text"])
    with pytest.raises(IndexError):
        train[len(train)]


def test_another_tokenizer_is_noticed(tmp_path: Path) -> None:
    train, _, _ = build_train_valid_test_datasets(make(tmp_path), "1", (4, 0, 0), 7, vocab_size=20)
    assert train is not None
    with pytest.raises(DataError, match="another tokenizer"):
        for item in range(len(train)):
            train[item]


def test_a_split_too_short_for_one_sample(tmp_path: Path) -> None:
    train, valid, _ = build_train_valid_test_datasets(make(tmp_path), "39,1", (5, 0, 0), 7, 50)
    assert train is not None and valid is None  # nothing was asked of it
    _, valid, _ = build_train_valid_test_datasets(make(tmp_path), "39,1", (5, 3, 0), 7, 50)
    assert valid is not None and len(valid) >= 3  # several epochs of the one document
    with pytest.raises(DataError, match="fewer than one sample"):
        GPTDataset(IndexedDataset(make(tmp_path)), 39, 40, 50, 0, 1234, name="valid")


def test_documents_without_tokens_are_refused(tmp_path: Path) -> None:
    with IndexedDatasetWriter(tmp_path / "d") as writer:
        writer.add_document([])
        writer.add_document([])
        writer.add_document([1])
    with pytest.raises(DataError, match="no tokens"):
        build_train_valid_test_datasets(tmp_path / "d", "2,1,0", (1, 1, 0), 1)


def test_a_second_run_reads_the_index_of_several_epochs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with IndexedDatasetWriter(tmp_path / "d") as writer:
        for document in range(5):
            writer.add_document(range(document, document + 7))
    tokens = IndexedDataset(tmp_path / "d")
    first = GPTDataset(tokens, 0, 5, 4, 40, 1, name="train", cache_dir=tmp_path / "cache")
    monkeypatch.setattr(gpt_dataset, "build_sample_index", None)
    again = GPTDataset(tokens, 0, 5, 4, 40, 1, name="train", cache_dir=tmp_path / "cache")
    assert [again[n]["text"].tolist() for n in range(40)] == [
        first[n]["text"].tolist() for n in range(40)
    ]


# Whole documents: what GPT-NeoX's GPT2Dataset (commit ea7aefd8, seed 3) gives for these documents.
# A row is the documents of one of its samples; ours leaves out the one token that it takes of the
# document after them.

SIZES = [5, 3, 9, 2, 4, 6]
UNPACKED = [[2], [3], [3], [6], [1], [1], [5], [2]]
NOT_CHOPPED = [[5], [5], [6], [1], [2], [1], [6], [2]]
PACKED_WHOLE = [[3, 2], [3, 4], [1, 5], [3], [1, 2], [1, 5, 2], [4, 5, 6], [6]]


def labelled(tmp_path: Path, masked: int | None) -> tuple[IndexedDataset, IndexedDataset]:
    """Token 10 * document + place, from 10 on; the first has no loss, nor has document `masked`."""
    files = []
    for name in ("text", "label"):
        with IndexedDatasetWriter(tmp_path / name, np.int32) as writer:
            for number, size in enumerate(SIZES, start=1):
                document = 10 * number + np.arange(size)
                if name == "label":
                    document[: size if number == masked else 1] = -100
                writer.add_document(document)
        files.append(IndexedDataset(tmp_path / name))
    return files[0], files[1]


@pytest.mark.parametrize(
    ("pack_impl", "chopped", "length", "masked", "expected"),
    [
        ("unpacked", True, 7, 4, UNPACKED),
        ("unpacked", False, 7, 4, NOT_CHOPPED),
        ("pack_until_overflow", True, 11, None, PACKED_WHOLE),
    ],
)
def test_whole_documents_come_in_gpt_neoxs_order(
    tmp_path: Path,
    pack_impl: str,
    chopped: bool,
    length: int,
    masked: int | None,
    expected: list[list[int]],
) -> None:
    tokens, labels = labelled(tmp_path, masked)
    options = {"pack_impl": pack_impl, "allow_chopped": chopped, "vocab_size": 100}
    dataset = WholeDocuments(tokens, 0, 6, length, 9, 3, labels=labels, **options)
    assert len(dataset) == 9
    for item, numbers in enumerate(expected):
        text = np.concatenate([10 * n + np.arange(SIZES[n - 1]) for n in numbers])[: length + 1]
        padding = length + 1 - len(text)
        np.testing.assert_array_equal(dataset[item]["text"], [*text, *[0] * padding])
        label = np.where(text % 10 == 0, -100, text)
        np.testing.assert_array_equal(dataset[item]["label"], [*label, *[-100] * padding])


def test_labels_of_packed_samples_follow_the_tokens(tmp_path: Path) -> None:
    tokens, labels = labelled(tmp_path, None)
    dataset = GPTDataset(tokens, 0, 6, 7, 9, 3, labels=labels, vocab_size=100)
    for item in range(len(dataset)):
        text = dataset[item]["text"]
        np.testing.assert_array_equal(dataset[item]["label"], np.where(text % 10 == 0, -100, text))


def test_labels_that_do_not_belong_to_the_tokens_are_refused(tmp_path: Path) -> None:
    tokens, labels = labelled(tmp_path, None)
    with pytest.raises(DataError, match="one label for each token"):
        GPTDataset(tokens, 0, 6, 7, 9, 3, labels=IndexedDataset(make(tmp_path, 6)))
    short = {"pack_impl": "unpacked", "allow_chopped": False}
    with pytest.raises(DataError, match="none of the train documents can be used"):
        WholeDocuments(tokens, 0, 6, 0, 9, 3, labels=labels, **short)
    with IndexedDatasetWriter(tmp_path / "ones") as writer:
        for size in SIZES:
            writer.add_document([1] * size)
    ones = IndexedDataset(tmp_path / "ones")
    other = GPTDataset(ones, 0, 6, 28, 1, 3, labels=labels, vocab_size=60)
    with pytest.raises(DataError, match="label: token 65 is outside the vocabulary of 60"):
        other[0]
