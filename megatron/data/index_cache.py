"""Arrays kept on disk between runs, used only when they are provably the right ones.

One file per entry, little endian::

    8 bytes  b"KNXINDEX"
    u32      length of the header
    u32      crc32 of the header
    header   JSON: key, arrays (name, dtype, length, offset, crc32), total file size
    arrays   each at a multiple of 64 bytes

An entry is valid only if its key equals the one asked for, its header promises nothing but arrays
of plain numbers inside the file, every checksum fits, and the caller's own check of the numbers
passes; otherwise it is built again. A cache may lie beside data that came from somebody else.
Files are renamed into place when complete, so that readers on the same filesystem see a whole entry
or none, however many ranks and jobs build at once. A lock merely saves them from doing the same
work twice.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import struct
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from filelock import FileLock, Timeout

from megatron.atomic_files import atomic_writer

log = logging.getLogger(__name__)

MAGIC = b"KNXINDEX"
PREAMBLE = struct.Struct("<8sII")
ALIGNMENT = 64
LOCK_TIMEOUT_SECONDS = 600.0
# Never "|O": an object array's bytes are addresses, and numpy follows them.
DTYPES = frozenset({"|u1", "<u2", "<i4", "<u4", "<i8"})
MAX_ARRAYS = 16
MAX_HEADER = 1 << 20
Arrays = dict[str, npt.NDArray[Any]]
Check = Callable[[Arrays], str | None]
"""What is wrong with arrays whose checksums fit; None: nothing."""


class _InvalidEntryError(Exception):
    """Why an entry on disk cannot be used."""


def user_cache_dir() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "kerple-neox" / "index"


def default_cache_dir(prefix: Path) -> Path:
    """Beside the data when that directory can be written, otherwise the user's cache."""
    beside = prefix.parent / "index_cache"
    writable = os.access(beside if beside.is_dir() else prefix.parent, os.W_OK)
    return beside if writable else user_cache_dir()


def cached_arrays(
    key: Mapping[str, Any],
    build: Callable[[], Arrays],
    *,
    directory: Path,
    name: str,
    check: Check | None = None,
) -> Arrays:
    """The arrays for ``key``: from ``directory`` if a valid entry is there, else built and kept."""
    path = directory / f"{name}_{_digest(key)}.index"
    arrays = _try_read(path, key, check)
    if arrays is not None:
        return arrays
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with _lock(path.with_suffix(".lock")):
            arrays = _try_read(path, key, check)
            if arrays is not None:
                return arrays
            built = build()
            write_entry(path, key, built)
    except OSError as error:
        log.warning("index cache %s cannot be written (%s); continuing in memory", directory, error)
        return build()
    stored = _try_read(path, key, check)
    return built if stored is None else stored


def _digest(key: Mapping[str, Any]) -> str:
    text = json.dumps(key, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=12).hexdigest()


def write_entry(path: Path, key: Mapping[str, Any], arrays: Arrays) -> None:
    header = _header(key, arrays)
    with atomic_writer(path) as handle:
        handle.write(PREAMBLE.pack(MAGIC, len(header), zlib.crc32(header)))
        handle.write(header)
        for array in arrays.values():
            handle.write(b"\0" * (_aligned(handle.tell()) - handle.tell()))
            handle.write(np.ascontiguousarray(array).data)


def _header(key: Mapping[str, Any], arrays: Arrays) -> bytes:
    """Offsets depend on the header's length: grow the reserved room until everything fits."""
    entries = [
        {
            "name": name,
            "dtype": array.dtype.str,
            "length": len(array),
            "crc32": zlib.crc32(np.ascontiguousarray(array).data),
        }
        for name, array in arrays.items()
    ]
    room = 512
    while True:
        position = PREAMBLE.size + room
        for entry, array in zip(entries, arrays.values(), strict=True):
            entry["offset"] = _aligned(position)
            position = _aligned(position) + array.nbytes
        content = {"key": dict(key), "arrays": entries, "size": position}
        text = json.dumps(content, sort_keys=True).encode()
        if len(text) <= room:
            return text.ljust(room)
        room *= 2


def _aligned(position: int) -> int:
    return -(-position // ALIGNMENT) * ALIGNMENT


def _try_read(path: Path, key: Mapping[str, Any], check: Check | None) -> Arrays | None:
    try:
        arrays = read_entry(path, key)
        problem = None if check is None else check(arrays)
        if problem is not None:
            raise _InvalidEntryError(problem)
        return arrays
    except FileNotFoundError:
        return None
    except (_InvalidEntryError, OSError) as error:
        log.warning("index cache %s is not usable (%s); building it again", path, error)
        return None


def read_entry(path: Path, key: Mapping[str, Any]) -> Arrays:
    """Map a stored entry after checking all of it."""
    size = path.stat().st_size
    content = _read_header(path, size)
    if content.get("key") != json.loads(json.dumps(dict(key))):
        raise _InvalidEntryError("made for other data")
    if content.get("size") != size:
        raise _InvalidEntryError(f"{size} bytes instead of {content.get('size')!r:.40}")
    entries = content.get("arrays")
    if not isinstance(entries, list) or not 1 <= len(entries) <= MAX_ARRAYS:
        raise _InvalidEntryError("its header lists no arrays")
    arrays: Arrays = {}
    for entry in entries:
        name, dtype, length, offset, checksum = _checked_entry(entry, size)
        array: npt.NDArray[Any] = (
            np.memmap(path, dtype, "r", offset=offset, shape=(length,)).view(np.ndarray)
            if length
            else np.empty(0, dtype)
        )
        if zlib.crc32(array.data) != checksum:
            raise _InvalidEntryError(f"checksum of {name} does not fit")
        arrays[name] = array
    return arrays


def _read_header(path: Path, size: int) -> dict[str, Any]:
    with path.open("rb") as handle:
        preamble = handle.read(PREAMBLE.size)
        if len(preamble) < PREAMBLE.size:
            raise _InvalidEntryError("truncated")
        magic, length, checksum = PREAMBLE.unpack(preamble)
        header = handle.read(min(length, size, MAX_HEADER))
    if magic != MAGIC or len(header) != length or zlib.crc32(header) != checksum:
        raise _InvalidEntryError("not an index cache, or its header is damaged")
    try:
        content = json.loads(header)
    except (ValueError, RecursionError) as error:
        raise _InvalidEntryError("its header is not JSON") from error
    if not isinstance(content, dict):
        raise _InvalidEntryError("its header is not a JSON object")
    return content


def _checked_entry(entry: Any, size: int) -> tuple[str, np.dtype[Any], int, int, int]:
    """Name, type, length, place and checksum of one array, if they can be what they say."""
    if not isinstance(entry, dict):
        raise _InvalidEntryError("an array is not described")
    name, kind = entry.get("name"), entry.get("dtype")
    if not isinstance(name, str) or not isinstance(kind, str) or kind not in DTYPES:
        raise _InvalidEntryError(f"array {name!r:.40} of type {kind!r:.40} is none of ours")
    numbers = [entry.get(field) for field in ("length", "offset", "crc32")]
    if not all(type(number) is int and number >= 0 for number in numbers):
        raise _InvalidEntryError(f"the place of {name!r:.40} is not given in numbers")
    length, offset, checksum = (int(number) for number in numbers if number is not None)
    dtype = np.dtype(kind)
    if offset < PREAMBLE.size or offset % ALIGNMENT or offset + length * dtype.itemsize > size:
        raise _InvalidEntryError(f"{name!r:.40} lies outside the file")
    return name, dtype, length, offset, checksum


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Best effort: after the timeout, or where locks do not exist, we simply build as well."""
    lock = FileLock(path)
    try:
        lock.acquire(timeout=LOCK_TIMEOUT_SECONDS)
    except (Timeout, OSError, NotImplementedError):
        yield
        return
    try:
        yield
    finally:
        lock.release()
