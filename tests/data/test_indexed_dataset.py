"""The token files: every number type, and every damage seen."""

from __future__ import annotations

import pickle
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron.data import IndexedDataset, IndexedDatasetWriter
from megatron.data.indexed_dataset import DTYPES, HEADER, MAGIC, bin_path, idx_path
from megatron.data.preprocess import PreprocessOptions, preprocess
from megatron.errors import DataError
from megatron.tokenizer import build_tokenizer
from tests.data.samples import TOY, write


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=lambda d: d.name)
def test_every_dtype_survives_a_round_trip(tmp_path: Path, dtype: np.dtype) -> None:
    documents = [[1, 2, 3], [100], [7, 0, 5, 4]]
    data = IndexedDataset(write(tmp_path / "d", documents, dtype.str))
    assert data.dtype == dtype
    assert [list(data[i]) for i in range(len(data))] == documents
    assert list(data.get(2, 1, 3)) == [0, 5]
    assert list(data.doc_idx) == [0, 1, 2, 3]


def test_datasets_travel_to_spawned_workers(tmp_path: Path) -> None:
    data = pickle.loads(pickle.dumps(IndexedDataset(write(tmp_path / "d", [[1, 2]]))))
    assert list(data[0]) == [1, 2]


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


@pytest.fixture
def prepared(tmp_path: Path) -> Path:
    """A dataset with its manifest."""
    text = tmp_path / "in.txt"
    text.write_text("\n".join(f"line {n} of the text" for n in range(200)))
    options = PreprocessOptions(keys=["text"], workers=1, splitter="line", progress=False)
    outcome = preprocess([text], tmp_path / "d", build_tokenizer("CharLevelTokenizer"), options)
    return outcome.prefixes[0]


def test_every_flipped_bit_of_an_index_is_seen(prepared: Path) -> None:
    IndexedDataset(prepared)
    path = idx_path(prepared)
    good = path.read_bytes()
    generator = np.random.default_rng(0)
    for _ in range(200):
        damaged = bytearray(good)
        damaged[generator.integers(len(good))] ^= 1 << int(generator.integers(8))
        path.write_bytes(damaged)
        with pytest.raises(DataError, match=r"\.idx: does not match the checksum"):
            IndexedDataset(prepared)


def test_the_tokens_are_verified_on_request(prepared: Path) -> None:
    path = prepared.with_name(prepared.name + ".bin")
    damaged = bytearray(path.read_bytes())
    damaged[100] ^= 1
    path.write_bytes(damaged)
    IndexedDataset(prepared)  # opening does not read the tokens
    with pytest.raises(DataError, match=r"\.bin: does not match the checksum"):
        IndexedDataset(prepared, warmup=True)


@pytest.mark.parametrize("kind", ["bin", "idx"])
@pytest.mark.parametrize("change", [-8, 2])
def test_a_file_of_another_size_than_recorded_is_damaged(
    prepared: Path, kind: str, change: int
) -> None:
    path = prepared.with_name(f"{prepared.name}.{kind}")
    content = path.read_bytes()
    path.write_bytes(content[:change] if change < 0 else content[:50] + b"xx" + content[50:])
    with pytest.raises(DataError, match=rf"\.{kind}: \d+ bytes, but .*\.json recorded \d+"):
        IndexedDataset(prepared)


def test_data_written_anew_is_not_measured_by_an_older_manifest(prepared: Path) -> None:
    with IndexedDatasetWriter(prepared) as writer:
        writer.add_document([1, 2, 3])
    assert IndexedDataset(prepared, warmup=True)[0].tolist() == [1, 2, 3]
