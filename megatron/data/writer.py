"""Writer of NeoX's ``.bin``/``.idx`` pairs, byte for byte as the official one writes them."""

from __future__ import annotations

import json
import os
import shutil
import zlib
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from megatron.atomic_files import (
    atomic_writer,
    make_directories,
    publish,
    remove_leftovers,
    temporary_name,
    write_json,
)
from megatron.data.indexed_dataset import (
    DTYPES,
    HEADER,
    MAGIC,
    IndexedDataset,
    bin_path,
    idx_path,
    manifest_path,
    prefix_of,
    read_manifest,
)
from megatron.errors import DataError

CODES = {dtype: code for code, dtype in DTYPES.items()}
MAX_SEQUENCE = 2**31 - 1
COPY_CHUNK = 1 << 24


def best_dtype(vocab_size: int | None) -> np.dtype[Any]:
    """NeoX's rule: two bytes per token whenever the vocabulary allows it."""
    return np.dtype("<u2") if vocab_size is not None and vocab_size < 65500 else np.dtype("<i4")


class IndexedDatasetWriter:
    """Streams sequences into ``prefix.bin``; the pair appears only when ``close`` succeeds.

    Use as a context manager: an exception leaves nothing behind. The ``.idx`` file is renamed
    last, so its presence means that the dataset is complete.
    """

    def __init__(self, prefix: str | Path, dtype: npt.DTypeLike = np.uint16) -> None:
        self.prefix = prefix_of(prefix)
        self.dtype = np.dtype(dtype).newbyteorder("<")
        if self.dtype not in CODES:
            names = ", ".join(d.name for d in DTYPES.values())
            raise DataError(f"dtype {self.dtype} cannot be stored; use one of {names}")
        make_directories(self.prefix.parent)
        self._sizes = array("i")
        self._boundaries = array("q", [0])
        self._open_tokens = 0  # length so far of a document written in pieces
        self._checksums: dict[str, str] = {}  # CRC-32 of both files, for the manifest
        self._crc = 0
        for path in (bin_path(self.prefix), idx_path(self.prefix)):
            remove_leftovers(path)
        self._temporary = temporary_name(bin_path(self.prefix))
        self._handle: BinaryIO | None = self._temporary.open("wb", buffering=1 << 20)

    @property
    def num_sequences(self) -> int:
        return len(self._sizes)

    @property
    def num_tokens(self) -> int:
        return int(np.frombuffer(self._sizes, np.int32).sum(dtype=np.int64))

    def add_document(self, tokens: Sequence[int] | npt.NDArray[Any]) -> None:
        values = np.asarray(tokens)
        if values.ndim != 1:
            raise DataError(f"a sequence must have one dimension, not shape {values.shape}")
        self._check_range(values)
        self.add_packed(values.astype(self.dtype).tobytes(), [len(values)], keep_empty=True)

    def add_packed(
        self,
        data: bytes | memoryview,
        sizes: Sequence[int],
        *,
        ends_document: bool = True,
        keep_empty: bool = False,
    ) -> None:
        """Documents already packed in this file's dtype; the last may go on in the next call.

        A document without tokens has no sequence, as in GPT-NeoX, unless `keep_empty`.
        """
        if sum(sizes) * self.dtype.itemsize != len(data):
            raise DataError(f"{self.prefix}: {len(data)} bytes do not hold {sum(sizes)} tokens")
        lengths = list(sizes)
        if lengths:
            lengths[0] += self._open_tokens
            self._open_tokens = 0 if ends_document else lengths.pop()
        if lengths and max(lengths) > MAX_SEQUENCE:
            raise DataError(
                f"{self.prefix}: a document of {max(lengths)} tokens; the limit is 2^31-1"
            )
        self._put(data)
        for length in lengths:
            if length or keep_empty:
                self._sizes.append(length)
            self._boundaries.append(len(self._sizes))

    def extend(self, other: IndexedDataset) -> None:
        """Append another dataset of the same dtype, keeping its documents."""
        if other.dtype != self.dtype:
            raise DataError(
                f"{other.prefix}: its tokens are {other.dtype.name}, the others' "
                f"{self.dtype.name}; only datasets made with the same tokenizer can be merged"
            )
        shift = len(self._sizes)
        for start, stop in _contiguous_ranges(other):
            self._copy(bin_path(other.prefix), start, stop)
        self._sizes.frombytes(other.sizes.astype(np.int32).tobytes())
        self._boundaries.frombytes((other.doc_idx[1:] + shift).astype(np.int64).tobytes())

    def _copy(self, path: Path, start: int, stop: int) -> None:
        with path.open("rb") as source:
            source.seek(start)
            while start < stop:
                block = source.read(min(COPY_CHUNK, stop - start))
                if not block:
                    raise DataError(f"{path}: ended while it was being copied")
                self._put(block)
                start += len(block)

    def _put(self, data: Any) -> None:
        if self._handle is None:
            raise DataError(f"{self.prefix}: the writer is closed")
        with self._naming_the_file():
            self._handle.write(data)
        self._crc = zlib.crc32(data, self._crc)

    @contextmanager
    def _naming_the_file(self) -> Iterator[None]:
        """Adds the file's name and the advice to an error of a write."""
        try:
            yield
        except OSError as error:
            raise DataError(
                f"{bin_path(self.prefix)}: cannot be written ({error.strerror}). Free disk "
                "space, or choose another folder."
            ) from error

    def _check_range(self, values: npt.NDArray[Any]) -> None:
        if self.dtype.kind == "f" or not len(values):
            return
        limits = np.iinfo(self.dtype)
        low, high = values.min(), values.max()
        if low < limits.min or high > limits.max:
            raise DataError(
                f"{self.prefix}: token {low if low < limits.min else high} does not fit "
                f"{self.dtype.name}; state the vocabulary size so that a wider type is chosen"
            )

    def close(self) -> None:
        """Write the index and let both files appear; the index last."""
        if self._handle is None:
            return
        if not self._sizes:
            self.abort()
            raise DataError(f"{self.prefix}: no documents were added, nothing is written")
        try:
            with self._naming_the_file():
                self._handle.flush()
                os.fsync(self._handle.fileno())
        except DataError:
            self.abort()
            raise
        self._handle.close()
        self._handle = None
        index = self._index()
        self._checksums = {"bin_crc32": f"{self._crc:08x}", "idx_crc32": f"{zlib.crc32(index):08x}"}
        try:
            with atomic_writer(idx_path(self.prefix)) as handle:
                handle.write(index)
                handle.flush()
                os.fsync(handle.fileno())  # a full disk shows before anything is replaced
                # An older index or older checksums must not stand beside the new tokens.
                idx_path(self.prefix).unlink(missing_ok=True)
                manifest_path(self.prefix).unlink(missing_ok=True)
                publish(self._temporary, bin_path(self.prefix))
        finally:
            self._temporary.unlink(missing_ok=True)

    def _index(self) -> bytes:
        sizes = np.frombuffer(self._sizes, np.int32)
        pointers = np.zeros(len(sizes), np.int64)
        np.cumsum(sizes[:-1], dtype=np.int64, out=pointers[1:])
        pointers *= self.dtype.itemsize
        boundaries = np.frombuffer(self._boundaries, np.int64)
        header = HEADER.pack(MAGIC, 1, CODES[self.dtype], len(sizes), len(boundaries))
        arrays = ((sizes, "<i4"), (pointers, "<i8"), (boundaries, "<i8"))
        return header + b"".join(array.astype(kind).tobytes() for array, kind in arrays)

    def write_manifest(self, content: dict[str, Any]) -> None:
        """The JSON beside the closed pair: ``content``, and what the writer knows itself."""
        measured = {
            "format": 1,
            "documents": self.num_sequences,
            "tokens": self.num_tokens,
            "bin_bytes": bin_path(self.prefix).stat().st_size,
            "idx_bytes": idx_path(self.prefix).stat().st_size,
        }
        write_json(manifest_path(self.prefix), measured | self._checksums | content)

    def abort(self) -> None:
        """Drop everything; the previous dataset under this name, if any, stays as it was."""
        if self._handle is not None:
            with suppress(OSError):  # on a full disk, what is still buffered cannot be written
                self._handle.close()
            self._handle = None
        self._temporary.unlink(missing_ok=True)

    def __enter__(self) -> IndexedDatasetWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self.abort()


class MMapIndexedDatasetBuilder(IndexedDatasetWriter):
    """GPT-NeoX's names: items of a document, then its end; `finalize` writes the index."""

    def add_item(self, tokens: Any) -> None:
        values = np.asarray(tokens)
        self._check_range(values)
        self._put(values.astype(self.dtype).tobytes())
        self._sizes.append(len(values))

    def end_document(self) -> None:
        self._boundaries.append(len(self._sizes))

    def merge_file_(self, another_file: str | Path) -> None:
        self.extend(IndexedDataset(another_file))

    def finalize(self, index_file: str | Path) -> None:
        """The index is beside the tokens: `index_file` must be that path."""
        if prefix_of(index_file) != self.prefix:
            raise DataError(f"{index_file}: the index of {self.prefix}.bin must lie beside it")
        self.close()


def merge_datasets(inputs: Sequence[str | Path], output: str | Path) -> IndexedDataset:
    """Concatenate datasets in the given order into a new one, made with one tokenizer."""
    if not inputs:
        raise DataError("no datasets to merge were given")
    prefixes = [prefix_of(path) for path in inputs]
    tokenizer = _common_tokenizer(prefixes)
    output = prefix_of(output)
    datasets = [IndexedDataset(prefix) for prefix in inputs]
    if any(dataset.prefix.resolve() == output.resolve() for dataset in datasets):
        raise DataError(f"{output}: the merged dataset cannot replace one of its inputs")
    needed = sum(d.total_tokens * d.dtype.itemsize for d in datasets)
    make_directories(output.parent)
    free = shutil.disk_usage(output.parent).free
    if needed > free:
        raise DataError(f"{output}: needs {needed} bytes, only {free} are free on that disk")
    with IndexedDatasetWriter(output, datasets[0].dtype) as writer:
        for dataset in datasets:
            writer.extend(dataset)
    if tokenizer is not None:
        merged_from = [path.name for path in prefixes]
        writer.write_manifest({"tokenizer": tokenizer, "merged_from": merged_from})
    return IndexedDataset(output)


def _common_tokenizer(inputs: Sequence[Path]) -> dict[str, object] | None:
    """The tokenizer of all inputs, None when one does not say; different ones are refused."""
    described = [(path, (read_manifest(path) or {}).get("tokenizer")) for path in inputs]
    known = {
        json.dumps(tokenizer, sort_keys=True): path for path, tokenizer in described if tokenizer
    }
    if len(known) > 1:
        raise DataError(
            "these datasets were made with different tokenizers: "
            + ", ".join(str(path) for path in known.values())
        )
    return described[0][1] if all(tokenizer for _, tokenizer in described) else None


def _contiguous_ranges(dataset: IndexedDataset) -> Iterator[tuple[int, int]]:
    """Byte ranges without a gap between sequences; normal writers leave none, so one range."""
    starts = dataset.pointers
    stops = starts + dataset.sizes * np.int64(dataset.dtype.itemsize)
    breaks = np.flatnonzero(starts[1:] != stops[:-1])
    return zip(
        [int(starts[0]), *starts[breaks + 1].tolist()],
        [*stops[breaks].tolist(), int(stops[-1])],
        strict=True,
    )
