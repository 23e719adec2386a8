"""Reader of NeoX's memory-mapped token files, ``prefix.bin`` and ``prefix.idx``.

The index file, little endian, without padding::

    9 bytes  b"MMIDIDX\\0\\0"
    u64      version, always 1
    u8       dtype code, see DTYPES
    u64      number of sequences n
    u64      number of document boundaries d
    i32[n]   length of each sequence in tokens
    i64[n]   byte position of each sequence in the .bin file
    i64[d]   document boundaries, as sequence numbers

The index is checked when a file is opened, so that damage raises a ``DataError`` with the file and
the reason before a run starts. Tokens are compared with their checksum on ``warmup`` only, which
reads all of them.
"""

from __future__ import annotations

import hashlib
import mmap
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron.atomic_files import read_json
from megatron.errors import DataError
from megatron.tokenizer import Tokenizer

MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")
DTYPES: dict[int, np.dtype[Any]] = {
    1: np.dtype("<u1"),
    2: np.dtype("<i1"),
    3: np.dtype("<i2"),
    4: np.dtype("<i4"),
    5: np.dtype("<i8"),
    6: np.dtype("<f4"),
    7: np.dtype("<f8"),
    8: np.dtype("<u2"),
}
LEGACY_MAGIC = b"TNTIDX\x00\x00"  # fairseq's lazy and cached formats
CHECK_CHUNK = 1 << 20
SUM_BLOCK = 1 << 24
REBUILD = "Build it again with prepare_data.py or tools/preprocess_data.py."


def prefix_of(path: str | Path) -> Path:
    """The prefix of a dataset, also when the user gave one of its two files."""
    path = Path(path)
    return path.with_suffix("") if path.suffix in (".bin", ".idx") else path


def bin_path(prefix: str | Path) -> Path:
    return Path(f"{prefix}.bin")


def idx_path(prefix: str | Path) -> Path:
    return Path(f"{prefix}.idx")


class IndexedDataset:
    """Sequences of tokens (normally one per document) in a memory-mapped file."""

    def __init__(self, prefix: str | Path, *, warmup: bool = False) -> None:
        self.prefix = prefix_of(prefix)
        self._index = _map_file(idx_path(self.prefix))
        manifest = read_json(manifest_path(self.prefix)) or {}
        _check_recorded(self._index, idx_path(self.prefix), manifest, contents=True)
        self._read_index()
        self._tokens = _map_file(bin_path(self.prefix))
        if warmup:  # a byte of each page: the file is in memory before training starts
            np.frombuffer(self._tokens, np.uint8)[:: mmap.PAGESIZE].sum()
        _check_recorded(self._tokens, bin_path(self.prefix), manifest, contents=warmup)
        self._check_pointers()
        self._check_boundaries()

    def _read_index(self) -> None:
        path, buffer = idx_path(self.prefix), self._index
        if bytes(buffer[:8]) == LEGACY_MAGIC:
            raise DataError(
                f"{path}: this is the old lazy/cached format; only mmap files are read. {REBUILD}"
            )
        if len(buffer) < HEADER.size or bytes(buffer[:9]) != MAGIC:
            raise DataError(f"{path}: not an index file (bad magic number). {REBUILD}")
        _, version, code, count, boundaries = HEADER.unpack(buffer[: HEADER.size])
        if version != 1:
            raise DataError(f"{path}: version {version} is unknown, expected 1. {REBUILD}")
        if code not in DTYPES:
            raise DataError(f"{path}: dtype code {code} is unknown, expected 1 to 8. {REBUILD}")
        if count == 0:
            raise DataError(f"{path}: the dataset is empty (0 sequences). {REBUILD}")
        expected = HEADER.size + 12 * count + 8 * boundaries
        if expected != len(buffer):
            raise DataError(
                f"{path}: {len(buffer)} bytes, but its header promises {expected}; "
                f"the file is truncated or damaged. {REBUILD}"
            )
        self.dtype = DTYPES[code]
        offset = HEADER.size
        # The header has an odd length: an aligned copy of the sizes makes every use of them fast.
        self.sizes: npt.NDArray[np.int32] = np.frombuffer(buffer, "<i4", count, offset).copy()
        self.pointers: npt.NDArray[np.int64] = np.frombuffer(
            buffer, "<i8", count, offset + 4 * count
        )
        self.doc_idx: npt.NDArray[np.int64] = np.frombuffer(
            buffer, "<i8", boundaries, offset + 12 * count
        )

    def _check_pointers(self) -> None:
        limit, width = len(self._tokens), self.dtype.itemsize
        for start in range(0, len(self), CHECK_CHUNK):
            sizes = self.sizes[start : start + CHECK_CHUNK].astype(np.int64)
            pointers = self.pointers[start : start + CHECK_CHUNK]
            # Compared without adding to the pointer, which a damaged file could overflow.
            bad = (sizes < 0) | (pointers < 0) | (pointers > limit - width * sizes)
            if bad.any():
                which = int(np.argmax(bad))
                raise DataError(
                    f"{idx_path(self.prefix)}: sequence {start + which} ({sizes[which]} tokens at "
                    f"byte {pointers[which]}) is outside {bin_path(self.prefix)} "
                    f"({limit} bytes); one of the two is truncated or damaged. {REBUILD}"
                )

    def _check_boundaries(self) -> None:
        for start in range(0, len(self.doc_idx), CHECK_CHUNK):
            part = self.doc_idx[start : start + CHECK_CHUNK + 1]
            if part.min() < 0 or part.max() > len(self) or (part[1:] < part[:-1]).any():
                raise DataError(
                    f"{idx_path(self.prefix)}: document boundaries are not ascending sequence "
                    f"numbers; the file is damaged. {REBUILD}"
                )

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, index: int) -> npt.NDArray[Any]:
        return self.get(index)

    def get(self, index: int, start: int = 0, stop: int | None = None) -> npt.NDArray[Any]:
        """Tokens ``start`` to ``stop`` (exclusive) of one sequence; a read-only view."""
        if not -len(self) <= index < len(self):
            raise IndexError(f"sequence {index} of {len(self)}")
        size = int(self.sizes[index])
        stop = size if stop is None else min(stop, size)
        offset = int(self.pointers[index]) + start * self.dtype.itemsize
        return np.frombuffer(self._tokens, self.dtype, max(0, stop - start), offset)

    @property
    def total_tokens(self) -> int:
        return int(self.sizes.sum(dtype=np.int64))

    def sizes_digest(self) -> str:
        """Hash of the sequence lengths: all that the order of samples depends on."""
        return hashlib.blake2b(self.sizes.data, digest_size=16).hexdigest()

    def __reduce__(self) -> tuple[type[IndexedDataset], tuple[Path]]:
        # Maps cannot be pickled: a worker process that is spawned opens the files itself.
        return IndexedDataset, (self.prefix,)


# GPT-NeoX's names, for scripts that were written for it.


class MMapIndexedDataset(IndexedDataset):
    """GPT-NeoX's reader: part of a sequence is read by `offset` and `length`."""

    def get(self, idx: int, offset: int = 0, length: int | None = None) -> npt.NDArray[Any]:
        return super().get(idx, offset, None if length is None else offset + length)

    @staticmethod
    def exists(path: str | Path) -> bool:
        return bin_path(path).is_file() and idx_path(path).is_file()


def make_dataset(path: str | Path, impl: str = "mmap", skip_warmup: bool = True) -> IndexedDataset:
    """GPT-NeoX's function: the dataset at a path without .bin and .idx."""
    _check_implementation(impl)
    return MMapIndexedDataset(path, warmup=not skip_warmup)


def make_builder(out_file: str | Path, impl: str = "mmap", vocab_size: int | None = None) -> Any:
    """GPT-NeoX's function: a writer with add_item, end_document, merge_file_ and finalize."""
    from megatron.data.writer import MMapIndexedDatasetBuilder, best_dtype

    _check_implementation(impl)
    return MMapIndexedDatasetBuilder(out_file, best_dtype(vocab_size))


def _check_implementation(impl: str) -> None:
    if impl not in ("mmap", "infer"):
        raise DataError(f"dataset impl {impl!r:.80}: only mmap files are read and written")


def _map_file(path: Path) -> mmap.mmap:
    try:
        with path.open("rb") as handle:
            return mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ)
    except FileNotFoundError:
        raise DataError(
            f"{path}: no such file. Give the path without .bin/.idx, or create it with "
            "prepare_data.py or tools/preprocess_data.py."
        ) from None
    except ValueError:
        raise DataError(f"{path}: the file is empty. {REBUILD}") from None
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from error


def _check_recorded(
    buffer: mmap.mmap, path: Path, manifest: dict[str, Any], *, contents: bool
) -> None:
    """Compare a file with its size and CRC-32 when it was written, if the manifest has them."""
    name, size = manifest_path(path).name, manifest.get(f"{path.suffix[1:]}_bytes")
    checksum = manifest.get(f"{path.suffix[1:]}_crc32")
    if checksum is None:
        return
    if len(buffer) != size:
        raise DataError(
            f"{path}: {len(buffer)} bytes, but {name} recorded {size!r:.40}; the file is damaged. "
            f"{REBUILD} If another program wrote the data anew, delete {manifest_path(path)}."
        )
    value = 0
    with memoryview(buffer) as view:
        for start in range(0, len(view) if contents else 0, SUM_BLOCK):
            value = zlib.crc32(view[start : start + SUM_BLOCK], value)
    if contents and f"{value:08x}" != checksum:
        raise DataError(
            f"{path}: does not match the checksum in {name}; the file is damaged. {REBUILD}"
        )


# The small JSON beside a dataset: what it holds and which tokenizer made it.


def manifest_path(prefix: str | Path) -> Path:
    return Path(f"{prefix_of(prefix)}.json")


def describe_tokenizer(tokenizer: Tokenizer) -> dict[str, Any]:
    reading = {} if tokenizer.end_of_text is None else {"end_of_text": tokenizer.end_of_text}
    return {
        "type": tokenizer.name,
        "vocab_size": tokenizer.vocab_size,
        "eod": tokenizer.eod,
        "fingerprint": tokenizer.fingerprint,
        **reading,
    }


def read_manifest(prefix: str | Path) -> dict[str, Any] | None:
    """The manifest if it is there, readable and belongs to the files as they are now."""
    content = read_json(manifest_path(prefix))
    try:
        sizes = [path(prefix_of(prefix)).stat().st_size for path in (bin_path, idx_path)]
    except OSError:
        return None
    if content is None or [content.get("bin_bytes"), content.get("idx_bytes")] != sizes:
        return None
    return content


def check_tokenizer(prefix: str | Path, tokenizer: Tokenizer) -> None:
    """Refuse data made with another tokenizer, when the manifest names it.

    The manifest also records the end-of-document id, which an older rule may have chosen.
    """
    manifest = read_manifest(prefix)
    if manifest is None:
        return
    made, have = manifest.get("tokenizer", {}), describe_tokenizer(tokenizer)
    if not isinstance(made, dict):
        return
    if made.get("fingerprint") == have["fingerprint"]:
        tokenizer.eod = int(made.get("eod", tokenizer.eod))
        return
    raise DataError(
        f"{prefix}: prepared with {made.get('type')} (vocabulary {made.get('vocab_size')}, "
        f"{made.get('fingerprint')}), but the config's tokenizer is {have['type']} (vocabulary "
        f"{have['vocab_size']}, {have['fingerprint']}). Set tokenizer_type, vocab_file and "
        "merge_file to the ones it was prepared with, or prepare the data again."
    )
