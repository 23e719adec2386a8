"""The token files: byte-compatible with the official writer, and safe against damage."""

from __future__ import annotations

import pickle
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron.data import IndexedDataset, IndexedDatasetWriter, merge_datasets
from megatron.data.indexed_dataset import DTYPES, HEADER, MAGIC, bin_path, idx_path
from megatron.data.writer import best_dtype
from megatron.errors import DataError
from tests.conftest import FIXTURES

TOY = FIXTURES / "official_dataset" / "toy_text_document"


def write(prefix: Path, documents: list[list[int]], dtype: str = "u2") -> Path:
    with IndexedDatasetWriter(prefix, dtype) as writer:
        for document in documents:
            writer.add_document(document)
    return prefix


def test_writer_reproduces_the_official_files_byte_for_byte(tmp_path: Path) -> None:
    official = IndexedDataset(TOY)
    with IndexedDatasetWriter(tmp_path / "copy", official.dtype) as writer:
        for document in range(len(official)):
            writer.add_document(official[document])
    for path in (bin_path, idx_path):
        assert path(tmp_path / "copy").read_bytes() == path(TOY).read_bytes()


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=lambda d: d.name)
def test_every_dtype_survives_a_round_trip(tmp_path: Path, dtype: np.dtype) -> None:
    documents = [[1, 2, 3], [100], [7, 0, 5, 4]]
    data = IndexedDataset(write(tmp_path / "d", documents, dtype.str))
    assert data.dtype == dtype
    assert [list(data[i]) for i in range(len(data))] == documents
    assert list(data.get(2, 1, 3)) == [0, 5]
    assert list(data.doc_idx) == [0, 1, 2, 3]


def test_a_document_in_pieces(tmp_path: Path) -> None:
    def packed(*tokens: int) -> bytes:
        return np.array(tokens, "<u2").tobytes()

    with IndexedDatasetWriter(tmp_path / "d") as writer:
        writer.add_packed(packed(1, 2, 3), [2, 1], ends_document=False)
        writer.add_packed(packed(4, 5), [2], ends_document=False)
        writer.add_packed(b"", [])
        writer.add_packed(packed(6, 7, 8), [1, 2])
        with pytest.raises(DataError, match="2 bytes do not hold 2 tokens"):
            writer.add_packed(packed(1), [2])
    data = IndexedDataset(tmp_path / "d")
    assert [list(data[i]) for i in range(len(data))] == [[1, 2], [3, 4, 5, 6], [7, 8]]
    assert list(data.doc_idx) == [0, 1, 2, 3]


def test_merging_keeps_documents_of_several_sequences_and_leaves_out_holes(tmp_path: Path) -> None:
    """As other programs may write them."""
    bin_path(tmp_path / "holes").write_bytes(np.arange(100, dtype="<u2").tobytes())
    arrays = (np.array([3, 5, 2], "<i4"), np.array([20, 0, 100], "<i8"), np.array([0, 2, 3], "<i8"))
    header = HEADER.pack(MAGIC, 1, 8, 3, 3)
    idx_path(tmp_path / "holes").write_bytes(header + b"".join(a.tobytes() for a in arrays))
    write(tmp_path / "a", [[7]])
    merged = merge_datasets([tmp_path / "a", tmp_path / "holes"], tmp_path / "m")
    documents = [list(merged[i]) for i in range(len(merged))]
    assert documents == [[7], [10, 11, 12], [0, 1, 2, 3, 4], [50, 51]]
    assert list(merged.doc_idx) == [0, 1, 3, 4]


def test_a_token_that_does_not_fit_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="70000"), IndexedDatasetWriter(tmp_path / "d") as writer:
        writer.add_document([1, 70000])
    assert list(tmp_path.iterdir()) == []


def test_an_error_keeps_the_previous_dataset(tmp_path: Path) -> None:
    write(tmp_path / "d", [[1, 2, 3]])
    with pytest.raises(RuntimeError), IndexedDatasetWriter(tmp_path / "d") as writer:
        writer.add_document([9])
        raise RuntimeError("interrupted")
    assert list(IndexedDataset(tmp_path / "d")[0]) == [1, 2, 3]
    assert len(list(tmp_path.iterdir())) == 2


def test_dtype_follows_the_vocabulary() -> None:
    assert best_dtype(50257) == np.uint16
    assert best_dtype(65499) == np.uint16
    assert best_dtype(65500) == np.int32
    assert best_dtype(None) == np.int32


def test_datasets_travel_to_spawned_workers(tmp_path: Path) -> None:
    data = pickle.loads(pickle.dumps(IndexedDataset(write(tmp_path / "d", [[1, 2]]))))
    assert list(data[0]) == [1, 2]


def test_merging_keeps_all_documents_in_order(tmp_path: Path) -> None:
    write(tmp_path / "a", [[1], [2, 3]])
    write(tmp_path / "b", [[4, 5]])
    merged = merge_datasets([tmp_path / "b", tmp_path / "a"], tmp_path / "m")
    assert [list(merged[i]) for i in range(3)] == [[4, 5], [1], [2, 3]]
    assert list(merged.doc_idx) == [0, 1, 2, 3]
    whole = write(tmp_path / "whole", [[4, 5], [1], [2, 3]])
    assert idx_path(whole).read_bytes() == idx_path(tmp_path / "m").read_bytes()
    assert bin_path(whole).read_bytes() == bin_path(tmp_path / "m").read_bytes()


def test_merging_refuses_other_dtypes_and_its_own_output(tmp_path: Path) -> None:
    write(tmp_path / "a", [[1]])
    write(tmp_path / "b", [[1]], "i4")
    with pytest.raises(DataError, match="int32"):
        merge_datasets([tmp_path / "a", tmp_path / "b"], tmp_path / "m")
    with pytest.raises(DataError, match="inputs"):
        merge_datasets([tmp_path / "a"], tmp_path / "a")


def corrupt_index(change: str) -> bytes:
    good = idx_path(TOY).read_bytes()
    count = struct.unpack_from("<Q", good, 18)[0]
    pointer = HEADER.size + 4 * count
    return {
        "magic": b"NOTANIDX\0" + good[9:],
        "legacy": b"TNTIDX\0\0\0" + good[9:],
        "version": good[:9] + struct.pack("<Q", 2) + good[17:],
        "dtype": good[:17] + b"\x63" + good[18:],
        "truncated": good[:-5],
        "short": good[:20],
        "no sequences": HEADER.pack(MAGIC, 1, 8, 0, 0),
        "huge count": good[:18] + struct.pack("<Q", 2**63) + good[26:],
        "past the end": good[:pointer] + struct.pack("<q", 10**9) + good[pointer + 8 :],
        "negative pointer": good[:pointer] + struct.pack("<q", -8) + good[pointer + 8 :],
        "overflowing pointer": good[:pointer] + struct.pack("<q", 2**63 - 1) + good[pointer + 8 :],
        "negative size": good[:34] + struct.pack("<i", -1) + good[38:],
        "boundaries": good[:-8] + struct.pack("<q", 10**6),
        "empty": b"",
    }[change]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ("magic", "magic"),
        ("legacy", "old lazy/cached format"),
        ("version", "version 2"),
        ("dtype", "dtype code 99"),
        ("truncated", "truncated"),
        ("short", "magic"),
        ("no sequences", "empty"),
        ("huge count", "truncated"),
        ("past the end", "outside"),
        ("negative pointer", "outside"),
        ("overflowing pointer", "outside"),
        ("negative size", "outside"),
        ("boundaries", "boundaries"),
        ("empty", "empty"),
    ],
)
def test_damage_is_named(tmp_path: Path, change: str, reason: str) -> None:
    idx_path(tmp_path / "d").write_bytes(corrupt_index(change))
    bin_path(tmp_path / "d").write_bytes(bin_path(TOY).read_bytes())
    with pytest.raises(DataError, match=reason) as error:
        IndexedDataset(tmp_path / "d")
    assert str(tmp_path / "d") in str(error.value)


@pytest.mark.parametrize("length", [0, 1000])
def test_a_cut_token_file_is_named(tmp_path: Path, length: int) -> None:
    idx_path(tmp_path / "d").write_bytes(idx_path(TOY).read_bytes())
    bin_path(tmp_path / "d").write_bytes(bin_path(TOY).read_bytes()[:length])
    with pytest.raises(DataError, match=r"d\.bin"):
        IndexedDataset(tmp_path / "d")


def test_missing_files_say_how_to_make_them(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"prepare_data\.py"):
        IndexedDataset(tmp_path / "nothing")
    with pytest.raises(DataError, match="cannot be read"):
        (tmp_path / "folder.idx").mkdir()
        IndexedDataset(tmp_path / "folder")


def read_everything(prefix: Path) -> None:
    data = IndexedDataset(prefix)
    for index in range(len(data)):
        assert len(data[index]) == data.sizes[index]
    assert data.total_tokens >= 0
    data.sizes_digest()


@settings(
    max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    edits=st.lists(st.tuples(st.integers(0, 2**16), st.integers(0, 255)), max_size=6),
    cut=st.one_of(st.none(), st.integers(0, 2500)),
    insert=st.binary(max_size=20),
    bin_cut=st.one_of(st.none(), st.integers(0, 35134)),
)
def test_fuzzed_files_give_only_our_own_error(
    tmp_path: Path,
    edits: list[tuple[int, int]],
    cut: int | None,
    insert: bytes,
    bin_cut: int | None,
) -> None:
    index = bytearray(idx_path(TOY).read_bytes())
    for position, value in edits:
        # half of the edits hit the header, where they matter most
        index[position % 34 if position % 2 else position % len(index)] = value
    index = index[:cut] + insert
    idx_path(tmp_path / "f").write_bytes(index)
    bin_path(tmp_path / "f").write_bytes(bin_path(TOY).read_bytes()[:bin_cut])
    try:
        read_everything(tmp_path / "f")
    except DataError as error:
        assert str(tmp_path / "f") in str(error)


@settings(
    max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    header=st.tuples(
        st.sampled_from([0, 1, 2, 2**64 - 1]),
        st.integers(0, 255),
        st.one_of(st.integers(0, 20), st.integers(0, 2**64 - 1)),
        st.one_of(st.integers(0, 20), st.integers(0, 2**64 - 1)),
    ),
    body=st.binary(max_size=600),
)
def test_invented_headers_give_only_our_own_error(
    tmp_path: Path, header: tuple[int, int, int, int], body: bytes
) -> None:
    idx_path(tmp_path / "f").write_bytes(HEADER.pack(MAGIC, *header) + body)
    bin_path(tmp_path / "f").write_bytes(b"\0" * 64)
    try:
        read_everything(tmp_path / "f")
    except DataError as error:
        assert str(tmp_path / "f") in str(error)
