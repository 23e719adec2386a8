"""Arrays cached on disk between runs, used only after their key and checksums are verified.

One file per entry, little endian::

    8 bytes  b"KNXINDEX"
    u32      length of the header
    u32      crc32 of the header
    header   JSON: key, arrays (name, dtype, length, offset, crc32), total file size
    arrays   each at a multiple of 64 bytes

An entry is valid only if its key equals the requested one, its header describes only arrays of
plain numbers inside the file, every checksum matches, and the caller's own check of the numbers
passes; otherwise it is built again. A cache beside downloaded data is not trusted.
Files are renamed into place when complete, so that readers on the same filesystem see a whole entry
or none, however many ranks and jobs build at once. A lock only avoids duplicate work.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import struct
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from filelock import FileLock, Timeout
from pydantic import BaseModel, Field

from megatron.atomic_files import atomic_writer

log = logging.getLogger(__name__)

MAGIC = b"KNXINDEX"
PREAMBLE = struct.Struct("<8sII")
ALIGNMENT = 64
LOCK_TIMEOUT_SECONDS = 600.0
MAX_HEADER = 1 << 20
Arrays = dict[str, npt.NDArray[Any]]


class _Entry(BaseModel):
    """One array of plain numbers."""

    name: str
    # Never "|O": an object array's bytes are addresses, and numpy follows them.
    dtype: Literal["|u1", "<u2", "<i4", "<u4", "<i8"]
    length: int = Field(ge=0)
    offset: int = Field(ge=PREAMBLE.size, multiple_of=ALIGNMENT)
    crc32: int


class _Header(BaseModel):
    key: dict[str, Any]
    arrays: list[_Entry] = Field(min_length=1, max_length=16)
    size: int


class _InvalidEntryError(Exception):
    """Why an entry on disk cannot be used."""


def cache_directory(chosen: str | Path | None, prefix: Path) -> Path:
    """The configured directory; else beside the data if it is writable, else the user's cache."""
    if chosen is not None:
        return Path(chosen).expanduser()
    beside = prefix.parent / "index_cache"
    if os.access(beside if beside.is_dir() else prefix.parent, os.W_OK):
        return beside
    return (
        Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "kerple-neox" / "index"
    )


def cached_arrays(
    key: Mapping[str, Any],
    build: Callable[[], Arrays],
    *,
    directory: Path,
    name: str,
    lengths: Mapping[str, int],
    check: Callable[[Arrays], str | None],
) -> Arrays:
    """The arrays for ``key``: from ``directory`` if a valid entry is there, else built and kept.

    They have these names and ``lengths``. ``check`` returns what is wrong with arrays of an entry
    whose checksums fit; None: nothing.
    """

    def stored() -> Arrays | None:
        try:
            arrays = read_entry(path, key)
            if {array: len(numbers) for array, numbers in arrays.items()} != dict(lengths):
                raise _InvalidEntryError("it holds other arrays, or arrays of other lengths")
            if problem := check(arrays):
                raise _InvalidEntryError(problem)
            return arrays
        except FileNotFoundError:
            return None
        except (_InvalidEntryError, OSError) as error:
            log.warning("index cache %s is not usable (%s); building it again", path, error)
            return None

    digest = hashlib.blake2b(json.dumps(key, sort_keys=True).encode(), digest_size=12)
    path = directory / f"{name}_{digest.hexdigest()}.index"
    if (arrays := stored()) is not None:
        return arrays
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with _lock(path.with_suffix(".lock")):
            if (arrays := stored()) is not None:
                return arrays
            built = build()
            write_entry(path, key, built)
    except OSError as error:
        log.warning("index cache %s cannot be written (%s); continuing in memory", directory, error)
        return build()
    return stored() or built  # mapped, so that ranks share the memory


def write_entry(path: Path, key: Mapping[str, Any], arrays: Arrays) -> None:
    header = _header(key, arrays)
    with atomic_writer(path) as handle:
        handle.write(PREAMBLE.pack(MAGIC, len(header), zlib.crc32(header)))
        handle.write(header)
        for array in arrays.values():
            handle.write(b"\0" * (_aligned(handle.tell()) - handle.tell()))
            handle.write(np.ascontiguousarray(array).data)


def _header(key: Mapping[str, Any], arrays: Arrays) -> bytes:
    """Offsets depend on the header's length: grow the reserved space until everything fits."""
    entries = [
        {
            "name": name,
            "dtype": array.dtype.str,
            "length": len(array),
            "crc32": zlib.crc32(np.ascontiguousarray(array).data),
        }
        for name, array in arrays.items()
    ]
    space = 512
    while True:
        position = PREAMBLE.size + space
        for entry, array in zip(entries, arrays.values(), strict=True):
            entry["offset"] = _aligned(position)
            position = _aligned(position) + array.nbytes
        content = {"key": dict(key), "arrays": entries, "size": position}
        text = json.dumps(content, sort_keys=True).encode()
        if len(text) <= space:
            return text.ljust(space)
        space *= 2


def _aligned(position: int) -> int:
    return -(-position // ALIGNMENT) * ALIGNMENT


def read_entry(path: Path, key: Mapping[str, Any]) -> Arrays:
    """Map a stored entry after checking all of it."""
    size = path.stat().st_size
    header = _read_header(path, size)
    if header.key != json.loads(json.dumps(dict(key))):
        raise _InvalidEntryError("made for other data")
    if header.size != size:
        raise _InvalidEntryError(f"{size} bytes instead of {header.size}")
    arrays: Arrays = {}
    for entry in header.arrays:
        dtype = np.dtype(entry.dtype)
        if entry.offset + entry.length * dtype.itemsize > size:
            raise _InvalidEntryError(f"{entry.name!r:.40} is outside the file")
        array: npt.NDArray[Any] = np.empty(0, dtype)
        if entry.length:
            shape = (entry.length,)
            array = np.memmap(path, dtype, "r", entry.offset, shape).view(np.ndarray)
        if zlib.crc32(array.data) != entry.crc32:
            raise _InvalidEntryError(f"checksum of {entry.name:.40} does not fit")
        arrays[entry.name] = array
    return arrays


def _read_header(path: Path, size: int) -> _Header:
    with path.open("rb") as handle:
        preamble = handle.read(PREAMBLE.size)
        if len(preamble) < PREAMBLE.size:
            raise _InvalidEntryError("truncated")
        magic, length, checksum = PREAMBLE.unpack(preamble)
        text = handle.read(min(length, size, MAX_HEADER))
    if magic != MAGIC or len(text) != length or zlib.crc32(text) != checksum:
        raise _InvalidEntryError("not an index cache, or its header is damaged")
    try:
        return _Header.model_validate(json.loads(text), strict=True)
    except (ValueError, RecursionError) as error:
        raise _InvalidEntryError("its header is not one of this program") from error


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Best effort: after the timeout, or without file locks, the arrays are built twice."""
    lock = FileLock(path)
    with suppress(Timeout, OSError, NotImplementedError):
        lock.acquire(timeout=LOCK_TIMEOUT_SECONDS)
    try:
        yield
    finally:
        lock.release()
