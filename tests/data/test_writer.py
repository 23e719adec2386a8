"""The writer: byte for byte as the official one, complete or absent; and merging."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from megatron.data import IndexedDataset, IndexedDatasetWriter, merge_datasets
from megatron.data.indexed_dataset import (
    HEADER,
    MAGIC,
    MMapIndexedDataset,
    bin_path,
    idx_path,
    make_builder,
    make_dataset,
)
from megatron.data.writer import best_dtype
from megatron.errors import DataError
from tests.data.samples import TOY, write


def test_writer_reproduces_the_official_files_byte_for_byte(tmp_path: Path) -> None:
    official = IndexedDataset(TOY)
    with IndexedDatasetWriter(tmp_path / "copy", official.dtype) as writer:
        for document in range(len(official)):
            writer.add_document(official[document])
    for path in (bin_path, idx_path):
        assert path(tmp_path / "copy").read_bytes() == path(TOY).read_bytes()


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


def test_what_a_killed_preprocessing_left_is_removed_by_the_next(tmp_path: Path) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    left = tmp_path / f".d.bin.{gone.pid}.0123abcd.tmp"
    left.write_bytes(b"x" * 100)
    recent = tmp_path / f".d.bin.{gone.pid}.89abcdef.tmp"
    recent.write_bytes(b"x")
    living = tmp_path / f".d.bin.{os.getpid()}.01234567.tmp"
    living.write_bytes(b"x")
    other = tmp_path / f".e.bin.{gone.pid}.0123abcd.tmp"
    other.write_bytes(b"x")
    for path in (left, living, other):
        os.utime(path, (0, 0))
    with IndexedDatasetWriter(tmp_path / "d") as writer:
        writer.add_document([1, 2])
    assert not left.exists()
    assert recent.exists()
    assert living.exists()
    assert other.exists()


@pytest.mark.parametrize("documents", [100, 1])
def test_a_full_disk_names_the_file_and_leaves_nothing(tmp_path: Path, documents: int) -> None:
    """A limit of the size of files stands for the disk's end; one document waits for `close`."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 12, before[1]))
    try:
        with (
            pytest.raises(DataError, match=r"x\.bin: cannot be written .*Free disk space"),
            IndexedDatasetWriter(tmp_path / "x", np.uint16) as writer,
        ):
            for _ in range(documents):
                writer.add_document(np.zeros(10_000, np.uint16))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)
    assert list(tmp_path.iterdir()) == []


def test_gpt_neoxs_builder_and_reader(tmp_path: Path) -> None:
    builder = make_builder(f"{tmp_path / 'a'}.bin", impl="mmap", vocab_size=100)
    builder.add_item(np.array([1, 2, 3]))
    builder.add_item([4])
    builder.end_document()
    builder.finalize(f"{tmp_path / 'a'}.idx")
    dataset = make_dataset(tmp_path / "a", "mmap")
    assert [list(item) for item in dataset] == [[1, 2, 3], [4]]
    assert dataset.doc_idx.tolist() == [0, 2]
    assert dataset.get(0, offset=1, length=1).tolist() == [2]
    assert MMapIndexedDataset.exists(tmp_path / "a")
    with pytest.raises(DataError, match="only mmap"):
        make_dataset(tmp_path / "a", "lazy")
